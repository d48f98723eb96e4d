"""The lag of consumer groups as metrics: their members run in other processes, and a group without members has none."""

from __future__ import annotations

import asyncio
import logging

from ...runtime.clock import Clock
from ...runtime.errors import Closed, TidewalError
from ...runtime.groups.lag import lag_of
from ...runtime.log.wal import Wal
from ...runtime.metrics.metrics import Metrics

INTERVAL_S = 30.0
POSITIONS_MAX = 100  # of all groups
COUNTED_MAX = 1_000  # entries of each, which are read to be counted: the log must not notice it

_log = logging.getLogger("tidewal.mixcoord")


class GroupLags:
    """Measures every `INTERVAL_S` how far the groups of a log are behind, in the first `POSITIONS_MAX` of their
    channels by the names of group and channel."""

    def __init__(self, wal: Wal, clock: Clock, metrics: Metrics) -> None:
        self._wal, self._clock, self._metrics = wal, clock, metrics
        self._shown: set[tuple[str, str]] = set()
        self._problem = ""

    async def run(self) -> None:
        """Measure from now on. Ends with `Closed`, when the log is closed."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                self._report(await self._measure())
            except Closed:
                raise
            except TidewalError as error:
                self._report(f"the lag of groups is not known now: {error.message}")

    async def _measure(self) -> str:
        """Set the metrics. Returns what is left out; empty where nothing is."""
        positions = {
            (group.name, channel): position
            for group in await self._wal.groups()
            for channel, position in group.positions.items()
        }
        measured = sorted(positions)[:POSITIONS_MAX]
        for gone in self._shown.difference(measured):
            self._forget(*gone)
        for group, channel in measured:
            lag = await lag_of(self._wal, channel, positions[group, channel], COUNTED_MAX)
            seconds = lag.seconds(self._clock.wall_ms() / 1000)
            labels = {"group": group, "channel_name": channel}
            self._metrics.gauge("wal_group_lag_entries", **labels).set(lag.entries)
            self._metrics.gauge("wal_group_lag_seconds", **labels).set(seconds or 0.0)
            self._shown.add((group, channel))
        if len(positions) == len(measured):
            return ""
        return f"the lag is measured of {POSITIONS_MAX} positions of groups alone; there are more"

    def _forget(self, group: str, channel: str) -> None:
        self._shown.discard((group, channel))
        for name in ("wal_group_lag_entries", "wal_group_lag_seconds"):
            self._metrics.remove(name, group=group, channel_name=channel)

    def _report(self, problem: str) -> None:
        """Log a problem once, as long as it is the same."""
        if problem and problem != self._problem:
            _log.warning("%s", problem)
        self._problem = problem
