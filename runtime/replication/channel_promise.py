"""Up to which time a channel of a replica is complete, as its owner in the source has promised.

An owner promises by ticks, which lie in the channel, and while nothing is written there by heartbeats, which no replica
has: a heartbeat counts once the replica has the record that it names.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..log.heartbeats import Announcement
from ..log.record import RecordType, claimed_type, read_header
from ..log.wal import Entry


class ChannelPromise:
    """Nothing at or before `time` is missing in the channel; 0 while nothing is known. `reached` is the highest (term,
    cseq) that the replica has of it, as far as it was noted."""

    def __init__(self) -> None:
        self.time: int = 0
        self.reached: tuple[int, int] = (0, 0)
        self._awaited: Announcement | None = None  # of the heartbeats whose record is missing, the first one ...
        self._latest: Announcement | None = None  # ... and the last one: the first is not put off by those behind it

    def note(self, entries: Iterable[Entry]) -> None:
        """The replica has these entries, the next ones of the channel."""
        last: Entry | None = None
        for last in entries:
            if claimed_type(last.payload) == RecordType.TIME_TICK:
                self._note(last)
        if last is not None:
            self._note(last)
        self._keep()

    def _note(self, entry: Entry) -> None:
        header = read_header(entry.payload)
        if header is None:
            return
        kind, ts, term, cseq = header[:4]
        self.reached = max(self.reached, (term, cseq))
        if kind == RecordType.TIME_TICK:
            self.time = max(self.time, ts)

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

    def _keep(self) -> None:
        for each in (self._awaited, self._latest):
            if each is not None and self.reached >= (each.term, each.cseq):
                self.time = max(self.time, each.time)
                self._awaited = None if each is self._latest else self._latest
