"""Count the entries of frames by channel: for the table, for the extents of the segment, for the index.

Little of it is needed at once, so it is done after the commits, some frames at a time: a small append pays its part of
one pass over many rows, and none waits for thousands. The index gets `SPAN_BYTES` of journal at a time.
"""

from __future__ import annotations

from ..index.index import SPAN_BYTES, Index, IndexEntry
from .channels import ChannelTable
from .dedup_table import is_result
from .frame import CONTROL
from .pending import Columns
from .recovery import Extents
from .segments import Segment

COUNT_FRAMES = 64  # counted together: some tenths of a millisecond where they are small


class SegmentStats:
    """Belongs to the thread or loop that has the turn to commit. A span is a run of frames that begin within
    `SPAN_BYTES`; each channel in it gets one index entry, at its first frame there."""

    def __init__(self, table: ChannelTable, index: Index, extents: Extents) -> None:
        self.extents: Extents = extents
        self._table, self._index = table, index
        self._frames: list[tuple[int, Columns, int]] = []  # not counted yet: offset, rows, bytes of bodies
        self._entries: dict[int, IndexEntry] = {}
        self._span_offset: int | None = None

    def note(self, offset: int, columns: Columns, body_bytes: int) -> None:
        """Remember a durable frame: its offset, its rows, and the bytes of its bodies."""
        self._frames.append((offset, columns, body_bytes))
        if self._span_offset is None:
            self._span_offset = offset

    def due(self, segment: Segment) -> bool:
        """Whether a frame that comes now would begin another span."""
        return self._span_offset is not None and segment.end - self._span_offset >= SPAN_BYTES

    @property
    def behind(self) -> bool:
        """Whether so many frames are not counted that it is time to count."""
        return len(self._frames) >= COUNT_FRAMES

    def index(self, segment: Segment) -> None:
        """End the span: the index finds the entries of all frames that were noted."""
        self.count(segment)
        self._index.add(list(self._entries.items()), (segment.epoch, segment.end))
        self._entries.clear()
        self._span_offset = None

    def begin_segment(self) -> None:
        """The frames noted from now on lie in the next segment."""
        self.extents = Extents()

    def count(self, segment: Segment) -> None:
        """Bring table and extents up to date; control records take effect."""
        spans: dict[int, _Span] = {}
        for offset, (numbers, ids, timestamps, bodies), body_bytes in self._frames:
            number = numbers[0]
            if number != CONTROL and numbers.count(number) == len(numbers):
                _count(spans, number, offset, ids[0], ids[-1], max(timestamps), body_bytes)
                continue
            for number, id, timestamp, body in zip(numbers, ids, timestamps, bodies, strict=True):
                if number != CONTROL:
                    _count(spans, number, offset, id, id, timestamp, len(body))
                elif is_result(body):
                    self._table.apply(body)
                else:  # the record may create or drop channels: rows before it count before it
                    self._enter(segment, spans)
                    spans.clear()
                    self._table.apply(memoryview(body))
        self._enter(segment, spans)
        self._frames.clear()

    def _enter(self, segment: Segment, spans: dict[int, _Span]) -> None:
        for number, span in spans.items():
            if number not in self._entries:
                state = self._table.by_number.get(number)
                earlier = state.max_timestamp if state is not None else 0
                self._entries[number] = IndexEntry(span.first_id, segment.epoch, span.offset, earlier)
            self._table.advance(number, span.last_id, span.max_timestamp)
            self.extents.add(number, span.last_id, span.size)


class _Span:
    __slots__ = ("first_id", "last_id", "max_timestamp", "offset", "size")

    def __init__(self, offset: int, first_id: int, last_id: int, timestamp: int, size: int) -> None:
        self.offset, self.first_id, self.last_id = offset, first_id, last_id
        self.max_timestamp, self.size = timestamp, size


def _count(
    spans: dict[int, _Span], number: int, offset: int, first_id: int, last_id: int, timestamp: int, size: int
) -> None:
    span = spans.get(number)
    if span is None:
        spans[number] = _Span(offset, first_id, last_id, timestamp, size)
        return
    span.last_id = last_id
    span.size += size
    if timestamp > span.max_timestamp:
        span.max_timestamp = timestamp
