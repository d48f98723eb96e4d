"""`Wal.read`: entries of one channel, decoded where they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...runtime.wakeup import Hub
from ...runtime.wal import Entry, Start
from .feed import Feed
from .fetching import entries
from .topics import largest_unpacked


class Source(Protocol):
    """What a reader needs of the log."""

    async def feed(self, channel: str, start: Start) -> Feed | None:
        """Begin to fetch; None when the log is closed. Raises `ChannelNotFound`."""
        ...

    def leave(self, feed: Feed) -> None:
        """It is not needed any more."""
        ...

    def hub(self) -> Hub: ...


class Reader:
    """An async iterator of batches. One task at a time may await it; `aclose` may come from any."""

    def __init__(self, source: Source, channel: str, start: Start) -> None:
        self._source, self._channel, self._start = source, channel, start
        self._feed: Feed | None = None
        self._closed = False

    def __aiter__(self) -> Reader:
        return self

    async def __anext__(self) -> Sequence[Entry]:
        while not self._closed:
            if self._feed is None:
                self._feed = await self._source.feed(self._channel, self._start)
                if self._feed is None:
                    break
            taken = self._feed.take()
            if taken is None:
                await self._feed.wait(self._source.hub())
            else:
                channel = self._feed.channel
                if found := entries(*taken, channel.prefix, largest_unpacked(channel.policy)):
                    return found
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the iteration, also for a task that is waiting in it."""
        self._closed = True
        if self._feed is not None:
            self._source.leave(self._feed)
