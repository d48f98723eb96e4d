"""Retention: which of the oldest segments nobody needs any more.

A segment goes when every entry of every channel in it is expired by time or size, truncated, or of a dropped channel,
and no holder needs any of them. Segments go oldest first, so the journal stays one run without gaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .index import SegmentSummary
from .live import Channel


def expendable(
    sealed: Sequence[tuple[int, SegmentSummary]],
    current: Mapping[int, tuple[int, int]],
    channels: Mapping[int, Channel],
    now_ms: int,
) -> list[int]:
    """The epochs that may go, oldest first. `current` are the extents of the segment in use."""
    totals: dict[int, int] = {}
    for extents in [current, *(summary.channels for _, summary in sealed)]:
        for number, (_, size) in extents.items():
            totals[number] = totals.get(number, 0) + size
    gone: list[int] = []
    for epoch, summary in sealed:
        for number, (last_id, size) in summary.channels.items():
            channel = channels.get(number)
            totals[number] -= size
            if channel is not None and not _may_go(channel, last_id, summary.sealed_ms, totals[number], now_ms):
                return gone
        gone.append(epoch)
    return gone


def _may_go(channel: Channel, last_id: int, sealed_ms: int, younger_bytes: int, now_ms: int) -> bool:
    if last_id >= channel.kept_from:
        return False
    if last_id < channel.truncated_to:
        return True
    policy = channel.policy
    if policy.retention_s is not None and now_ms - sealed_ms >= policy.retention_s * 1000:
        return True
    return policy.retention_bytes is not None and younger_bytes >= policy.retention_bytes
