"""What the roles of one process share: the log, the names of its channels, clock, settings and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import anyio.to_thread

from ..runtime.clock import HybridClock
from ..runtime.config.settings import Settings
from ..runtime.direct.connections import NodeConnections
from ..runtime.direct.network import Network, TcpNetwork
from ..runtime.errors import ChannelExists, TidewalError
from ..runtime.log.names import Names
from ..runtime.log.wal import ChannelPolicy, Wal
from ..runtime.metrics.metrics import Metrics
from ..runtime.rpc.protocol import REQUEST_CHANNEL
from ..runtime.streams.dispatcher import Dispatchers
from ..runtime.streams.factory import PACK_BYTES
from ..runtime.tables.table_store import TableStore
from .cluster_member import ClusterMember
from .local_owner import LocalOwner

if TYPE_CHECKING:
    from .log_migration import LogMigration
    from .shared_log_migration import SharedLogMigration

Result = TypeVar("Result")


class RunBlocking(Protocol):
    """Runs a blocking call beside the event loop, on a worker thread by default. A test that wants one order of
    events passes one that runs it in place."""

    def __call__(self, call: Callable[[], Result], /) -> Awaitable[Result]: ...


async def in_thread(call: Callable[[], Result], /) -> Result:
    """What `call` returns on a worker thread. A task that is cancelled waits for the thread first, which could write
    into a table that the next node has opened, or whose directory is removed."""
    running = asyncio.ensure_future(anyio.to_thread.run_sync(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # retrieved, or asyncio would report it as lost
        raise


def names_of(settings: Settings) -> Names:
    """The names of the channels of a cluster with these settings."""
    given = settings.common.pre_created_topic
    timeticker = given.timeticker if given.enabled else ""
    return Names(settings.msg_channel.chan_name_prefix.cluster, timeticker)


@dataclass(frozen=True, slots=True)
class Node:
    """One process' surroundings. `tables` is the place of the Delta tables.

    `cluster` is the membership of the process, whose `incarnation` is its name in the catalog, new at each start.
    `unreadable` says what is wrong with the tables of a collection, by role and collection name, while they cannot be
    read. In `local_owner` the roles find the StreamingNode of this process; `message_bytes` says how large a message of
    the pchannels may be that are owned elsewhere. `before_leaving` is what the end of the node waits for, by role,
    while all goes on. The `dispatchers` read the pchannels for all collections. Requests to nodes that have addresses
    go by `connections`, which are made over `network`, TCP by default. `log_migration` is what operators ask to have
    the log of this process migrated; by `shared_migration` it goes along where a command migrates one that several use.
    """

    name: str
    wal: Wal
    tables: TableStore
    cluster: ClusterMember
    settings: Settings = field(default_factory=Settings)
    clock: HybridClock = field(default_factory=HybridClock)
    metrics: Metrics = field(default_factory=Metrics)
    blocking: RunBlocking = in_thread
    unreadable: dict[tuple[str, str], TidewalError] = field(default_factory=dict[tuple[str, str], TidewalError])
    message_bytes: dict[str, int] = field(default_factory=dict[str, int])
    local_owner: LocalOwner = field(default_factory=LocalOwner)
    before_leaving: dict[str, Callable[[], Awaitable[None]]] = field(
        default_factory=dict[str, Callable[[], Awaitable[None]]]
    )
    network: Network | None = None
    log_migration: LogMigration | None = None
    shared_migration: SharedLogMigration | None = None
    dispatchers: Dispatchers = field(init=False)
    connections: NodeConnections = field(init=False)

    def __post_init__(self) -> None:
        buffer_bytes = self.settings.mq.mq_buf_size * PACK_BYTES
        object.__setattr__(self, "dispatchers", Dispatchers(self.wal, buffer_bytes, self.metrics))
        cluster, settings = self.cluster, self.settings.cluster
        network = self.network or TcpNetwork(settings)
        connections = NodeConnections(cluster.incarnation, cluster.member, settings, network, self.metrics)
        object.__setattr__(self, "connections", connections)

    @property
    def names(self) -> Names:
        """The names of the cluster's channels."""
        return names_of(self.settings)

    @property
    def is_moving(self) -> bool:
        """Whether the roles of this process are about to stop, and go on with another log."""
        return any(each is not None and each.switching for each in (self.log_migration, self.shared_migration))

    @property
    def incarnation(self) -> str:
        """The name of this process in the catalog."""
        return self.cluster.incarnation

    async def make_event_channel(self, name: str) -> None:
        """Create a channel of events about what other channels have: cuts, flushes, queries. Where all channels share
        segments it keeps none of them by itself, or no retention of the others would free any."""
        policy = ChannelPolicy(retention_bytes=0) if self.wal.capabilities.shared_segments else ChannelPolicy()
        with suppress(ChannelExists):  # of an earlier build
            await self.wal.create_channel(name, policy)

    async def make_heartbeats(self) -> None:
        """Create the heartbeat channel, unless an administrator was to create it: MixCoord has checked that one."""
        if not self.names.timeticker:
            await self.wal.create_channel(self.names.heartbeats, REQUEST_CHANNEL)
