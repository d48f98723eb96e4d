"""A story whose channels land late: what an owner has stamped reaches the log after a while, each channel at its own
pace, and some of it never. Cuts are drawn and stored as MixCoord may: at the present time, stored once all at or below
it has landed, or at the highest time that nothing on its way is at or below.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from story import NAMES, ListLog, Row, Story

from tidewal.runtime.catalog.catalog import Collection
from tidewal.runtime.catalog.cuts import Cut, CutEnd
from tidewal.runtime.log.names import pchannel_of
from tidewal.runtime.log.record import Record, decode, encode
from tidewal.runtime.log.wal import Entry


class LateLog(ListLog):
    """Entries of `late` channels are on their way until they are landed, in their order."""

    def __init__(self, late: Sequence[str]) -> None:
        super().__init__()
        self.on_way: dict[str, deque[Entry]] = {channel: deque() for channel in late}

    def append(self, channel: str, payload: bytes, timestamp: int) -> bytes:
        if channel not in self.on_way:
            return super().append(channel, payload, timestamp)
        self._last += 1
        id = self._last.to_bytes(8, "big")
        self.on_way[channel].append(Entry(id, timestamp, payload))
        return id

    def land(self, channel: str, count: int | None = None) -> None:
        """Let the first `count` entries on their way reach the log; None is all."""
        waiting = self.on_way.get(channel, deque())
        for _ in range(len(waiting) if count is None else min(count, len(waiting))):
            self.entries.setdefault(channel, []).append(waiting.popleft())

    def landed(self, channel: str) -> bytes:
        """The id of the last entry in the log."""
        entries = self.entries.get(channel)
        return entries[-1].id if entries else b""

    def oldest_on_way(self) -> int | None:
        """The lowest timestamp that has not landed."""
        return min((waiting[0].timestamp for waiting in self.on_way.values() if waiting), default=None)


class LateStory(Story):
    """`drawn` are cuts that are not stored yet."""

    def __init__(self, log: LateLog) -> None:
        self.log = log
        self.drawn: list[Cut] = []
        self._points: dict[str, list[tuple[int, CutEnd]]] = defaultdict(list)  # of the present term
        self._lost: list[tuple[str, Entry]] = []
        super().__init__(log.append)

    def stamped(self, channel: str, record: Record, ts: int) -> bytes:
        id = super().stamped(channel, record, ts)
        self._points[channel].append((ts, self._ends[channel]))
        return id

    def write_together(self, collection: Collection, rows: Mapping[int, Sequence[Row]], parts: int = 1) -> None:
        """One batch in several shards, under one timestamp; in each shard perhaps in several records."""
        before = self.now
        for shard, some in rows.items():
            self.now = before
            self.write(collection, shard, some, parts)

    # ---- cuts -------------------------------------------------------------------------------------------------------

    def draw(self, collection: Collection, *, now: bool) -> None:
        """A cut of the present, or of the time below all that is on its way."""
        self.now += 1
        oldest = None if now else self.log.oldest_on_way()
        time = self.now if oldest is None else oldest - 1
        ends: dict[str, CutEnd] = {}
        for channel in sorted(set(map(pchannel_of, collection.vchannels))):
            before = [end for ts, end in self._points[channel] if ts <= time]
            if not before:
                return  # an owner that has just come draws none below its fence
            ends[channel] = before[-1]
        self.drawn.append(Cut(time, ends))

    def storable(self) -> list[Cut]:
        """The drawn cuts below which all has landed."""
        return [
            cut for cut in self.drawn if all(self.log.landed(channel) >= end.id for channel, end in cut.ends.items())
        ]

    def store(self, cut: Cut) -> None:
        """MixCoord's append of a cut; two of them may overtake each other."""
        self.drawn.remove(cut)
        self.append(NAMES.cuts, encode(cut.to_record()), cut.time)
        self.cuts.append(cut)

    # ---- owners -----------------------------------------------------------------------------------------------------

    def take_over(self, collection: Collection, landing: Mapping[str, int]) -> None:
        """A new owner's fence follows the first `landing` entries on their way of each channel; the rest is lost, or
        lands behind the fence later (see `zombie`)."""
        channels = sorted(set(map(pchannel_of, collection.vchannels)))
        gone: set[tuple[str, int]] = set()
        for channel in channels:
            self.log.land(channel, landing.get(channel, 0))
            landed = {entry.payload for entry in self.log.entries.get(channel, [])}
            for entry in self.log.on_way.get(channel, ()):
                if entry.payload not in landed:  # else it was only sent twice
                    self._lost.append((channel, entry))
                    gone.add((channel, entry.timestamp))
            if channel in self.log.on_way:
                self.log.on_way[channel].clear()
        self.rows = [row for row in self.rows if (pchannel_of(str(row["_channel"])), row["_ts"]) not in gone]
        self.drawn = self.storable()
        self._points.clear()
        self.own(channels, self.term + 1)
        for channel in channels:
            self.log.land(channel)

    def zombie(self) -> None:
        """Something of an earlier owner lands after all, behind the fence of a later one."""
        if self._lost:
            channel, entry = self._lost.pop(0)
            self.log.append(channel, entry.payload, entry.timestamp)

    def repeat(self, channel: str) -> None:
        """A client of the broker sends the last entry twice."""
        waiting = self.log.on_way.get(channel)
        last = waiting[-1] if waiting else self.log.entries[channel][-1]
        self.log.append(channel, last.payload, last.timestamp)

    def retain(self, cut: Cut) -> None:
        """Retention removes what lies before the ends of `cut`."""
        for channel, end in cut.ends.items():
            entries = self.log.entries.get(channel, [])
            keep = next((place for place, entry in enumerate(entries) if entry.id >= end.id), 0)
            del entries[:keep]


def describe(log: LateLog, channel: str) -> list[str]:
    """What a channel holds, for a failing test's report."""
    return [
        f"{record.type.name} ts={record.ts % 10**6} {record.term}/{record.cseq} part={record.part}"
        for record in (decode(entry.payload, entry.id) for entry in log.entries.get(channel, []))
    ]
