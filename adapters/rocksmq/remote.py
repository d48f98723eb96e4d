"""`RemoteRocksMQ`: the reading side of a log that another process owns, as a `Wal`.

Appending and managing channels raise `NotYetSupported`. When the owner goes away, readers and calls raise
`Unavailable`; the next call connects again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, NoReturn

from ...runtime.errors import BadRecord, Closed, NotYetSupported
from ...runtime.remote import (
    FRAME_BYTES,
    LENGTH,
    TIMEOUT_S,
    encode_start,
    entries_of,
    info_of,
    pack,
    result_of,
    socket_path,
    unavailable,
    unpack,
)
from ...runtime.wal import Append, Capabilities, ChannelInfo, ChannelPolicy, Entry, OnAppended, Payload, Start

POLL_S = 20.0  # how long one request waits at the owner for more


class Connection:
    """One conversation with the owner, a request at a time. Broken by anything that leaves it between frames."""

    def __init__(self, directory: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._directory, self._reader, self._writer = directory, reader, writer
        self.broken = False

    @classmethod
    async def open(cls, directory: str) -> Connection:
        try:
            with socket_path(directory) as path:
                reader, writer = await asyncio.open_unix_connection(path)
        except OSError as error:
            raise unavailable(directory, error) from error
        return cls(directory, reader, writer)

    async def ask(self, *request: object, wait_s: float = 0.0) -> Any:
        """Raises what the owner raised, and `Unavailable`."""
        self.broken = True
        try:
            async with asyncio.timeout(TIMEOUT_S + wait_s):
                self._writer.write(pack(request))
                await self._writer.drain()
                (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                if size > FRAME_BYTES:
                    raise ConnectionError(f"an answer of {size} bytes")
                answer = unpack(await self._reader.readexactly(size))
        except (OSError, EOFError, BadRecord) as error:  # a TimeoutError is an OSError
            raise unavailable(self._directory, error) from error
        self.broken = False
        return result_of(answer)

    async def close(self) -> None:
        self.broken = True
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class RemoteRocksMQ:
    """A directory owned elsewhere. Use from one event loop."""

    name = "rocksmq"
    capabilities = Capabilities(atomic_batches=True, seek_by_time=True, truncate=True, multi_process_write=False)

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()
        self._readers: set[RemoteReader] = set()
        self._closed = False

    @classmethod
    async def connect(cls, directory: str) -> RemoteRocksMQ:
        """Raises `Unavailable` when nobody answers."""
        remote = cls(directory)
        await remote.channels()
        return remote

    async def channels(self) -> list[str]:
        return await self._ask("channels")

    async def describe(self, channel: str) -> ChannelInfo:
        return info_of(channel, await self._ask("describe", channel))

    async def latest_id(self, channel: str) -> bytes | None:
        return await self._ask("latest_id", channel)

    async def id_at(self, channel: str, timestamp: int) -> bytes | None:
        return await self._ask("id_at", channel, timestamp)

    def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        self._check_open()
        reader = RemoteReader(self._directory, channel, start, self._readers)
        self._readers.add(reader)
        return reader

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        self._refuse("create channels")

    async def drop_channel(self, channel: str) -> None:
        self._refuse("drop channels")

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        self._refuse("append")

    async def append(self, channel: str, payload: Payload, timestamp: int = 0) -> bytes:
        self._refuse("append")

    async def append_many(self, entries: Sequence[Append]) -> list[bytes]:
        self._refuse("append")

    async def truncate(self, channel: str, id: bytes) -> None:
        self._refuse("truncate")

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        self._refuse("hold")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for reader in list(self._readers):
            await reader.aclose()
        async with self._turn:
            if self._connection is not None:
                await self._connection.close()

    async def _ask(self, *request: object) -> Any:
        async with self._turn:
            self._check_open()
            if self._connection is None or self._connection.broken:
                if self._connection is not None:
                    await self._connection.close()
                self._connection = await Connection.open(self._directory)
            return await self._connection.ask(*request)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the connection to {self._directory} is closed")

    def _refuse(self, what: str) -> NoReturn:
        self._check_open()
        raise NotYetSupported(f"another process owns {self._directory}; this one can read, not {what}")


class RemoteReader:
    """`Wal.read` over a connection of its own."""

    def __init__(self, directory: str, channel: str, start: Start, siblings: set[RemoteReader]) -> None:
        self._directory, self._channel, self._siblings = directory, channel, siblings
        self._start = encode_start(start)
        self._connection: Connection | None = None
        self._closed = False
        self._asking: asyncio.Task[Any] | None = None

    def __aiter__(self) -> RemoteReader:
        return self

    async def __anext__(self) -> Sequence[Entry]:
        while not self._closed:
            if self._connection is None:
                self._connection = await Connection.open(self._directory)
            # The first question fixes the start without waiting: "latest" must not move from one question to the next.
            wait_s = POLL_S if self._start[0] == "next" else 0.0
            request = self._connection.ask("read", self._channel, self._start, None, wait_s, wait_s=wait_s)
            self._asking = asyncio.ensure_future(request)
            try:
                rows, next_id, _ = await self._asking
            except asyncio.CancelledError:
                await self._disconnect()
                if self._closed and not _cancelling():
                    break
                raise
            except BaseException:
                await self._disconnect()
                raise
            self._start = ["next", next_id]
            if rows:
                return entries_of(rows)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the iteration, also for a task that is waiting in it."""
        self._closed = True
        self._siblings.discard(self)
        if self._asking is not None:
            self._asking.cancel()
        await self._disconnect()

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
