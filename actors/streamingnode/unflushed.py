"""How many bytes of each collection are in the log and not yet in its table: to be limited, so that memory and disk are
bounded while a DataNode is slow or down.

They are counted by vchannel, and go with it to the next owner: each snapshot that an owner stores in a pchannel bears
what it has counted there (`carried`), and what lies behind the snapshot the next owner reads, and counts itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import msgpack

from ...runtime.catalog.flush_events import FlushEvent
from ...runtime.errors import BadRecord, CollectionNotFound, Unavailable
from ...runtime.log.names import pchannel_of
from ...runtime.log.record import DECODE_ERRORS
from ...runtime.replicated.records import typed

CARRIED_STEPS = 4  # of a vchannel, in a snapshot: as many flushes free what was carried, step by step

Counted = tuple[int, int]  # bytes, and the timestamp up to which a table must be for them to be in it: (ts, size)


class _Shard:
    """One vchannel: the sizes of the records that are appended and not stored, in order of time."""

    def __init__(self) -> None:
        self.appended: deque[Counted] = deque()
        self.bytes = 0
        self.stored = 0
        self.newest = 0  # the timestamp up to which records were counted
        self.recovered = 0  # the same, of those that were found in the log itself
        self.gone = False

    def recover(self, ts: int, size: int) -> None:
        self.recovered = ts
        self._count(ts, size)

    def add(self, ts: int, size: int) -> None:
        if ts > self.recovered:
            self._count(ts, size)

    def _count(self, ts: int, size: int) -> None:
        self.newest = max(self.newest, ts)
        if ts > self.stored:
            self.appended.append((ts, size))
            self.bytes += size

    def replace(self, upto: int, carried: Iterable[Counted]) -> None:
        """Let `carried` be what was counted up to the time `upto`."""
        known = [each for each in carried if each[0] > self.stored]
        self.appended = deque([*known, *(each for each in self.appended if each[0] > upto)])
        self.bytes = sum(size for _, size in self.appended)
        self.newest = max([self.newest, *(ts for ts, _ in known)])

    def store(self, ts: int) -> None:
        self.stored = max(self.stored, ts)
        while self.appended and self.appended[0][0] <= ts:
            self.bytes -= self.appended.popleft()[1]

    def clear(self) -> None:
        self.appended.clear()
        self.bytes = self.recovered = self.newest = 0


class Unflushed:
    """Bytes per collection between the log and the table. On the loop, but for `carried`."""

    def __init__(self) -> None:
        self._shards: dict[str, _Shard] = {}
        self._counting = threading.Lock()
        self._ended = False
        self._changed = asyncio.Event()

    def add(self, vchannel: str, ts: int, size: int) -> None:
        """Count `size` bytes that were appended to `vchannel` at `ts`."""
        with self._counting:
            self._shard(vchannel).add(ts, size)

    def _shard(self, vchannel: str) -> _Shard:
        shard = self._shards.get(vchannel)
        if shard is None:
            shard = self._shards[vchannel] = _Shard()
        return shard

    def _on(self, pchannel: str) -> list[tuple[str, _Shard]]:
        return [(name, shard) for name, shard in self._shards.items() if pchannel_of(name) == pchannel]

    # ---- from owner to owner ----------------------------------------------------------------------------------------

    def clear(self, pchannel: str) -> None:
        """Forget the counts of `pchannel`: another owner counts there, or its log is about to be read and counted."""
        with self._counting:
            for _, shard in self._on(pchannel):
                shard.clear()

    def recover(self, vchannel: str, ts: int, size: int) -> None:
        """Count `size` bytes of `vchannel` at `ts` that were found in the log."""
        with self._counting:
            self._shard(vchannel).recover(ts, size)

    def carried(self, pchannel: str, is_open: Callable[[str], bool]) -> bytes:
        """What is counted now of the vchannels of `pchannel` that are open, for its next owner. Callable from any
        thread."""
        with self._counting:
            shards = self._on(pchannel)
            upto = max((shard.newest for _, shard in shards), default=0)
            counted = {name: list(shard.appended) for name, shard in shards if shard.appended and is_open(name)}
        return cast(bytes, msgpack.packb((upto, {name: _in_steps(each) for name, each in counted.items()})))

    def take_over(self, pchannel: str, carried: bytes) -> None:
        """Take what an earlier owner of `pchannel` has counted, in place of what was recovered of the same time. Raises
        `BadRecord`."""
        try:
            upto, counted = cast("tuple[int, dict[str, list[Counted]]]", msgpack.unpackb(carried, use_list=False))
            given = {
                typed(name, str): [(typed(ts, int), typed(size, int)) for ts, size in each]
                for name, each in counted.items()
                if pchannel_of(name) == pchannel
            }
            typed(upto, int)
        except (*DECODE_ERRORS, AttributeError) as error:
            raise BadRecord(f"unreadable counts of unflushed bytes: {error}", reason="body") from error
        with self._counting:
            for name in given:
                self._shard(name)
            for name, shard in self._on(pchannel):
                shard.replace(upto, given.get(name, ()))

    # ---- what is counted --------------------------------------------------------------------------------------------

    def bytes(self, vchannels: Iterable[str]) -> int:
        """The bytes of these vchannels that are not stored yet."""
        return sum(self._shards[name].bytes for name in vchannels if name in self._shards)

    def held(self, vchannel: str) -> int:
        """The same of one vchannel."""
        shard = self._shards.get(vchannel)
        return 0 if shard is None else shard.bytes

    def oldest(self, vchannels: Iterable[str]) -> int:
        """The timestamp of the oldest record of these vchannels that is not stored yet; 0 where all are."""
        shards = [self._shards[name] for name in vchannels if name in self._shards]
        return min((shard.appended[0][0] for shard in shards if shard.appended), default=0)

    def store(self, flushed: FlushEvent) -> None:
        """Subtract what a DataNode has stored according to its event `flushed`."""
        with self._counting:
            for vchannel, time in flushed.times.items():
                self._shard(vchannel).store(time)
        self._wake()

    async def stored(self, vchannels: Iterable[str], time: int) -> None:
        """Wait until the table has everything of `vchannels` up to `time`. Raises `CollectionNotFound` when the
        collection is dropped meanwhile, `Unavailable` when nothing is counted any more."""
        with self._counting:
            shards = [self._shard(name) for name in vchannels]
        while any(shard.stored < time for shard in shards):
            if self._ended:
                raise Unavailable("the StreamingNode ended before all was stored; flush again")
            if any(shard.gone for shard in shards):
                raise CollectionNotFound("the collection was dropped before all of it was stored")
            await self._changed.wait()

    def forget(self, vchannels: Iterable[str]) -> None:
        """Remove the counts of a dropped collection; `stored` calls that wait for it end."""
        with self._counting:
            gone = [self._shards.pop(name) for name in vchannels if name in self._shards]
        for shard in gone:
            shard.gone = True
        self._wake()

    def end(self) -> None:
        """Count nothing any more; `stored` calls that wait end."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _in_steps(counted: Sequence[Counted]) -> list[Counted]:
    """The same bytes in about `CARRIED_STEPS` entries. What is joined counts until the last of it is in the table."""
    step, steps, joined = sum(size for _, size in counted) / CARRIED_STEPS, list[Counted](), 0
    for ts, size in counted:
        joined += size
        if joined >= step:
            steps.append((ts, joined))
            joined = 0
    return [*steps, (counted[-1][0], joined)] if joined else steps
