"""A bucket on a store of the test run's own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from uuid import uuid4

import pytest

from tests.adapters.objects.processes import Processes
from tidewal.adapters.objects.bucket_store import BucketStore

CREDENTIALS = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
STARTED_WITHIN_S = 60.0


@pytest.fixture(scope="session")
def object_server() -> Iterator[str]:
    """The address of a server that speaks S3's protocol, in memory, on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + STARTED_WITHIN_S
        while not _listens(port):
            assert server.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def bucket_url(object_server: str) -> str:
    """The URL of a new bucket, with a prefix."""
    name = f"b{uuid4().hex}"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    direct.open(urllib.request.Request(f"{object_server}/{name}", method="PUT"), timeout=20).close()
    return f"s3://{name}/log"


@pytest.fixture
def bucket(object_server: str, bucket_url: str) -> BucketStore:
    """The store over a new bucket."""
    return BucketStore(bucket_url, {"endpoint": object_server, **CREDENTIALS})


@pytest.fixture
def processes() -> Processes:
    """Processes over one simulated store."""
    return Processes()
