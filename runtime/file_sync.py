"""Make files durable: on the device, and not in its cache.

`fdatasync` does so on Linux. macOS has none, and its `fsync` leaves the data in the drive's cache, which a loss of
power empties: there it takes `F_FULLFSYNC`.
"""

from __future__ import annotations

import errno
import fcntl
import os

_REFUSALS = (errno.EINVAL, errno.ENOTSUP, errno.ENOTTY)  # of file systems without F_FULLFSYNC, such as network shares


def sync_data(file: int) -> None:
    """Make the content of a file durable, and of its metadata what is needed to read it. Raises `OSError`; the state of
    the file is unknown then."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        _sync_fully(file)
    elif hasattr(os, "fdatasync"):
        os.fdatasync(file)
    else:
        os.fsync(file)


def sync_file(file: int) -> None:
    """Make a file with its metadata durable. Raises `OSError`; the state of the file is unknown then."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        _sync_fully(file)
    else:
        os.fsync(file)


def sync_path(path: str | os.PathLike[str]) -> None:
    """Make a file durable, or the names in a directory. Raises `OSError`."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync_file(file)
    finally:
        os.close(file)


def _sync_fully(file: int) -> None:
    try:
        fcntl.fcntl(file, getattr(fcntl, "F_FULLFSYNC"))  # noqa: B009 -- type checkers know Linux' names only
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        os.fsync(file)
