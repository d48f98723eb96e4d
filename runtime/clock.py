"""Hybrid timestamps: `physical_ms << 18 | logical`, 64 bits, as in Milvus (`pkg/util/tsoutil`).

Time comes from an injected `Clock`, so tests control it. `HybridClock` never goes back, whatever the wall clock does.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Protocol

from .arguments import checked
from .errors import InvalidRequest

LOGICAL_BITS = 18
MAX_LOGICAL = (1 << LOGICAL_BITS) - 1
MAX_TIMESTAMP = (1 << 63) - 1  # Spark and Delta store timestamps as int64
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
AHEAD_MS_MAX = 2 * 24 * 3600 * 1000  # a time that lies further ahead is not accepted
AHEAD_MS_TOLD = 60 * 1000  # what a log may carry this clock ahead of the wall clock without a warning

_log = logging.getLogger("tidewal.clock")


class Clock(Protocol):
    """Where time comes from."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970, UTC; may jump."""
        ...

    def monotonic(self) -> float:
        """Seconds, never going back, counting the time a suspended machine slept."""
        ...

    def boot(self) -> str:
        """Names what `monotonic` counts from: all processes for which it is the same read one `monotonic`. "" where
        that is unknown."""
        return ""


class SystemClock:
    """The machine's clocks. Leases need the clock that counts suspended time (CLOCK_BOOTTIME), where there is one."""

    _monotonic_id = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.clock_gettime(self._monotonic_id)

    def boot(self) -> str:
        return _boot()


@cache
def _boot() -> str:
    """The id of the run of the kernel, and of the namespace that shifts its CLOCK_BOOTTIME for some containers."""
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return ""


def monotonic_ms(clock: Clock) -> int:
    """`Clock.monotonic` in whole milliseconds."""
    return int(clock.monotonic() * 1000)


def compose(physical_ms: int, logical: int = 0) -> int:
    """The timestamp of a physical time in ms and a logical counter."""
    return physical_ms << LOGICAL_BITS | logical


def physical_ms(ts: int) -> int:
    """The physical part of `ts`, ms since 1970."""
    return ts >> LOGICAL_BITS


def logical(ts: int) -> int:
    """The logical part of `ts`."""
    return ts & MAX_LOGICAL


@checked
def to_timestamp(moment: datetime) -> int:
    """The first timestamp at `moment`, to the millisecond. Raises `InvalidRequest` for a moment before 1970, and for
    one without a time zone: the same digits are another moment elsewhere."""
    if moment.tzinfo is None:
        raise InvalidRequest(f"{moment.isoformat()} has no time zone; say which, as in datetime.now(UTC)")
    ms = (moment - _EPOCH) // timedelta(milliseconds=1)
    if ms < 0:
        raise InvalidRequest(f"{moment.isoformat()} is before 1970")
    return compose(ms)


@checked
def to_datetime(ts: int) -> datetime:
    """The physical part of the timestamp `ts`, UTC. Raises `InvalidRequest` for what no calendar has."""
    try:
        return _EPOCH + timedelta(milliseconds=physical_ms(ts))
    except OverflowError:
        raise InvalidRequest(f"the timestamp {ts} is behind the year 9999") from None


def add_ms(ts: int, ms: int) -> int:
    """`ts` moved by `ms` milliseconds (may be negative), never below 0."""
    return max(0, ts + (ms << LOGICAL_BITS))


class HybridClock:
    """Strictly increasing timestamps, close to the wall clock. Thread-safe.

    The wall clock is followed, except a single step of more than `AHEAD_MS_MAX` ahead: timestamps never go back, so
    time would stand still for as long afterwards. Then the last accepted wall time is advanced by the monotonic clock
    until the wall clock is back, or this process is restarted.
    """

    @checked
    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self._last = 0
        self._lock = threading.Lock()
        self._offset_ms = self.clock.wall_ms() - monotonic_ms(self.clock)  # of the wall clock, as last accepted
        self._doubted = False

    def now(self) -> int:
        """A new timestamp, above every earlier one and every one observed. A full logical part carries into the
        physical one, so a burst runs ahead of the wall clock instead of waiting."""
        with self._lock:
            self._last = max(self._last + 1, compose(self._wall_ms()))
            return self._last

    def _wall_ms(self) -> int:
        """The wall clock's time, without a step that is not followed."""
        wall_ms, passed_ms = self.clock.wall_ms(), monotonic_ms(self.clock)
        offset_ms = wall_ms - passed_ms
        doubted = offset_ms - self._offset_ms > AHEAD_MS_MAX
        if doubted and not self._doubted:
            days = (offset_ms - self._offset_ms) / 86_400_000
            _log.error("the wall clock was set %.1f days ahead, which is not followed: correct it, or restart", days)
        self._doubted = doubted
        if not doubted:
            self._offset_ms = offset_ms
        return passed_ms + self._offset_ms

    def observe(self, ts: int) -> None:
        """Never again give out a timestamp ≤ `ts`. Only for timestamps that count: a granted limit, a record of a
        granted term within its limit. A warning is logged where one lies unusually far ahead of the wall clock."""
        with self._lock:
            before_ms, self._last = self.ahead_ms, max(self._last, ts)
            ahead_ms = self.ahead_ms
        if before_ms <= AHEAD_MS_TOLD < ahead_ms:
            _log.warning(
                "the log carries timestamps %.0f s ahead of the wall clock: all new timestamps go on from there",
                ahead_ms / 1000,
            )

    def believes(self, ts: int) -> bool:
        """Whether `ts` lies no more than `AHEAD_MS_MAX` ahead of the wall clock: a condition for timestamps from
        outside."""
        with self._lock:
            return physical_ms(ts) <= max(self._wall_ms(), physical_ms(self._last)) + AHEAD_MS_MAX

    @property
    def ahead_ms(self) -> int:
        """How far the timestamps that are given out lie ahead of the wall clock, ms; 0 where they do not."""
        return max(0, physical_ms(self._last) - self.clock.wall_ms())

    @property
    def behind_ms(self) -> int:
        """How far they lie behind the wall clock, ms: more than 0 only while a step of the wall clock is not
        followed."""
        with self._lock:
            return max(0, self.clock.wall_ms() - self._wall_ms())

    @property
    def last(self) -> int:
        """The highest timestamp given out or observed."""
        return self._last
