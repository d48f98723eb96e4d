"""From the log to results: the current rows of one collection, exactly as of one time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...runtime.catalog.catalog import Collection
from ...runtime.clock import physical_ms
from ...runtime.errors import Lagging, MemoryLimitExceeded, PositionLost, TidewalError
from ...runtime.log.record import RecordType
from ...runtime.ownership import SyncPoint
from ...runtime.rows.schema import OP_COLUMN, Op
from ...runtime.streams.messages import MsgPack
from ...runtime.tables.table_store import LOG
from ..collection_reader import TABLE_ERRORS, BeginningCheck, CollectionReaderRole, open_stream, part_key, rows_of
from ..datanode.delta_errors import storage_errors
from ..datanode.log_reader import NewestVersions, read_current_at
from ..datanode.log_table import LogTable
from ..datanode.wal_identity import OwnTable, open_own_table
from ..metrics import ScanMetrics, lag_ms
from .metrics import LoadMetrics, forget_lag, watch_lag
from .past_rows import PastRows
from .row_store import RowMemory, RowStore

ROWS_PER_SLICE = 4096  # applied before other tasks on the loop run
RECORD_ROWS = 32  # that take as long as what a record costs besides its rows
TIDY_MS = 20  # of the log's time between two rounds of housekeeping, which the questions of a pack would wait for
UNTIDY_MS = 500  # the same, where nothing comes any more

_log = logging.getLogger("tidewal.collections")


class RowPipeline:
    """The rows of a collection, or of some vchannels of it, as of `tsafe`: every record up to it is applied, deletes
    included, and none behind it.

    Starts from what the table holds and continues in the log. What retention removes from the log before it is read,
    while a large table is loaded for example, it takes from the table: only rows that were written meanwhile. Where its
    next rows do not fit into the node's memory for rows it stops and releases its own: every query then gets
    `MemoryLimitExceeded`, until the collection is dropped or the node started again.
    """

    def __init__(
        self, role: CollectionReaderRole, whole: Collection, vchannels: Sequence[str], memory: RowMemory, past: PastRows
    ) -> None:
        """The rows of these vchannels of the collection `whole`. They count in `memory`, and so do those of earlier
        times, in `past`."""
        collection = replace(whole, vchannels=tuple(vchannels))
        self.collection: Collection = collection
        self._tsafe = 0
        self._whole = whole
        self._role = role
        self._node = role.node
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._failure: TidewalError | None = None
        self._stream = open_stream(role, collection, 0)
        self._memory = memory
        self._past = past
        window_ms = round(role.node.settings.query_node.retention_duration * 1000)
        self._stores = {vchannel: RowStore(collection.schema, memory, window_ms) for vchannel in collection.vchannels}
        self._loading_since = role.node.clock.now()
        self._loads = LoadMetrics(role.node.metrics, role.node.clock.clock)
        self._reached = max(role.started_ts, collection.created_ts)  # before the table was loaded last
        self._tidied_ms = 0
        watch_lag(role.node.metrics, role.node.clock, collection.vchannels, lambda: self.time_reached)

    async def run(self) -> None:
        """Load, then follow the log."""
        try:
            # Placed before the table is read: while that is empty, the DataNode's hold keeps all from there on.
            await self._stream.place()
            await self._load()
            while True:
                beginning = BeginningCheck(self.collection, self.tsafe, self._node.clock.now())
                try:
                    return await self._follow(beginning)
                except PositionLost as error:
                    if not (beginning.is_done and await self._load()):
                        raise
                    _log.warning("querynode of %s goes on from its table: %s", self.collection.name, error)
        except MemoryLimitExceeded as error:
            self._fail(error)
        except TABLE_ERRORS as error:
            self._fail(error)
            raise
        finally:
            self._fail(Lagging(f"{self.collection.name} is being loaded again; retry"))
            await self._stream.close()

    async def _follow(self, beginning: BeginningCheck) -> None:
        """Apply what the stream reads, until that ends. Raises `PositionLost`."""
        scan = ScanMetrics(self._node.metrics, "querynode", self._stream)
        for time in (beginning.now, *(time for time, _, _ in self._waiters)):  # questions that came while it was loaded
            self._stream.wait_for(time)
        try:
            async for pack in self._stream:
                beginning.check(pack)
                self._role.loaded(self.collection)
                await self._apply(pack)
                scan.consumed(pack)
        finally:
            scan.publish()

    # ---- rows -------------------------------------------------------------------------------------------------------

    async def _load(self) -> bool:
        """Apply what the table holds behind `tsafe`, and read the log from there on; returns whether there was any. No
        hold keeps the log meanwhile: a node that dies would leave it, and what is removed is in the table by then."""
        location = self._node.tables.table(self.collection.name, LOG)
        with storage_errors(location):
            if not await self._node.blocking(location.exists):
                return False
        log, time, positions = await self._open_table()
        if time <= self.tsafe:
            return False
        above, self._tsafe = self.tsafe, 0  # nothing can be asked for while a part of the rows is there
        self._loading_since, self._reached = self._node.clock.now(), max(self._reached, above)
        await self._fill(self._stores, log, time, above=above)
        for store in self._stores.values():
            store.begin(time)
        await self._stream.close()
        left = replace(self.collection, vchannels=tuple(self._stores))
        self._stream = open_stream(self._role, left, time, positions)
        self._advance(time)
        return True

    async def _open_table(self) -> OwnTable:
        location = self._node.tables.table(self.collection.name, LOG)
        return await self._node.blocking(partial(open_own_table, location, self._whole, self._node.wal.name))

    async def _fill(self, stores: Mapping[str, RowStore], log: LogTable, time: int, *, above: int = 0) -> None:
        """Apply what makes of the rows that were there at `above`, none at 0, those at `time`."""
        with self._loads.under_way():
            for vchannel, store in stores.items():
                await self._fill_store(
                    store, partial(read_current_at, log, time, above=above, vchannels=[vchannel]), time
                )

    async def _fill_store(self, store: RowStore, read: Callable[[], NewestVersions], time: int) -> None:
        before, current = dict(store.versions), await self._node.blocking(read)
        while (batch := await self._node.blocking(partial(next, current.batches, None))) is not None:
            self._loads.loaded(batch)
            for slice in _sliced(self._as_in_log(batch)):
                store.apply(slice, time)
                await asyncio.sleep(0)
        # Of each key only the newest was loaded, yet all count as applied.
        store.versions.update({op: before[op] + count for op, count in current.counts.items()})

    async def _load_past(self, vchannels: Sequence[str], time: int) -> list[RowStore]:
        """The rows that were there at `time`, from the table, once that has them."""
        log, stored, _ = await self._open_table()
        if stored < time:
            await self._role.owners.flush(self.collection)
            log = (await self._open_table()).log
        stores = {vchannel: RowStore(self.collection.schema, self._memory) for vchannel in vchannels}
        try:
            await self._fill(stores, log, time)
        except BaseException:
            for store in stores.values():
                store.release()
            raise
        return list(stores.values())

    def _as_in_log(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the table as rows of the log: upserts and deletes."""
        schema = self.collection.schema.row_arrow()
        deleted = pc.equal(batch.column(OP_COLUMN), pa.scalar("delete")).to_numpy(zero_copy_only=False)
        ops = pa.array(np.where(deleted, Op.DELETE, Op.UPSERT).astype(np.int8))
        columns: list[pa.Array[Any]] = [ops if name == OP_COLUMN else batch.column(name) for name in schema.names]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    async def _apply(self, pack: MsgPack) -> None:
        """Apply a pack. Other tasks on the loop, which may query the rows, run in between only where everything up to
        some time is applied, and nothing behind it."""
        applied, since_pause = self._tsafe, 0
        for record in pack.messages:
            if since_pause >= ROWS_PER_SLICE and record.ts > applied:
                self._advance(applied)
                since_pause = 0
                await asyncio.sleep(0)
            if record.type is RecordType.ROWS:
                store = self._stores.get(record.vchannel)
                if store is None:
                    continue  # it was discarded meanwhile
                rows = rows_of(self._role, self.collection, record)
                if rows is not None:
                    store.apply(rows, record.ts)
                    since_pause += RECORD_ROWS + rows.num_rows
            applied = record.ts
        self._advance(pack.end_ts)
        if physical_ms(self._tsafe) >= self._tidied_ms + TIDY_MS:
            untidy = self._tidy()
        else:
            untidy = bool(pack.messages)
        if untidy:
            self._stream.wait_at_most(UNTIDY_MS)

    def _tidy(self) -> bool:
        """Do a step of housekeeping; returns whether there is more to do, or will be soon."""
        self._tidied_ms = physical_ms(self._tsafe)
        untidy = False
        for store in self._stores.values():
            store.advance(self._tsafe)
            untidy = store.maintain() or store.has_changes or untidy
        return untidy

    async def stores_at(self, at: int | None) -> Mapping[str, RowStore]:
        """The row stores, by vchannel, to be read at the time `at`, which has been waited for: from the table, where
        memory does not have that time any more. Raises what is wrong with the table, and `MemoryLimitExceeded`."""
        if at is None or all(store.begins <= at for store in self._stores.values()):
            return self._stores
        vchannels = tuple(self._stores)
        with storage_errors(self._node.tables.table(self.collection.name, LOG)):
            load = partial(self._load_past, vchannels, at)
            past = await self._past.stores(part_key(self.collection), vchannels, at, load)
        return dict(zip(vchannels, past, strict=True))

    @property
    def tsafe(self) -> int:
        """Everything up to this time is applied; 0 while the table is loaded. It never goes back. While nothing comes
        for these vchannels it is the time of their channels."""
        if self._tsafe:
            self._tsafe = max(self._tsafe, self._stream.idle_time)
        return self._tsafe

    @property
    def stores(self) -> Mapping[str, RowStore]:
        """The row stores, by vchannel."""
        return self._stores

    @property
    def vchannels(self) -> Sequence[str]:
        """Those whose rows can be asked for: none while the table is loaded."""
        return list(self._stores) if self._tsafe and self._failure is None else []

    @property
    def failure(self) -> TidewalError | None:
        """What it has ended with for good; None also while the rows are loaded again."""
        return None if self._failure is None or self._failure.retryable else self._failure

    @property
    def time_reached(self) -> int:
        """`tsafe`, or since when its rows cannot be asked for: however often the tables are loaded again. From any
        thread."""
        return max(self._tsafe, self._stream.idle_time) if self._tsafe else self._reached

    @property
    def pending_bytes(self) -> int:
        """Bytes that were read and not applied yet. From any thread."""
        return self._stream.buffered_bytes

    def end_series(self) -> None:
        """`Pipeline.end_series`."""
        forget_lag(self._node.metrics, self._stores)

    def discard(self, vchannel: str) -> None:
        """Let go of the rows of a vchannel that other nodes have. Questions that read them have them until they end."""
        self._stores.pop(vchannel).release()
        forget_lag(self._node.metrics, [vchannel])
        if self._stores:
            self._stream.give_up(vchannel)

    # ---- freshness --------------------------------------------------------------------------------------------------

    def _advance(self, time: int) -> None:
        self._tsafe = max(self._tsafe, time)
        while self._waiters and self._waiters[0][0] <= self._tsafe:
            waiter = heapq.heappop(self._waiters)[2]
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for(self, time: int) -> None:
        """Wait until everything up to the timestamp `time` is applied. Raises `Lagging` at once while the pipeline is
        further behind than `queryNode.scheduler.maxTimestampLag`, and what the pipeline has failed with."""
        time = max(time, 1)  # while the table is loaded, `tsafe` is 0 and only a part of its rows is there
        while self._failure is None and time > self.tsafe:  # again, where the table was loaded after the wait
            self._check_lag()
            self._stream.wait_for(time)
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiters, (time, next(self._numbers), waiter))
            await waiter
        if self._failure is not None:  # also after the wait: by now the rows may be gone again
            raise self._failure

    def _check_lag(self) -> None:
        limit_s = self._node.settings.query_node.scheduler.max_timestamp_lag
        lag_s = lag_ms(self._node.clock, max(self.tsafe, self._loading_since)) / 1000
        if lag_s > limit_s:
            channel, last_tick = min(self._stream.times.items(), key=itemgetter(1))
            raise Lagging(
                f"{self.collection.name} is {lag_s:.1f} s behind, more than {limit_s} s "
                f"(queryNode.scheduler.maxTimestampLag); the last time of {channel} is "
                f"{lag_ms(self._node.clock, last_tick)} ms old; retry",
                channel=channel,
                lag_s=lag_s,
                last_tick=last_tick,
            )

    def _fail(self, error: TidewalError) -> None:
        self._failure = self._failure or error
        self._past.forget(part_key(self.collection))
        for store in self._stores.values():
            store.release()
        self._stores = {vchannel: RowStore(self.collection.schema, RowMemory(0)) for vchannel in self._stores}
        for _, _, waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(self._failure)
        self._waiters.clear()

    def announce(self, point: SyncPoint) -> None:
        """Apply what the owners have said of the channels now, sooner than with their next tick."""
        for channel, last in point.channels.items():
            self._stream.announce(channel, last.term, last.cseq, point.time)


def _sliced(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    return [batch.slice(start, ROWS_PER_SLICE) for start in range(0, batch.num_rows, ROWS_PER_SLICE)]
