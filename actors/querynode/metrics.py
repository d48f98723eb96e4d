"""Metrics of a collection's rows in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...runtime.catalog.catalog import Collection
from ...runtime.clock import HybridClock
from ...runtime.metrics.metrics import Metrics
from ..metrics import lag_ms
from .row_store import RowStore


def watch_rows(
    metrics: Metrics,
    clock: HybridClock,
    collection: Collection,
    tsafe: Callable[[], int],
    stores: Callable[[], Sequence[RowStore]],
) -> None:
    """Begin the series of one collection. Lags and sizes are computed when Prometheus scrapes, so a pipeline that
    stands still shows it. `tsafe` is never 0, the lag of what is not known."""
    memory = metrics.gauge("querynode_memory_bytes", collection_name=collection.name)
    memory.set_function(lambda: sum(store.bytes for store in stores()))
    rows = metrics.gauge("querynode_entity_num", collection_name=collection.name)
    rows.set_function(lambda: sum(store.row_count for store in stores()))
    for vchannel in collection.vchannels:
        lag = metrics.gauge("querynode_consume_tt_lag_ms", channel_name=vchannel)
        lag.set_function(lambda: lag_ms(clock, tsafe()))
