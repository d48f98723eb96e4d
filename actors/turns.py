"""The order of a client's writes to one name, over the end of the collection, the topic or its epoch that has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeAlias

Version: TypeAlias = tuple[int, int]
"""What a write is to: the id of what has the name, and its epoch or the version of its schema."""


class Turns:
    """A write that is refused, for what it is to is over, goes on to what has the name by then: before what was called
    after it, and behind what was called before it. `number`s say in which order writes were called."""

    def __init__(self) -> None:
        self._under_way: dict[int, Version] = {}  # in the order of calls
        self._over: set[Version] = set()  # a write to one of these may be refused, and come again
        self._waiting: dict[int, asyncio.Event] = {}

    @property
    def free(self) -> bool:
        """Whether a new write may go at once: none before it waits, or will have to."""
        return not self._waiting and self._oldest_over() is None

    def _oldest_over(self) -> int | None:
        """The first write that is under way to a version that is over."""
        if not self._over:
            return None
        found = min((number for number, version in self._under_way.items() if version in self._over), default=None)
        if found is None:
            self._over.clear()
        return found

    @contextmanager
    def under_way(self, number: int, version: Version) -> Generator[None]:
        """The block writes to `version`."""
        self._under_way[number] = version
        try:
            yield
        finally:
            del self._under_way[number]
            self._wake()

    def refused(self, version: Version) -> None:
        """`version` is over. Call it while the write that was refused is under way."""
        self._over.add(version)

    def known(self, version: Version) -> None:
        """The name has `version`: what is under way to others may be refused."""
        self._over.update(set(self._under_way.values()) - {version})

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncGenerator[None]:
        """The block runs when all that was called before has its turn behind it, and has it until its end; it asks
        `first` whether it still has after each wait of its own. What follows the block runs before the next turn, up to
        its first wait."""
        self._waiting[number] = asyncio.Event()
        try:
            await self.first(number)
            yield
        finally:
            del self._waiting[number]
            self._wake()

    async def first(self, number: int) -> bool:
        """Wait until it is the turn of `number`, which waits; returns whether it was at once."""
        at_once = self._is_first(number)
        while not self._is_first(number):  # one that was called before may have been refused since it was woken
            self._waiting[number].clear()
            await self._waiting[number].wait()
        return at_once

    def _is_first(self, number: int) -> bool:
        before = self._oldest_over()
        return number == min(self._waiting) and (before is None or before > number)

    def _wake(self) -> None:
        if self._waiting:
            self._waiting[min(self._waiting)].set()
