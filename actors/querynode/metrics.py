"""Metrics of collections' rows in memory. Lags and sizes are computed when Prometheus scrapes, so a pipeline that
stands still shows it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

import pyarrow as pa

from ...runtime.clock import Clock, HybridClock
from ...runtime.metrics.metrics import Metrics
from ..metrics import lag_ms
from .row_store import RowStore


class LoadMetrics:
    """Counts loads of rows from tables: those under way, the time of those that ended well, rows and bytes."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._clock = clock
        self._under_way = metrics.gauge("querynode_loading_num")
        self._seconds = metrics.histogram("querynode_load_duration_seconds")
        self._rows = metrics.counter("querynode_load_rows_total")
        self._bytes = metrics.counter("querynode_load_bytes_total")

    @contextmanager
    def under_way(self) -> Generator[None]:
        """A load goes on in this block."""
        began_s = self._clock.monotonic()
        self._under_way.inc()
        try:
            yield
        finally:
            self._under_way.dec()
        self._seconds.observe(self._clock.monotonic() - began_s)

    def loaded(self, batch: pa.RecordBatch) -> None:
        """Count what a load has read."""
        self._rows.inc(batch.num_rows)
        self._bytes.inc(batch.nbytes)


def watch_rows(metrics: Metrics, collection: str, stores: Callable[[], Sequence[RowStore]]) -> None:
    """Begin the series of the rows of one collection, which are in these stores."""
    metrics.watch("querynode_memory_bytes", lambda: sum(store.bytes for store in stores()), collection_name=collection)
    metrics.watch(
        "querynode_entity_num", lambda: sum(store.row_count for store in stores()), collection_name=collection
    )


def watch_lag(metrics: Metrics, clock: HybridClock, vchannels: Iterable[str], time: Callable[[], int]) -> None:
    """Begin the series of how far these vchannels are behind. `time` is never 0, the lag of what is not known."""

    def lag() -> float:
        return lag_ms(clock, time())

    for vchannel in vchannels:
        metrics.watch("querynode_consume_tt_lag_ms", lag, channel_name=vchannel)


def forget_lag(metrics: Metrics, vchannels: Iterable[str]) -> None:
    """End the series of these vchannels: they would be further behind for ever."""
    for vchannel in vchannels:
        metrics.remove("querynode_consume_tt_lag_ms", channel_name=vchannel)
