"""The `Wal` on Kafka."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ...runtime.errors import Closed
from ...runtime.groups.coordinator_client import CoordinatorClient
from ...runtime.groups.group_wal import GroupWal
from ...runtime.log.admission import PendingBytes
from ...runtime.log.checks import check_name
from ...runtime.log.stalls import StallWatch
from ...runtime.log.wal import (
    Append,
    Capabilities,
    ChannelInfo,
    ChannelPolicy,
    Entry,
    From,
    OnAppended,
    Start,
)
from ...runtime.loop_bridge import LoopNotifier
from ...runtime.metrics.metrics import Metrics
from .appending import Appender
from .catalog import ChannelCatalog, KafkaChannel, was_dropped
from .channel_access import ChannelAccess, KafkaCatalog
from .channel_fetcher import ChannelFetcher
from .cluster import CONTROL, Cluster
from .foreign_catalog import ForeignCatalog
from .foreign_management import ForeignManagement
from .groups.service import Groups
from .io_thread import IoThread
from .management import Management
from .options import KafkaOptions
from .reader import Reader
from .send_queue import ChannelSendQueue

T = TypeVar("T")

CAPABILITIES = Capabilities(
    atomic_batches=False,
    seek_by_time=True,
    truncate=True,
    multi_process_write=True,
    one_node=False,
    groups=True,
    individual_acks=True,
    atomic_commits=True,
    ephemeral_bounds=False,
    numbered_ids=True,
)
FOREIGN_CAPABILITIES = replace(CAPABILITIES, truncate=False, foreign_topics=True)
CATALOG_CONNECTIONS = (1, 2)  # for following and for writing the catalog
SEND_CONNECTIONS = range(3, 7)  # shared by all send queues; a broker answers the requests of a connection in turn


class KafkaWal(GroupWal):
    """The WAL on Kafka; open it with `connect`. Coroutines may be called from any loop, `submit` from any thread."""

    name = "kafka"
    capabilities = CAPABILITIES

    @classmethod
    async def connect(
        cls, options: KafkaOptions, metrics: Metrics | None = None, *, read_only: bool = False
    ) -> KafkaWal:
        """Open the log. Stalls and group resets are counted in `metrics`. With `read_only`, opening and reading create
        no topics. Raises `Unavailable` when no broker answers within `delivery_timeout_s` or `read_only` finds no log,
        and `ConfigError`."""
        wal = cls(options, metrics, read_only=read_only)
        try:
            await wal._io.call(wal._open)
        except BaseException:
            await wal.close()
            raise
        return wal

    def __init__(self, options: KafkaOptions, metrics: Metrics | None = None, *, read_only: bool = False) -> None:
        """Use `connect`."""
        super().__init__(f"kafka://{options.bootstrap}/{'' if options.foreign else options.prefix}", metrics)
        if options.foreign:
            self.capabilities: Capabilities = FOREIGN_CAPABILITIES
        self._options, self._read_only = options, read_only
        self._stalls = StallWatch(metrics)
        self._io = IoThread("tidewal-kafka")
        self._pending = PendingBytes(options.pending_bytes, self._shown)
        self._fetchers: set[ChannelFetcher] = set()
        self._reading_connections: list[int] = []  # those that no fetcher uses
        self._new_connections = itertools.count(CONTROL + 1)
        self._writes: Cluster
        self._reads: Cluster
        self._catalog: KafkaCatalog
        self._management: ChannelAccess
        self._appender: Appender | None = None
        self._groups: Groups | None = None
        self._clusters: list[Cluster] = []
        self._stalls.start()
        self._io.start()

    async def _open(self) -> None:
        """Connect. Runs on the I/O loop, as the methods whose names end with `_io`."""
        self._notifiers.gather()
        self._writes, self._reads = (Cluster(self._options, self._stalls) for _ in range(2))
        self._clusters = [self._writes, self._reads]
        first_contact_s = min(self._options.connect_timeout_s, self._options.delivery_timeout_s)
        await self._writes.open(within_s=first_contact_s)
        await self._reads.open(within_s=first_contact_s)
        await (self._open_foreign() if self._options.foreign else self._open_own())
        self._appender = Appender(
            self._writes,
            self._catalog,
            self._management,
            self._pending,
            self._io,
            SEND_CONNECTIONS,
            self._notifiers.flush,
        )
        self._groups = Groups(Cluster(self._options, self._stalls), self._catalog, self._management, self._io)

    async def _open_own(self) -> None:
        catalog = ChannelCatalog(self._writes, CATALOG_CONNECTIONS, self._forget_dropped, read_only=self._read_only)
        self._catalog = catalog
        self._management = Management(self._writes, catalog, self._acknowledged_to, read_only=self._read_only)
        await catalog.open()
        self._io.spawn(catalog.follow())
        await catalog.sync()

    async def _open_foreign(self) -> None:
        catalog = self._catalog = ForeignCatalog(self._writes, self._forget_dropped)
        self._management = ForeignManagement(self._writes, catalog, self._acknowledged_to)
        await catalog.sync()
        self._io.spawn(catalog.follow())

    def _forget_dropped(self) -> None:
        if self._appender is not None:
            self._appender.forget_dropped()

    def _acknowledged_to(self, channel: KafkaChannel) -> int:
        return -1 if self._appender is None else self._appender.acknowledged_to(channel)

    # ---- channels ----------------------------------------------------------------------------------------------------

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        if not self._options.foreign:
            check_name("channel name", channel)
        await self._call(lambda: self._management.create(channel, policy))

    async def channels(self) -> list[str]:
        return await self._call(lambda: self._management.names())

    async def describe(self, channel: str) -> ChannelInfo:
        return await self._call(lambda: self._management.describe(channel))

    async def drop_channel(self, channel: str) -> None:
        await self._call(lambda: self._management.drop(channel))

    async def latest_id(self, channel: str) -> bytes | None:
        return await self._call(lambda: self._management.latest(channel))

    async def id_at(self, channel: str, timestamp: int) -> bytes | None:
        return await self._call(lambda: self._management.id_at(channel, timestamp))

    async def truncate(self, channel: str, id: bytes) -> None:
        await self._call(lambda: self._management.truncate(channel, id))

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        await self._call(lambda: self._management.hold(channel, holder, id))

    # ---- appending ---------------------------------------------------------------------------------------------------

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        """`Wal.submit`. For a channel that this process does not know, `ChannelNotFound` and `MessageTooLarge` come
        through `done`, since another process may just have created it."""
        self._check_open()
        if not entries:
            done([])
            return
        assert self._appender is not None  # from `_open` on
        self._appender.submit(entries, done)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        """`Wal.read`. The reader of an ephemeral channel goes on at the oldest stored entry when it falls behind."""
        self._check_open()
        return Reader(self, channel, start)

    async def open_fetcher(self, channel: str, start: Start) -> ChannelFetcher | None:
        """Begin to fetch a channel from `start`; None when the log is closed. Raises `ChannelNotFound`."""
        try:
            found = self._catalog.find(channel) or await self._call(lambda: self._management.find(channel))
            return self._begin_fetching(found, start)
        except Closed:
            return None

    def _begin_fetching(self, channel: KafkaChannel, start: Start) -> ChannelFetcher:
        fetcher = ChannelFetcher(channel, start, self._options.prefetch_bytes)
        with self._pending.lock:
            self._check_open()
            self._fetchers.add(fetcher)
            assert self._appender is not None  # from `_open` on
            send_queue = self._appender.send_queue(channel) if start is From.LATEST else None
            if send_queue is not None:  # entries submitted from now on come after the start
                send_queue.pause()
        self._io.post(lambda: _forget(self._io.spawn(self._fetch_io(fetcher, send_queue))))
        return fetcher

    async def _fetch_io(self, fetcher: ChannelFetcher, send_queue: ChannelSendQueue | None) -> None:
        def started() -> None:
            if send_queue is not None:
                with self._pending.lock:
                    send_queue.resume()

        connection = self._reading_connections.pop() if self._reading_connections else next(self._new_connections)
        listeners = fetcher.channel.listeners
        listeners.add(fetcher.dropped)
        try:
            if fetcher.channel.dropped:
                fetcher.dropped(was_dropped(fetcher.channel))
            await fetcher.run(self._reads, connection, lambda: self._management.ensure(fetcher.channel), started)
        finally:
            listeners.discard(fetcher.dropped)
            self._reads.close_connection(connection)  # a broker may be holding back the answer to a fetch
            self._reading_connections.append(connection)
            self._notifiers.flush()

    def close_fetcher(self, fetcher: ChannelFetcher) -> None:
        """Stop fetching; the fetcher is not needed any more."""
        self._fetchers.discard(fetcher)
        fetcher.close()
        with contextlib.suppress(Closed):
            self._io.post(fetcher.cancel)

    def notifier(self) -> LoopNotifier:
        """The notifier of the running loop."""
        return self._notifiers.current()

    # ---- groups ------------------------------------------------------------------------------------------------------

    async def _coordinator_client(self) -> CoordinatorClient:
        """Where the brokers do not allow sessions as short as a member asks for, they are of 6 s. `seek_group` moves
        only groups without members."""
        return await self._call(self._open_groups)

    async def _open_groups(self) -> CoordinatorClient:
        assert self._groups is not None
        return await self._groups.opened()

    # ---- closing -----------------------------------------------------------------------------------------------------

    async def _close(self) -> None:
        """Submitted entries are answered first, after `delivery_timeout_s` with `Unavailable`."""
        answered, drained = self._notifiers.promise()
        with self._pending.lock:
            self._closed = True
            fetchers, self._fetchers = self._fetchers, set()
        for fetcher in fetchers:
            fetcher.close()
        self._pending.close(lambda: drained([]))
        await answered
        await self._io.call(self._close_io)
        await self._io.stop()
        await asyncio.to_thread(self._stalls.close)

    async def _close_io(self) -> None:
        if self._groups is not None:
            await self._groups.close()
        await self._io.quit()
        self._notifiers.flush()
        await asyncio.gather(*(cluster.close() for cluster in self._clusters))

    async def _call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._check_open()
        return await self._io.call(make)


def _forget(task: asyncio.Task[None]) -> None:
    """The I/O thread keeps track of its background tasks; no caller waits for this one."""
