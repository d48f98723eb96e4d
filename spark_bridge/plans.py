"""What one read is, in Spark's words: offsets as it stores them, and tasks. A collection is planned by its cuts, topics
by their channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ..runtime.cuts import Cut
from ..runtime.hashing import shard_of_key
from ..runtime.names import physical
from .columns import spark_schema
from .log import Log
from .offsets import from_offset, scheme_of, to_offset
from .options import Limits, Options
from .planning import Planner
from .where import EVERYTHING, Where

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Offset: TypeAlias = Mapping[str, Any]


class Plan(Protocol):
    """One read, planned on the driver. All methods raise `TidewalError`s that say what to do."""

    def what(self) -> str:
        """What is read, to be named in errors."""
        ...

    def schema(self) -> StructType:
        """All its columns."""
        ...

    def begin(self) -> Offset:
        """Where the options say that it begins."""
        ...

    def newest(self) -> Offset | None:
        """The end of all there is now; None before there was anything."""
        ...

    def next(self, start: Offset, upto: Offset, limits: Limits) -> Offset | None:
        """The last offset behind `start`, not behind `upto`, within the limits, or the first one. None: nothing new."""
        ...

    def has_rows(self, start: Offset, upto: Offset, rows: int) -> bool:
        """Whether that many rows lie between two offsets."""
        ...

    def tasks(self, start: Offset, end: Offset) -> Sequence[Any]:
        """What lies between two offsets, for the workers. Always the same rows."""
        ...

    def all_tasks(self, where: Where = EVERYTHING) -> Sequence[Any]:
        """What lies between where the options say that a batch begins and ends, and of that at least what is asked
        for."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class CollectionPlan:
    """A collection, from cut to cut."""

    def __init__(self, log: Log, options: Options) -> None:
        self.planner = Planner(
            log, options.wal, options.collection, options.prefix, fail_on_data_loss=options.fail_on_data_loss
        )
        self._options = options
        self._wal = scheme_of(options.wal)

    def what(self) -> str:
        """See `Plan`."""
        return f"collection {self._options.collection!r}"

    def schema(self) -> StructType:
        """See `Plan`."""
        return spark_schema(self.planner.known().schema, change_feed=self._options.change_feed)

    def begin(self) -> Offset:
        """See `Plan`."""
        return self._offset(self._begin())

    def newest(self) -> Offset | None:
        """See `Plan`."""
        newest = self.planner.newest()
        return None if newest is None else self._offset(newest)

    def next(self, start: Offset, upto: Offset, limits: Limits) -> Offset | None:
        """See `Plan`."""
        found = self.planner.next(self._cut(start), limits, self._cut(upto))
        return None if found is None else self._offset(found)

    def has_rows(self, start: Offset, upto: Offset, rows: int) -> bool:
        """See `Plan`."""
        return self.planner.has_rows(self._cut(start), self._cut(upto), rows)

    def tasks(self, start: Offset, end: Offset) -> Sequence[Any]:
        """See `Plan`."""
        return self.planner.ranges(self._cut(start), self._cut(end), tasks=self._options.min_partitions)

    def all_tasks(self, where: Where = EVERYTHING) -> Sequence[Any]:
        """See `Plan`. Times that are still to come name nothing yet."""
        begin, (end, end_beyond) = self._begin(), self._end()
        if self._options.starting_time is not None and end.time <= begin.time:
            return []
        first, last = self.planner.narrowed(begin, end, where.first_ts, where.last_ts)
        tasks = self._options.min_partitions
        ranges = self.planner.ranges(first, last, tasks=tasks, end_beyond=end_beyond and last is end)
        wanted = self._vchannels(where)
        found = [replace(each, end_ts=end.time, vchannels=_both(each.vchannels, wanted)) for each in ranges]
        return [each for each in found if any(physical(name) == each.channel for name in each.vchannels)]

    def _vchannels(self, where: Where) -> frozenset[str]:
        """Where the rows may be that are asked for: all versions of a key come through one."""
        collection = self.planner.known()
        keys, channels = where.values(collection.schema.primary_key), where.values("_channel")
        found = frozenset(collection.vchannels)
        if keys is not None:
            found = frozenset(collection.vchannels[shard_of_key(key, collection.shards)] for key in keys)
        return found if channels is None else found & channels

    def close(self) -> None:
        """See `Plan`."""
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
