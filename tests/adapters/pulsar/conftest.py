"""Logs in a namespace of the test's own, and the web service of the broker that has them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.brokers.proxied import proxied_pulsar
from tests.brokers.proxy import Proxy
from tidewal.adapters.pulsar import Pulsar
from tidewal.adapters.pulsar import open_wal as open_pulsar_wal

Open = Callable[..., Awaitable[Pulsar]]

# The host in the URL is an address, so no proxy of the environment may come between.
_web = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Web:
    """Pulsar's administration, asked past the adapter."""

    def __init__(self, broker: Any, namespace: str) -> None:
        self._admin = f"{broker.web_url}/admin/v2"
        self._namespace = namespace

    def namespace(self, method: str, path: str = "", body: Any = None) -> Any:
        """Ask about the namespace itself."""
        return self._call(method, f"namespaces/{self._namespace}{path}", body)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        return self._call(method, f"persistent/{self._namespace}{path}", body)

    def _call(self, method: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._admin}/{path}", data, headers, method=method)
        with _web.open(request, timeout=20) as answer:
            content = answer.read()
        return json.loads(content) if content else None

    def subscriptions(self, channel: str) -> list[str]:
        return self.call("GET", f"/{channel}/subscriptions")

    def new_ledger(self, channel: str) -> None:
        """Let the topic go on in another ledger, as it does when it moves to another broker."""
        self.call("PUT", f"/{channel}/unload")

    def remove_old_ledgers(self, channel: str) -> None:
        """What retention does when its time has come."""
        self.call("DELETE", f"/{channel}/truncate")


@pytest.fixture
def namespace() -> str:
    return f"public/{uuid4().hex}"


@pytest.fixture
def web(pulsar: Any, namespace: str) -> Web:
    return Web(pulsar, namespace)


@pytest.fixture
async def open_wal(pulsar: Any, namespace: str) -> AsyncIterator[Open]:
    """Open the log of this test, each time like another process; all are closed at its end."""
    opened: list[Pulsar] = []

    async def open_one(**options: Any) -> Pulsar:
        wal = await open_pulsar_wal(f"{pulsar.url}/{namespace}", web_url=pulsar.web_url, **options)
        opened.append(wal)
        return wal

    yield open_one
    for wal in opened:
        await wal.close()


@pytest.fixture
async def proxied(tmp_path: Path) -> AsyncIterator[tuple[Pulsar, Proxy]]:
    """A log whose broker tells its clients to come through the proxy; its administration is reached without."""
    async with proxied_pulsar(tmp_path) as found:
        wal = await open_pulsar_wal(found.url, request_timeout_s=2)
        yield wal, found.proxy
        await wal.close()
