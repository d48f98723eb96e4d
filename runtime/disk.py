"""The file layer under a journal: the few calls it needs, so that a test can replace it by a failing disk.

Every call blocks and raises `OSError` as the system does; the journal decides what that means.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from .file_sync import sync_data, sync_path
from .log.wal import Payload

IOVEC_LIMIT = 1024  # buffers that one pwritev takes, on Linux and macOS


class Syncer(Protocol):
    """Syncs that run while the caller does something else, one at a time."""

    file: int
    """Readable when the sync that was started has ended."""

    def start(self, file: int) -> bool:
        """Begin to make durable what was written to `file`. Returns False, with nothing begun, where that is not
        possible now."""
        ...

    def finish(self) -> bool:
        """Collect the end of the sync that was started: True for one caller, on any thread, once; False when it has not
        ended, or another caller has collected it. Raises `OSError`, instead of True, when the sync failed. Never
        blocks."""
        ...


class Disk:
    """The operating system's files, by descriptor. A name or a write is durable only after its `sync` or
    `sync_directory` returned. A disk of the testing kit, which fails and loses, derives from it."""

    def open(self, path: str, *, create: bool = False) -> int:
        """Open for reading and writing; with `create` the file must not exist."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        return os.open(path, flags, 0o600)

    def close(self, file: int) -> None:
        os.close(file)

    def read(self, file: int, size: int, offset: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
        data = os.pread(file, size, offset)
        if len(data) == size or not data:
            return data
        chunks = [data]
        have = len(data)
        while have < size and (data := os.pread(file, size - have, offset + have)):
            chunks.append(data)
            have += len(data)
        return b"".join(chunks)

    def write(self, file: int, buffers: Sequence[Payload], offset: int) -> int:
        """Write buffers one after another at `offset` and return how many bytes were taken, perhaps too few."""
        return os.pwritev(file, buffers[:IOVEC_LIMIT], offset)

    def sync(self, file: int) -> None:
        """Make what was written durable. After an error its state is unknown: never sync the file again."""
        sync_data(file)

    def syncer(self) -> Syncer | None:
        """A `Syncer`, for syncs that run beside the caller; None where there is only `sync`."""
        return None

    def size(self, file: int) -> int:
        return os.fstat(file).st_size

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def names(self, directory: str) -> list[str]:
        return os.listdir(directory)

    def sync_directory(self, directory: str) -> None:
        sync_path(directory)

    def free_bytes(self, directory: str) -> int:
        """Space that this process may still use on the directory's file system."""
        info = os.statvfs(directory)
        return info.f_bavail * info.f_frsize


def write_all(disk: Disk, file: int, buffers: Sequence[Payload], offset: int) -> None:
    """Write every byte, going on after short writes. Raises `OSError`; a write that takes nothing is one."""
    pending = list(buffers)
    while pending:
        taken = disk.write(file, pending[:IOVEC_LIMIT], offset)
        if taken <= 0:
            raise OSError(f"a write at offset {offset} took no bytes")
        offset += taken
        first = 0
        while first < len(pending) and taken >= (size := memoryview(pending[first]).nbytes):
            taken -= size
            first += 1
        del pending[:first]
        if taken:
            pending[0] = memoryview(pending[0])[taken:]
