"""A node for scripts and notebooks: `standalone` without `await`, over an event loop on a thread of its own."""

from __future__ import annotations

import concurrent.futures.thread as executors
import threading
import weakref
from collections.abc import Coroutine, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

from ..runtime.arguments import checked
from ..runtime.cluster.roles import ROLE_NAMES
from ..runtime.config.settings import Settings
from ..runtime.errors import Closed
from ..runtime.log.loop_thread import LoopThread
from ..runtime.log.wal import Wal
from ..runtime.metrics.server import Health
from .standalone import Standalone, standalone
from .sync_client import SyncClient

T = TypeVar("T")


@checked
def standalone_sync(
    directory: str | Path,
    *,
    wal: str = "",
    settings: Settings | None = None,
    name: str = "",
    roles: Iterable[str] = ROLE_NAMES,
    follow: bool = False,
) -> SyncStandalone:
    """Run a node as `standalone` does, with its parameters and errors, on a thread of its own: for scripts and
    notebooks, also those whose event loop runs.

    Close it, or use it as a context manager: `with tidewal.standalone_sync("data") as node`."""
    with ExitStack() as opened:
        loop = LoopThread("tidewal-node")
        opened.callback(loop.end)
        node = standalone(directory, wal=wal, settings=settings, name=name, roles=roles, follow=follow)
        return SyncStandalone(opened.enter_context(loop.entered(node)), loop, opened.pop_all())


class SyncStandalone:
    """`Standalone` with calls that return when they are done. Made by `standalone_sync`.

    Any thread may call it. The node works on while the program does other things, until it is closed; the end of the
    process closes it, too. In a program with an event loop a call blocks that loop: use `standalone` there."""

    def __init__(self, node: Standalone, loop: LoopThread, opened: ExitStack) -> None:
        """For `standalone_sync`: `node` belongs to `loop`, and `opened` closes the two."""
        self._node = node
        self._loop = loop
        self._clients: weakref.WeakSet[SyncClient] = weakref.WeakSet()
        self._close = weakref.finalize(self, _close, self._clients, opened)
        _running.add(self)

    def __enter__(self) -> SyncStandalone:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the clients, then drain and stop the node: what was accepted is durable. Later calls raise `Closed`; a
        second `close` does nothing. Raises what stopping raises."""
        self._close()

    @checked
    def client(self, name: str = "") -> SyncClient:
        """A client of this node, which is closed with the node, or before. `name` is shown in the names of its channel
        and records."""
        self._check_open()
        with ExitStack() as opened:
            entered = opened.enter_context(self._loop.entered(self._node.client(name)))
            client = SyncClient(entered, self._loop, opened.pop_all())
        self._clients.add(client)
        return client

    @overload
    def run(self, work: None = None, *, timeout_s: float | None = None) -> None: ...
    @overload
    def run(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T: ...
    @checked
    def run(self, work: Coroutine[Any, Any, T] | None = None, *, timeout_s: float | None = None) -> T | None:
        """Run `work` on the node's event loop and return its result, as `Standalone.run` does, with its errors: the way
        to streams and groups over `wal`. Without `work` wait for `timeout_s` seconds, or until the node fails."""
        if not self._close.alive and work is not None:
            work.close()
        self._check_open()
        return self._loop.run(self._node.run(work, timeout_s=timeout_s))

    @checked
    def migrate(self, to: str) -> None:
        """`Standalone.migrate`."""
        self._check_open()
        self._loop.run(self._node.migrate(to))

    @property
    def wal(self) -> Wal:
        """The node's log, for coroutines that `run` is given: it belongs to the node's event loop."""
        return self._node.wal

    def health(self) -> Health:
        """Whether the node makes progress, as `Standalone.health` says it."""
        self._check_open()
        return self._loop.run(self._health())

    async def _health(self) -> Health:
        return self._node.health()

    def _check_open(self) -> None:
        if not self._close.alive:
            raise Closed("the node is closed: start another with standalone_sync")


_running: weakref.WeakSet[SyncStandalone] = weakref.WeakSet()


def _close_running() -> None:
    for node in list(_running):
        node.close()


# Stopping a node needs executors, which Python shuts down before it calls what `atexit` has. This is called earlier: it
# is how `executors` themselves, imported above, are shut down, and what was registered last is called first. Where a
# Python has no such thing, a node that was left open ends as by a kill: nothing that was acknowledged is lost.
assert executors
if hasattr(threading, "_register_atexit"):
    getattr(threading, "_register_atexit")(_close_running)  # noqa: B009 -- checkers do not know it


def _close(clients: weakref.WeakSet[SyncClient], opened: ExitStack) -> None:
    try:
        for client in list(clients):
            client.close()
    finally:
        opened.close()
