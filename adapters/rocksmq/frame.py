"""Frames: one per commit, the unit that is wholly there or not there at all.

    header   magic, segment epoch, frame sequence, row count, body bytes, checksum
    table    one row per entry: channel number, body length, id, timestamp
    bodies   one after another; then zeros up to the next multiple of 8

The checksum (xxh3-64) covers header, table and bodies and is seeded with the segment's salt, so what a former life of
a recycled file left behind never passes. Frame sequences have no gaps over the whole journal. Channel number 0 carries
the journal's own records (`channels.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from struct import Struct
from typing import NamedTuple, cast

import xxhash

from ...runtime.disk import Disk
from ...runtime.wal import Payload

MAGIC = b"TWF1"
ALIGNMENT = 8
CONTROL = 0  # the channel number of the journal's own records
READ_BYTES = 1024 * 1024
JOIN_BYTES = 256 * 1024  # below this, copying bodies into one buffer is cheaper than a long iovec

_PREFIX = Struct("<4sIQII")
_CHECKSUM = Struct("<Q")
_ROW = Struct("<IIQQ")
HEADER_BYTES = _PREFIX.size + _CHECKSUM.size
ROW_BYTES = _ROW.size
pack_row = _ROW.pack  # channel number, body length, id, timestamp


class Row(NamedTuple):
    """One line of a frame's table."""

    channel: int
    length: int
    id: int
    timestamp: int


def frame_bytes(count: int, body_bytes: int) -> int:
    """The size of a frame on disk."""
    return HEADER_BYTES + ROW_BYTES * count + body_bytes + -body_bytes % ALIGNMENT


def encode(
    epoch: int, salt: int, sequence: int, rows: Sequence[bytes], bodies: Sequence[Payload], body_bytes: int
) -> list[Payload]:
    """The buffers of one frame, in order. `rows` come from `pack_row`."""
    prefix = _PREFIX.pack(MAGIC, epoch & 0xFFFFFFFF, sequence, len(rows), body_bytes)
    content: Sequence[Payload]
    content = (b"".join((*rows, *bodies)),) if body_bytes <= JOIN_BYTES else (b"".join(rows), *bodies)
    checksum = xxhash.xxh3_64(prefix, seed=salt)
    for buffer in content:
        checksum.update(buffer)
    padding = bytes(-body_bytes % ALIGNMENT)
    return [prefix + _CHECKSUM.pack(checksum.intdigest()), *content, padding]


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame whose checksum was right. `bodies` is a view of memory of its own: nobody will write into it."""

    offset: int
    size: int
    sequence: int
    table: memoryview
    bodies: memoryview

    @property
    def end(self) -> int:
        return self.offset + self.size

    def rows(self) -> Iterator[Row]:
        return map(Row._make, _ROW.iter_unpack(self.table))

    def raw_rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Rows as plain tuples, for loops over many."""
        return cast("Iterator[tuple[int, int, int, int]]", _ROW.iter_unpack(self.table))


class Found(Enum):
    """What lies where no good frame does."""

    NOTHING = "nothing"  # never written in this life of the file
    DAMAGE = "damage"  # a frame was here, or was being written


class Scanner:
    """Read frames one after another from `offset`, verifying each; stops before `end`.

    `next()` returns None where no good frame begins; `offset` stays there and `found` says what does.
    """

    def __init__(self, disk: Disk, file: int, epoch: int, salt: int, offset: int, end: int) -> None:
        self.offset = offset
        self.found = Found.NOTHING
        self.end = end
        self._disk, self._file = disk, file
        self._epoch, self._salt = epoch & 0xFFFFFFFF, salt
        self._buffer = memoryview(b"")
        self._buffer_at = offset

    def next(self, sequence: int | None = None) -> Frame | None:
        """The frame at `offset`; given a sequence, only one with that."""
        frame = self.at(self.offset, sequence)
        if frame is not None:
            self.offset = frame.end
        return frame

    def at(self, offset: int, sequence: int | None = None) -> Frame | None:
        """The frame at any offset, without moving."""
        self.found = Found.NOTHING
        head = self._view(offset, HEADER_BYTES)
        if len(head) < HEADER_BYTES:
            self.found = Found.DAMAGE if offset + HEADER_BYTES <= self.end else Found.NOTHING  # cut short or full
            return None
        magic, epoch, number, count, body_bytes = _PREFIX.unpack_from(head)
        matches = (magic == MAGIC) + (epoch == self._epoch) + (sequence is None or number == sequence)
        # One flipped bit spoils one of the three; a stale frame of a former life spoils two.
        self.found = Found.DAMAGE if matches >= 2 else Found.NOTHING
        size = frame_bytes(count, body_bytes)
        if matches < 3 or offset + size > self.end:
            return None
        view = self._view(offset, size)
        used = HEADER_BYTES + ROW_BYTES * count + body_bytes
        if len(view) < size:
            return None
        checksum = xxhash.xxh3_64(view[: _PREFIX.size], seed=self._salt)
        checksum.update(view[HEADER_BYTES:used])
        if checksum.intdigest() != _CHECKSUM.unpack_from(head, _PREFIX.size)[0]:
            return None
        bodies_at = HEADER_BYTES + ROW_BYTES * count
        return Frame(offset, size, number, view[HEADER_BYTES:bodies_at], view[bodies_at:used])

    def later_frame(self, offset: int, sequence: int) -> int | None:
        """The offset of a good frame beyond `offset` whose sequence is above `sequence`: proof that a bad one before
        it is corruption, not a torn tail."""
        tag = MAGIC + self._epoch.to_bytes(4, "little")
        at = offset + ALIGNMENT - offset % ALIGNMENT
        while at < self.end:
            piece = bytes(self._view(at, min(READ_BYTES, self.end - at)))
            place = piece.find(tag)
            while place >= 0:
                frame = self.at(at + place) if (at + place) % ALIGNMENT == 0 else None
                if frame is not None and frame.sequence > sequence:
                    return frame.offset
                place = piece.find(tag, place + 1)
            if len(piece) <= len(tag):
                return None
            at += len(piece) - len(tag)
        return None

    def _view(self, offset: int, size: int) -> memoryview:
        start = offset - self._buffer_at
        if start < 0 or start + size > len(self._buffer):
            wanted = max(min(READ_BYTES, self.end - offset), min(size, self.end - offset), 0)
            self._buffer = memoryview(self._disk.read(self._file, wanted, offset))
            self._buffer_at, start = offset, 0
        return self._buffer[start : start + size]
