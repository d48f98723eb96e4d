"""Admission: whether a call on a log is let in, and the error that says why not."""

from __future__ import annotations

import errno

from ....runtime.errors import Closed, DiskPressure, MessageTooLarge, Overloaded, TidewalError
from ..journal.journal import Journal

MAKE_SPACE = "free space on its disk, or enlarge it"


class Admission:
    """What keeps calls out of one log: it is closed, the journal failed, too little space, too much pending."""

    def __init__(
        self, path: str, journal: Journal, *, commit_bytes: int, pending_bytes: int, free_space_bytes: int
    ) -> None:
        self.closing: bool = False
        self.pressure: tuple[str, str] | None = None  # why data is refused for want of space or a reserve; the limit
        self.room: int = 0  # bytes that may be pending; below 0 while appends are refused
        self._path, self._journal = path, journal
        self._commit_bytes, self._pending_bytes, self._free_space_bytes = commit_bytes, pending_bytes, free_space_bytes
        self._update_room()

    def _update_room(self) -> None:
        """Compute `room`. A failed journal is no part of it: what is queued then fails when it is committed."""
        self.room = -1 if self.closing or self.pressure else min(self._pending_bytes, self._commit_bytes)

    def close(self) -> None:
        """Let no call in from now on."""
        self.closing = True
        self._update_room()

    def note_space(self, free_bytes: int, *, short: OSError | None) -> tuple[str, str] | None:
        """Note the free space of the disk, in bytes, and return the `pressure` that follows from it. `short`: why the
        journal's reserve for control records is in use, or cannot be made; None while it is ready."""
        pressure: tuple[str, str] | None = None
        if free_bytes < self._free_space_bytes:
            pressure = (
                f"less than {self._free_space_bytes} bytes are free for {self._path}, the limit"
                f" (rocksmq.freeSpaceInMB) of the process that has the log open; {MAKE_SPACE}",
                "free_space_bytes",
            )
        elif short is not None and short.errno in (errno.ENOSPC, errno.EDQUOT):
            pressure = f"{self._path} has no space for its reserve; {MAKE_SPACE}", "free_space_bytes"
        elif short is not None:
            pressure = f"{self._path} cannot make its reserve: {short}", "disk"
        self.pressure = pressure  # assigned once: other threads read it meanwhile
        self._update_room()
        return pressure

    def check_open(self) -> None:
        """Raises `Closed`."""
        if self.closing:
            raise self.closed()

    def check_writable(self) -> None:
        """Raises `Closed`, and the error with which the journal failed."""
        if self.closing:
            raise self.closed()
        failure = self._journal.failure
        if failure is not None:
            raise type(failure)(failure.message)

    def check_space(self) -> None:
        """Raises `DiskPressure`."""
        pressure = self._disk_pressure()
        if pressure is not None:
            raise pressure

    def refusal(self) -> TidewalError | None:
        """Why data is refused at present: the journal failed, or there is too little space; None where it is taken."""
        return self._journal.failure or self._disk_pressure()

    def _disk_pressure(self) -> DiskPressure | None:
        pressure = self.pressure
        if pressure is None:
            return None
        why, limit = pressure
        return DiskPressure(why, limit=limit)

    def check_room(self, size: int) -> None:
        """Whether one commit of `size` bytes can be taken. Raises `MessageTooLarge`, `Overloaded`."""
        if size > self._commit_bytes:
            raise MessageTooLarge(
                f"one commit of {size} bytes is over what a segment holds ({self._commit_bytes})",
                size=size,
                limit=self._commit_bytes,
            )
        if self._journal.pending.size + size > self._pending_bytes:
            raise Overloaded(f"{self._pending_bytes} bytes wait for the disk already", limit="pending_bytes")

    def closed(self) -> Closed:
        """The error of a call on a closed log."""
        return Closed(f"the log {self._path} is closed")
