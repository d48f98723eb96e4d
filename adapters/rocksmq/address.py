"""Where the owner of a RocksMQ can be reached."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Generator
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote

from ...runtime.errors import ConfigError, Unavailable
from ...runtime.log.redaction import shown_url, split_url
from .protocol import VERSION

SOCKET_NAME = "socket"
TOKEN_NAME = "token"
LOOPBACK = "127.0.0.1"
URL_FORMS = "rocksmq:///absolute/path, rocksmq://./relative/path or rocksmq://127.0.0.1:PORT?token_file=/path"
_SOCKET_PATH_BYTES = 100  # the limit of Linux is 108, of macOS 104, and it counts bytes
_DESCRIPTORS = "/proc/self/fd"  # a folder of Linux in which each open folder has a short path


@dataclass(frozen=True, slots=True)
class Address:
    """Where an owner can be reached: at the socket in its directory, or at a port of this machine, with its secret."""

    directory: str = ""
    port: int = 0
    token_file: str = ""

    @classmethod
    def of_directory(cls, directory: str) -> Address:
        return cls(os.path.abspath(directory))

    @classmethod
    def parse(cls, url: str) -> Address:
        """The address in the URL of a log. Raises `ConfigError` for a malformed one."""
        wrong = ConfigError(f"{shown_url(url)!r}: write {URL_FORMS}", key="wal")
        parts = split_url(url)
        if parts.scheme != "rocksmq":
            raise wrong
        if parts.netloc in ("", ".", ".."):
            if parts.path in ("", "/"):
                raise wrong
            return cls(os.path.abspath(parts.netloc + unquote(parts.path)))
        try:
            host, port, files = parts.hostname, parts.port, parse_qs(parts.query)["token_file"]
        except (KeyError, ValueError):
            raise wrong from None
        if host not in (LOOPBACK, "localhost") or not port or parts.path not in ("", "/"):
            raise wrong
        return cls(port=port, token_file=os.path.abspath(files[0]))

    def __str__(self) -> str:
        return self.directory or f"{LOOPBACK}:{self.port}"

    def new_socket(self) -> socket.socket:
        """A socket for `target`, not connected yet."""
        if self.directory:
            return socket.socket(socket.AF_UNIX)
        new = socket.socket(socket.AF_INET)
        new.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return new

    @contextlib.contextmanager
    def target(self) -> Generator[str | tuple[str, int]]:
        """The target to connect a socket to. Raises `OSError`."""
        if self.directory:
            with socket_path(self.directory) as path:
                yield path
        else:
            yield LOOPBACK, self.port

    def hello(self, client: bytes | None) -> list[object]:
        """The arguments of the first request. Raises `OSError` where the secret cannot be read."""
        if self.directory:
            return [VERSION, client]
        with open(self.token_file, "rb") as file:
            return [VERSION, client, file.read()]

    def unavailable(self, error: Exception, *, outcome_unknown: bool = False, advice: str = "") -> Unavailable:
        """The error to raise when the owner cannot be reached because of `error`; `advice` ends its message."""
        reason = str(error) or type(error).__name__
        message = f"the owner of {self} does not answer: {reason}" + (f". {advice}" if advice else "")
        if outcome_unknown:
            return Unavailable(message, path=str(self), outcome_unknown=True)
        return Unavailable(message, path=str(self))


@contextlib.contextmanager
def socket_path(directory: str) -> Generator[str]:
    """A path to the socket that fits into an address: where the plain one is too long, through an open descriptor, or
    (macOS) through a link in a folder that only this user can enter. Raises `OSError`."""
    path = os.path.join(directory, SOCKET_NAME)
    if len(os.fsencode(path)) <= _SOCKET_PATH_BYTES:
        yield path
        return
    if not os.path.isdir(_DESCRIPTORS):
        import tempfile  # late: short-lived readers do without it

        with tempfile.TemporaryDirectory(prefix="tw", dir="/tmp") as folder:
            link = os.path.join(folder, "log")
            os.symlink(os.path.abspath(directory), link)
            yield os.path.join(link, SOCKET_NAME)
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"{_DESCRIPTORS}/{descriptor}/{SOCKET_NAME}"
    finally:
        os.close(descriptor)
