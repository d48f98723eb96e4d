"""Metrics of the Proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

from prometheus_client import Counter

from ...runtime.catalog.catalog import Collection
from ...runtime.errors import Overloaded, TidewalError
from ...runtime.log.record import Record
from ...runtime.metrics.metrics import Metrics
from ...runtime.rows.schema import OPS


class ProxyMetrics:
    """The series of the Proxy, and of each collection that is written. `inflight_bytes` returns what is not durable
    yet."""

    def __init__(self, metrics: Metrics, inflight_bytes: Callable[[], int]) -> None:
        self._metrics = metrics
        self._written = metrics.histogram("proxy_mutation_latency", status="success")
        self._refused = metrics.histogram("proxy_mutation_latency", status="failed")
        self._rows: dict[str, dict[str, Counter]] = {}
        metrics.gauge("proxy_inflight_bytes").set_function(inflight_bytes)

    def watch(
        self, collection: Collection, unflushed_bytes: Callable[[], int], unflushed_age_s: Callable[[], float]
    ) -> None:
        """Begin the series of a collection; `unflushed_bytes` returns what of it is not in its table yet, and
        `unflushed_age_s` for how many seconds the oldest of that has been in the log."""
        name = collection.name
        self._metrics.gauge("proxy_unflushed_age_seconds", collection_name=name).set_function(unflushed_age_s)
        self._metrics.gauge("proxy_unflushed_bytes", collection_name=name).set_function(unflushed_bytes)
        self._rows[name] = {
            "insert": self._metrics.counter("proxy_insert_vectors_total", collection_name=name),
            "upsert": self._metrics.counter("proxy_upsert_vectors_total", collection_name=name),
            "delete": self._metrics.counter("proxy_delete_vectors_total", collection_name=name),
        }

    def watches(self, collection: Collection) -> bool:
        """Whether the series of a collection have begun."""
        return collection.name in self._rows

    def forget(self, collection: Collection) -> None:
        """End the series of a collection that was dropped."""
        self._rows.pop(collection.name, None)
        self._metrics.forget("collection_name", collection.name)

    def written(self, collection: Collection, records: Iterable[tuple[str, Record]]) -> None:
        """Count the rows of a durable batch by operation."""
        handles = self._rows.get(collection.name, {})  # dropped meanwhile
        for _, record in records:
            for op in OPS:
                if op in record.tags and op in handles:
                    handles[op].inc(cast(int, record.tags[op]))

    def answered(self, latency_ms: float, error: TidewalError | None) -> None:
        """Count a reply to a write, with its `error` where it was refused."""
        (self._written if error is None else self._refused).observe(latency_ms)
        if isinstance(error, Overloaded):
            self._metrics.counter("overloaded_total", limit=str(error.fields.get("limit"))).inc()
