"""Streams as inputs."""

from __future__ import annotations

import asyncio

import pytest

from tidewal.runtime.actor import Actor
from tidewal.runtime.actor.life import PACKS_READ_AHEAD


class Stream:
    """Packs 0 to `count` - 1 from a position on; afterwards it ends, fails or waits."""

    def __init__(self, count: int, then: str = "end") -> None:
        self.count = count
        self.then = then
        self.read = 0
        self.opened = 0
        self.closed = 0

    async def packs(self, position: int):
        self.opened += 1
        try:
            for number in range(position, self.count):
                self.read += 1
                yield number
            if self.then == "fail":
                self.then = "end"
                raise ConnectionError("stream")
            if self.then == "wait":
                await asyncio.get_running_loop().create_future()
        finally:
            self.closed += 1


class Reader(Actor):
    """Commits what it has handled, crashes once at a given pack."""

    def __init__(self, stream: Stream, handled: list[object], crash_at: set[int] | None = None) -> None:
        self.stream = stream
        self.handled = handled
        self.crash_at = crash_at if crash_at is not None else set()
        self.gate: asyncio.Future[None] | None = None

    def inputs(self):
        committed = [pack for pack in self.handled if isinstance(pack, int)]
        return (self.stream.packs(len(committed)),)

    async def on_pack(self, pack: object) -> None:
        if pack in self.crash_at:
            self.crash_at.discard(pack)
            raise RuntimeError(f"pack {pack}")
        self.handled.append(pack)
        if self.gate is not None:
            await self.gate

    async def on_message(self, message: object) -> object:
        self.handled.append(message)
        return message


async def test_packs_arrive_in_order_and_all(system, kit):
    handled: list[object] = []
    stream = Stream(1000, then="wait")
    ref = await system.spawn(Reader(stream, handled), name="a")
    await kit.until(lambda: len(handled) == 1000)
    assert handled == list(range(1000))
    await system.stop(ref)
    assert stream.closed == 1


async def test_an_input_reads_only_a_little_ahead_and_messages_come_between(system, kit):
    handled: list[object] = []
    stream = Stream(1000)
    reader = Reader(stream, handled)
    reader.gate = asyncio.get_running_loop().create_future()
    ref = await system.spawn(reader, name="a")
    await kit.settle()
    ref.tell("message")
    await kit.settle()
    assert handled == [0]
    assert stream.read == 1 + PACKS_READ_AHEAD + 1  # handled, waiting in the mailbox, in the reader's hand
    reader.gate.set_result(None)
    await kit.settle()
    assert "message" in handled[: 2 + PACKS_READ_AHEAD]


async def test_stopping_closes_an_input_that_waits_for_room(system, kit):
    handled: list[object] = []
    stream = Stream(1000)
    reader = Reader(stream, handled)
    reader.gate = asyncio.get_running_loop().create_future()
    ref = await system.spawn(reader, name="a")
    await kit.settle()
    stopping = asyncio.create_task(system.stop(ref))
    await kit.settle()
    reader.gate.set_result(None)
    await stopping
    assert stream.closed == 1
    assert handled == list(range(1 + PACKS_READ_AHEAD))  # what it had taken in was handled


@pytest.mark.asyncio(loop_factories=["virtual"])
async def test_a_restart_resumes_where_the_last_life_had_committed(system, kit):
    handled: list[object] = []
    stream = Stream(100)
    crash_at = {7, 50, 99}
    await system.spawn(lambda: Reader(stream, handled, crash_at), name="a")
    await kit.elapse(10)
    assert handled == list(range(100))
    assert (stream.opened, stream.closed) == (4, 4)


@pytest.mark.asyncio(loop_factories=["virtual"])
async def test_a_failing_input_crashes_its_actor(system, kit, recorder):
    handled: list[object] = []
    stream = Stream(10, then="fail")
    await system.spawn(lambda: Reader(stream, handled), name="a")
    await kit.elapse(10)
    assert handled == list(range(10))
    assert [event[2] for event in recorder.named("crashed")] == ["ConnectionError('stream')"]
