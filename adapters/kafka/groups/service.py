"""The groups of one open log; its connections are opened with the first call that needs them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from ....runtime.log.wal import GroupInfo
from ..catalog import ChannelCatalog, KafkaChannel
from ..cluster import Cluster
from ..io_thread import IoThread
from ..management import Management
from .coordinator_client import CONNECTION, KafkaCoordinatorClient, Sessions
from .group_admin import GroupAdmin
from .offset_committer import forget

APPEND_CONNECTIONS = range(CONNECTION + 1, CONNECTION + 5)  # connections for the entries of transactions
FIRST_JOIN_CONNECTION = APPEND_CONNECTIONS.stop


class Groups:
    """The consumer groups of a log. Belongs to the I/O loop; `client` may be used from any loop."""

    def __init__(self, cluster: Cluster, catalog: ChannelCatalog, management: Management, io: IoThread) -> None:
        self._cluster, self._management = cluster, management
        self._opening: asyncio.Task[None] | None = None
        self._admin = GroupAdmin(cluster, catalog)
        self._sessions = Sessions(
            cluster, catalog, management, io, _append_connection, itertools.count(FIRST_JOIN_CONNECTION)
        )
        self.client = KafkaCoordinatorClient(self._sessions, io)

    async def opened(self) -> Groups:
        """Return this once its connections are open. Raises `Unavailable`, `ConfigError`."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.create_task(self._cluster.open())
        await asyncio.shield(self._opening)
        return self

    async def check(self, group: str, channels: Sequence[str]) -> None:
        """Check that a member may subscribe to these channels. Raises what `Wal.join` does."""
        await self._sessions.check(group, channels)

    async def groups(self) -> list[GroupInfo]:
        """`Wal.groups`."""
        return await self._admin.groups()

    async def move(self, group: str, name: str, position: bytes) -> None:
        """Store the position of a group without members in channel `name`; b"" for the first entry that is kept. Raises
        `ChannelNotFound`, and `InvalidRequest` where it has members."""
        channel = await self._management.find(name)
        await self._management.open_to(group, channel)
        position = position or await self._management.before_first(channel)
        await self._admin.move(group, channel, position)
        await forget(self._management, channel, position)

    async def drop(self, group: str) -> None:
        """`Wal.drop_group`."""
        await self._admin.drop(group)

    async def close(self) -> None:
        """End all sessions and drop the connections."""
        await self._sessions.close()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
            await self._cluster.close()


def _append_connection(channel: KafkaChannel) -> int:
    return APPEND_CONNECTIONS[channel.incarnation % len(APPEND_CONNECTIONS)]
