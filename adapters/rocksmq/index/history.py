"""Read entries that are not in memory any more: from the index to the frames, in pieces of about 1 MiB.

Payloads are views of the piece that was read, which is never written again. Every frame's checksum is verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from ....runtime.errors import CorruptLog
from ....runtime.log.wal import Entry
from ..journal.channels import decode_id, encode_id
from ..journal.frame import READ_BYTES, JournalFrame, Scanner
from ..journal.segments import HEADER_BYTES, Segment, Segments
from .index import SPAN_BYTES, Index, IndexEntry, IndexFailed, SegmentSummary

JUMP_BYTES = 256 * 1024  # read at once where the channel's next frame is not the journal's next


class Cursor(NamedTuple):
    """Where reading goes on: the index entry in force, and the next frame behind it."""

    index_entry: IndexEntry
    offset: int


class SegmentGone(Exception):
    """Retention removed the segment while it was being read."""


class Frames(Protocol):
    """Frames that may hold entries of a channel, in order, each with the cursor behind it. The caller sets `reached` to
    the last id that it has seen."""

    reached: int

    @property
    def at_hand(self) -> bool:
        """Whether the next frame costs no read."""
        ...

    def __iter__(self) -> Iterator[tuple[JournalFrame, Cursor]]: ...


class History:
    """Reads one journal. Thread-safe; blocks.

    The index says where to look, but not that there is nothing: ids follow one another, and where one is missing the
    segments themselves are searched. So an index that lacks something, or fails, costs time only.
    """

    def __init__(self, segments: Segments, index: Index, sealed: Mapping[int, SegmentSummary]) -> None:
        """`sealed` are the full segments, kept up to date by its owner."""
        self._segments, self._index, self._sealed = segments, index, sealed

    def read(
        self, channel: int, next_id: int, upto_id: int, cursor: Cursor | None = None, piece_bytes: int = READ_BYTES
    ) -> tuple[list[Entry], Cursor | None]:
        """Entries of a channel, by its number, with `next_id` ≤ id ≤ `upto_id`, as far as one piece of about
        `piece_bytes` goes, and the cursor to go on with, if that is known. `cursor` is that of the read before, where
        this one continues it. An empty result means that no entry has such an id. Raises `SegmentGone` and
        `CorruptLog`."""
        first_epoch = self._segments.first_epoch
        found: list[Entry] | None = None
        damage: CorruptLog | None = None
        try:
            walk = Walk(self._segments, self._index, channel, next_id, cursor, piece_bytes)
            found, following = _piece(walk, channel, next_id, upto_id, piece_bytes)
            if _first(found) == next_id:
                return _without_gaps(found, following)
        except IndexFailed:
            pass
        except CorruptLog as error:
            damage = error
        search = Search(self._segments, self._sealed, channel, next_id, cursor, piece_bytes)
        try:
            entries, following = _piece(search, channel, next_id, upto_id, piece_bytes)
        except CorruptLog as error:
            raise damage or error from None
        if self._segments.first_epoch != first_epoch:  # retention removed what may have been wanted
            raise SegmentGone
        if damage is not None or (found is not None and _first(found) != _first(entries)):
            self._index.distrust(f"it does not lead to the entries of channel {channel} from id {next_id:016x} on")
        return entries, None if self._index.usable else following

    def id_at(self, channel: int, timestamp: int, first_id: int, upto_id: int) -> int | None:
        """The first id from `first_id` to `upto_id` whose timestamp is ≥ `timestamp`. Raises as `read` does."""
        try:
            index_entry = self._index.before_timestamp(channel, timestamp)
        except IndexFailed:
            index_entry = None
        next_id, cursor = max(first_id, index_entry.id if index_entry is not None else 0), None
        while True:
            entries, cursor = self.read(channel, next_id, upto_id, cursor)
            for entry in entries:
                if entry.timestamp >= timestamp:
                    return decode_id(entry.id)
            if not entries:
                return None
            next_id = decode_id(entries[-1].id) + 1


def _first(entries: Sequence[Entry]) -> int | None:
    return decode_id(entries[0].id) if entries else None


def _piece(
    frames: Frames, channel: int, next_id: int, upto_id: int, piece_bytes: int
) -> tuple[list[Entry], Cursor | None]:
    """The entries of one piece, or those before damage, and the cursor behind them; no cursor at the end."""
    entries: list[Entry] = []
    size = 0
    try:
        for frame, following in frames:
            bodies, at = frame.bodies, 0
            for number, length, id, timestamp in frame.raw_rows():
                if number == channel:
                    frames.reached = id
                    if next_id <= id <= upto_id:
                        entries.append(Entry(encode_id(id), timestamp, bodies[at : at + length]))
                        size += length
                at += length
            if frames.reached >= upto_id:
                return entries, following if entries else None
            if size >= piece_bytes // 2 and not frames.at_hand:
                return entries, following
    except CorruptLog:
        if not entries:
            raise
    return entries, None


def _without_gaps(entries: list[Entry], following: Cursor | None) -> tuple[list[Entry], Cursor | None]:
    """The entries up to the first id that is missing: the next entry must be searched."""
    first = decode_id(entries[0].id)
    if decode_id(entries[-1].id) - first + 1 == len(entries):
        return entries, following
    return [entry for number, entry in enumerate(entries, first) if decode_id(entry.id) == number], None


class Search:
    """Every frame of the segments that hold entries of a channel from `next_id` on, by the summaries of the segments:
    the index is not asked. Goes on at a cursor."""

    def __init__(
        self,
        segments: Segments,
        sealed: Mapping[int, SegmentSummary],
        channel: int,
        next_id: int,
        cursor: Cursor | None,
        piece_bytes: int,
    ) -> None:
        self.reached: int = next_id - 1
        self._segments, self._sealed, self._channel, self._next_id = segments, sealed, channel, next_id
        self._cursor, self._piece_bytes = cursor, piece_bytes
        self._scanner: Scanner | None = None

    @property
    def at_hand(self) -> bool:
        return self._scanner is not None and self._scanner.at_hand

    def __iter__(self) -> Iterator[tuple[JournalFrame, Cursor]]:
        for epoch in self._segments.epochs:
            summary, offset = self._sealed.get(epoch), HEADER_BYTES
            if summary is not None and summary.channels.get(self._channel, (0, 0))[0] < self._next_id:
                continue
            if self._cursor is not None and self._cursor.index_entry.epoch == epoch:
                offset = self._cursor.offset
            with self._segments.reading(epoch, offset, self._piece_bytes) as reading:
                if reading is None:
                    raise SegmentGone
                segment, self._scanner = reading
                while self._scanner.offset < self._scanner.end:
                    frame = _frame(self._segments, segment, self._scanner)
                    yield frame, Cursor(IndexEntry(self.reached, epoch, offset, 0), frame.end)


class Walk:
    """The frames to which the index leads, from about `next_id` on. Raises `IndexFailed`.

    Where the last id seen (`reached`) is the last before the next index entry, the walk goes on at that index entry. So
    a channel with an entry here and there costs a few frames each, not all in between.
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
        self.reached: int = next_id - 1
        self._piece_bytes = piece_bytes
        self._scanner: Scanner | None = None
        self._segments, self._index, self._channel = segments, index, channel
        self._cursor = cursor or self._start(next_id)

    @property
    def at_hand(self) -> bool:
        return self._scanner is not None and self._scanner.at_hand

    def __iter__(self) -> Iterator[tuple[JournalFrame, Cursor]]:
        cursor = self._cursor
        while cursor is not None:
            with self._segments.reading(cursor.index_entry.epoch, cursor.offset, self._piece_bytes) as reading:
                if reading is None:
                    raise SegmentGone
                segment, scanner = reading
                self._scanner = scanner
                while (
                    cursor is not None and cursor.index_entry.epoch == segment.epoch
                ):  # one scanner, one buffer, for all
                    scanner.offset = cursor.offset
                    following = self._index.after(self._channel, cursor.index_entry.id)
                    yield from self._span(segment, scanner, cursor.index_entry, following)
                    cursor = _begin(following)

    def _span(
        self, segment: Segment, scanner: Scanner, index_entry: IndexEntry, following: IndexEntry | None
    ) -> Iterator[tuple[JournalFrame, Cursor]]:
        """The frames that one index entry covers."""
        end = min(scanner.end, index_entry.offset + SPAN_BYTES)
        if following is not None and following.epoch == index_entry.epoch:
            end = min(end, following.offset)  # an index with shorter spans, or written by more than one incarnation
        while scanner.offset < end and (following is None or self.reached < following.id - 1):
            frame = _frame(self._segments, segment, scanner)
            yield frame, Cursor(index_entry, frame.end)
        if scanner.offset < end:
            scanner.piece_bytes = min(scanner.piece_bytes, JUMP_BYTES)

    def _start(self, next_id: int) -> Cursor | None:
        index_entry = self._index.at_or_before(self._channel, next_id)
        if index_entry is None or not self._segments.holds(index_entry.epoch):
            index_entry = self._index.after(self._channel, next_id)
            while index_entry is not None and index_entry.epoch < self._segments.first_epoch:
                index_entry = self._index.after(self._channel, index_entry.id)
        return _begin(index_entry)


def _begin(index_entry: IndexEntry | None) -> Cursor | None:
    return Cursor(index_entry, index_entry.offset) if index_entry is not None else None


def _frame(segments: Segments, segment: Segment, scanner: Scanner) -> JournalFrame:
    """The next frame, which must be there. Raises `SegmentGone` and `CorruptLog`."""
    what = "is damaged"
    try:
        frame = scanner.next()
    except OSError as error:
        frame, what = None, f"cannot be read ({error})"
    if frame is not None:
        return frame
    if not segments.holds(segment.epoch):
        raise SegmentGone
    raise CorruptLog(f"{segment.path} {what} at offset {scanner.offset}", path=segment.path, offset=scanner.offset)
