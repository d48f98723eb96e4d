"""From the log to results: the current rows of one collection, exactly as of one time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from ...runtime.catalog.catalog import Collection
from ...runtime.errors import Lagging, MemoryLimitExceeded, TidewalError
from ...runtime.log.record import RecordType
from ...runtime.rows.schema import OP_COLUMN, Op
from ...runtime.streams.messages import MsgPack, Position
from ...runtime.tables.table_store import LOG
from ..collection_reader import TABLE_ERRORS, BeginningCheck, CollectionReaderRole, open_stream, rows_of
from ..datanode.delta_errors import storage_errors
from ..datanode.log_reader import read_current_at
from ..datanode.log_table import LogTable
from ..datanode.wal_identity import OwnTable, open_own_table
from ..metrics import ScanMetrics, lag_ms
from .metrics import watch_rows
from .past_rows import PastRows
from .row_store import RowMemory, RowStore

SYNC_DEADLINE_S = 60.0  # the client has a deadline of its own
ROWS_PER_SLICE = 4096  # applied before other tasks on the loop run


class RowPipeline:
    """The rows of a collection as of `tsafe`: every record up to it is applied, deletes included, and none behind it.

    Starts from what the table holds and continues in the log. Where its next rows do not fit into the node's memory
    for rows it stops and releases its own: every query then gets `MemoryLimitExceeded`, until the collection is
    dropped or the node started again.
    """

    def __init__(self, role: CollectionReaderRole, collection: Collection, memory: RowMemory, past: PastRows) -> None:
        """The rows count in `memory`, as do those of earlier times in `past`."""
        self.collection = collection
        self.tsafe: int = 0
        self._role = role
        self._node = role.node
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._failure: TidewalError | None = None
        self._syncing: asyncio.Task[int] | None = None
        self._sync_again: asyncio.Task[int] | None = None
        self._stream = open_stream(role, collection, 0)
        self._memory = memory
        self._past = past
        window_ms = round(role.node.settings.query_node.retention_duration * 1000)
        self._stores = {vchannel: RowStore(collection.schema, memory, window_ms) for vchannel in collection.vchannels}
        self._started_ts = role.node.clock.now()
        self._scan: ScanMetrics | None = None  # of the stream, once it is read
        unserved_since = max(role.started_ts, collection.created_ts)  # however often the tables are loaded again
        watch_rows(
            role.node.metrics, role.node.clock, collection, lambda: self.tsafe or unserved_since, lambda: self.stores
        )

    async def run(self) -> None:
        """Load, then follow the log."""
        try:
            # Placed before the table is read: while that is empty, the DataNode's hold keeps all from there on.
            await self._stream.place()
            loaded, positions = await self._load()
            if loaded:
                self._stream = open_stream(self._role, self.collection, loaded, positions)
            scan = self._scan = ScanMetrics(self._node.metrics, "querynode", self.collection, self._stream)
            self._advance(loaded)
            beginning = BeginningCheck(self.collection, loaded, self._node.clock.now())
            async for pack in self._stream:
                beginning.check(pack)
                self._role.loaded(self.collection)
                await self._apply(pack)
                scan.consumed(pack)
        except MemoryLimitExceeded as error:
            self._fail(error)
        except TABLE_ERRORS as error:
            self._fail(error)
            raise
        finally:
            if self._scan is not None:
                self._scan.publish()
            self._fail(Lagging(f"{self.collection.name} is being loaded again; retry"))
            await self._stream.close()

    # ---- rows -------------------------------------------------------------------------------------------------------

    async def _load(self) -> tuple[int, list[Position]]:
        """Apply what the table holds, and return its T and the positions stored with it."""
        location = self._node.tables.table(self.collection.name, LOG)
        with storage_errors(location):
            if not location.exists():
                return 0, []
        log, time, positions = await self._open_table()
        if time:
            await self._fill(self._stores, log, time)
        for store in self._stores.values():
            store.advance(time)
        return time, positions

    async def _open_table(self) -> OwnTable:
        location = self._node.tables.table(self.collection.name, LOG)
        return await self._node.blocking(partial(open_own_table, location, self.collection, self._node.wal.name))

    async def _fill(self, stores: Mapping[str, RowStore], log: LogTable, time: int) -> None:
        """Apply the rows that were there at `time`."""
        for vchannel, store in stores.items():
            current = await self._node.blocking(partial(read_current_at, log, time, vchannels=[vchannel]))
            while (batch := await self._node.blocking(partial(next, current.batches, None))) is not None:
                for slice in _sliced(self._as_upserts(batch)):
                    store.apply(slice)
                    await asyncio.sleep(0)
            store.versions.update(current.counts)  # of each key only the newest was loaded, yet all count as applied

    async def _load_past(self, time: int) -> list[RowStore]:
        """The rows that were there at `time`, from the table, once that has them."""
        log, stored, _ = await self._open_table()
        if stored < time:
            await self._role.owners.flush(self.collection)
            log = (await self._open_table()).log
        stores = {vchannel: RowStore(self.collection.schema, self._memory) for vchannel in self._stores}
        try:
            await self._fill(stores, log, time)
        except BaseException:
            for store in stores.values():
                store.release()
            raise
        return list(stores.values())

    def _as_upserts(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the table as rows of the log."""
        schema = self.collection.schema.row_arrow()
        ops = pa.array(np.full(batch.num_rows, Op.UPSERT, dtype=np.int8))
        columns: list[pa.Array[Any]] = [ops if name == OP_COLUMN else batch.column(name) for name in schema.names]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    async def _apply(self, pack: MsgPack) -> None:
        """Apply a pack. Other tasks on the loop, which may query the rows, run in between only where everything up to
        some time is applied, and nothing behind it."""
        applied, since_pause = self.tsafe, 0
        for record in pack.messages:
            if since_pause >= ROWS_PER_SLICE and record.ts > applied:
                self._advance(applied)
                since_pause = 0
                await asyncio.sleep(0)
            if record.type is RecordType.ROWS:
                rows = rows_of(self._role, self.collection, record)
                if rows is not None:
                    self._stores[record.vchannel].apply(rows, record.ts)
                    since_pause += rows.num_rows
            applied = record.ts
        self._advance(pack.end_ts)
        for store in self._stores.values():
            store.advance(self.tsafe)
            store.maintain()
        self._past.expire()

    async def stores_at(self, at: int | None) -> Sequence[RowStore]:
        """The row stores of all shards to be read at the time `at`, which has been waited for: from the table, where
        memory does not have that time any more. Raises what is wrong with the table, and `MemoryLimitExceeded`."""
        if at is None or all(store.begins <= at for store in self._stores.values()):
            return self.stores
        with storage_errors(self._node.tables.table(self.collection.name, LOG)):
            return await self._past.stores(self.collection.id, at, partial(self._load_past, at))

    @property
    def stores(self) -> list[RowStore]:
        """The row stores of all shards."""
        return list(self._stores.values())

    # ---- freshness --------------------------------------------------------------------------------------------------

    def _advance(self, time: int) -> None:
        self.tsafe = max(self.tsafe, time)
        while self._waiters and self._waiters[0][0] <= self.tsafe:
            waiter = heapq.heappop(self._waiters)[2]
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for(self, time: int) -> None:
        """Wait until everything up to the timestamp `time` is applied. Raises `Lagging` at once while the pipeline is
        further behind than `queryNode.scheduler.maxTimestampLag`, and what the pipeline has failed with."""
        time = max(time, 1)  # while the table is loaded, `tsafe` is 0 and only a part of its rows is there
        if self._failure is None and time > self.tsafe:
            self._check_lag()
            self._stream.wait_for(time)
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiters, (time, next(self._numbers), waiter))
            await waiter
        if self._failure is not None:  # also after the wait: by now the rows may be gone again
            raise self._failure

    def _check_lag(self) -> None:
        limit_s = self._node.settings.query_node.scheduler.max_timestamp_lag
        lag_s = lag_ms(self._node.clock, max(self.tsafe, self._started_ts)) / 1000
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
        self._past.forget(self.collection.id)
        for store in self._stores.values():
            store.release()
        self._stores = {vchannel: RowStore(self.collection.schema, RowMemory(0)) for vchannel in self._stores}
        for _, _, waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(self._failure)
        self._waiters.clear()

    async def present(self) -> int:
        """The time of the log now, from the channels' owner: everything acknowledged before this call is at or before
        it (guarantee 8). Queries that come while one request is under way share the next."""
        running = self._syncing
        if running is None or running.done():
            self._syncing = _begin(self._sync())
            return await asyncio.shield(self._syncing)
        if self._sync_again is None:
            self._sync_again = _begin(self._sync_after(running))
        return await asyncio.shield(self._sync_again)

    async def _sync_after(self, running: asyncio.Task[int]) -> int:
        await asyncio.wait([running])
        self._syncing, self._sync_again = self._sync_again, None
        return await self._sync()

    async def _sync(self) -> int:
        point = await self._role.owners.sync(self.collection, deadline_s=SYNC_DEADLINE_S)
        for channel, last in point.channels.items():
            self._stream.announce(channel, last.term, last.cseq, point.time)
        return point.time


def _begin(sync: Coroutine[object, object, int]) -> asyncio.Task[int]:
    """Start `sync` as a task; its exception counts as retrieved, for every waiting query may be cancelled by then."""
    task = asyncio.create_task(sync)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def _sliced(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    return [batch.slice(start, ROWS_PER_SLICE) for start in range(0, batch.num_rows, ROWS_PER_SLICE)]
