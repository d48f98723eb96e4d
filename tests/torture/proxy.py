"""Between clients and a broker: a proxy that delays, cuts and half-closes their connections."""

from __future__ import annotations

import asyncio
import contextlib

PIECE_BYTES = 65536


class FaultyProxy:
    """Passes on what it gets, but for the faults. `broker_port` may be set after `start`."""

    def __init__(self) -> None:
        self.broker_port = 0
        self.delay_s = 0.0  # each piece waits so long, in both directions
        self._silenced = False  # new pieces of the broker do not reach the clients
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """The port where it listens."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """End all connections, as a reset does."""
        for pair in list(self._pairs):
            for writer in pair:
                writer.transport.abort()

    def half_close(self) -> None:
        """Clients' connections stay open, and no answer comes back any more, until `restore`."""
        self._silenced = True

    def restore(self) -> None:
        """No fault from now on; half-closed connections end."""
        self.delay_s = 0.0
        if self._silenced:
            self._silenced = False
            self.cut()

    async def stop(self) -> None:
        """End it with its connections."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError):
            broker, to_broker = await asyncio.open_connection("127.0.0.1", self.broker_port)
            pair = (to_client, to_broker)
            self._pairs.add(pair)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pump(client, to_broker, answers=False))
                    both.create_task(self._pump(broker, to_client, answers=True))
            finally:
                self._pairs.discard(pair)
                to_broker.transport.abort()
        to_client.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(PIECE_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if answers and self._silenced:
                    continue
                target.write(data)
                await target.drain()
        target.close()
