"""Up to which time a channel of a replica is complete, as its owner in the source has promised.

An owner promises by ticks, which lie in the channel, and while nothing is written there by heartbeats, which no replica
has: a heartbeat counts once the replica has the record that it names.

What no owner can have written, as another program may, says nothing, as for every reader. Whether one can is known from
the grants of the channel: what those that were read last do not cover is doubted until they are read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

from ..clock import MAX_TIMESTAMP
from ..log.heartbeats import Announcement
from ..log.record import RecordType, claimed_type, read_header
from ..log.wal import Entry
from ..streams.channel_reader import Granted


class _Noted(NamedTuple):
    """What was noted: the highest time that was promised, (term, cseq) and stamp of records, and of all entries the
    highest timestamp and the `least` one."""

    time: int = 0
    reached: tuple[int, int] = (0, 0)
    stamp: int = 0
    written: int = 0
    least: int = MAX_TIMESTAMP

    def join(self, other: _Noted) -> _Noted:
        return _Noted(
            max(self.time, other.time),
            max(self.reached, other.reached),
            max(self.stamp, other.stamp),
            max(self.written, other.written),
            min(self.least, other.least),
        )

    def is_granted(self, granted: Granted) -> bool:
        return granted.covers(max(self.reached[0], 1), max(self.time, self.stamp, self.written))

    def within(self, granted: Granted) -> _Noted:
        """What is left where not all of it is granted: how high the timestamps of the rest may be."""
        return _Noted(written=min(self.written, granted.limit) if self.least <= granted.limit else 0)


class ChannelPromise:
    """Nothing at or before `time` is missing in the channel; 0 while nothing is known. `written` is the highest
    timestamp that an owner has, or may have, given to what the replica has of it; 0 where the channel has no owner.
    `timestamp` is the highest one of what the replica had before."""

    def __init__(self, timestamp: int = 0) -> None:
        self._granted = Granted(0, 0)
        self._known = _Noted()
        # what lies above the grants that are known; before the last one, what is asked
        self._doubted = [_Noted(written=timestamp, least=0), _Noted()]
        self._asked = 0  # `time`, then
        self._awaited: Announcement | None = None  # of the heartbeats whose record is missing, the first one ...
        self._latest: Announcement | None = None  # ... and the last one: the first is not put off by those behind it

    @property
    def time(self) -> int:
        return self._known.time

    @property
    def written(self) -> int:
        return self._known.written

    @property
    def timestamp(self) -> int:
        """The highest timestamp of what the replica has of it, but of what no owner of the channel can have written:
        who writes by several clocks, as members write dead letters, stamps in no order."""
        return max(self.written, *(each.written for each in self._doubted))

    def note(self, entries: Sequence[Entry]) -> None:
        """The replica has these entries, the next ones of the channel."""
        for entry in entries:
            if claimed_type(entry.payload) == RecordType.TIME_TICK or entry is entries[-1]:
                self._note_record(entry)
        times = [entry.timestamp for entry in entries]
        for above in (False, True):
            if part := [each for each in times if (each > self._granted.limit) == above]:
                self._note(_Noted(written=max(part), least=min(part)))
        self._keep()

    def _note_record(self, entry: Entry) -> None:
        header = read_header(entry.payload)
        if header is not None:
            kind, ts, term, cseq = header[:4]
            self._note(_Noted(ts if kind == RecordType.TIME_TICK else 0, (term, cseq), ts))

    def _note(self, noted: _Noted) -> None:
        if noted.is_granted(self._granted):
            self._known = self._known.join(noted)
        else:
            self._doubted[-1] = self._doubted[-1].join(noted)

    def ask(self) -> None:
        """The grants are about to be read, for `judge`."""
        first, *rest = self._doubted  # more than one where the grants could not be read when that was asked before
        self._doubted = [first, *([reduce(_Noted.join, rest)] if rest else []), _Noted()]
        self._asked = self.time

    def judge(self, granted: Granted) -> int:
        """The grants of the channel, as they were read since `ask` was called. Returns what `time` was then."""
        time, self._granted = self._asked, granted
        doubted, self._doubted = self._doubted[:-1], self._doubted[-1:]
        for each in doubted:
            if each.is_granted(granted):
                self._known, time = self._known.join(each), max(time, each.time)
            else:
                self._known = self._known.join(each.within(granted))
        self._keep()
        return time

    @property
    def latest(self) -> int:
        """The highest time that the owner is known to have promised, also of what the replica does not have yet."""
        return self.time if self._latest is None else max(self.time, self._latest.time)

    @property
    def awaited(self) -> Announcement | None:
        """The last heartbeat, while the replica is not known to have the record that it names."""
        return None if self._awaited is None else self._latest

    def announce(self, announced: Announcement) -> None:
        """The owner has announced a time."""
        self._awaited, self._latest = self._awaited or announced, announced
        self._keep()

    def arrive(self, announced: Announcement) -> int:
        """The replica has the record that a heartbeat names. Returns the time that it promises, 0 where no owner can
        have announced it."""
        noted = _Noted(announced.time, (announced.term, announced.cseq))
        self._note(noted)
        self._keep()
        return announced.time if noted.is_granted(self._granted) else 0

    def _keep(self) -> None:
        for each in (self._awaited, self._latest):
            if each is not None and self._known.reached >= (each.term, each.cseq):
                self._note(_Noted(each.time, (each.term, each.cseq)))
                self._awaited = None if each is self._latest else self._latest
