"""The I/O side of a reader: fetches ahead of the reader, up to a bound in bytes, and survives broker failures.

Every fetch is a request of its own with an answer or a time limit, and after each failure the topic's leader is looked
up anew; so no consumer of the library can fall silent. A stall of fetching is reported (`runtime/log/stalls.py`), and
so is its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiokafka import errors as kafka_errors

from ...runtime.errors import ChannelNotFound, Closed, TidewalError, Unavailable
from ...runtime.log.read_ahead import ReadAhead
from ...runtime.log.wal import Start
from . import faults, lookup
from .catalog import KafkaChannel
from .cluster import PAUSE_S, Cluster
from .fetching import Fetched, fetch
from .requests import NO_ID

_log = logging.getLogger(__name__)


class ChannelFetcher:
    """Fetches batches of one channel for one reader. `run` belongs to the I/O loop, `ready` is where the reader takes
    them from: undecoded, with the requested offset. `close` and `fail` may be called on any thread."""

    def __init__(self, channel: KafkaChannel, start: Start, prefetch_bytes: int) -> None:
        """Over `prefetch_bytes` that the reader has not taken no more is fetched."""
        self.channel = channel
        self.ready: ReadAhead[tuple[Sequence[Any], int]] = ReadAhead(prefetch_bytes, self._signal_room)
        self._start = start
        self._room = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # of `run`
        self._task: asyncio.Task[Any] | None = None  # of `run`

    def close(self) -> None:
        """End; the reader gets no more batches, but `Closed`."""
        self.ready.end(Closed("the log or the reader is closed"), discard=True)

    def fail(self, error: TidewalError) -> None:
        """End with an error, which the reader raises once it has taken what was fetched."""
        self.ready.end(error)

    def dropped(self, error: ChannelNotFound) -> None:
        """The channel is gone: discard what was fetched and end with `error`."""
        self.ready.end(error, discard=True)

    # ---- on the I/O loop ---------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """After `close`: cancel `run`. A `run` that has not begun yet ends by itself."""
        if self._task is not None:
            self._task.cancel()

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
            _log.exception("reading %s failed", self.channel.topic, extra={"channel": self.channel.name})
            self.fail(Unavailable(f"reading {self.channel.name} failed: {error!r}"))

    async def _begin(self, cluster: Cluster, connection: int, ready: Callable[[], Awaitable[None]]) -> int:
        async def find() -> int:
            if self.ready.ended:  # the channel was dropped, or the reader closed
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
        while not self.ready.ended:
            fetched = await self._fetch_next(cluster, connection, offset, ready)
            if fetched is None:
                return
            offset = fetched.next_offset  # past aborted batches too
            if fetched.batches:
                self.ready.put((fetched.batches, fetched.offset), fetched.size)
            while not self.ready.has_room():
                self._room.clear()
                await self._room.wait()

    async def _fetch_next(
        self, cluster: Cluster, connection: int, offset: int, ready: Callable[[], Awaitable[None]]
    ) -> Fetched | None:
        """The next batches, after as many attempts as it takes; None when closed meanwhile."""
        waiting = cluster.stalls.begin("read", self.channel.name)
        channel, doubtful = self.channel, False  # whether the topic may be gone
        try:
            while not self.ready.ended:
                try:
                    if doubtful:
                        await ready()
                    topic_id = channel.topic_id or NO_ID
                    return await fetch(
                        cluster, channel.topic, offset, connection, topic_id=topic_id, partition=channel.number
                    )
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
                    doubtful = faults.topic_unknown(error) or cluster.leader(*channel.place) is None
        finally:
            cluster.stalls.end(waiting)
        return None

    def _signal_room(self) -> None:
        """Let `run` go on, from any thread."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and `run` with it
                loop.call_soon_threadsafe(self._room.set)
