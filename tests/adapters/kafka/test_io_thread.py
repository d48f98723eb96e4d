"""The thread on which a log talks to its brokers."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tidewal.adapters.kafka import io_thread
from tidewal.adapters.kafka.io_thread import IoThread


async def test_stopping_leaves_no_connection_open_whose_other_end_is_silent():
    async def connect(port: int) -> asyncio.StreamWriter:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(bytes(16 * 2**20))  # more than fits between the two
        writer.close()
        return writer

    thread = IoThread("test")
    thread.start()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        writer = await thread.call(lambda: connect(silent.getsockname()[1]))
        connection = writer.get_extra_info("socket")
        assert connection.fileno() >= 0
        await thread.stop()
        assert connection.fileno() == -1


@pytest.mark.parametrize("ends", ["quit", "stop"])
async def test_a_task_that_loses_its_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch, ends: str):
    """As `asyncio.wait_for` of Python 3.11 loses it where what it waits for ends at that moment: the thread of a log
    that was closed would wait for ever, and the process with it."""
    lost = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def loses_one() -> None:
        for _ in range(2):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                loop.call_soon_threadsafe(lost.set)

    async def begin() -> None:
        thread.spawn(loses_one())

    monkeypatch.setattr(io_thread, "CANCEL_AGAIN_S", 0.01)
    thread = IoThread("test")
    thread.start()
    await thread.call(begin)
    async with asyncio.timeout(30):
        if ends == "quit":
            await thread.call(thread.quit)
        await thread.stop()
    assert lost.is_set()
