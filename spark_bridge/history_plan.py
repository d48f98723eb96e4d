"""Time travel, and reads whose past comes from the DataNodes' tables (option `history`)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

from ..runtime.clock import physical_ms
from ..runtime.cuts import Cut
from ..runtime.errors import InvalidRequest, PositionLost
from .history import Snapshot
from .log import Log, first_piece
from .offsets import BEGINNING, beginning, history_cut, is_history
from .options import Limits, Options
from .planning import Planner
from .plans import CollectionPlan, Offset
from .rows import ChannelRange
from .stored import StoredRange
from .unstored import UnstoredRange
from .where import EVERYTHING, Where

Task: TypeAlias = StoredRange | UnstoredRange


class HistoryPlanner(Planner):
    """Plans with the table too: it can be cut at any time, for it is complete up to its T. `ranges` are the log's part
    only, what the table does not have."""

    history = True

    def __init__(self, log: Log, options: Options) -> None:
        super().__init__(
            log, options.wal, options.collection, options.prefix, fail_on_data_loss=options.fail_on_data_loss
        )
        self._options = options
        self._table: Snapshot | None = None

    def look(self, version: int | None = None) -> Snapshot:
        """The table as it is now, or was at a version; later questions are answered by it. Raises as `Snapshot`."""
        collection = self.known()
        folder, wal = self._options.history, self._options.wal
        self._table = Snapshot(folder, wal, collection.schema, collection.vchannels, version)
        return self._table

    def resolve(self, text: str) -> Cut:
        """See `Planner`; any time that the table has passed may be named."""
        if text.isdecimal() and int(text) <= self.look().time:
            return history_cut(self.collection(), int(text))
        return super().resolve(text)

    def newest(self) -> Cut | None:
        """See `Planner`; where retention has removed all cuts, the end of the table."""
        newest = super().newest()
        if newest is None and (time := self.look().time):
            return history_cut(self.collection(), time)
        return newest

    def upto(self, timestamp: int) -> tuple[Cut, bool]:
        """See `Planner`."""
        if timestamp - 1 <= self.look().time:
            return history_cut(self.collection(), timestamp - 1), False
        return super().upto(timestamp)

    def next(self, start: Cut, limits: Limits, upto: Cut) -> Cut | None:
        """See `Planner`; within the table a limit holds whole timestamps."""
        if upto.time <= start.time or not limits.bounded:
            return super().next(start, limits, upto)
        table = self.look()
        stored = min(table.time, upto.time)
        if start.time >= stored:
            return super().next(start, limits, upto)
        time = table.step(start.time, stored, limits)
        return upto if time == upto.time else history_cut(self.collection(), time)

    def has_rows(self, start: Cut, upto: Cut, rows: int) -> bool:
        """See `Planner`."""
        table = self.look()
        stored = min(table.time, upto.time)
        if start.time < stored:
            rows -= table.count(start.time, stored, rows)
            start = history_cut(self.collection(), stored)
        return rows <= 0 or (start.time < upto.time and super().has_rows(start, upto, rows))

    def ranges(self, start: Cut, end: Cut, *, tasks: int = 1, end_beyond: bool = False) -> list[ChannelRange]:
        """See `Planner`: of these, what the table does not have."""
        table = self._table or self.look()
        found = super().ranges(start, end, tasks=tasks, end_beyond=end_beyond)
        return [part for each in found for part in table.unstored(each)]

    def tasks(self, start: Cut, end: Cut, where: Where = EVERYTHING, *, end_beyond: bool = False) -> list[Task]:
        """What lies between two cuts, and of that at least what is asked for: the log's part first, for it may forget,
        and then the table's. Raises `InvalidRequest` when the cuts are of another table."""
        tasks = self._options.min_partitions
        # In this order: what the log has forgotten before its first entry was looked at is in the table afterwards.
        ranges = super().ranges(start, end, tasks=tasks, end_beyond=end_beyond)
        table = self.look()
        if is_history(end) and end.time > table.time:
            raise table.not_in_history(end.time)
        unstored = [part for each in ranges for part in table.unstored(each) if part.begin_ts < where.last_ts]
        first_ts = max(start.time, where.first_ts - 1)
        return [
            *(UnstoredRange(part, table.folder, self.known().vchannels) for part in unstored),
            *table.stored(first_ts, end.time, last_ts=where.last_ts, tasks=tasks),
        ]

    def tasks_of_version(self, version: int) -> list[StoredRange]:
        """The rows up to T of a version of the table. Raises as `Snapshot`."""
        table = self.look(version)
        return table.stored(0, table.time, tasks=self._options.min_partitions)


class HistoryPlan(CollectionPlan):
    """A collection from cut to cut, its past from the table and the rest from the log."""

    planner: HistoryPlanner

    def __init__(self, log: Log, options: Options) -> None:
        super().__init__(log, options)
        self.planner = HistoryPlanner(log, options)

    def tasks(self, start: Offset, end: Offset) -> Sequence[Any]:
        """See `Plan`."""
        return self.planner.tasks(self._cut(start), self._cut(end))

    def all_tasks(self, where: Where = EVERYTHING) -> Sequence[Any]:
        """See `Plan`."""
        options = self._options
        if options.version_as_of is not None:
            return self.planner.tasks_of_version(options.version_as_of)
        if options.timestamp_as_of is not None:
            end, end_beyond = end_at(self.planner, options.timestamp_as_of)
            return self.planner.tasks(beginning(self.planner.known()), end, where, end_beyond=end_beyond)
        begin, (end, end_beyond) = self._begin(), self._end()
        if options.starting_time is not None and end.time <= begin.time:
            return []
        return self.planner.tasks(begin, end, where, end_beyond=end_beyond)


class AsOfPlan(CollectionPlan):
    """A collection as it was at `timestampAsOf`, from the log alone."""

    def __init__(self, log: Log, options: Options) -> None:
        super().__init__(log, options)
        self._log = log

    def all_tasks(self, where: Where = EVERYTHING) -> Sequence[Any]:
        """See `Plan`. Raises `PositionLost` when retention has removed the beginning, unless data loss is allowed:
        what is left is not how the collection was."""
        collection = self.planner.collection()
        end, end_beyond = end_at(self.planner, self._options.timestamp_as_of or 0)
        start, tasks = beginning(collection), self._options.min_partitions
        ranges = self.planner.ranges(start, end, tasks=tasks, end_beyond=end_beyond)
        if self._options.fail_on_data_loss:  # checked behind the planning: a task raises for what is removed later
            for each in ranges:
                if each.begin_included or each.begin == BEGINNING:
                    self._check_beginning(each, collection.created_ts)
        return ranges

    def _check_beginning(self, wanted: ChannelRange, created_ts: int) -> None:
        """The collection is younger than the first entry there is, or that one is the first that counts."""
        piece = first_piece(self._log.read(wanted.channel, None, wanted.end.id))
        fence = min(wanted.fences.values(), default=b"")
        if piece and (piece[0].timestamp <= created_ts or piece[0].id <= fence):
            return
        upto = iso_time(piece[0].timestamp) if piece else "where the read ends"
        raise PositionLost(
            f"retention has removed the beginning of {wanted.channel}, up to {upto}. Give option history, for the "
            "tables keep all rows; or set failOnDataLoss=false to read what is left",
            requested=b"",
            first_available=piece[0].id if piece else None,
            channel=wanted.channel,
        )


def end_at(planner: Planner, time: int) -> tuple[Cut, bool]:
    """Where to end to get the rows as they were at `time`, as `Planner.upto` says it. Raises `InvalidRequest` when that
    is not known yet."""
    end, end_beyond = planner.upto(time + 1)
    if end.time < time:
        raise InvalidRequest(
            f"what was there at {iso_time(time)} is not known yet: the newest cut is of {iso_time(end.time)}. Ask the "
            "node for a cut first, or give an earlier timestampAsOf"
        )
    return end, end_beyond


def iso_time(ts: int) -> str:
    """The physical time of a timestamp, for people."""
    return datetime.fromtimestamp(physical_ms(ts) / 1000, UTC).isoformat(timespec="milliseconds")
