"""Transactions while nodes are killed and the log fails: each is there as a whole or not at all."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.actors.conftest import PEOPLE, error_of, people
from tests.actors.nodes import NUMBERS, Nodes, OneOwnerWal
from tidewal.actors.client import Client
from tidewal.actors.transactions.transaction import Transaction
from tidewal.runtime.cluster.version import THIS_VERSION
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import InvalidRequest, TidewalError
from tidewal.runtime.replicated.records import FeatureLevels
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.simulation.wal import SimulatedWal

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]

WRITERS = 3
ROWS = 10  # that a transaction may have at most, in each collection
FAULTS = Rates(fail=0.05, unknown=0.1, lost=0.1, delay=0.3)
LIFE_S = 1.0


@pytest.fixture
async def embedded(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    nodes = Nodes(tmp_path, rng, OneOwnerWal)
    yield nodes
    await nodes.stop()


@pytest.fixture
async def shared(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    """Several nodes, each owner of some channels."""
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    for name in "abc":
        nodes.settings[name] = Settings.model_validate({"rootCoord": {"dmlChannelNum": 1}})
    yield nodes
    await nodes.stop()


class Model:
    """Transactions with numbers, and what each is to have written: its rows, of keys of its own, to two collections,
    and as many messages. `outcomes` are "committed", "rolled back", "refused" or "unknown"."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sizes: dict[int, int] = {}
        self.outcomes: dict[int, str] = {}
        self.repeated = 0
        self.asked = 0
        self.stopping = False

    async def write(self, client: Client) -> None:
        while not self.stopping:
            number = len(self.sizes) + 1
            size = self.sizes[number] = self.rng.randrange(1, ROWS)
            self.outcomes[number] = "unknown"
            t = client.transaction(deadline_s=self.rng.choice([0.01, 0.1, 30]))
            keys = [number * ROWS + at for at in range(size)]
            try:
                await t.upsert("numbers", [{"id": key, "value": number} for key in keys])
                await t.insert("people", people(*keys))
                await t.send("events", [f"{number}"] * size)
                if self.rng.random() < 0.1:
                    t.rollback()
                    self.outcomes[number] = "rolled back"
                else:
                    await self._commit(t, number)
            except TidewalError:  # a collection or topic was not described in time, or the log has refused the commit
                self.outcomes[number] = "refused"
            await asyncio.sleep(self.rng.uniform(0, 0.05))

    async def _commit(self, t: Transaction, number: int) -> None:
        """Commit, and sometimes again where the outcome is not known."""
        while True:
            try:
                await t.commit()
            except TidewalError as error:
                if "open" in repr(t):
                    raise
                if self.rng.random() < 0.2 or not error.retryable:
                    return
                self.repeated += 1
            else:
                self.outcomes[number] = "committed"
                return

    async def ask(self, client: Client) -> None:
        while not self.stopping:
            done = {number for number, outcome in self.outcomes.items() if outcome == "committed"}
            try:
                numbers = await client.query("numbers", consistency="strong", deadline_s=30)
                persons = await client.query("people", columns=["id"], at=numbers.tsafe, deadline_s=30)
            except TidewalError:  # its node was killed
                continue
            values = numbers.table["value"].to_pylist()
            self.check(Counter(values), done)
            assert Counter(key // ROWS for key in persons.table["id"].to_pylist()) == Counter(values)
            self.asked += 1
            await asyncio.sleep(self.rng.uniform(0, 0.1))

    def check(self, found: Counter[int], committed: set[int]) -> None:
        """All of each transaction is there, or nothing; of these all."""
        for number, size in self.sizes.items():
            assert found[number] in (0, size), f"transaction {number}: {self.outcomes[number]}"
            if number in committed:
                assert found[number], f"transaction {number} is lost"
            if self.outcomes[number] in ("rolled back", "refused"):
                assert not found[number], f"transaction {number} was {self.outcomes[number]}"


@pytest.mark.long  # a dozen lives of a whole node
async def test_over_kills_and_faults_each_transaction_is_whole_or_not_there(embedded: Nodes) -> None:
    await embedded.start("0")
    model = Model(embedded.rng)
    async with embedded.client() as client, embedded.client() as asking:
        await client.create_collection(NUMBERS, shards=3)
        await client.create_collection(PEOPLE, shards=2)
        await client.create_topic("events", 2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(model.write(client))
            for _ in range(WRITERS - 1):
                tasks.create_task(model.write(asking))
            tasks.create_task(model.ask(asking))
            for life in range(10):
                wal = embedded.running[f"{life}"].node.wal
                wal.faults = FaultPlan(embedded.rng.randrange(2**31), FAULTS, channels="rootcoord-dml")
                await asyncio.sleep(embedded.rng.uniform(0, LIFE_S))
                await embedded.kill(f"{life}")
                await embedded.start(f"{life + 1}")
            await asyncio.sleep(LIFE_S)
            model.stopping = True
        committed = {number for number, outcome in model.outcomes.items() if outcome == "committed"}
        rows = (await client.query("numbers", consistency="strong")).table["value"].to_pylist()
        model.check(Counter(rows), committed)
        persons = (await client.query("people", consistency="strong")).table["id"].to_pylist()
        assert Counter(key // ROWS for key in persons) == Counter(rows)
        messages: Counter[int] = Counter()
        async with asyncio.timeout(120), await client.subscribe("events", "readers") as member:
            while messages.total() < len(rows):
                messages.update(int(bytes(each.body)) for each in (await anext(member)).messages)
        assert messages == Counter(rows), "each once, and none of what is not there"
        assert len(committed) > 50
        assert model.repeated
        assert model.asked > 5


async def test_several_nodes_take_what_is_for_one_channel(shared: Nodes) -> None:
    for name in "abc":
        await shared.start(name)
    async with shared.client() as client:
        await client.create_collection(NUMBERS, shards=2)
        await client.create_collection(PEOPLE, shards=2)
        await client.create_topic("events", 1)
        for number in range(12):  # at whichever door answers first: mostly in another process than the owner's
            async with client.transaction() as t:
                await t.insert("people", people(number))
                await t.insert("numbers", [{"id": number, "value": 1}, {"id": 100 + number, "value": 2}])
            assert await client.count("people", at=t.result.ts) == number + 1
            assert await client.count("numbers", at=t.result.ts) == 2 * number + 2
            assert await client.count("numbers", at=t.result.ts - 1) == 2 * number


async def test_while_a_node_does_not_know_transactions_they_are_refused(shared: Nodes) -> None:
    shared.versions["a"] = replace(THIS_VERSION, levels=FeatureLevels(1, 1))
    await shared.start("a")
    await shared.start("b")
    async with shared.client() as client:
        await client.create_collection(PEOPLE)
        t = client.transaction()
        await t.insert("people", people(1))
        error = await error_of(t.commit())
        assert isinstance(error, InvalidRequest)
        assert "feature level 2" in error.message
        assert await client.count("people", consistency="strong") == 0
