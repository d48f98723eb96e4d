"""Carry out the plan of a repair, so that a crash at any moment leaves the old journal, the new one, or one that is
still damaged and can be repaired again.

All new files are written and synced first. Then the old files get a second name in `journal/damaged-…`, where they
stay, and the new files take their names: the last segment first, because it says what is lost; then the index is moved
aside, which alone may know that the end was damaged, then all other segments are renamed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from ....runtime.disk import Disk, write_all
from ....runtime.errors import DirectoryUnwritable, DiskFull, JournalFailed, TidewalError
from ....runtime.log.wal import Payload
from ..journal.frame import CONTROL, READ_BYTES, encode, pack_row
from ..journal.segments import HEADER_BYTES, PREPARING, VERSION, Header, encode_header
from .journal_survey import BLOCK_BYTES, JournalSurvey
from .repair_plan import Filler, Kept, NewSegment, RepairPlan

ASIDE = "damaged-"


def apply(directory: str, plan: RepairPlan, survey: JournalSurvey, disk: Disk, wall_ms: int) -> str:
    """Do what the plan of that survey says and return the folder where the old files are. The directory must be locked;
    `wall_ms` (milliseconds) is the time in the folder's name. Raises `DiskFull`, `DirectoryUnwritable`,
    `JournalFailed`; repair again then."""
    try:
        return Rebuild(directory, plan, survey, disk, wall_ms).run()
    except OSError as error:
        raise _failed(directory, error) from error


class Rebuild:
    def __init__(self, directory: str, plan: RepairPlan, survey: JournalSurvey, disk: Disk, wall_ms: int) -> None:
        self._plan, self._survey, self._disk, self._wall_ms = plan, survey, disk, wall_ms
        self._directory, self._journal = directory, os.path.join(directory, "journal")

    def run(self) -> str:
        for name in self._disk.names(self._journal):
            if name.startswith(PREPARING):
                self._disk.remove(os.path.join(self._journal, name))
        written = [(self._write(segment), segment.path) for segment in self._plan.segments]
        aside = self._make_aside()
        for path in [*(path for _, path in written), *self._plan.aside]:
            if os.path.exists(path):
                os.link(path, os.path.join(aside, os.path.basename(path)))
        self._disk.sync_directory(aside)
        self._replace(written[-1:])
        index = os.path.join(self._directory, "index")
        if self._plan.index_aside and os.path.isdir(index):
            self._disk.rename(index, os.path.join(aside, "index"))
            self._disk.sync_directory(self._directory)
            self._disk.sync_directory(aside)
        for path in reversed(self._plan.aside):
            self._disk.remove(path)
        self._replace(written[:-1])
        return aside

    def _make_aside(self) -> str:
        moment = datetime.fromtimestamp(self._wall_ms / 1000, UTC).strftime("%Y%m%dT%H%M%SZ")
        taken = set(self._disk.names(self._journal))
        names = (f"{ASIDE}{moment}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, len(taken) + 3))))
        aside = os.path.join(self._journal, next(name for name in names if name not in taken))
        os.mkdir(aside, 0o700)
        self._disk.sync_directory(self._journal)
        return aside

    def _replace(self, written: Iterable[tuple[str, str]]) -> None:
        for new, path in written:
            self._disk.rename(new, path)
        self._disk.sync_directory(self._journal)

    def _write(self, segment: NewSegment) -> str:
        """Write a segment anew under a temporary name, synced; returns its path."""
        source = segment.source.header if segment.source is not None else None
        salt = source.salt if source is not None else int.from_bytes(os.urandom(8), "little")
        path = os.path.join(self._journal, f"{PREPARING}-{segment.epoch:016d}")
        file = self._disk.open(path, create=True)
        try:
            end = HEADER_BYTES
            for buffers, size in self._content(segment, salt):
                write_all(self._disk, file, buffers, end)
                end += size
            size = max(segment.size, end + -end % BLOCK_BYTES)
            while end < size:
                piece = min(READ_BYTES, size - end)
                write_all(self._disk, file, [bytes(piece)], end)
                end += piece
            header = encode_header(Header(VERSION, segment.epoch, salt, size))
            write_all(self._disk, file, [header], 0)
            self._disk.sync(file)
        finally:
            self._disk.close(file)
        return path

    def _content(self, segment: NewSegment, salt: int) -> Iterator[tuple[list[Payload], int]]:
        """The buffers behind the header, and their sizes."""
        for piece in segment.pieces:
            if isinstance(piece, Filler):
                for number in range(piece.count):
                    yield _frame(segment.epoch, salt, piece.sequence + number, self._records(piece, number))
            else:
                yield from self._copied(segment, piece)

    def _copied(self, segment: NewSegment, piece: Kept) -> Iterator[tuple[list[Payload], int]]:
        assert segment.source is not None
        for start in range(piece.start, piece.end, READ_BYTES):
            size = min(READ_BYTES, piece.end - start)
            yield [self._survey.reader.read(segment.source.file, size, start)], size

    def _records(self, filler: Filler, number: int) -> list[bytes]:
        """The control records in the filler's frame with that number, counted from 0."""
        first = [filler.table.snapshot(filler.table.wall_ms)] if filler.table is not None and number == 0 else []
        return [*first, *(filler.records if number == filler.count - 1 else ())]


def _frame(epoch: int, salt: int, sequence: int, bodies: list[bytes]) -> tuple[list[Payload], int]:
    rows = [pack_row(CONTROL, len(body), 0, 0) for body in bodies]
    buffers = encode(epoch, salt, sequence, rows, bodies, sum(map(len, bodies)))
    return buffers, sum(memoryview(buffer).nbytes for buffer in buffers)


def _failed(directory: str, error: OSError) -> TidewalError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{directory}: no space for the repair; free some and repair again", path=directory)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DirectoryUnwritable(f"{directory} cannot be written: {error.strerror}", path=directory)
    return JournalFailed(f"the repair of {directory} failed: {error}; repair again", path=directory)
