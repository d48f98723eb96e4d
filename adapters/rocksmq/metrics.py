"""The Prometheus metrics of RocksMQ, where there is a registry for them."""

from __future__ import annotations

from ...runtime.metrics.metrics import Metrics


class RocksMQMetrics:
    """Handles on the `rocksmq_*` metrics; with None every call costs next to nothing. Thread-safe."""

    def __init__(self, metrics: Metrics | None) -> None:
        self._metrics = metrics
        if metrics is not None:
            self._seconds = metrics.histogram("rocksmq_journal_commit_duration_seconds")
            self._bytes = metrics.histogram("rocksmq_journal_commit_bytes")
            self._written = metrics.counter("rocksmq_journal_written_bytes_total")
            self._recycled = metrics.counter("rocksmq_journal_recycled_bytes_total")
            self._failed = metrics.gauge("rocksmq_journal_failed")
            self._cut_off = metrics.counter("rocksmq_groups_cut_off_total")
            self._index_failures = metrics.counter("rocksmq_index_failures_total")
            self._free = metrics.gauge("rocksmq_free_space_bytes")
            self._size = metrics.gauge("rocksmq_journal_bytes")
            self._live = metrics.gauge("rocksmq_journal_segments", state="live")
            self._spare = metrics.gauge("rocksmq_journal_segments", state="spare")
            self._failed.set(0)  # a log that is opened anew has not failed

    def committed(self, seconds: float, body_bytes: int, written_bytes: int) -> None:
        if self._metrics is not None:
            self._seconds.observe(seconds)
            self._bytes.observe(body_bytes)
            self._written.inc(written_bytes)

    def failed(self) -> None:
        if self._metrics is not None:
            self._failed.set(1)

    def removed(self, size: int) -> None:
        if self._metrics is not None:
            self._recycled.inc(size)

    def cut_off(self) -> None:
        if self._metrics is not None:
            self._cut_off.inc()

    def index_failed(self) -> None:
        if self._metrics is not None:
            self._index_failures.inc()

    def space(self, free_bytes: int, journal_bytes: int, live_segments: int, spare_segments: int) -> None:
        if self._metrics is not None:
            self._free.set(free_bytes)
            self._size.set(journal_bytes)
            self._live.set(live_segments)
            self._spare.set(spare_segments)
