"""Actors as a user writes them, for mypy and pyright in their strict modes: `tests/test_types.py` runs both over this.

A line with `type: ignore` is one that they must refuse: an ignore that is not needed is an error of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Never, assert_type

import tidewal


@dataclass(frozen=True)
class Add:
    """So many pieces of an article arrived."""

    article: str
    pieces: int


class Bare(tidewal.Actor):
    """Says nothing of types but in its handlers."""

    async def on_pack(self, pack: tidewal.MsgPack) -> None:
        self.after(1.0, len(pack.messages))

    async def on_message(self, message: str | int) -> float:
        return float(message)


class Stock(tidewal.Actor[Add | str, int | None, tidewal.MsgPack]):
    """Says all of its types, so that its handlers, inputs, timers and answers are checked against each other."""

    def __init__(self, stream: tidewal.TtMsgStream, articles: dict[str, int]) -> None:
        self._stream, self._articles = stream, articles

    def inputs(self) -> list[tidewal.TtMsgStream]:
        return [self._stream]

    async def on_start(self) -> None:
        self.every(1.0, Add("screw", 1))
        self.every(1.0, 17)  # type: ignore[arg-type]
        self.ref.tell("screw")
        self.ref.tell(17)  # type: ignore[arg-type]

    async def on_pack(self, pack: tidewal.MsgPack) -> None:
        for record in pack.messages:
            self._articles[bytes(record.key).decode()] = len(record.body)

    async def on_message(self, message: Add | str) -> int | None:
        if isinstance(message, Add):
            self._articles[message.article] = self._articles.get(message.article, 0) + message.pieces
            return None
        return self._articles.get(message)


class Later(tidewal.Actor[str, int]):
    """Answers when it likes."""

    async def on_message(self, message: str) -> int | tidewal.Deferred[int]:
        answer = self.deferred()
        answer.resolve("two")  # type: ignore[arg-type]
        answer.resolve(2)
        return answer


class Counts(tidewal.Actor[Never, None, int]):
    """Reads numbers, and takes no messages."""

    def inputs(self) -> list[AsyncIterator[int]]:
        return [_numbers()]

    async def on_pack(self, pack: int) -> None: ...


class WrongPack(tidewal.Actor[str, int, tidewal.MsgPack]):
    """Its handlers are not those of its types."""

    async def on_pack(self, pack: str) -> None: ...  # type: ignore[override]

    async def on_message(self, message: str) -> str:  # type: ignore[override]
        return message


def add(adds: tidewal.ActorRef[Add, object]) -> None:
    """Takes the address of any actor that takes an `Add`."""
    adds.tell(Add("screw", 1))
    adds.tell("screw")  # type: ignore[arg-type]


async def _numbers() -> AsyncIterator[int]:
    yield 1


async def main(stream: tidewal.TtMsgStream) -> None:
    """What `spawn` returns, and what an `ask` then answers."""
    async with tidewal.ActorSystem() as system:
        bare = await system.spawn(Bare, name="bare")
        assert_type(bare, tidewal.ActorRef[str | int, float])
        assert_type(await bare.ask("1"), float)
        await bare.ask(b"1")  # type: ignore[arg-type]
        bare.tell(b"1")  # type: ignore[arg-type]

        stock = await system.spawn(lambda: Stock(stream, {}), name="stock")
        assert_type(stock, tidewal.ActorRef[Add | str, int | None])
        assert_type(await stock.ask("screw", deadline_s=1.0), int | None)
        assert_type(await system.spawn(Stock(stream, {}), name="one"), tidewal.ActorRef[Add | str, int | None])
        assert_type(await system.spawn(partial(Stock, stream, {}), name="p"), tidewal.ActorRef[Add | str, int | None])
        add(stock)
        await system.stop(stock)

        later = await system.spawn(Later, name="later")
        assert_type(await later.ask("when"), int)
        counts = await system.spawn(Counts, name="counts", supervision=tidewal.Supervision(restarts=1))
        counts.tell("1")  # type: ignore[arg-type]
        await system.spawn(dict, name="no actor")  # type: ignore[arg-type]

        untyped: tidewal.ActorRef = stock
        assert_type(await untyped.ask(b"anything"), Any)
