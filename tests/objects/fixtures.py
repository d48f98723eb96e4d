"""An object store for the tests: one server a session, a bucket for each test, by the variables that users set."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from examples.flights.moto_store import MotoStore

from .faulty_http import FaultyStore


@pytest.fixture(scope="session")
def moto_store() -> Iterator[MotoStore]:
    with MotoStore() as store:
        yield store


@pytest.fixture
def bucket(moto_store: MotoStore, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new bucket, which this process and those that it starts find by their environment."""
    for name in [name for name in os.environ if name.upper().startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in moto_store.environment.items():
        monkeypatch.setenv(name, value)
    name = f"test-{uuid.uuid4().hex}"
    moto_store.create_bucket(name)
    return f"s3://{name}"


@pytest.fixture
def faulty(bucket: str, moto_store: MotoStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    """A proxy before the store, by which all that is opened from now on goes to `bucket`."""
    proxy = FaultyStore(moto_store.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    try:
        yield proxy
    finally:
        proxy.close()
