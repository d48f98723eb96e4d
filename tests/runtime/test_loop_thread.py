"""An event loop on a thread, for a process without one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tidewal.runtime.errors import Unavailable
from tidewal.runtime.log.loop_thread import LoopThread


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("test-loop-thread")
    yield made
    if "test-loop-thread" in [thread.name for thread in threading.enumerate()]:
        made.end()


def test_it_runs_coroutines_and_raises_what_they_raise(loop):
    async def where() -> str:
        return threading.current_thread().name

    async def fail() -> None:
        raise Unavailable("gone")

    assert loop.run(where()) == "test-loop-thread"
    with pytest.raises(Unavailable):
        loop.run(fail())
    assert loop.run(where(), timeout_s=20) == "test-loop-thread"


def test_what_takes_too_long_is_cancelled_with_the_loop(loop):
    ended = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        loop.run(wait(), timeout_s=0.01)
    assert not ended.is_set()
    loop.end()
    assert ended.is_set()


def test_its_own_thread_does_not_wait_for_itself(loop):
    finished: list[str] = []

    async def finish(name: str) -> None:
        await asyncio.sleep(0)
        finished.append(name)

    async def on_the_loop() -> None:
        loop.finish(finish("later"))
        finished.append("first")
        await asyncio.wait(list(loop._later))

    loop.run(on_the_loop())
    loop.finish(finish("waited for"))
    assert finished == ["first", "later", "waited for"]
