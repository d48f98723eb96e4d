"""Between a client and an object store: a proxy that knows requests, so that a test names the one that goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeAlias
from urllib.parse import unquote

Forward: TypeAlias = Callable[[], None]
Fault: TypeAlias = "Callable[[StoreRequest, Forward], bool]"
"""What becomes of a request. True: the client gets the answer of the store, to which the request goes now unless the
fault has sent it there itself. False: the connection is cut, or the fault has answered by itself."""

HELD_S = 60  # at most; a test that waits longer has gone wrong


class StoreRequest(BaseHTTPRequestHandler):
    """One request of a client. `method` and `key` say which."""

    protocol_version = "HTTP/1.1"
    server: FaultyStore

    @property
    def key(self) -> str:
        """Bucket and key."""
        return unquote(self.path.partition("?")[0]).lstrip("/")

    def answer(self, status: int, code: str) -> None:
        """An error of S3 instead of the store's answer."""
        self._send(status, {}, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answers: list[tuple[int, dict[str, str], bytes]] = []

        def forward() -> None:
            answers.append(self._forwarded(body))

        fault = self.server.fault
        if fault is None or fault(self, forward):
            if not answers:
                forward()
            self._send(*answers[-1])
        else:
            self.close_connection = True

    def _forwarded(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = HTTPConnection("127.0.0.1", self.server.store_port, timeout=HELD_S)
        try:
            connection.request(self.command, self.path, body, dict(self.headers))
            found = connection.getresponse()
            return found.status, dict(found.getheaders()), found.read()
        finally:
            connection.close()

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        of_connection = {"connection", "transfer-encoding", "server", "date"}
        length = headers.get("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body))
        for name, value in headers.items():
            if name.lower() not in of_connection | {"content-length"}:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = serve


class FaultyStore(ThreadingHTTPServer):
    """A proxy for the store at `store_port`, at a port of its own: `port`. `fault` is asked about each request."""

    daemon_threads = True

    def __init__(self, store_port: int) -> None:
        super().__init__(("127.0.0.1", 0), StoreRequest)
        self.store_port = store_port
        self.port: int = self.server_address[1]
        self.fault: Fault | None = None
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that a client has ended is none of a test's business."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()
