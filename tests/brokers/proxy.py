"""Between clients and a broker: a proxy that holds what clients send, for as long as a test wants."""

from __future__ import annotations

import asyncio
from contextlib import suppress

PIECE_BYTES = 65536


class Proxy:
    """Between clients and one broker. What it holds reaches the broker later, also when the client has gone."""

    def __init__(self) -> None:
        self.broker_port = 0
        self._closed = asyncio.Event()  # what is held waits for this one
        self._open = asyncio.Event()
        self._open.set()
        self._new = self._open  # what new connections wait for
        self._gates: dict[asyncio.StreamReader, asyncio.Event] = {}
        self._deaf: set[asyncio.StreamReader] = set()  # clients that get no answer
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """The port where it listens."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    def hold(self) -> None:
        """Keep what clients send from now on."""
        if self._closed.is_set():
            self._closed = asyncio.Event()
        self._new = self._closed
        self._gates = dict.fromkeys(self._gates, self._closed)

    def pass_new(self) -> None:
        """Let new connections through; what was held stays held."""
        self._new = self._open

    def release(self) -> None:
        """Send what was held."""
        self._closed.set()

    def lose_answers(self) -> None:
        """Let nothing of what the broker answers on the connections of now reach the clients."""
        self._deaf.update(self._gates)

    def cut(self) -> None:
        """End all connections of now without a farewell."""
        for writer in self._writers:
            writer.transport.abort()

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, client: asyncio.StreamReader, back_to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._gates[client] = self._new
        from_broker, to_broker = await asyncio.open_connection("127.0.0.1", self.broker_port)
        writers = {to_broker, back_to_client}
        self._writers |= writers
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(client, to_broker, client))
                both.create_task(self._pump(from_broker, back_to_client, client))
        finally:
            self._writers -= writers
            to_broker.transport.abort()
            back_to_client.transport.abort()

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, client: asyncio.StreamReader
    ) -> None:
        with suppress(OSError):
            while data := await source.read(PIECE_BYTES):
                await self._gates.get(source, self._open).wait()
                if source is client or client not in self._deaf:
                    target.write(data)
            target.close()
