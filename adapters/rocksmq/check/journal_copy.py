"""Write the frames of a journal anew, into a directory that counts as incomplete until all of it is durable."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ....runtime.disk import Disk, write_all
from ....runtime.log.wal import Payload
from ..journal.frame import CONTROL, ROW_BYTES, JournalFrame, encode, pack_row
from ..journal.segments import HEADER_BYTES, VERSION, Header, encode_header, segment_name
from ..owner.directory import Directory


class JournalCopy:
    """A journal in a new directory, written frame by frame. A segment is as large as its frames. Close it; what is
    closed before `complete` stays incomplete for good: opening it raises `IncompleteLog`."""

    def __init__(self, disk: Disk, path: str, first_epoch: int) -> None:
        """Locks the directory `path`, which must be new. Raises `DirectoryInUse`, `DirectoryUnwritable`."""
        self._disk = disk
        self._directory = Directory(path, complete=False)
        self._epoch, self._sequence = first_epoch - 1, 0  # of the segment and the frame written last
        self._salt = 0
        self._file: int | None = None
        self._end = 0
        self.size: int = 0  # bytes of all segments that are finished

    def begin_segment(self) -> None:
        """End the segment in writing and begin the next. Its first frame must hold a snapshot. Raises `OSError`."""
        self._end_segment()
        self._epoch += 1
        self._salt = int.from_bytes(os.urandom(8), "little")
        self._file = self._disk.open(os.path.join(self._directory.journal, segment_name(self._epoch)), create=True)
        self._end = HEADER_BYTES

    def add(self, frame: JournalFrame, before: Sequence[bytes] = ()) -> None:
        """Write a frame with the rows of `frame`, and before them the control records `before`. Raises `OSError`."""
        rows = [frame.table[at : at + ROW_BYTES] for at in range(0, len(frame.table), ROW_BYTES)]
        self._write([*map(_control_row, before), *rows], [*before, frame.bodies])

    def add_records(self, records: Sequence[bytes]) -> None:
        """Write a frame of control records. Raises `OSError`."""
        self._write(list(map(_control_row, records)), records)

    def _write(self, rows: Sequence[Payload], bodies: Sequence[Payload]) -> None:
        assert self._file is not None
        self._sequence += 1
        buffers = encode(self._epoch, self._salt, self._sequence, rows, bodies, sum(map(len, bodies)))
        write_all(self._disk, self._file, buffers, self._end)
        self._end += sum(map(len, buffers))

    def _end_segment(self) -> None:
        """Give the segment its header and make it durable."""
        if self._file is None:
            return
        padding = bytes(-self._end % HEADER_BYTES)
        size = self._end + len(padding)
        write_all(self._disk, self._file, [padding] if padding else [], self._end)
        write_all(self._disk, self._file, [encode_header(Header(VERSION, self._epoch, self._salt, size))], 0)
        self._disk.sync(self._file)
        file, self._file = self._file, None
        self._disk.close(file)
        self.size += size

    def complete(self) -> None:
        """Make all of it durable; from now on the directory can be opened. Raises `OSError`."""
        self._end_segment()
        self._disk.sync_directory(self._directory.journal)
        self._disk.sync_directory(os.path.dirname(self._directory.path))
        self._directory.set_complete()

    def close(self) -> None:
        if self._file is not None:
            self._disk.close(self._file)
        self._directory.close()


def _control_row(body: bytes) -> bytes:
    return pack_row(CONTROL, len(body), 0, 0)
