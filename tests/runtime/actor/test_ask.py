"""Questions: answers, errors, deferred answers, deadlines."""

from __future__ import annotations

import asyncio

import pytest

from tidewal.runtime.actor import Deferred
from tidewal.runtime.errors import (
    ActorStopped,
    DeadlineExceeded,
    HandlerFailed,
    InvalidRequest,
    Overloaded,
)

on_virtual_time = pytest.mark.asyncio(loop_factories=["virtual"])


async def test_what_the_handler_returns_is_the_answer(system, kit):
    ref = await system.spawn(kit.Scripted, name="a")
    assert await ref.ask("question") == "question"


async def test_many_questions_get_each_their_own_answer(system, kit):
    ref = await system.spawn(kit.Scripted, name="a")
    assert await asyncio.gather(*(ref.ask(n) for n in range(500))) == list(range(500))


async def test_an_error_of_tidewal_is_an_answer_and_no_crash(system, kit, recorder, log):
    ref = await system.spawn(lambda: kit.Scripted(log), name="a")
    refusal = InvalidRequest("no")
    with pytest.raises(InvalidRequest) as caught:
        await ref.ask(kit.fail(refusal))
    assert caught.value is refusal
    assert await ref.ask("next") == "next"
    assert log == ["start", "next"]
    assert recorder.events == []


@on_virtual_time
async def test_any_other_error_reaches_the_sender_and_crashes_the_actor(system, kit, recorder, log):
    ref = await system.spawn(lambda: kit.Scripted(log), name="a")
    with pytest.raises(HandlerFailed) as caught:
        await ref.ask(kit.fail(KeyError("x")))
    assert caught.value.error == "KeyError"
    assert caught.value.actor == "a"
    assert isinstance(caught.value.__cause__, KeyError)
    assert await ref.ask("next") == "next"
    assert log == ["start", "stop", "start", "next"]
    assert len(recorder.named("crashed")) == 1


@pytest.mark.parametrize("early", [True, False])
async def test_a_deferred_answers_later_while_the_actor_goes_on(system, kit, early):
    ref = await system.spawn(kit.Scripted, name="a")
    given: list[Deferred] = []

    def defer(actor):
        given.append(actor.deferred())
        if early:
            given[0].resolve("answer")
        return given[0]

    asking = asyncio.create_task(ref.ask(defer))
    await kit.settle()
    assert asking.done() is early
    assert await ref.ask("other") == "other"
    given[0].resolve("answer")
    assert await asking == "answer"


async def test_a_deferred_can_fail(system, kit):
    ref = await system.spawn(kit.Scripted, name="a")

    def defer(actor):
        deferred = actor.deferred()
        deferred.fail(ValueError("late"))
        return deferred

    with pytest.raises(HandlerFailed, match="late"):
        await ref.ask(defer)


async def test_a_deferred_that_fails_unasked_is_reported(system, kit, recorder):
    ref = await system.spawn(kit.Scripted, name="a")

    def defer(actor):
        deferred = actor.deferred()
        deferred.fail(ValueError("nobody waits"))
        return deferred

    ref.tell(defer)
    await ref.ask("flush")
    assert recorder.named("unanswered") == [("unanswered", "a", "ValueError('nobody waits')")]


async def test_open_answers_fail_when_the_life_ends(system, kit):
    ref = await system.spawn(kit.Scripted, name="a")
    asking = asyncio.create_task(ref.ask(lambda actor: actor.deferred()))
    await kit.settle()
    ref.tell(kit.fail(RuntimeError("crash")))
    with pytest.raises(ActorStopped):
        await asking


@on_virtual_time
async def test_a_deadline_is_neither_early_nor_late(system, kit):
    ref = await system.spawn(kit.Scripted, name="a")
    loop = asyncio.get_running_loop()
    for deadline_s in (0.001, 0.02, 0.5, 7.77):
        began = loop.time()
        with pytest.raises(DeadlineExceeded):
            await ref.ask(lambda actor: actor.deferred(), deadline_s=deadline_s)
        assert deadline_s <= loop.time() - began + 1e-9
        assert loop.time() - began <= deadline_s + 0.02 + 1e-9


async def test_a_deadline_holds_on_real_loops(system, kit):
    ref = await system.spawn(kit.Scripted, name="a")
    with pytest.raises(DeadlineExceeded):
        await ref.ask(lambda actor: actor.deferred(), deadline_s=0.001)


@on_virtual_time
async def test_a_question_whose_sender_has_given_up_is_not_handled(system, kit, log):
    ref = await system.spawn(lambda: kit.Scripted(log), name="a")
    ref.tell(lambda actor: kit.elapse(5))
    expired = asyncio.create_task(ref.ask("expired", deadline_s=1))
    cancelled = asyncio.create_task(ref.ask("cancelled"))
    await kit.settle()
    cancelled.cancel()
    assert await ref.ask("wanted") == "wanted"
    assert log == ["start", "wanted"]
    with pytest.raises(DeadlineExceeded):
        await expired
    assert cancelled.cancelled()


async def test_an_answered_question_leaves_nothing_in_the_wheel(system, kit):
    ref = await system.spawn(kit.Scripted, name="a")
    await asyncio.gather(*(ref.ask(n) for n in range(100)))
    assert sum(len(slot) for slot in system.deadlines._slots.values()) == 0


async def test_an_actor_cannot_ask_itself(system, kit):
    ref = await system.spawn(kit.Scripted, name="a")
    with pytest.raises(InvalidRequest, match="asks itself"):
        await ref.ask(lambda actor: actor.ref.ask("me"))


async def test_a_full_mailbox_refuses_and_names_its_limit(system, kit, recorder):
    ref = await system.spawn(kit.Scripted, name="a", mailbox_size=3)
    for number in range(3):
        ref.tell(number)
    for refused in (lambda: ref.tell(4), lambda: ref.ask(4).send(None)):
        with pytest.raises(Overloaded) as caught:
            refused()
        assert caught.value.limit == "actor.mailboxSize"
        assert caught.value.retryable
    assert recorder.named("refused") == [("refused", "a", "actor.mailboxSize")] * 2


async def test_an_answer_that_was_cancelled_inside_is_no_crash(system, kit, recorder):
    ref = await system.spawn(kit.Scripted, name="a")
    inner = asyncio.get_running_loop().create_future()
    asking = asyncio.create_task(ref.ask(lambda actor: inner))
    await kit.settle()
    inner.cancel()
    with pytest.raises(HandlerFailed):
        await asking
    assert await ref.ask("on") == "on"
    assert recorder.events == []
