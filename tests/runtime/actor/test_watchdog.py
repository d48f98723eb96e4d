"""A handler that really blocks the loop: it is named, and the heartbeat thread goes on."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tidewal.runtime.actor import Actor, ActorSystem, Watchdog
from tidewal.runtime.testing.clock import VirtualClock

BLOCKED_AFTER_MS = 20
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])


class Blocking(Actor):
    """Keeps the loop busy until an event is set on another thread, at most 10 s."""

    def __init__(self, until: threading.Event) -> None:
        self.until = until

    def burn_cycles(self) -> None:
        give_up = time.monotonic() + 10
        while not self.until.is_set() and time.monotonic() < give_up:
            pass

    async def on_message(self, message: object) -> object:
        if message == "child":
            self.spawn_task(self.burn_later(), name="child")
        elif message == "after a pause":
            await asyncio.sleep(0)
            self.burn_cycles()
        else:
            self.burn_cycles()
        return threading.get_ident()

    async def burn_later(self) -> None:
        self.burn_cycles()


@pytest.mark.parametrize(
    ("message", "culprit"), [("now", "blocker"), ("after a pause", "blocker"), ("child", "blocker/child")]
)
async def test_the_blocking_actor_is_named_once_while_heartbeats_go_on(recorder, kit, message, culprit):
    seen = threading.Event()
    reports: list[tuple[str, int, str]] = []
    beats_before: list[int] = []
    beats: list[int] = []

    def beat() -> None:
        beats.append(threading.get_ident())
        if reports and len(beats) > beats_before[0] + 10:  # the heartbeat went on, well after the report
            seen.set()

    def blocked(actor: str, blocked_ms: int, stack: str) -> None:
        beats_before.append(len(beats))
        reports.append((actor, blocked_ms, stack))

    recorder.blocked = blocked
    async with ActorSystem(observer=recorder, blocked_after_ms=BLOCKED_AFTER_MS) as system:
        system.heartbeat.every(0.005, beat, "lease")
        await system.spawn(lambda: Blocking(threading.Event()), name="bystander")
        ref = await system.spawn(lambda: Blocking(seen), name="blocker")
        loop_thread = await ref.ask(message)
        await kit.until(seen.is_set)
    # a machine that is busy may hold up the loop by itself, too
    [(actor, blocked_ms, _)] = [report for report in reports if "burn_cycles" in report[2]]
    assert actor == culprit
    assert blocked_ms >= BLOCKED_AFTER_MS
    assert loop_thread not in beats


async def test_each_stall_is_reported_once(kit):
    clock, reports = VirtualClock(), []
    watchdog = Watchdog(asyncio.get_running_loop(), 100, lambda *report: reports.append(report[:2]), clock)
    for _ in range(2):
        for _ in range(10):
            watchdog.look()
            clock.advance(0.03)
        await kit.until(lambda: watchdog._pinged_at is None)  # the ping arrives when the loop turns
    assert [blocked_ms for _, blocked_ms in reports] == [120, 120]


async def test_a_loop_that_turns_is_not_reported(kit):
    clock, reports = VirtualClock(), []
    watchdog = Watchdog(asyncio.get_running_loop(), 100, lambda *report: reports.append(report), clock)
    for _ in range(10):
        watchdog.look()
        await kit.until(lambda: watchdog._pinged_at is None)
        clock.advance(1)
    assert reports == []
