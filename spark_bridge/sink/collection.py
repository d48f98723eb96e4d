"""Tasks' side of writing into a collection: chunk after chunk to the Proxy, which knows what it has seen already."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, cast

from ...runtime.arrow import encode_rows
from ...runtime.catalog import Collection
from ...runtime.errors import InvalidRequest, InvalidRows, OutcomeUnknown
from ...runtime.names import physical
from ...runtime.rpc import Caller, Reply
from ...runtime.wal import Wal
from .chunks import CHUNK_BYTES, Chunk
from .ledger import DIGEST_MASK, Batch
from .patience import persistently
from .rows import Array, shown

CHUNK_BITS: Final = 20  # of a producer's number; the rest counts batches
CALL_S: Final = 30.0
_CHAIN: Final = 0x9E3779B97F4A7C15
RECORD_OVERHEAD_BYTES: Final = 16 * 1024  # of a message's limit, for what is beside the rows


class Task(NamedTuple):
    """What a task's rows are recognised by: whose write it is (a query, an application or a job), which batch of it,
    and which partition. `run` is the query's id, by which a checkpoint is known; empty for `df.write`."""

    writer: str
    batch: int
    partition: int
    run: str = ""


class Division(NamedTuple):
    """How rows must be divided so that each chunk is written whole or not at all."""

    shards: int
    chunk_bytes: int


async def division(wal: Wal, collection: Collection) -> Division:
    """Where several channels are written atomically, chunks may be large and of all shards. Elsewhere each chunk must
    be one message of one channel: were a part of it missing, the retry would be taken for a repetition."""
    if wal.capabilities.atomic_batches:
        return Division(1, CHUNK_BYTES)
    limits = [(await wal.describe(physical(name))).max_message_bytes for name in collection.vchannels]
    columns = len(collection.schema.fields) + 2
    return Division(collection.shards, max(min(limits) - RECORD_OVERHEAD_BYTES - 512 * columns, 1))


class ChunkSender:
    """Writes the chunks of one task, strictly one after the other: a chunk is sent when the one before is durable. So
    the Proxy, which remembers a producer's newest numbers only, has seen whatever it does not remember any more. What
    it has forgotten is not compared by itself: the digest of each chunk stands for all chunks before it, too."""

    def __init__(
        self,
        caller: Callable[[], Awaitable[Caller]],
        collection: Collection,
        task: Task,
        deadline_s: float,
        *,
        allow_old: bool = False,
    ) -> None:
        """`allow_old`: option `allowOldBatches`, a batch behind which a later one was written counts as written."""
        self._caller = caller
        self._collection = collection
        self._task = task
        self._deadline_s = deadline_s
        self._allow_old = allow_old
        self._digest = 0
        self._forgotten = False

    async def send(self, number: int, chunk: Chunk) -> None:
        """Write chunk `number`, if that did not happen yet; repeat it where that may help, for `deadline_s`.

        Raises `InvalidRequest` when another attempt wrote other rows under that number, or a later batch is there
        already, `InvalidRows` for rows that do not fit the collection, `DeadlineExceeded`, and what the Proxy refuses
        for good.
        """
        if number >> CHUNK_BITS:
            raise InvalidRequest(f"a task writes at most {1 << CHUNK_BITS} chunks: use more partitions")
        writer, batch, partition, _ = self._task
        self._digest = (self._digest * _CHAIN + chunk.digest) & DIGEST_MASK or 1
        params = {
            "collection": self._collection.name,
            "id": self._collection.id,
            "schema_version": self._collection.schema.version,
            "producer": f"spark/{writer}/{self._collection.id}/{partition}",
            "pseq": batch << CHUNK_BITS | number,
            "digest": self._digest,
        }
        body = encode_rows(chunk.rows)

        async def write() -> Reply:
            caller = await self._caller()
            return await caller.call("proxy", "write", params, body, deadline_s=min(self._deadline_s, CALL_S))

        try:
            reply = await persistently(write, f"batch {batch}", self._deadline_s)
        except OutcomeUnknown as error:
            if "forgotten" not in error.fields:
                raise
            self._forgotten = not self._passed_over(cast(int, error.fields["forgotten"]))
            return  # it did happen, long ago
        except InvalidRows as error:
            raise self._explained(error, chunk) from error
        self._compare(reply.values["rows"], reply.values["digest"], number, chunk)

    def finish(self) -> None:
        """All chunks are sent. Raises `InvalidRequest` when the last of them was written so long ago that nothing tells
        whether these were the rows."""
        if self._forgotten:
            raise InvalidRequest(
                f"batch {self._task.batch} was begun so long ago that nothing tells any more whether partition "
                f"{self._task.partition} had these rows: look what the collection has, then begin with a new "
                "checkpoint or txnVersion"
            )

    def _passed_over(self, forgotten: int) -> bool:
        """Whether a later batch was written, so that this one counts as written. Raises `InvalidRequest` for such a
        batch unless that is allowed."""
        if forgotten >> CHUNK_BITS <= self._task.batch:
            return False
        if not self._allow_old:
            Batch(self._task.batch, self._task.run).check_repeats(Batch(forgotten >> CHUNK_BITS, self._task.run))
        return True

    def _compare(self, rows: int, digest: int, number: int, chunk: Chunk) -> None:
        self._forgotten = False
        if (rows, digest) == (chunk.rows.num_rows, self._digest):
            return
        raise InvalidRequest(
            f"batch {self._task.batch} has been written in part by an earlier attempt, with other rows: chunk {number} "
            f"of partition {self._task.partition} had {rows} rows, now it has {chunk.rows.num_rows}, or other values. "
            "Going on would lose rows or double them. A batch that runs again must give the same rows in the same "
            "partitions: look for functions like rand() or uuid(), for a source that was divided differently "
            "(minPartitions, history: put a repartition by the key behind it), and for partitions of more than 64 MiB "
            "in one batch whose order changes. Undo that, or begin with a new checkpoint or txnVersion"
        )

    def _explained(self, error: InvalidRows, chunk: Chunk) -> InvalidRows:
        """The Proxy counts the rows of a chunk; the user knows keys."""
        row, key = error.fields.get("row"), self._collection.schema.primary_key
        if isinstance(row, int) and 0 <= row < chunk.rows.num_rows:
            named = f"{key}={shown(cast(Array, chunk.rows.column(key)), row)}"
            return InvalidRows(f"{error.message} (the row with {named})", **error.fields)
        if "column" in error.fields:
            return error
        return InvalidRows(
            f"collection {self._collection.name!r} was dropped or changed while batch {self._task.batch} was being "
            f"written ({error.message}): start the query again",
            **error.fields,
        )
