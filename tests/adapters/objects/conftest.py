"""A bucket on a store of the test run's own."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from uuid import uuid4

import pytest

from examples.flights.moto_store import MotoStore
from tests.adapters.objects.processes import Processes
from tidewal.adapters.objects.bucket_store import BucketStore

CREDENTIALS = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}


@pytest.fixture(scope="session")
def object_server() -> Iterator[str]:
    """The address of a server that speaks S3's protocol, in memory, on loopback."""
    with MotoStore() as store:
        yield f"http://127.0.0.1:{store.port}"


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
