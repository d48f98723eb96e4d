"""One channel of a migration: what was found equal in both logs so far, and where old entries are in the new log.

Entries are immutable and come behind what is there, so what was compared once is not read again: the next comparison
goes on behind it. That holds within one process; the next one begins anew, for another may have written meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import attrgetter
from struct import Struct
from typing import NamedTuple

import xxhash

from ..errors import CorruptLog
from ..log.wal import ChannelInfo, Entry, Wal
from .channel_copy import Rewrite, check_not_lost, entry_at, movable_entry, stored_batches

INDEX_ENTRIES = 1_000  # from one place that is kept to the next: an entry is looked up by reading so many at most

_HEAD = Struct("<QQ")  # timestamp and size of an entry, in its checksum


@dataclass(frozen=True, slots=True)
class ChannelProof:
    """What a channel had in both logs when they were compared: its `entries` with `bytes` of payload, and a `checksum`
    (xxh3-128) over their timestamps and payloads in order. `last_old` and `last_new` are the ids of the last entry in
    the old and the new log, `latest_old` is what `Wal.latest_id` of the old one said; b"" for none."""

    entries: int
    bytes: int
    checksum: str
    last_old: bytes
    last_new: bytes
    latest_old: bytes


class IdPair(NamedTuple):
    """The ids of one entry in both logs."""

    old: bytes
    new: bytes


class ComparedChannel:
    """The first entries of `channel`, which are equal in both logs: none at first. Entries of the old log count as
    `rewrite` returns them."""

    def __init__(self, channel: str, rewrite: Rewrite = movable_entry) -> None:
        self.channel: str = channel
        self.entries: int = 0
        self.bytes: int = 0
        self.last: IdPair = IdPair(b"", b"")
        self._rewrite = rewrite
        self._first = IdPair(b"", b"")
        self._checksum = xxhash.xxh3_128()
        self._last_checksum = ""  # of the last one alone
        self._index: list[IdPair] = []

    async def compare(
        self, old: Wal, new: Wal, info: ChannelInfo, positions: Iterable[bytes] = (), ids: Iterable[bytes] = ()
    ) -> Mapping[bytes, bytes]:
        """Read on in both logs, side by side, in the old one to where it was when `info` was made, and return where
        `positions` of `old`, up to which all is done, and `ids` are in `new`: b"" is before all entries, and so is an
        id that no entry has any more.

        Raises `CorruptLog` at the first entry in which they differ, and `PositionLost` where an entry behind one of
        the `positions` was removed from `old` before: nobody would notice that in `new`."""
        positions = set(positions)
        await check_not_lost(old, info, positions)
        there = await new.describe(self.channel)
        places: dict[bytes, bytes] = {}
        for id in positions.union(ids):
            last = await self._last_up_to(old, new, id)
            places[id] = last.new if id in positions or last.old == id else b""
        ours_behind = stored_batches(old, info, self.last.old)
        theirs_behind = stored_batches(new, there, self.last.new)
        async with aclosing(_side_by_side(ours_behind, theirs_behind)) as batches:
            async for ours, theirs in batches:
                ours = [self._rewrite(self.channel, entry) for entry in ours]
                self._check_equal(ours, theirs)
                self._add(ours, theirs)
                for id in places:
                    done = bisect_right(ours, id, key=attrgetter("id"))
                    if done and (id in positions or ours[done - 1].id == id):
                        places[id] = theirs[done - 1].id
        return places

    async def place(self, old: Wal, new: Wal, id: bytes) -> bytes:
        """Where the entry `id` of `old` is in `new`; b"" where it is none of those that were compared."""
        last = await self._last_up_to(old, new, id)
        return last.new if last.old == id else b""

    def proof(self, info: ChannelInfo) -> ChannelProof:
        """What was found equal, of a channel of which the old log said `info`."""
        digest = self._checksum.hexdigest()
        return ChannelProof(self.entries, self.bytes, digest, *self.last, info.latest_id or b"")

    async def goes_on(self, old: Wal, new: Wal, info: ChannelInfo) -> bool:
        """Whether the channel of which `old` says `info`, and that of `new`, are still those which were compared, with
        the same beginning: the old one may have been dropped and made again, or cut at its front, since, and another
        run may have emptied the new one."""
        if not self.entries:
            return True
        if info.first_id != self._first.old or (info.latest_id or b"") < self.last.old:
            return False
        there = await new.describe(self.channel)
        if there.first_id != self._first.new or (there.latest_id or b"") < self.last.new:
            return False
        entry = await entry_at(old, info, self.last.old)
        return entry is not None and checksum_of([self._rewrite(self.channel, entry)]) == self._last_checksum

    def _add(self, ours: Sequence[Entry], theirs: Sequence[Entry]) -> None:
        if not self.entries:
            self._first = IdPair(ours[0].id, theirs[0].id)
        _add_to(self._checksum, ours)
        for at in range(-self.entries % INDEX_ENTRIES, len(ours), INDEX_ENTRIES):
            self._index.append(IdPair(ours[at].id, theirs[at].id))
        self.entries += len(ours)
        self.bytes += sum(len(entry.payload) for entry in ours)
        self.last, self._last_checksum = IdPair(ours[-1].id, theirs[-1].id), checksum_of(ours[-1:])

    async def _last_up_to(self, old: Wal, new: Wal, id: bytes) -> IdPair:
        """The last entry up to `id` of `old` among those that were compared; ids of b"" for none."""
        if id >= self.last.old:
            return self.last
        at = bisect_right(self._index, id, key=attrgetter("old"))
        if not at:
            return IdPair(b"", b"")
        begin = self._index[at - 1]
        last_old, behind = begin.old, 0
        async for entries in stored_batches(old, await _up_to(old, self.channel, id), begin.old):
            last_old = entries[-1].id
            behind += len(entries)
        if not behind:
            return begin
        async for entries in stored_batches(new, await _up_to(new, self.channel, self.last.new), begin.new):
            if behind <= len(entries):
                return IdPair(last_old, entries[behind - 1].id)
            behind -= len(entries)
        raise CorruptLog(f"{self.channel} of the new log has less than was found in it before")

    def _check_equal(self, ours: Sequence[Entry], theirs: Sequence[Entry]) -> None:
        """Raise `CorruptLog` where entries of both logs, behind those that were compared, are not the same."""
        for number, (one, other) in enumerate(zip_longest(ours, theirs), self.entries + 1):
            if (
                one is None
                or other is None
                or one.timestamp != other.timestamp
                or bytes(one.payload) != bytes(other.payload)  # copied, as views compare item by item
            ):
                shown = [each.id.hex() if each else "none" for each in (one, other)]
                raise CorruptLog(
                    f"entry {number:,} of {self.channel} is not the same in both logs ({shown[0]} in the old one, "
                    f"{shown[1]} in the new one): something else has written to one of them. Take the migration back "
                    "with --cancel, and begin again"
                )


async def _up_to(wal: Wal, channel: str, id: bytes) -> ChannelInfo:
    return replace(await wal.describe(channel), latest_id=id)


def checksum_of(entries: Iterable[Entry]) -> str:
    """The checksum that a `ChannelProof` has for these entries."""
    checksum = xxhash.xxh3_128()
    _add_to(checksum, entries)
    return checksum.hexdigest()


def _add_to(checksum: xxhash.xxh3_128, entries: Iterable[Entry]) -> None:
    for entry in entries:
        checksum.update(_HEAD.pack(entry.timestamp, len(entry.payload)))
        checksum.update(entry.payload)


async def _side_by_side(
    ours: AsyncGenerator[Sequence[Entry]], theirs: AsyncGenerator[Sequence[Entry]]
) -> AsyncGenerator[tuple[Sequence[Entry], Sequence[Entry]]]:
    """The entries of both, as many of one as of the other at a time; where one has more, these with none at the end."""
    left: Sequence[Entry] = ()
    right: Sequence[Entry] = ()
    async with aclosing(ours), aclosing(theirs):
        while True:
            left = left or await _next(ours)
            right = right or await _next(theirs)
            if not left and not right:
                return
            size = min(len(left), len(right)) or max(len(left), len(right))
            yield left[:size], right[:size]
            left, right = left[size:], right[size:]


async def _next(batches: AsyncGenerator[Sequence[Entry]]) -> Sequence[Entry]:
    """The next entries, none at the end. `anext` with a default fails in Python 3.11 where a generator ends at once."""
    async for entries in batches:
        return entries
    return ()
