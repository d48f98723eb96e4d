"""The plan of topics that others made: each partition is a channel that is read on its own, and offsets may be given as
for Spark's Kafka source."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, cast

from ...runtime.errors import ChannelNotFound, InvalidRequest
from ...runtime.log.opening import find_backend
from ..scan.channel_range import BEGINNING, ChannelPlace, ChannelRange
from ..scan.foreign_rows import OFFSET_BYTES, foreign_columns
from ..scan.topic_rows import topic_schema
from .offsets import Offset
from .topic_by_channel import ByChannel

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

EARLIEST: Final = -2  # as offsets of Spark's Kafka source
LATEST: Final = -1


class ForeignTopics(ByChannel):
    """A read of the partitions of topics, or of single ones that an option names."""

    def schema(self) -> StructType:
        """All columns of the read, in Spark's types."""
        return topic_schema(foreign_columns(numbered=self._numbered, headers=self._options.headers))

    @property
    def _of(self) -> str:
        return "topics of others"

    @property
    def _numbered(self) -> bool:
        """Whether entries have offsets that are numbers."""
        return find_backend(self._options.wal).capabilities().numbered_ids

    # ---- channels ---------------------------------------------------------------------------------------------------

    def latest(self) -> dict[str, bytes | None]:
        """As `TopicPlan.latest`, of all partitions of the topics, sorted by name. One that is named and missing is an
        error unless data loss is allowed."""
        there = self._log.channels()
        if self._options.pattern:
            pattern = re.compile(self._options.pattern)
            names = [name for name in there if pattern.fullmatch(_topic_of(name))]
        else:
            wanted = set(self._options.topics)
            names = [name for name in there if wanted & {name, _topic_of(name)}]
            missing = wanted - {each for name in names for each in (name, _topic_of(name))}
            if missing and self._options.fail_on_data_loss:
                raise self._not_there(min(missing))
        found: dict[str, bytes | None] = {}
        for name in names:
            try:
                found[name] = self._log.latest_id(name)
            except ChannelNotFound:  # deleted meanwhile: `_check` says so
                continue
        return found

    def _of_users(self) -> list[str]:
        return sorted({_topic_of(name) for name in self._log.channels()})

    def _range(self, channel: str, begin: ChannelPlace, end: ChannelPlace, first: Offset, last: Offset) -> ChannelRange:
        return replace(super()._range(channel, begin, end, first, last), foreign=True)

    # ---- offsets ----------------------------------------------------------------------------------------------------

    def _given(self, given: dict[str, Any], default: str) -> Offset:
        """Also `{"orders": {"0": 23, "1": -2}}`, where -2 is the earliest entry, -1 the end, and a number the entry to
        begin with, or before which to end."""
        if "v" in given or not all(isinstance(each, dict) for each in given.values()):
            return super()._given(given, default)
        if not self._numbered:
            raise InvalidRequest(
                "entries of this log have no offsets that are numbers: give startingTimestamp, or the offset of a"
                " checkpoint"
            )
        latest = self._newest()
        ends = latest.ends if default == "latest" else dict.fromkeys(latest.ends, BEGINNING)
        named: dict[str, ChannelPlace] = {}
        for topic, partitions in given.items():
            for number, offset in cast("dict[str, Any]", partitions).items():
                channel = f"{topic}:{number}"
                if channel not in latest.ends:
                    raise InvalidRequest(f"the offsets name channel {channel!r}, which is not read: correct it")
                named[channel] = _place(channel, offset, latest.ends[channel])
        return replace(latest, ends={**ends, **named})

    # ---- ranges -----------------------------------------------------------------------------------------------------

    def _parts(self, wanted: ChannelRange, count: int) -> list[ChannelRange]:
        """By offset where it is a number: times need not ascend in topics of others."""
        if not self._numbered or not wanted.begin.id:
            return super()._parts(wanted, count)
        first, last = _offset_of(wanted.begin), _offset_of(wanted.end)
        prefix = wanted.end.id[:-OFFSET_BYTES]
        inner = sorted({first + (last - first) * number // count for number in range(1, count)})
        places = [ChannelPlace(_id(prefix, offset), behind=False) for offset in inner]
        bounds = [wanted.begin, *(place for place in places if wanted.begin < place < wanted.end), wanted.end]
        return [replace(wanted, begin=begin, end=end) for begin, end in pairwise(bounds)]


def _topic_of(channel: str) -> str:
    return channel.partition(":")[0]


def _offset_of(place: ChannelPlace) -> int:
    return int.from_bytes(place.id[-OFFSET_BYTES:], "big")


def _id(prefix: bytes, offset: int) -> bytes:
    return prefix + offset.to_bytes(OFFSET_BYTES, "big")


def _place(channel: str, offset: object, end: ChannelPlace) -> ChannelPlace:
    """The place before the entry at an offset. Raises `InvalidRequest` for one behind the end."""
    if offset == EARLIEST:
        return BEGINNING
    if offset == LATEST:
        return end
    behind = 0 if end == BEGINNING else _offset_of(end) + 1
    if type(offset) is not int or not offset >= 0:
        raise InvalidRequest(f"the offset {offset!r} of channel {channel!r} is no number from -2 on: correct it")
    if offset >= behind:
        if offset > behind:
            raise InvalidRequest(f"channel {channel!r} ends before offset {behind}, so {offset} is not there yet")
        return end
    return ChannelPlace(_id(end.id[:-OFFSET_BYTES], offset), behind=False)
