"""The log as one of Spark's processes has it open for writing: once per process, for all tasks that it ever runs."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from ...runtime.config import load_settings, wal_options
from ...runtime.errors import TidewalError, Unavailable
from ...runtime.factory import open_wal
from ...runtime.names import Names
from ...runtime.redaction import shown_url
from ...runtime.rpc import Caller
from ...runtime.wal import ChannelPolicy, Wal
from .patience import persistently

T = TypeVar("T")

CALLER: Final = "spark"  # shared by all of Spark's processes: these come and go, and none may leave a channel behind
CLOSE_S: Final = 5.0

_opened: dict[tuple[int, str], WorkerLog] = {}  # of a process, for workers are forked
_opening = threading.Lock()


class WorkerLog:
    """An open log whose coroutines run on a thread of its own. It never owns a RocksMQ: a process of Spark's may be
    killed at any time, and another one must not wait for it."""

    def __init__(self, url: str, deadline_s: float = 0.0) -> None:
        """Opening it is tried once, or `persistently` for `deadline_s`."""
        self.url = url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tidewal-spark-sink", daemon=True)
        self._thread.start()
        self._callers: dict[str, Caller] = {}
        self._created: set[str] = set()
        try:
            self.wal: Wal = self.persist(self._open, "a batch", deadline_s) if deadline_s else self.run(self._open())
        except BaseException:
            self._end()
            raise

    async def _open(self) -> Wal:
        options = wal_options(load_settings(), self.url)
        if urlsplit(self.url).scheme != "rocksmq":
            return await open_wal(self.url, **options)
        try:
            return await open_wal(self.url, own=False, **options)
        except Unavailable as error:
            raise Unavailable(
                f"{error.message}. Spark writes to a RocksMQ through the process that has it open: start one (tidewal "
                f"run --wal {shown_url(self.url)}), or check option wal"
            ) from error

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which runs on the log's own thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def persist(self, work: Callable[[], Coroutine[Any, Any, T]], what: str, deadline_s: float) -> T:
        """The same, `persistently`: a query goes on under which the log's owner is away for a moment."""
        return self.run(persistently(work, what, deadline_s))

    async def caller(self, prefix: str) -> Caller:
        """Who asks the roles of the cluster with that prefix; another one where the log has failed under the last."""
        caller = self._callers.get(prefix)
        if caller is None or not caller.listening:
            caller = Caller(self.wal, Names(prefix), name=CALLER, shared=True)
            await caller.open()
            self._callers[prefix] = caller
        return caller

    async def create(self, channel: str, policy: ChannelPolicy) -> None:
        """Make the channel, unless this process knows that it is there."""
        if channel not in self._created:
            await self.wal.create_channel(channel, policy)
            self._created.add(channel)

    def close(self) -> None:
        """Release what can be released in a few seconds."""
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(CLOSE_S)
        except (TidewalError, TimeoutError):
            pass
        finally:
            self._end()

    async def _close(self) -> None:
        for caller in self._callers.values():
            await caller.close()
        await self.wal.close()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def worker_log(url: str, deadline_s: float = 0.0) -> WorkerLog:
    """The log at `url` as this process has it open. Raises what opening it raises; it is tried for `deadline_s`."""
    with _opening:
        known = _opened.get((os.getpid(), url))
        if known is None:
            known = _opened[os.getpid(), url] = WorkerLog(url, deadline_s)
        return known


@atexit.register
def close_all() -> None:
    """Close the logs of this process. Workers that Spark kills leave that to the log's owner, or to the brokers."""
    with _opening:
        for pid, url in list(_opened):
            log = _opened.pop((pid, url))
            if pid == os.getpid():
                log.close()
