"""The heartbeat thread, on a clock that the test owns; and as a thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tidewal.runtime.actor import HeartbeatThread
from tidewal.runtime.testing.clock import VirtualClock


def test_turns_come_when_they_are_due():
    clock = VirtualClock()
    heartbeat = HeartbeatThread(clock)
    beats: list[tuple[str, float]] = []
    heartbeat.every(1, lambda: beats.append(("lease", clock.monotonic())), "lease")
    heartbeat.every(2.5, lambda: beats.append(("tick", clock.monotonic())), "tick")
    assert heartbeat.run_due() == 1
    for _ in range(10):
        clock.advance(0.5)
        heartbeat.run_due()
    assert beats == [
        ("lease", 1), ("lease", 2), ("tick", 2.5), ("lease", 3), ("lease", 4), ("lease", 5), ("tick", 5),
    ]  # fmt: skip


def test_missed_turns_are_not_made_up_for():
    clock, beats = VirtualClock(), []
    heartbeat = HeartbeatThread(clock)
    heartbeat.every(1, lambda: beats.append(clock.monotonic()), "lease")
    clock.advance(10.25)
    assert heartbeat.run_due() == 1
    assert beats == [10.25]


def test_an_interval_that_is_a_function_is_asked_each_time_and_a_call_can_be_had_sooner():
    clock, beats, interval_s = VirtualClock(), [], [4.0]
    heartbeat = HeartbeatThread(clock)
    beating = heartbeat.every(lambda: interval_s[0], lambda: beats.append(clock.monotonic()), "beat")
    interval_s[0] = 1.0
    assert heartbeat.run_due() == 4
    beating.within(2)
    beating.within(10)  # that is due before anyway
    assert heartbeat.run_due() == 2
    clock.advance(2)
    assert heartbeat.run_due() == 1
    beating.within(0)
    heartbeat.run_due()
    assert beats == [2, 2]


def test_an_interval_that_cannot_be_computed_is_reported_and_the_one_before_goes_on():
    clock, beats, errors, intervals = VirtualClock(), [], [], iter([1.0, 1.0])
    heartbeat = HeartbeatThread(clock, on_error=lambda name, error: errors.append(name))
    heartbeat.every(lambda: next(intervals), lambda: beats.append(clock.monotonic()), "bad")
    for _ in range(3):
        clock.advance(1)
        assert heartbeat.run_due() == 1
    assert beats == [1, 2, 3]
    assert errors == ["bad", "bad"]


def test_the_thread_ends_without_callbacks_and_comes_back_with_the_next():
    heartbeat, beaten = HeartbeatThread(name="test-heart-3"), threading.Event()
    heartbeat.start()
    assert heartbeat._thread is None
    first, later = heartbeat.every(0.001, beaten.set, "first"), heartbeat.every(1000, beaten.set, "later")
    thread = heartbeat._thread
    assert beaten.wait(10)
    first.cancel()
    later.cancel()
    thread.join(10)
    assert not thread.is_alive()
    beaten.clear()
    heartbeat.every(0.001, beaten.set, "again")
    assert beaten.wait(10)
    heartbeat.stop()


def test_a_callback_that_raises_is_reported_and_stays():
    clock, errors, beats = VirtualClock(), [], []
    heartbeat = HeartbeatThread(clock, on_error=lambda name, error: errors.append((name, str(error))))

    def broken() -> None:
        raise RuntimeError("boom")

    heartbeat.every(1, broken, "broken")
    sound = heartbeat.every(1, lambda: beats.append(1), "sound")
    for _ in range(3):
        clock.advance(1)
        heartbeat.run_due()
    assert errors == [("broken", "boom")] * 3
    assert beats == [1, 1, 1]
    sound.cancel()
    clock.advance(1)
    heartbeat.run_due()
    assert beats == [1, 1, 1]


def test_the_thread_beats_and_is_joined():
    heartbeat, beaten = HeartbeatThread(name="test-heart"), threading.Event()
    heartbeat.start()
    heartbeat.every(0.001, beaten.set, "beat")  # added to a thread that already waits
    assert beaten.wait(10)
    heartbeat.stop()
    assert "test-heart" not in [thread.name for thread in threading.enumerate()]


def test_a_callback_may_stop_its_thread():
    heartbeat, stopped = HeartbeatThread(name="test-heart-2"), threading.Event()
    heartbeat.start()

    def stop() -> None:
        heartbeat.stop()
        stopped.set()

    heartbeat.every(0.001, stop, "stop")
    assert stopped.wait(10)
    heartbeat.stop()


@pytest.mark.asyncio(loop_factories=["virtual"])
async def test_on_a_virtual_loop_it_needs_no_thread(kit):
    loop = asyncio.get_running_loop()
    heartbeat, beats = HeartbeatThread(loop.clock), []
    threads = threading.active_count()
    heartbeat.start(loop)
    heartbeat.every(1, lambda: beats.append(loop.time()), "beat")
    await kit.elapse(3.5)
    assert beats == [1, 2, 3]
    heartbeat.stop()
    await kit.elapse(3)
    assert beats == [1, 2, 3]
    assert threading.active_count() == threads
