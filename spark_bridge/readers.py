"""Readers as Spark calls them (pyspark.sql.datasource). Everything that matters is in `plan` and `scan`.

Spark makes several instances in several processes: readers hold options only until the driver calls them, and what a
task needs travels in its partition.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, cast

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from ..runtime.errors import ConfigError
from .options import MicroBatchLimits, ReadOptions
from .plan.offsets import StoredOffset, first_offset
from .plan.open_plan import open_plan
from .plan.predicate import EVERYTHING, Predicate
from .plan.pushdown import take
from .plan.read_plan import ReadPlan
from .scan.columns import chosen_columns
from .scan.scanner import ReadTask, scan

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

LOOK_S: Final = 10.0  # between two looks whether a log to which nothing comes was migrated or replaced


def _check_columns(options: ReadOptions, schema: StructType) -> None:
    if options.columns and list(options.columns) != schema.names:
        raise ConfigError("option columns and .schema(...) name different columns: leave one out", key="columns")


def _partitions(
    plan: ReadPlan, tasks: Sequence[ReadTask], schema: StructType, predicate: Predicate = EVERYTHING
) -> list[InputPartition]:
    if not tasks:
        return []
    columns = chosen_columns(schema, plan.schema(), plan.what())
    return [InputPartition((task, columns, predicate)) for task in tasks]


def _read(partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of one task; none for the partition that Spark makes up when there is nothing to read."""
    if partition.value is None:
        return
    task, columns, predicate = cast("tuple[ReadTask, tuple[str, ...], Predicate]", partition.value)
    yield from predicate.filtered(scan(task, columns))


class TidewalBatchReader(DataSourceReader):
    """Reads the rows between the begin and the end that the options give."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        _check_columns(options, schema)
        self._options = options
        self._schema = schema
        self._predicate = EVERYTHING

    def partitions(self) -> list[InputPartition]:
        """One per channel that has entries there, or more with `minPartitions`."""
        with closing(open_plan(self._options)) as plan:
            return _partitions(plan, plan.all_tasks(self._predicate), self._schema, self._predicate)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition as Arrow batches."""
        return _read(partition)


class FilteringBatchReader(TidewalBatchReader):
    """A batch reader that takes filters. Spark refuses every read of such a reader while its own setting
    `spark.sql.python.filterPushdown.enabled` is false, hence option `pushFilters`. A reader is for one query: Spark 4.3
    keeps it in the frame, and a query that pushes no filters gets the reader of the query before."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Keep the filters that can be applied here; returns those that Spark has to apply."""
        self._predicate, left = take(filters, self._schema)
        return left


class TidewalStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Micro-batches between offsets: (start, end) always names the same rows."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        _check_columns(options, schema)
        self._options = options
        self._schema = schema
        self._opened: ReadPlan | None = None
        self._initial: StoredOffset | None = None
        self._target: StoredOffset | None = None
        self._targeted = False
        self._seen: StoredOffset | None = None
        self._last_batch_s = self._looked_s = float("-inf")

    @property
    def _plan(self) -> ReadPlan:
        if self._opened is None:
            self._opened = open_plan(self._options)
        return self._opened

    def initialOffset(self) -> dict[str, Any]:
        """Where a new query starts; the same at each call."""
        if self._initial is None:
            begin = self._plan.begin()
            self._initial = first_offset(begin, begin)
        return dict(self._initial)

    def getDefaultReadLimit(self) -> ReadLimit:
        """One of the limits that the options give, since Spark takes one only. All of them hold."""
        limits = self._options.limits
        if limits.rows is not None or limits.entries is not None:
            return ReadMaxRows(limits.rows or limits.entries or 0)
        if limits.bytes is not None:
            return ReadMaxBytes(limits.bytes)
        return ReadAllAvailable() if limits.min_rows is None else ReadMinRows(limits.min_rows)

    def prepareForTriggerAvailableNow(self) -> None:
        """Let this query end at the present newest offset."""
        self._target = self._plan.newest()
        self._targeted = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The next offset behind `start` within the limits; `start` itself when there is none yet. Raises `Moved` when
        there will be none, for the log was migrated or replaced by a replica."""
        newest = self._seen = self._target if self._targeted else self._plan.newest()
        if newest is None:
            return self._unchanged(start)
        # Spark, which knows the limit, passes none only for a trigger that runs once: it wants everything.
        limits = MicroBatchLimits() if isinstance(limit, ReadAllAvailable) else self._options.limits
        if self._waits_for_more(start, newest, limits):
            return start
        end = self._plan.next(start, newest, limits)
        if end is None:
            return self._unchanged(start)
        self._last_batch_s = time.monotonic()
        return first_offset(start, end) if start == self._initial else dict(end)

    def _unchanged(self, start: dict[str, Any]) -> dict[str, Any]:
        """`start`, behind which there is nothing. Now and then whether there can be is looked at."""
        if time.monotonic() - self._looked_s >= LOOK_S:
            self._plan.check_goes_on()
            self._looked_s = time.monotonic()
        return start

    def _waits_for_more(self, start: StoredOffset, newest: StoredOffset, limits: MicroBatchLimits) -> bool:
        """Whether there are fewer rows than are worth a batch, and the last batch is not long ago."""
        if limits.min_rows is None or self._targeted or time.monotonic() - self._last_batch_s >= limits.max_delay_s:
            return False
        return not self._plan.has_rows(start, newest, limits.min_rows)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The newest offset that `latestOffset` has seen, whatever the limit was. Spark's progress shows with it how
        far a query is behind."""
        return None if self._seen is None else dict(self._seen)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """One per channel that has entries between the two offsets, or more with `minPartitions`."""
        if start == end:
            return []
        return _partitions(self._plan, self._plan.tasks(end.get("from", start), end), self._schema)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition as Arrow batches."""
        return _read(partition)

    def stop(self) -> None:
        """Close the connection; Spark may also just end the process."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
