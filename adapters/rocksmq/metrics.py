"""The Prometheus metrics of RocksMQ."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from ...runtime.metrics.metrics import Metrics


class RocksMQMetrics:
    """Handles on the `rocksmq_*` metrics, of a registry that nothing reads where there is none. Thread-safe."""

    def __init__(self, metrics: Metrics | None) -> None:
        self._counts_commits = metrics is not None  # else a commit costs nothing here
        metrics = metrics or Metrics()
        self._seconds = metrics.histogram("rocksmq_journal_commit_duration_seconds")
        self._bytes = metrics.histogram("rocksmq_journal_commit_bytes")
        self._written = metrics.counter("rocksmq_journal_written_bytes_total")
        self.recycled_bytes: Counter = metrics.counter("rocksmq_journal_recycled_bytes_total")
        self.failed: Gauge = metrics.gauge("rocksmq_journal_failed")
        self.groups_cut_off: Counter = metrics.counter("rocksmq_groups_cut_off_total")
        self.index_failures: Counter = metrics.counter("rocksmq_index_failures_total")
        self._refused = metrics.gauge("rocksmq_disk_pressure")
        self._free = metrics.gauge("rocksmq_free_space_bytes")
        self.free_limit: Gauge = metrics.gauge("rocksmq_free_space_limit_bytes")
        self._size = metrics.gauge("rocksmq_journal_bytes")
        self._live = metrics.gauge("rocksmq_journal_segments", state="live")
        self._spare = metrics.gauge("rocksmq_journal_segments", state="spare")
        self.failed.set(0)  # a log that is opened anew has not failed

    def committed(self, seconds: float, body_bytes: int, written_bytes: int) -> None:
        """Count a commit, which took so many seconds."""
        if self._counts_commits:
            self._seconds.observe(seconds)
            self._bytes.observe(body_bytes)
            self._written.inc(written_bytes)

    def space(
        self, free_bytes: int, journal_bytes: int, live_segments: int, spare_segments: int, *, refused: bool
    ) -> None:
        """Set the present sizes, and whether appends are refused for lack of space."""
        self._refused.set(refused)
        self._free.set(free_bytes)
        self._size.set(journal_bytes)
        self._live.set(live_segments)
        self._spare.set(spare_segments)
