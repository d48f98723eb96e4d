"""Transactions over several owners: all or nothing, for every reader, whoever is killed, and whenever."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.actors.conftest import PEOPLE, people
from tests.actors.nodes import NUMBERS, TAKEN_OVER_S, Nodes
from tests.actors.test_transaction_nodes import Model
from tidewal.runtime.testing.simulation.wal import SimulatedWal

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]


@pytest.fixture
async def nodes(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    """Several nodes, each owner of some channels."""
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    yield nodes
    await nodes.stop()


async def test_what_several_nodes_own_is_committed_at_one_time(nodes: Nodes) -> None:
    for name in "abc":
        await nodes.start(name)
    async with nodes.client() as client:
        await client.create_collection(NUMBERS, shards=3)
        await client.create_collection(PEOPLE, shards=2)
        await client.create_topic("events", 2)
        assert len(set(nodes.owners().values())) == 3
        for number in range(8):
            async with client.transaction() as t:
                await t.insert("people", people(*range(10 * number, 10 * number + 10)))
                await t.insert("numbers", [{"id": 10 * number + n, "value": number} for n in range(10)])
                await t.send("events", [f"{number}"] * 10)
            for at, there in ((t.result.ts - 1, 10 * number), (t.result.ts, 10 * number + 10)):
                assert await client.count("people", at=at) == await client.count("numbers", at=at) == there
            assert await client.count("numbers", consistency="strong") == 10 * number + 10
        messages: Counter[str] = Counter()
        async with asyncio.timeout(120), await client.subscribe("events", "readers") as member:
            while messages.total() < 80:
                messages.update(bytes(each.body).decode() for each in (await anext(member)).messages)
        assert set(messages.values()) == {10}
        await asyncio.sleep(3)  # each owner has said what is written
        assert nodes.running["a"].node.node.cluster.state.transactions.open == 0


@pytest.mark.long  # a dozen lives of whole nodes
async def test_over_kills_of_owners_and_doors_no_read_sees_a_half_and_nothing_is_lost(nodes: Nodes) -> None:
    """Schedules 1 and 3: what a reader is told at one time is whole, while owners and doors are killed at random."""
    for name in "abc":
        await nodes.start(name)
    model = Model(nodes.rng)
    async with nodes.client() as client, nodes.client() as asking:
        await client.create_collection(NUMBERS, shards=3)
        await client.create_collection(PEOPLE, shards=2)
        await client.create_topic("events", 2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(model.write(client))
            tasks.create_task(model.write(asking))
            tasks.create_task(model.ask(asking))
            for _ in range(6):
                await asyncio.sleep(nodes.rng.uniform(0, 3))
                name = nodes.rng.choice(sorted(nodes.running))
                await nodes.kill(name)
                await asyncio.sleep(nodes.rng.uniform(0, 2))
                await nodes.start(name)
            await asyncio.sleep(TAKEN_OVER_S)
            model.stopping = True
        committed = {number for number, outcome in model.outcomes.items() if outcome == "committed"}
        rows = (await client.query("numbers", consistency="strong", deadline_s=60)).table["value"].to_pylist()
        model.check(Counter(rows), committed)
        persons = (await client.query("people", consistency="strong", deadline_s=60)).table["id"].to_pylist()
        assert Counter(key // 10 for key in persons) == Counter(rows)
        messages: Counter[int] = Counter()
        async with asyncio.timeout(120), await client.subscribe("events", "readers") as member:
            while messages.total() < len(rows):
                messages.update(int(bytes(each.body)) for each in (await anext(member)).messages)
        assert messages == Counter(rows), "each once, and none of what is not there"
        assert len(committed) > 10
        assert model.asked > 5
