"""Count the requests to an object store, which is what it is paid for."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from typing import Final

from ...runtime.errors import Unavailable
from ...runtime.metrics.metrics import Metrics
from .settings import CREATE_DOLLARS
from .store import ObjectStore

PRICES: Final = {"create": CREATE_DOLLARS, "list": 5e-6, "get": 0.4e-6, "head": 0.4e-6, "delete": 0.0}
LISTED_AT_ONCE: Final = 1000


class MeteredStore:
    """`ObjectStore` over another one, whose requests it counts."""

    def __init__(self, store: ObjectStore, metrics: Metrics) -> None:
        self._store = store
        self._requests = {kind: metrics.counter("objects_requests_total", kind=kind) for kind in PRICES}
        self._failed = {kind: metrics.counter("objects_failed_requests_total", kind=kind) for kind in PRICES}
        self._sent = metrics.counter("objects_sent_bytes_total")
        self._received = metrics.counter("objects_received_bytes_total")
        self._dollars = metrics.counter("objects_dollars_total")
        self._create_seconds = metrics.histogram("objects_create_duration_seconds")

    async def create(self, key: str, body: bytes) -> bool:
        began = time.perf_counter()
        with self._counted("create"):
            self._sent.inc(len(body))
            created = await self._store.create(key, body)
        self._create_seconds.observe(time.perf_counter() - began)
        return created

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes | None:
        with self._counted("get"):
            found = await self._store.get(key, start, end)
        self._received.inc(len(found or b""))
        return found

    async def modified(self, key: str) -> int | None:
        with self._counted("head"):
            return await self._store.modified(key)

    async def delete(self, key: str) -> None:
        with self._counted("delete"):
            await self._store.delete(key)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        with self._counted("list"):
            number = 0
            async for key in self._store.list(prefix):
                number += 1
                if number % LISTED_AT_ONCE == 0:
                    self._count("list")
                yield key

    async def close(self) -> None:
        await self._store.close()

    def _count(self, kind: str) -> None:
        self._requests[kind].inc()
        self._dollars.inc(PRICES[kind])

    @contextmanager
    def _counted(self, kind: str) -> Generator[None]:
        self._count(kind)
        try:
            yield
        except Unavailable:
            self._failed[kind].inc()
            raise
