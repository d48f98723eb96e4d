"""`WoodpeckerWal`: a log of Woodpecker as a `Wal`, asked of its sidecar."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar

from ...runtime.clock import SystemClock
from ...runtime.errors import Closed, TidewalError, Unavailable
from ...runtime.log.wal import Append, Capabilities, Entry, OnAppended, Start
from ...runtime.log.wal_base import WalBase
from ..rocksmq.address import Address
from ..rocksmq.client.owner_calls import OwnerCalls
from ..rocksmq.client.owner_connection import OwnerConnection
from ..rocksmq.protocol import encode_start
from .backend import BACKEND, FAILOVER_S
from .pending_appends import PendingAppends
from .sidecar_process import SidecarProcess

T = TypeVar("T")

CAPABILITIES = Capabilities(
    atomic_batches=False,
    seek_by_time=True,
    truncate=True,
    multi_process_write=True,
    one_node=False,
    drops_temporary=True,
)
PENDING_BYTES = 64 * 1024 * 1024
CLIENT_ID_BYTES = 16
FIRST_PAUSE_S, LAST_PAUSE_S = 0.01, 0.2  # between two attempts to reach the sidecar
READS, ASKS = 4096, 64  # requests that wait for answers at once: reads until there are entries, and others
POLL_S = 20.0  # how long one request waits at the sidecar for more entries


class WoodpeckerWal(OwnerCalls, WalBase):
    """Open with `WoodpeckerWal.connect`. Coroutines belong to the loop that opened it, `submit` to any thread."""

    name = "woodpecker"
    capabilities = CAPABILITIES

    @classmethod
    async def connect(
        cls,
        directory: str,
        process: SidecarProcess | None = None,
        *,
        failover_s: float = FAILOVER_S,
        pending_bytes: int = PENDING_BYTES,
    ) -> Self:
        """Connect to the sidecar whose socket is in `directory`; where none answers there, to the one that `process`
        starts. `failover_s` (seconds) is how long this and later calls wait for a sidecar. Over `pending_bytes` of
        appends that are not answered, `submit` raises `Overloaded`. Raises `Unavailable`, `ConfigError`."""
        wal = cls(directory, process, failover_s, pending_bytes)
        try:
            await wal.connection()
        except BaseException:
            await wal.close()
            raise
        return wal

    def __init__(self, directory: str, process: SidecarProcess | None, failover_s: float, pending_bytes: int) -> None:
        """Use `connect`."""
        super().__init__(f"{self.name}://{directory}")
        self._address, self._process, self._failover_s = Address.of_directory(directory), process, failover_s
        self._loop, self._clock = asyncio.get_running_loop(), SystemClock()
        self._client = os.urandom(CLIENT_ID_BYTES)
        self._appends = PendingAppends(pending_bytes, self._shown)
        self._connection: OwnerConnection | None = None
        self._search: asyncio.Task[OwnerConnection] | None = None
        self._closing = asyncio.Event()
        self._asks, self._reads = asyncio.Semaphore(ASKS), asyncio.Semaphore(READS)

    # ---- appending ---------------------------------------------------------------------------------------------------

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        """`Wal.submit`; the errors for a missing channel or a message that is too large come through `done`."""
        if not self._appends.submit(entries, done):
            self._loop.call_soon_threadsafe(self._start_search)

    # ---- reading -----------------------------------------------------------------------------------------------------

    async def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        at: Sequence[object] = encode_start(start)
        wait_s = 0.0  # the first request fixes the start, and waits for nothing
        with suppress(Closed):
            while True:
                entries, next_id = await self._read(channel, at, wait_s)
                at, wait_s = ["next", next_id], POLL_S
                if entries:
                    yield entries

    async def _read(self, channel: str, at: Sequence[object], wait_s: float) -> tuple[Sequence[Entry], bytes]:
        async def read(connection: OwnerConnection) -> tuple[Sequence[Entry], bytes]:
            async with self._reads if wait_s else self._asks:
                entries, next_id, _ = await connection.ask("read", channel, at, None, wait_s, wait_s=wait_s)
            return entries, next_id

        return await self._unless_closed(self._of_sidecar(read))

    async def _unless_closed(self, waiting: Awaitable[T]) -> T:
        """What `waiting` returns. Raises `Closed` where the log is closed before."""
        reading, closing = asyncio.ensure_future(waiting), asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait((reading, closing), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise self._closed_error()
            return reading.result()
        finally:
            closing.cancel()
            if not reading.done():
                reading.cancel()
                await asyncio.wait((reading,))

    # ---- the sidecar -------------------------------------------------------------------------------------------------

    async def _ask(self, method: str, *arguments: object) -> Any:
        async def ask(connection: OwnerConnection) -> Any:
            async with self._asks:
                return await connection.ask(method, *arguments)

        return await self._of_sidecar(ask)

    async def _of_sidecar(self, call: Callable[[OwnerConnection], Awaitable[T]]) -> T:
        """The sidecar's answer, asked again for `failover_s` where it is lost meanwhile."""
        deadline: float | None = None
        while True:
            connection = await self.connection()
            try:
                return await call(connection)
            except Unavailable:
                now = self._clock.monotonic()
                deadline = now + self._failover_s if deadline is None else deadline
                if connection is self._connection or now >= deadline:
                    raise

    async def connection(self) -> OwnerConnection:
        """The connection to the sidecar, waited for while there is none. Raises `Closed`, `Unavailable`."""
        self._check_open()
        if self._connection is not None:
            return self._connection
        return await asyncio.shield(self._start_search())

    def _start_search(self) -> asyncio.Task[OwnerConnection]:
        """Look for a sidecar, unless that is done already. On the loop."""
        if self._search is None or (self._search.done() and self._connection is None):
            self._search = self._loop.create_task(self._find(), name=f"sidecar of {self._shown}")
            self._search.add_done_callback(_retrieve)
        return self._search

    async def _find(self) -> OwnerConnection:
        deadline = self._clock.monotonic() + self._failover_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                connection = await OwnerConnection.open(self._address, self._client, on_lost=self._lost)
                break
            except Unavailable as error:
                if self._clock.monotonic() >= deadline:
                    failure = self._unreachable(error)
                    self._appends.fail(failure)
                    raise failure from error
                self._start_process()
            except TidewalError as error:
                self._appends.fail(error)
                raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        self._connection = connection
        self._appends.resume(connection)
        return connection

    def _start_process(self) -> None:
        if self._process is not None and not self._closed:
            self._process.start()

    def _unreachable(self, error: Unavailable) -> Unavailable:
        if self._process is not None:
            try:
                self._process.check()
            except Unavailable as ended:
                return ended
        message = f"no sidecar answers in {self._address}: {error.message}. {BACKEND.advice(self._shown)}"
        return Unavailable(message, path=str(self._address))

    def _lost(self, error: TidewalError) -> None:
        self._connection = None
        self._appends.interrupt(error)
        if len(self._appends):
            self._start_search()

    # ---- closing -----------------------------------------------------------------------------------------------------

    async def _close(self) -> None:
        """What was submitted is answered first, or ends with `Unavailable` after `failover_s`."""
        self._closed = True
        self._closing.set()
        answered, answer = self._notifiers.promise()
        self._appends.close(lambda: answer([]))
        await answered
        if self._search is not None:
            self._search.cancel()
            await asyncio.wait((self._search,))
        if self._connection is not None:
            await self._connection.close()
        if self._process is not None:
            await self._process.stop()


def _retrieve(search: asyncio.Task[OwnerConnection]) -> None:
    """Retrieve the error of a search for which no task waits: the appends have got it."""
    if not search.cancelled():
        search.exception()
