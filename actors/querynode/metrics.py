"""Metrics of collections' rows in memory. Lags and sizes are computed when Prometheus scrapes, so a pipeline that
stands still shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ...runtime.clock import HybridClock
from ...runtime.metrics.metrics import Metrics
from ..metrics import lag_ms
from .row_store import RowStore


def watch_rows(metrics: Metrics, collection: str, stores: Callable[[], Sequence[RowStore]]) -> None:
    """Begin the series of the rows of one collection, which are in these stores."""
    memory = metrics.gauge("querynode_memory_bytes", collection_name=collection)
    memory.set_function(lambda: sum(store.bytes for store in stores()))
    rows = metrics.gauge("querynode_entity_num", collection_name=collection)
    rows.set_function(lambda: sum(store.row_count for store in stores()))


def watch_lag(metrics: Metrics, clock: HybridClock, vchannels: Iterable[str], time: Callable[[], int]) -> None:
    """Begin the series of how far these vchannels are behind. `time` is never 0, the lag of what is not known."""
    for vchannel in vchannels:
        lag = metrics.gauge("querynode_consume_tt_lag_ms", channel_name=vchannel)
        lag.set_function(lambda: lag_ms(clock, time()))
