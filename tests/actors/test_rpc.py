"""A node whose requests and replies get lost, doubled and delayed: every write happens once, every question is
answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from tidewal.runtime.errors import CollectionNotFound, Unavailable
from tidewal.runtime.testing.faults import FaultPlan, Rates

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])

BATCHES = 60
RATES = {
    "dropped": Rates(drop=0.3),
    "doubled": Rates(duplicate=0.5),
    "delayed": Rates(delay=0.5, delay_s_max=1.0),
    "all at once": Rates(drop=0.2, duplicate=0.2, delay=0.2, delay_s_max=0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("channels", ["requests", "replies", ""])
@pytest.mark.parametrize("kind", RATES)
async def test_every_write_happens_once_and_every_question_is_answered(home, seed, kind, channels) -> None:
    rates = RATES[kind]
    if not channels:  # durable channels are delayed too, never dropped
        rates = Rates(**{name: getattr(rates, name) for name in ("drop", "duplicate", "delay", "delay_s_max")})
    home.faults = FaultPlan(seed, rates, channels=channels)
    async with home.node() as node, node.client() as client, node.client() as other:

        async def insist(call: Callable):
            while True:
                try:
                    return await call()
                except Unavailable:  # had no effect: a lease's renewal may be lost, too
                    await home.elapse(0.1)

        await insist(lambda: client.create_collection(home.PEOPLE, deadline_s=300))

        async def write(batch: int) -> None:
            who, key = (client if batch % 2 else other), batch * 10
            await insist(lambda: who.insert("people", home.people(*range(key, key + 10)), deadline_s=300))
            await insist(lambda: who.upsert("people", home.people(key, name="new"), deadline_s=300))
            found = await insist(lambda: who.get("people", [key], consistency="strong", deadline_s=300))
            assert found.table["name"].to_pylist() == ["new"]

        await asyncio.gather(*(write(batch) for batch in range(BATCHES)))
        count = await insist(lambda: client.count("people", consistency="strong", deadline_s=300))
        assert count == BATCHES * 10
        stats = await insist(lambda: client.stats("people", consistency="strong"))
        expected = {"insert": BATCHES * 10, "upsert": BATCHES, "delete": 0}
        assert dict(stats.versions) == expected, "a write happened twice, or never"
        await insist(lambda: client.flush("people", deadline_s=600))
        compacted = await client.compact("people", deadline_s=600)
        assert compacted["rows"] == BATCHES * 10
        try:
            await client.drop_collection("people", deadline_s=300)
        except Unavailable:  # half-way, as its error does not tell: the next `create` finishes it
            with contextlib.suppress(CollectionNotFound):
                await insist(lambda: client.drop_collection("people", deadline_s=300))
        await insist(lambda: client.create_collection(home.PEOPLE, deadline_s=300))
        assert await insist(lambda: client.count("people", consistency="strong", deadline_s=300)) == 0
    assert home.faults.trace, "the plan did nothing: the test shows nothing"


async def test_writes_behind_one_that_another_door_has_had_are_taken_once_its_outcome_is_known(home) -> None:
    """All that a client has under way comes to a door that never gets the write before: nothing but its repetitions
    comes to release it."""
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(0))
        elsewhere = client._writes.next_number()
        client._writes._under_way[elsewhere] = None
        writes = [asyncio.ensure_future(client.insert("people", home.people(key))) for key in (1, 2, 3)]
        await home.elapse(0.1)
        assert not any(write.done() for write in writes)
        del client._writes._under_way[elsewhere]
        async with asyncio.timeout(3):
            await asyncio.gather(*writes)
