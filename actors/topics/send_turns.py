"""The order of a client's sends to one name of a topic, over the end of the topic, or of its epoch, that has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

from ...runtime.catalog.topics import Topic


class TopicVersion(NamedTuple):
    """What a send is to: the topic of this id, in this epoch."""

    id: int
    epoch: int

    @classmethod
    def of(cls, topic: Topic) -> TopicVersion:
        """The version that takes messages."""
        return cls(topic.id, topic.epoch)


class SendTurns:
    """A send that is refused, for its topic or its epoch is over, goes on to what has the name by then: before what was
    called after it, and behind what was called before it. `number`s say in which order sends were called."""

    def __init__(self) -> None:
        self._under_way: dict[int, TopicVersion] = {}  # in the order of calls
        self._over: set[TopicVersion] = set()  # a send to one of these may be refused, and come again
        self._waiting: dict[int, asyncio.Event] = {}

    @property
    def free(self) -> bool:
        """Whether a new send may go at once: none before it waits, or will have to."""
        return not self._waiting and self._oldest_over() is None

    def _oldest_over(self) -> int | None:
        """The first send that is under way to a version that is over."""
        if not self._over:
            return None
        found = min((number for number, version in self._under_way.items() if version in self._over), default=None)
        if found is None:
            self._over.clear()
        return found

    @contextmanager
    def under_way(self, number: int, topic: Topic) -> Generator[None]:
        """The block sends to the topic, as it is."""
        self._under_way[number] = TopicVersion.of(topic)
        try:
            yield
        finally:
            del self._under_way[number]
            self._wake()

    def refused(self, topic: Topic) -> None:
        """The topic, or its epoch, is over. Call it while the send that was refused is under way."""
        self._over.add(TopicVersion.of(topic))

    def known(self, topic: Topic) -> None:
        """The name has this version of a topic: what is under way to others may be refused."""
        self._over.update(set(self._under_way.values()) - {TopicVersion.of(topic)})

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
