"""Spark's query progress as metrics: listeners, which Spark calls from threads of its own."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable
from typing import Any, cast

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    SourceProgress,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from ...runtime.clock import physical_ms
from ...runtime.metrics.metrics import QUERY, Metrics
from ...runtime.metrics.server import Health

STATUSES = ("success", "failed")
RATES = ("spark_input_rows_per_second", "spark_processed_rows_per_second")


class QueryMetrics(StreamingQueryListener):
    """Writes the progress of streaming queries into `metrics`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._running: dict[str, str] = {}  # names of queries by run
        self._failed: dict[str, str] = {}  # why, by name
        self._ended = {status: metrics.counter("spark_query_ended_total", status=status) for status in STATUSES}

    def health(self) -> Health:
        """Healthy unless a query has failed and was not started again."""
        with self._lock:
            return Health(not self._failed, {"running": sorted(self._running.values()), "failed": dict(self._failed)})

    def started(self, run: str, name: str) -> None:
        """Count the query `name` as running under the id `run`. May be called twice."""
        with self._lock:
            self._running[run] = name
            self._failed.pop(name, None)
            self._metrics.gauge("spark_query_num").set(len(self._running))

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Called by Spark before `start` returns."""
        self.started(str(event.runId), event.name or str(event.id))

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Called by Spark after a micro-batch."""
        progress = event.progress
        _write(self._metrics, progress.name or str(progress.id), progress)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Called by Spark while there is nothing to do."""
        with self._lock:
            name = self._running.get(str(event.runId))
        if name is not None:
            for rate in RATES:
                self._metrics.gauge(rate, query_name=name).set(0)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Called by Spark when a query has ended."""
        status = "success" if event.exception is None else "failed"
        self._ended[status].inc()
        with self._lock:
            name = self._running.pop(str(event.runId), str(event.id))
            if event.exception is not None:
                self._failed[name] = event.exception.partition("\n")[0]
            self._metrics.gauge("spark_query_num").set(len(self._running))
            if name not in self._running.values():
                self._metrics.forget(QUERY, name)


class Idle(StreamingQueryListener):
    """A listener that does nothing."""

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Ignored."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Ignored."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Ignored."""


def _write(metrics: Metrics, name: str, progress: StreamingQueryProgress) -> None:
    for rate, value in zip(RATES, (progress.inputRowsPerSecond, progress.processedRowsPerSecond), strict=True):
        metrics.gauge(rate, query_name=name).set(value if math.isfinite(value) else 0)
    metrics.counter("spark_input_rows_total", query_name=name).inc(progress.numInputRows)
    metrics.histogram("spark_batch_duration_seconds", query_name=name).observe(progress.batchDuration / 1000)
    state = progress.stateOperators
    metrics.gauge("spark_state_rows", query_name=name).set(sum(each.numRowsTotal for each in state))
    metrics.gauge("spark_state_bytes", query_name=name).set(sum(each.memoryUsedBytes for each in state))
    late = sum(each.numRowsDroppedByWatermark for each in state)
    metrics.counter("spark_late_rows_total", query_name=name).inc(late)
    _write_times(metrics, name, progress.sources)


def _write_times(metrics: Metrics, name: str, sources: Iterable[SourceProgress]) -> None:
    """Of several sources the one that is furthest behind counts. Those of others have no such times."""
    ends: list[int] = []
    lags: list[int] = []
    for source in sources:
        end, newest = _physical_time(source.endOffset), _physical_time(source.latestOffset)
        if end is not None:
            ends.append(end)
            lags.append(0 if newest is None else max(newest - end, 0))
    if ends:
        metrics.gauge("spark_read_unix_seconds", query_name=name).set(min(ends) / 1000)
        metrics.gauge("spark_cut_lag_ms", query_name=name).set(max(lags))


def _physical_time(offset: str) -> int | None:
    """The time of a Tidewal offset in milliseconds; None for the beginning, for no offset, and for those of others."""
    try:
        decoded: Any = json.loads(offset)
    except ValueError:
        return None
    if not isinstance(decoded, dict):
        return None
    time = cast("dict[str, object]", decoded).get("t")
    return physical_ms(time) if isinstance(time, int) and "v" in decoded and time > 0 else None
