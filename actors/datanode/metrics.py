"""Metrics of a flush pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from ...runtime.catalog.catalog import Collection
from ...runtime.clock import HybridClock, physical_ms
from ...runtime.metrics.metrics import Metrics
from ...runtime.streams.dispatched_stream import DispatchedStream
from ...runtime.streams.messages import MsgPack
from ..metrics import ScanMetrics, lag_ms, watch_pending
from .log_table import FlushResult


def end_computed(metrics: Metrics, collection: Collection) -> None:
    """End the series of a collection that are computed: they would say for ever where its pipeline was, and keep its
    rows."""
    metrics.remove("datanode_fg_buffer_size", collection_name=collection.name)
    metrics.remove("wal_scanner_pending_queue_bytes", collection_name=collection.name, role_name="datanode")
    for vchannel in collection.vchannels:
        metrics.remove("datanode_consume_tt_lag_ms", channel_name=vchannel)
        metrics.remove("datanode_channel_checkpoint_unix_seconds", channel_name=vchannel)


class FlushMetrics(ScanMetrics):
    """The series of one collection; those of flushes begin with the first one. Lags and sizes are computed when
    Prometheus scrapes, so a pipeline that stands still shows it. `buffered_bytes` returns what no flush has taken
    yet."""

    def __init__(
        self,
        metrics: Metrics,
        clock: HybridClock,
        collection: Collection,
        stream: DispatchedStream,
        buffered_bytes: Callable[[], int],
    ) -> None:
        super().__init__(metrics, "datanode", stream)
        self._name = collection.name
        self._rows = metrics.counter("datanode_msg_rows_total")
        self._checkpoint_s = 0.0
        metrics.watch("datanode_fg_buffer_size", buffered_bytes, collection_name=collection.name)
        watch_pending(metrics, "datanode", collection.name, lambda: stream.buffered_bytes)

        def lag() -> float:
            return lag_ms(clock, max(stream.end_ts, stream.idle_time))

        for vchannel in collection.vchannels:
            metrics.watch("datanode_consume_tt_lag_ms", lag, channel_name=vchannel)
            metrics.watch("datanode_channel_checkpoint_unix_seconds", lambda: self._checkpoint_s, channel_name=vchannel)

    def consumed(self, pack: MsgPack) -> None:
        super().consumed(pack)
        if pack.messages:
            self._rows.inc(sum(cast(int, record.tags.get("rows", 0)) for record in pack.messages))

    def stored(self, time: int) -> None:
        """Set the checkpoint: the table holds everything up to the timestamp `time`."""
        self._checkpoint_s = physical_ms(time) / 1000

    def flushed(self, result: FlushResult, seconds: float) -> None:
        """Count a flush whose event is published, and that took `seconds`."""
        name, counter = self._name, self._metrics.counter
        counter("datanode_flush_req_total", collection_name=name, status="success").inc()
        counter("datanode_flushed_data_rows_total", collection_name=name).inc(result.rows)
        counter("datanode_flushed_data_size_total", collection_name=name).inc(result.size_bytes)
        self._metrics.histogram("datanode_flush_duration_seconds", collection_name=name).observe(seconds)

    def failed(self) -> None:
        """Count a step of a flush that failed, and is tried again."""
        self._metrics.counter("datanode_flush_req_total", collection_name=self._name, status="failed").inc()

    def maintenance_failed(self) -> None:
        """Count a compaction, join or vacuum that failed."""
        self._metrics.counter("datanode_maintenance_failed_total", collection_name=self._name).inc()
