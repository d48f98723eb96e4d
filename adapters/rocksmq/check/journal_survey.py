"""Read a journal's files as they are, damaged or not, and change nothing.

Recovery stops at the first damage. A survey goes on behind it: `JournalSurvey` finds the segments, mends a header in
memory where the rest of the file proves how it was, and reads frame after frame, with a `Gap` wherever none is good.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ....runtime.disk import Disk
from ....runtime.errors import FormatTooNew
from ..journal.channels import ChannelTable
from ..journal.frame import ALIGNMENT, CONTROL, MAGIC, READ_BYTES, JournalFrame, Scanner
from ..journal.segments import HEADER_BYTES, SUFFIX, VERSION, Header, decode_header

BLOCK_BYTES = 4096  # given up at once around an offset that the device cannot read
SALT_BITS = 64
PROOFS = 32  # frames that are tried to find a salt: the first may be damaged, too


class ReadOnlyDisk(Disk):
    """The operating system's files, opened for reading only."""

    def open(self, path: str, *, create: bool = False) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


class PatientDisk(Disk):
    """Files as far as the device can read them: a block that it cannot read counts as zeros, so the checksum of the
    frame there is wrong. `refused` is the device's last error."""

    def __init__(self, disk: Disk) -> None:
        self.refused: OSError | None = None
        self._disk = disk

    def read(self, file: int, size: int, offset: int) -> bytes:
        try:
            return self._disk.read(file, size, offset)
        except OSError:
            there = min(size, self._disk.size(file) - offset)
            return b"".join(self._block(file, *piece) for piece in _blocks(offset, there))

    def _block(self, file: int, size: int, offset: int) -> bytes:
        try:
            return self._disk.read(file, size, offset)
        except OSError as error:
            self.refused = error
            return bytes(size)


def _blocks(offset: int, size: int) -> Iterator[tuple[int, int]]:
    """(size, offset) of the pieces that lie in one block each."""
    end = offset + size
    while offset < end:
        piece = min(end, offset + BLOCK_BYTES - offset % BLOCK_BYTES) - offset
        yield piece, offset
        offset += piece


class Gap(NamedTuple):
    """No good frame from `offset` to `end`; `lost` frames are missing, None where no later frame says how many."""

    offset: int
    end: int
    lost: int | None


@dataclass(slots=True)
class SegmentFile:
    """One segment file as found. `header` is None where the salt is unknown: then no frame can be checked.
    `header_damaged`: the disk has another header than that."""

    epoch: int
    path: str
    file: int
    size: int  # of the file; less than the header's where it was cut short
    header: Header | None
    header_damaged: bool


class JournalSurvey:
    """The segments of a journal, opened through `disk`, oldest first. Close it."""

    def __init__(self, disk: Disk, journal: str) -> None:
        """Raises `FormatTooNew`, and `OSError` where the directory cannot be listed."""
        self.disk = disk
        self.reader: PatientDisk = PatientDisk(disk)
        self.segments: list[SegmentFile] = []
        self.vanished: list[str] = []  # recycled between listing and opening
        try:
            for name in sorted(disk.names(journal)):
                if name.endswith(SUFFIX) and name[: -len(SUFFIX)].isdigit():
                    self._open(os.path.join(journal, name), int(name[: -len(SUFFIX)]))
        except BaseException:
            self.close()
            raise

    def _open(self, path: str, epoch: int) -> None:
        try:
            file = self.disk.open(path)
        except FileNotFoundError:
            self.vanished.append(path)
            return
        segment = SegmentFile(epoch, path, file, self.disk.size(file), None, header_damaged=False)
        self.segments.append(segment)
        head = self.reader.read(file, HEADER_BYTES, 0).ljust(HEADER_BYTES, b"\0")
        header, good = decode_header(head)
        if good and header.version > VERSION:
            raise FormatTooNew(
                f"{path} has format {header.version}, this Tidewal reads up to {VERSION}",
                found=header.version,
                supported=VERSION,
            )
        segment.header_damaged = not good or header.epoch != epoch
        segment.header = self._mended(segment, header) if segment.header_damaged else header

    def _mended(self, segment: SegmentFile, found: Header) -> Header | None:
        """The header as it must have been: with the salt as found, or with the bit flipped for which a frame's checksum
        is right."""
        offsets = self.frame_offsets(segment)
        for salt in (found.salt, *(found.salt ^ 1 << bit for bit in range(SALT_BITS))):
            header = Header(VERSION, segment.epoch, salt, segment.size)
            for offset in offsets:
                if self.scanner(segment, offset, header).at(offset) is not None:
                    return header
        return None

    def frame_offsets(self, segment: SegmentFile) -> list[int]:
        """Offsets at which frames seem to begin: a few are enough to prove a salt."""
        tag = MAGIC + (segment.epoch & 0xFFFFFFFF).to_bytes(4, "little")
        found: list[int] = []
        for start in range(HEADER_BYTES, segment.size, READ_BYTES):
            piece = self.reader.read(segment.file, READ_BYTES, start)
            place = piece.find(tag)
            while place >= 0 and len(found) < PROOFS:
                if (start + place) % ALIGNMENT == 0:
                    found.append(start + place)
                place = piece.find(tag, place + 1)
            if len(found) == PROOFS:
                break
        return found

    def scanner(self, segment: SegmentFile, offset: int, header: Header | None = None) -> Scanner:
        """A scanner of the segment's frames from `offset` on, by `header` in place of the segment's own if given."""
        header = header or segment.header
        assert header is not None
        end = max(header.size, HEADER_BYTES)
        return Scanner(self.reader, segment.file, header.epoch, header.salt, offset, end)

    def walk(self, segment: SegmentFile, sequence: int | None) -> Iterator[JournalFrame | Gap]:
        """Good frames from the segment's first on, and a `Gap` for each range without one that has a good frame behind
        it. `sequence` is that of the next frame, None when any may come. The owner may append meanwhile."""
        offset = HEADER_BYTES
        while True:
            scanner = self.scanner(segment, offset)
            while (frame := scanner.next(sequence)) is not None:
                sequence = frame.sequence + 1
                yield frame
            offset = scanner.offset
            found = self._beyond(segment, offset, sequence or 0)
            if found is None:
                return
            if found.sequence != sequence:
                yield Gap(offset, found.offset, None if sequence is None else found.sequence - sequence)
                sequence = found.sequence
            elif found.offset > offset:
                yield Gap(offset, found.offset, 0)
            offset = found.offset

    def _beyond(self, segment: SegmentFile, offset: int, sequence: int) -> JournalFrame | None:
        """The next good frame, at `offset` or behind, whose sequence is not below `sequence`."""
        later = self.scanner(segment, offset).later_frame(offset, sequence - 1)
        # A frame that is good here now was being written when it was read first: commits follow one another.
        frame = self.scanner(segment, offset).at(offset)
        if frame is not None and frame.sequence >= sequence:
            return frame
        return None if later is None else self.scanner(segment, later).at(later)

    def first_frame(self, segment: SegmentFile) -> JournalFrame | None:
        """The frame that begins the segment, with a snapshot; None where it is damaged or not there."""
        return None if segment.header is None else self.scanner(segment, HEADER_BYTES).at(HEADER_BYTES)

    def channels(self) -> ChannelTable:
        """The channels as of the journal's end: the newest snapshot that can be read, and the records behind it."""
        table = ChannelTable()
        newest = next((each for each in reversed(self.segments) if self.first_frame(each) is not None), None)
        for piece in self.walk(newest, None) if newest is not None else ():
            if isinstance(piece, JournalFrame):
                apply_records(table, piece)
        return table

    def close(self) -> None:
        for segment in self.segments:
            self.disk.close(segment.file)
        self.segments = []


def apply_records(table: ChannelTable, frame: JournalFrame) -> None:
    """Let the frame's control records take effect."""
    at = 0
    for number, length, _, _ in frame.raw_rows():
        if number == CONTROL:
            table.apply(frame.bodies[at : at + length])
        at += length
