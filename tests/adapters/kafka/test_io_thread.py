"""The thread on which a log talks to its brokers."""

from __future__ import annotations

import asyncio

from tidewal.adapters.kafka.io_thread import IoThread


async def test_stopping_leaves_no_connection_open_whose_other_end_is_silent():
    async def connect(port: int) -> asyncio.StreamWriter:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(bytes(16 * 2**20))  # more than fits between the two
        writer.close()
        return writer

    silent = asyncio.Event()
    server = await asyncio.start_server(lambda _, __: silent.wait(), "127.0.0.1")
    thread = IoThread("test")
    thread.start()
    writer = await thread.call(lambda: connect(server.sockets[0].getsockname()[1]))
    socket = writer.get_extra_info("socket")
    assert socket.fileno() >= 0
    await thread.stop()
    assert socket.fileno() == -1
    silent.set()
    server.close()
    await server.wait_closed()
