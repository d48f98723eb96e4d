"""The groups of one open log; its connections are opened with the first call that needs them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ....runtime.groups.coordinator_client import CoordinatorClient
from ....runtime.groups.forwarding_client import ForwardingClient
from ..channel_access import ChannelAccess, KafkaCatalog
from ..cluster import Cluster
from ..io_thread import IoThread
from .sessions import Sessions

T = TypeVar("T")


class Groups(ForwardingClient):
    """The consumer groups of a log, as `CoordinatorClient` from any loop. What says so belongs to the I/O loop."""

    def __init__(self, cluster: Cluster, catalog: KafkaCatalog, management: ChannelAccess, io: IoThread) -> None:
        self._cluster, self._io = cluster, io
        self._opening: asyncio.Task[None] | None = None
        self._sessions = Sessions(cluster, catalog, management, io)

    async def opened(self) -> Groups:
        """These groups, once the connections are open. On the I/O loop. Raises `Unavailable`, `ConfigError`."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.create_task(self._cluster.open())
        await asyncio.shield(self._opening)
        return self

    async def close(self) -> None:
        """End all sessions and drop the connections. On the I/O loop."""
        await self._sessions.close()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
            await self._cluster.close()

    async def _call(self, call: Callable[[CoordinatorClient], Coroutine[Any, Any, T]]) -> T:
        return await self._io.call(lambda: call(self._sessions))
