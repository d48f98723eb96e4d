"""The stored cuts of one collection. They are looked up in the log by time, so older entries are not read."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from itertools import islice, takewhile
from typing import Final

from ...runtime.catalog.catalog import Collection
from ...runtime.catalog.cuts import Cut
from ...runtime.clock import add_ms
from ...runtime.errors import BadRecord, ChannelNotFound, PositionLost
from ...runtime.log.blocking_reader import BlockingReader
from ...runtime.log.record import decode
from ...runtime.log.wal import Entry

CUTS_AHEAD_MAX: Final = 4096  # cuts held to choose from when a trigger is limited
POINTS_MAX: Final = 4096  # cuts held to split a read at
LOOK_BACK_MS: Final = 10_000  # at first; cuts are stored about twice a second

_logger = logging.getLogger("tidewal.spark")


class CutLog:
    """Finds the cuts of `collection` in `channel`. An absent channel has no cuts."""

    def __init__(self, log: BlockingReader, channel: str, collection: Collection) -> None:
        self.collection = collection
        self._log = log
        self._channel = channel
        self._keys = {b"", collection.name.encode()}
        self._newest: Cut | None = None
        self._seen: bytes | None = None
        self._ahead: deque[Cut] = deque()
        self._ahead_from = 0

    def newest(self) -> Cut | None:
        """The newest cut there is, or one that ends where the newest does: others were written since. None when none
        was ever stored, or retention has removed all."""
        latest = self._latest_id()
        if latest is None or latest == self._seen:
            return self._newest
        try:
            for cut in self._cuts(self._log.read(self._channel, self._seen, latest) if self._seen else ()):
                if self._newest is None or (cut.time > self._newest.time and cut.ends != self._newest.ends):
                    self._newest = cut
        except PositionLost:
            self._seen = None
        if self._seen is None:
            self._newest = self._look_back(self._time_of(latest), None)
        self._seen = latest
        return self._newest

    def last_upto(self, time: int) -> Cut | None:
        """The last cut at or before the timestamp `time`; None when there is none."""
        return self._look_back(time, time)

    def _look_back(self, time: int, upto: int | None) -> Cut | None:
        """The last cut up to `upto`, searched in a window before `time` that grows tenfold until it has a cut."""
        window_ms = LOOK_BACK_MS
        while True:
            begin = add_ms(time, -window_ms)
            found = deque(self.between(begin, upto), maxlen=1)
            if found or begin == 0:
                return found[0] if found else None
            window_ms *= 10

    def _time_of(self, id: bytes) -> int:
        try:
            return next(self._log.read(self._channel, id, id, inclusive=True))[-1].timestamp
        except PositionLost:  # retention passed by meanwhile
            return 0

    def between(self, after: int, upto: int | None = None) -> Iterator[Cut]:
        """The cuts with `after` < time ≤ `upto` (None: all later ones), in the order of time."""
        for cut in self._cuts(self._from(after + 1)):
            if upto is not None and cut.time > upto:
                return
            if cut.time > after:
                yield cut
                after = cut.time

    def ahead(self, after: int, upto: int) -> Iterator[Cut]:
        """As `between`, for repeated calls that each begin a little later: up to `CUTS_AHEAD_MAX` cuts are kept."""
        if after < self._ahead_from:
            self._ahead.clear()
        while self._ahead and self._ahead[0].time <= after:
            self._ahead.popleft()
        if not self._ahead:
            self._ahead.extend(islice(self.between(after), CUTS_AHEAD_MAX))
        self._ahead_from = after
        yield from takewhile(lambda cut: cut.time <= upto, tuple(self._ahead))
        if self._ahead and self._ahead[-1].time < upto:
            yield from self.between(self._ahead[-1].time, upto)

    def points(self, after: int, before: int) -> list[Cut]:
        """Cuts between the times `after` and `before` at which a read may be split: evenly chosen, at most
        `POINTS_MAX`."""
        found: list[Cut] = []
        every = 1
        for number, cut in enumerate(self.between(after, before - 1)):
            if number % every == 0:
                found.append(cut)
            if len(found) > POINTS_MAX:
                found, every = found[::2], every * 2
        return found

    def _latest_id(self) -> bytes | None:
        try:
            return self._log.latest_id(self._channel)
        except ChannelNotFound:
            return None

    def _from(self, time: int) -> Iterator[list[Entry]]:
        """The entries from the first with a timestamp ≥ `time` on; later ones may have a lower one."""
        latest = self._latest_id()
        first = None if latest is None else self._log.id_at(self._channel, time)
        if first is None:
            return
        try:
            yield from self._log.read(self._channel, first, latest, inclusive=True)
        except PositionLost:  # retention passed by meanwhile
            yield from self._log.read(self._channel, None, latest)

    def _cuts(self, batches: Iterator[list[Entry]] | tuple[()]) -> Iterator[Cut]:
        for entries in batches:
            for entry in entries:
                try:
                    record = decode(entry.payload, entry.id)
                    cut = Cut.from_record(record).of(self.collection) if record.key in self._keys else None
                except BadRecord as error:
                    _logger.warning("a cut is skipped, the next one takes its place: %s", error.message)
                    continue
                if cut is not None:
                    yield cut
