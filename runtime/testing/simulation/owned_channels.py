"""The channels that a simulated node owns: all that a node needs of `ChannelOwner` is here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from ...catalog.catalog import PChannelState
from ...catalog.catalog_log import CatalogLog
from ...clock import HybridClock
from ...log.record import Record, RecordType
from ...log.wal import Wal
from ...ownership import Appended, ChannelGrant, ChannelOwner, ReleasedChannel


class OwnedChannels:
    """Wraps the `ChannelOwner` of a node. A channel that moves is given up by itself (`release`); where the outcome of
    an append is unknown, all are given up together, by `close`."""

    def __init__(self, wal: Wal, clock: HybridClock, lease_holds: Callable[[], bool], catalog: CatalogLog) -> None:
        self.active: dict[str, int] = {}  # channel to term
        self._acquiring: set[str] = set()
        self._owner = ChannelOwner(wal, clock, lease_holds=lease_holds, grants=catalog, snapshot_records=200)

    @property
    def stalled(self) -> bool:
        """Whether the outcome of an append is unknown: its channel must be owned under a new term."""
        return bool(self._owner.stalled)

    async def acquire(self, name: str, state: PChannelState) -> bytes:
        """Write the fence of the present grant and recover the channel; returns the fence's id."""
        grant = ChannelGrant(name, state.term, state.previous_limit, state.limit, state.checkpoint, dict(state.fences))
        self._acquiring.add(name)
        try:
            return await self._owner.acquire(grant)
        finally:
            self._acquiring.discard(name)

    def activate(self, name: str, term: int) -> None:
        """Take appends: the fence is in the catalog."""
        self._owner.activate(name, term)
        self.active[name] = term

    def extend(self, limit: int, channels: Collection[str]) -> None:
        """Stamp up to `limit` in these channels; not now where others are being acquired, for it would be theirs."""
        if self._acquiring <= set(channels):
            self._owner.renew(limit)

    def renewed(self) -> None:
        """The lease holds again: acknowledge what was answered after the last one."""
        self._owner.renew(0)

    def checkpoint(self, name: str) -> bytes:
        """From where the next owner must read."""
        return self._owner.checkpoints().get(name, b"")

    def tick(self) -> None:
        """What the heartbeat does."""
        self._owner.tick_all()

    def append(self, channel: str, producer: str, pseq: int) -> asyncio.Future[Appended]:
        """Append a record that says who wrote it."""
        record = Record(RecordType.ROWS, body=b"%s %d" % (producer.encode(), pseq))
        return self._owner.append([(channel, record)], producer=producer, pseq=pseq, rows=1)

    async def release(self, name: str) -> ReleasedChannel:
        """Give up one channel, in good order."""
        del self.active[name]
        return await self._owner.release(name)

    async def close(self) -> int:
        """Take no more appends, and wait for those under way. Returns the limit of what was stamped."""
        self.active = {}
        return await self._owner.close()
