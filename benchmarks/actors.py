"""What an actor costs: packs through a pipeline, and questions with an answer.

Run `python -m benchmarks.actors` or `python benchmarks/actors.py` from the repository root; about 10 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import uvloop
import xxhash

from tidewal.runtime.actor import Actor, ActorRef, ActorSystem

try:
    from benchmarks.report import figure, interleaved, per_second
except ImportError:  # run as a script: the folder of the script is on the path, the repository root is not
    from report import figure, interleaved, per_second

PACKS = 600
PACK_SIZE = 1_000
BODY = 1024
ASKS = 200_000
OUTSTANDING = 64


# ---- a pipeline of packs --------------------------------------------------------------------------------------------


class Source(Actor):
    """Sends the packs of its input on, waiting for room."""

    def __init__(self, packs: list[list[bytes]], following: ActorRef) -> None:
        self.packs = packs
        self.following = following

    async def _read(self) -> AsyncIterator[list[bytes]]:
        for pack in self.packs:
            yield pack

    def inputs(self) -> tuple[AsyncIterator[list[bytes]]]:
        return (self._read(),)

    async def on_pack(self, pack: object) -> None:
        await self.following.send(pack)


class Hash(Actor):
    """Maps each pack of bodies to their hashes."""

    def __init__(self, following: ActorRef) -> None:
        self.following = following

    async def on_message(self, message: Any) -> None:
        digest = xxhash.xxh3_64_intdigest
        await self.following.send([digest(body) for body in message])


class Count(Actor):
    """Counts what it is given, up to an expected number."""

    def __init__(self, expected: int, counted: asyncio.Future[int]) -> None:
        self.expected = expected
        self.counted = counted
        self.count = 0
        self.sum = 0

    async def on_message(self, message: Any) -> None:
        self.count += len(message)
        self.sum += message[0]
        if self.count == self.expected:
            self.counted.set_result(self.sum)


def make_packs() -> list[list[bytes]]:
    """Packs of different bodies: 4 MiB of them, used again and again, so that memory and cache are as in real use."""
    bodies = [number.to_bytes(8, "big") * (BODY // 8) for number in range(4_096)]
    return [[bodies[(number + row) % len(bodies)] for row in range(PACK_SIZE)] for number in range(PACKS)]


def pipeline(packs: list[list[bytes]]) -> float:
    """Messages per second through three actors."""

    async def run() -> None:
        async with ActorSystem() as system:
            counted: asyncio.Future[int] = system.loop.create_future()
            count = await system.spawn(lambda: Count(PACKS * PACK_SIZE, counted), name="count", mailbox_size=16)
            hash_ = await system.spawn(lambda: Hash(count), name="hash", mailbox_size=16)
            await system.spawn(lambda: Source(packs, hash_), name="source")
            await counted

    return per_second(PACKS * PACK_SIZE, lambda: uvloop.run(run()))


def bare_loop(packs: list[list[bytes]]) -> float:
    """Messages per second through the same work without actors."""

    def run() -> None:
        digest = xxhash.xxh3_64_intdigest
        count = total = 0
        for pack in packs:
            digests = [digest(body) for body in pack]
            count += len(digests)
            total += digests[0]

    return per_second(PACKS * PACK_SIZE, run)


# ---- questions and answers ------------------------------------------------------------------------------------------


class Echo(Actor):
    """Answers with the question."""

    async def on_message(self, message: object) -> object:
        return message


def ask_actor() -> float:
    """Asks per second of one actor, each with a deadline."""

    async def run() -> None:
        async with ActorSystem() as system:
            echo = await system.spawn(Echo, name="echo")

            async def asker() -> None:
                for number in range(ASKS // OUTSTANDING):
                    await echo.ask(number, deadline_s=5.0)

            await asyncio.gather(*(asker() for _ in range(OUTSTANDING)))

    return per_second(ASKS, lambda: uvloop.run(run()))


def ask_queue(deadline_s: float | None) -> float:
    """The same with an `asyncio.Queue` and a future per question; a deadline is what `asyncio.timeout` gives."""

    async def run() -> None:
        queue: asyncio.Queue[tuple[object, asyncio.Future[object]]] = asyncio.Queue(1024)
        loop = asyncio.get_running_loop()

        async def echo() -> None:
            while True:
                message, answer = await queue.get()
                answer.set_result(message)

        async def ask(message: object) -> object:
            answer: asyncio.Future[object] = loop.create_future()
            await queue.put((message, answer))
            return await answer

        async def asker() -> None:
            for number in range(ASKS // OUTSTANDING):
                if deadline_s is None:
                    await ask(number)
                else:
                    async with asyncio.timeout(deadline_s):
                        await ask(number)

        echoing = asyncio.create_task(echo())
        await asyncio.gather(*(asker() for _ in range(OUTSTANDING)))
        echoing.cancel()

    return per_second(ASKS, lambda: uvloop.run(run()))


def main() -> None:
    """Measure and print."""
    packs = make_packs()
    rates = interleaved({"actors": lambda: pipeline(packs), "loop": lambda: bare_loop(packs)})
    actors, loop = rates["actors"], rates["loop"]
    beside = {"bare_loop": loop.median, "ratio": actors.median / loop.median}
    figure("actors.pipeline.packs", actors.median, "messages/s", actors.spread, beside)

    rates = interleaved(
        {"actors": ask_actor, "queue": lambda: ask_queue(None), "queue_timeout": lambda: ask_queue(5.0)}, rounds=3
    )
    asks = rates["actors"]
    beside = {
        "asyncio.Queue": rates["queue"].median,
        "asyncio.Queue+asyncio.timeout": rates["queue_timeout"].median,
    }
    figure("actors.ask.local", asks.median, "asks/s", asks.spread, beside)


if __name__ == "__main__":
    main()
