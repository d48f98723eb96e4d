"""The `Wal` over a `Database`: one thread makes all calls, and commits whatever waits for it at once."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import Self, TypeVar

from tidewal import errors
from tidewal.adapters import (
    Append,
    ChannelInfo,
    ChannelPolicy,
    Entry,
    Metrics,
    OnAppended,
    Start,
    WalBase,
    as_bytes,
    check_plain,
)

from .backend import BACKEND
from .database import Database
from .settings import SqliteSettings

T = TypeVar("T")


class SqliteWal(WalBase):
    """A log in one file, for any number of processes. A reader hears of appends in its own process at once, and looks
    for those of others every `sqlite.pollS` seconds."""

    name = "sqlite"
    capabilities = BACKEND.capabilities()

    def __init__(self, shown: str, file: Database, poll_s: float, metrics: Metrics) -> None:
        super().__init__(shown)
        self._file = file
        self._poll_s = poll_s
        self._commits = metrics.counter("sqlite_commit_total")
        self._thread = ThreadPoolExecutor(1, "tidewal-sqlite")
        self._lock = Lock()  # so that nothing reaches the thread behind the closing of the file
        self._pending = deque[tuple[Sequence[Append], OnAppended]]()
        self._waiting = set[OnAppended]()  # what wakes the readers that wait

    @classmethod
    async def open(
        cls,
        path: str,
        settings: SqliteSettings | None = None,
        *,
        read_only: bool = False,
        metrics: Metrics | None = None,
    ) -> Self:
        """Open the log in the file `path`. Raises `Unavailable` where that is not possible."""
        settings = settings or SqliteSettings()
        try:
            file = await asyncio.to_thread(Database, path, read_only=read_only, busy_timeout_s=settings.busy_timeout_s)
        except sqlite3.Error as error:
            raise errors.Unavailable(f"sqlite://{path}: {error}") from error
        return cls(f"sqlite://{path}", file, settings.poll_s, metrics or Metrics("sqlite"))

    async def _call(self, call: Callable[..., T], *arguments: object) -> T:
        """The result of a call on the thread, behind all that was submitted."""
        with self._lock:
            self._check_open()
            running = self._thread.submit(call, *arguments)
        try:
            return await asyncio.wrap_future(running)
        except sqlite3.Error as error:
            raise errors.Unavailable(f"{self._shown}: {error}") from error

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        await self._call(self._file.create, channel, policy)

    async def channels(self) -> list[str]:
        return await self._call(self._file.channels)

    async def describe(self, channel: str) -> ChannelInfo:
        return await self._call(self._file.describe, channel)

    async def drop_channel(self, channel: str) -> None:
        await self._call(self._file.drop, channel)

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        check_plain([entry.key for entry in entries], [entry.headers for entry in entries])
        taken = [entry._replace(payload=as_bytes(entry.payload)) for entry in entries]
        with self._lock:
            self._check_open()
            self._pending.append((taken, done))
            self._thread.submit(self._commit)

    def _commit(self) -> None:
        """Append all that waits, in one commit. Often there is nothing: an earlier call has taken it."""
        submits = [self._pending.popleft() for _ in range(len(self._pending))]
        results: Sequence[list[bytes] | errors.TidewalError] = ()
        try:
            if submits:
                results = self._file.append([entries for entries, _ in submits])
                self._commits.inc()
        except sqlite3.Error as error:  # where the commit itself fails, it may have happened
            results = [errors.Unavailable(f"{self._shown}: {error}", outcome_unknown=True)] * len(submits)
        for (_, done), result in zip(submits, results, strict=True):
            done(result)
        self._wake_readers()

    def _wake_readers(self) -> None:
        for wake in list(self._waiting):
            wake([])

    async def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        number, behind = await self._call(self._file.start, channel, start)
        with suppress(errors.Closed):
            while True:
                news, wake = self._notifiers.promise()
                self._waiting.add(wake)  # before looking, so that nothing is missed
                try:
                    entries = await self._call(self._file.read, channel, number, behind)
                    if not entries:
                        await asyncio.wait([news], timeout=self._poll_s)
                finally:
                    self._waiting.discard(wake)
                if entries:
                    behind = int.from_bytes(entries[-1].id, "big")
                    yield entries

    async def latest_id(self, channel: str) -> bytes | None:
        return (await self.describe(channel)).latest_id

    async def id_at(self, channel: str, timestamp: int) -> bytes | None:
        return await self._call(self._file.id_at, channel, timestamp)

    async def truncate(self, channel: str, id: bytes) -> None:
        await self._call(self._file.truncate, channel, id)

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        await self._call(self._file.hold, channel, holder, id)

    async def _close(self) -> None:
        with self._lock:
            self._closed = True
            closing = self._thread.submit(self._file.close)
        self._wake_readers()
        await asyncio.wrap_future(closing)
        self._thread.shutdown(wait=False)
