"""The plan of topics whose channels have owners, with a common time (`consistency=tick`).

An owner stamps in log order, so its last record or tick has a timestamp up to which its channel is complete; for an
idle channel its heartbeats have one. T is the lowest of them, and an offset holds for each channel where the records
with ts ≤ T end.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from heapq import merge
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple

from ...runtime.clock import add_ms
from ...runtime.errors import InvalidRequest, PositionLost
from ...runtime.log.blocking_reader import BlockingReader
from ...runtime.log.heartbeats import Announcement
from ...runtime.log.names import Names
from ...runtime.log.record import TIMELESS_TYPES, Record
from ...runtime.streams.channel_reader import ChannelReader
from ..options import ReadOptions
from ..scan.channel_range import BEGINNING, ChannelPlace, ChannelRange
from .catalog_view import CatalogView
from .heartbeats import Heartbeats
from .limits import Size, counted_entries
from .offsets import Offset
from .predicate import Predicate
from .topic import TopicPlan

TAIL_MS: Final = 250  # of a channel, read to find its last tick; owners tick more often

_ts_of = attrgetter("ts")


class _ChannelTime(NamedTuple):
    """The time up to which a channel is complete, and its end then. `end` has no term where retention has removed all
    up to it."""

    time: int
    end: ChannelPlace

    def with_announced(self, announced: Announcement | None) -> _ChannelTime:
        """With what the owner announces, which counts once the records it refers to are there."""
        if announced is None or (announced.term, announced.cseq) > (self.end.term, self.end.cseq):
            return self
        return _ChannelTime(max(self.time, announced.time), self.end)


class _Step(NamedTuple):
    """One entry of a channel with records that count: their timestamp, their end, and the size of what is read to get
    there."""

    ts: int
    channel: str
    end: ChannelPlace
    size: Size


class ByTick(TopicPlan):
    """An offset is a time that all channels have reached."""

    def __init__(self, log: BlockingReader, options: ReadOptions) -> None:
        super().__init__(log, options)
        self._catalog = CatalogView(log, options.wal, options.prefix)
        self._heartbeats = Heartbeats(log, Names(options.prefix, options.timeticker).heartbeats)
        self._last: dict[str, _ChannelTime] = {}

    # ---- offsets ----------------------------------------------------------------------------------------------------

    @property
    def _of(self) -> str:
        return "ticks of topics"

    def _earliest(self) -> Offset:
        newest = self._newest()
        return Offset(0, {} if newest is None else dict.fromkeys(newest.ends, BEGINNING))

    def _newest(self) -> Offset | None:
        """The time up to which all channels are complete. Channels without an entry have no owner yet, and join later.
        Raises `PositionLost` for a channel whose entries are all gone and whose owner announces nothing, unless data
        loss is allowed."""
        announced = self._heartbeats.now()  # before the channels are read: announced records are in them then
        latest = {name: id for name, id in self.latest().items() if id is not None}
        found = {name: self._channel_time(name, id, announced.get(name)) for name, id in latest.items()}
        times = {name: each for name, each in found.items() if each is not None}
        if not times:
            return None
        self._last = times
        time = min(each.time for each in times.values())
        return Offset(time, {name: self._end_at(name, time, each) for name, each in times.items()})

    def _at(self, time: int, *, known_only: bool = False) -> Offset:
        """The offset at a time; with `known_only` not behind the time that the channels have reached."""
        newest = self._newest() or self._earliest()
        time = max(min(time, newest.time) if known_only else time, 0)
        if time >= newest.time:
            return replace(newest, time=time)
        return Offset(time, {name: self._end_at(name, time, self._last[name]) for name in newest.ends})

    def _before(self, time: int) -> Offset:
        return self._at(time - 1)

    def _upto(self, time: int) -> Offset:
        return self._at(time - 1, known_only=True)

    def _bounds(self) -> tuple[Offset, Offset]:
        """A batch that is to begin behind its end is empty."""
        begin, end = super()._bounds()
        return end if end.time <= begin.time else begin, end

    def _is_new(self, begin: Offset, end: Offset) -> bool:
        self._check_dropped(begin, end)
        return end.time > begin.time

    def _narrowed(self, begin: Offset, end: Offset, predicate: Predicate) -> tuple[Offset, Offset]:
        first, last = begin, end
        if predicate.first_ts > begin.time + 1:
            first = self._at(min(predicate.first_ts - 1, end.time))
        if predicate.last_ts < end.time:
            last = self._at(max(predicate.last_ts, first.time))
        return first, last

    def _steps(self, begin: Offset, end: Offset) -> Generator[tuple[Offset, Iterable[Size]]]:
        """All records of one timestamp, of all channels, or none."""
        readings = [self._timed(wanted, begin.time + 1) for wanted in self.ranges(begin, end)]
        ends = {name: begin.ends.get(name, BEGINNING) for name in end.ends}
        for ts, group in groupby(merge(*readings, key=_ts_of), key=_ts_of):
            steps = list(group)
            ends = {**ends, **{step.channel: step.end for step in steps}}
            yield Offset(ts, ends), [step.size for step in steps]
        yield end, ()

    def _timed(self, wanted: ChannelRange, least: int) -> Iterator[_Step]:
        """The entries of a channel with records that count; what does not is counted with the next one. Records that
        are older than `least`, of a channel that joins, come with it."""
        size = Size()
        for entry in counted_entries(self._log, wanted):
            size = size.plus(entry.size)
            if entry.record is not None and entry.record.type not in TIMELESS_TYPES:
                yield _Step(max(entry.record.ts, least), wanted.channel, _place_behind(entry.record), size)
                size = Size()

    # ---- the time of a channel --------------------------------------------------------------------------------------

    def _channel_time(self, channel: str, latest: bytes, announced: Announcement | None) -> _ChannelTime | None:
        """The time up to which a channel is complete, and its end then; None where it has no time."""
        last = self._last.get(channel)
        if last is not None and last.end.id == latest and last.end.term:
            return last.with_announced(announced)
        found = self._last_channel_time(channel, latest)
        if found is None:
            newer = self._log.latest_id(channel)
            if newer is not None and newer != latest:  # retention passed by meanwhile
                return self._channel_time(channel, newer, announced)
            if self._id_at(channel, 0) is None:
                return self._emptied_channel_time(channel, latest, announced)
        return (found or _ChannelTime(0, BEGINNING)).with_announced(announced)

    def _last_channel_time(self, channel: str, latest: bytes) -> _ChannelTime | None:
        try:
            entries = [entry for batch in self._log.read(channel, latest, latest, inclusive=True) for entry in batch]
        except PositionLost:
            return None
        return self._end_before(channel, entries[-1].timestamp, latest) if entries else None

    def _emptied_channel_time(self, channel: str, latest: bytes, announced: Announcement | None) -> _ChannelTime | None:
        """As `_channel_time`, where the last entry and all before it are gone: up to the announced time there is no
        more."""
        if announced is not None:
            return _ChannelTime(announced.time, ChannelPlace(latest))
        if self._options.fail_on_data_loss:
            raise PositionLost(
                f"retention has removed all entries of {channel}, and no owner of it announces a time: start the "
                "channel's owner, leave the channel out, or set failOnDataLoss=false to go on without it until it has "
                "entries",
                requested=latest,
                first_available=None,
                channel=channel,
            )
        return None

    def _end_at(self, channel: str, time: int, last: _ChannelTime) -> ChannelPlace:
        """The end of the records at or before `time`. Where none is left it is before the first entry there is, or the
        end of the channel: a range from further back raises `PositionLost` for those that were removed."""
        if last.time <= time:
            return last.end
        found = self._end_before(channel, time, last.end.id)
        if found is not None:
            return found.end
        first = self._id_at(channel, 0)
        return last.end if first is None else ChannelPlace(first, behind=False)

    def _end_before(self, channel: str, time: int, latest: bytes) -> _ChannelTime | None:
        """The last record at or before `time`, searched in a window that grows tenfold until it has one."""
        window_ms = TAIL_MS
        while True:
            begin = add_ms(time, -window_ms)
            first = self._id_at(channel, begin)
            found = None if first is None else self._last_record(channel, first, latest, time)
            if found is not None or begin == 0:
                return found
            window_ms *= 10

    def _last_record(self, channel: str, first: bytes, latest: bytes, time: int) -> _ChannelTime | None:
        """The last record that counts between two entries and is not behind `time`, and those behind it that say
        nothing of the time."""
        reader = ChannelReader(channel, fences=self._fences(channel))
        found = None
        for entries in self._log.read(channel, first, latest, inclusive=True):
            for entry in entries:
                for record in reader.accept([entry]):
                    _check_owned(channel, record)
                    if record.type in TIMELESS_TYPES:
                        found = found and _ChannelTime(found.time, _place_behind(record))
                        continue
                    if record.ts > time:
                        return found
                    found = _ChannelTime(record.ts, _place_behind(record))
        return found

    # ---- ranges -----------------------------------------------------------------------------------------------------

    def _check(self, begin: Offset, end: Offset) -> None:
        """Nothing: `_is_new` has looked for dropped channels when the end was chosen."""

    def _fences(self, channel: str) -> Mapping[int, bytes]:
        return self._catalog.now().fences([channel]).get(channel, {})

    def _range(self, channel: str, begin: ChannelPlace, end: ChannelPlace, first: Offset, last: Offset) -> ChannelRange:
        """A channel that joins is read from its beginning, whatever its records' time."""
        return replace(
            super()._range(channel, begin, end, first, last),
            begin_ts=first.time if channel in first.ends else 0,
            end_ts=last.time,
            watermark=last.time,
            fences=self._fences(channel),
            end_beyond=True,
        )


def _place_behind(record: Record) -> ChannelPlace:
    return ChannelPlace(record.id, True, record.term, record.cseq)


def _check_owned(channel: str, record: Record) -> None:
    if not record.term:
        raise InvalidRequest(
            f"consistency=tick is for channels that have an owner, {channel!r} has none: leave consistency out",
            channel=channel,
        )
