"""Metrics of what was read from channels."""

from __future__ import annotations

from collections.abc import Mapping

from ..metrics.metrics import Metrics
from .channel_reader import ReadCounts

READ_COUNTERS = {
    "records": "wal_scan_message_total",
    "bytes": "wal_scan_message_bytes_total",
    "duplicates": "wal_scan_duplicate_message_total",
    "fenced": "wal_scan_fenced_message_total",
    "incomplete": "wal_scan_incomplete_batch_total",
}  # by attribute of `ReadCounts`


class ReadMetrics:
    """Counts what was read and dropped, by channel. `publish` costs a few comparisons."""

    def __init__(
        self,
        metrics: Metrics,
        role: str,
        counts: Mapping[str, ReadCounts],
        counters: Mapping[str, str] = READ_COUNTERS,
    ) -> None:
        self._series = [
            (each, read, metrics.counter(name, channel_name=channel, role_name=role))
            for channel, each in counts.items()
            for read, name in counters.items()
        ]
        self._published = [0] * len(self._series)

    def publish(self) -> None:
        """Count what was read since the last call."""
        for at, (counts, read, handle) in enumerate(self._series):
            count: int = getattr(counts, read)
            if count != self._published[at]:
                handle.inc(count - self._published[at])
                self._published[at] = count
