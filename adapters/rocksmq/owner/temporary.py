"""Temporary channels of other processes: dropped when the process that created them is gone.

Those of the owner itself end with its incarnation: opening the directory drops all temporary channels.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from ....runtime.errors import TidewalError

RETURN_S = 1.0  # for which a client whose last connection ended may come back; then its channels are dropped

_log = logging.getLogger(__name__)


class TemporaryChannels:
    """Belongs to the server's loop. A client is a process; it may have several connections. `drop` gets names that
    clients asked for: it drops the temporary channels among them."""

    def __init__(self, drop: Callable[[str], Coroutine[object, object, None]], *, return_s: float = RETURN_S) -> None:
        self._drop, self._return_s = drop, return_s
        self._clients: dict[int, bytes | None] = {}  # by connection
        self._channels: dict[bytes, set[str]] = {}  # by client
        self._dropping: set[asyncio.Task[None]] = set()

    def connected(self, connection_id: int, client: bytes | None) -> None:
        """A client has said hello on the connection with that number; its id is None where it has none."""
        self._clients[connection_id] = client

    def created(self, client: bytes, channel: str) -> None:
        """A client asks to create the channel, which may yet be refused: noted before, so that a client that ends in
        between leaves no channel."""
        self._channels.setdefault(client, set()).add(channel)

    def dropped(self, client: bytes | None, channel: str) -> None:
        """A client drops the channel itself."""
        if client is not None and (channels := self._channels.get(client)) is not None:
            channels.discard(channel)
            if not channels:
                del self._channels[client]

    def disconnected(self, connection_id: int) -> None:
        """A connection has ended."""
        client = self._clients.pop(connection_id, None)
        if client in self._channels and client not in self._clients.values():
            asyncio.get_running_loop().call_later(self._return_s, self._expire_client, client)

    def _expire_client(self, client: bytes) -> None:
        if client not in self._clients.values() and (channels := self._channels.pop(client, None)):
            task = asyncio.get_running_loop().create_task(self._drop_all(channels))
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    async def _drop_all(self, channels: set[str]) -> None:
        results = await asyncio.gather(*map(self._drop, channels), return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed:
            _log.warning(
                "%d channels of a client that is gone stay until the log is opened again: %s", len(failed), failed[0]
            )
        for error in failed:
            if not isinstance(error, TidewalError):
                raise error
