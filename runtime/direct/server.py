"""The end of a connection at the node that is asked: it takes requests, and sends the replies."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from dataclasses import dataclass

from ..errors import BadRecord, Closed, Unavailable
from ..log.record import decode
from ..log.wal import OnAppended
from ..rpc.protocol import MESSAGE_BYTES_MAX
from ..rpc.server import Request, RequestPack, RpcServer
from .ends import AcceptingEnd
from .frames import Head
from .handshake import arguments_of, name_in

IN_FLIGHT_BYTES = 64 * 1024 * 1024  # of requests of one connection that the roles have not taken yet
OVERHEAD_BYTES = 1024  # counted for each request beside its own
PACK = 256  # requests that a role takes at once

_log = logging.getLogger("tidewal.direct")


@dataclass(frozen=True, slots=True)
class ArrivedRequest:
    """A request that has come over a connection, and that its role has not taken yet."""

    payload: bytes
    connection: IncomingConnection


class DirectInbox:
    """The requests to one role that come over connections: an async iterator over them, in packs, in the order in which
    each connection has them. `server` is that of the role, which knows those that have come through the log, too."""

    def __init__(self, server: RpcServer) -> None:
        self._server = server
        self._arrived = deque[ArrivedRequest]()
        self._arrival = asyncio.Event()

    def put(self, arrived: ArrivedRequest) -> None:
        """Take a request; its connection waits where the role does not come to it."""
        self._arrived.append(arrived)
        self._arrival.set()

    async def __aiter__(self) -> AsyncIterator[RequestPack]:
        while True:
            await self._arrival.wait()
            requests: list[Request] = []
            while self._arrived and len(requests) < PACK:
                request = self._accept(self._arrived.popleft())
                if request is not None:
                    requests.append(request)
            if not self._arrived:
                self._arrival.clear()
            if requests:
                yield RequestPack(requests)

    def _accept(self, arrived: ArrivedRequest) -> Request | None:
        arrived.connection.taken(len(arrived.payload))
        try:
            return self._server.accept(decode(arrived.payload), arrived.connection)
        except BadRecord as error:
            arrived.connection.end(Unavailable(f"the other end has sent what is no request: {error}"))
            return None

    def close(self) -> None:
        """Take nothing of what is there any more: the clients repeat it."""
        while self._arrived:
            arrived = self._arrived.popleft()
            arrived.connection.taken(len(arrived.payload))


class DirectServer:
    """What listens for the nodes of the cluster. `node` is the incarnation of this process, `inboxes` are those of its
    roles, `key` is that of the handshake; `on_refused` is called for each connection that ended and had proved
    nothing."""

    def __init__(
        self,
        node: str,
        key: bytes,
        inboxes: MutableMapping[str, DirectInbox],
        *,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self.node: str = node
        self.key: bytes = key
        self.inboxes: MutableMapping[str, DirectInbox] = inboxes
        self._on_refused = on_refused
        self._connections = dict[IncomingConnection, None]()

    def connection(self) -> IncomingConnection:
        """The protocol of a new connection."""
        return IncomingConnection(self)

    def came(self, connection: IncomingConnection) -> None:
        """The connection has begun."""
        self._connections[connection] = None

    def gone(self, connection: IncomingConnection) -> None:
        """The connection has ended."""
        self._connections.pop(connection, None)
        if not connection.established:
            self._on_refused()
            _log.info("a connection that was to be a node's is refused: %s", connection.ended)

    def close(self) -> None:
        """End all connections."""
        for connection in list(self._connections):
            connection.end(Closed("this node ends"))


class IncomingConnection(AcceptingEnd):
    """A connection that another node has made: a `ReplyRoute` of its requests. While more than `IN_FLIGHT_BYTES` of
    them wait for the roles, nothing more is read of it."""

    def __init__(self, server: DirectServer) -> None:
        super().__init__(server.node, server.key)
        self.message_bytes: int = MESSAGE_BYTES_MAX
        self._server = server
        self._waiting = 0  # bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.came(self)

    def on_message(self, head: Head, payload: bytes) -> None:
        [role] = arguments_of(head, "request", 1)
        self._take(name_in(role), payload)

    def _take(self, role: str, payload: bytes) -> None:
        inbox = self._server.inboxes.get(role)
        if inbox is None:  # it is restarting: the client repeats the request
            return
        self._waiting += len(payload) + OVERHEAD_BYTES
        if self._waiting > IN_FLIGHT_BYTES:
            self.pause()
        inbox.put(ArrivedRequest(payload, self))

    def taken(self, size: int) -> None:
        """The role has taken a request of `size` bytes."""
        self._waiting -= size + OVERHEAD_BYTES
        if self._waiting <= IN_FLIGHT_BYTES:
            self.resume()

    def send(self, client: str, payloads: Sequence[bytes], sent: OnAppended) -> None:
        """`ReplyRoute.send`."""
        for payload in payloads:
            self.write(["reply"], payload)

    def on_end(self) -> None:
        self._server.gone(self)
