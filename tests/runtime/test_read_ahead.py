"""What is read ahead: in order, bounded in bytes, and with its end behind it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tidewal.runtime.errors import ChannelNotFound, Closed, Unavailable
from tidewal.runtime.log.read_ahead import ReadAhead
from tidewal.runtime.loop_bridge import LoopNotifiers


@pytest.fixture
def room() -> list[bool]:
    """What `has_room` said each time that it was called to be true again."""
    return []


@pytest.fixture
def ahead(room) -> ReadAhead[str]:
    made: ReadAhead[str] = ReadAhead(10, lambda: room.append(made.has_room()))
    return made


def test_batches_come_in_order_and_there_is_room_again_below_the_limit(ahead, room):
    assert ahead.take() is None
    ahead.put("a", 6)
    assert ahead.has_room()
    ahead.put("b", 6)
    ahead.put("c", 6)
    assert not ahead.has_room()
    assert ahead.take() == "a"  # 12 bytes are left
    assert not room
    assert ahead.take() == "b"
    assert room == [True]
    assert ahead.take() == "c"
    assert ahead.take() is None
    assert room == [True]


def test_a_batch_over_the_limit_is_taken_alone(ahead, room):
    ahead.put("large", 100)
    assert not ahead.has_room()
    assert ahead.take() == "large"
    assert room == [True]


def test_the_first_end_comes_behind_all_batches_and_lets_the_reading_thread_go_on(ahead, room):
    ahead.put("a", 20)
    ahead.end(Unavailable("first"))
    ahead.end(Closed("later"))
    assert ahead.ended
    assert room == [True, True]
    ahead.put("b", 1)
    assert ahead.take() == "a"
    for _ in range(2):
        with pytest.raises(Unavailable):
            ahead.take()


def test_an_end_that_discards_replaces_all(ahead):
    ahead.put("a", 6)
    ahead.end(Unavailable("first"))
    ahead.end(ChannelNotFound("gone"), discard=True)
    with pytest.raises(ChannelNotFound):
        ahead.take()


async def test_a_waiting_iterator_is_woken_by_a_batch_and_by_the_end(ahead):
    notifiers = LoopNotifiers()
    notifier = notifiers.current()
    for act in (lambda: ahead.put("a", 1), lambda: ahead.end(Closed("over"))):
        waiting = asyncio.ensure_future(ahead.wait(notifier))
        await asyncio.sleep(0)
        assert not waiting.done()
        thread = threading.Thread(target=act)
        thread.start()
        async with asyncio.timeout(20):
            await waiting
        thread.join()
        await ahead.wait(notifier)  # there is something to take
        if not ahead.ended:
            assert ahead.take() == "a"
    notifiers.close()


async def test_an_iterator_that_gave_up_waiting_waits_again(ahead):
    notifiers = LoopNotifiers()
    given_up = asyncio.ensure_future(ahead.wait(notifiers.current()))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait([given_up])
    waiting = asyncio.ensure_future(ahead.wait(notifiers.current()))
    await asyncio.sleep(0)
    ahead.put("a", 1)
    async with asyncio.timeout(20):
        await waiting
    assert ahead.take() == "a"
    notifiers.close()


async def test_a_thread_that_gathers_results_wakes_the_iterator_at_once(ahead):
    notifiers = LoopNotifiers()
    waiting = asyncio.ensure_future(ahead.wait(notifiers.current()))
    await asyncio.sleep(0)

    def read() -> None:
        notifiers.gather()
        ahead.put("a", 1)  # no `flush`

    thread = threading.Thread(target=read)
    thread.start()
    async with asyncio.timeout(20):
        await waiting
    thread.join()
    notifiers.close()
