"""The log as a process of Spark has it open for writing: once per process, for all its tasks."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from ...runtime.config.loading import load_settings, wal_options
from ...runtime.errors import TidewalError, Unavailable
from ...runtime.log.loop_thread import LoopThread
from ...runtime.log.names import Names
from ...runtime.log.opening import find_backend, open_wal
from ...runtime.log.wal import ChannelPolicy, Wal
from ...runtime.rpc.client import RpcClient
from .retry import retry_until

T = TypeVar("T")

# Shared by all of Spark's processes: these come and go, and none may leave a reply channel behind.
CLIENT_NAME: Final = "spark"
CLOSE_S: Final = 5.0

_opened: dict[tuple[int, str], WorkerLog] = {}  # of a process, for workers are forked
_opening = threading.Lock()


class WorkerLog:
    """An open log whose coroutines run on a thread of its own. It never owns the log: a process of Spark may be
    killed at any time, and other processes must not wait for it."""

    def __init__(self, url: str, deadline_s: float = 0.0) -> None:
        """Open the log at `url`: once, or again after retryable errors (`retry_until`) for `deadline_s` seconds."""
        self.url = url
        self._loop = LoopThread("tidewal-spark-sink")
        self._rpc_clients: dict[str, RpcClient] = {}
        self._created: set[str] = set()
        try:
            self.wal: Wal = self.retry(self._open, "a batch", deadline_s) if deadline_s else self.run(self._open())
        except BaseException:
            self._loop.end()
            raise

    async def _open(self) -> Wal:
        try:
            return await open_wal(self.url, own=False, **wal_options(load_settings(), self.url))
        except Unavailable as error:
            advice = find_backend(self.url).advice(self.url)
            if not advice:
                raise
            raise Unavailable(f"{error.message}. {advice}, or check option wal") from error

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which runs on the log's own thread."""
        return self._loop.run(work)

    def retry(self, work: Callable[[], Coroutine[Any, Any, T]], what: str, deadline_s: float) -> T:
        """As `run`, with `retry_until` for `deadline_s` seconds: a query goes on when the log's owner is away for a
        moment. `what` names the work in errors."""
        return self.run(retry_until(work, what, deadline_s))

    async def rpc_client(self, prefix: str) -> RpcClient:
        """The client that calls the roles of the cluster with `prefix`; a new one where the log has failed under the
        last."""
        rpc_client = self._rpc_clients.get(prefix)
        if rpc_client is None or not rpc_client.listening:
            rpc_client = RpcClient(self.wal, Names(prefix), name=CLIENT_NAME, shared=True)
            await rpc_client.open()
            self._rpc_clients[prefix] = rpc_client
        return rpc_client

    async def create(self, channel: str, policy: ChannelPolicy) -> None:
        """Create `channel` with `policy`, unless this process knows that it is there."""
        if channel not in self._created:
            await self.wal.create_channel(channel, policy)
            self._created.add(channel)

    def close(self) -> None:
        """Release what can be released in a few seconds."""
        try:
            self._loop.run(self._close(), CLOSE_S)
        except (TidewalError, TimeoutError):
            pass
        finally:
            self._loop.end()

    async def _close(self) -> None:
        for rpc_client in self._rpc_clients.values():
            await rpc_client.close()
        await self.wal.close()


def worker_log(url: str, deadline_s: float = 0.0) -> WorkerLog:
    """The log at `url` as this process has it open. Opening it is retried for
    `deadline_s` seconds; raises what it raises then."""
    with _opening:
        known = _opened.get((os.getpid(), url))
        if known is None:
            known = _opened[os.getpid(), url] = WorkerLog(url, deadline_s)
        return known


@atexit.register
def close_all() -> None:
    """Close the logs of this process. For workers that Spark kills the log's owner or the brokers do that."""
    with _opening:
        for pid, url in list(_opened):
            log = _opened.pop((pid, url))
            if pid == os.getpid():
                log.close()
