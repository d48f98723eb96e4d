"""Crashes, restarts, giving up: on virtual time."""

from __future__ import annotations

import asyncio
import random

import pytest

from tidewal.runtime.actor import ActorState, Supervision
from tidewal.runtime.actor.supervision import Intensity
from tidewal.runtime.errors import ActorStopped, HandlerFailed, InvalidRequest

pytestmark = pytest.mark.asyncio(loop_factories=["virtual"])


async def test_a_restart_is_a_fresh_instance_with_the_same_mailbox(system, kit):
    lives: list[object] = []

    def build():
        lives.append(kit.Scripted())
        return lives[-1]

    ref = await system.spawn(build, name="a")
    ref.tell("before")
    ref.tell(kit.fail(RuntimeError("boom")))
    ref.tell("after")
    assert await ref.ask("last") == "last"
    assert [life.log for life in lives] == [["start", "before", "stop"], ["start", "after", "last"]]
    [status] = system.status()
    assert (status.state, status.restarts, status.handled) == (ActorState.RUNNING, 1, 3)


async def test_pauses_grow_and_are_jittered_by_the_seed():
    rule = Supervision(restarts=6, backoff_s=1, backoff_factor=2, backoff_max_s=10, jitter=0.25)
    first, again, other = (Intensity(rule, random.Random(seed)) for seed in (1, 1, 2))
    pauses = [first.pause_after_crash(0) for _ in range(6)]
    assert pauses == [again.pause_after_crash(0) for _ in range(6)]
    assert pauses != [other.pause_after_crash(0) for _ in range(6)]
    for pause, full in zip(pauses, (1, 2, 4, 8, 10, 10), strict=True):
        assert 0.75 * full <= pause <= full
    assert first.pause_after_crash(0) is None


async def test_crashes_outside_the_window_are_forgotten():
    intensity = Intensity(Supervision(restarts=1, window_s=60, jitter=0), random.Random(0))
    assert intensity.pause_after_crash(0) == 0.1
    assert intensity.pause_after_crash(60) == 0.1
    assert intensity.pause_after_crash(119.9) is None


async def test_too_many_crashes_give_up_and_escalate(system, kit, recorder):
    ref = await system.spawn(kit.Scripted, name="a", supervision=Supervision(restarts=2))
    assert not system.failed
    for _ in range(3):
        ref.tell(kit.fail(RuntimeError("boom")))
    waiting = asyncio.create_task(ref.ask("never"))
    failure = await system.failed
    assert system.failed
    assert (failure.actor, str(failure.error)) == ("a", "boom")
    with pytest.raises(ActorStopped):
        await waiting
    with pytest.raises(ActorStopped):
        ref.tell("too late")
    assert [event[3] is None for event in recorder.named("crashed")] == [False, False, True]
    assert system.status()[0].state is ActorState.FAILED
    assert await (await system.spawn(kit.Scripted, name="a")).ask(1) == 1


async def test_an_instance_has_one_life(system, kit):
    ref = await system.spawn(kit.Scripted(), name="a")
    ref.tell(kit.fail(RuntimeError("boom")))
    assert (await system.failed).actor == "a"


async def test_a_failing_child_task_crashes_its_actor_even_while_a_handler_waits(system, kit, log):
    ref = await system.spawn(lambda: kit.Scripted(log), name="a")
    never = asyncio.get_running_loop().create_future()

    async def child() -> None:
        await kit.elapse(1)
        raise RuntimeError("child")

    def start(actor):
        actor.spawn_task(child(), name="child")
        return never

    with pytest.raises(HandlerFailed, match="child"):
        await ref.ask(start)
    assert await ref.ask("alive") == "alive"
    assert log == ["start", "stop", "start", "alive"]


async def test_child_tasks_end_with_their_life(system, kit):
    ref = await system.spawn(kit.Scripted, name="a")
    ended: list[str] = []

    async def child(name: str) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(name)

    await ref.ask(lambda actor: actor.spawn_task(child("crash"), name="x"))
    await kit.settle()
    ref.tell(kit.fail(RuntimeError("boom")))
    await ref.ask("restarted")
    assert ended == ["crash"]
    await ref.ask(lambda actor: actor.spawn_task(child("stop"), name="x"))
    await kit.settle()
    await system.stop(ref)
    assert ended == ["crash", "stop"]


async def test_a_told_error_of_tidewal_is_a_crash(system, kit, recorder):
    ref = await system.spawn(kit.Scripted, name="a")
    ref.tell(kit.fail(InvalidRequest("nobody to tell it to")))
    await ref.ask("next")
    assert len(recorder.named("crashed")) == 1


async def test_crash_takes_effect_before_the_next_message(system, kit, log):
    ref = await system.spawn(lambda: kit.Scripted(log), name="a")
    ref.tell(lambda actor: actor.crash(RuntimeError("asked for")))
    ref.tell("next")
    await ref.ask("last")
    assert log == ["start", "stop", "start", "next", "last"]


async def test_the_first_start_that_fails_is_the_spawners(system, kit, recorder):
    class Broken(kit.Scripted):
        async def on_start(self) -> None:
            raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        await system.spawn(Broken, name="a")
    assert system.status() == []
    assert not system.failed


async def test_a_later_start_that_fails_counts_as_a_crash(system, kit, recorder):
    starts: list[int] = []

    class Flaky(kit.Scripted):
        async def on_start(self) -> None:
            starts.append(len(starts))
            if len(starts) in (2, 3):
                raise OSError("not yet")

    ref = await system.spawn(Flaky, name="a")
    ref.tell(kit.fail(RuntimeError("boom")))
    assert await ref.ask("up") == "up"
    assert starts == [0, 1, 2, 3]
    assert recorder.named("restarted") == [("restarted", "a", 3)]


async def test_a_stop_during_the_pause_does_not_wait_for_it(system, kit, recorder):
    ref = await system.spawn(kit.Scripted, name="a", supervision=Supervision(backoff_s=100, backoff_max_s=100))
    ref.tell(kit.fail(RuntimeError("boom")))
    ref.tell("never handled")
    await kit.settle()
    assert system.status()[0].state is ActorState.RESTARTING
    await system.stop(ref)
    assert asyncio.get_running_loop().time() < 1
    assert recorder.named("dropped") == [("dropped", "a", 1)]
