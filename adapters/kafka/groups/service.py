"""The groups of one open log: their connections are made when somebody asks for the first of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from ....runtime.wal import GroupInfo
from ..catalog import Catalog, Channel
from ..cluster import Cluster
from ..io_thread import IoThread
from ..management import Management
from .committing import forget
from .link import CONNECTION, KafkaLink, Sessions
from .listing import Listing

APPENDING = range(CONNECTION + 1, CONNECTION + 5)  # connections for the entries of transactions
JOINING_FROM = APPENDING.stop


class Groups:
    """All that a log does for consumer groups. Belongs to the I/O loop; `link` is for any."""

    def __init__(self, cluster: Cluster, catalog: Catalog, management: Management, io: IoThread) -> None:
        self._cluster, self._management = cluster, management
        self._opening: asyncio.Task[None] | None = None
        self._listing = Listing(cluster, catalog)
        self._sessions = Sessions(cluster, catalog, management, io, _appending, itertools.count(JOINING_FROM))
        self.link = KafkaLink(self._sessions, io)

    async def opened(self) -> Groups:
        """Return with connections. Raises `Unavailable`, `ConfigError`."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.create_task(self._cluster.open())
        await asyncio.shield(self._opening)
        return self

    async def check(self, group: str, channels: Sequence[str]) -> None:
        """Whether a member may ask for these channels. Raises what `Wal.join` does."""
        await self._sessions.check(group, channels)

    async def groups(self) -> list[GroupInfo]:
        """`Wal.groups`."""
        return await self._listing.groups()

    async def move(self, group: str, name: str, position: bytes) -> None:
        """Store a position in a group without members; b"" for the first entry that is kept."""
        channel = await self._management.find(name)
        await self._management.open_to(group, channel)
        position = position or await self._management.before_first(channel)
        await self._listing.move(group, channel, position)
        await forget(self._management, channel, position)

    async def drop(self, group: str) -> None:
        """`Wal.drop_group`."""
        await self._listing.drop(group)

    async def close(self) -> None:
        """End all sessions and drop the connections."""
        await self._sessions.close()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
            await self._cluster.close()


def _appending(channel: Channel) -> int:
    return APPENDING[channel.incarnation % len(APPENDING)]
