"""Serve the reading side of a directory to other processes, on a thread and loop of its own.

The protocol is in `runtime/remote.py`. A client can cost no more than one answer's memory: requests are answered one at
a time per connection, and a client that neither sends the rest of a request nor takes its answer is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from ...runtime.errors import BadRecord, Closed, InvalidRequest, Overloaded, TidewalError, Unavailable, to_wire
from ...runtime.remote import (
    ANSWER_BYTES,
    LENGTH,
    REQUEST_BYTES,
    SOCKET_NAME,
    WAIT_LIMIT_S,
    decode_start,
    encode_policy,
    pack,
    socket_path,
    unpack,
)
from ...runtime.wal import ChannelInfo, Entry
from .channels import encode_id
from .reader import Reader, Source

MAX_CONNECTIONS = 64
IDLE_S = 600.0
STALLED_S = 30.0

_log = logging.getLogger(__name__)


class Served(Source, Protocol):
    """What the server asks of the store."""

    async def channels(self) -> list[str]: ...

    async def describe(self, channel: str) -> ChannelInfo: ...

    async def latest_id(self, channel: str) -> bytes | None: ...

    async def id_at(self, channel: str, timestamp: int) -> bytes | None: ...


class Server:
    """The socket of one directory. `start` and `stop` block."""

    def __init__(self, store: Served, directory: str) -> None:
        self._store, self._directory = store, directory
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="tidewal-socket", daemon=True)

    def start(self) -> None:
        """Listen, and answer from another thread. Raises `OSError`."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self.remove()
            os.fchmod(self._listener.fileno(), 0o600)  # before bind: the file is never open to others
            with socket_path(self._directory) as path:
                self._listener.bind(path)
            self._listener.listen(MAX_CONNECTIONS)
            self._listener.setblocking(False)
        except BaseException:
            self._listener.close()
            self._loop.close()
            raise
        self._thread.start()

    def stop(self) -> None:
        """Cut all connections and remove the socket."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        self.remove()

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._directory, SOCKET_NAME))

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_unix_server(self._accept, sock=self._listener, limit=REQUEST_BYTES)
        await self._stopping.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # let the transports close

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) > MAX_CONNECTIONS:
                error = Overloaded(f"{MAX_CONNECTIONS} connections are open", limit="connections")
                await self._send(writer, ["error", to_wire(error)])
            else:
                await self._converse(reader, writer)
        except (OSError, TimeoutError, EOFError, asyncio.CancelledError):
            pass  # the client left or stalled, or the log closes: either way the connection ends here
        except Exception:
            _log.exception("a connection to the log failed")
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            async with asyncio.timeout(IDLE_S):
                head = await reader.readexactly(LENGTH.size)
            (size,) = LENGTH.unpack(head)
            if size > REQUEST_BYTES:
                error = BadRecord(f"a request of {size} bytes is over the limit of {REQUEST_BYTES}", reason="size")
                await self._send(writer, ["error", to_wire(error)])
                return
            async with asyncio.timeout(STALLED_S):
                body = await reader.readexactly(size)
            await self._send(writer, await self._answer(body))

    async def _send(self, writer: asyncio.StreamWriter, answer: object) -> None:
        writer.write(pack(answer))
        async with asyncio.timeout(STALLED_S):
            await writer.drain()

    async def _answer(self, body: bytes) -> list[object]:
        try:
            return ["ok", await self._result(unpack(body))]
        except Closed:
            return ["error", to_wire(Unavailable(f"the owner of {self._directory} is closing", path=self._directory))]
        except TidewalError as error:
            return ["error", to_wire(error)]

    async def _result(self, request: Any) -> object:
        match request:
            case ["channels"]:
                return await self._store.channels()
            case ["describe", str(channel)]:
                info = await self._store.describe(channel)
                return [encode_policy(info.policy), info.first_id, info.latest_id]
            case ["latest_id", str(channel)]:
                return await self._store.latest_id(channel)
            case ["id_at", str(channel), int(timestamp)]:
                return await self._store.id_at(channel, timestamp)
            case ["read", str(channel), start, bytes() | None as upto, int() | float() as wait_s]:
                return await self._read(channel, start, upto, wait_s)
            case _:
                raise InvalidRequest("the request does not fit the protocol")

    async def _read(self, channel: str, start: Any, upto: bytes | None, wait_s: float) -> object:
        try:
            reader = Reader(self._store, channel, decode_start(start))
        except ValueError:
            raise InvalidRequest("the request names no start that the protocol knows") from None
        entries = await reader.poll()
        if not entries and wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, WAIT_LIMIT_S)):
                    await reader.wait()
            entries = await reader.poll()
        rows, next_id = _cut(entries, upto, reader.position)
        return [rows, encode_id(next_id), await self._store.latest_id(channel)]


def _cut(entries: Sequence[Entry], upto: bytes | None, next_id: int) -> tuple[list[Entry], int]:
    """As many entries as an answer takes, and the id to go on with."""
    rows: list[Entry] = []
    size = 0
    for entry in entries:
        if (rows and size + len(entry.payload) > ANSWER_BYTES) or (upto is not None and entry.id > upto):
            return rows, int.from_bytes(entry.id, "big")
        rows.append(entry)
        size += len(entry.payload)
    return rows, next_id
