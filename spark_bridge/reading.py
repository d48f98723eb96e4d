"""Readers as Spark calls them (pyspark.sql.datasource). Everything that matters is in `planning` and `rows`.

Spark makes several instances in several processes: readers hold options only until the driver asks them something,
and what a task needs travels in its `ChannelRange`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from .columns import chosen_columns, spark_schema
from .log import open_log
from .offsets import first_offset, from_offset, to_offset
from .options import Options
from .planning import Planner
from .rows import ChannelRange, arrow_batches

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from ..runtime.cuts import Cut


def planner(options: Options) -> Planner:
    """A planner for what the options name, not connected yet."""
    return Planner(
        open_log(options.wal),
        options.wal,
        options.collection,
        options.prefix,
        fail_on_data_loss=options.fail_on_data_loss,
    )


def _tasks(ranges: list[ChannelRange], schema: StructType, options: Options) -> list[InputPartition]:
    if not ranges:
        return []
    known = spark_schema(ranges[0].schema, change_feed=options.change_feed)
    columns = chosen_columns(schema, known, f"collection {options.collection!r}")
    return [InputPartition((each, columns)) for each in ranges]


def _read(partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of one task; none for the partition that Spark makes up when there is nothing to read."""
    if partition.value is None:
        return
    wanted, columns = cast("tuple[ChannelRange, tuple[str, ...]]", partition.value)
    with closing(open_log(wanted.wal)) as log:
        yield from arrow_batches(log, wanted, columns)


class TidewalBatchReader(DataSourceReader):
    """Reads the rows behind `startingOffsets` up to `endingOffsets`, both cuts."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """One per pchannel that has entries between the two cuts."""
        with closing(planner(self._options)) as plan:
            start, end = plan.resolve(self._options.starting), plan.resolve(self._options.ending)
            return _tasks(plan.ranges(start, end), self._schema, self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition as Arrow batches."""
        return _read(partition)


class TidewalStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Micro-batches between stored cuts: (start, end) always names the same rows."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._opened: Planner | None = None
        self._initial: dict[str, Any] | None = None
        self._target: Cut | None = None
        self._targeted = False
        self._seen: Cut | None = None

    @property
    def _plan(self) -> Planner:
        if self._opened is None:
            self._opened = planner(self._options)
        return self._opened

    def initialOffset(self) -> dict[str, Any]:
        """Where a new query starts; the same however often Spark asks."""
        if self._initial is None:
            cut = self._plan.resolve(self._options.starting)
            self._initial = first_offset(cut, cut)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        """What option `maxRowsPerTrigger` says."""
        return ReadAllAvailable() if self._options.limits.rows is None else ReadMaxRows(self._options.limits.rows)

    def prepareForTriggerAvailableNow(self) -> None:
        """End this query at the newest cut there is now."""
        self._target = self._plan.newest()
        self._targeted = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The next cut behind `start` within the limit; `start` itself when there is none."""
        begin = from_offset(start, self._plan.collection())
        newest = self._seen = self._target if self._targeted else self._plan.newest()
        if newest is None or newest.time <= begin.time:
            return start
        if isinstance(limit, ReadMaxRows):
            newest = self._plan.next(begin, limit.max_rows, newest.time) or newest
        return first_offset(begin, newest) if start == self._initial else to_offset(newest)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The newest cut that `latestOffset` has seen, whatever the limit was: how far a query is behind, as Spark's
        progress shows it."""
        return None if self._seen is None else to_offset(self._seen)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """One per pchannel that has entries between the two offsets."""
        collection = self._plan.collection()
        begin = from_offset(end.get("from", start), collection)
        return _tasks(self._plan.ranges(begin, from_offset(end, collection)), self._schema, self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition as Arrow batches."""
        return _read(partition)

    def stop(self) -> None:
        """Close the connection; Spark may also just end the process."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
