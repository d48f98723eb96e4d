"""Serve `/metrics`, `/healthz` and `/readyz` over HTTP.

`/healthz` means progress, not that the process exists: 200 while the node's own check says ok, else 503; `/readyz` is
503 also while the node makes progress, but answers no requests. Both carry the details of the check as JSON, and a
check that raises is not ok. The endpoint listens on loopback unless it is given another host, answers GET and HEAD, one
request per connection, and drops a client that has not finished its request within `REQUEST_TIMEOUT_S` or whose request
is longer than `MAX_REQUEST_BYTES`, and any beyond `CONNECTIONS_MAX` at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST

from ..arguments import checked
from ..errors import InvalidRequest, Unavailable, Unsupported
from .metrics import Metrics

REQUEST_TIMEOUT_S = 5.0
MAX_REQUEST_BYTES = 16 * 1024
CONNECTIONS_MAX = 64  # at once; the journal needs file descriptors, too


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the node makes progress, the details that say why, and, where it does, whether it serves: `ready`."""

    ok: bool
    details: Mapping[str, object] = field(default_factory=dict[str, object])
    ready: bool = True


@dataclass(frozen=True, slots=True)
class _Response:
    status: HTTPStatus
    content_type: str
    body: bytes

    def encode(self, head_only: bool) -> bytes:
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
            f"Content-Type: {self.content_type}\r\nContent-Length: {len(self.body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode("ascii") + (b"" if head_only else self.body)


class MetricsServer:
    """An HTTP endpoint for one node. Use it as `async with MetricsServer(metrics, health, port=9091) as server`.

    `health` is called on the event loop at each request and must not block. Port 0 takes a free port; `address` has it.
    """

    @checked
    def __init__(
        self, metrics: Metrics, health: Callable[[], Health], *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._metrics = metrics
        self._health = health
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Raises `Unavailable` where the address cannot be taken."""
        try:
            self._server = await asyncio.start_server(self._serve, self._host, self._port, limit=MAX_REQUEST_BYTES)
        except OSError as error:
            raise Unavailable(
                f"cannot listen on {self._host}:{self._port}: {error.strerror}", port=self._port
            ) from error

    async def stop(self) -> None:
        """Stop listening and end what is being served. May be called twice."""
        if self._server is None:
            return
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._server = None

    @property
    def address(self) -> tuple[str, int]:
        """The host and port listened on."""
        if self._server is None:
            raise InvalidRequest("the metrics server is not started")
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    async def __aenter__(self) -> MetricsServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # The client is gone, too slow or too long: closing the connection is the whole answer.
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        return _respond(self._metrics, self._health, method, path).encode(head_only=method == "HEAD")


Message: TypeAlias = "MutableMapping[str, Any]"
AsgiApp: TypeAlias = (
    "Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]"
)


@checked
def metrics_app(metrics: Metrics, health: Callable[[], Health]) -> AsgiApp:
    """`/metrics`, `/healthz` and `/readyz` as an ASGI application, to mount in a service that embeds a node:

        app.mount("/tidewal", metrics_app(metrics, health))  # FastAPI, Starlette

    A node makes its own: `node.metrics_app()`.

    `health` is called on the event loop at each request and must not block. It answers HTTP requests only; access is
    the service's matter. Raises `Unsupported` for another kind of connection.
    """

    async def app(
        scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http":
            raise Unsupported(f"/metrics is no endpoint for {scope['type']!r}", capability=scope["type"])
        response = _respond(metrics, health, scope["method"], _path_below(scope))
        headers = {"content-type": response.content_type, "content-length": str(len(response.body))}
        encoded = [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": response.status.value, "headers": encoded})
        body = b"" if scope["method"] == "HEAD" else response.body
        await send({"type": "http.response.body", "body": body})

    return app


def _path_below(scope: Message) -> str:
    """The path below the place where the application is mounted."""
    path, root = scope["path"], scope.get("root_path", "")
    if not path.startswith(root):  # a proxy has removed what lies before the outermost application
        root = root.removeprefix(scope.get("app_root_path", ""))
    return path.removeprefix(root)


def _respond(metrics: Metrics, health: Callable[[], Health], method: str, path: str) -> _Response:
    if method not in ("GET", "HEAD"):
        return _Response(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"only GET and HEAD\n")
    if path == "/metrics":
        return _Response(HTTPStatus.OK, CONTENT_TYPE_LATEST, metrics.render())
    if path in ("/healthz", "/readyz"):
        return _health_response(health, ready=path == "/readyz")
    return _Response(HTTPStatus.NOT_FOUND, "text/plain", b"/metrics, /healthz or /readyz\n")


def _health_response(check: Callable[[], Health], *, ready: bool) -> _Response:
    try:
        health = check()
    except Exception as error:
        health = Health(ok=False, details={"error": f"{type(error).__name__}: {error}"})
    ok = health.ok and (health.ready or not ready)
    status = HTTPStatus.OK if ok else HTTPStatus.SERVICE_UNAVAILABLE
    body = json.dumps({**health.details, "ok": ok}, default=str)
    return _Response(status, "application/json", body.encode())
