"""From the log to the table: the buffer and the flushes of one collection."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from ...runtime.catalog.catalog import Collection
from ...runtime.catalog.flush_events import FlushEvent
from ...runtime.clock import physical_ms
from ...runtime.errors import BadRecord, DirectoryUnwritable, DiskFull, TidewalError, Unavailable
from ...runtime.log.names import pchannel_of
from ...runtime.log.record import Record, RecordType, encode
from ...runtime.log.wal import ControlAppend
from ...runtime.rows.row_codec import decode_rows
from ...runtime.rows.schema import OP_COLUMN, Op
from ...runtime.streams.dispatched_stream import DispatchedStream
from ...runtime.streams.messages import MsgPack, Position
from ...runtime.tables.table_store import CURRENT, LOG
from ..collection_reader import BeginningCheck, CollectionReaderRole, open_stream, rows_of
from ..pchannels import pchannels_of
from .current_table import CompactResult, CurrentTable, compact
from .log_table import FlushResult, LogTable
from .metrics import FlushMetrics, end_computed
from .wal_identity import open_own_table

RETRY_FIRST_S = 0.2
RETRY_MAX_S = 5.0
FLUSHES_PER_VACUUM = 64
LOOK_S = 1.0  # of the log's time, after which a flush that is under way is looked at
KEPT_OPEN_S = 60.0  # for which a table stays open behind a flush: many tables that nothing is stored in take memory
IDLE_FLUSH_S = 600.0  # after so long a collection without rows stores how far it has read, to hold no more of the log
READ_BACK_S = 60.0  # the same for its pipeline's first time, since the next pipeline would read all that again
SETTLED_S = 15.0  # before that first time, and up to twice as long: with many collections not all at once
CAUGHT_UP_S = 10.0  # behind now

Array: TypeAlias = "pa.Array[Any]"  # of whatever type
T = TypeVar("T")

_log = logging.getLogger("tidewal.datanode")
_OPS = pa.array([op.name.lower() for op in Op])


@dataclass(slots=True)
class _Buffer:
    """Records that no flush has taken yet."""

    since: float  # loop time of the first
    records: list[Record] = field(default_factory=list[Record])
    bytes: int = 0


class FlushPipeline:
    """Buffers a collection's rows and stores them: on request, every `dataNode.flushIntervalS`, and whenever
    `dataNode.flushBytes` are buffered. While one flush runs the next buffer fills, then reading pauses.

    The table's T decides where reading begins, so what a crash interrupts is read again, and stored once.
    """

    def __init__(self, role: CollectionReaderRole, collection: Collection) -> None:
        self.collection = collection
        self._role = role
        self._node = role.node
        self._loop = asyncio.get_running_loop()
        self._buffer = _Buffer(self._loop.time())
        self._log: LogTable | None = None  # where it is open
        self._stored = 0  # the T of the table
        self._published = 0  # the T that `insert_events` says
        self._requested = 0  # a FLUSH record waits until this T is published
        self._positions: Mapping[str, Position] = {}
        self._held: dict[str, bytes] = {}  # by pchannel, the entry from which on the log is held
        self._flushed = self._loop.time()
        self._flushes = 0
        self._compacting = asyncio.Lock()
        self._compacted = self._loop.time()  # when a compaction was last begun, or this pipeline
        self._current = 0  # the T that the table of current rows is known to reflect
        self._flushing: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()
        self._ending = asyncio.Event()
        # A table that may be read but not written looks sound until a flush: only a flush that succeeds ends the fault.
        known = role.node.unreadable.get((role.role, collection.name))
        self._unwritable = isinstance(known, DirectoryUnwritable)
        self._metrics: FlushMetrics

    async def run(self) -> None:
        """Open the table, hold the log from its T on, and read."""
        try:
            stream = await self._open()
        except BaseException:
            self._ending.set()
            raise
        finally:
            self._opened.set()
        try:
            beginning = BeginningCheck(self.collection, self._stored, self._node.clock.now())
            stream.wait_for(beginning.now)
            async for pack in stream:
                beginning.check(pack)
                if not self._unwritable:
                    self._role.loaded(self.collection)
                self._buffer_rows(pack)
                await self._store_if_due(pack)
                if (due_s := self._due_in_s()) is not None:
                    stream.wait_at_most(max(1, math.ceil(due_s * 1000)))
        finally:
            self._ending.set()
            async with self._compacting:  # a requested compaction works on the tables, which may be removed next
                pass
            if self._flushing is not None:
                await asyncio.gather(self._flushing, return_exceptions=True)
            self._metrics.publish()
            await stream.close()

    def end_series(self) -> None:
        """`Pipeline.end_series`."""
        end_computed(self._node.metrics, self.collection)

    async def _open(self) -> DispatchedStream:
        location = self._node.tables.table(self.collection.name, LOG)
        opening = partial(open_own_table, location, self.collection, self._node.wal.name)
        log, self._stored, positions = await self._node.blocking(opening)
        stream = open_stream(self._role, self.collection, self._stored, positions)
        self._metrics = FlushMetrics(
            self._node.metrics, self._node.clock, self.collection, stream, lambda: self._buffer.bytes
        )
        await self._hold_start(positions)
        if self._stored:
            await self._publish(self._stored, FlushResult(log.version, 0, 0))
        return stream

    async def _hold_start(self, positions: Sequence[Position]) -> None:
        """Hold the log from the table's positions on, or the collection's beginning, where its readers continue too,
        before any other hold on it can move: of several shards on one channel from the lowest position."""
        least: dict[str, bytes] = {}
        if not self._stored and self.collection.beginning is not None:
            least = {channel: id for channel, (_, _, id) in self.collection.beginning.ends.items()}
        for at in positions if self._stored else ():  # with T 0 a shard has no position yet
            least[at.channel] = min(least.get(at.channel, at.message_id), at.message_id)
        for channel in pchannels_of(self.collection):
            first = least.get(channel) or await self._node.wal.id_at(
                channel, max(self._stored, self.collection.created_ts)
            )
            if first is not None:
                await self._hold(channel, first)

    async def _hold(self, channel: str, id: bytes) -> None:
        await self._node.wal.hold(channel, self.collection.holder, id)
        self._held[channel] = id

    def _buffer_rows(self, pack: MsgPack) -> None:
        if not self._buffer.records:
            self._buffer.since = self._loop.time()
        for record in pack.messages:
            if record.type is RecordType.ROWS:
                self._buffer.records.append(record)
                self._buffer.bytes += len(record.body)
            elif record.type is RecordType.FLUSH:
                self._requested = max(self._requested, record.ts)
        self._positions = pack.end_positions
        self._metrics.consumed(pack)

    async def _store_if_due(self, pack: MsgPack) -> None:
        """Flush where that is due, or else compact: packs come without rows, too, so that the table of current rows
        follows when writing stops."""
        if self._flushing is not None and self._flushing.done():
            flushed, self._flushing = self._flushing, None
            flushed.result()  # what it failed with ends this role now, not with the next flush
        if self._flushing is None and self._loop.time() - self._flushed >= KEPT_OPEN_S:
            self._log = None
        settings = self._node.settings.data_node
        full = self._buffer.bytes >= settings.flush_bytes
        old = bool(self._buffer.records) and self._loop.time() - self._buffer.since >= settings.flush_interval_s
        requested = self._requested > self._published
        flush_due = full or old or requested or self._unwritable or self._holds_what_others_wrote(pack)
        if not (flush_due or self._compaction_due()):
            return
        if self._flushing is not None:
            if not full:
                return
            await self._flushing
        if flush_due:
            self._flushing = asyncio.create_task(self._flush(self._buffer.records, pack.end_ts, self._positions))
            self._buffer = _Buffer(self._loop.time())
        else:
            self._flushing = asyncio.create_task(self._maintain())

    def _due_in_s(self) -> float | None:
        """In how many seconds there is something to do even where no rows come, that cannot wait until the stream hands
        out a pack by itself."""
        if self._flushing is not None or self._unwritable:
            return LOOK_S
        settings, due_s = self._node.settings.data_node, list[float]()
        if self._buffer.records:
            due_s.append(self._buffer.since + settings.flush_interval_s)
        if settings.compaction_interval_s and self._current < self._stored:
            due_s.append(self._compacted + settings.compaction_interval_s)
        return max(0.0, min(due_s) - self._loop.time()) if due_s else None

    def _holds_what_others_wrote(self, pack: MsgPack) -> bool:
        """Whether this collection has had no rows for a while, and others have on its channels, or nothing of it is
        stored yet. How long that is says the log, not this pipeline: where nodes come and go none lives for long."""
        settled_s = SETTLED_S * (1 + self.collection.id % 16 / 16)
        if self._buffer.records or self._loop.time() - self._flushed < settled_s:
            return False
        end_ms, stored = physical_ms(pack.end_ts), max(self._stored, self.collection.created_ts)
        idle_ms, behind_ms = end_ms - physical_ms(stored), physical_ms(self._node.clock.now()) - end_ms
        patience_s = IDLE_FLUSH_S if self._flushes else READ_BACK_S
        if idle_ms < patience_s * 1000 or behind_ms > CAUGHT_UP_S * 1000:
            return False
        return not self._stored or any(
            position.message_id != self._held.get(channel) for channel, position in self._positions.items()
        )

    async def _flush(self, records: list[Record], end: int, positions: Mapping[str, Position]) -> None:
        """Store `records` (there may be none), which are all between the table's T and `end`; then publish the event
        and move the hold: the log may remove only what lies before the table's positions, for readers continue
        there."""
        started = perf_counter()
        result = await self._store_readable(records, end, positions)
        self._stored, self._flushed, self._unwritable = end, self._loop.time(), False
        await self._retried(partial(self._publish, end, result))
        for position in positions.values():
            await self._retried(partial(self._hold, position.channel, position.message_id))
        self._metrics.flushed(result, perf_counter() - started)
        self._flushes += 1
        await self._maintain(tidy=self._flushes % FLUSHES_PER_VACUUM == 0)
        if not records:  # the next is far off
            self._log = None

    def _compaction_due(self) -> bool:
        interval_s = self._node.settings.data_node.compaction_interval_s
        waited = self._loop.time() - self._compacted >= interval_s
        return bool(interval_s) and waited and self._current < self._stored

    async def _maintain(self, *, tidy: bool = False) -> None:
        """Compact where that is due, and to `tidy`, join files and vacuum. The rows are stored by now, so a failure
        waits for the next time."""
        try:
            if self._compaction_due():
                self._compacted = self._loop.time()
                await self.compact()
            if tidy:
                await self._node.blocking(self._join_and_vacuum)
                if self._current:  # else there may be no such table
                    async with self._compacting:
                        await self._node.blocking(lambda: self._open_current().vacuum())
        except TidewalError as error:
            _log.warning("cannot maintain the tables of %s now: %s", self.collection.name, error)
            self._metrics.maintenance_failed()

    def _join_and_vacuum(self) -> None:
        """Join small files, and remove those that no reader needs any more. Blocks."""
        self._open_log().join_files()
        self._open_log().vacuum()

    async def _store_readable(self, records: list[Record], end: int, positions: Mapping[str, Position]) -> FlushResult:
        try:
            return await self._store(records, end, positions)
        except BadRecord:  # rare, so each record is checked by itself only now
            readable = [record for record in records if rows_of(self._role, self.collection, record) is not None]
            return await self._store(readable, end, positions)

    async def _store(self, records: list[Record], end: int, positions: Mapping[str, Position]) -> FlushResult:
        """Write to the table."""
        call = partial(self._store_blocking, records, end, positions)
        return await self._retried(partial(self._node.blocking, call))

    async def _retried(self, step: Callable[[], Awaitable[T]]) -> T:
        """One step of a flush, retried until it succeeds: while the table cannot be written, or the log takes no event,
        rows stay in the log, and the StreamingNode's limit on unflushed bytes stops the clients."""
        pause_s = RETRY_FIRST_S
        while True:
            try:
                return await step()
            except TidewalError as error:
                if not (error.retryable or isinstance(error, DiskFull)):
                    raise
                _log.warning("cannot flush %s, trying again in %g s: %s", self.collection.name, pause_s, error)
                self._metrics.failed()
                if await self._ends_within(pause_s):
                    raise
            pause_s = min(pause_s * 2, RETRY_MAX_S)

    async def _ends_within(self, pause_s: float) -> bool:
        try:
            async with asyncio.timeout(pause_s):
                return await self._ending.wait()
        except TimeoutError:
            return False

    def _store_blocking(self, records: list[Record], end: int, positions: Mapping[str, Position]) -> FlushResult:
        if not self._node.cluster.holds():  # the table may be another collection's by now, with the same beginning
            raise Unavailable("nothing is stored past the lease; retry")
        rows = versions_of(records, self.collection)
        vchannels = self.collection.vchannels
        stored = {position.channel: position for position in positions.values()}
        ends = {vchannel: stored[pchannel_of(vchannel)] for vchannel in vchannels}
        start = dict.fromkeys(vchannels, self._stored)
        return self._open_log().flush(rows, start=start, end=dict.fromkeys(vchannels, end), positions=ends)

    async def _publish(self, time: int, result: FlushResult) -> None:
        times = dict.fromkeys(self.collection.vchannels, time)
        ts = self._node.clock.now()
        name = self.collection.name
        event = FlushEvent(self.collection.id, name, times, result.version, result.rows, result.size_bytes)
        announced = ControlAppend(self._node.names.insert_events, encode(event.to_record(ts)), ts)
        await self._node.wal.append_many([announced])
        self._published = time
        self._metrics.stored(time)

    async def compact(self) -> CompactResult:
        """Bring the table of current rows forward to what is stored. Raises `Unavailable` when the tables are not open,
        and what `compact` in `current_table.py` raises."""
        await self._opened.wait()
        async with self._compacting:
            if self._ending.is_set():
                raise Unavailable(f"the tables of {self.collection.name} are not open; retry")
            result = await self._node.blocking(self._compact_blocking)
            self._compacted, self._current = self._loop.time(), result.t
        return result

    def _compact_blocking(self) -> CompactResult:
        return compact(self._open_log(), self._open_current(), self._stored)

    def _open_log(self) -> LogTable:
        """The table of row versions, which is there since this pipeline began, opened where it is not open. Blocks."""
        if self._log is None:
            self._log = LogTable.open(self._node.tables.table(self.collection.name, LOG))
        return self._log

    def _open_current(self) -> CurrentTable:
        schema = self.collection.schema
        return CurrentTable.open(self._node.tables.table(schema.name, CURRENT), schema.arrow(), schema.primary_key)


def versions_of(records: list[Record], collection: Collection) -> pa.Table:
    """The rows of `records` as row versions: the user's columns and those of `row_versions.py`."""
    schema = collection.schema
    batches = [decode_rows(record.body, schema.row_arrow()) for record in records]
    counts = [batch.num_rows for batch in batches]
    table = pa.Table.from_batches(batches, schema.row_arrow())

    def repeated(values: list[int]) -> Array:
        return pa.array(np.repeat(np.array(values, dtype=np.int64), counts))

    numbers = {name: number for number, name in enumerate(collection.vchannels)}
    which = repeated([numbers[record.vchannel] for record in records]).cast(pa.int32())
    rows = np.concatenate([np.arange(count, dtype=np.int32) for count in [0, *counts]])
    system: dict[str, Array] = {
        "_ts": repeated([record.ts for record in records]),
        "_op": _OPS.take(table.column(OP_COLUMN).combine_chunks()),
        "_vchannel": pa.DictionaryArray.from_arrays(which, pa.array(collection.vchannels)).cast(pa.string()),
        "_term": repeated([record.term for record in records]),
        "_cseq": repeated([record.cseq for record in records]),
        "_row": pa.array(rows),
    }
    table = table.drop_columns([OP_COLUMN])
    for name, column in system.items():
        table = table.append_column(name, column)
    return table
