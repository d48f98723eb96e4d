"""The I/O side of a reader: fetches ahead of the reader, up to a bound in bytes, and survives broker failures.

Every fetch is a request of its own with an answer or a time limit, and after each failure the topic's leader is looked
up anew; so no consumer of the library can fall silent. A stall of fetching is reported (`runtime/log/stalls.py`), and
so is its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiokafka import errors as kafka_errors

from ...runtime.errors import ChannelNotFound, TidewalError, Unavailable
from ...runtime.log.wal import Start
from ...runtime.loop_bridge import LoopNotifier
from . import faults, lookup
from .catalog import KafkaChannel
from .cluster import PAUSE_S, Cluster
from .fetching import Fetched, fetch
from .requests import NO_ID

_log = logging.getLogger(__name__)


class ChannelFetcher:
    """Fetches batches of one channel for one reader. `run` belongs to the I/O loop, `take` and `wait` to the reader's
    loop, `close` and `fail` to any thread."""

    def __init__(
        self, channel: KafkaChannel, start: Start, wake: Callable[[LoopNotifier, asyncio.Future[None]], None]
    ) -> None:
        """`wake` settles a future of the reader's loop, from any thread."""
        self.channel = channel
        self._start, self._wake_reader = start, wake
        self._lock = threading.Lock()
        self._batches: deque[tuple[Sequence[Any], int, int]] = (
            deque()
        )  # with their size in bytes and the requested offset
        self._size = 0
        self._error: TidewalError | None = None
        self._ended = False
        self._waiter: tuple[LoopNotifier, asyncio.Future[None]] | None = None
        self._room = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # of `run`
        self._task: asyncio.Task[Any] | None = None  # of `run`

    # ---- the reader's side -------------------------------------------------------------------------------------------

    def take(self) -> tuple[Sequence[Any], int] | None:
        """The next batches and the requested offset; None when none are ready. Raises the error that ended fetching
        once all batches are taken, and `StopAsyncIteration` when closed."""
        with self._lock:
            if self._ended:
                raise StopAsyncIteration
            if not self._batches:
                if self._error is not None:
                    raise self._error
                return None
            batches, size, offset = self._batches.popleft()
            self._size -= size
            full = not self._room.is_set()
        if full:
            self._signal_room()
        return batches, offset

    async def wait(self, notifier: LoopNotifier) -> None:
        """Return when `take` may have a result. `notifier` is the one of the reader's loop."""
        waiter: asyncio.Future[None] = notifier.loop.create_future()
        with self._lock:
            if self._batches or self._error is not None or self._ended:
                return
            self._waiter = (notifier, waiter)
        await waiter

    def close(self) -> None:
        """End without an error: `take` returns no more batches, and a waiting reader is woken."""
        with self._lock:
            self._ended = True
            self._batches.clear()
            self._wake()

    # ---- the I/O side ------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """After `close`, on the I/O loop: cancel `run`. A `run` that has not begun yet ends by itself."""
        if self._task is not None:
            self._task.cancel()

    @property
    def ended(self) -> bool:
        return self._ended or self._error is not None

    def fail(self, error: TidewalError) -> None:
        """End with an error, which the reader raises once it has taken what was fetched."""
        with self._lock:
            self._error = self._error or error
            self._wake()

    def dropped(self, error: ChannelNotFound) -> None:
        """The channel is gone: discard what was fetched and end with `error`."""
        with self._lock:
            self._batches.clear()
        self.fail(error)

    async def run(
        self, cluster: Cluster, connection: int, ready: Callable[[], Awaitable[None]], started: Callable[[], None]
    ) -> None:
        """Find the start, call `started`, and fetch until closed. `ready` returns once the topic exists, or raises that
        it is gone; it is called before the start is looked up and when the topic may be gone."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            try:
                offset = await self._begin(cluster, connection, ready)
            finally:
                started()
            await self._fetch(cluster, connection, offset, ready)
        except TidewalError as error:
            self.fail(error)
        except Exception as error:  # unexpected: raised in the reader, which would wait for ever
            _log.exception("reading %s failed", self.channel.topic)
            self.fail(Unavailable(f"reading {self.channel.name} failed: {error!r}"))

    async def _begin(self, cluster: Cluster, connection: int, ready: Callable[[], Awaitable[None]]) -> int:
        async def find() -> int:
            if self.ended:  # the channel was dropped, or the reader closed
                return 0
            await ready()
            return await lookup.first_offset(cluster, self.channel, self._start, connection)

        waiting = cluster.stalls.begin("read", self.channel.name)
        try:
            return await cluster.retrying(f"find where to read {self.channel.name}", find)
        finally:
            cluster.stalls.end(waiting)

    async def _fetch(
        self, cluster: Cluster, connection: int, offset: int, ready: Callable[[], Awaitable[None]]
    ) -> None:
        while not self.ended:
            fetched = await self._fetch_next(cluster, connection, offset, ready)
            if fetched is None:
                return
            offset = fetched.next_offset  # past aborted batches too
            if fetched.batches:
                room = self._put(fetched.batches, fetched.size, fetched.offset, cluster.options.prefetch_bytes)
                if not room:
                    await self._room.wait()

    async def _fetch_next(
        self, cluster: Cluster, connection: int, offset: int, ready: Callable[[], Awaitable[None]]
    ) -> Fetched | None:
        """The next batches, after as many attempts as it takes; None when closed meanwhile."""
        waiting = cluster.stalls.begin("read", self.channel.name)
        channel, doubtful = self.channel, False  # whether the topic may be gone
        try:
            while not self.ended:
                try:
                    if doubtful:
                        await ready()
                    return await fetch(cluster, channel.topic, offset, connection, topic_id=channel.topic_id or NO_ID)
                except kafka_errors.OffsetOutOfRangeError:
                    offset = await cluster.retrying(
                        f"find the first entry of {self.channel.name}",
                        lambda offset=offset: lookup.after_loss(cluster, self.channel, offset),
                    )
                except faults.Foreign as error:
                    if faults.final(error):
                        raise faults.mapped(error, f"read {self.channel.name}") from error
                    cluster.stalls.retry(waiting, error)
                    await asyncio.sleep(PAUSE_S)
                    await cluster.refresh()
                    doubtful = faults.topic_unknown(error) or cluster.leader(channel.topic) is None
        finally:
            cluster.stalls.end(waiting)
        return None

    def _put(self, batches: Sequence[Any], size: int, offset: int, limit: int) -> bool:
        """Pass batches to the reader. Returns whether there is room for more, up to `limit` bytes."""
        with self._lock:
            if not self._ended:
                self._batches.append((batches, size, offset))
                self._size += size
            room = self._size < limit
            if room:
                self._room.set()
            else:
                self._room.clear()
            self._wake()
        return room

    def _wake(self) -> None:
        """Wake the reader, and `run` where this has ended. The caller has the lock."""
        waiting, self._waiter = self._waiter, None
        if waiting is not None:
            self._wake_reader(*waiting)
        if self.ended:
            self._signal_room()

    def _signal_room(self) -> None:
        """Let `run` go on: there is room, or this has ended."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and `run` with it
                loop.call_soon_threadsafe(self._room.set)
