"""Syncs that the kernel runs beside an event loop: no thread of this process waits for them.

Handing a commit to a thread and back costs two thread switches of the interpreter, as much as the sync of a small
commit itself takes. Linux AIO (`IOCB_CMD_FDSYNC`, since 4.18; through `caio`) runs the sync in a thread of the kernel
and signals an eventfd when it is done, which the loop watches among its other files.
"""

from __future__ import annotations

import os
from contextlib import suppress

from .disk import Disk, Syncer

try:
    from caio import linux_aio
except ImportError:  # another system, an older kernel, or a sandbox without io_setup
    linux_aio = None

ERRORS_FROM = 1 << 63  # caio returns a negative result as an unsigned number


class KernelDisk(Disk):
    """The operating system's files, with syncs that run beside the caller where the kernel supports them."""

    def syncer(self) -> Syncer | None:
        if linux_aio is None:
            return None
        with suppress(OSError, SystemError):  # all contexts of the machine are in use (fs.aio-max-nr)
            return KernelSyncer()
        return None


class KernelSyncer:
    """A `Syncer` by Linux AIO."""

    def __init__(self) -> None:
        assert linux_aio is not None
        self._begin = linux_aio.Operation.fdsync
        self._context = linux_aio.Context(1)
        self._result: int | None = None
        self.file: int = self._context.fileno

    def start(self, file: int) -> bool:
        self._result = None
        operation = self._begin(file)
        operation.set_callback(self._ended)
        try:
            return self._context.submit(operation) == 1
        except Exception:  # caio has a class of its own for each errno; with any of them nothing was begun
            return False

    def finish(self) -> bool:
        try:
            self._context.poll()
        except BlockingIOError:
            return False
        while self._result is None:  # signalled, so the result is there
            self._context.process_events(min_requests=1)
        if self._result >= ERRORS_FROM:
            number = (1 << 64) - self._result
            raise OSError(number, os.strerror(number))
        return True

    def _ended(self, result: int) -> None:
        self._result = result
