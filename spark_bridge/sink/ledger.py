"""The ledger of one writer: a small channel that says which batch is done, and which one is decided.

A batch of a write into topics is staged by tasks, decided by the driver, copied to the topics, and done. The decision
names the attempts whose rows count, and where the topics ended before; a driver that finds it carries it out, whatever
other attempts have staged meanwhile. A batch for a collection is done when all tasks have written. What is done is
never done again, and a batch is not identified by its number alone: the ledger holds the checkpoint that
numbers the batches, and a digest of the rows. Two records are kept at most.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

import msgpack
import xxhash

from ...runtime.errors import BadRecord, ChannelNotFound, CorruptLog, InvalidRequest
from ...runtime.log.ledger_body import LEDGER_VERSION, ledger_body
from ...runtime.log.record import DECODE_ERRORS, NOT_A_RECORD, Record, RecordType, decode, encode
from ...runtime.log.wal import ChannelPolicy, Entry, From, FromId, Start, Wal

_logger = logging.getLogger("tidewal.spark")

DIGEST_MASK: Final = (1 << 63) - 1
POLICY: Final = ChannelPolicy()  # with its retention: the channels of an abandoned query must not hold the log for ever


class StagedRows(NamedTuple):
    """One task's staged rows: `chunks` entries from `first` to `last` with its `token`. `digest` identifies the
    rows."""

    partition: int
    token: str
    chunks: int
    first: bytes
    last: bytes
    digest: int = 0


class MicroBatch(NamedTuple):
    """The identity of a batch: its number, the query's id of the checkpoint that numbers it (empty for `df.write`), and
    the sum of its rows' digests, None where that is not known."""

    number: int
    run: str = ""
    digest: int | None = None

    def check_repeats(self, done: MicroBatch) -> None:
        """Raise `InvalidRequest` unless this batch repeats `done`, the last one: reporting any other as written would
        lose its rows. A digest that is not known is not compared."""
        number, run, digest = self
        if run != done.run:
            what = f"the last batch that is done, {done.number}, was written under another checkpoint"
        elif number < done.number:
            what = f"batch {done.number} is done, and this one is older"
        elif digest is not None and done.digest is not None and digest != done.digest:
            what = "this batch is done, and had other rows"
        else:
            return
        raise InvalidRequest(
            f"batch {number} is not written: {what}. Of a stream the checkpoint is new or was restored from a copy, or "
            "the batch came out otherwise when it ran again (rand(), uuid()): begin with a new checkpoint, and a new "
            "txnAppId if there is one, from where the target ends. Of df.write give a higher txnVersion. To have "
            "batches up to the last one count as written, whatever is in them, set option allowOldBatches to true"
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """The rows that count for `batch` of the checkpoint `run`, and where the topics that they go to ended before any
    was copied."""

    batch: int
    attempts: Sequence[StagedRows]
    ends: Mapping[str, bytes | None]
    run: str = ""


NOTHING: Final = MicroBatch(-1)


class LedgerState(NamedTuple):
    """The last batch that is done (`NOTHING`: none), and the one that is decided and not done."""

    done: MicroBatch
    decision: Decision | None


def application(app: str, target: str) -> str:
    """The id of what an application (option `txnAppId`) writes to one target."""
    return xxhash.xxh3_128_hexdigest(f"{app}\0{target}".encode())


class Ledger:
    """The ledger in `channel`. One driver at a time writes it, as Spark's checkpoints demand."""

    def __init__(self, wal: Wal, channel: str) -> None:
        self._wal = wal
        self._channel = channel

    async def create(self) -> None:
        """Create the channel, if it is not there."""
        await self._wal.create_channel(self._channel, POLICY)

    async def state(self) -> LedgerState:
        """The present state; that of an empty ledger where the channel is absent, or retention has emptied it. Of two
        decisions on one batch the first counts. Raises `CorruptLog`, and `FormatTooNew` for a newer Tidewal's."""
        done = NOTHING
        decision: Decision | None = None
        try:
            info = await self._wal.describe(self._channel)
            if info.first_id is None or info.latest_id is None:
                return LedgerState(done, None)
            async with aclosing(upto(self._wal, self._channel, From.EARLIEST, info.latest_id)) as entry_lists:
                async for entries in entry_lists:
                    for entry in entries:
                        found = self._read(entry)
                        if found is None:
                            continue
                        if isinstance(found, MicroBatch):
                            done = max(done, found, key=lambda each: each.number)
                        elif decision is None or decision.batch < found.batch:
                            decision = found
        except ChannelNotFound:
            return LedgerState(done, None)
        return LedgerState(done, decision if decision is not None and decision.batch > done.number else None)

    def _read(self, entry: Entry) -> MicroBatch | Decision | None:
        """The content of an entry; None for an entry that is not the ledger's. Raises as `state` does."""
        try:
            record = record_in(entry, self._channel, RecordType.LEDGER)
            if record is None:
                return None
            body = ledger_body(record)
            if "done" in body:
                return MicroBatch(int(body["done"]), body.get("run", ""), body.get("digest"))
            attempts = [StagedRows(*each) for each in body["attempts"]]
            return Decision(body["batch"], attempts, dict(body["ends"]), body.get("run", ""))
        except (*DECODE_ERRORS, LookupError, BadRecord) as error:
            raise CorruptLog(
                f"the ledger {self._channel} cannot be read ({error}): nothing is written, for that might double rows. "
                "If a newer Tidewal wrote it, upgrade",
                path=self._channel,
            ) from error

    async def decide(self, decision: Decision) -> None:
        """Append a decision; `state` returns the one that counts."""
        attempts = list(map(list, decision.attempts))
        ends = dict(decision.ends)
        await self._append({"batch": decision.batch, "run": decision.run, "attempts": attempts, "ends": ends})

    async def finish(self, batch: MicroBatch) -> None:
        """Append that `batch` is done, and truncate what lies before."""
        id = await self._append({"done": batch.number, "run": batch.run, "digest": batch.digest})
        if self._wal.capabilities.truncate:
            await self._wal.truncate(self._channel, id)

    async def _append(self, body: Mapping[str, object]) -> bytes:
        packed = cast(bytes, msgpack.packb({"v": LEDGER_VERSION, **body}))
        return await self._wal.append(self._channel, encode(Record(RecordType.LEDGER, body=packed)))


def record_in(entry: Entry, channel: str, type: RecordType) -> Record | None:
    """The record of `type` in an entry of a query's own channel; None, with a warning, for what is no record of
    Tidewal: the log itself guards the bytes of records. Raises `BadRecord` for a record of a newer Tidewal."""
    try:
        record = decode(entry.payload)
        if record.type is type:
            return record
        what = f"a record of type {record.type.name}"
    except BadRecord as error:
        if error.fields.get("reason") not in NOT_A_RECORD:
            raise
        what = error.message
    _logger.warning(
        "%s: entry %s is skipped, it is not of this query: %s",
        channel,
        entry.id.hex(),
        what,
        extra={"channel": channel},
    )
    return None


async def upto(wal: Wal, channel: str, start: Start, last: bytes) -> AsyncGenerator[Sequence[Entry]]:
    """The entries from `start` up to and including `last`; waits where neither that nor a later one is there. Close it
    with `aclose`."""
    if isinstance(start, FromId) and (start.id > last or (start.id == last and not start.inclusive)):
        return
    entries = cast("AsyncGenerator[Sequence[Entry]]", wal.read(channel, start))
    async with aclosing(entries):
        async for batch in entries:
            wanted = [entry for entry in batch if entry.id <= last]
            if wanted:
                yield wanted
            if batch[-1].id >= last:
                return
