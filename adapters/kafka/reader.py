"""`Wal.read`: entries of one channel, decoded where they are read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from ...runtime.errors import Closed, TidewalError
from ...runtime.log.wal import Entry, Start
from .channel_fetcher import ChannelFetcher
from .fetching import entries, foreign_entries, readable
from .topics import largest_unpacked

if TYPE_CHECKING:
    from .wal import KafkaWal


class Reader(AsyncIterator[Sequence[Entry]]):
    """An async iterator of batches. One task at a time may await it; `aclose` may come from any."""

    def __init__(self, wal: KafkaWal, channel: str, start: Start) -> None:
        self._wal, self._channel, self._start = wal, channel, start
        self._fetcher: ChannelFetcher | None = None
        self._closed = False
        self._unreadable: TidewalError | None = None  # raised behind what was read before it

    async def __anext__(self) -> Sequence[Entry]:
        while not self._closed:
            if self._unreadable is not None:
                raise self._unreadable
            if self._fetcher is None:
                self._fetcher = await self._wal.open_fetcher(self._channel, self._start)
                if self._fetcher is None:
                    break
            try:
                taken = self._fetcher.ready.take()
            except Closed:
                break
            if taken is None:
                await self._fetcher.ready.wait(self._wal.notifier())
            else:
                channel = self._fetcher.channel
                decode = foreign_entries if channel.foreign else entries
                found, self._unreadable = readable(decode, *taken, channel.prefix, largest_unpacked(channel.policy))
                if found:
                    return found
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the iteration, also for a task that is waiting in it."""
        self._closed = True
        if self._fetcher is not None:
            self._wal.close_fetcher(self._fetcher)
