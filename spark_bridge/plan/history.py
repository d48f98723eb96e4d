"""The plan of a collection whose past comes from the DataNodes' tables (option `history`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..options import MicroBatchLimits
from ..scan.channel_range import IN_TABLE, ChannelRange, HistoryTable
from ..scan.history import Snapshot
from .collection import CollectionPlan, in_table, pchannels_of
from .offsets import Offset, StoredOffset
from .predicate import EVERYTHING, Predicate

if TYPE_CHECKING:
    from ..scan.scanner import ReadTask


class HistoryPlan(CollectionPlan):
    """Offsets are cuts, and any time up to the table's T, since the table is complete there. `ranges` are the log's
    part only: what the table does not have."""

    _table: Snapshot | None = None

    def look(self, version: int | None = None) -> Snapshot:
        """Read the table as it is now, or was at `version`; later calls use it. Raises what `Snapshot` raises."""
        folder, wal = self._options.history, self._options.wal
        self._table = Snapshot(folder, wal, self.known.schema, self.known.vchannels, version)
        return self._table

    def next(self, start: StoredOffset, upto: StoredOffset, limits: MicroBatchLimits) -> StoredOffset | None:
        """As `ReadPlan.next`. Within the table a limit holds whole timestamps."""
        begin, end = self._offset(start), self._offset(upto)
        if limits.bounded and end.time > begin.time:
            table = self.look()
            stored = min(table.time, end.time)
            if begin.time < stored:
                time = table.step(begin.time, stored, limits)
                return upto if time == end.time else self._stored(self._in_table(time))
        return super().next(start, upto, limits)

    def all_tasks(self, predicate: Predicate = EVERYTHING) -> Sequence[ReadTask]:
        """As `CollectionPlan.all_tasks`, or the rows up to T of a version of the table. Raises what `Snapshot`
        raises."""
        if self._options.version_as_of is None:
            return super().all_tasks(predicate)
        table = self.look(self._options.version_as_of)
        return table.stored(0, table.time, tasks=self._options.min_partitions)

    def ranges(self, begin: Offset, end: Offset) -> list[ChannelRange]:
        """As `CollectionPlan.ranges`, without what the table has."""
        table = self._table or self.look()
        return [part for each in super().ranges(begin, end) for part in table.unstored(each)]

    def _in_table(self, time: int) -> Offset:
        """The offset at a time that the table has passed. Only with the table it can be read up to, or from."""
        return Offset(time, dict.fromkeys(pchannels_of(self.collection()), IN_TABLE))

    def _at(self, time: int) -> Offset:
        return self._in_table(time) if time <= self.look().time else super()._at(time)

    def _newest(self) -> Offset | None:
        """The newest cut; where retention has removed all cuts, the end of the table."""
        newest = super()._newest()
        return self._in_table(time) if newest is None and (time := self.look().time) else newest

    def _upto(self, time: int) -> Offset:
        return self._in_table(time - 1) if time - 1 <= self.look().time else super()._upto(time)

    def _check_table(self, begin: Offset, end: Offset) -> None:
        pass

    def _check_beginning(self, wanted: ChannelRange) -> None:
        pass  # the table has it

    def _has_rows(self, start: Offset, upto: Offset, rows: int) -> bool:
        table = self.look()
        stored = min(table.time, upto.time)
        if start.time < stored:
            rows -= table.count(start.time, stored, rows)
            start = self._in_table(stored)
        return rows <= 0 or (start.time < upto.time and super()._has_rows(start, upto, rows))

    def _tasks(self, begin: Offset, end: Offset, predicate: Predicate = EVERYTHING) -> Sequence[ReadTask]:
        """The log's part first, since retention may remove it, and then the table's. Raises `InvalidRequest` when the
        offsets are of another table."""
        # In this order: what retention has removed before the log's first entry was read is in the table afterwards.
        ranges = self._split(super().ranges(begin, end), begin, end)
        table = self.look()
        if in_table(end) and end.time > table.time:
            raise table.not_in_history(end.time)
        unstored = [part for each in ranges for part in table.unstored(each) if part.begin_ts < predicate.last_ts]
        first_ts = max(begin.time, predicate.first_ts - 1)
        stored = table.stored(first_ts, end.time, last_ts=predicate.last_ts, tasks=self._options.min_partitions)
        history = HistoryTable(table.folder, tuple(self.known.vchannels))
        return [*(replace(part, history=history) for part in unstored), *stored]
