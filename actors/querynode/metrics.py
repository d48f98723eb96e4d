"""Metrics of a collection's rows in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...runtime.catalog.catalog import Collection
from ...runtime.clock import HybridClock
from ...runtime.metrics.metrics import Metrics
from ...runtime.streams.messages import MsgPack
from ...runtime.streams.tt_stream import TtMsgStream
from ..metrics import ScanMetrics, lag_ms, message_counts
from .row_store import RowStore


class RowMetrics:
    """The series of one collection. Lags and sizes are computed when Prometheus scrapes, so a pipeline that stands
    still shows it."""

    def __init__(
        self,
        metrics: Metrics,
        clock: HybridClock,
        collection: Collection,
        tsafe: Callable[[], int],
        stores: Callable[[], Sequence[RowStore]],
    ) -> None:
        self._metrics = metrics
        self._collection = collection
        self._scan: ScanMetrics | None = None
        self._bytes = metrics.counter("querynode_consume_bytes_total")
        memory = metrics.gauge("querynode_memory_bytes", collection_name=collection.name)
        memory.set_function(lambda: sum(store.bytes for store in stores()))
        rows = metrics.gauge("querynode_entity_num", collection_name=collection.name)
        rows.set_function(lambda: sum(store.row_count for store in stores()))
        for vchannel in collection.vchannels:
            lag = metrics.gauge("querynode_consume_tt_lag_ms", channel_name=vchannel)
            lag.set_function(lambda: lag_ms(clock, tsafe()))

    def reading(self, stream: TtMsgStream) -> None:
        """Begin to count what `stream` reads."""
        self._scan = ScanMetrics(self._metrics, "querynode", self._collection, stream)

    def publish(self) -> None:
        """Count what was read since the last call."""
        if self._scan is not None:
            self._scan.publish()

    def consumed(self, pack: MsgPack) -> None:
        """Count a pack that was applied."""
        self.publish()
        if pack.messages:
            kinds, size, _ = message_counts(pack)
            for kind, count in kinds.items():
                self._metrics.counter("querynode_consume_msg_total", msg_type=kind.name.lower()).inc(count)
            self._bytes.inc(size)
