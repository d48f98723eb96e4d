"""Hybrid timestamps: `physical_ms << 18 | logical`, 64 bits, as in Milvus (`pkg/util/tsoutil`).

Time comes from an injected `Clock`, so tests own it. `HybridClock` never goes back, whatever the wall clock does.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

LOGICAL_BITS = 18
MAX_LOGICAL = (1 << LOGICAL_BITS) - 1
MAX_TIMESTAMP = (1 << 63) - 1  # Spark and Delta store timestamps as int64


class Clock(Protocol):
    """Where time comes from."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970, UTC; may jump."""
        ...

    def monotonic(self) -> float:
        """Seconds, never going back, counting the time a suspended machine slept."""
        ...


class SystemClock:
    """The machine's clocks. Leases need the clock that counts suspended time (CLOCK_BOOTTIME), where there is one."""

    _monotonic_id = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.clock_gettime(self._monotonic_id)


def compose(physical_ms: int, logical: int = 0) -> int:
    """The timestamp of a physical time in ms and a logical counter."""
    return physical_ms << LOGICAL_BITS | logical


def physical_ms(ts: int) -> int:
    """The physical part of `ts`, ms since 1970."""
    return ts >> LOGICAL_BITS


def logical(ts: int) -> int:
    """The logical part of `ts`."""
    return ts & MAX_LOGICAL


def add_ms(ts: int, ms: int) -> int:
    """`ts` moved by `ms` milliseconds (may be negative), never below 0."""
    return max(0, ts + (ms << LOGICAL_BITS))


class HybridClock:
    """Strictly increasing timestamps, close to the wall clock. Thread-safe."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self._last = 0
        self._lock = threading.Lock()

    def now(self) -> int:
        """A new timestamp, above every earlier one and every one observed. A full logical part carries into the
        physical one, so a burst runs ahead of the wall clock instead of waiting."""
        with self._lock:
            self._last = max(self._last + 1, compose(self.clock.wall_ms()))
            return self._last

    def observe(self, ts: int) -> None:
        """Never again give out a timestamp ≤ `ts`."""
        with self._lock:
            self._last = max(self._last, ts)

    @property
    def last(self) -> int:
        """The highest timestamp given out or observed."""
        return self._last
