"""How far a replica is behind its source, as metrics: also while the replica does not answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from ..clock import Clock, SystemClock
from ..errors import TidewalError
from ..groups.lag import lag_of
from ..log.replication_state import ReplicatedChannel
from ..log.wal import Wal
from ..metrics.metrics import CHANNEL, Metrics
from .line_age import LineAge

REPORT_S = 5.0

_log = logging.getLogger(__name__)


class ReplicationLag:
    """Measures from the places that a replicator has noted last. It lasts from one attempt of a replicator to the next,
    so that the lag rises while none succeeds. `line` is how far the line of a replica of nodes is behind."""

    def __init__(self, metrics: Metrics, clock: Clock | None = None) -> None:
        self._metrics, self._clock = metrics, clock or SystemClock()
        self._places: Mapping[str, ReplicatedChannel] = {}
        self.line: LineAge = LineAge(metrics, self._clock)

    def note(self, places: Mapping[str, ReplicatedChannel]) -> None:
        """The channels that are replicated, and how far."""
        for name in self._places.keys() - places.keys():
            self._metrics.forget(CHANNEL, name)
        self._places = places

    async def run(self, source: Wal, every_s: float = REPORT_S) -> None:
        """Report until cancelled. While the source does not answer the metrics stay as they are."""
        while True:
            try:
                await self._report(source)
            except TidewalError as error:
                _log.debug("the lag is not known: %s", error)
            await asyncio.sleep(every_s)

    async def _report(self, source: Wal) -> None:
        for name, place in list(self._places.items()):
            lag = await lag_of(source, name, place.source or None)
            if name not in self._places:  # dropped meanwhile
                continue
            seconds = lag.seconds(self._clock.wall_ms() / 1000)
            self._metrics.gauge("replication_lag_entries", channel_name=name).set(lag.entries)
            self._metrics.gauge("replication_lag_seconds", channel_name=name).set(seconds or 0.0)
            self._metrics.gauge("replication_halted", channel_name=name).set(bool(place.halted))
