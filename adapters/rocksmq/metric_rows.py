"""The rows of RocksMQ in the table of metrics."""

from __future__ import annotations

from ...runtime.metrics.metric import COMMIT_SECONDS_BUCKETS, Metric, counter, gauge, seconds, sizes

METRICS: tuple[Metric, ...] = (
    seconds(
        "rocksmq_journal_commit_duration_seconds",
        "One commit of the journal: write and sync",
        buckets=COMMIT_SECONDS_BUCKETS,
    ),
    sizes("rocksmq_journal_commit_bytes", "Size of a commit"),
    counter("rocksmq_journal_written_bytes_total", "Bytes written to the journal, headers included", unit="bytes"),
    gauge("rocksmq_journal_bytes", "bytes", "Size of the journal on disk"),
    gauge("rocksmq_journal_segments", "count", "Segments, by state: live or spare", "state"),
    counter("rocksmq_journal_recycled_bytes_total", "Bytes that retention removed", unit="bytes"),
    counter("rocksmq_groups_cut_off_total", "Consumer groups that lost entries of a channel to retention"),
    counter("rocksmq_index_failures_total", "Times that the index was damaged or failed, and was discarded"),
    gauge("rocksmq_journal_failed", "info", "1 after a failed write or sync, until reopened"),
    gauge(
        "rocksmq_disk_pressure",
        "info",
        "1 while appends are refused for lack of space; limit rocksmq.freeSpaceInMB",
    ),
    gauge("rocksmq_free_space_bytes", "bytes", "Free space of the journal's file system"),
    gauge(
        "rocksmq_free_space_limit_bytes", "bytes", "Free space below which appends are refused: rocksmq.freeSpaceInMB"
    ),
)
