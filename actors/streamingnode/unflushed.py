"""How many bytes of each collection are in the log and not yet in its table: the limit that keeps memory and disk
bounded while a DataNode is slow or down."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from ...runtime.catalog.flush_events import FlushEvent
from ...runtime.errors import CollectionNotFound, Overloaded, Unavailable
from ...runtime.log.names import pchannel_of


class _Shard:
    """One vchannel: the sizes of the records that are appended and not stored, in order of time."""

    def __init__(self) -> None:
        self.appended: deque[tuple[int, int]] = deque()
        self.bytes = 0
        self.stored = 0
        self.recovered = 0  # the timestamp up to which the log itself was counted
        self.gone = False

    def recover(self, ts: int, size: int) -> None:
        self.recovered = ts
        if ts > self.stored:
            self.appended.append((ts, size))
            self.bytes += size

    def add(self, ts: int, size: int) -> None:
        if ts > max(self.stored, self.recovered):
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
        self._ended = False
        self._changed = asyncio.Event()

    def add(self, vchannel: str, ts: int, size: int) -> None:
        """Count `size` bytes that were appended to `vchannel` at `ts`."""
        self._shards.setdefault(vchannel, _Shard()).add(ts, size)

    def begin_recovery(self, pchannels: Iterable[str]) -> None:
        """Forget the counts of `pchannels`, whose log is about to be read and counted again."""
        channels = set(pchannels)
        for vchannel, shard in self._shards.items():
            if pchannel_of(vchannel) in channels:
                shard.appended.clear()
                shard.bytes = shard.recovered = 0

    def recover(self, vchannel: str, ts: int, size: int) -> None:
        """Count `size` bytes of `vchannel` at `ts` that were found in the log."""
        self._shards.setdefault(vchannel, _Shard()).recover(ts, size)

    def bytes(self, vchannels: Iterable[str]) -> int:
        """The bytes of these vchannels that are not stored yet."""
        return sum(self._shards[name].bytes for name in vchannels if name in self._shards)

    def oldest(self, vchannels: Iterable[str]) -> int:
        """The timestamp of the oldest record of these vchannels that is not stored yet; 0 where all are."""
        shards = [self._shards[name] for name in vchannels if name in self._shards]
        return min((shard.appended[0][0] for shard in shards if shard.appended), default=0)

    def check(self, collection: str, vchannels: Iterable[str], size: int) -> None:
        """Raise `Overloaded` when `size` more bytes of `collection` would pass the limit. With nothing unflushed any
        batch passes."""
        held = self.bytes(vchannels)
        if held and held + size > self.limit_bytes:
            raise Overloaded(
                f"{held} bytes of {collection} are not in its table yet, the limit is {self.limit_bytes} "
                "(streamingNode.maxUnflushedBytes); retry when the DataNode has caught up",
                limit="streamingNode.maxUnflushedBytes",
            )

    def store(self, flushed: FlushEvent) -> None:
        """Subtract what a DataNode has stored according to its event `flushed`."""
        for vchannel, time in flushed.times.items():
            self._shards.setdefault(vchannel, _Shard()).store(time)
        self._wake()

    async def stored(self, vchannels: Iterable[str], time: int) -> None:
        """Wait until the table has everything of `vchannels` up to `time`. Raises `CollectionNotFound` when the
        collection is dropped meanwhile, `Unavailable` when nothing is counted any more."""
        shards = [self._shards.setdefault(name, _Shard()) for name in vchannels]
        while any(shard.stored < time for shard in shards):
            if self._ended:
                raise Unavailable("the StreamingNode ended before all was stored; flush again")
            if any(shard.gone for shard in shards):
                raise CollectionNotFound("the collection was dropped before all of it was stored")
            await self._changed.wait()

    def forget(self, vchannels: Iterable[str]) -> None:
        """Remove the counts of a dropped collection; `stored` calls that wait for it end."""
        for name in vchannels:
            shard = self._shards.pop(name, None)
            if shard is not None:
                shard.gone = True
        self._wake()

    def end(self) -> None:
        """Count nothing any more; `stored` calls that wait end."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
