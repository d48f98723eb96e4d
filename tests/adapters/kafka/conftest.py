"""Logs on the brokers of the tests, each under a prefix of its own, and a broker that is reached through a proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from uuid import uuid4

import pytest

from tests.brokers.proxied import Proxied, proxied_kafka
from tidewal.adapters.kafka import KafkaWal, open_wal

Open = Callable[..., Awaitable[KafkaWal]]


@pytest.fixture
async def opening() -> AsyncIterator[Open]:
    """Open the log of this test at a cluster, again and again; all are closed at its end. Calls wait for long: a broker
    that was killed takes more than the usual half a minute to come back where the machine is busy."""
    prefix = uuid4().hex
    opened: list[KafkaWal] = []

    async def open_log(cluster, **options) -> KafkaWal:
        wal = await open_wal(f"{cluster.url}/{prefix}", **{"delivery_timeout_s": 100.0, **options})
        opened.append(wal)
        return wal

    yield open_log
    await asyncio.gather(*(wal.close() for wal in opened))


@pytest.fixture
async def proxied(tmp_path: Path) -> AsyncIterator[Proxied]:
    """A broker that tells its clients to come through the proxy."""
    async with proxied_kafka(tmp_path) as found:
        yield found
