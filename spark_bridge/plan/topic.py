"""What plans of topics share: which channels are read, by name or pattern, and how a range is split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from ...runtime.errors import ChannelNotFound
from ...runtime.log.migration_state import is_migration_channel
from ...runtime.log.redaction import shown_url
from ..log import first_entries
from ..scan.channel_range import ChannelPlace, ChannelRange, entries_of
from ..scan.topic_rows import topic_columns, topic_schema
from .offsets import Offset
from .predicate import Predicate
from .read_plan import ReadPlan

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class TopicPlan(ReadPlan):
    """A read of channels that users have made."""

    def what(self) -> str:
        """What is read, as errors name it."""
        return "a topic"

    def schema(self) -> StructType:
        """All columns of the read, in Spark's types."""
        return topic_schema(topic_columns(headers=self._options.headers, tags=self._options.tags))

    # ---- channels ---------------------------------------------------------------------------------------------------

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
        """All channels except those that a node has for itself and for the rows of collections, and those that a
        migration has made, which come and go."""
        nodes = f"{self._options.prefix}-"
        return [each for each in self._log.channels() if not (each.startswith(nodes) or is_migration_channel(each))]

    def _not_there(self, name: str) -> ChannelNotFound:
        there = ", ".join(self._of_users()) or "none"
        return ChannelNotFound(
            f"no channel {name!r} in {shown_url(self._options.wal)}; there are: {there}. Check options topic and wal, "
            "or set failOnDataLoss=false to go on without it",
            channel=name,
        )

    def _check_dropped(self, begin: Offset, end: Offset) -> None:
        """Raise `ChannelNotFound` for a channel that was read and is no more, unless data loss is allowed."""
        gone = sorted(begin.ends.keys() - end.ends.keys())
        if gone and self._options.fail_on_data_loss:
            raise ChannelNotFound(
                f"channel {gone[0]!r} was dropped while it was being read: start with a new checkpoint, or set "
                "failOnDataLoss=false to go on without it",
                channel=gone[0],
            )

    # ---- ranges -----------------------------------------------------------------------------------------------------

    def _asked(self, wanted: ChannelRange, predicate: Predicate) -> ChannelRange | None:
        """The predicate's times are ignored where entries may be in any order of time."""
        channels = predicate.values("_channel")
        return wanted if channels is None or wanted.channel in channels else None

    def _split(self, ranges: Sequence[ChannelRange], begin: Offset, end: Offset) -> list[ChannelRange]:
        count = -(-self._options.min_partitions // max(len(ranges), 1))
        return [part for wanted in ranges for part in (self._parts(wanted, count) if count > 1 else [wanted])]

    def _parts(self, wanted: ChannelRange, count: int) -> list[ChannelRange]:
        """The range `wanted` in about `count` parts. By time: all that an owner wrote at or before one lies before all
        that it wrote later. Without an owner by the time of its entries: a channel whose entries have none is one
        task."""
        first = wanted.begin_ts or self._first_time(wanted)
        at_end = replace(wanted, begin=ChannelPlace(wanted.end.id, False), end=ChannelPlace(wanted.end.id))
        last = wanted.end_ts or (first and self._first_time(at_end))
        times = {first + (last - first) * number // count for number in range(1, count)} - {first, 0}
        found = {id: time for time in sorted(times) if (id := self._id_at(wanted.channel, time)) is not None}
        places = [(ChannelPlace(id, behind=False), time - 1) for id, time in sorted(found.items())]
        inner = [(place, time) for place, time in places if wanted.begin < place < wanted.end]
        bounds = [(wanted.begin, wanted.begin_ts), *inner, (wanted.end, wanted.end_ts)]
        return [
            replace(wanted, begin=begin, end=end, begin_ts=begin_ts, end_ts=end_ts)
            for (begin, begin_ts), (end, end_ts) in pairwise(bounds)
        ]

    def _first_time(self, wanted: ChannelRange) -> int:
        """The timestamp of the first entry of a range; 0 where it has none."""
        first = first_entries(entries_of(self._log, wanted))
        return first[0].timestamp if first else 0
