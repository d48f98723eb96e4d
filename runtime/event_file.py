"""A file that one side waits for and the other sets: an eventfd where there is one, elsewhere (macOS) a pipe."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_ONE = (1).to_bytes(8, sys.byteorder)  # what an eventfd adds; to a pipe it is eight bytes
_PIPE_BYTES = 64 * 1024  # at least what a pipe holds, so that one read takes all


class EventFile:
    """`file` is readable from `set` until `take`; several calls of `set` in between count as one."""

    def __init__(self, *, blocking: bool = True) -> None:
        """With `blocking`, `take` waits until it is set. Raises `OSError` where no file can be opened."""
        self.file: int
        if hasattr(os, "eventfd"):
            self.file = self._writing = os.eventfd(0, os.EFD_CLOEXEC | (0 if blocking else os.EFD_NONBLOCK))
            self._bytes = len(_ONE)
        else:
            self.file, self._writing = os.pipe()
            os.set_blocking(self.file, blocking)
            os.set_blocking(self._writing, False)
            self._bytes = _PIPE_BYTES

    def set(self) -> None:
        """From any thread. Never blocks."""
        with suppress(BlockingIOError):  # full, so it is set
            os.write(self._writing, _ONE)

    def take(self) -> None:
        """Unset it. Where it is not set: wait, or raise `BlockingIOError` if it does not block."""
        os.read(self.file, self._bytes)

    def close(self) -> None:
        """To be called once."""
        os.close(self.file)
        if self._writing != self.file:
            os.close(self._writing)
