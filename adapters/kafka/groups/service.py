"""The groups of one open log; its connections are opened with the first call that needs them."""

from __future__ import annotations

import asyncio
import itertools

from ..catalog import ChannelCatalog, KafkaChannel
from ..cluster import Cluster
from ..io_thread import IoThread
from ..management import Management
from .coordinator_client import CONNECTION, KafkaCoordinatorClient, Sessions

APPEND_CONNECTIONS = range(CONNECTION + 1, CONNECTION + 5)  # connections for the entries of transactions
FIRST_JOIN_CONNECTION = APPEND_CONNECTIONS.stop


class Groups:
    """The consumer groups of a log. Belongs to the I/O loop."""

    def __init__(self, cluster: Cluster, catalog: ChannelCatalog, management: Management, io: IoThread) -> None:
        self._cluster = cluster
        self._opening: asyncio.Task[None] | None = None
        self._sessions = Sessions(
            cluster, catalog, management, io, _append_connection, itertools.count(FIRST_JOIN_CONNECTION)
        )
        self._client = KafkaCoordinatorClient(self._sessions, io)

    async def opened(self) -> KafkaCoordinatorClient:
        """The client of all groups, once the connections are open. Raises `Unavailable`, `ConfigError`."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.create_task(self._cluster.open())
        await asyncio.shield(self._opening)
        return self._client

    async def close(self) -> None:
        """End all sessions and drop the connections."""
        await self._sessions.close()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
            await self._cluster.close()


def _append_connection(channel: KafkaChannel) -> int:
    return APPEND_CONNECTIONS[channel.incarnation % len(APPEND_CONNECTIONS)]
