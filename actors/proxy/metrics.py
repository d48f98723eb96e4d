"""Metrics of the Proxy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from prometheus_client import Counter

from ...runtime.catalog.catalog import Collection
from ...runtime.errors import Overloaded, TidewalError
from ...runtime.log.record import Record
from ...runtime.metrics.metrics import Metrics
from ...runtime.rows.schema import OPS
from .partitioned_messages import PartitionedMessages
from .sharded_rows import ShardedRows


class ProxyMetrics:
    """The series of the Proxy, and of each collection that is written."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._written = metrics.histogram("proxy_mutation_latency", status="success")
        self._refused = metrics.histogram("proxy_mutation_latency", status="failed")
        self._rows: dict[
            str, tuple[int, dict[str, Counter]]
        ] = {}  # by collection name: its id, and series by operation

    def watch(self, collection: Collection) -> dict[str, Counter]:
        """The series of a collection, by operation. They begin with the first call; the series of a dropped collection
        of that name have ended with it."""
        name = collection.name
        id, series = self._rows.get(name, (0, {}))
        if id != collection.id:
            series = {
                "insert": self._metrics.counter("proxy_insert_vectors_total", collection_name=name),
                "upsert": self._metrics.counter("proxy_upsert_vectors_total", collection_name=name),
                "delete": self._metrics.counter("proxy_delete_vectors_total", collection_name=name),
            }
            self._rows[name] = collection.id, series
        return series

    def written(self, collection: Collection, records: Iterable[tuple[str, Record]]) -> None:
        """Count the rows of a durable batch by operation."""
        series = self.watch(collection)
        for _, record in records:
            for op in OPS:
                if op in record.tags:
                    series[op].inc(cast(int, record.tags[op]))

    def sent(self, topic: str, messages: int, size: int) -> None:
        """Count durable messages of a topic, and their bytes."""
        self._metrics.counter("proxy_topic_message_total", topic_name=topic).inc(messages)
        self._metrics.counter("proxy_topic_bytes_total", topic_name=topic).inc(size)

    def committed(self, participants: Iterable[ShardedRows | PartitionedMessages]) -> None:
        """Count a durable transaction, and what it has written."""
        self._metrics.counter("proxy_transaction_total").inc()
        for each in participants:
            if isinstance(each, ShardedRows):
                self.written(each.collection, each.records)
            else:
                self.sent(each.topic.name, len(each.records), sum(len(record.body) for _, record in each.records))

    def answered(self, latency_ms: float, error: TidewalError | None) -> None:
        """Count a reply to a write, with its `error` where it was refused."""
        (self._written if error is None else self._refused).observe(latency_ms)
        if isinstance(error, Overloaded):
            self._metrics.counter("overloaded_total", limit=str(error.fields.get("limit"))).inc()
