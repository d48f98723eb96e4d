"""How much of each collection is in the log and not yet in its table: the limit that keeps memory and disk bounded
while a DataNode is slow or away."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from ...runtime.errors import Overloaded
from ..flushes import Flushed


class _Shard:
    """One vchannel: the sizes of what was appended and is not stored, in order of time."""

    def __init__(self) -> None:
        self.appended: deque[tuple[int, int]] = deque()
        self.bytes = 0
        self.stored = 0

    def add(self, ts: int, size: int) -> None:
        if ts > self.stored:
            self.appended.append((ts, size))
            self.bytes += size

    def store(self, ts: int) -> None:
        self.stored = max(self.stored, ts)
        while self.appended and self.appended[0][0] <= ts:
            self.bytes -= self.appended.popleft()[1]


class Unflushed:
    """Bytes per collection between the log and the table."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._shards: dict[str, _Shard] = {}
        self._changed = asyncio.Event()

    def add(self, vchannel: str, ts: int, size: int) -> None:
        """`size` bytes were appended to `vchannel` at `ts`."""
        self._shards.setdefault(vchannel, _Shard()).add(ts, size)

    def bytes(self, vchannels: Iterable[str]) -> int:
        """The bytes of these vchannels that are not stored yet."""
        return sum(self._shards[name].bytes for name in vchannels if name in self._shards)

    def check(self, collection: str, vchannels: Iterable[str], size: int) -> None:
        """Raise `Overloaded` when `size` more bytes would pass the limit. One batch is let through always."""
        held = self.bytes(vchannels)
        if held and held + size > self.limit_bytes:
            raise Overloaded(
                f"{held} bytes of {collection} are not in its table yet, the limit is {self.limit_bytes} "
                "(proxy.maxUnflushedBytes); retry when the DataNode has caught up",
                limit="proxy.maxUnflushedBytes",
            )

    def store(self, flushed: Flushed) -> None:
        """A DataNode has stored a collection up to some time."""
        for vchannel, time in flushed.times.items():
            self._shards.setdefault(vchannel, _Shard()).store(time)
        self._changed.set()
        self._changed = asyncio.Event()

    async def stored(self, vchannels: Iterable[str], time: int) -> None:
        """Wait until the table has everything of `vchannels` up to `time`."""
        names = list(vchannels)
        while any(self._shards.setdefault(name, _Shard()).stored < time for name in names):
            await self._changed.wait()

    def forget(self, vchannels: Iterable[str]) -> None:
        """The collection is gone."""
        for name in vchannels:
            self._shards.pop(name, None)
