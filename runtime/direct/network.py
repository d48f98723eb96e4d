"""How connections are made: over TCP, with TLS or, on loopback and where the settings allow it, without."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any, Protocol

from ..config.settings import ClusterSettings
from ..errors import ConfigError, Unavailable
from .address import HostPort
from .connection import HANDSHAKE_S, FramedConnection

CONNECTIONS_MAX = 1024  # that a node takes; the others wait in the system's queue
BACKLOG = 128
ACCEPT_PAUSE_S = 1.0  # after a connection could not be accepted: the process is out of file descriptors

MakeConnection = Callable[[], FramedConnection]


class Listener(Protocol):
    """A place where connections are taken."""

    port: int

    async def close(self) -> None:
        """Take no more connections."""
        ...


class Network(Protocol):
    """Makes connections between processes."""

    async def connect(self, address: HostPort, make: MakeConnection) -> None:
        """Give a new connection to what `make` returns. Raises `OSError`, `TimeoutError` and `Unavailable`."""
        ...

    async def listen(self, address: HostPort, make: MakeConnection) -> Listener:
        """Give each connection that comes to what `make` returns for it. Raises `Unavailable` where that place cannot
        be had."""
        ...


class TcpNetwork:
    """TCP. With certificates in the settings both ends show theirs, and take none that the settings' authority has not
    signed; the one that connects compares the host's name, too."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Raises `ConfigError` where a file of the settings cannot be used."""
        self._plaintext, self._sni = settings.plaintext, settings.ssl.sni
        self._server_context = _context(settings, ssl.PROTOCOL_TLS_SERVER)
        self._client_context = _context(settings, ssl.PROTOCOL_TLS_CLIENT)

    async def connect(self, address: HostPort, make: MakeConnection) -> None:
        """`Network.connect`."""
        context = self._client_context
        if context is None and not (self._plaintext or address.loopback):
            raise Unavailable(f"to connect to {address} this node needs certificates (cluster.ssl)")
        async with asyncio.timeout(HANDSHAKE_S):
            await asyncio.get_running_loop().create_connection(
                make, address.host, address.port, **_tls(context, self._sni)
            )

    async def listen(self, address: HostPort, make: MakeConnection) -> Listener:
        """`Network.listen`."""
        try:
            return TcpListener(address, make, self._server_context)
        except OSError as error:
            raise Unavailable(f"the node cannot listen on {address} (cluster.listen): {error}") from error


class TcpListener:
    """A listening socket. Connections count from when they are accepted, whether they say anything or not."""

    def __init__(self, address: HostPort, make: MakeConnection, context: ssl.SSLContext | None) -> None:
        """Raises `OSError`."""
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._socket = socket.create_server(tuple(address), family=family, backlog=BACKLOG)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._make, self._context = make, context
        self._room = asyncio.Semaphore(CONNECTIONS_MAX)
        self._serving: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name=f"listening on {address}")

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except ConnectionError:
                self._room.release()
                continue
            except OSError:
                self._room.release()
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            serving = asyncio.create_task(self._serve(connection))
            self._serving.add(serving)
            serving.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        """Hold one of the places for connections until this one has ended."""
        made, loop = self._make(), asyncio.get_running_loop()
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does so where it connects
            await loop.connect_accepted_socket(lambda: made, connection, **_tls(self._context))
            await made.until_ended()
        except OSError:  # an ssl.SSLError is one: what came speaks no TLS, or has no certificate
            connection.close()
        finally:
            self._room.release()

    async def close(self) -> None:
        """`Listener.close`."""
        tasks = [self._accepting, *self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()


def _tls(context: ssl.SSLContext | None, name: str = "") -> dict[str, Any]:
    """The options of asyncio; `name` is what the other end's certificate is to have, its host's where that is ""."""
    options = {"ssl": context, "ssl_handshake_timeout": HANDSHAKE_S}
    return {} if context is None else {**options, "server_hostname": name} if name else options


def _context(settings: ClusterSettings, purpose: int) -> ssl.SSLContext | None:
    """How TLS is spoken for this `purpose` (client or server); None where the settings have no certificates."""
    files = settings.ssl
    if not files.tls_cert:
        return None
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(files.tls_cert, files.tls_key)
        context.load_verify_locations(files.tls_ca_cert)
    except OSError as error:  # an ssl.SSLError is one
        raise ConfigError(f"the files of cluster.ssl cannot be used: {error}", key="cluster.ssl") from error
    return context
