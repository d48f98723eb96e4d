"""Segment files: where frames lie, made ready ahead of need and used again after retention.

A segment is a 4 KiB header (version, epoch, salt, size, checksum) and room for frames, filled with zeros before its
first use: a sync of a file that grows, or of blocks never written, costs a metadata commit each time. Epochs count up
as long as the directory exists and are part of the file's name; a recycled file gets a new epoch and a new salt. A
segment takes its final name only when all this is durable.

One more such file is kept in reserve: where the disk has no space for the next segment, the reserve becomes it, for
control records alone (`short`), and data is refused until there is space for another.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Generator
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct
from typing import NamedTuple

import xxhash

from ....runtime.disk import Disk, write_all
from ....runtime.errors import CorruptLog, FormatTooNew
from .frame import READ_BYTES, Scanner

VERSION = 1
HEADER_BYTES = 4096
SUFFIX = ".segment"
PREPARING = "preparing"
RECYCLABLE = "recyclable-"
RESERVE = "reserve"
ZERO_BYTES = 1024 * 1024
ZERO_SYNC_BYTES = 8 * ZERO_BYTES  # so that one huge sync of zeros never stands before a commit's small one

_HEADER = Struct("<8sIIQQQ")
_CHECKSUM = Struct("<Q")
_MAGIC = b"TIDEWAL\n"


class Header(NamedTuple):
    """The header of a segment file. `size` is that of the whole file."""

    version: int
    epoch: int
    salt: int
    size: int


@dataclass(slots=True)
class Segment:
    """One open segment file. `end` is where its known frames end; readers go no further."""

    epoch: int
    salt: int
    size: int
    path: str
    file: int
    end: int = HEADER_BYTES
    readers: int = 0
    closing: bool = False

    @property
    def room(self) -> int:
        return self.size - self.end


class Segments:
    """The segments of one journal directory. Thread-safe.

    Segments in use are a run of epochs without gaps; `take_spare` adds the next, `recycle_first` ends the oldest.
    """

    def __init__(self, disk: Disk, directory: str, segment_bytes: int, spares: int) -> None:
        self.directory = directory
        self._disk = disk
        self._segment_bytes = segment_bytes
        self._spare_limit = spares
        self._live: dict[int, Segment] = {}
        self._spare: Segment | None = None
        self._wanted = 0  # bytes that the next segment must have, where that is more than usual
        self._recyclable: list[str] = []
        self._reserved = False
        self.short: OSError | None = None  # why the reserve is in use, or could not be made
        self._lock = threading.Lock()

    @property
    def capacity(self) -> int:
        """The largest frame there is room for, with a reserve for the snapshot that begins each segment."""
        return self._segment_bytes - HEADER_BYTES - self._segment_bytes // 8

    # ---- opening -----------------------------------------------------------------------------------------------------

    def load(self) -> list[Segment]:
        """Open the segments in the directory, oldest first; the last ones may hold no frames yet. Raises `CorruptLog`
        for a damaged header or a missing segment, `FormatTooNew`."""
        for name in sorted(self._disk.names(self.directory)):
            path = os.path.join(self.directory, name)
            if name.endswith(SUFFIX):
                segment = self._open(path)
                self._live[segment.epoch] = segment  # at once: `close` closes it where another cannot be loaded
            elif name.startswith(PREPARING):
                self._disk.remove(path)
            elif name.startswith(RECYCLABLE):
                self._adopt_recyclable(path)
            elif name == RESERVE:
                self._adopt_reserve(path)
        found = list(self._live.values())
        for before, after in pairwise(found):
            if after.epoch != before.epoch + 1:
                raise CorruptLog(
                    f"segment {before.epoch + 1} is missing before {after.path}", path=after.path, offset=0
                )
        return found

    def _open(self, path: str) -> Segment:
        file = self._disk.open(path)
        try:
            head = self._disk.read(file, HEADER_BYTES, 0)
            if len(head) < HEADER_BYTES:
                raise CorruptLog(f"{path} is shorter than its header", path=path, offset=0)
            (version, epoch, salt, size), good = decode_header(head)
            if good and version > VERSION:
                raise FormatTooNew(
                    f"{path} has format {version}, this Tidewal reads up to {VERSION}", found=version, supported=VERSION
                )
            if not good or os.path.basename(path) != segment_name(epoch):
                raise CorruptLog(f"the header of {path} is damaged", path=path, offset=0)
        except BaseException:
            self._disk.close(file)
            raise
        return Segment(epoch, salt, size, path, file)

    def _adopt_recyclable(self, path: str) -> None:
        if self._fits(path) and len(self._recyclable) < self._spare_limit:
            self._recyclable.append(path)
        else:
            self._disk.remove(path)

    def _adopt_reserve(self, path: str) -> None:
        self._reserved = self._fits(path)
        if not self._reserved:
            self._disk.remove(path)

    def _fits(self, path: str) -> bool:
        """Whether the file has the size of new segments."""
        file = self._disk.open(path)
        try:
            return self._disk.size(file) == self._segment_bytes
        finally:
            self._disk.close(file)

    def set_spare(self, segment: Segment) -> None:
        """Declare the newest loaded segment, which holds no frames, to be the spare."""
        with self._lock:
            del self._live[segment.epoch]
            self._spare = segment

    # ---- ahead of need -----------------------------------------------------------------------------------------------

    @property
    def wants_spare(self) -> bool:
        """Whether there is no next segment, or one that is too small."""
        spare = self._spare
        return spare is None or spare.size < self._wanted

    @property
    def ready(self) -> bool:
        """Whether nothing is wanted: the next segment is ready, and so is the reserve."""
        return not self.wants_spare and self._reserved

    def prepare_spare(self, from_reserve: bool = False) -> None:
        """Make the next segment ready, in place of one that is too small; where that fails, and `from_reserve` allows
        it, from the reserve. Slow. One thread at a time prepares. Raises `OSError`, having changed nothing that
        counts."""
        with self._lock:  # a spare that is about to be replaced must not come into use
            too_small, self._spare = self._spare, None
            size = max(self._segment_bytes, self._wanted)
        try:
            try:
                file = self._prepare(size)
            except OSError as error:
                if not self._reserved:
                    self.short = self.short or error
                if too_small is not None or not (from_reserve and self._reserved):
                    raise
                file, size = self._take_reserve(error), self._segment_bytes
            spare = self._make_spare(file, size)
        except BaseException:
            self._spare = too_small
            raise
        self._spare = spare
        if too_small is not None:
            self._disk.close(too_small.file)

    def prepare_reserve(self) -> None:
        """Make the reserve ready, unless it is. Slow; only on the thread that prepares. Raises `OSError`."""
        if self._reserved or self.wants_spare:
            return
        try:
            self._make_reserve(self._prepare(self._segment_bytes))
        except OSError as error:
            self.short = error
            raise
        self._reserved, self.short = True, None

    def _take_reserve(self, why: OSError) -> int:
        """Make the reserve the file that is being prepared. `why`: the error for which there is no other file."""
        path = os.path.join(self.directory, RESERVE)
        file = self._disk.open(path)
        try:
            self._disk.rename(path, os.path.join(self.directory, PREPARING))
        except BaseException:
            self._disk.close(file)
            raise
        self._reserved, self.short = False, why
        return file

    def _prepare(self, size: int) -> int:
        """An open file of that size whose blocks were written before, without its final name."""
        preparing = os.path.join(self.directory, PREPARING)
        recycled = size == self._segment_bytes and self._take_recyclable(preparing)
        if not recycled and self._disk.free_bytes(self.directory) < size:  # fill up nothing in vain
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), preparing)
        file = self._disk.open(preparing, create=not recycled)
        try:
            if not recycled:
                self._fill(file, size)
        except BaseException:
            self._give_up_prepared(file)
            raise
        return file

    def _make_reserve(self, file: int) -> None:
        """Make the prepared file the reserve."""
        try:
            self._rename_prepared(RESERVE)
        except BaseException:
            self._give_up_prepared(file)
            raise
        self._disk.close(file)

    def _make_spare(self, file: int, size: int) -> Segment:
        """Make the prepared file the next segment."""
        epoch = max(self._live, default=0) + 1
        try:
            salt = int.from_bytes(os.urandom(8), "little")
            write_all(self._disk, file, [encode_header(Header(VERSION, epoch, salt, size))], 0)
            self._disk.sync(file)
            path = self._rename_prepared(segment_name(epoch))
        except BaseException:
            self._give_up_prepared(file)
            raise
        return Segment(epoch, salt, size, path, file)

    def _rename_prepared(self, name: str) -> str:
        path = os.path.join(self.directory, name)
        self._disk.rename(os.path.join(self.directory, PREPARING), path)
        self._disk.sync_directory(self.directory)
        return path

    def _give_up_prepared(self, file: int) -> None:
        self._disk.close(file)
        with contextlib.suppress(OSError):
            self._disk.remove(os.path.join(self.directory, PREPARING))

    def _take_recyclable(self, target: str) -> bool:
        with self._lock:
            path = self._recyclable.pop() if self._recyclable else None
        if path is None:
            return False
        self._disk.rename(path, target)
        return True

    def _fill(self, file: int, size: int) -> None:
        zeros = bytes(ZERO_BYTES)
        for offset in range(0, size, ZERO_BYTES):
            piece = min(ZERO_BYTES, size - offset)
            write_all(self._disk, file, [memoryview(zeros)[:piece]], offset)
            if (offset + piece) % ZERO_SYNC_BYTES == 0:
                self._disk.sync(file)
        self._disk.sync(file)

    def take_spare(self, size: int) -> Segment | None:
        """The next segment, in use from now on, of at least `size` bytes; None while none is ready. A segment that is
        prepared from now on has at least `size` bytes, too."""
        with self._lock:
            self._wanted = size + -size % HEADER_BYTES
            spare = self._spare
            if spare is None or spare.size < self._wanted:
                return None
            self._spare = None
            self._live[spare.epoch] = spare
            return spare

    # ---- reading -----------------------------------------------------------------------------------------------------

    @property
    def first_epoch(self) -> int:
        """The oldest epoch in use, or the next when there is none."""
        with self._lock:
            return next(iter(self._live), 1)

    @property
    def epochs(self) -> list[int]:
        with self._lock:
            return list(self._live)

    @property
    def size(self) -> int:
        """Bytes on disk, spares included."""
        with self._lock:
            known = [*self._live.values(), *([self._spare] if self._spare else [])]
            return (
                sum(segment.size for segment in known) + (len(self._recyclable) + self._reserved) * self._segment_bytes
            )

    @property
    def spares(self) -> int:
        """The number of files that are not in use: the next segment, recycled files, the reserve."""
        return (self._spare is not None) + len(self._recyclable) + self._reserved

    def holds(self, epoch: int) -> bool:
        """Whether the segment of that epoch is in use."""
        return epoch in self._live

    @contextlib.contextmanager
    def reading(
        self, epoch: int, offset: int, piece_bytes: int = READ_BYTES
    ) -> Generator[tuple[Segment, Scanner] | None]:
        """The segment and a scanner over its known frames from `offset` on, or None when retention has removed it."""
        with self._lock:
            segment = self._live.get(epoch)
            if segment is not None:
                segment.readers += 1
        if segment is None:
            yield None
            return
        try:
            yield segment, Scanner(self._disk, segment.file, epoch, segment.salt, offset, segment.end, piece_bytes)
        finally:
            with self._lock:
                segment.readers -= 1
                if segment.closing and not segment.readers:
                    self._disk.close(segment.file)

    # ---- after retention ---------------------------------------------------------------------------------------------

    def recycle_first(self) -> None:
        """Take the oldest segment out of use; keep its file for the next spare, or remove it. Readers inside it finish
        their reads: the frames that they get either pass their checksums or count as gone."""
        with self._lock:
            epoch, segment = next(iter(self._live.items()))
            keep = segment.size == self._segment_bytes and len(self._recyclable) < self._spare_limit
        path = os.path.join(self.directory, f"{RECYCLABLE}{epoch:016d}")
        if keep:
            self._disk.rename(segment.path, path)
        else:
            self._disk.remove(segment.path)
        with self._lock:  # only now: a segment whose file stays must not have its successors taken out of use
            del self._live[epoch]
            segment.closing = True
            if not segment.readers:
                self._disk.close(segment.file)
            if keep:
                self._recyclable.append(path)
        self._disk.sync_directory(self.directory)

    def close(self) -> None:
        with self._lock:
            segments = [*self._live.values(), *([self._spare] if self._spare else [])]
            self._live, self._spare = {}, None
            for segment in segments:
                segment.closing = True
                if not segment.readers:
                    self._disk.close(segment.file)


def segment_name(epoch: int) -> str:
    return f"{epoch:016d}{SUFFIX}"


def encode_header(header: Header) -> bytes:
    fields = _HEADER.pack(_MAGIC, header.version, 0, header.epoch, header.salt, header.size)
    return (fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))).ljust(HEADER_BYTES, b"\0")


def decode_header(head: bytes) -> tuple[Header, bool]:
    """The header in the bytes `head`, at least `HEADER_BYTES`, and whether its checksum is right."""
    magic, version, _, epoch, salt, size = _HEADER.unpack_from(head)
    checksum = xxhash.xxh3_64_intdigest(head[: _HEADER.size])
    good = magic == _MAGIC and checksum == _CHECKSUM.unpack_from(head, _HEADER.size)[0]
    return Header(version, epoch, salt, size), good
