"""What clients in other processes have at the owner until they are gone."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

RETURN_S = 1.0  # for which a client whose last connection ended may come back


class ClientResources(ABC):
    """Belongs to the server's loop. A client is a process; it may have several connections. When its last connection
    has ended, and it is not back `return_s` seconds later, what it has is released.

    Whose a resource is, is noted with the resource, not with the client: so the end of a client takes nothing that it
    was refused, or that is another's by now.
    """

    def __init__(self, return_s: float = RETURN_S) -> None:
        self._return_s = return_s
        self._clients: dict[int, bytes | None] = {}  # by connection
        self._leaving: dict[bytes, asyncio.TimerHandle] = {}  # clients without connections, which may come back

    @abstractmethod
    def _release(self, client: bytes) -> None:
        """Release what a client has that is gone."""

    def connected(self, connection_id: int, client: bytes | None) -> None:
        """A client has said hello on the connection with that number; its id is None where it has none."""
        self._clients[connection_id] = client
        if client is not None and (leaving := self._leaving.pop(client, None)) is not None:
            leaving.cancel()

    def disconnected(self, connection_id: int) -> None:
        """A connection has ended. Most of the time that means that the process has ended."""
        client = self._clients.pop(connection_id, None)
        if client is not None and client not in self._clients.values():
            self._leaving[client] = asyncio.get_running_loop().call_later(self._return_s, self._expire_client, client)

    def _expire_client(self, client: bytes) -> None:
        del self._leaving[client]
        self._release(client)
