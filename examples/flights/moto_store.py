"""An object store for demos and tests: moto, which speaks S3 and keeps everything in its memory."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import closing
from http.client import HTTPConnection
from tempfile import TemporaryFile
from types import TracebackType
from typing import Final, Self

START_S: Final = 60
ACCESS_KEY: Final = "testing"

_SIGNED = f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/20260101/us-east-1/s3/aws4_request"  # moto checks no signature
# moto looks whether an object is there and then creates it; two requests that Python switches between would both do so.
_SERVER: Final = "import sys; sys.setswitchinterval(60); from moto.server import main; main(sys.argv[1:])"
_port = re.compile(rb"http://127\.0\.0\.1:(\d+)")


class MotoStore:
    """A server of its own on a port of the loopback, from its construction until `close`. A context manager."""

    def __init__(self) -> None:
        """Raises `RuntimeError` where it does not start within `START_S`."""
        self._said = TemporaryFile()  # noqa: SIM115 -- closed with the server
        arguments = [sys.executable, "-c", _SERVER, "--host", "127.0.0.1", "--port", "0"]
        self._process = subprocess.Popen(arguments, stdout=self._said, stderr=self._said)
        try:
            self.port: int = self._started()
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which the clients of S3 find it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def create_bucket(self, name: str) -> None:
        """Create a bucket; one that is there stays as it is. Raises `ValueError` for a name that none may have."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=START_S)) as connection:
            connection.request("PUT", f"/{name}", headers={"Authorization": _SIGNED})
            answer = connection.getresponse()
            if answer.status == 400:
                raise ValueError(f"no bucket may be called {name!r}: {answer.read().decode()}")

    def close(self) -> None:
        """End the server; what it holds is gone."""
        self._process.kill()
        self._process.wait()
        self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _started(self) -> int:
        """The port, which the server says once it listens."""
        ends = time.monotonic() + START_S
        while time.monotonic() < ends and self._process.poll() is None:
            self._said.seek(0)
            if found := _port.search(self._said.read()):
                return int(found[1])
            time.sleep(0.05)
        self._said.seek(0)
        raise RuntimeError(f"moto did not start: {self._said.read().decode(errors='replace')[-500:]}")
