"""Retention: which of the oldest segments are not needed any more.

A segment is removed when every entry of every channel in it is expired by time or size, truncated, acknowledged (where
the channel's policy says so), or of a dropped channel, and no holder needs any of them. The oldest segments are removed
first, so the journal stays one run without gaps. Time and size rule over groups that do not acknowledge: those are cut
off.

No step of the wall clock makes entries old: see `Ages`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from ....runtime.clock import Clock
from ..index.index import Index, SegmentSummary
from ..metrics import RocksMQMetrics
from ..owner.channel_cache import LiveChannel
from .channels import ChannelTable
from .journal import Journal
from .registry import Registry
from .segments import Segments

STEP_LASTS_S = 3600.0  # a wall clock that is ahead for so long is right

_log = logging.getLogger(__name__)


class Ages:
    """How long segments have been full, at least.

    For segments that this incarnation of the owner filled, by the monotonic clock. For the others the wall clock has to
    say how long the log was closed. It may be wrong, for a second or since the machine was started, so the log has a
    time of its own: from where the journal ends it goes on with the monotonic clock. A wall clock that is ahead of it
    is believed when that has lasted for `STEP_LASTS_S`.
    """

    def __init__(self, clock: Clock, table: ChannelTable) -> None:
        """The journal's table keeps the log's time."""
        self._clock, self._table = clock, table
        self._opened_at = clock.monotonic()
        self._log_ms = min(table.log_ms, clock.wall_ms())  # the log's time when it was opened
        self._ahead_ms, self._ahead_since = 0.0, 0.0
        self.observe()

    def observe(self) -> None:
        """Compare the log's time with the wall clock, and move it on where the wall clock is believed."""
        now = self._clock.monotonic()
        self._table.log_ms = int(self._log_time(now))
        ahead_ms = self._clock.wall_ms() - self._log_time(now)
        if ahead_ms <= 0 or self._ahead_ms <= 0:
            self._ahead_ms, self._ahead_since = ahead_ms, now
            return
        self._ahead_ms = min(ahead_ms, self._ahead_ms)
        if now - self._ahead_since >= STEP_LASTS_S:
            self._log_ms += int(self._ahead_ms)
            self._ahead_ms = 0.0

    def of(self, summary: SegmentSummary) -> float:
        """The age of a full segment, in milliseconds."""
        now = self._clock.monotonic()
        if summary.sealed_at is not None:
            return (now - summary.sealed_at) * 1000
        return max(self._log_time(now) - summary.sealed_ms, (now - self._opened_at) * 1000)

    def _log_time(self, now: float) -> float:
        return self._log_ms + (now - self._opened_at) * 1000


class Retention:
    """Applies the rules to one journal. Thread-safe."""

    def __init__(
        self,
        journal: Journal,
        segments: Segments,
        index: Index,
        registry: Registry,
        *,
        clock: Clock,
        metrics: RocksMQMetrics,
    ) -> None:
        self._journal, self._segments, self._index, self._registry = journal, segments, index, registry
        self._ages, self._metrics = Ages(clock, journal.table), metrics
        self._lock = threading.Lock()

    def apply(self) -> int:
        """Remove the segments that may be removed; how many."""
        with self._lock:
            sealed = sorted(self._journal.sealed.copy().items())
            channels = self._registry.by_number.copy()
            self._ages.observe()
            epochs = expendable(sealed, self._journal.extents.copy(), channels, self._ages.of)
            for epoch in epochs:
                self._remove(epoch)
            return len(epochs)

    def _remove(self, epoch: int) -> None:
        summary = self._journal.sealed[epoch]
        for number, (last_id, _) in summary.channels.items():
            channel = self._registry.by_number.get(number)
            if channel is not None and last_id > channel.removed_to:
                before, channel.removed_to = channel.removed_to, last_id
                self._report_cut_off(channel, before)
        try:
            self._segments.recycle_first()
        finally:
            if not self._segments.holds(epoch):  # else the removal is tried again
                del self._journal.sealed[epoch]
                self._index.forget(epoch, list(summary.channels))
                self._metrics.recycled_bytes.inc(summary.end)

    def _report_cut_off(self, channel: LiveChannel, before: int) -> None:
        """Report the groups that lose entries now and lost none while ids up to `before` were removed."""
        for group, progress in channel.groups.copy().items():
            if before <= int.from_bytes(progress.acked_to, "big") < channel.removed_to:
                _log.warning(
                    "retention cut group %s off in channel %s: it was too far behind",
                    group,
                    channel.name,
                    extra={"channel": channel.name},
                )
                self._metrics.groups_cut_off.inc()


def expendable(
    sealed: Sequence[tuple[int, SegmentSummary]],
    current: Mapping[int, tuple[int, int]],
    channels: Mapping[int, LiveChannel],
    age_ms: Callable[[SegmentSummary], float],
) -> list[int]:
    """The epochs of the segments that may be removed, oldest first. `sealed` are the full segments by epoch, `current`
    the extents of the segment in use; `age_ms` gives the age of a full segment in milliseconds."""
    gone: list[int] = []
    for place, (epoch, summary) in enumerate(sealed):
        age = age_ms(summary)
        later = [current, *(younger.channels for _, younger in sealed[place + 1 :])]
        for number, (last_id, _) in summary.channels.items():
            channel = channels.get(number)
            if channel is not None and not _may_go(channel, last_id, age, later):
                return gone
        gone.append(epoch)
    return gone


def _may_go(channel: LiveChannel, last_id: int, age_ms: float, later: Sequence[Mapping[int, tuple[int, int]]]) -> bool:
    """Whether the channel's entries up to `last_id`, the newest of which has at least that age, are not needed. The
    most expensive check comes last: this runs twice a second, however idle the log is."""
    if last_id >= channel.kept_from:
        return False
    if last_id < channel.truncated_to or last_id <= channel.done_to:
        return True
    policy = channel.policy
    if policy.retention_s is not None and age_ms >= policy.retention_s * 1000:
        return True
    if policy.retention_bytes is None:
        return False
    return sum([extents[channel.number][1] for extents in later if channel.number in extents]) >= policy.retention_bytes
