"""The heart, on a clock that the test owns; and its thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tidewal.runtime.actor import Heart
from tidewal.runtime.testing.clock import VirtualClock


def test_turns_come_when_they_are_due():
    clock = VirtualClock()
    heart = Heart(clock)
    beats: list[tuple[str, float]] = []
    heart.every(1, lambda: beats.append(("lease", clock.monotonic())), "lease")
    heart.every(2.5, lambda: beats.append(("tick", clock.monotonic())), "tick")
    assert heart.beat() == 1
    for _ in range(10):
        clock.advance(0.5)
        heart.beat()
    assert beats == [
        ("lease", 1), ("lease", 2), ("tick", 2.5), ("lease", 3), ("lease", 4), ("lease", 5), ("tick", 5),
    ]  # fmt: skip


def test_missed_turns_are_not_made_up_for():
    clock, beats = VirtualClock(), []
    heart = Heart(clock)
    heart.every(1, lambda: beats.append(clock.monotonic()), "lease")
    clock.advance(10.25)
    assert heart.beat() == 1
    assert beats == [10.25]


def test_a_callback_that_raises_is_reported_and_stays():
    clock, errors, beats = VirtualClock(), [], []
    heart = Heart(clock, on_error=lambda name, error: errors.append((name, str(error))))

    def broken() -> None:
        raise RuntimeError("boom")

    heart.every(1, broken, "broken")
    sound = heart.every(1, lambda: beats.append(1), "sound")
    for _ in range(3):
        clock.advance(1)
        heart.beat()
    assert errors == [("broken", "boom")] * 3
    assert beats == [1, 1, 1]
    sound.cancel()
    clock.advance(1)
    heart.beat()
    assert beats == [1, 1, 1]


def test_the_thread_beats_and_is_joined():
    heart, beaten = Heart(name="test-heart"), threading.Event()
    heart.start()
    heart.every(0.001, beaten.set, "beat")  # added to a heart that already waits
    assert beaten.wait(10)
    heart.stop()
    assert "test-heart" not in [thread.name for thread in threading.enumerate()]


def test_a_callback_may_stop_its_heart():
    heart, stopped = Heart(name="test-heart-2"), threading.Event()
    heart.start()

    def stop() -> None:
        heart.stop()
        stopped.set()

    heart.every(0.001, stop, "stop")
    assert stopped.wait(10)
    heart.stop()


@pytest.mark.asyncio(loop_factories=["virtual"])
async def test_on_a_virtual_loop_it_needs_no_thread(kit):
    loop = asyncio.get_running_loop()
    heart, beats = Heart(loop.clock), []
    threads = threading.active_count()
    heart.start(loop)
    heart.every(1, lambda: beats.append(loop.time()), "beat")
    await kit.elapse(3.5)
    assert beats == [1, 2, 3]
    heart.stop()
    await kit.elapse(3)
    assert beats == [1, 2, 3]
    assert threading.active_count() == threads
