"""Serve a directory to other processes by the protocol of `protocol.py`, on a thread and loop of its own.

A client costs no more than `ConnectionLimits` says, stalls only itself, and harms neither the owner nor other clients
by anything it sends. Appends are answered by the journal's thread itself. The socket is open to the user of the process
alone; a port, which listens only when asked for and only on loopback, to processes that can read the secret in `token`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvloop

from ....runtime.errors import Overloaded, to_wire
from ..address import LOOPBACK, SOCKET_NAME, TOKEN_NAME, socket_path
from ..protocol import ProtocolFrame, encode
from .connection import Connection, ConnectionLimits, ReceiveMemory
from .group_service import GroupService
from .requests import Requests

if TYPE_CHECKING:
    from .store import RocksMQ

BACKLOG = 256  # more than the connections, so that a client over the limit is answered with `Overloaded`
SWEEP_S = 1.0  # between two checks of the connections, at most
ACCEPT_PAUSE_S = 1.0  # after a connection could not be accepted: the process is out of file descriptors

_log = logging.getLogger(__name__)


class Server:
    """The socket of one directory, and a port. `start` and `stop` block."""

    def __init__(
        self,
        store: RocksMQ,
        directory: str,
        *,
        boot: int,
        frame_bytes: int,
        groups: GroupService | None = None,
        tcp_port: int | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        """`boot` (the owner's incarnation) and `frame_bytes` (of a request's entries, at most) are sent to clients;
        `tcp_port` 0 takes any port that is free, None none."""
        self.port: int | None = None
        self._directory, self._wanted_port = directory, tcp_port
        self._limits, self._frame_bytes = limits or ConnectionLimits(), frame_bytes
        self._requests = Requests(store, groups, boot, frame_bytes, self._limits.waiting_requests)
        self.handle: Callable[[Connection, ProtocolFrame], None] = self._requests.handle
        self.handled: Callable[[], None] = store.wake  # once all requests that were received together are handled
        self._memory = ReceiveMemory(self._limits.receiving_bytes)
        self._connections: set[Connection] = set()
        self._numbers = itertools.count(1)
        self._secret: bytes | None = None
        self._listeners: list[socket.socket] = []
        self._loop = uvloop.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="tidewal-socket", daemon=True)

    def start(self) -> None:
        """Listen, and answer from another thread. Raises `OSError`."""
        try:
            self._listen_at_socket()
            if self._wanted_port is not None:
                self._listen_at_port(self._wanted_port)
        except BaseException:
            self._close_listeners()
            self._loop.close()
            raise
        self._thread.start()

    def stop(self) -> None:
        """Cut all connections and remove the socket. A second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
        self._remove(SOCKET_NAME)
        self._remove(TOKEN_NAME)

    # ---- listening ---------------------------------------------------------------------------------------------------

    def _listen_at_socket(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        self._listeners.append(listener)
        self._remove(SOCKET_NAME)
        with socket_path(self._directory) as path:
            _bind_for_one_user(listener, path)
        listener.listen(BACKLOG)
        listener.setblocking(False)

    def _listen_at_port(self, port: int) -> None:
        listener = socket.socket(socket.AF_INET)
        self._listeners.append(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        self._secret = secrets.token_bytes(32)
        self._remove(TOKEN_NAME)
        path = os.path.join(self._directory, TOKEN_NAME)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(self._secret)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self.port = listener.getsockname()[1]

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._directory, name))

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._close_listeners()
            self._loop.close()

    async def _serve(self) -> None:
        for listener in self._listeners:
            self._loop.add_reader(listener.fileno(), self._accept, listener)
        self._sweep()
        await self._stopping.wait()
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
        tasks = [task for connection in self._connections for task in connection.tasks]
        for connection in list(self._connections):
            connection.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:
            _log.warning("a connection to the log cannot be accepted: %s", error)
            self._loop.remove_reader(listener.fileno())
            self._loop.call_later(ACCEPT_PAUSE_S, self._accept_again, listener)
            return
        accepted.setblocking(False)
        if len(self._connections) >= self._limits.connections:
            limit = self._limits.connections
            error = Overloaded(f"{limit} connections are open", limit="connections")
            with contextlib.suppress(OSError):
                accepted.send(encode([0, "error", to_wire(error)])[0])
            accepted.close()
            return
        secret = None
        if listener.family == socket.AF_INET:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            secret = self._secret
        number = next(self._numbers)
        connection = Connection(
            number, self._loop, accepted, self, self._limits, self._memory, self._frame_bytes, secret
        )
        self._connections.add(connection)
        connection.start()

    def gone(self, connection: Connection) -> None:
        """The connection has ended."""
        self._connections.discard(connection)
        self._requests.gone(connection)

    def _accept_again(self, listener: socket.socket) -> None:
        if not self._stopping.is_set():
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _sweep(self) -> None:
        """Cut connections that stall, again and again."""
        now = time.monotonic()
        for connection in list(self._connections):
            reason = connection.overdue(now)
            if reason:
                _log.info("connection %d to the log is cut: it %s", connection.number, reason)
                connection.close()
        limits = self._limits
        self._loop.call_later(min(SWEEP_S, limits.hello_s, limits.stalled_s, limits.idle_s), self._sweep)


def _bind_for_one_user(listener: socket.socket, path: str) -> None:
    """Bind so that the file is at no moment open to other users. Raises `OSError`."""
    try:
        os.fchmod(listener.fileno(), 0o600)  # the file gets it
    except OSError:  # macOS has no modes of sockets; the mask is the process's, so only there
        mask = os.umask(0o077)
        try:
            listener.bind(path)
        finally:
            os.umask(mask)
        os.chmod(path, 0o600)
    else:
        listener.bind(path)
