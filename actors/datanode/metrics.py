"""Metrics of a flush pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from prometheus_client import Counter

from ...runtime.catalog.catalog import Collection
from ...runtime.clock import HybridClock, physical_ms
from ...runtime.metrics.metrics import Metrics
from ...runtime.streams.dispatched_stream import DispatchedStream
from ...runtime.streams.messages import MsgPack
from ..metrics import ScanMetrics, lag_ms
from .log_table import FlushResult


class FlushMetrics(ScanMetrics):
    """The series of one collection. Lags and sizes are computed when Prometheus scrapes, so a pipeline that stands
    still shows it. `buffered_bytes` returns what no flush has taken yet."""

    def __init__(
        self,
        metrics: Metrics,
        clock: HybridClock,
        collection: Collection,
        stream: DispatchedStream,
        buffered_bytes: Callable[[], int],
    ) -> None:
        super().__init__(metrics, "datanode", collection, stream)
        name = collection.name
        self._rows = metrics.counter("datanode_msg_rows_total")
        self._flushes = metrics.counter("datanode_flush_req_total", collection_name=name, status="success")
        self.failures: Counter = metrics.counter("datanode_flush_req_total", collection_name=name, status="failed")
        # of compactions, joins and vacuums
        self.maintenance_failures: Counter = metrics.counter("datanode_maintenance_failed_total", collection_name=name)
        self._flushed_rows = metrics.counter("datanode_flushed_data_rows_total", collection_name=name)
        self._flushed_bytes = metrics.counter("datanode_flushed_data_size_total", collection_name=name)
        self._seconds = metrics.histogram("datanode_flush_duration_seconds", collection_name=name)
        metrics.gauge("datanode_fg_buffer_size", collection_name=name).set_function(buffered_bytes)
        self._checkpoints = [
            metrics.gauge("datanode_channel_checkpoint_unix_seconds", channel_name=vchannel)
            for vchannel in collection.vchannels
        ]
        for vchannel in collection.vchannels:
            lag = metrics.gauge("datanode_consume_tt_lag_ms", channel_name=vchannel)
            lag.set_function(lambda: lag_ms(clock, max(stream.end_ts, stream.idle_time)))

    def consumed(self, pack: MsgPack) -> None:
        super().consumed(pack)
        if pack.messages:
            self._rows.inc(sum(cast(int, record.tags.get("rows", 0)) for record in pack.messages))

    def stored(self, time: int) -> None:
        """Set the checkpoint: the table holds everything up to the timestamp `time`."""
        for checkpoint in self._checkpoints:
            checkpoint.set(physical_ms(time) / 1000)

    def flushed(self, result: FlushResult, seconds: float) -> None:
        """Count a flush whose event is published, and that took `seconds`."""
        self._flushes.inc()
        self._flushed_rows.inc(result.rows)
        self._flushed_bytes.inc(result.size_bytes)
        self._seconds.observe(seconds)
