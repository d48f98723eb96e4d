"""Marks of positions that transactions may move: `PositionMarks`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager


class PositionMarks:
    """Which token of a fence (`cluster/decided_positions.py`) is to be stored with the positions of one member, by
    channel. Each store of metadata has it from `set` on, and none that was made before comes behind that: those of this
    assignment are waited for, and those of an earlier one, which its end has decided or refuses, are not."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._storing: dict[str, set[object]] = {}  # by channel: what is made and not stored in this assignment
        self._stored = asyncio.Event()

    def of(self, channel: str, stored: int) -> int:
        """The token to store now, where `stored` is, as far as the member knows."""
        return self._tokens.get(channel, stored)

    def forget(self, channel: str) -> None:
        """Another assignment of the channel begins."""
        self._tokens.pop(channel, None)
        self._storing.pop(channel, None)
        self._notify()

    @asynccontextmanager
    async def storing(self, channels: Collection[str]) -> AsyncGenerator[None]:
        """The block makes metadata of these channels, and stores it."""
        store, ways = object(), [self._storing.setdefault(channel, set()) for channel in channels]
        for under_way in ways:
            under_way.add(store)
        try:
            yield
        finally:
            for under_way in ways:
                under_way.remove(store)
            self._notify()

    async def set(self, channel: str, token: int) -> None:
        """Have `token` stored from now on; returns once all that was made before is."""
        self._tokens[channel] = token
        while self._storing.get(channel):
            await self._stored.wait()

    def _notify(self) -> None:
        self._stored.set()
        self._stored = asyncio.Event()
