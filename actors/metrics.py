"""Metrics that all readers of collections share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ..runtime.clock import HybridClock, physical_ms
from ..runtime.log.dead_letters import REASONS
from ..runtime.metrics.metrics import Metrics
from ..runtime.streams.messages import MsgPack
from ..runtime.streams.read_metrics import ReadMetrics
from ..runtime.streams.tt_stream import TtMsgStream

if TYPE_CHECKING:
    from .cluster_member import ClusterMember

LATE = {"late": "wal_scan_time_tick_violation_message_total"}  # by attribute of `ReadCounts`


def dead_letters_from_zero(metrics: Metrics, channels: Iterable[str]) -> None:
    """Begin the counts of bad records in `channels`: from one that begins with its first letter no rate can be told."""
    for channel in channels:
        for reason in REASONS:
            metrics.counter("wal_dead_letter_message_total", channel_name=channel, reason=reason)


def count_dead_letter(metrics: Metrics, channel: str, reason: str) -> None:
    """Count a bad record of `channel`."""
    metrics.counter("wal_dead_letter_message_total", channel_name=channel, reason=reason).inc()


def measure_limit(cluster: ClusterMember, metrics: Metrics, limit: str, measure: Callable[[], tuple[int, int]]) -> None:
    """Show and report what this process uses of the limit that the setting `limit` is about: `measure` returns that and
    the limit, both in bytes. Called on any thread."""
    cluster.measures[limit] = measure
    metrics.gauge("limit_used_ratio", limit=limit).set_function(lambda: _ratio(*measure()))


def _ratio(value: int, bound: int) -> float:
    return value / bound if bound else 0.0


class ScanMetrics:
    """Counts what the stream of one collection has handed out, and what came late. (What was read, and dropped, is
    counted by the dispatchers.)"""

    def __init__(self, metrics: Metrics, role: str, stream: TtMsgStream) -> None:
        self._metrics, self._role = metrics, role
        self._late = ReadMetrics(metrics, role, stream.counts, LATE)
        self._bytes = metrics.counter(f"{role}_consume_bytes_total")

    def publish(self) -> None:
        """Count what came late since the last call."""
        self._late.publish()

    def consumed(self, pack: MsgPack) -> None:
        """Count a pack that was applied or buffered."""
        self.publish()
        if pack.messages:
            for kind, count in Counter(record.type for record in pack.messages).items():
                self._metrics.counter(f"{self._role}_consume_msg_total", msg_type=kind.name.lower()).inc(count)
            self._bytes.inc(sum(len(record.body) for record in pack.messages))


def watch_pending(metrics: Metrics, role: str, collection: str, pending_bytes: Callable[[], int]) -> None:
    """Show what was read of a collection and not consumed yet."""
    metrics.watch("wal_scanner_pending_queue_bytes", pending_bytes, collection_name=collection, role_name=role)


def lag_ms(clock: HybridClock, time: int) -> float:
    """How far the timestamp `time` lies behind the wall clock, in ms; 0 for a `time` of 0, which is not known yet."""
    return max(0, clock.clock.wall_ms() - physical_ms(time)) if time else 0.0
