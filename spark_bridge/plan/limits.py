"""How much a micro-batch may hold: whole steps (cuts, or timestamps of a topic) within limits, and at least one.

The driver reads what it counts, from the records' headers: columns are not decoded, and counting ends where the limit
is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple, TypeVar

from ...runtime.catalog.cuts import Cut
from ...runtime.errors import BadRecord
from ...runtime.log.blocking_reader import BlockingReader
from ...runtime.log.record import Record, RecordType
from ...runtime.rows.row_codec import count_rows
from ...runtime.streams.channel_reader import ChannelReader, Granted
from ..options import MicroBatchLimits
from ..scan.collection import ChannelRange, entries_of

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


class CutSizes:
    """The sizes of what lies between cuts, in the order of the cuts, each channel read once. `ranges` are those from
    the first cut to the last."""

    def __init__(self, log: BlockingReader, ranges: Iterable[ChannelRange]) -> None:
        self._channels: Mapping[str, _Ahead] = {each.channel: _Ahead(entry_sizes(log, each)) for each in ranges}

    def upto(self, cut: Cut) -> Iterator[Size]:
        """The sizes of the entries up to `cut` that no earlier call has returned."""
        return chain.from_iterable(
            ahead.upto(lambda id, end=cut.ends[channel].id: id <= end) for channel, ahead in self._channels.items()
        )


class _Ahead:
    """Sizes of entries, the next one held back until it is asked for."""

    def __init__(self, sizes: Iterator[tuple[bytes, Size]]) -> None:
        self._sizes = sizes
        self._next: tuple[bytes, Size] | None = None

    def upto(self, wanted: Callable[[bytes], bool]) -> Iterator[Size]:
        while True:
            self._next = self._next or next(self._sizes, None)
            if self._next is None or not wanted(self._next[0]):
                return
            size, self._next = self._next[1], None
            yield size


def entry_sizes(log: BlockingReader, wanted: ChannelRange) -> Iterator[tuple[bytes, Size]]:
    """The id and the size of each entry of `wanted`. The rows of a batch count with its last record."""
    stored = wanted.schema.row_arrow()
    reader = ChannelReader(
        wanted.channel,
        fences=wanted.fences,
        after=(wanted.begin.term, wanted.begin.cseq),
        granted=Granted(wanted.end.term),
    )

    def rows_of(record: Record) -> int:
        if record.type is not RecordType.ROWS or record.vchannel not in wanted.vchannels:
            return 0
        try:
            return count_rows(record.body, stored) if wanted.begin_ts < record.ts <= wanted.end_ts else 0
        except BadRecord:
            return 0  # the task skips the record with a warning

    for entries in entries_of(log, wanted):
        for entry in entries:
            yield entry.id, Size(sum(map(rows_of, reader.accept([entry]))), len(entry.payload), 1)
