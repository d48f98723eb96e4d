"""Metrics that all readers of collections share."""

from __future__ import annotations

from collections import Counter
from typing import cast

from prometheus_client import Counter as CounterHandle

from ..runtime.catalog.catalog import Collection
from ..runtime.clock import HybridClock, physical_ms
from ..runtime.log.record import RecordType
from ..runtime.metrics.metrics import Metrics
from ..runtime.streams.channel_reader import ReadCounts
from ..runtime.streams.messages import MsgPack
from ..runtime.streams.tt_stream import TtMsgStream


class ScanMetrics:
    """Counts what one stream has read, and dropped. `publish` costs a few comparisons; call it per pack."""

    def __init__(self, metrics: Metrics, role: str, collection: Collection, stream: TtMsgStream) -> None:
        self._stream = stream
        self._channels = [_Channel(metrics, role, name, counts) for name, counts in stream.counts.items()]
        pending = metrics.gauge("wal_scanner_pending_queue_bytes", collection_name=collection.name, role_name=role)
        pending.set_function(lambda: stream.buffered_bytes)

    def publish(self) -> None:
        """Count what was read since the last call."""
        for channel in self._channels:
            channel.publish()


class _Channel:
    def __init__(self, metrics: Metrics, role: str, channel: str, counts: ReadCounts) -> None:
        labels = {"channel_name": channel, "role_name": role}
        self._counts = counts
        self._handles: dict[str, CounterHandle] = {
            "records": metrics.counter("wal_scan_message_total", **labels),
            "bytes": metrics.counter("wal_scan_message_bytes_total", **labels),
            "duplicates": metrics.counter("wal_scan_duplicate_message_total", **labels),
            "fenced": metrics.counter("wal_scan_fenced_message_total", **labels),
            "incomplete": metrics.counter("wal_scan_incomplete_batch_total", **labels),
            "late": metrics.counter("wal_scan_time_tick_violation_message_total", **labels),
        }
        self._published = dict.fromkeys(self._handles, 0)

    def publish(self) -> None:
        for name, handle in self._handles.items():
            count: int = getattr(self._counts, name)
            if count != self._published[name]:
                handle.inc(count - self._published[name])
                self._published[name] = count


def message_counts(pack: MsgPack) -> tuple[Counter[RecordType], int, int]:
    """A pack's records by type, their bytes, and their rows."""
    kinds = Counter(record.type for record in pack.messages)
    size = sum(len(record.body) for record in pack.messages)
    rows = sum(cast(int, record.tags.get("rows", 0)) for record in pack.messages)
    return kinds, size, rows


def lag_ms(clock: HybridClock, time: int) -> float:
    """How far the timestamp `time` lies behind the wall clock, in ms; 0 for a `time` of 0, which is not known yet."""
    return max(0, clock.clock.wall_ms() - physical_ms(time)) if time else 0.0
