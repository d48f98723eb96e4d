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

JUMP_BYTES = 256 * 1024  # read at once where the next frame of the channel is not the next of the journal


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
        self, channel: int, next_id: int, upto_id: int, cursor: Cursor | None = None, piece_bytes: int = READ_BYTES
    ) -> tuple[list[Entry], Cursor | None]:
        """Entries with `next_id` ≤ id ≤ `upto_id`, as far as one piece goes, and where to go on (None: at the end).
        Raises `Gone` and `CorruptLog`."""
        entries: list[Entry] = []
        size = 0
        walk = Walk(self._segments, self._index, channel, next_id, cursor, piece_bytes)
        for frame, following in walk:
            bodies, at = frame.bodies, 0
            for number, length, id, timestamp in frame.raw_rows():
                if number == channel:
                    walk.reached = id
                    if next_id <= id <= upto_id:
                        entries.append(Entry(encode_id(id), timestamp, bodies[at : at + length]))
                        size += length
                at += length
            if walk.reached >= upto_id:
                return entries, following if entries else None
            if size >= piece_bytes // 2 and not walk.at_hand:
                return entries, following
        return entries, None

    def id_at(self, channel: int, timestamp: int, first_id: int) -> int | None:
        """The first id ≥ `first_id` whose timestamp is ≥ `timestamp`, as far as the index reaches."""
        place = self._index.before_timestamp(channel, timestamp)
        if place is not None and place.epoch < self._segments.first_epoch:
            place = None
        start = Cursor(place, place.offset) if place is not None else None
        walk = Walk(self._segments, self._index, channel, first_id if start is None else 0, start)
        for frame, _ in walk:
            for number, _, id, found in frame.raw_rows():
                if number == channel:
                    walk.reached = id
                    if id >= first_id and found >= timestamp:
                        return id
        return None


class Walk:
    """The frames that may hold entries of a channel, from about `next_id` on, each with the cursor behind it.

    Whoever iterates tells in `reached` the last id it has seen: where that is the last before the next index entry, the
    walk goes there at once. So a channel with an entry here and there costs a few frames each, not all in between.
    """

    def __init__(
        self,
        segments: Segments,
        index: Index,
        channel: int,
        next_id: int,
        cursor: Cursor | None,
        piece_bytes: int = READ_BYTES,
    ) -> None:
        self.reached = next_id - 1
        self._piece_bytes = piece_bytes
        self._scanner: Scanner | None = None
        self._segments, self._index, self._channel = segments, index, channel
        self._cursor = cursor or self._start(next_id)

    @property
    def at_hand(self) -> bool:
        """Whether the next frame costs no read."""
        return self._scanner is not None and self._scanner.at_hand

    def __iter__(self) -> Iterator[tuple[Frame, Cursor]]:
        cursor = self._cursor
        while cursor is not None:
            with self._segments.reading(cursor.place.epoch, cursor.offset, self._piece_bytes) as reading:
                if reading is None:
                    raise Gone
                segment, scanner = reading
                self._scanner = scanner
                while cursor is not None and cursor.place.epoch == segment.epoch:  # one scanner, one buffer, for all
                    scanner.offset = cursor.offset
                    following = self._index.after(self._channel, cursor.place.id)
                    yield from self._span(segment, scanner, cursor.place, following)
                    cursor = _begin(following)

    def _span(
        self, segment: Segment, scanner: Scanner, place: Place, following: Place | None
    ) -> Iterator[tuple[Frame, Cursor]]:
        """The frames that one index entry stands for."""
        end = min(scanner.end, place.offset + SPAN_BYTES)
        if following is not None and following.epoch == place.epoch:
            end = min(end, following.offset)  # an index with shorter spans, or made in more than one life
        while scanner.offset < end and (following is None or self.reached < following.id - 1):
            frame = self._frame(segment, scanner)
            yield frame, Cursor(place, frame.end)
        if scanner.offset < end:
            scanner.piece_bytes = min(scanner.piece_bytes, JUMP_BYTES)

    def _frame(self, segment: Segment, scanner: Scanner) -> Frame:
        what = "is damaged"
        try:
            frame = scanner.next()
        except OSError as error:
            frame, what = None, f"cannot be read ({error})"
        if frame is not None:
            return frame
        if not self._segments.holds(segment.epoch):
            raise Gone
        raise CorruptLog(f"{segment.path} {what} at offset {scanner.offset}", path=segment.path, offset=scanner.offset)

    def _start(self, next_id: int) -> Cursor | None:
        place = self._index.at_or_before(self._channel, next_id)
        if place is None or not self._segments.holds(place.epoch):
            place = self._index.after(self._channel, next_id)
            while place is not None and place.epoch < self._segments.first_epoch:
                place = self._index.after(self._channel, place.id)
        return _begin(place)


def _begin(place: Place | None) -> Cursor | None:
    return Cursor(place, place.offset) if place is not None else None
