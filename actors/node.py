"""What the roles of one process share: the log, the names of its channels, clock, settings and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import anyio.to_thread

from ..runtime.clock import HybridClock
from ..runtime.config.settings import Settings
from ..runtime.errors import ChannelExists, TidewalError
from ..runtime.log.names import Names
from ..runtime.log.wal import ChannelPolicy, Wal
from ..runtime.metrics.metrics import Metrics
from ..runtime.ownership.lease import Lease
from ..runtime.rpc.protocol import REQUEST_CHANNEL
from ..runtime.tables.table_store import TableStore
from .local_owner import LocalOwner

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


@dataclass(frozen=True, slots=True)
class Node:
    """One process' surroundings. `tables` is the place of the Delta tables.

    `incarnation` is the name of a node of all roles in the catalog, new at each start: once another one leads, this one
    is superseded. Roles without a MixCoord beside them have none and serve any leader. `unreadable` says what is wrong
    with the tables of a collection, by role and collection name, while they cannot be read. In `local_owner` the roles
    find the StreamingNode of this process.
    """

    name: str
    wal: Wal
    tables: TableStore
    settings: Settings = field(default_factory=Settings)
    clock: HybridClock = field(default_factory=HybridClock)
    metrics: Metrics = field(default_factory=Metrics)
    blocking: RunBlocking = in_thread
    incarnation: str = ""
    lease: Lease | None = None  # where the log itself does not keep a second node away
    unreadable: dict[tuple[str, str], TidewalError] = field(default_factory=dict[tuple[str, str], TidewalError])
    local_owner: LocalOwner = field(default_factory=LocalOwner)

    @property
    def names(self) -> Names:
        """The names of the cluster's channels."""
        given = self.settings.common.pre_created_topic
        timeticker = given.timeticker if given.enabled else ""
        return Names(self.settings.msg_channel.chan_name_prefix.cluster, timeticker)

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
