"""How far the line of a replica of nodes is behind its log, as metrics, and why, as a message of the log."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..clock import Clock, physical_ms
from ..metrics.metrics import Metrics

LATE_S = 60.0  # a line of this age does not get on: several have been due
SAY_S = 60.0  # between two messages

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LineStanding:
    """Where a line stands: its `time`, 0 for none yet, the highest time that its log is known to have (`log_time`), how
    many bytes came to the replica since it was begun, which it keeps (`kept_bytes`), and why the next one cannot be
    drawn, "" where that is not known (`waits_for`)."""

    time: int
    log_time: int
    kept_bytes: int
    waits_for: str


class LineAge:
    """Counts in the time of the log: where no node writes or announces a time, nothing is left out by a line that
    stands still. Without a line it counts from the time that was noted first. It lasts from one attempt of a replicator
    to the next."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._metrics, self._clock = metrics, clock
        self._first = 0  # time of the log
        self._said_s: float | None = None  # when it was said last that the line is late; None: it is not

    def note(self, standing: LineStanding) -> None:
        """How the line is now. To be called now and then."""
        self._first = self._first or standing.log_time
        age_s = max(0.0, (physical_ms(standing.log_time) - physical_ms(standing.time or self._first)) / 1000)
        self._metrics.gauge("replication_line_age_seconds").set(age_s)
        self._metrics.gauge("replication_line_kept_bytes").set(standing.kept_bytes)
        if age_s < LATE_S:
            self._said_s = None
        elif self._said_s is None or self._clock.monotonic() - self._said_s >= SAY_S:
            self._said_s = self._clock.monotonic()
            _log.warning(
                "a promotion without the source would leave out the last %.0f s of the log, and the replica keeps "
                "%d bytes for that: %s",
                age_s,
                standing.kept_bytes,
                standing.waits_for or "the next line was not begun yet",
            )
