"""The order of a client's sends to one name of a topic, over the end of the topic that has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager


class SendTurns:
    """A send that is refused, for its topic is gone, goes on to the topic that has the name by then: before what was
    called after it, and behind what was called before it. `number`s say in which order sends were called."""

    def __init__(self) -> None:
        self._under_way: dict[int, int] = {}  # in the order of calls: number -> id of the topic
        self._gone: set[int] = set()  # ids of topics that have refused a send
        self._waiting: dict[int, asyncio.Event] = {}

    @property
    def free(self) -> bool:
        """Whether a new send may go at once: none before it waits, or will have to."""
        return not self._waiting and self._oldest_gone() is None

    def _oldest_gone(self) -> int | None:
        """The first send that is under way to a topic that is gone."""
        found = next((number for number, topic in self._under_way.items() if topic in self._gone), None)
        if found is None:
            self._gone.clear()
        return found

    @contextmanager
    def under_way(self, number: int, topic: int) -> Generator[None]:
        """The block sends to the topic of that id."""
        self._under_way[number] = topic
        try:
            yield
        finally:
            del self._under_way[number]
            self._wake()

    def refused(self, topic: int) -> None:
        """The topic of that id is gone. Call it while the send that was refused is under way."""
        self._gone.add(topic)

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncGenerator[None]:
        """The block runs when all that was called before has its turn behind it. What follows the block runs before the
        next turn, up to its first wait."""
        woken = self._waiting[number] = asyncio.Event()
        try:
            while not self._is_first(number):  # one that was called before may have been refused since it was woken
                woken.clear()
                await woken.wait()
            yield
        finally:
            del self._waiting[number]
            self._wake()

    def _is_first(self, number: int) -> bool:
        before = self._oldest_gone()
        return number == min(self._waiting) and (before is None or before > number)

    def _wake(self) -> None:
        if self._waiting:
            self._waiting[min(self._waiting)].set()
