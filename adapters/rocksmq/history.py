"""Read what memory has forgotten: from the index to the frames, in pieces of about 1 MiB.

Payloads are views of the piece that was read, which nobody writes again. Every frame's checksum is verified.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...runtime.errors import CorruptLog
from ...runtime.wal import Entry
from .channels import encode_id
from .frame import READ_BYTES, Frame, Scanner
from .index import SPAN_BYTES, Index, Place
from .segments import Segment, Segments


class Cursor(NamedTuple):
    """Where reading goes on: the index entry in force, and the next frame behind it."""

    place: Place
    offset: int


class Gone(Exception):
    """Retention took the segment while it was being read."""


class History:
    """Reads one journal. Thread-safe; blocks."""

    def __init__(self, segments: Segments, index: Index) -> None:
        self._segments, self._index = segments, index

    def read(
        self, channel: int, next_id: int, upto_id: int, cursor: Cursor | None = None
    ) -> tuple[list[Entry], Cursor | None]:
        """Entries with `next_id` ≤ id ≤ `upto_id`, as far as one piece goes, and where to go on (None: at the end).
        Raises `Gone` and `CorruptLog`."""
        entries: list[Entry] = []
        size = 0
        for number, id, timestamp, payload, at in self._walk(channel, next_id, cursor):
            if number != channel:  # the end of a frame
                if size >= READ_BYTES or (entries and decode(entries[-1]) >= upto_id):
                    return entries, at
            elif next_id <= id <= upto_id:
                entries.append(Entry(encode_id(id), timestamp, payload))
                size += len(payload)
            elif id > upto_id:
                return entries, None
        return entries, None

    def id_at(self, channel: int, timestamp: int, first_id: int) -> int | None:
        """The first id ≥ `first_id` whose timestamp is ≥ `timestamp`, as far as the index reaches."""
        place = self._index.before_timestamp(channel, timestamp)
        if place is not None and place.epoch < self._segments.first_epoch:
            place = None
        start = Cursor(place, place.offset) if place is not None else None
        for number, id, found, _, _ in self._walk(channel, first_id, start):
            if number == channel and id >= first_id and found >= timestamp:
                return id
        return None

    def _walk(
        self, channel: int, next_id: int, cursor: Cursor | None
    ) -> Iterator[tuple[int, int, int, memoryview, Cursor | None]]:
        """All rows of the channel from about `next_id` on; behind each frame one row of channel -1 with the cursor."""
        nothing = memoryview(b"")
        if cursor is None:
            place = self._index.at_or_before(channel, next_id)
            if place is None or not self._segments.holds(place.epoch):
                place = self._first_after(channel, next_id)
            cursor = Cursor(place, place.offset) if place is not None else None
        while cursor is not None:
            place, offset = cursor
            with self._segments.reading(place.epoch, offset) as reading:
                if reading is None:
                    raise Gone
                segment, scanner = reading
                at_place: Place | None = place
                while at_place is not None and at_place.epoch == segment.epoch:  # one scanner, and its buffer, for all
                    place = at_place
                    while scanner.offset < min(scanner.end, place.offset + SPAN_BYTES):
                        frame = self._frame(segment, scanner)
                        at = 0
                        for number, length, id, timestamp in frame.raw_rows():
                            if number == channel:
                                yield number, id, timestamp, frame.bodies[at : at + length], None
                            at += length
                        yield -1, 0, 0, nothing, Cursor(place, frame.end)
                    at_place = self._index.after(channel, place.id)
                    if at_place is not None:
                        scanner.offset = at_place.offset
            cursor = Cursor(at_place, at_place.offset) if at_place is not None else None

    def _frame(self, segment: Segment, scanner: Scanner) -> Frame:
        frame = scanner.next()
        if frame is not None:
            return frame
        if not self._segments.holds(segment.epoch):
            raise Gone
        damaged = f"{segment.path} is damaged at offset {scanner.offset}"
        raise CorruptLog(damaged, path=segment.path, offset=scanner.offset)

    def _first_after(self, channel: int, id: int) -> Place | None:
        place = self._index.after(channel, id)
        while place is not None and place.epoch < self._segments.first_epoch:
            place = self._index.after(channel, place.id)
        return place


def decode(entry: Entry) -> int:
    return int.from_bytes(entry.id, "big")
