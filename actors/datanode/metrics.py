"""Metrics of a flush pipeline."""

from __future__ import annotations

from collections.abc import Callable

from ...runtime.catalog.catalog import Collection
from ...runtime.clock import HybridClock, physical_ms
from ...runtime.metrics.metrics import Metrics
from ...runtime.streams.messages import MsgPack
from ...runtime.streams.tt_stream import TtMsgStream
from ..metrics import ScanMetrics, lag_ms, message_counts
from .log_table import FlushResult


class FlushMetrics:
    """The series of one collection. Lags and sizes are computed when Prometheus scrapes, so a pipeline that stands
    still shows it. `buffered_bytes` returns what no flush has taken yet."""

    def __init__(
        self,
        metrics: Metrics,
        clock: HybridClock,
        collection: Collection,
        stream: TtMsgStream,
        buffered_bytes: Callable[[], int],
    ) -> None:
        self._metrics = metrics
        self._scan = ScanMetrics(metrics, "datanode", collection, stream)
        name = collection.name
        self._bytes = metrics.counter("datanode_consume_bytes_total")
        self._rows = metrics.counter("datanode_msg_rows_total")
        self._flushes = metrics.counter("datanode_flush_req_total", collection_name=name, status="success")
        self._failures = metrics.counter("datanode_flush_req_total", collection_name=name, status="failed")
        self._maintenance_failures = metrics.counter("datanode_maintenance_failed_total", collection_name=name)
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
            lag.set_function(lambda: lag_ms(clock, stream.end_ts))

    def consumed(self, pack: MsgPack) -> None:
        """Count a pack that was buffered."""
        self._scan.publish()
        if pack.messages:
            kinds, size, rows = message_counts(pack)
            for kind, count in kinds.items():
                self._metrics.counter("datanode_consume_msg_total", msg_type=kind.name.lower()).inc(count)
            self._bytes.inc(size)
            self._rows.inc(rows)

    def publish(self) -> None:
        """Count what was read since the last pack."""
        self._scan.publish()

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

    def not_maintained(self) -> None:
        """Count a failed compaction, join or vacuum."""
        self._maintenance_failures.inc()

    def failed(self) -> None:
        """Count an attempt of a flush that failed."""
        self._failures.inc()
