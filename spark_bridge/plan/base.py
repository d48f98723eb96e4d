"""Plans of reads in Spark's terms: offsets as Spark stores them, and tasks. A collection is planned by its cuts, topics
by their channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ...runtime.catalog.cuts import Cut
from ...runtime.log.blocking_reader import BlockingReader
from ...runtime.log.names import pchannel_of
from ...runtime.rows.hashing import shard_of_key
from ..options import MicroBatchLimits, ReadOptions
from ..scan.columns import spark_schema
from .collection import CollectionPlanner
from .offsets import from_offset, scheme_of, to_offset
from .predicate import EVERYTHING, Predicate

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Offset: TypeAlias = Mapping[str, Any]


class ReadPlan(Protocol):
    """One read, planned on the driver. All methods raise `TidewalError`s that say what to do."""

    def what(self) -> str:
        """What is read, as errors name it."""
        ...

    def schema(self) -> StructType:
        """All columns of the read, in Spark's types."""
        ...

    def begin(self) -> Offset:
        """The offset at which the options let the read begin."""
        ...

    def newest(self) -> Offset | None:
        """The offset behind all there is now; None before there was anything."""
        ...

    def next(self, start: Offset, upto: Offset, limits: MicroBatchLimits) -> Offset | None:
        """The last offset behind `start` and not behind `upto` within `limits`, or else the first one; None where
        nothing is new."""
        ...

    def has_rows(self, start: Offset, upto: Offset, rows: int) -> bool:
        """Whether at least `rows` rows lie between two offsets."""
        ...

    def tasks(self, start: Offset, end: Offset) -> Sequence[Any]:
        """What lies between two offsets, one item for each task; always the same rows."""
        ...

    def all_tasks(self, predicate: Predicate = EVERYTHING) -> Sequence[Any]:
        """What lies between the begin and the end that the options give; of that at least what `predicate` asks for."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class CollectionPlan:
    """A collection, from cut to cut."""

    def __init__(self, log: BlockingReader, options: ReadOptions) -> None:
        self.planner = CollectionPlanner(
            log, options.wal, options.collection, options.prefix, fail_on_data_loss=options.fail_on_data_loss
        )
        self._options = options
        self._wal = scheme_of(options.wal)

    def what(self) -> str:
        """What is read, as errors name it."""
        return f"collection {self._options.collection!r}"

    def schema(self) -> StructType:
        """All columns of the read, in Spark's types."""
        return spark_schema(self.planner.known().schema, change_feed=self._options.change_feed)

    def begin(self) -> Offset:
        """The offset at which the options let the read begin."""
        return self._offset(self._begin())

    def newest(self) -> Offset | None:
        """The offset behind all there is now; None before there was anything."""
        newest = self.planner.newest()
        return None if newest is None else self._offset(newest)

    def next(self, start: Offset, upto: Offset, limits: MicroBatchLimits) -> Offset | None:
        """The last offset behind `start` and not behind `upto` within `limits`, or else the first one; None where
        nothing is new."""
        found = self.planner.next(self._cut(start), limits, self._cut(upto))
        return None if found is None else self._offset(found)

    def has_rows(self, start: Offset, upto: Offset, rows: int) -> bool:
        """Whether at least `rows` rows lie between two offsets."""
        return self.planner.has_rows(self._cut(start), self._cut(upto), rows)

    def tasks(self, start: Offset, end: Offset) -> Sequence[Any]:
        """What lies between two offsets, one item for each task; always the same rows."""
        return self.planner.ranges(self._cut(start), self._cut(end), tasks=self._options.min_partitions)

    def all_tasks(self, predicate: Predicate = EVERYTHING) -> Sequence[Any]:
        """What lies between the begin and the end that the options give; of that at least what `predicate` asks for.
        Times that are still to come name nothing yet."""
        begin, (end, end_beyond) = self._begin(), self._end()
        if self._options.starting_time is not None and end.time <= begin.time:
            return []
        first, last = self.planner.narrowed(begin, end, predicate.first_ts, predicate.last_ts)
        tasks = self._options.min_partitions
        ranges = self.planner.ranges(first, last, tasks=tasks, end_beyond=end_beyond and last is end)
        wanted = self._vchannels(predicate)
        found = [replace(each, end_ts=end.time, vchannels=_both(each.vchannels, wanted)) for each in ranges]
        return [each for each in found if any(pchannel_of(name) == each.channel for name in each.vchannels)]

    def _vchannels(self, predicate: Predicate) -> frozenset[str]:
        """The vchannels that may have rows of `predicate`: all versions of a key come through one."""
        collection = self.planner.known()
        keys, channels = predicate.values(collection.schema.primary_key), predicate.values("_channel")
        found = frozenset(collection.vchannels)
        if keys is not None:
            found = frozenset(collection.vchannels[shard_of_key(key, collection.shards)] for key in keys)
        return found if channels is None else found & channels

    def close(self) -> None:
        """Close the connection."""
        self.planner.close()

    def _begin(self) -> Cut:
        time = self._options.starting_time
        return self.planner.resolve(self._options.starting) if time is None else self.planner.before(time)

    def _end(self) -> tuple[Cut, bool]:
        time = self._options.ending_time
        return (self.planner.resolve(self._options.ending), False) if time is None else self.planner.upto(time)

    def _offset(self, cut: Cut) -> Offset:
        return to_offset(cut, self._wal, self.planner.known().created_ts)

    def _cut(self, offset: Offset) -> Cut:
        return from_offset(offset, self.planner.known(), self._wal)


def _both(names: Sequence[str], wanted: frozenset[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in wanted)
