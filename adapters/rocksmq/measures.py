"""What RocksMQ tells Prometheus, or nobody."""

from __future__ import annotations

from ...runtime.metrics import Metrics


class Measures:
    """Handles on the `rocksmq_*` metrics; with None every call costs next to nothing. Thread-safe."""

    def __init__(self, metrics: Metrics | None) -> None:
        self._metrics = metrics
        if metrics is not None:
            self._seconds = metrics.histogram("rocksmq_journal_commit_duration_seconds")
            self._bytes = metrics.histogram("rocksmq_journal_commit_bytes")
            self._written = metrics.counter("rocksmq_journal_written_bytes_total")

    def committed(self, seconds: float, body_bytes: int, written_bytes: int) -> None:
        if self._metrics is not None:
            self._seconds.observe(seconds)
            self._bytes.observe(body_bytes)
            self._written.inc(written_bytes)

    def failed(self) -> None:
        if self._metrics is not None:
            self._metrics.gauge("rocksmq_journal_failed").set(1)

    def removed(self, size: int) -> None:
        if self._metrics is not None:
            self._metrics.counter("rocksmq_journal_recycled_bytes_total").inc(size)

    def space(self, free_bytes: int, journal_bytes: int, live_segments: int, spare_segments: int) -> None:
        if self._metrics is not None:
            self._metrics.gauge("rocksmq_free_space_bytes").set(free_bytes)
            self._metrics.gauge("rocksmq_journal_bytes").set(journal_bytes)
            self._metrics.gauge("rocksmq_journal_segments", state="live").set(live_segments)
            self._metrics.gauge("rocksmq_journal_segments", state="spare").set(spare_segments)
