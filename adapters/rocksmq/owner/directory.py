"""The directory of one RocksMQ: its owner, its format, and where its parts lie.

FORMAT   the version, as text                           journal/   segments
LOCK     locked by the owner                            index/     RocksDB, may be deleted
CLAIM    locked by processes that request ownership     socket     for other processes
"""

from __future__ import annotations

import contextlib
import fcntl
import os

from ....runtime.errors import DirectoryInUse, DirectoryUnwritable, FormatTooNew

FORMAT_VERSION = 1
PID_BYTES = 32  # of the number of the process in LOCK


class Directory:
    """An owned directory. Release with `close`."""

    def __init__(self, path: str) -> None:
        """Create if absent, and lock. Raises `DirectoryInUse`, `DirectoryUnwritable`, `FormatTooNew`."""
        self.path = os.path.abspath(path)
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            self._lock = os.open(os.path.join(self.path, "LOCK"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            self._lock_file()
            self._check_format()
            os.makedirs(self.journal, mode=0o700, exist_ok=True)
        except OSError as error:
            os.close(self._lock)
            raise _unwritable(self.path, error) from error
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def journal(self) -> str:
        return os.path.join(self.path, "journal")

    @property
    def index(self) -> str:
        return os.path.join(self.path, "index")

    def close(self) -> None:
        os.close(self._lock)

    def _lock_file(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._lock, PID_BYTES, 0).decode(errors="replace").strip()
            raise DirectoryInUse(
                f"{self.path} is in use by process {pid or '?'}",
                path=self.path,
                pid=int(pid) if pid.isdigit() else None,
            ) from None
        with contextlib.suppress(OSError):  # the number is for messages alone: no space for it is no reason to refuse
            os.pwrite(self._lock, f"{os.getpid()}\n".ljust(PID_BYTES).encode(), 0)

    def _check_format(self) -> None:
        path = os.path.join(self.path, "FORMAT")
        try:
            with open(path, encoding="ascii", errors="replace") as file:
                words = file.read(64).split()
        except FileNotFoundError:
            self._write_format(path)
            return
        version = words[-1] if words else ""
        if words[:2] != ["tidewal", "rocksmq"] or not version.isdigit():
            raise DirectoryUnwritable(f"{self.path} is not a RocksMQ directory: {path} says otherwise", path=self.path)
        if int(version) > FORMAT_VERSION:
            raise FormatTooNew(
                f"{self.path} has format {version}, this Tidewal reads up to {FORMAT_VERSION}",
                found=int(version),
                supported=FORMAT_VERSION,
            )

    def _write_format(self, path: str) -> None:
        with open(path + ".new", "w", encoding="ascii") as file:
            file.write(f"tidewal rocksmq {FORMAT_VERSION}\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(path + ".new", path)
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


class OwnershipRequest:
    """A process's request to own a directory. While one stands, no process that does not require ownership takes the
    directory over. Several processes may request at once. It ends with `release`, or with the process."""

    def __init__(self, path: str) -> None:
        """`path` is the directory. Raises `DirectoryUnwritable`."""
        try:
            self._file = os.open(os.path.join(path, "CLAIM"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unwritable(path, error) from error

    def make(self) -> None:
        """Request, unless another process is just looking for requests: so call it again from time to time."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def release(self) -> None:
        """End the request."""
        os.close(self._file)


def ownership_requested(path: str) -> bool:
    """Whether a process requests to own the directory and does not own it yet. Raises `DirectoryUnwritable`."""
    try:
        file = os.open(os.path.join(path, "CLAIM"), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _unwritable(path: str, error: OSError) -> DirectoryUnwritable:
    return DirectoryUnwritable(f"{path} cannot be created or written: {error.strerror}", path=path)
