"""The directory of one RocksMQ: its owner, its format, and where its parts lie.

FORMAT   the version, or "incomplete", as text          journal/   segments
LOCK     locked by the owner                            index/     RocksDB, may be deleted
CLAIM    locked by processes that request ownership     socket     for other processes
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator

from ....runtime.errors import ConfigError, CorruptLog, DirectoryInUse, DirectoryUnwritable, FormatTooNew, IncompleteLog
from ....runtime.file_sync import sync_file, sync_path

FORMAT_VERSION = 1
INCOMPLETE = "incomplete"  # in place of the version, while a salvage writes the directory
PID_BYTES = 32  # of the number of the process in LOCK


class Directory:
    """An owned directory. Release with `close`."""

    def __init__(self, path: str, *, complete: bool = True) -> None:
        """Create if absent, and lock. With `complete=False` a new directory counts as incomplete until `set_complete`:
        no process can open it. Raises `DirectoryInUse`, `DirectoryUnwritable`, `CorruptLog`, `FormatTooNew`,
        `IncompleteLog`."""
        self.path: str = os.path.abspath(path)
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            if not complete:
                self._begin_incomplete()
            self._lock = os.open(os.path.join(self.path, "LOCK"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            self._lock_file()
            if complete:
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

    def set_complete(self) -> None:
        """End what `complete=False` began. Raises `OSError`."""
        self._write_format(FORMAT_VERSION)

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

    def _begin_incomplete(self) -> None:
        """Before there is any other file: a crash at any moment leaves what no process takes for an empty log."""
        if read_format(self.path) is not None:
            raise DirectoryUnwritable(f"{self.path} is not new: another process uses it", path=self.path)
        self._write_format(INCOMPLETE)

    def _check_format(self) -> None:
        if check_format(self.path) is None:
            self._write_format(FORMAT_VERSION)

    def _write_format(self, version: int | str) -> None:
        path = os.path.join(self.path, "FORMAT")
        with open(path + ".new", "w", encoding="ascii") as file:
            file.write(f"tidewal rocksmq {version}\n")
            file.flush()
            sync_file(file.fileno())
        os.rename(path + ".new", path)
        sync_path(self.path)


def read_format(directory: str) -> str | None:
    """The version of the directory, as text; "" where FORMAT cannot be understood, None where there is none. Raises
    `FormatTooNew`, `IncompleteLog`, `OSError`."""
    try:
        with open(os.path.join(directory, "FORMAT"), encoding="ascii", errors="replace") as file:
            words = file.read(64).split()
    except FileNotFoundError:
        return None
    version = words[-1] if words[:2] == ["tidewal", "rocksmq"] else ""
    if version == INCOMPLETE:
        raise IncompleteLog(
            f"{directory} is incomplete: the `tidewal salvage` that writes it has not ended. If it does not run any"
            " more, remove the directory and salvage the damaged log again",
            path=directory,
        )
    if not version.isdigit():
        return ""
    if int(version) > FORMAT_VERSION:
        raise FormatTooNew(
            f"{directory} has format {version}, this Tidewal reads up to {FORMAT_VERSION}",
            found=int(version),
            supported=FORMAT_VERSION,
        )
    return version


def check_format(directory: str) -> str | None:
    """`read_format`. Raises also `CorruptLog` where FORMAT cannot be understood and there is a journal beside it,
    `DirectoryUnwritable` where there is none."""
    version = read_format(directory)
    if version != "":
        return version
    path = os.path.join(directory, "FORMAT")
    if os.path.isdir(os.path.join(directory, "journal")):
        raise CorruptLog(f"{path} is damaged: `tidewal salvage` copies the log, with a new one", path=path, offset=0)
    raise DirectoryUnwritable(f"{directory} is not a RocksMQ directory: FORMAT says otherwise", path=directory)


@contextlib.contextmanager
def locked(directory: str) -> Generator[bool]:
    """Keep the directory from being opened while it is read; nothing in it changes. False: a process owns it, or it
    cannot be locked here. Raises `ConfigError` where there is no log, `FormatTooNew`, `IncompleteLog`."""
    if not os.path.isdir(os.path.join(directory, "journal")):
        raise ConfigError(f"there is no log in {directory}", key="wal")
    read_format(directory)
    try:
        lock = os.open(os.path.join(directory, "LOCK"), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # no process has opened it since it came here
        yield True
        return
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unowned = True
        except OSError:
            unowned = False
        yield unowned
    finally:
        os.close(lock)


def is_owned(directory: str) -> bool:
    """Whether a process owns the directory now. Where that cannot be asked, True."""
    try:
        lock = os.open(os.path.join(directory, "LOCK"), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


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
