"""What blocks runs on a worker thread, which has ended when the task that waits for it ends."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tidewal.actors.node import in_thread


async def test_a_task_that_is_cancelled_waits_for_its_thread():
    began, may_end, ended = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def call() -> None:
        loop.call_soon_threadsafe(began.set)
        may_end.wait()
        ended.set()
        raise OSError("of the thread, after all")

    task = asyncio.create_task(in_thread(call))
    await began.wait()
    task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_what_the_call_returns_and_raises_is_passed_on():
    assert await in_thread(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)
