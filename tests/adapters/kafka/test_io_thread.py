"""The thread on which a log talks to its brokers."""

from __future__ import annotations

import asyncio
import socket

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
