"""Draining, stopping, cancelling."""

from __future__ import annotations

import asyncio

import pytest

from tidewal.runtime.actor import ActorSystem
from tidewal.runtime.errors import ActorStopped, Closed, DeadlineExceeded, HandlerFailed, InvalidRequest

on_virtual_time = pytest.mark.asyncio(loop_factories=["virtual"])


async def test_stopping_drains_the_mailbox_first(system, kit, log):
    ref = await system.spawn(lambda: kit.Scripted(log), name="a")
    gate = asyncio.get_running_loop().create_future()
    ref.tell(lambda actor: gate)
    for number in range(3):
        ref.tell(number)
    asking = asyncio.create_task(ref.ask("asked"))
    await kit.settle()
    stopping = asyncio.create_task(system.stop(ref))
    await kit.settle()
    for refused in (lambda: ref.tell(9), lambda: ref.signal(9), lambda: ref.ask(9).send(None)):
        with pytest.raises(ActorStopped):
            refused()
    assert not stopping.done()
    gate.set_result(None)
    await stopping
    assert await asking == "asked"
    assert log == ["start", 0, 1, 2, "asked", "stop"]
    assert system.status() == []


@on_virtual_time
async def test_past_the_deadline_the_handler_is_cancelled_and_on_stop_still_called(system, kit, recorder, log):
    ref = await system.spawn(lambda: kit.Scripted(log), name="a")
    never = asyncio.get_running_loop().create_future()
    asking = asyncio.create_task(ref.ask(lambda actor: never, deadline_s=100))
    await kit.settle()
    ref.tell("dropped")
    await system.stop(ref, deadline_s=3)
    assert asyncio.get_running_loop().time() == pytest.approx(3)
    with pytest.raises(ActorStopped):
        await asking
    assert log == ["start", "stop"]
    assert recorder.events == [("dropped", "a", 1)]


@on_virtual_time
async def test_an_actor_that_ignores_cancellation_blocks_no_caller(recorder, kit):
    class Stubborn(kit.Scripted):
        async def on_stop(self) -> None:
            while not released:
                try:
                    await asyncio.get_running_loop().create_future()
                except asyncio.CancelledError:
                    continue

    released: list[bool] = []
    async with ActorSystem(observer=recorder, threads=False, stop_grace_s=2) as system:
        ref = await system.spawn(Stubborn, name="a")
        with pytest.raises(DeadlineExceeded, match="does not stop"):
            await system.stop(ref, deadline_s=3)
        assert system.loop.time() == pytest.approx(5)
        released.append(True)
        ref.cell.task.cancel()
        await kit.settle()
        assert ref.cell.task.done()


async def test_stop_raises_what_on_stop_raised(recorder, kit):
    class Broken(kit.Scripted):
        async def on_stop(self) -> None:
            raise OSError("cannot close")

    async with ActorSystem(observer=recorder, threads=False) as system:
        ref = await system.spawn(Broken, name="a")
        with pytest.raises(OSError, match="cannot close"):
            await system.stop(ref)
        with pytest.raises(ActorStopped):
            ref.tell(1)


async def test_leaving_the_system_stops_the_youngest_first_and_raises_a_failed_stop(recorder, kit):
    ended: list[str] = []

    class Named(kit.Scripted):
        async def on_stop(self) -> None:
            ended.append(self.name)
            if self.name == "b":
                raise OSError("b")

    system = await ActorSystem(observer=recorder, threads=False).__aenter__()
    for name in "abc":
        await system.spawn(Named, name=name)
    with pytest.raises(OSError, match="b"):
        await system.close()
    assert ended == ["c", "b", "a"]
    assert recorder.events == [("cleanup_failed", "b", "OSError('b')")]
    with pytest.raises(Closed):
        await system.spawn(Named, name="late")


async def test_a_crash_while_draining_is_what_stop_raises(system, kit, log):
    ref = await system.spawn(lambda: kit.Scripted(log), name="a")
    gate = asyncio.get_running_loop().create_future()
    ref.tell(lambda actor: gate)
    ref.tell(kit.fail(RuntimeError("while draining")))
    await kit.settle()
    stopping = asyncio.create_task(system.stop(ref))
    await kit.settle()
    gate.set_result(None)
    with pytest.raises(RuntimeError, match="while draining"):
        await stopping
    assert log == ["start", "stop"]


async def test_an_actor_can_stop_itself_but_not_wait_for_it(system, kit, log):
    ref = await system.spawn(lambda: kit.Scripted(log), name="a")
    with pytest.raises(InvalidRequest, match="wait for itself"):
        await ref.ask(lambda actor: actor.system.stop(actor.ref))
    ref.tell(lambda actor: actor.stop())
    ref.tell("drained")
    await kit.settle()
    assert log == ["start", "drained", "stop"]


async def test_cancelling_the_task_of_an_actor_is_no_crash(system, kit, recorder, log):
    ref = await system.spawn(lambda: kit.Scripted(log), name="a")
    ref.tell(lambda actor: asyncio.get_running_loop().create_future())
    await kit.settle()
    ref.cell.task.cancel()
    await asyncio.wait({ref.cell.task})
    assert log == ["start", "stop"]
    assert recorder.events == []
    assert not system.failed


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_exit_passes_through(kit, recorder, kind):
    async def main() -> None:
        async with ActorSystem(observer=recorder, threads=False) as system:
            ref = await system.spawn(kit.Scripted, name="a")
            ref.tell(kit.fail(kind()))
            await asyncio.get_running_loop().create_future()

    with pytest.raises(kind):
        asyncio.run(main())
    assert recorder.named("crashed") == []


async def test_a_name_is_taken_while_its_actor_runs(system, kit):
    ref = await system.spawn(kit.Scripted, name="a")
    with pytest.raises(InvalidRequest, match="already"):
        await system.spawn(kit.Scripted, name="a")
    await system.stop(ref)
    await system.spawn(kit.Scripted, name="a")


async def test_a_cancelled_spawn_leaves_nothing(system, kit):
    class Slow(kit.Scripted):
        async def on_start(self) -> None:
            await asyncio.get_running_loop().create_future()

    spawning = asyncio.create_task(system.spawn(Slow, name="a"))
    await kit.settle()
    spawning.cancel()
    await kit.settle()
    assert spawning.cancelled()
    assert system.status() == []


async def test_an_ask_whose_handler_is_interrupted_by_a_child_gets_the_childs_error(system, kit):
    ref = await system.spawn(kit.Scripted, name="a")

    async def child() -> None:
        raise RuntimeError("child")

    def start(actor):
        actor.spawn_task(child(), name="child")
        return asyncio.get_running_loop().create_future()

    with pytest.raises(HandlerFailed, match="child"):
        await ref.ask(start)
