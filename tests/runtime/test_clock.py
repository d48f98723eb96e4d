"""Timestamps only ever rise, whatever the wall clock and other threads do; a test controls virtual time."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.runtime.clock import (
    AHEAD_MS_MAX,
    AHEAD_MS_TOLD,
    MAX_LOGICAL,
    HybridClock,
    SystemClock,
    add_ms,
    compose,
    logical,
    physical_ms,
    to_datetime,
    to_timestamp,
)
from tidewal.runtime.errors import InvalidRequest
from tidewal.runtime.log.record import Record, RecordType
from tidewal.runtime.log.wal import Entry, FromTime
from tidewal.runtime.testing.clock import EPOCH_MS, VirtualClock, run_virtual


@given(st.integers(0, 2**44), st.integers(0, MAX_LOGICAL))
def test_a_timestamp_is_its_two_parts(ms, count):
    ts = compose(ms, count)
    assert (physical_ms(ts), logical(ts)) == (ms, count)
    assert add_ms(ts, 5) == compose(ms + 5, count)
    assert add_ms(ts, -(ms + 1)) == 0


@given(
    st.datetimes(datetime.fromisoformat("1970-01-02"), datetime.fromisoformat("3000-01-01"), timezones=st.just(UTC)),
    st.integers(-12, 14),
    st.integers(0, MAX_LOGICAL),
)
def test_a_moment_is_the_first_timestamp_of_its_millisecond(moment, hours, count):
    moment = moment.astimezone(timezone(timedelta(hours=hours)))
    ts = to_timestamp(moment)
    assert logical(ts) == 0
    assert timedelta(0) <= moment - to_datetime(ts + count) < timedelta(milliseconds=1)
    assert FromTime.at(moment) == FromTime(ts)
    assert Entry(b"", ts, b"").time == Record(RecordType.ROWS, ts=ts).time == to_datetime(ts)


@pytest.mark.parametrize("moment", [datetime.fromisoformat("2026-11-22"), datetime(1969, 12, 31, tzinfo=UTC)])
def test_a_moment_that_is_none_is_refused(moment):
    with pytest.raises(InvalidRequest):
        FromTime.at(moment)


def test_what_no_calendar_has_is_refused():
    with pytest.raises(InvalidRequest):
        to_datetime(1 << 70)


@pytest.mark.slow
@given(
    st.lists(
        st.one_of(
            st.integers(-AHEAD_MS_MAX // 100, AHEAD_MS_MAX // 100).map(lambda ms: ("jump", ms)),
            st.integers(0, 2**60).map(lambda ts: ("observe", ts)),
            st.just(("now", 0)),
        )
    )
)
def test_a_clock_never_goes_back(steps):
    source = VirtualClock()
    clock = HybridClock(source)
    highest = 0
    for kind, value in steps:
        if kind == "jump":
            source.jump_wall(value)
        elif kind == "observe":
            clock.observe(value)
            highest = max(highest, value)
        else:
            ts = clock.now()
            assert ts > highest
            assert ts >= compose(source.wall_ms())
            highest = ts
        assert clock.last == highest


def test_a_burst_carries_into_the_next_millisecond():
    clock = HybridClock(VirtualClock())
    clock.observe(compose(EPOCH_MS, MAX_LOGICAL))
    assert clock.now() == compose(EPOCH_MS + 1, 0)


def test_eight_threads_get_each_timestamp_once():
    clock = HybridClock()
    taken: list[list[int]] = [[] for _ in range(8)]

    def take(into: list[int]) -> None:
        into.extend(clock.now() for _ in range(5_000))

    threads = [threading.Thread(target=take, args=(into,)) for into in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({ts for into in taken for ts in into}) == 40_000
    assert all(into == sorted(into) for into in taken)


def test_after_a_restart_with_the_wall_clock_set_back_timestamps_pass_the_old_limit():
    source = VirtualClock()
    before = HybridClock(source)
    limit = add_ms(before.now(), 3_000)
    source.jump_wall(-10_000)
    after = HybridClock(source)
    after.observe(limit)
    assert after.now() > limit


def test_a_wall_clock_that_steps_days_ahead_is_not_followed_until_it_is_back(caplog):
    source = VirtualClock()
    clock = HybridClock(source)
    before = clock.now()
    source.jump_wall(AHEAD_MS_MAX + 1)
    source.advance(2)
    assert physical_ms(clock.now()) == physical_ms(before) + 2_000
    assert clock.behind_ms == AHEAD_MS_MAX + 1
    assert clock.now() > before
    assert caplog.text.count("which is not followed") == 1
    source.jump_wall(-AHEAD_MS_MAX)
    assert physical_ms(clock.now()) == source.wall_ms()
    assert clock.behind_ms == 0
    source.jump_wall(AHEAD_MS_MAX)
    assert physical_ms(clock.now()) == source.wall_ms(), "no step, however often, is refused below the limit"


def test_a_log_that_carries_the_clock_ahead_is_reported_once_and_measured(caplog):
    source = VirtualClock()
    clock = HybridClock(source)
    clock.observe(compose(EPOCH_MS + AHEAD_MS_TOLD))
    assert not caplog.records
    for ms in (1, 2):
        clock.observe(compose(EPOCH_MS + AHEAD_MS_TOLD + ms))
    assert len(caplog.records) == 1
    assert clock.ahead_ms == AHEAD_MS_TOLD + 2
    source.advance(3600)
    assert clock.ahead_ms == 0


def test_times_days_ahead_are_not_accepted():
    clock = HybridClock(VirtualClock())
    assert clock.believes(compose(EPOCH_MS + AHEAD_MS_MAX, MAX_LOGICAL))
    assert not clock.believes(compose(EPOCH_MS + AHEAD_MS_MAX + 1))


def test_a_suspended_machine_reaches_no_timer_and_loses_its_time():
    clock = VirtualClock()

    async def main() -> None:
        asyncio.get_running_loop().call_later(1, clock.suspend, 100)
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(5)
        assert asyncio.get_running_loop().time() - began == 5

    run_virtual(main(), clock)
    assert (clock.monotonic(), clock.running()) == (105, 5)
    assert clock.wall_ms() == EPOCH_MS + 105_000


def test_the_system_clock_reads():
    clock = SystemClock()
    assert clock.wall_ms() > EPOCH_MS
    assert clock.monotonic() <= clock.monotonic()


def test_sleeping_on_virtual_time_takes_no_time_and_keeps_its_order():
    clock = VirtualClock()
    order: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append((name, round(clock.monotonic(), 6)))

    async def main() -> None:
        await asyncio.gather(sleeper("c", 3600.3), sleeper("a", 0.1), sleeper("b", 0.1))

    run_virtual(main(), clock)
    assert order == [("a", 0.1), ("b", 0.1), ("c", 3600.3)]
    assert clock.wall_ms() == EPOCH_MS + 3_600_300
