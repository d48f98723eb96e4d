"""What a client knows of its collections, or of its topics, and the order of what it writes to them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from ..runtime.catalog.catalog import Collection
from ..runtime.catalog.topics import Topic
from ..runtime.errors import DeadlineExceeded, TidewalError
from .deadlines import in_s, left_s
from .turns import Turns, Version

AGAIN_S = 0.1  # until the leader is asked again, where it does not know yet what an owner does

DescribedT = TypeVar("DescribedT", Collection, Topic)


class Described(Generic[DescribedT]):
    """Collections or topics by name, as the client has seen them last. `describe` asks for one within so many seconds,
    and lets it be known here."""

    def __init__(self, describe: Callable[[str, float], Awaitable[DescribedT]]) -> None:
        self._describe = describe
        self._known: dict[str, DescribedT] = {}
        self._turns = WeakValueDictionary[str, Turns]()  # while writes to the name are under way
        self._numbers = itertools.count(1)  # of writes, in the order of calls

    def get(self, name: str) -> DescribedT | None:
        """What has the name, where the client knows it."""
        return self._known.get(name)

    async def find(self, name: str, within_s: float) -> DescribedT:
        """What has the name. Raises what `describe` does."""
        return self._known.get(name) or await self._describe(name, within_s)

    def know(self, found: DescribedT) -> DescribedT:
        """The catalog has `found`, which is returned."""
        self._known[found.name] = found
        turns = self._turns.get(found.name)
        if turns is not None:
            turns.known(_version(found))
        return found

    def forget(self, over: DescribedT) -> None:
        """`over` is gone, or may be another version now."""
        known = self._known.get(over.name)
        if known is not None and _version(known) == _version(over):
            del self._known[over.name]

    def place(self, name: str) -> WritePlace[DescribedT]:
        """The place of a write to `name` that is called now."""
        return WritePlace(self, name, self._turns.setdefault(name, Turns()), next(self._numbers))


class WritePlace(Generic[DescribedT]):
    """The place of one write among the writes to a name."""

    def __init__(self, described: Described[DescribedT], name: str, turns: Turns, number: int) -> None:
        self._described, self._name, self._turns, self._number = described, name, turns, number

    @property
    def at_once(self) -> DescribedT | None:
        """What has the name, where it is known and no write that was called before has to go first."""
        return self._described.get(self._name) if self._turns.free else None

    async def in_turn(self, until: float, over: DescribedT | None = None) -> DescribedT:
        """What has the name, once all that was called before is on its way; `until` is a time of the loop. The caller
        writes without waiting before. `over` is known to be over: its successor is waited for. Raises
        `DeadlineExceeded`, and what describing it does."""
        try:
            async with asyncio.timeout_at(until), self._turns.turn(self._number):
                while True:
                    found = await self._found(until)
                    if found is None:
                        await asyncio.sleep(AGAIN_S)
                    elif over is not None and _version(found) == _version(over):
                        self._described.forget(over)
                        await asyncio.sleep(AGAIN_S)
                    elif await self._turns.first(self._number):
                        return found
        except TimeoutError as error:
            if isinstance(error, TidewalError):
                raise
            raise DeadlineExceeded(
                f"{self._name} was not described in time, or earlier writes to it are not done"
            ) from None

    async def _found(self, until: float) -> DescribedT | None:
        """What has the name; None where the leader does not know what became of its own question to the log.
        Nothing was written then, so the write does not end with that: it is asked again."""
        try:
            return await self._described.find(self._name, left_s(until))
        except TidewalError as error:
            if not (error.retryable and error.fields.get("outcome_unknown")) or in_s(AGAIN_S) >= until:
                raise
            return None

    @contextmanager
    def under_way(self, to: DescribedT) -> Generator[None]:
        """The block writes to `to`."""
        with self._turns.under_way(self._number, _version(to)):
            yield

    def refused(self, over: DescribedT) -> None:
        """`over` has refused the write, which is under way, for it is over."""
        self._turns.refused(_version(over))
        self._described.forget(over)


def _version(found: Collection | Topic) -> Version:
    return (found.id, found.epoch) if isinstance(found, Topic) else (found.id, found.schema.version)
