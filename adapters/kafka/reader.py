"""`Wal.read`: entries of one channel, decoded where they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...runtime.errors import Closed
from ...runtime.log.wal import Entry, Start
from ...runtime.loop_bridge import LoopNotifier
from .channel_fetcher import ChannelFetcher
from .fetching import entries
from .topics import largest_unpacked


class ReaderSource(Protocol):
    """What a reader needs of the log."""

    async def open_fetcher(self, channel: str, start: Start) -> ChannelFetcher | None:
        """Begin to fetch a channel from `start`; None when the log is closed. Raises `ChannelNotFound`."""
        ...

    def close_fetcher(self, fetcher: ChannelFetcher) -> None:
        """Stop fetching; the fetcher is not needed any more."""
        ...

    def notifier(self) -> LoopNotifier: ...


class Reader:
    """An async iterator of batches. One task at a time may await it; `aclose` may come from any."""

    def __init__(self, source: ReaderSource, channel: str, start: Start) -> None:
        self._source, self._channel, self._start = source, channel, start
        self._fetcher: ChannelFetcher | None = None
        self._closed = False

    def __aiter__(self) -> Reader:
        return self

    async def __anext__(self) -> Sequence[Entry]:
        while not self._closed:
            if self._fetcher is None:
                self._fetcher = await self._source.open_fetcher(self._channel, self._start)
                if self._fetcher is None:
                    break
            try:
                taken = self._fetcher.ready.take()
            except Closed:
                break
            if taken is None:
                await self._fetcher.ready.wait(self._source.notifier())
            else:
                channel = self._fetcher.channel
                if found := entries(*taken, channel.prefix, largest_unpacked(channel.policy)):
                    return found
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the iteration, also for a task that is waiting in it."""
        self._closed = True
        if self._fetcher is not None:
            self._source.close_fetcher(self._fetcher)
