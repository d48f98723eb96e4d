"""Waiting for one of several tasks."""

from __future__ import annotations

import asyncio
import gc

import pytest

from tidewal.runtime.waiting import begun, first_ended, first_of


async def test_the_first_that_ends_ends_the_others() -> None:
    other = asyncio.Event()
    waiting = asyncio.create_task(first_of(asyncio.sleep(0), other.wait()))
    await waiting
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_what_the_first_raises_is_raised() -> None:
    async def failing() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await first_of(failing(), asyncio.Event().wait())


async def test_a_change_is_seen_that_happens_before_it_is_waited_for() -> None:
    happened = asyncio.Event()
    async with begun(happened.wait(), asyncio.Event().wait()) as changes:
        happened.set()
        await asyncio.sleep(0)
        await first_ended(changes)


@pytest.mark.filterwarnings("error")
async def test_what_is_cancelled_before_its_first_step_has_an_end() -> None:
    """As where a node is killed, and all its tasks end at once."""

    async def follow() -> None:
        async with begun(asyncio.Event().wait(), asyncio.Event().wait()) as changes:
            await first_ended(changes)

    following = asyncio.create_task(follow())
    await asyncio.sleep(0)  # its waits are tasks now, that have not begun
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.gather(following, return_exceptions=True)
    gc.collect()
    assert asyncio.all_tasks() == {asyncio.current_task()}
