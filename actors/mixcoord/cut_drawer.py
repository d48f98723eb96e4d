"""The cuts up to which other processes read: one for all collections while anything is written, and those that clients
ask for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from ...runtime.catalog.catalog import Collection
from ...runtime.catalog.catalog_log import CatalogLog
from ...runtime.catalog.cuts import Cut, CutEnd
from ...runtime.clock import add_ms
from ...runtime.errors import ActorStopped, DeadlineExceeded, HandlerFailed, Overloaded, Unavailable
from ...runtime.log.record import encode
from ...runtime.log.wal import ControlAppend
from ...runtime.ownership import SyncPoint
from ..metrics import lag_ms
from ..node import Node
from ..owners import Owners

CUT_INTERVAL_S = 0.5
FIRST_LOOK_S = 10.0  # between two looks at what retention has removed
CUT_DEADLINE_S = 2.0  # of a cut that no client waits for: the next one waits behind it
CUT_AGAIN_MS = 24 * 3600 * 1000  # while nothing is written: cuts are kept for two weeks, rows perhaps longer
ASKED_DEADLINE_S = 30.0

_AWAY = (Unavailable, Overloaded, DeadlineExceeded, ActorStopped, HandlerFailed)

_log = logging.getLogger("tidewal.mixcoord")


class CutDrawer:
    """Draws cuts at the owners' present time, and stores them."""

    def __init__(self, node: Node, catalog: CatalogLog, owners: Owners) -> None:
        self._node, self._catalog, self._owners = node, catalog, owners
        self._last: Cut | None = None  # of those that no client has asked for
        self._last_id = b""
        self._first_id = b""  # of the cuts that there are, where retention may remove some soon
        self._look_s = 0.0  # when that is looked at next
        self._time = 0
        node.metrics.gauge("mixcoord_cut_lag_ms").set_function(lambda: lag_ms(node.clock, self._time))

    async def draw(self, collection: Collection) -> int:
        """Store a cut of one collection, which sees all that was acknowledged to it before; returns its time. Raises as
        `Owners.sync` does."""
        cut = _cut_at(await self._owners.sync(collection, deadline_s=ASKED_DEADLINE_S))
        await self._store(cut)
        return cut.time

    async def run(self) -> None:
        """Every `CUT_INTERVAL_S` store a cut of all channels that are open, while one of them is written: what that
        costs does not grow with the collections. A channel whose owner does not answer has no part in it."""
        while True:
            await asyncio.sleep(CUT_INTERVAL_S)
            await self._look_at_first()
            channels = [
                name for name in self._catalog.catalog.collection_channels if self._owners.terms((name,)) is not None
            ]
            try:
                try:
                    await self._store_if_new(channels)
                except _AWAY as error:
                    _log.warning("no cut of all channels now: %s", error)
                    await self._store_if_new(await self._answering(channels))
            except _AWAY as error:
                _log.warning("no cut now: %s", error)

    async def _answering(self, channels: Sequence[str]) -> list[str]:
        points = await asyncio.gather(*(self._sync([channel]) for channel in channels), return_exceptions=True)
        return [name for name, point in zip(channels, points, strict=True) if not isinstance(point, BaseException)]

    async def _store_if_new(self, channels: Sequence[str]) -> None:
        """Store a cut unless nothing was written since the last one, and that is there and younger than `CUT_AGAIN_MS`:
        retention must not remove the last cut there is."""
        if not channels:
            return
        cut, last = _cut_at(await self._sync(channels)), self._last
        known = last is not None and last.ends == cut.ends and cut.time < add_ms(last.time, CUT_AGAIN_MS)
        if not known or self._last_id < self._first_id:
            self._last_id = await self._store(cut)
            self._last = cut

    async def _sync(self, channels: Sequence[str]) -> SyncPoint:
        return await self._owners.sync_channels(channels, deadline_s=CUT_DEADLINE_S)

    async def _store(self, cut: Cut) -> bytes:
        """Store a cut; returns its id."""
        entry = ControlAppend(self._node.names.cuts, encode(cut.to_record()), cut.time)
        [id] = await self._node.wal.append_many([entry])
        self._time = max(self._time, cut.time)
        return id

    async def _look_at_first(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._node.wal.capabilities.shared_segments and now_s >= self._look_s:
            self._look_s = now_s + FIRST_LOOK_S
            with suppress(*_AWAY):  # looked at again in a moment
                kept = await self._node.wal.describe(self._node.names.cuts)
                self._first_id = kept.first_id or (kept.latest_id or b"") + b"\0"  # none there: behind the last one


def _cut_at(point: SyncPoint) -> Cut:
    return Cut(point.time, {name: CutEnd(*end) for name, end in point.channels.items()})
