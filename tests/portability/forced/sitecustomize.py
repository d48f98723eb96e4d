"""A Python that has on Linux only what it has on macOS: each process whose PYTHONPATH has this folder loads it first.

What is of Linux is gone, and what macOS does otherwise is done so: modes of sockets are refused, an address holds 103
bytes, and `F_FULLFSYNC` syncs files. TIDEWAL_TEST_FULL_SYNCS names a file that gets a byte for each.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import sys
import time
from typing import Any

FULL_SYNC = 51
_fcntl, _fchmod, _isdir = fcntl.fcntl, os.fchmod, os.path.isdir
_bind, _connect = socket.socket.bind, socket.socket.connect


def _full_sync(file: int, command: int, *arguments: Any) -> Any:
    if command != FULL_SYNC:
        return _fcntl(file, command, *arguments)
    os.fsync(file)
    if counting := os.environ.get("TIDEWAL_TEST_FULL_SYNCS"):
        with open(counting, "ab") as counted:
            counted.write(b".")
    return 0


def _change_mode(file: int, mode: int) -> None:
    if stat.S_ISSOCK(os.fstat(file).st_mode):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    _fchmod(file, mode)


def _is_folder(path: Any) -> bool:
    return path != "/proc/self/fd" and _isdir(path)


def _checked(address: Any) -> Any:
    if isinstance(address, str) and len(os.fsencode(address)) > 103:
        raise OSError("AF_UNIX path too long")
    return address


class MacSocket(socket.socket):
    def bind(self, address: Any) -> None:
        _bind(self, _checked(address))

    def connect(self, address: Any) -> None:
        _connect(self, _checked(address))


for _module, _names in (
    (os, ("eventfd", "eventfd_read", "eventfd_write", "fdatasync", "memfd_create", "pidfd_open", "pipe2", "O_TMPFILE")),
    (os, ("posix_fallocate", "posix_fadvise", "sched_getaffinity", "splice", "O_DIRECT", "setns", "unshare")),
    (socket, ("SOCK_CLOEXEC", "SOCK_NONBLOCK", "SO_PEERCRED")),
    (time, ("CLOCK_BOOTTIME",)),
):
    for _name in _names:
        if hasattr(_module, _name):
            delattr(_module, _name)
sys.modules["caio"] = None  # type: ignore[assignment] -- kernel AIO: importing it fails
fcntl.F_FULLFSYNC, fcntl.fcntl = FULL_SYNC, _full_sync  # type: ignore[attr-defined]
os.fchmod, os.path.isdir, socket.socket = _change_mode, _is_folder, MacSocket  # type: ignore[misc]
