"""What clients in other processes have at the owner until they are gone."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

RETURN_S = 1.0  # for which a client whose last connection ended may come back

Resource = TypeVar("Resource")


class ClientResources(ABC, Generic[Resource]):
    """Belongs to the server's loop. A client is a process; it may have several connections. When its last connection
    has ended, and it is not back `return_s` seconds later, what it has is released."""

    def __init__(self, return_s: float = RETURN_S) -> None:
        self._return_s = return_s
        self._clients: dict[int, bytes | None] = {}  # by connection
        self._resources: dict[bytes, set[Resource]] = {}  # by client

    @abstractmethod
    def _release(self, resources: set[Resource]) -> None:
        """Release what a client had that is gone."""

    def connected(self, connection_id: int, client: bytes | None) -> None:
        """A client has said hello on the connection with that number; its id is None where it has none."""
        self._clients[connection_id] = client

    def disconnected(self, connection_id: int) -> None:
        """A connection has ended. Most of the time that means that the process has ended."""
        client = self._clients.pop(connection_id, None)
        if client in self._resources and client not in self._clients.values():
            asyncio.get_running_loop().call_later(self._return_s, self._expire_client, client)

    def note(self, client: bytes, resource: Resource) -> None:
        """A client asks for something, which may yet be refused: noted before, so that a client that ends in between
        leaves nothing."""
        self._resources.setdefault(client, set()).add(resource)

    def forget(self, client: bytes | None, resource: Resource) -> None:
        """A client gives something back itself, or was refused it."""
        if client is not None and (resources := self._resources.get(client)) is not None:
            resources.discard(resource)
            if not resources:
                del self._resources[client]

    def _expire_client(self, client: bytes) -> None:
        if client not in self._clients.values() and (resources := self._resources.pop(client, None)):
            self._release(resources)
