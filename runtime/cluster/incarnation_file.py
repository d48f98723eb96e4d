"""The incarnation that last had a place on this machine: who holds the lock of its file knows that the one before is
dead, so nobody need wait for the end of its lease."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Generator
from pathlib import Path


class IncarnationFile:
    """A locked file with the name of the machine and the incarnation of the process that has it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        host, _, self._incarnation = os.pread(fd, 4096, 0).decode(errors="replace").partition("\n")
        self._here = host == socket.gethostname()

    @property
    def predecessor(self) -> str:
        """The incarnation that had the lock before, on this machine, and is dead; "" where there was none."""
        return self._incarnation if self._here else ""

    def write(self, incarnation: str) -> None:
        """Name the process that has the lock now."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{socket.gethostname()}\n{incarnation}".encode(), 0)


@contextlib.contextmanager
def incarnation_file(path: Path) -> Generator[IncarnationFile | None]:
    """Hold the lock of the file at `path` for the block; None where another process has it, or it cannot be made: then
    nothing is known, and leases are waited for. The kernel gives the lock back when the process ends, however it does.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        yield None
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield None
        else:
            yield IncarnationFile(fd)
    finally:
        os.close(fd)
