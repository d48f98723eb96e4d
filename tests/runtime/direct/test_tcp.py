"""Connections over real sockets: TLS with an authority, strangers, and a node that is killed."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.brokers.certificates import Authority
from tidewal.runtime.config.settings import ClusterSettings
from tidewal.runtime.direct.address import HostPort
from tidewal.runtime.direct.client import OutgoingConnection
from tidewal.runtime.direct.connection import FramedConnection
from tidewal.runtime.direct.network import CONNECTIONS_MAX, Listener, TcpListener, TcpNetwork
from tidewal.runtime.direct.server import DirectServer
from tidewal.runtime.errors import ConfigError, TidewalError, Unavailable

KEY = b"k" * 32
LOOPBACK = HostPort("127.0.0.1", 0)
BOUND_S = 20


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def tls(authority: Authority, name: str, ca: Path | None = None) -> ClusterSettings:
    """The settings of a node with a certificate of `authority`, which trusts that of `ca`."""
    certificate, key = authority.issue(name)
    files = {"tlsCert": str(certificate), "tlsKey": str(key), "tlsCaCert": str(ca or authority.certificate)}
    return ClusterSettings.model_validate({"secret": "s", "ssl": files})


@asynccontextmanager
async def listening(settings: ClusterSettings) -> AsyncIterator[tuple[Listener, DirectServer]]:
    server = DirectServer("b", KEY, {})
    listener = await TcpNetwork(settings).listen(LOOPBACK, server.connection)
    try:
        yield listener, server
    finally:
        await listener.close()
        server.close()


async def connected(settings: ClusterSettings, port: int) -> OutgoingConnection:
    client = OutgoingConnection("a", KEY, "b")
    await TcpNetwork(settings).connect(HostPort("127.0.0.1", port), lambda: client)
    async with asyncio.timeout(BOUND_S):
        await client.until_established()
    return client


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not true():  # noqa: ASYNC110 -- sockets have no event to await
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("secured", [False, True])
async def test_a_connection_is_made_used_and_ended(secured: bool, request: pytest.FixtureRequest) -> None:
    settings = tls(request.getfixturevalue("authority"), "node") if secured else ClusterSettings()
    async with listening(settings) as (listener, server):
        client = await connected(settings, listener.port)
        transport: Any = client._transport
        assert (transport.get_extra_info("ssl_object") is not None) == secured
        await until(lambda: all(each.established for each in server._connections))
        assert isinstance(listener, TcpListener)
        assert listener._room._value == CONNECTIONS_MAX - 2  # it has a place, and so has the next one
        client.end(Unavailable("over"))
        await until(lambda: not server._connections)
        await until(lambda: listener._room._value == CONNECTIONS_MAX - 1)


async def test_a_node_with_another_authority_is_refused_and_refuses(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    ours = tls(authority, "ours")
    async with listening(ours) as (listener, server):
        with pytest.raises(ssl.SSLCertVerificationError):
            await connected(tls(other, "theirs"), listener.port)
        with pytest.raises((TidewalError, OSError)):  # it trusts us, and has no certificate that we trust
            await connected(tls(other, "trusting", ca=authority.certificate), listener.port)
        with pytest.raises((TidewalError, OSError)):  # it speaks no TLS
            await connected(ClusterSettings(), listener.port)
        assert not server._connections
        (await connected(ours, listener.port)).end(Unavailable("over"))


async def test_a_node_with_the_name_of_another_host_is_refused(authority: Authority) -> None:
    settings = tls(authority, "node")
    async with listening(settings) as (listener, _):
        client = OutgoingConnection("a", KEY, "b")
        with pytest.raises(ssl.SSLCertVerificationError, match="localhost"):
            await TcpNetwork(settings).connect(HostPort("localhost", listener.port), lambda: client)
        named = settings.model_copy(update={"ssl": settings.ssl.model_copy(update={"sni": "127.0.0.1"})})
        await TcpNetwork(named).connect(HostPort("localhost", listener.port), lambda: client)
        await client.until_established()
        client.end(Unavailable("over"))


async def test_without_certificates_only_loopback_is_connected_to() -> None:
    with pytest.raises(Unavailable, match=r"needs certificates \(cluster.ssl\)"):
        await TcpNetwork(ClusterSettings()).connect(HostPort("node.example", 7400), FramedConnection)


async def test_a_port_in_use_and_files_that_are_none_are_said_so(tmp_path: Path) -> None:
    async with listening(ClusterSettings()) as (listener, _):
        with pytest.raises(Unavailable, match=r"cannot listen on .*cluster.listen"):
            await TcpNetwork(ClusterSettings()).listen(HostPort("127.0.0.1", listener.port), FramedConnection)
    files = {"tlsCert": str(tmp_path / "a"), "tlsKey": str(tmp_path / "b"), "tlsCaCert": str(tmp_path / "c")}
    with pytest.raises(ConfigError, match=r"files of cluster.ssl cannot be used"):
        TcpNetwork(ClusterSettings.model_validate({"ssl": files}))


async def test_a_stranger_hears_nothing_and_connections_that_say_nothing_count(monkeypatch) -> None:
    monkeypatch.setattr("tidewal.runtime.direct.network.CONNECTIONS_MAX", 2)
    async with listening(ClusterSettings()) as (listener, server):
        silent = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(2)]
        await until(lambda: len(server._connections) == 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)  # waits in the system's queue
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert len(server._connections) == 2
        for _, each in silent:
            each.close()
        assert await asyncio.wait_for(reader.read(), BOUND_S) == b""
        writer.close()
