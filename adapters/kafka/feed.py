"""The I/O side of a reader: fetches ahead of it, up to a bound in bytes, and survives what happens to the brokers.

Every fetch is a request of our own with an answer or a time limit, and after each failure the topic's leader is looked
up anew; so there is no consumer that could fall silent. When fetching has not succeeded for a while that is reported
(`runtime/stalls.py`), and again when it goes on.
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
from ...runtime.wakeup import Hub
from ...runtime.wal import Start
from . import faults, lookup
from .catalog import Channel
from .cluster import PAUSE_S, Cluster
from .fetching import Fetched, fetch
from .requests import NO_ID

_log = logging.getLogger(__name__)


class Feed:
    """Batches of one channel on their way to one reader. `run` belongs to the I/O loop, `take` and `wait` to the
    reader's, `close` and `end` to any thread."""

    def __init__(self, channel: Channel, start: Start, wake: Callable[[Hub, asyncio.Future[None]], None]) -> None:
        """`wake` settles a future of the reader's loop, from any thread."""
        self.channel = channel
        self._start, self._wake_reader = start, wake
        self._lock = threading.Lock()
        self._batches: deque[tuple[Sequence[Any], int, int]] = deque()  # with their size and the offset asked for
        self._size = 0
        self._error: TidewalError | None = None
        self._ended = False
        self._waiter: tuple[Hub, asyncio.Future[None]] | None = None
        self._room = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # of `run`
        self._task: asyncio.Task[Any] | None = None  # of `run`

    # ---- the reader's side -------------------------------------------------------------------------------------------

    def take(self) -> tuple[Sequence[Any], int] | None:
        """The next batches and the offset they were asked for. Raises the error behind the last ones, and
        `StopAsyncIteration` when closed; None when there is nothing yet."""
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
            self._free()
        return batches, offset

    async def wait(self, hub: Hub) -> None:
        """Return when there may be something to take."""
        waiter: asyncio.Future[None] = hub.loop.create_future()
        with self._lock:
            if self._batches or self._error is not None or self._ended:
                return
            self._waiter = (hub, waiter)
        await waiter

    def close(self) -> None:
        """No more batches, and no error; a reader that waits is woken."""
        with self._lock:
            self._ended = True
            self._batches.clear()
            self._wake()

    # ---- the I/O side ------------------------------------------------------------------------------------------------

    def cut_short(self) -> None:
        """After `close`: what `run` waits for is not wanted any more. One that has not begun yet ends by itself."""
        if self._task is not None:
            self._task.cancel()

    @property
    def ended(self) -> bool:
        return self._ended or self._error is not None

    def fail(self, error: TidewalError) -> None:
        """Let the reader raise this once it has taken what was fetched."""
        with self._lock:
            self._error = self._error or error
            self._wake()

    def dropped(self, error: ChannelNotFound) -> None:
        """The channel is gone, and what was fetched of it with it."""
        with self._lock:
            self._batches.clear()
        self.fail(error)

    async def run(
        self, cluster: Cluster, connection: int, ready: Callable[[], Awaitable[None]], started: Callable[[], None]
    ) -> None:
        """Find the start, once the topic is `ready`, tell that it has `started`, and fetch until closed."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            try:
                offset = await self._begin(cluster, connection, ready)
            finally:
                started()
            await self._fetch(cluster, connection, offset, ready)
        except TidewalError as error:
            self.fail(error)
        except Exception as error:  # not foreseen: told to who reads, who would wait for ever
            _log.exception("reading %s failed", self.channel.topic)
            self.fail(Unavailable(f"reading {self.channel.name} failed: {error!r}"))

    async def _begin(self, cluster: Cluster, connection: int, ready: Callable[[], Awaitable[None]]) -> int:
        async def find() -> int:
            if self.ended:  # the channel was dropped, or nobody reads any more
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
            offset = fetched.next_offset  # also past what was aborted
            if fetched.batches:
                room = self._put(fetched.batches, fetched.size, fetched.offset, cluster.options.prefetch_bytes)
                if not room:
                    await self._room.wait()

    async def _fetch_next(
        self, cluster: Cluster, connection: int, offset: int, ready: Callable[[], Awaitable[None]]
    ) -> Fetched | None:
        """What the brokers answer, after as many attempts as it takes; None when closed meanwhile."""
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
        """Hand over; whether there is room for more."""
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
        """Under the lock."""
        waiting, self._waiter = self._waiter, None
        if waiting is not None:
            self._wake_reader(*waiting)
        if self.ended:
            self._free()

    def _free(self) -> None:
        """Let `run` look again."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and `run` with it
                loop.call_soon_threadsafe(self._room.set)
