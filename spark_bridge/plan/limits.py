"""How much a micro-batch may hold: whole steps (cuts, timestamps or entries) within limits, and at least one.

The driver reads what it counts, from the records' headers: columns are not decoded, and counting ends where the limit
is reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

from ...runtime.log.blocking_reader import BlockingReader
from ...runtime.log.record import Record
from ..options import MicroBatchLimits
from ..scan.channel_range import ChannelRange, entries_of
from ..scan.collection_rows import CollectionRows
from ..scan.foreign_rows import ForeignRows
from ..scan.topic_rows import TopicRows
from .offsets import Offset

T = TypeVar("T")


class Size(NamedTuple):
    """The size of some entries of the log: the requested rows in them, and all bytes and entries to read for these."""

    rows: int = 0
    bytes: int = 0
    entries: int = 0

    def plus(self, other: Size) -> Size:
        """The sum of both."""
        return Size(self.rows + other.rows, self.bytes + other.bytes, self.entries + other.entries)

    def is_over(self, limits: MicroBatchLimits) -> bool:
        """Whether one of the limits is passed."""
        maxima = (limits.rows, limits.bytes, limits.entries)
        return any(limit is not None and value > limit for value, limit in zip(self, maxima, strict=True))


def last_within(steps: Iterable[tuple[T, Iterable[Size]]], limits: MicroBatchLimits) -> T | None:
    """The last of `steps` up to which all sizes together are within the limits, or the first; None without steps.
    Sizes behind the limit are not asked for."""
    total, chosen = Size(), None
    for step, sizes in steps:
        for size in sizes:
            total = total.plus(size)
            if total.is_over(limits):
                return step if chosen is None else chosen
        chosen = step
    return chosen


class CountedEntry(NamedTuple):
    """An entry of a range: its id, its size, and the last record that counts once it is read, if that is a new one. The
    rows of a batch count with its last record."""

    id: bytes
    size: Size
    record: Record | None = None


def counted_entries(log: BlockingReader, wanted: ChannelRange) -> Iterator[CountedEntry]:
    """The entries of `wanted` with what the task will make of them. Raises what `entries_of` raises."""
    reader = wanted.reader()
    if reader is None:
        topic = ForeignRows(wanted) if wanted.foreign else TopicRows(wanted)
        for entries in entries_of(log, wanted):
            for entry in entries:
                yield CountedEntry(entry.id, Size(topic.count_entry(entry), len(entry.payload), 1))
        return
    rows = (TopicRows if wanted.schema is None else CollectionRows)(wanted)
    for entries in entries_of(log, wanted):
        for entry in entries:
            records = reader.accept([entry])
            count = sum(rows.count(record) for record in records if rows.wants(record) and wanted.holds(record))
            yield CountedEntry(entry.id, Size(count, len(entry.payload), 1), records[-1] if records else None)


class OffsetSizes:
    """The sizes of what lies between offsets, in their order, each channel read once. `ranges` are those from the first
    offset to the last."""

    def __init__(self, log: BlockingReader, ranges: Iterable[ChannelRange]) -> None:
        self._ranges = [(each.channel, _Ahead(counted_entries(log, each))) for each in ranges]

    def upto(self, offset: Offset) -> Iterator[Size]:
        """The sizes of the entries up to `offset` that no earlier call has returned."""
        for channel, ahead in self._ranges:
            yield from ahead.upto(offset.ends[channel].id)


class _Ahead:
    """Sizes of entries, the next one held back until it is asked for."""

    def __init__(self, entries: Iterator[CountedEntry]) -> None:
        self._entries = entries
        self._next: CountedEntry | None = None

    def upto(self, last_id: bytes) -> Iterator[Size]:
        while True:
            self._next = self._next or next(self._entries, None)
            if self._next is None or self._next.id > last_id:
                return
            size, self._next = self._next.size, None
            yield size
