"""Between clients and a broker: a proxy that holds, delays and cuts what passes, for as long as a test wants."""

from __future__ import annotations

import asyncio
from contextlib import suppress

PIECE_BYTES = 65536


class Proxy:
    """Between clients and one broker. What it holds reaches the broker later, also when the client has gone."""

    def __init__(self) -> None:
        self.broker_port = 0  # may be set after `start`
        self.delay_s = 0.0  # each piece waits so long, in both directions
        self._silent = False  # no client gets an answer
        self._unanswered: bytes | None = None  # the first client that sends this gets no answer any more
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

    def lose_answers_to(self, request: bytes) -> None:
        """Let no answer reach the first client that sends `request` (in one piece), from then on."""
        self._unanswered = request

    def half_close(self) -> None:
        """Connections stay open, those to come too, and no answer reaches a client any more, until `restore`."""
        self._silent = True

    def restore(self) -> None:
        """Neither delay nor silence from now on; half-closed connections end."""
        self.delay_s = 0.0
        if self._silent:
            self._silent = False
            self.cut()

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
        task.add_done_callback(self._tasks.discard)
        try:
            from_broker, to_broker = await asyncio.open_connection("127.0.0.1", self.broker_port)
        except OSError:  # the broker is away, and so is its proxy
            back_to_client.transport.abort()
            return
        self._gates[client] = self._new
        writers = {to_broker, back_to_client}
        self._writers |= writers
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(client, to_broker, client))
                both.create_task(self._pump(from_broker, back_to_client, client))
        finally:
            self._writers -= writers
            del self._gates[client]
            self._deaf.discard(client)
            to_broker.transport.abort()
            back_to_client.transport.abort()

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, client: asyncio.StreamReader
    ) -> None:
        with suppress(OSError):
            while data := await source.read(PIECE_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._gates.get(source, self._open).wait()
                if source is client and self._unanswered is not None and self._unanswered in data:
                    self._deaf.add(client)
                    self._unanswered = None
                if source is client or not (self._silent or client in self._deaf):
                    target.write(data)
            target.close()
