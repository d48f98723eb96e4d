"""The thread on which a log talks to its brokers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from unittest.mock import Mock

import pytest

from tidewal.adapters.kafka import io_thread
from tidewal.adapters.kafka.cluster import CLOSE_S, Cluster
from tidewal.adapters.kafka.io_thread import IoThread
from tidewal.adapters.kafka.options import KafkaOptions
from tidewal.runtime.log.stalls import StallWatch
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.testing.clock import run_virtual


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


def test_connections_that_do_not_close_hold_up_nobody_whatever_loses_a_cancellation() -> None:
    """The library swallows the cancellation of its `close` while a task of its own, that has lost one, does not end."""

    async def loses_one() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    class Silent(Cluster):
        def __init__(self, losing: asyncio.Task[None], closed: asyncio.Future[None]) -> None:
            super().__init__(KafkaOptions("nowhere:9092"), StallWatch(Metrics()))
            self._client._sync_task = losing
            self._client._conns = {"silent": Mock(close=Mock(return_value=closed))}

    async def close() -> float:
        loop = asyncio.get_running_loop()
        losing, closed = asyncio.create_task(loses_one()), loop.create_future()
        cluster = Silent(losing, closed)
        await asyncio.sleep(0)
        began_s = loop.time()
        async with asyncio.timeout(60):
            await cluster.close()
        took_s = loop.time() - began_s
        losing.cancel()  # as the end of the I/O thread does
        closed.set_result(None)
        return took_s

    assert run_virtual(close()) == CLOSE_S
