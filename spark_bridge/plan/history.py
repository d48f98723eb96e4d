"""Time travel, and reads whose past comes from the DataNodes' tables (option `history`)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

from ...runtime.catalog.cuts import Cut
from ...runtime.clock import physical_ms
from ...runtime.errors import InvalidRequest, PositionLost
from ...runtime.log.blocking_reader import BlockingReader
from ..log import first_entries
from ..options import MicroBatchLimits, ReadOptions
from ..scan.collection import ChannelRange
from ..scan.delta import StoredRange
from ..scan.history import Snapshot
from ..scan.log_tail import UnstoredRange
from .base import CollectionPlan, Offset
from .collection import CollectionPlanner
from .offsets import BEGINNING, beginning, history_cut, is_history
from .predicate import EVERYTHING, Predicate

Task: TypeAlias = StoredRange | UnstoredRange


class HistoryPlanner(CollectionPlanner):
    """Plans with the table too, which can be cut at any time up to its T, since it is complete there. `ranges` are the
    log's part only: what the table does not have."""

    history = True

    def __init__(self, log: BlockingReader, options: ReadOptions) -> None:
        super().__init__(
            log, options.wal, options.collection, options.prefix, fail_on_data_loss=options.fail_on_data_loss
        )
        self._options = options
        self._table: Snapshot | None = None

    def look(self, version: int | None = None) -> Snapshot:
        """Read the table as it is now, or was at `version`; later calls use it. Raises what `Snapshot` raises."""
        collection = self.known()
        folder, wal = self._options.history, self._options.wal
        self._table = Snapshot(folder, wal, collection.schema, collection.vchannels, version)
        return self._table

    def resolve(self, text: str) -> Cut:
        """The cut that the option's `text` names, as in `CollectionPlanner`, or any timestamp up to the table's T."""
        if text.isdecimal() and int(text) <= self.look().time:
            return history_cut(self.collection(), int(text))
        return super().resolve(text)

    def newest(self) -> Cut | None:
        """The newest cut there is; where retention has removed all cuts, the end of the table."""
        newest = super().newest()
        if newest is None and (time := self.look().time):
            return history_cut(self.collection(), time)
        return newest

    def upto(self, timestamp: int) -> tuple[Cut, bool]:
        """Where to end to get the rows with a log time < `timestamp`; and whether the channels end later than that."""
        if timestamp - 1 <= self.look().time:
            return history_cut(self.collection(), timestamp - 1), False
        return super().upto(timestamp)

    def next(self, start: Cut, limits: MicroBatchLimits, upto: Cut) -> Cut | None:
        """The last cut behind `start`, not behind `upto`, within `limits`, or else the first one; None when there is
        none. Within the table a limit holds whole timestamps."""
        if upto.time <= start.time or not limits.bounded:
            return super().next(start, limits, upto)
        table = self.look()
        stored = min(table.time, upto.time)
        if start.time >= stored:
            return super().next(start, limits, upto)
        time = table.step(start.time, stored, limits)
        return upto if time == upto.time else history_cut(self.collection(), time)

    def has_rows(self, start: Cut, upto: Cut, rows: int) -> bool:
        """Whether at least `rows` rows lie between two cuts, those in the table included."""
        table = self.look()
        stored = min(table.time, upto.time)
        if start.time < stored:
            rows -= table.count(start.time, stored, rows)
            start = history_cut(self.collection(), stored)
        return rows <= 0 or (start.time < upto.time and super().has_rows(start, upto, rows))

    def ranges(self, start: Cut, end: Cut, *, tasks: int = 1, end_beyond: bool = False) -> list[ChannelRange]:
        """As `CollectionPlanner.ranges`, without what the table has."""
        table = self._table or self.look()
        found = super().ranges(start, end, tasks=tasks, end_beyond=end_beyond)
        return [part for each in found for part in table.unstored(each)]

    def tasks(self, start: Cut, end: Cut, predicate: Predicate = EVERYTHING, *, end_beyond: bool = False) -> list[Task]:
        """What lies between two cuts, at least what `predicate` asks for: the log's part first, since retention may
        remove it, and then the table's. Raises `InvalidRequest` when the cuts are of another table."""
        tasks = self._options.min_partitions
        # In this order: what retention has removed before the log's first entry was read is in the table afterwards.
        ranges = super().ranges(start, end, tasks=tasks, end_beyond=end_beyond)
        table = self.look()
        if is_history(end) and end.time > table.time:
            raise table.not_in_history(end.time)
        unstored = [part for each in ranges for part in table.unstored(each) if part.begin_ts < predicate.last_ts]
        first_ts = max(start.time, predicate.first_ts - 1)
        return [
            *(UnstoredRange(part, table.folder, self.known().vchannels) for part in unstored),
            *table.stored(first_ts, end.time, last_ts=predicate.last_ts, tasks=tasks),
        ]

    def tasks_of_version(self, version: int) -> list[StoredRange]:
        """The rows up to T of a version of the table. Raises what `Snapshot` raises."""
        table = self.look(version)
        return table.stored(0, table.time, tasks=self._options.min_partitions)


class HistoryPlan(CollectionPlan):
    """A collection from cut to cut, its past from the table and the rest from the log."""

    planner: HistoryPlanner

    def __init__(self, log: BlockingReader, options: ReadOptions) -> None:
        super().__init__(log, options)
        self.planner = HistoryPlanner(log, options)

    def tasks(self, start: Offset, end: Offset) -> Sequence[Any]:
        """What lies between two offsets, one item for each task; always the same rows."""
        return self.planner.tasks(self._cut(start), self._cut(end))

    def all_tasks(self, predicate: Predicate = EVERYTHING) -> Sequence[Any]:
        """What lies between the begin and the end that the options give; of that at least what `predicate` asks for."""
        options = self._options
        if options.version_as_of is not None:
            return self.planner.tasks_of_version(options.version_as_of)
        if options.timestamp_as_of is not None:
            end, end_beyond = end_at(self.planner, options.timestamp_as_of)
            return self.planner.tasks(beginning(self.planner.known()), end, predicate, end_beyond=end_beyond)
        begin, (end, end_beyond) = self._begin(), self._end()
        if options.starting_time is not None and end.time <= begin.time:
            return []
        return self.planner.tasks(begin, end, predicate, end_beyond=end_beyond)


class AsOfPlan(CollectionPlan):
    """A collection as it was at `timestampAsOf`, from the log alone."""

    def __init__(self, log: BlockingReader, options: ReadOptions) -> None:
        super().__init__(log, options)
        self._log = log

    def all_tasks(self, predicate: Predicate = EVERYTHING) -> Sequence[Any]:
        """What lies between the begin and the end that the options give; of that at least what `predicate` asks for.
        Raises `PositionLost` when retention has removed the beginning, unless data loss is allowed: what is left is not
        how the collection was."""
        collection = self.planner.collection()
        end, end_beyond = end_at(self.planner, self._options.timestamp_as_of or 0)
        start, tasks = beginning(collection), self._options.min_partitions
        ranges = self.planner.ranges(start, end, tasks=tasks, end_beyond=end_beyond)
        if self._options.fail_on_data_loss:  # checked after planning: a task raises for what is removed later
            for each in ranges:
                if each.begin_included or each.begin == BEGINNING:
                    self._check_beginning(each, collection.created_ts)
        return ranges

    def _check_beginning(self, wanted: ChannelRange, created_ts: int) -> None:
        """Raise `PositionLost` unless the channel still has the collection's beginning: the first entry is older than
        the collection, or not behind the first fence."""
        first = first_entries(self._log.read(wanted.channel, None, wanted.end.id))
        fence = min(wanted.fences.values(), default=b"")
        if first and (first[0].timestamp <= created_ts or first[0].id <= fence):
            return
        upto = iso_time(first[0].timestamp) if first else "where the read ends"
        raise PositionLost(
            f"retention has removed the beginning of {wanted.channel}, up to {upto}. Give option history, for the "
            "tables keep all rows; or set failOnDataLoss=false to read what is left",
            requested=b"",
            first_available=first[0].id if first else None,
            channel=wanted.channel,
        )


def end_at(planner: CollectionPlanner, time: int) -> tuple[Cut, bool]:
    """Where to end to get the rows as they were at the timestamp `time`, as `CollectionPlanner.upto` returns it. Raises
    `InvalidRequest` when no cut has passed `time` yet."""
    end, end_beyond = planner.upto(time + 1)
    if end.time < time:
        raise InvalidRequest(
            f"what was there at {iso_time(time)} is not known yet: the newest cut is of {iso_time(end.time)}. Ask the "
            "node for a cut first, or give an earlier timestampAsOf"
        )
    return end, end_beyond


def iso_time(ts: int) -> str:
    """The physical time of a timestamp as ISO 8601, UTC."""
    return datetime.fromtimestamp(physical_ms(ts) / 1000, UTC).isoformat(timespec="milliseconds")
