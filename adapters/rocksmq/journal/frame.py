"""Frames: one per commit, the unit that is wholly there or not there at all.

    header   magic, segment epoch, frame sequence, row count, body bytes, checksum
    table    one row per entry: channel number, body length, id, timestamp
    bodies   one after another; then zeros up to the next multiple of 8

The checksum (xxh3-64) covers header, table and bodies and is seeded with the segment's salt, so what a former use of a
recycled file left there never passes. Frame sequences have no gaps over the whole journal. Channel number 0 carries the
journal's own records (`channels.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from struct import Struct
from typing import NamedTuple, cast

import xxhash

from ....runtime.disk import Disk
from ....runtime.log.wal import Payload

MAGIC = b"TWF1"
ALIGNMENT = 8
CONTROL = 0  # the channel number of the journal's own records
READ_BYTES = 1024 * 1024
JOIN_BYTES = 256 * 1024  # below this, copying bodies into one buffer is cheaper than a long iovec

_PREFIX = Struct("<4sIQII")
_HEADER = Struct("<4sIQIIQ")  # the prefix and the checksum
_CHECKSUM = Struct("<Q")
_ROW = Struct("<IIQQ")
HEADER_BYTES = _HEADER.size
ROW_BYTES = _ROW.size
pack_row: Callable[[int, int, int, int], bytes] = _ROW.pack  # channel number, body length, id, timestamp


def frame_bytes(count: int, body_bytes: int) -> int:
    """The size on disk of a frame with `count` rows and `body_bytes` bytes of bodies."""
    return HEADER_BYTES + ROW_BYTES * count + body_bytes + -body_bytes % ALIGNMENT


def encode(
    epoch: int, salt: int, sequence: int, rows: Sequence[Payload], bodies: Sequence[Payload], body_bytes: int
) -> list[Payload]:
    """The buffers of one frame, in order: of the segment with that epoch and salt, with the frame's sequence in the
    journal. `rows` come from `pack_row`; `body_bytes` is the size of all bodies."""
    prefix = _PREFIX.pack(MAGIC, epoch & 0xFFFFFFFF, sequence, len(rows), body_bytes)
    content: Sequence[Payload]
    content = (b"".join((*rows, *bodies)),) if body_bytes <= JOIN_BYTES else (b"".join(rows), *bodies)
    checksum = xxhash.xxh3_64(prefix, seed=salt)
    for buffer in content:
        checksum.update(buffer)
    padding = bytes(-body_bytes % ALIGNMENT)
    return [prefix + _CHECKSUM.pack(checksum.intdigest()), *content, padding]


class JournalFrame(NamedTuple):
    """A frame whose checksum was right. `bodies` is a view of memory of its own, which is never written again."""

    offset: int
    size: int
    sequence: int
    table: memoryview
    bodies: memoryview

    @property
    def end(self) -> int:
        return self.offset + self.size

    def raw_rows(self) -> Iterator[tuple[int, int, int, int]]:
        """The rows: channel number, body length, id, timestamp. Plain tuples, for loops over many."""
        return cast("Iterator[tuple[int, int, int, int]]", _ROW.iter_unpack(self.table))


class FrameFault(Enum):
    """What there is where no good frame is."""

    NOTHING = "nothing"  # never written in this use of the file
    DAMAGE = "damage"  # a frame was here, or was being written


class Scanner:
    """Read frames one after another from `offset`, verifying each; stops before `end`.

    `next()` returns None where no good frame begins; `offset` stays there and `found` says what is there instead.
    """

    def __init__(
        self, disk: Disk, file: int, epoch: int, salt: int, offset: int, end: int, piece_bytes: int = READ_BYTES
    ) -> None:
        self.offset: int = offset
        self.found: FrameFault = FrameFault.NOTHING
        self.end = end
        self._disk, self._file = disk, file
        self._epoch, self._salt = epoch & 0xFFFFFFFF, salt
        self.piece_bytes = piece_bytes
        self._buffer = memoryview(b"")
        self._buffer_at = offset

    @property
    def at_hand(self) -> bool:
        """Whether the next frame is in memory already."""
        rest = self._buffer[self.offset - self._buffer_at :]
        if len(rest) < HEADER_BYTES:
            return False
        _, _, _, count, body_bytes, _ = _HEADER.unpack_from(rest)
        return frame_bytes(count, body_bytes) <= len(rest)

    def next(self, sequence: int | None = None) -> JournalFrame | None:
        """The frame at `offset`; with `sequence`, only a frame with that sequence."""
        frame = self.at(self.offset, sequence)
        if frame is not None:
            self.offset = frame.end
        return frame

    def at(self, offset: int, sequence: int | None = None) -> JournalFrame | None:
        """The frame at any offset; as `next`, but `self.offset` stays."""
        start = self._reach(offset, HEADER_BYTES)
        if start is None:
            self.found = (
                FrameFault.DAMAGE if offset + HEADER_BYTES <= self.end else FrameFault.NOTHING
            )  # cut short or full
            return None
        magic, epoch, number, count, body_bytes, expected = _HEADER.unpack_from(self._buffer, start)
        if magic != MAGIC or epoch != self._epoch or (sequence is not None and number != sequence):
            # One flipped bit spoils one of the three; a stale frame of a former use of the file spoils two.
            matches = (magic == MAGIC) + (epoch == self._epoch) + (sequence is None or number == sequence)
            self.found = FrameFault.DAMAGE if matches == 2 else FrameFault.NOTHING
            return None
        self.found = FrameFault.DAMAGE
        size = frame_bytes(count, body_bytes)
        if offset + size > self.end or (start := self._reach(offset, size)) is None:
            return None
        buffer = self._buffer
        table_at = start + HEADER_BYTES
        bodies_at = table_at + ROW_BYTES * count
        end = bodies_at + body_bytes
        checksum = xxhash.xxh3_64(buffer[start : start + _PREFIX.size], seed=self._salt)
        checksum.update(buffer[table_at:end])
        if checksum.intdigest() != expected:
            return None
        return JournalFrame(offset, size, number, buffer[table_at:bodies_at], buffer[bodies_at:end])

    def later_frame(self, offset: int, sequence: int) -> int | None:
        """The offset of a good frame beyond `offset` whose sequence is above `sequence`: proof that a bad one before
        it is corruption, not a torn tail."""
        tag = MAGIC + self._epoch.to_bytes(4, "little")
        at = offset + ALIGNMENT - offset % ALIGNMENT
        while at < self.end:
            piece = self._disk.read(self._file, min(READ_BYTES, self.end - at), at)
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

    def _reach(self, offset: int, size: int) -> int | None:
        """Where in the buffer the `size` bytes from `offset` begin, read if need be; None where the file is shorter."""
        start = offset - self._buffer_at
        if start < 0 or start + size > len(self._buffer):
            # With the size of one frame known, read whole frames of that size: those that follow are likely like it.
            wanted = size if size <= HEADER_BYTES else max(self.piece_bytes // size, 1) * size
            self._buffer = memoryview(self._disk.read(self._file, max(min(wanted, self.end - offset), 0), offset))
            self._buffer_at, start = offset, 0
        return start if start + size <= len(self._buffer) else None
