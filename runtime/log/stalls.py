"""Stalls: appends and readers of a log on brokers that have had no answer for too long.

A thread of its own checks what is in flight, so a stall is noticed however long a call or a loop is blocked.
Each is logged once when it is noticed and once when it is over, and counted (`wal_backend_*`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..metrics.metrics import Metrics

Operation = Literal["append", "read"]

STALLED_AFTER_S: dict[Operation, float] = {"append": 1.0, "read": 5.0}
LOOK_S = 0.25

_DOING: dict[Operation, str] = {"append": "appending to", "read": "reading"}

_log = logging.getLogger("tidewal.stalls")


@dataclass(slots=True, eq=False)
class Waiting:
    """One operation in flight, waiting since `since_s`. `problem` is the last error of it."""

    operation: Operation
    channel: str
    since_s: float
    progress: Callable[[], object] | None = None
    seen: object = None
    problem: str = ""
    reported: bool = False


class StallWatch:
    """Watches one open log. `begin`, `retry` and `end` may be called on any thread; they cost next to nothing."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self._metrics = metrics or Metrics()
        self._waiting: set[Waiting] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tidewal-stalls", daemon=True)

    def start(self) -> None:
        """Check every `LOOK_S` seconds, until `close`."""
        self._thread.start()

    def begin(self, operation: Operation, channel: str, progress: Callable[[], object] | None = None) -> Waiting:
        """Note that `operation` on `channel` awaits an answer from now on, until `end` is called with the result. As
        long as what `progress` returns changes, it is no stall."""
        waiting = Waiting(operation, channel, time.monotonic(), progress)
        self._waiting.add(waiting)
        return waiting

    def retry(self, waiting: Waiting, problem: object) -> None:
        """Note that an attempt has failed with `problem` and is made again."""
        waiting.problem = problem if isinstance(problem, str) else repr(problem)
        labels = {"channel_name": waiting.channel, "operation": waiting.operation}
        self._metrics.counter("wal_backend_retry_total", **labels).inc()

    def end(self, waiting: Waiting) -> None:
        """Note that the operation was answered, or given up. A second call does nothing."""
        with self._lock:
            self._waiting.discard(waiting)
            reported, waiting.reported = waiting.reported, False
        if reported:
            _log.warning(
                "%s %s: the stall is over after %.1f s",
                _DOING[waiting.operation],
                waiting.channel,
                time.monotonic() - waiting.since_s,
                extra={"channel": waiting.channel},
            )
            self._stalled(waiting, -1)

    def outcome_unknown(self, channel: str, entries: int = 1) -> None:
        """Count an append of `entries` entries that has ended, and whose entries are in the log or not."""
        self._metrics.counter("wal_backend_outcome_unknown_total", channel_name=channel).inc(entries)

    def look(self, now_s: float) -> None:
        """Report the operations that stall at `now_s`, a time of the monotonic clock, and were not reported yet."""
        for waiting in list(self._waiting):
            seen = None if waiting.progress is None else waiting.progress()
            if seen != waiting.seen:
                waiting.seen, waiting.since_s = seen, now_s
            with self._lock:
                stalled_s = now_s - waiting.since_s
                new = waiting in self._waiting and not waiting.reported
                if not new or stalled_s < STALLED_AFTER_S[waiting.operation]:
                    continue
                waiting.reported = True
            _log.warning(
                "%s %s stalls for %.1f s: %s",
                _DOING[waiting.operation],
                waiting.channel,
                stalled_s,
                waiting.problem or "no answer",
                extra={"channel": waiting.channel},
            )
            self._stalled(waiting, 1)

    def close(self) -> None:
        """End the thread. Blocks for a moment."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            self.look(time.monotonic())

    def _stalled(self, waiting: Waiting, change: int) -> None:
        labels = {"channel_name": waiting.channel, "operation": waiting.operation}
        self._metrics.gauge("wal_backend_stalled", **labels).inc(change)
        if change > 0:
            self._metrics.counter("wal_backend_stall_total", **labels).inc()
