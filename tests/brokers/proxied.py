"""Brokers that tell their clients to come through a proxy, each for one test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.wal import ChannelPolicy

from .fixtures import require
from .kafka import KafkaCluster
from .proxy import Proxy
from .pulsar import PulsarStandalone


@dataclass(frozen=True)
class Proxied:
    """The URL of a log behind the proxy, and its brokers."""

    url: str
    proxy: Proxy
    brokers: KafkaCluster | PulsarStandalone


@asynccontextmanager
async def proxied_kafka(directory: Path) -> AsyncIterator[Proxied]:
    """All requests go through the proxy, but for a client's first."""
    require("kafka")
    proxy = Proxy()
    port = await proxy.start()
    cluster = KafkaCluster(directory, settings={"advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}"})
    proxy.broker_port = int(cluster.bootstrap.rpartition(":")[2])
    async with _running(cluster, proxy):
        yield Proxied(cluster.url, proxy, cluster)


@asynccontextmanager
async def proxied_pulsar(directory: Path) -> AsyncIterator[Proxied]:
    """Messages go through the proxy; Pulsar's administration is reached without."""
    require("pulsar")
    proxy = Proxy()
    port = await proxy.start()
    settings = {
        "advertisedListeners": f"proxy:pulsar://127.0.0.1:{port}",
        "internalListenerName": "proxy",
        "advertisedAddress": "",
    }
    broker = PulsarStandalone(directory, settings=settings)
    proxy.broker_port = urlsplit(broker.url).port or 0
    url = f"pulsar://127.0.0.1:{port}?web_url={broker.web_url}"
    async with _running(broker, proxy):
        patient = await open_wal(url)
        await patient.create_channel("first", ChannelPolicy())  # takes a new broker longer than all that follow
        await patient.close()
        yield Proxied(url, proxy, broker)


PROXIED: dict[str, Callable[[Path], AbstractAsyncContextManager[Proxied]]] = {
    "kafka": proxied_kafka,
    "pulsar": proxied_pulsar,
}


@asynccontextmanager
async def _running(broker: KafkaCluster | PulsarStandalone, proxy: Proxy) -> AsyncIterator[None]:
    try:
        await asyncio.to_thread(broker.start)
        yield
    finally:
        await proxy.stop()
        await asyncio.to_thread(broker.stop)
