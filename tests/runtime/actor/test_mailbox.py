"""The mailbox: queues, limits, and senders that wait."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.runtime.actor.mailbox import Mailbox
from tidewal.runtime.errors import ActorStopped, Overloaded


async def test_signals_overtake_messages_and_each_queue_keeps_its_order(system, kit, log):
    ref = await system.spawn(lambda: kit.Scripted(log), name="a", mailbox_size=2)
    ref.tell("m1")
    ref.tell("m2")
    for number in range(5):
        ref.signal(f"s{number}")  # also into a full mailbox
    await kit.settle()
    assert log == ["start", "s0", "s1", "s2", "s3", "s4", "m1", "m2"]


async def test_a_signal_comes_before_what_waited_behind_a_handler(system, kit, log):
    ref = await system.spawn(lambda: kit.Scripted(log), name="a")
    gate = asyncio.get_running_loop().create_future()
    ref.tell(lambda actor: gate)
    ref.tell("message")
    await kit.settle()
    ref.signal("signal")
    gate.set_result(None)
    await kit.settle()
    assert log == ["start", "signal", "message"]


async def test_senders_wait_for_room_and_are_admitted_in_order(system, kit, log):
    ref = await system.spawn(lambda: kit.Scripted(log), name="a", mailbox_size=2)
    gate = asyncio.get_running_loop().create_future()
    await ref.send(lambda actor: gate)
    await kit.settle()
    writers = [asyncio.create_task(ref.send(number)) for number in range(6)]
    await kit.settle()
    assert [writer.done() for writer in writers] == [True, True, False, False, False, False]
    writers[3].cancel()
    await kit.settle()
    gate.set_result(None)
    await kit.settle()
    assert log == ["start", 0, 1, 2, 4, 5]
    assert writers[3].cancelled()


async def test_a_mailbox_is_bounded_in_bytes_where_messages_are_weighed(system, kit):
    class Weighing(kit.Scripted):
        @staticmethod
        def weigh(message: object) -> int:
            return len(message) if isinstance(message, bytes) else 0

    system._mailbox_bytes = 100
    ref = await system.spawn(Weighing, name="a")
    ref.tell(bytes(60))
    ref.tell(bytes(60))
    for refused in (lambda: ref.tell(b"x"), lambda: ref.ask(b"x").send(None)):
        with pytest.raises(Overloaded) as caught:
            refused()
        assert caught.value.limit == "actor.mailboxBytes"
    await kit.settle()
    assert await ref.ask(bytes(1000)) == bytes(1000)
    assert ref.cell.mailbox.bytes_waiting == 0


async def test_closing_fails_the_senders_that_wait():
    mailbox = Mailbox("a", asyncio.get_running_loop(), 1)
    mailbox.put(1)
    writer = asyncio.create_task(mailbox.put_when_room(2))
    await asyncio.sleep(0)
    mailbox.close()
    with pytest.raises(ActorStopped):
        await writer
    assert list(mailbox.messages) == [1]


Step = st.sampled_from(["put", "wait", "take", "cancel"])


@pytest.mark.slow
@given(steps=st.lists(Step, max_size=60), limit=st.integers(1, 4))
def test_against_a_model(steps, limit):
    """The queue holds at most `limit`; what was taken is what was admitted, in the order of arrival."""

    async def run() -> None:
        mailbox = Mailbox("a", asyncio.get_running_loop(), limit)
        inside: deque[int] = deque()
        parked: deque[tuple[int, asyncio.Task[None]]] = deque()
        for number, step in enumerate(steps):
            if step == "put":
                if len(inside) < limit:
                    mailbox.put(number)
                    inside.append(number)
                else:
                    with pytest.raises(Overloaded):
                        mailbox.put(number)
            elif step == "wait":
                writer = asyncio.create_task(mailbox.put_when_room(number))
                if len(inside) < limit and not parked:
                    inside.append(number)
                else:
                    parked.append((number, writer))
            elif step == "take" and inside:
                assert mailbox.take() == inside.popleft()
                if parked:
                    inside.append(parked.popleft()[0])
            elif step == "cancel" and parked:
                parked.pop()[1].cancel()
            for _ in range(3):
                await asyncio.sleep(0)
            assert list(mailbox.messages) == list(inside)
            assert not any(writer.done() for _, writer in parked)
        mailbox.close()
        waiting = await asyncio.gather(*(writer for _, writer in parked), return_exceptions=True)
        assert all(isinstance(error, ActorStopped) for error in waiting)

    asyncio.run(run())
