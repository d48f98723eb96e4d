"""The tasks' side of writing into a collection: chunk after chunk to the Proxy, which deduplicates them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, cast

from ...runtime.catalog.catalog import Collection
from ...runtime.errors import InvalidRequest, InvalidRows, OutcomeUnknown
from ...runtime.log.names import pchannel_of
from ...runtime.log.wal import Wal
from ...runtime.rows.row_codec import encode_rows
from ...runtime.rpc.client import RpcClient
from ...runtime.rpc.protocol import Reply
from .chunks import CHUNK_BYTES, WriteChunk
from .ledger import DIGEST_MASK, MicroBatch
from .retry import retry_until
from .rows import Array, shown

CHUNK_BITS: Final = 20  # of a producer's number; the rest counts batches
CALL_S: Final = 30.0
_CHAIN: Final = 0x9E3779B97F4A7C15
RECORD_OVERHEAD_BYTES: Final = 16 * 1024  # of a message's limit, for all but the rows


class Task(NamedTuple):
    """The identity of a task's rows: the writer (a query, an application or a job), the batch and the partition. `run`
    is the query's id, which identifies its checkpoint; empty for `df.write`."""

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
    be one message of one channel: were a part of it missing, the retry would count as a repetition."""
    if wal.capabilities.atomic_batches:
        return Division(1, CHUNK_BYTES)
    limits = [(await wal.describe(pchannel_of(name))).max_message_bytes for name in collection.vchannels]
    columns = len(collection.schema.fields) + 2
    return Division(collection.shards, max(min(limits) - RECORD_OVERHEAD_BYTES - 512 * columns, 1))


class ChunkSender:
    """Writes the chunks of one task, strictly one after the other: a chunk is sent when the one before is durable. So
    the Proxy, which remembers a producer's newest numbers only, has seen every number below those. Forgotten chunks are
    not compared one by one: the digest of each chunk covers all chunks before it, too."""

    def __init__(
        self,
        rpc_client: Callable[[], Awaitable[RpcClient]],
        collection: Collection,
        task: Task,
        deadline_s: float,
        *,
        allow_old: bool = False,
    ) -> None:
        """`allow_old`: option `allowOldBatches`, a batch behind which a later one was written counts as written."""
        self._rpc_client = rpc_client
        self._collection = collection
        self._task = task
        self._deadline_s = deadline_s
        self._allow_old = allow_old
        self._digest = 0
        self._forgotten = False

    async def send(self, number: int, chunk: WriteChunk) -> None:
        """Write chunk `number`, unless it is written already; after retryable errors repeat that, for `deadline_s`.

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
            rpc_client = await self._rpc_client()
            return await rpc_client.call("proxy", "write", params, body, deadline_s=min(self._deadline_s, CALL_S))

        try:
            reply = await retry_until(write, f"batch {batch}", self._deadline_s)
        except OutcomeUnknown as error:
            if "forgotten" not in error.fields:
                raise
            self._forgotten = not self._passed_over(cast(int, error.fields["forgotten"]))
            return  # the chunk was written long ago
        except InvalidRows as error:
            raise self._explained(error, chunk) from error
        self._compare(reply.values["rows"], reply.values["digest"], number, chunk)

    def finish(self) -> None:
        """Check the last chunk, once all are sent. Raises `InvalidRequest` when it was written so long ago that its
        rows can no longer be compared."""
        if self._forgotten:
            raise InvalidRequest(
                f"batch {self._task.batch} was begun so long ago that it is not known any more whether partition "
                f"{self._task.partition} had these rows: look what the collection has, then begin with a new "
                "checkpoint or txnVersion"
            )

    def _passed_over(self, forgotten: int) -> bool:
        """Whether a later batch was written, so that this one counts as written. Raises `InvalidRequest` for such a
        batch unless that is allowed."""
        if forgotten >> CHUNK_BITS <= self._task.batch:
            return False
        if not self._allow_old:
            MicroBatch(self._task.batch, self._task.run).check_repeats(
                MicroBatch(forgotten >> CHUNK_BITS, self._task.run)
            )
        return True

    def _compare(self, rows: int, digest: int, number: int, chunk: WriteChunk) -> None:
        self._forgotten = False
        if (rows, digest) == (chunk.rows.num_rows, self._digest):
            return
        raise InvalidRequest(
            f"batch {self._task.batch} has been written in part by an earlier attempt, with other rows: chunk {number} "
            f"of partition {self._task.partition} had {rows} rows, now it has {chunk.rows.num_rows}, or other values. "
            "Going on would lose rows or double them. A batch that runs again must give the same rows in the same "
            "partitions: look for functions like rand() or uuid(), for a source that was divided differently "
            "(minPartitions, history: put a repartition by the key behind it), for partitions of more than 64 MiB in "
            "one batch whose order changes, and for a log that was migrated from or to brokers since. Undo that, or "
            "begin with a new checkpoint or txnVersion"
        )

    def _explained(self, error: InvalidRows, chunk: WriteChunk) -> InvalidRows:
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
