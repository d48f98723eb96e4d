"""Retention: which of the oldest segments nobody needs any more.

A segment goes when every entry of every channel in it is expired by time or size, truncated, acknowledged (where the
channel's policy says so), or of a dropped channel, and no holder needs any of them. Segments go oldest first, so the
journal stays one run without gaps. Time and size rule over groups that do not acknowledge: those are cut off.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

from ...runtime.clock import Clock
from .index import Index, SegmentSummary
from .journal import Journal
from .live import Channel
from .measures import Measures
from .registry import Registry
from .segments import Segments

_log = logging.getLogger(__name__)


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
        measures: Measures,
    ) -> None:
        self._journal, self._segments, self._index, self._registry = journal, segments, index, registry
        self._clock, self._measures = clock, measures
        self._lock = threading.Lock()

    def apply(self) -> int:
        """Give back the segments that may go; how many."""
        with self._lock:
            sealed = sorted(self._journal.sealed.copy().items())
            channels = self._registry.by_number.copy()
            epochs = expendable(sealed, self._journal.extents.copy(), channels, self._clock.wall_ms())
            for epoch in epochs:
                self._remove(epoch)
            return len(epochs)

    def _remove(self, epoch: int) -> None:
        summary = self._journal.sealed[epoch]
        for number, (last_id, _) in summary.channels.items():
            channel = self._registry.by_number.get(number)
            if channel is not None and last_id > channel.removed_to:
                before, channel.removed_to = channel.removed_to, last_id
                self._tell_cut_off(channel, before)
        try:
            self._segments.recycle_first()
        finally:
            if not self._segments.holds(epoch):  # else it is tried again
                del self._journal.sealed[epoch]
                self._index.forget(epoch, list(summary.channels))
                self._measures.removed(summary.end)

    def _tell_cut_off(self, channel: Channel, before: int) -> None:
        """Report the groups that lose entries now and lost none when `before` was removed."""
        for group, progress in channel.groups.copy().items():
            if before <= int.from_bytes(progress.acked_to, "big") < channel.removed_to:
                _log.warning("retention cut group %s off in channel %s: it was too far behind", group, channel.name)
                self._measures.cut_off()


def expendable(
    sealed: Sequence[tuple[int, SegmentSummary]],
    current: Mapping[int, tuple[int, int]],
    channels: Mapping[int, Channel],
    now_ms: int,
) -> list[int]:
    """The epochs that may go, oldest first. `current` are the extents of the segment in use."""
    gone: list[int] = []
    for place, (epoch, summary) in enumerate(sealed):
        later = [current, *(younger.channels for _, younger in sealed[place + 1 :])]
        for number, (last_id, _) in summary.channels.items():
            channel = channels.get(number)
            if channel is not None and not _may_go(channel, last_id, now_ms - summary.sealed_ms, later):
                return gone
        gone.append(epoch)
    return gone


def _may_go(channel: Channel, last_id: int, age_ms: int, later: Sequence[Mapping[int, tuple[int, int]]]) -> bool:
    """Whether nobody needs the channel's entries up to `last_id`, the newest of which has at least that age. What
    costs most is looked at last: this runs twice a second, however idle the log is."""
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
