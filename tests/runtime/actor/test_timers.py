"""Timers of actors and of the system, on virtual time."""

from __future__ import annotations

import asyncio

import pytest

from tidewal.runtime.actor.timers import Timers

pytestmark = pytest.mark.asyncio(loop_factories=["virtual"])


async def test_after_delivers_once_and_every_again_and_again(system, kit):
    actor = kit.Scripted()
    await system.spawn(actor, name="a")
    actor.after(2.5, "once")
    repeating = actor.every(1, "again")
    await kit.elapse(4.5)
    assert actor.log == ["start", "again", "again", "once", "again", "again"]
    repeating.cancel()
    repeating.cancel()
    await kit.elapse(10)
    assert len(actor.log) == 6


async def test_at_most_one_turn_of_a_timer_waits_in_the_mailbox(system, kit):
    actor = kit.Scripted()
    ref = await system.spawn(actor, name="a", mailbox_size=1)
    gate = asyncio.get_running_loop().create_future()
    actor.every(1, "tick")
    ref.tell(lambda _: gate)
    await kit.settle()
    ref.tell("full")
    await kit.elapse(10.5)
    assert system.status()[0].mailbox_depth == 2
    assert system.status()[0].idle_s == pytest.approx(10.5)
    gate.set_result(None)
    await kit.settle()
    assert actor.log == ["start", "full", "tick"]


async def test_timers_end_with_their_life(system, kit):
    class Ticking(kit.Scripted):
        async def on_start(self) -> None:
            self.every(1, "tick")
            self.after(1, "once")

    lives: list[object] = []

    def build():
        lives.append(Ticking())
        return lives[-1]

    ref = await system.spawn(build, name="a")
    ref.tell(kit.fail(RuntimeError("boom")))
    await kit.elapse(2.5)
    assert lives[0].log == ["stop"]
    assert lives[1].log == ["tick", "once", "tick"]


async def test_timers_fire_in_order_and_share_one_timer_of_the_loop():
    loop = asyncio.get_running_loop()
    timers, fired = Timers(loop), []
    for delay_s in (3, 1, 2, 1):
        timers.after(delay_s, lambda delay_s=delay_s: fired.append((delay_s, loop.time())))
    assert len(loop._scheduled) - loop._timer_cancelled_count == 1
    done = loop.create_future()
    timers.after(4, lambda: done.set_result(None))
    await done
    assert fired == [(1, 1), (1, 1), (2, 2), (3, 3)]


async def test_cancelled_timers_do_not_pile_up():
    timers = Timers(asyncio.get_running_loop())
    for _ in range(10_000):
        timers.after(1000, lambda: None).cancel()
    assert len(timers._heap) < 200
    timers.close()


async def test_an_interval_must_be_positive(system):
    with pytest.raises(ValueError, match="above 0"):
        system.timers.every(0, lambda: None)
