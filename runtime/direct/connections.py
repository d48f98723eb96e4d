"""All direct connections of one process: those that it makes to other nodes, and those that they make to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ..cluster.identity import connection_key
from ..cluster.state import NodeMember
from ..config.settings import ClusterSettings
from ..errors import Closed, TidewalError
from ..metrics.metrics import Metrics
from ..rpc.routes import RequestRoute
from ..waiting import ended
from .address import HostPort
from .client import OutgoingConnection
from .network import Listener, Network
from .server import DirectInbox, DirectServer

RETRY_S, RETRY_S_MAX = 0.1, 5.0  # between two attempts to connect to a node
REASON_CHARACTERS = 200

_log = logging.getLogger("tidewal.direct")


class NodeConnections:
    """The `RequestRoutes` of a process, and what it listens with.

    The first request to a node that has an address makes a connection, which is kept while that is a member. Until it
    is there, and whenever it is not, requests go through the log: nothing waits here. Without a secret of the cluster
    there are no connections.
    """

    def __init__(
        self,
        node: str,
        member_of: Callable[[str], NodeMember | None],
        settings: ClusterSettings,
        network: Network,
        metrics: Metrics,
    ) -> None:
        """`node` is the incarnation of this process; `member_of` finds another one, None where it is no member."""
        self._node, self._member_of, self._settings, self._network = node, member_of, settings, network
        secret = settings.secret.get_secret_value()
        self._key = connection_key(secret) if secret else b""
        self._inboxes: dict[str, DirectInbox] = {}
        refused = metrics.counter("direct_refused_total")
        self._server = DirectServer(node, self._key, self._inboxes, on_refused=refused.inc)
        self.address: str = ""  # for other nodes, once it listens
        self._listener: Listener | None = None
        self._connections: dict[str, OutgoingConnection] = {}  # by incarnation
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, str] = {}  # by name of the node: why its address cannot be reached
        self._direct = metrics.counter("direct_request_total", route="direct")
        self._by_log = metrics.counter("direct_request_total", route="log")
        metrics.gauge("direct_connection_num").set_function(lambda: len(self._connections))
        metrics.gauge("direct_unreachable_num").set_function(lambda: len(self._failures))

    # ---- being asked ------------------------------------------------------------------------------------------------

    async def listen(self) -> str:
        """Take connections where the settings say; returns the address for other nodes, "" where there is none. Raises
        `Unavailable` where it is in use."""
        listen, reached = self._settings.listens_on, self._settings.reached_at
        if listen is None or reached is None:
            return ""
        assert self._key, "the settings have been checked: an address needs a secret"
        self._listener = await self._network.listen(listen, self._server.connection)
        self.address = str(HostPort(reached.host, reached.port or self._listener.port))
        return self.address

    def serve(self, role: str, inbox: DirectInbox) -> None:
        """Hand requests to `role` to its inbox from now on."""
        self._inboxes[role] = inbox

    def leave(self, role: str, inbox: DirectInbox) -> None:
        """Hand it no more."""
        if self._inboxes.get(role) is inbox:
            del self._inboxes[role]
        inbox.close()

    # ---- asking -----------------------------------------------------------------------------------------------------

    def find(self, node: str) -> RequestRoute | None:
        """`RequestRoutes.find`."""
        connection = self._connections.get(node)
        if connection is not None and connection.ended is None:
            self._direct.inc()
            return connection
        if self._key and node != self._node and node not in self._keeping and self._address_of(node):
            self._keeping[node] = asyncio.create_task(self._keep(node), name=f"connection to {node}")
        self._by_log.inc()
        return None

    def unreachable(self) -> dict[str, str] | None:
        """The nodes whose addresses cannot be reached, and why; None where there are none. From any thread."""
        return dict(self._failures) or None

    def _address_of(self, node: str) -> str:
        member = self._member_of(node)
        return "" if member is None else member.address

    async def _keep(self, node: str) -> None:
        """Have a connection to `node` for as long as it is a member."""
        name, pause_s = getattr(self._member_of(node), "name", node), RETRY_S
        try:
            while address := self._address_of(node):
                try:
                    connection = await self._connect(node, address)
                except (OSError, ValueError, TidewalError) as error:  # a TimeoutError is an OSError
                    self._note_failure(name, address, error)
                    pause_s = min(2 * pause_s, RETRY_S_MAX)
                else:
                    self._failures.pop(name, None)
                    pause_s = RETRY_S
                    await self._use(node, connection)
                await asyncio.sleep(pause_s)
        finally:
            self._failures.pop(name, None)
            del self._keeping[node]

    async def _connect(self, node: str, address: str) -> OutgoingConnection:
        connection = OutgoingConnection(self._node, self._key, node)
        await self._network.connect(HostPort.parse(address), lambda: connection)
        try:
            await connection.until_established()
        except BaseException:
            connection.end(Closed("it is not waited for any more"))
            raise
        return connection

    async def _use(self, node: str, connection: OutgoingConnection) -> None:
        self._connections[node] = connection
        try:
            _log.info("requests to %s go by a direct connection", node)
            _log.info("the direct connection to %s has ended: %s", node, await connection.until_ended())
        finally:
            del self._connections[node]
            connection.end(Closed("this node ends"))

    def _note_failure(self, name: str, address: str, error: Exception) -> None:
        if name not in self._failures:
            _log.warning("%s cannot be reached at %s, so requests go through the log: %s", name, address, error)
        reason = str(error) or type(error).__name__
        self._failures[name] = f"{address}: {reason}"[:REASON_CHARACTERS]

    async def close(self) -> None:
        """End all connections. The log stays."""
        if self._listener is not None:
            await self._listener.close()
        self._server.close()
        await ended(*self._keeping.values())
