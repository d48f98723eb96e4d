"""The metrics of a channel owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

from ..clock import HybridClock, physical_ms
from ..errors import TidewalError
from ..metrics.metrics import Metrics
from .batch import AppendBatch
from .observer import ChannelOwnerObserver


class ChannelOwnerMetrics(ChannelOwnerObserver):
    """Subclasses that observe more call `super()`. A batch costs a few counters, a row nothing."""

    def __init__(self, metrics: Metrics, clock: HybridClock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._announced: dict[str, int] = {}
        self._bytes = {ok: metrics.histogram("wal_append_message_bytes", status=_status(ok)) for ok in (True, False)}
        self._seconds = {
            ok: metrics.histogram("wal_append_message_duration_seconds", status=_status(ok)) for ok in (True, False)
        }
        self._records = {}
        self._repeated = metrics.counter("wal_append_deduplicated_total")
        self._unknown = metrics.counter("wal_append_outcome_unknown_total")
        self._ticks = metrics.counter("wal_sync_time_tick_total", type="stored")
        self._heartbeats = metrics.counter("wal_sync_time_tick_total", type="heartbeat")
        self._confirmed = metrics.gauge("wal_last_confirmed_time_tick")
        metrics.gauge("wal_last_allocated_time_tick").set_function(lambda: physical_ms(clock.last) / 1000)
        ahead = metrics.gauge("wal_clock_ahead_seconds")
        ahead.set_function(lambda: (clock.ahead_ms - clock.behind_ms) / 1000)

    def opened(self, channel: str, term: int) -> None:
        self._metrics.gauge("wal_term", channel_name=channel).set(term)
        for ok in (True, False):
            labels = {"channel_name": channel, "status": _status(ok)}
            self._records[channel, ok] = self._metrics.counter("wal_append_message_total", **labels)
        lag = self._metrics.gauge("proxy_tt_lag_ms", channel_name=channel)
        lag.set_function(lambda: self._lag_ms(channel))

    def _lag_ms(self, channel: str) -> float:
        announced = self._announced.get(channel)
        return 0.0 if announced is None else max(0, self._clock.clock.wall_ms() - physical_ms(announced))

    def decided(self, batch: AppendBatch) -> None:
        ok = batch.error is None
        self._bytes[ok].observe(batch.size)
        self._seconds[ok].observe(perf_counter() - batch.begun_s)
        for part in batch.parts:
            self._records[part.own.channel, ok].inc(len(part.cseqs))

    def repeated(self) -> None:
        self._repeated.inc()

    def stalled(self, channels: Sequence[str], error: TidewalError) -> None:
        self._unknown.inc()

    def ticked(self, channels: int, error: TidewalError | None) -> None:
        if error is None:
            self._ticks.inc(channels)

    def announced(self, times: Mapping[str, int]) -> None:
        self._announced.update(times)
        # of the channel that is the furthest behind: one that has stalled is not hidden by the others
        self._confirmed.set(physical_ms(min(self._announced.values())) / 1000)
        self._heartbeats.inc(len(times))


def _status(ok: bool) -> str:
    return "success" if ok else "failed"
