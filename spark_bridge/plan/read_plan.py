"""One read, planned on the driver: from what the options name to offsets, as Spark stores them, and to the ranges that
tasks read. Kinds of reads differ in which offsets there are: those of cuts, of timestamps, or of entries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ...runtime.errors import ChannelNotFound, PositionLost
from ...runtime.log.blocking_reader import BlockingReader
from ...runtime.log.migration_state import MARK, MIGRATION_CHANNEL, check_not_left, state_in
from ...runtime.log.redaction import shown_url
from ...runtime.log.replication_state import REPLICATION_CHANNEL, check_not_replaced, replica_id, replication_in
from ..options import EARLIEST, LATEST, MicroBatchLimits, ReadOptions
from ..scan.channel_range import BEGINNING, ChannelPlace, ChannelRange
from .limits import Size, counted_entries, last_within
from .offsets import UNTIMED, Offset, StoredOffset, parsed, scheme_of
from .predicate import EVERYTHING, Predicate

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from ...runtime.log.wal import Entry
    from ..scan.scanner import ReadTask


class _Counted(NamedTuple):
    """A lower bound of the rows between two offsets."""

    start: Offset
    upto: Offset
    rows: int


class ReadPlan(ABC):
    """A read of what `options` name in `log`. All methods raise `TidewalError`s that say what to do; public ones take
    and return offsets as Spark stores them."""

    def __init__(self, log: BlockingReader, options: ReadOptions) -> None:
        self._log = log
        self._options = options
        self._counted: _Counted | None = None

    # ---- as Spark's readers use it ----------------------------------------------------------------------------------

    def begin(self) -> StoredOffset:
        """The offset at which the options let the read begin."""
        return self._stored(self._begin())

    def newest(self) -> StoredOffset | None:
        """The offset behind all there is now; None before there was anything."""
        newest = self._newest()
        return None if newest is None else self._stored(newest)

    def next(self, start: StoredOffset, upto: StoredOffset, limits: MicroBatchLimits) -> StoredOffset | None:
        """The last offset behind `start` and not behind `upto` within `limits`, or else the first one: a limit holds
        whole steps. None where nothing is new."""
        begin, end = self._offset(start), self._offset(upto)
        if not self._is_new(begin, end):
            return None
        if not limits.bounded:
            return upto
        with closing(self._steps(begin, end)) as steps:
            found = last_within(steps, limits)
        return None if found is None else self._stored(found)

    def has_rows(self, start: StoredOffset, upto: StoredOffset, rows: int) -> bool:
        """Whether at least `rows` rows lie between two offsets. A later call with a later offset continues the
        count."""
        return self._has_rows(self._offset(start), self._offset(upto), rows)

    def tasks(self, start: StoredOffset, end: StoredOffset) -> Sequence[ReadTask]:
        """What lies between two offsets, one item for each task; always the same rows."""
        return self._tasks(self._offset(start), self._offset(end))

    def all_tasks(self, predicate: Predicate = EVERYTHING) -> Sequence[ReadTask]:
        """What lies between the begin and the end that the options give; of that at least what `predicate` asks
        for."""
        begin, end = self._bounds()
        return self._tasks(begin, end, predicate)

    def check_goes_on(self) -> None:
        """Raise `Moved` where the log was migrated, or a replica has its place: nothing comes to it any more."""
        shown = shown_url(self._options.wal)
        with suppress(ChannelNotFound, PositionLost):  # that was taken back meanwhile, or more was said
            check_not_left(state_in(self._entries(MIGRATION_CHANNEL)), shown)
            check_not_replaced(replication_in(self._entries(REPLICATION_CHANNEL)), shown)

    def _entries(self, channel: str) -> Sequence[Entry]:
        """All that a channel has; nothing where there is none."""
        is_there = channel in self._log.channels()
        return list(chain.from_iterable(self._log.read(channel, None, None))) if is_there else ()

    def close(self) -> None:
        """Close the connection."""
        self._log.close()

    # ---- what kinds of reads have of their own ----------------------------------------------------------------------

    @abstractmethod
    def what(self) -> str:
        """What is read, as errors name it."""

    @abstractmethod
    def schema(self) -> StructType:
        """All columns of the read, in Spark's types."""

    @property
    @abstractmethod
    def _of(self) -> str:
        """What offsets are of: those of another read are refused."""

    @abstractmethod
    def _earliest(self) -> Offset:
        """The offset before everything."""

    @abstractmethod
    def _newest(self) -> Offset | None:
        """As `newest`."""

    @abstractmethod
    def _at(self, time: int) -> Offset:
        """The offset that an option names by its time."""

    @abstractmethod
    def _before(self, time: int) -> Offset:
        """Where to begin to get what has a log time ≥ `time`, which may still come."""

    @abstractmethod
    def _upto(self, time: int) -> Offset:
        """Where to end to get of all there is now what has a log time < `time`."""

    def _is_new(self, begin: Offset, end: Offset) -> bool:
        """Whether `end` lies behind `begin`."""
        return end.time > begin.time

    @abstractmethod
    def _steps(self, begin: Offset, end: Offset) -> Generator[tuple[Offset, Iterable[Size]]]:
        """The offsets between two at which a micro-batch may end, `end` as the last, each with the sizes of what lies
        between the one before and it."""

    @abstractmethod
    def _check(self, begin: Offset, end: Offset) -> None:
        """Raise for offsets between which nothing can be read."""

    def _range(self, channel: str, begin: ChannelPlace, end: ChannelPlace, first: Offset, last: Offset) -> ChannelRange:
        """The range of a channel between two places, in a read between two offsets."""
        options = self._options
        return ChannelRange(options.wal, channel, begin, end, options.fail_on_data_loss, tags=options.tags)

    def _narrowed(self, begin: Offset, end: Offset, predicate: Predicate) -> tuple[Offset, Offset]:
        """Offsets between two that enclose all rows between them that `predicate` asks for."""
        return begin, end

    @abstractmethod
    def _asked(self, wanted: ChannelRange, predicate: Predicate) -> ChannelRange | None:
        """The part of a range in which the rows lie that `predicate` asks for, by channel; None for none of it."""

    @abstractmethod
    def _split(self, ranges: Sequence[ChannelRange], begin: Offset, end: Offset) -> list[ChannelRange]:
        """`ranges`, which lie between two offsets, in about as many parts as option `minPartitions` asks for."""

    # ---- offsets ----------------------------------------------------------------------------------------------------

    @cached_property
    def _wal(self) -> str:
        """The log that ids of entries are of: its kind, and the migration or replication that has brought it what it
        has."""
        while True:
            with suppress(ChannelNotFound, PositionLost):  # more was said meanwhile
                replication = replication_in(self._entries(REPLICATION_CHANNEL))
                names = self._log.channels()  # behind that: a mark comes before the entries go that say the same
                marks = sorted(name for name in names if MARK.fullmatch(name))
                replica = replica_id(names, replication)
                return " ".join(filter(None, [scheme_of(self._options.wal), *marks, replica]))

    def _stored(self, offset: Offset) -> StoredOffset:
        return offset.stored(self._wal, self._of)

    def _offset(self, stored: StoredOffset) -> Offset:
        """The offset that Spark or an option gives. Raises `InvalidRequest`, `PositionMismatch`."""
        return Offset.parse(stored, self._wal, self._of)

    def _begin(self) -> Offset:
        time = self._options.starting_time
        offset = self._named(self._options.starting, EARLIEST) if time is None else self._before(time)
        return replace(offset, ends={name: self._first_place(name, place) for name, place in offset.ends.items()})

    def _bounds(self) -> tuple[Offset, Offset]:
        """Where a batch begins and ends. Times that are still to come name nothing yet."""
        time = self._options.ending_time
        begin, end = self._begin(), self._named(self._options.ending, LATEST) if time is None else self._upto(time)
        is_over = self._options.starting_time is not None and UNTIMED < end.time <= begin.time
        return end if is_over else begin, end

    def _named(self, text: str, default: str) -> Offset:
        """The offset that an option names: `earliest`, `latest` (before the first one: the beginning), a time, or an
        offset as JSON. `default` is for channels that this does not name. Raises `InvalidRequest`."""
        if text == EARLIEST:
            return self._earliest()
        if text == LATEST:
            return self._newest() or self._earliest()
        return self._at(int(text)) if text.isdecimal() else self._given(parsed(text), default)

    def _given(self, given: dict[str, Any], default: str) -> Offset:
        return self._offset(given)

    def _first_place(self, channel: str, place: ChannelPlace = BEGINNING) -> ChannelPlace:
        """For `BEGINNING` the place before the first entry there is, if any: a later read from it gives the same rows,
        or raises `PositionLost` when they are gone."""
        first = self._id_at(channel, 0) if place == BEGINNING else None
        return place if first is None else ChannelPlace(first, behind=False)

    def _id_at(self, channel: str, timestamp: int) -> bytes | None:
        """As `BlockingReader.id_at`; None for a channel that was dropped."""
        try:
            return self._log.id_at(channel, timestamp)
        except ChannelNotFound:
            return None

    # ---- ranges -----------------------------------------------------------------------------------------------------

    def ranges(self, begin: Offset, end: Offset) -> list[ChannelRange]:
        """What lies between two offsets: one range for each channel that may have entries there. A channel that joins
        is read from its beginning. Raises what is wrong with the offsets."""
        self._check(begin, end)
        found: list[ChannelRange] = []
        for channel, last in end.ends.items():
            place = self._read_on_at(channel, begin.ends.get(channel, BEGINNING), last)
            if place < last:
                first = self._first_place(channel, place)
                place = place if last.id < first.id else first  # nothing is left of it
                found.append(self._range(channel, place, last, begin, end))
        return found

    def _read_on_at(self, channel: str, begin: ChannelPlace, end: ChannelPlace) -> ChannelPlace:
        """Where to begin in a channel that was read up to `begin`."""
        return begin

    def _tasks(self, begin: Offset, end: Offset, predicate: Predicate = EVERYTHING) -> Sequence[ReadTask]:
        first, last = self._narrowed(begin, end, predicate)
        asked = [part for each in self.ranges(first, last) if (part := self._asked(each, predicate)) is not None]
        tasks = self._split(asked, first, last)
        return tasks if last is end else [replace(each, watermark=end.time) for each in tasks]

    def _has_rows(self, start: Offset, upto: Offset, rows: int) -> bool:
        counted = self._counted
        if counted is None or counted.start != start or counted.upto.time > upto.time:
            counted = _Counted(start, start, 0)
        total = counted.rows
        for wanted in self.ranges(counted.upto, upto):
            for entry in counted_entries(self._log, wanted):
                total += entry.size.rows
                if total >= rows:
                    return True
        self._counted = _Counted(start, upto, total)
        return total >= rows
