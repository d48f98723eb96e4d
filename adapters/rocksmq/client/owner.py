"""The owner of a directory as a process that shares it sees it: this process itself, or another over a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ....runtime.errors import TidewalError
from ....runtime.filters.subscription import FILTER_LANGUAGE
from ....runtime.groups.coordinator_client import CoordinatorClient
from ....runtime.log.wal import Append, Entry, OnAppended
from ..address import Address
from ..owner.store import RocksMQ
from .owner_calls import OwnerCalls
from .owner_connection import OwnerConnection
from .socket_coordinator_client import SocketCoordinatorClient

if TYPE_CHECKING:
    from ....runtime.filters.record_filter import RecordFilter

ASKS = 64  # requests that wait for answers at once, beside reads that wait for entries
SPARE = 2 * ASKS  # of the requests that the owner lets wait: for these, for groups, and for those that just end


class RemoteOwner(OwnerCalls):
    """The owner in another process, with the calls of `RocksMQ`. Everything raises `Unavailable` once the connection is
    lost."""

    def __init__(self) -> None:
        """Use `open`."""
        self.lost = False
        self.connection: OwnerConnection
        self.reads_at_once: int  # that may wait for entries
        self._reads: asyncio.Semaphore
        self._asks = asyncio.Semaphore(ASKS)
        self._groups: SocketCoordinatorClient

    @classmethod
    async def open(cls, address: Address, client: bytes, on_lost: Callable[[RemoteOwner], None]) -> RemoteOwner:
        """Connect to the owner at `address`. `client` is this process's random id. `on_lost` is called on the loop,
        once, when the connection is lost. Raises `Unavailable`, `Overloaded`."""
        remote = cls()

        def lost(_: TidewalError) -> None:
            remote.lost = True
            on_lost(remote)

        remote.connection = await OwnerConnection.open(address, client, on_lost=lost)
        remote.reads_at_once = max(1, remote.connection.waiting_requests - SPARE)
        remote._reads = asyncio.Semaphore(remote.reads_at_once)
        remote._groups = SocketCoordinatorClient(remote.connection)
        return remote

    @property
    def boot(self) -> int:
        return self.connection.boot

    async def read(
        self, channel: str, start: Sequence[object], wait_s: float, where: RecordFilter | None = None
    ) -> tuple[Sequence[Entry], bytes]:
        """The entries from `start` (in the protocol's wire form), and the id that comes next. Without entries the owner
        waits up to `wait_s` seconds for some. Those that do not pass `where` are left out by an owner that knows its
        language."""
        text = () if where is None or self.connection.filters != FILTER_LANGUAGE else (where.text,)
        async with self._reads if wait_s else self._asks:
            entries, next_id, _ = await self.connection.ask("read", channel, start, None, wait_s, *text, wait_s=wait_s)
        return entries, next_id

    def submit_from(
        self, client: bytes, number: int, settled: int, entries: Sequence[Append], done: OnAppended
    ) -> None:
        """Never raises: `done` gets the owner's answer, and is not called any more once the connection is lost."""
        self.connection.append(number, settled, entries, done)

    def coordinator_client(self) -> CoordinatorClient:
        return self._groups

    async def close(self) -> None:
        self._groups.close()
        await self.connection.close()

    async def _ask(self, method: str, *arguments: object) -> Any:
        async with self._asks:
            return await self.connection.ask(method, *arguments)


Owner: TypeAlias = RocksMQ | RemoteOwner
"""This process itself, or another one."""
