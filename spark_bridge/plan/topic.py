"""Topics on the driver's side: channels by name or pattern, each on its own. Those with a common time are in `ticks`.

An offset says for each channel up to where it was read:

    {"v": 1, "wal": "kafka", "ends": {channel: "behind 00ff" | "at 00ff" | "earliest"}}

`at` is the place before an entry, `behind` the one behind it. Channels are sorted: Spark compares offsets as text.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ...runtime.errors import BadRecord, ChannelNotFound, InvalidRequest, PositionLost
from ...runtime.log.blocking_reader import BlockingReader
from ...runtime.log.redaction import shown_url
from ..log import first_entries
from ..options import EARLIEST, LATEST, MicroBatchLimits, ReadOptions
from ..scan.topic import BEGINNING, TopicPlace, TopicRange, entries_between, message_of, topic_columns, topic_schema
from .limits import Size
from .offsets import VERSION, check_wal, parsed, scheme_of
from .predicate import EVERYTHING, Predicate

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from .base import Offset

Places = Mapping[str, TopicPlace]


class _Counted(NamedTuple):
    """A lower bound of the rows between two offsets."""

    start: Offset
    upto: Offset
    rows: int


class TopicPlan(ABC):
    """What both plans of topics, which are `ReadPlan`s, share."""

    def __init__(self, log: BlockingReader, options: ReadOptions) -> None:
        self._log = log
        self._options = options
        self._wal = scheme_of(options.wal)
        self._counted: _Counted | None = None

    def what(self) -> str:
        """What is read, as errors name it."""
        return "a topic"

    def schema(self) -> StructType:
        """All columns of the read, in Spark's types."""
        return topic_schema(topic_columns(headers=self._options.headers, tags=self._options.tags))

    def tasks(self, start: Offset, end: Offset) -> list[TopicRange]:
        """What lies between two offsets, one item for each task; always the same rows."""
        return self.split(self.ranges(start, end))

    def from_first(self, channel: str, begin: TopicPlace, end: TopicPlace) -> TopicPlace:
        """`first_place` of `begin`, unless it lies behind `end`: then nothing is left to read."""
        place = self.first_place(channel, begin)
        return begin if place.id > end.id else place

    def first_place(self, channel: str, place: TopicPlace = BEGINNING) -> TopicPlace:
        """For `BEGINNING` the place before the first entry there is, if any: a later read from it gives the same rows,
        or raises `PositionLost` when they are gone."""
        first = self.at_time(channel, 0) if place == BEGINNING else None
        return place if first is None else TopicPlace(first, False)

    @abstractmethod
    def ranges(self, start: Offset, end: Offset) -> list[TopicRange]:
        """What lies between two offsets, one range for each channel. A channel that joins is read from its
        beginning."""

    @abstractmethod
    def parts(self, wanted: TopicRange, count: int) -> list[TopicRange]:
        """The range `wanted` in about `count` parts."""

    @abstractmethod
    def sizes(self, wanted: TopicRange) -> Iterator[Size]:
        """The size of each entry in `wanted`."""

    def has_rows(self, start: Offset, upto: Offset, rows: int) -> bool:
        """Whether at least `rows` rows lie between two offsets. A later call with a later offset continues
        the count."""
        counted = self._counted if self._counted and self._counted.start == start else _Counted(start, start, 0)
        total = counted.rows
        for wanted in self.ranges(counted.upto, upto):
            for size in self.sizes(wanted):
                total += size.rows
                if total >= rows:
                    return True
        self._counted = _Counted(start, upto, total)
        return total >= rows

    def close(self) -> None:
        """Close the connection."""
        self._log.close()

    def latest(self) -> dict[str, bytes | None]:
        """The id of the last entry of each channel that is read, sorted by name; None for an empty one. Raises
        `ChannelNotFound` for a topic that is not there, unless data loss is allowed."""
        found: dict[str, bytes | None] = {}
        for name in self._matching() if self._options.pattern else sorted(self._options.topics):
            try:
                found[name] = self._log.latest_id(name)
            except ChannelNotFound:
                if not self._options.pattern and self._options.fail_on_data_loss:
                    raise self._not_there(name) from None
        return found

    def _matching(self) -> list[str]:
        pattern = re.compile(self._options.pattern)
        return [name for name in self._of_users() if pattern.fullmatch(name)]

    def _of_users(self) -> list[str]:
        """All channels except those that a node has for itself and for the rows of collections."""
        return [name for name in self._log.channels() if not name.startswith(f"{self._options.prefix}-")]

    def _not_there(self, name: str) -> ChannelNotFound:
        there = ", ".join(self._of_users()) or "none"
        return ChannelNotFound(
            f"no channel {name!r} in {shown_url(self._options.wal)}; there are: {there}. Check options topic and wal, "
            "or set failOnDataLoss=false to go on without it",
            channel=name,
        )

    def checked(self, offset: Offset) -> Mapping[str, Any]:
        """The ends in an offset. Raises `InvalidRequest`, `PositionMismatch`."""
        if offset.get("v") != VERSION or not isinstance(offset.get("ends"), Mapping):
            raise InvalidRequest(f"not an offset of topics: {offset!r}; start with a new checkpoint")
        check_wal(offset, self._wal)
        return offset["ends"]

    def check_dropped(self, gone: Iterable[str]) -> None:
        """Raise `ChannelNotFound` for the first of the channels `gone`, which were read before, unless data loss is
        allowed."""
        for name in gone if self._options.fail_on_data_loss else ():
            raise ChannelNotFound(
                f"channel {name!r} was dropped while it was being read: start with a new checkpoint, or set "
                "failOnDataLoss=false to go on without it",
                channel=name,
            )

    def split(self, ranges: Sequence[TopicRange]) -> list[TopicRange]:
        """`ranges` in as many parts as option `minPartitions` asks for."""
        count = -(-self._options.min_partitions // max(len(ranges), 1))
        return [part for wanted in ranges for part in (self.parts(wanted, count) if count > 1 else [wanted])]

    def split_times(self, first: int, last: int, count: int) -> list[int]:
        """Up to `count` - 1 timestamps that divide the time from `first` to `last` evenly."""
        return sorted({first + (last - first) * number // count for number in range(1, count)} - {first, 0})

    def at_time(self, channel: str, timestamp: int) -> bytes | None:
        """As `BlockingReader.id_at`; None for a channel that was dropped."""
        try:
            return self._log.id_at(channel, timestamp)
        except ChannelNotFound:
            return None


class ByChannel(TopicPlan):
    """A plan that reads each channel up to its last entry, independently of the others."""

    def begin(self) -> Offset:
        """The offset at which the options let the read begin."""
        time = self._options.starting_time
        places = self._named(self._options.starting) if time is None else self._at(time)
        return self._offset({name: self.first_place(name, place) for name, place in places.items()})

    def newest(self) -> Offset | None:
        """The offset behind all there is now; None before there was anything."""
        return self._offset(self._latest())

    def next(self, start: Offset, upto: Offset, limits: MicroBatchLimits) -> Offset | None:
        """The last offset behind `start` and not behind `upto` within `limits`, or else the first one; None where
        nothing is new. A limit is shared by the channels evenly, entry by entry."""
        ranges = self.ranges(start, upto)
        if not ranges:
            return None
        return self._within(start, upto, ranges, limits) if limits.bounded else upto

    def _within(self, start: Offset, upto: Offset, ranges: Sequence[TopicRange], limits: MicroBatchLimits) -> Offset:
        """The offset after as many entries as the limits allow, and at least one; each channel has its turn."""
        ends = self._places(upto)
        reached = {name: place for name, place in self._places(start).items() if name in ends}
        total = Size()
        turns = deque((wanted.channel, self._sized(wanted)) for wanted in ranges)
        while turns:
            channel, sized = turns.popleft()
            place, size = next(sized, (None, Size()))
            if place is None:
                continue
            if total.entries and total.plus(size).is_over(limits):
                return self._offset(reached)
            total, reached[channel] = total.plus(size), place
            turns.append((channel, sized))
        return upto

    def all_tasks(self, predicate: Predicate = EVERYTHING) -> list[TopicRange]:
        """What lies between the begin and the end that the options give; of that at least what `predicate` asks for.
        The predicate's times are ignored: entries may be in any order of time."""
        time = self._options.ending_time
        ends = self._named(self._options.ending, LATEST) if time is None else self._at(time)
        begins = self._places(self.begin())
        wanted = predicate.values("_channel")
        ends = {name: place for name, place in ends.items() if wanted is None or name in wanted}
        begins = {name: min(begins.get(name, BEGINNING), place) for name, place in ends.items()}
        return self.tasks(self._offset(begins), self._offset(ends))

    def sizes(self, wanted: TopicRange) -> Iterator[Size]:
        """The size of each entry in `wanted`."""
        return (size for _, size in self._sized(wanted))

    # ---- places -----------------------------------------------------------------------------------------------------

    def _latest(self) -> Places:
        return {name: BEGINNING if id is None else TopicPlace(id, True) for name, id in self.latest().items()}

    def _named(self, text: str, others: str = EARLIEST) -> Places:
        """The places that an option names: `earliest`, `latest`, an offset, or for some channels by name such a place,
        and then `others` for the others."""
        latest = self._latest()
        if text in (EARLIEST, LATEST):
            return latest if text == LATEST else dict.fromkeys(latest, BEGINNING)
        offset = parsed(text)
        if "v" in offset:
            return self._places(offset)
        unknown = sorted(set(offset) - set(latest))
        if unknown:
            raise InvalidRequest(f"the offsets name channel {unknown[0]!r}, which is not read: correct it")
        named = {name: latest[name] if place == LATEST else _place(name, place) for name, place in offset.items()}
        return {**(latest if others == LATEST else dict.fromkeys(latest, BEGINNING)), **named}

    def _at(self, timestamp: int) -> Places:
        """Before the first entry whose timestamp is at least that; the end where there is none."""
        latest = self._latest()
        found = {name: self.at_time(name, timestamp) for name in latest}
        return {name: place if (id := found[name]) is None else TopicPlace(id, False) for name, place in latest.items()}

    def _offset(self, places: Places) -> Offset:
        return {"v": VERSION, "wal": self._wal, "ends": {name: str(place) for name, place in sorted(places.items())}}

    def _places(self, offset: Offset) -> dict[str, TopicPlace]:
        return {name: _place(name, place) for name, place in self.checked(offset).items()}

    # ---- ranges -----------------------------------------------------------------------------------------------------

    def ranges(self, start: Offset, end: Offset) -> list[TopicRange]:
        """What lies between two offsets, one range for each channel."""
        begins, ends = self._places(start), self._places(end)
        self.check_dropped(sorted(set(begins) - set(ends)))
        found = [(name, self._begin(name, begins.get(name, BEGINNING), place), place) for name, place in ends.items()]
        return [
            TopicRange(
                self._options.wal,
                name,
                self.from_first(name, begin, place),
                place,
                self._options.fail_on_data_loss,
                tags=self._options.tags,
            )
            for name, begin, place in found
            if begin < place
        ]

    def _begin(self, channel: str, begin: TopicPlace, end: TopicPlace) -> TopicPlace:
        """Where to begin in a channel: at its beginning where it ends before `begin`, since it was created anew."""
        if end.id >= begin.id:
            return begin
        if self._options.fail_on_data_loss:
            raise PositionLost(
                f"channel {channel!r} ends ({end}) before where it was to be read on ({begin}): it was created anew. "
                "Start with a new checkpoint, or set failOnDataLoss=false to read it from its beginning",
                requested=begin.id,
                first_available=end.id,
                channel=channel,
            )
        return BEGINNING

    def _sized(self, wanted: TopicRange) -> Iterator[tuple[TopicPlace, Size]]:
        for entries in entries_between(self._log, wanted):
            for entry in entries:
                try:
                    rows = 0 if message_of(entry) is None else 1
                except BadRecord:
                    rows = 0  # the task skips the record with a warning
                yield TopicPlace(entry.id, True), Size(rows, len(entry.payload), 1)

    def parts(self, wanted: TopicRange, count: int) -> list[TopicRange]:
        """The range `wanted` in about `count` parts. By the time of the entries: a channel without times is one
        task."""
        first = first_entries(entries_between(self._log, wanted))
        if not first:
            return [wanted]
        at_end = replace(wanted, begin=TopicPlace(wanted.end.id, False), end=TopicPlace(wanted.end.id, True))
        last = first_entries(entries_between(self._log, at_end))
        if not last:
            return [wanted]
        times = self.split_times(first[0].timestamp, last[0].timestamp, count)
        found = {id for time in times if (id := self.at_time(wanted.channel, time)) is not None}
        inner = sorted(place for id in found if wanted.begin < (place := TopicPlace(id, False)) < wanted.end)
        return [replace(wanted, begin=begin, end=end) for begin, end in pairwise([wanted.begin, *inner, wanted.end])]


def _place(channel: str, text: object) -> TopicPlace:
    try:
        return TopicPlace.parse(str(text))
    except ValueError as error:
        raise InvalidRequest(f"the offset of channel {channel!r}: {error}") from error
