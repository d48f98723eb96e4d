"""Topics whose channels have owners, with a common time (`consistency=tick`).

An owner stamps in log order, so its last record or tick has a timestamp up to which its channel is complete; for an
idle channel its heartbeats have one. T is the lowest of them, and an offset holds for each channel where the records
with ts ≤ T end:

    {"v": 1, "wal": "kafka", "t": T, "ends": {channel: [message id in hex, term, cseq]}}

Of a channel that is to be read from its first entry the end lies before that, with cseq -1.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from heapq import merge
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from ...runtime.catalog.cuts import CutEnd
from ...runtime.clock import add_ms
from ...runtime.errors import BadRecord, ChannelNotFound, InvalidRequest, PositionLost
from ...runtime.log.blocking_reader import BlockingReader
from ...runtime.log.heartbeats import Announcement, announcements
from ...runtime.log.names import Names
from ...runtime.log.record import decode
from ...runtime.streams.channel_reader import ChannelReader
from ..options import EARLIEST, LATEST, MicroBatchLimits, ReadOptions
from ..scan.topic import TopicPlace, TopicRange, channel_reader, entries_between, message_of_record
from .catalog_view import CatalogView
from .limits import Size
from .offsets import VERSION, end_before, lies_before, parsed
from .predicate import EVERYTHING, Predicate
from .topic import TopicPlan

if TYPE_CHECKING:
    from .base import Offset

TAIL_MS: Final = 250  # of a channel, read to find its last tick; owners tick more often
HEARTBEATS_MS: Final = 2000  # of all nodes, read at first
NOTHING: Final = CutEnd(0, 0, b"")


@dataclass(frozen=True, slots=True)
class Line:
    """A time, and where the records at or before it end."""

    time: int
    ends: Mapping[str, CutEnd]


class _ChannelTime(NamedTuple):
    """The time up to which a channel is complete, and its end then. `end` has no term where retention has removed all
    up to it."""

    time: int
    end: CutEnd


class _Step(NamedTuple):
    """One record of a channel that counts: its timestamp, its end, and the size of what is read to get there."""

    ts: int
    channel: str
    end: CutEnd
    size: Size


class Heartbeats:
    """The last announcement of each owner in `channel`, which is ephemeral and may be absent."""

    def __init__(self, log: BlockingReader, channel: str) -> None:
        self._log = log
        self._channel = channel
        self._read_id: bytes | None = None
        self._last: dict[str, Announcement] = {}

    def now(self) -> Mapping[str, Announcement]:
        """The last announcement by pchannel, after reading those there are now."""
        try:
            latest = self._log.latest_id(self._channel)
            if latest is not None and latest != self._read_id:
                self._read_upto(latest)
        except (ChannelNotFound, PositionLost):  # owners announce again soon
            self._read_id = None
        return self._last

    def _read_upto(self, latest: bytes) -> None:
        after = self._read_id or self._some_time_before(latest)
        for entries in self._log.read(self._channel, after, latest, inclusive=self._read_id is None):
            for entry in entries:
                with suppress(BadRecord):
                    self._last |= {each.channel: each for each in announcements(decode(entry.payload, entry.id))}
        self._read_id = latest

    def _some_time_before(self, latest: bytes) -> bytes:
        [last] = [entry for batch in self._log.read(self._channel, latest, latest, inclusive=True) for entry in batch]
        return self._log.id_at(self._channel, add_ms(last.timestamp, -HEARTBEATS_MS)) or latest


def _topic_place(end: CutEnd) -> TopicPlace:
    return TopicPlace(end.id, not lies_before(end))


def _with_heartbeat(last: _ChannelTime, announced: Announcement | None) -> _ChannelTime:
    """The time of a channel with its owner's announcement, which counts once the records it refers to are there."""
    if announced is None or (announced.term, announced.cseq) > (last.end.term, last.end.cseq):
        return last
    return _ChannelTime(max(last.time, announced.time), last.end)


class ByTick(TopicPlan):
    """A plan that reads all channels up to the same time."""

    def __init__(self, log: BlockingReader, options: ReadOptions) -> None:
        super().__init__(log, options)
        self._catalog = CatalogView(log, Names(options.prefix).catalog)
        self._heartbeats = Heartbeats(log, Names(options.prefix, options.timeticker).heartbeats)
        self._last: dict[str, _ChannelTime] = {}

    def begin(self) -> Offset:
        """The offset at which the options let the read begin."""
        time = self._options.starting_time
        line = self._named(self._options.starting) if time is None else self._line_at(time - 1)
        return self._offset(replace(line, ends={name: self._first_end(name, end) for name, end in line.ends.items()}))

    def _first_end(self, channel: str, end: CutEnd) -> CutEnd:
        return end_before(self.at_time(channel, 0)) if end == NOTHING else end

    def newest(self) -> Offset | None:
        """The offset behind all there is now; None before there was anything."""
        line = self._newest()
        return self._offset(line) if line.ends else None

    def next(self, start: Offset, upto: Offset, limits: MicroBatchLimits) -> Offset | None:
        """The last offset behind `start` and not behind `upto` within `limits`, or else the first one; None where
        nothing is new. A limit holds whole timestamps, of all channels."""
        begin, end = self._line(start), self._line(upto)
        self.check_dropped(sorted(set(begin.ends) - set(end.ends)))
        if end.time <= begin.time:
            return None
        return self._offset(self._within(begin, end, limits)) if limits.bounded else upto

    def ranges(self, start: Offset, end: Offset) -> list[TopicRange]:
        """What lies between two offsets, one range for each channel."""
        return self._ranges(self._line(start), self._line(end))

    def all_tasks(self, predicate: Predicate = EVERYTHING) -> list[TopicRange]:
        """What lies between the begin and the end that the options give; of that at least what `predicate` asks for.
        Times that are still to come name nothing yet."""
        begin, time = self._line(self.begin()), self._options.ending_time
        end = self._named(self._options.ending) if time is None else self._line_at(time - 1, known_only=True)
        first, last = begin, end
        if predicate.first_ts > begin.time + 1:
            first = self._line_at(min(predicate.first_ts - 1, end.time))
        if predicate.last_ts < end.time:
            last = self._line_at(max(predicate.last_ts, first.time))
        if last.time <= first.time:
            return []
        wanted = predicate.values("_channel")
        ranges = [each for each in self._ranges(first, last) if wanted is None or each.channel in wanted]
        return [replace(each, watermark=end.time) for each in self.split(ranges)]

    def sizes(self, wanted: TopicRange) -> Iterator[Size]:
        """The size of each entry in `wanted`."""
        return (step.size for step in self._steps(wanted, 0))

    # ---- lines ------------------------------------------------------------------------------------------------------

    def _newest(self) -> Line:
        """The line up to which all channels are complete. Channels without an entry have no owner yet, and join later.
        Raises `PositionLost` for a channel whose entries are all gone and whose owner announces nothing, unless data
        loss is allowed."""
        announced = self._heartbeats.now()  # before the channels are read: announced records are in them then
        latest = {name: id for name, id in self.latest().items() if id is not None}
        found = {name: self._channel_time(name, id, announced.get(name)) for name, id in latest.items()}
        times = {name: each for name, each in found.items() if each is not None}
        if not times:
            return Line(0, {})
        self._last = times
        time = min(each.time for each in times.values())
        return Line(time, {name: self._end_at(name, time, each) for name, each in times.items()})

    def _named(self, text: str) -> Line:
        if text == EARLIEST:
            return Line(0, dict.fromkeys(self._newest().ends, NOTHING))
        if text == LATEST:
            return self._newest()
        return self._line_at(int(text)) if text.isdecimal() else self._line(parsed(text))

    def _line_at(self, time: int, *, known_only: bool = False) -> Line:
        """The line at a time; with `known_only` not behind the time that the channels have reached."""
        newest = self._newest()
        time = max(min(time, newest.time) if known_only else time, 0)
        if time >= newest.time:
            return replace(newest, time=time)
        return Line(time, {name: self._end_at(name, time, self._last[name]) for name in newest.ends})

    def _channel_time(self, channel: str, latest: bytes, announced: Announcement | None) -> _ChannelTime | None:
        """The time up to which a channel is complete, and its end then; None where it has no time."""
        last = self._last.get(channel)
        if last is not None and last.end.id == latest and last.end.term:
            return _with_heartbeat(last, announced)
        found = self._last_channel_time(channel, latest)
        if found is None:
            newer = self._log.latest_id(channel)
            if newer is not None and newer != latest:  # retention passed by meanwhile
                return self._channel_time(channel, newer, announced)
            if self.at_time(channel, 0) is None:
                return self._emptied_channel_time(channel, latest, announced)
        return _with_heartbeat(found or _ChannelTime(0, NOTHING), announced)

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
            return _ChannelTime(announced.time, CutEnd(0, 0, latest))
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

    def _end_at(self, channel: str, time: int, last: _ChannelTime) -> CutEnd:
        """The end of the records at or before `time`. Where none is left it is before the first entry there is, or the
        end of the channel: a range from further back raises `PositionLost` for those that were removed."""
        if last.time <= time:
            return last.end
        found = self._end_before(channel, time, last.end.id)
        if found is not None:
            return found.end
        first = self.at_time(channel, 0)
        return last.end if first is None else end_before(first)

    def _end_before(self, channel: str, time: int, latest: bytes) -> _ChannelTime | None:
        """The last record at or before `time`, searched in a window that grows tenfold until it has one."""
        window_ms = TAIL_MS
        while True:
            begin = add_ms(time, -window_ms)
            first = self.at_time(channel, begin)
            found = None if first is None else self._last_record(channel, first, latest, time)
            if found is not None or begin == 0:
                return found
            window_ms *= 10

    def _last_record(self, channel: str, first: bytes, latest: bytes, time: int) -> _ChannelTime | None:
        """The last record that counts between two entries and is not behind `time`."""
        reader = ChannelReader(channel, fences=self._fences(channel))
        found = None
        for entries in self._log.read(channel, first, latest, inclusive=True):
            for entry in entries:
                for record in reader.accept([entry]):
                    self._check_owned(channel, record.term)
                    if record.ts > time:
                        return found
                    found = _ChannelTime(record.ts, CutEnd(record.term, record.cseq, record.id))
        return found

    def _check_owned(self, channel: str, term: int) -> None:
        if not term:
            raise InvalidRequest(
                f"consistency=tick is for channels that have an owner, {channel!r} has none: leave consistency out",
                channel=channel,
            )

    def _fences(self, channel: str) -> Mapping[int, bytes]:
        return self._catalog.now().fences([channel]).get(channel, {})

    def _offset(self, line: Line) -> Offset:
        ends = {channel: [end.id.hex(), end.term, end.cseq] for channel, end in sorted(line.ends.items())}
        return {"v": VERSION, "wal": self._wal, "t": line.time, "ends": ends}

    def _line(self, offset: Offset) -> Line:
        ends = self.checked(offset)
        try:
            found = {name: CutEnd(int(term), int(cseq), bytes.fromhex(id)) for name, (id, term, cseq) in ends.items()}
            return Line(int(offset["t"]), found)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"not an offset of consistency=tick: {offset!r}; correct that option, or start with a new checkpoint"
            ) from error

    # ---- ranges -----------------------------------------------------------------------------------------------------

    def _ranges(self, begin: Line, end: Line) -> list[TopicRange]:
        """What lies between two lines. A channel that joins is read from its beginning, whatever its records' time."""
        return [
            TopicRange(
                self._options.wal,
                channel,
                self.from_first(channel, _topic_place(before), _topic_place(upto)),
                _topic_place(upto),
                self._options.fail_on_data_loss,
                self._fences(channel),
                (before.term, max(before.cseq, 0)),
                begin.time if channel in begin.ends else 0,
                end.time,
                end.time,
                self._options.tags,
            )
            for channel, upto in end.ends.items()
            if _topic_place(before := begin.ends.get(channel, NOTHING)) < _topic_place(upto)
        ]

    def _within(self, begin: Line, end: Line, limits: MicroBatchLimits) -> Line:
        """The last line between two within the limits, or the first: all records of one timestamp, or none."""
        ends = {name: begin.ends.get(name, NOTHING) for name in end.ends}
        readings = [self._steps(wanted, begin.time + 1) for wanted in self._ranges(begin, end)]
        with ExitStack() as stack:  # reads that are abandoned in the middle
            for reading in readings:
                stack.enter_context(closing(reading))
            return self._last_within(merge(*readings), ends, end, limits)

    def _last_within(
        self, steps: Iterable[_Step], ends: Mapping[str, CutEnd], end: Line, limits: MicroBatchLimits
    ) -> Line:
        total, chosen = Size(), None
        for ts, group in groupby(steps, key=lambda step: step.ts):
            reached = dict(ends)
            for step in group:
                total = total.plus(step.size)
                reached[step.channel] = step.end
                if chosen is not None and total.is_over(limits):
                    return chosen
            ends, chosen = reached, Line(ts, reached)
            if total.is_over(limits):
                return chosen
        return end

    def _steps(self, wanted: TopicRange, least: int) -> Generator[_Step]:
        """The records of a channel that count; what does not is counted with the next one. Records that are older than
        `least`, of a channel that joins, come with it."""
        reader = channel_reader(wanted)
        assert reader is not None
        size = Size()
        for entries in entries_between(self._log, wanted):
            for entry in entries:
                size = size.plus(Size(0, len(entry.payload), 1))
                for record in reader.accept([entry]):
                    size = size.plus(Size(rows=0 if message_of_record(record) is None else 1))
                    end = CutEnd(record.term, record.cseq, record.id)
                    yield _Step(max(record.ts, least), wanted.channel, end, size)
                    size = Size()

    def parts(self, wanted: TopicRange, count: int) -> list[TopicRange]:
        """The range `wanted` in about `count` parts. By time: all that an owner wrote at or before one lies before all
        that it wrote later."""
        first = wanted.begin_ts or self._first_ts(wanted)
        found = {time: self.at_time(wanted.channel, time) for time in self.split_times(first, wanted.end_ts, count)}
        inner = [(time, id) for time, id in found.items() if id is not None and wanted.begin.id < id < wanted.end.id]
        begins = [
            (wanted.begin_ts, wanted.begin, wanted.after),
            *((t - 1, TopicPlace(id, False), (0, 0)) for t, id in inner),
        ]
        ends = [*((t - 1, TopicPlace(id, False)) for t, id in inner), (wanted.end_ts, wanted.end)]
        return [
            replace(wanted, begin=begin, end=end, after=after, begin_ts=begin_ts, end_ts=end_ts)
            for (begin_ts, begin, after), (end_ts, end) in zip(begins, ends, strict=True)
        ]

    def _first_ts(self, wanted: TopicRange) -> int:
        return next((step.ts for step in self._steps(wanted, 0)), wanted.end_ts)
