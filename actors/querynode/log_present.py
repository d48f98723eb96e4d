"""The time of the log now, for all questions of a collection that want to see what was acknowledged before them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeAlias

from ...runtime.catalog.catalog import Collection
from ...runtime.ownership import SyncPoint
from ..owners import Owners

SYNC_DEADLINE_S = 60.0  # the client has a deadline of its own

_Syncing: TypeAlias = "asyncio.Task[SyncPoint]"


class LogPresent:
    """Asks the owners of the channels of a collection. Questions that come while one request is under way share the
    next."""

    def __init__(
        self, owners: Owners, collection: Collection, on_point: Callable[[Collection, SyncPoint], None]
    ) -> None:
        """`on_point` is called with each answer."""
        self._owners, self._collection, self._on_point = owners, collection, on_point
        self._syncing: _Syncing | None = None
        self._sync_again: _Syncing | None = None

    async def point(self) -> SyncPoint:
        """A time, and the last record of each channel at or before it: everything acknowledged before this call is at
        or before it (guarantee 8). Raises what `Owners.sync` raises."""
        running = self._syncing
        if running is None or running.done():
            self._syncing = _begin(self._sync())
            return await asyncio.shield(self._syncing)
        if self._sync_again is None:
            self._sync_again = _begin(self._sync_after(running))
        return await asyncio.shield(self._sync_again)

    async def _sync_after(self, running: _Syncing) -> SyncPoint:
        await asyncio.wait([running])
        self._syncing, self._sync_again = self._sync_again, None
        return await self._sync()

    async def _sync(self) -> SyncPoint:
        point = await self._owners.sync(self._collection, deadline_s=SYNC_DEADLINE_S)
        self._on_point(self._collection, point)
        return point


def _begin(sync: Coroutine[object, object, SyncPoint]) -> _Syncing:
    """Start `sync` as a task; its exception counts as retrieved, for every waiting query may be cancelled by then."""
    task = asyncio.create_task(sync)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
