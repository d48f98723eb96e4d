"""Topics, delays, transactions and groups side by side over several nodes, under faults that a seed draws.

Nothing is lost, early, doubled, or out of order for its key, and no transaction is seen in part.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.actors.conftest import PEOPLE, people
from tests.actors.nodes import LEASE_S, NUMBERS, TAKEN_OVER_S, NodeProcess, Nodes
from tests.actors.test_topic_delay_nodes import DelayTraffic
from tests.actors.test_topic_growth import GrowthTraffic
from tidewal import SendResult
from tidewal.actors.client import Client
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import DeadlineExceeded, TidewalError
from tidewal.runtime.testing import VirtualClock, run_virtual
from tidewal.runtime.testing.simulation.wal import SimulatedWal

SEEDS = int(os.environ.get("TIDEWAL_TEST_QUEUES", "0"))  # more of them; one takes some seconds
NODES = "abc"
ROWS = 10  # of a transaction, at most, in each collection
CLOCK_MS = 3_000  # how far a wall clock is set at once, at most
FAULTS = 4


class LaterTraffic(DelayTraffic):
    """Delays in a topic of their own, and due at a moment, which does not depend on the clock of the node that is
    asked."""

    topic = "later"

    async def _send(self, client: Client, text: str, after_s: float) -> SendResult:
        moment = datetime.fromtimestamp(self.now_ms() / 1000 + after_s, UTC)
        return await client.send(self.topic, text, key=text, deliver_at=moment, deadline_s=120)


class TransactionTraffic:
    """A client that writes the same keys into two collections, in a transaction for each number, and one that asks:
    both have all of a transaction or nothing, and what is committed."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.sizes: dict[int, int] = {}
        self.committed: set[int] = set()
        self.refused: set[int] = set()
        self._stopping = False

    async def write(self, client: Client) -> None:
        while not self._stopping:
            number = len(self.sizes) + 1
            size = self.sizes[number] = self.nodes.rng.randrange(1, ROWS)
            keys = [number * ROWS + at for at in range(size)]
            t = client.transaction(deadline_s=120)
            await t.upsert("numbers", [{"id": key, "value": number} for key in keys])
            await t.insert("people", people(*keys))
            if self.nodes.rng.random() < 0.1:
                t.rollback()
                self.refused.add(number)
            else:
                await t.commit()
                self.committed.add(number)
            await asyncio.sleep(self.nodes.rng.uniform(0, 0.2))

    async def ask(self, client: Client) -> None:
        while not self._stopping:
            committed = set(self.committed)
            with suppress(TidewalError):  # its node was killed
                self.check(*await _rows(client), committed)
            await asyncio.sleep(self.nodes.rng.uniform(0, 0.5))

    def check(self, numbers: Counter[int], persons: Counter[int], committed: set[int]) -> None:
        assert numbers == persons, "both collections have the same transactions"
        for number, size in self.sizes.items():
            assert numbers[number] in (0, size), f"half of transaction {number}"
        assert committed <= numbers.keys(), "what is committed is there"
        assert self.refused.isdisjoint(numbers)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.nodes.client("w") as writer, self.nodes.client("q") as asking:
            await writer.create_collection(NUMBERS, shards=2)
            await writer.create_collection(PEOPLE, shards=2)
            async with asyncio.timeout(600), asyncio.TaskGroup() as tasks:
                tasks.create_task(self.write(writer))
                tasks.create_task(self.ask(asking))
                yield
                self._stopping = True
            self.check(*await _rows(asking), self.committed)


async def _rows(client: Client) -> tuple[Counter[int], Counter[int]]:
    """By the number of their transaction how many rows each collection has, at one timestamp."""
    numbers = await client.query("numbers", consistency="strong", deadline_s=60)
    persons = await client.query("people", columns=["id"], at=numbers.tsafe, deadline_s=60)
    keys = persons.table["id"].to_pylist()
    return Counter(numbers.table["value"].to_pylist()), Counter(key // ROWS for key in keys)


class QueueFaults:
    """What happens to the nodes and the log, one after another; behind each all nodes run."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes, self._rng = nodes, nodes.rng
        self.trace: list[str] = []

    async def happen(self) -> None:
        faults: list[Callable[[str], Awaitable[None]]] = [
            self._kill, self._end, self._cut, self._stop, self._stall, self._clock, self._late
        ]  # fmt: skip
        for _ in range(FAULTS):
            await asyncio.sleep(self._rng.uniform(0.5, 2))
            fault, name = self._rng.choice(faults), self._rng.choice(NODES)
            self.trace.append(f"{self.nodes.now_s():.3f} {fault.__name__} {name}")
            await fault(name)

    async def _kill(self, name: str) -> None:
        await self.nodes.kill(name)
        await asyncio.sleep(self._rng.uniform(0, 2 * LEASE_S))
        await self.nodes.start(name)

    async def _end(self, name: str) -> None:
        await self.nodes.end(name)
        await self.nodes.start(name)

    async def _cut(self, name: str) -> None:
        """It goes on as if it owned its channels still."""
        each = self.nodes.cut_off(name, deaf=self._rng.random() < 0.5)
        await asyncio.sleep(self._rng.uniform(0.5, TAKEN_OVER_S + 2))
        self.nodes.reconnect(each)
        await self._again(each)

    async def _stop(self, name: str) -> None:
        """As by SIGSTOP, for up to two leases."""
        each = self.nodes.running[name]
        each.process.pause()
        await asyncio.sleep(self._rng.uniform(0.1, 2 * LEASE_S))
        each.process.resume()
        await self._again(each)

    async def _again(self, each: NodeProcess) -> None:
        """Start a node again that has ended since others have taken its place."""
        with suppress(TimeoutError):
            await asyncio.wait_for(each.ended.wait(), 2 * TAKEN_OVER_S)
            self.nodes.running.pop(each.name)
            await self.nodes.start(each.name)

    async def _stall(self, _: str) -> None:
        kinds = ("-topic_", "-delays_", "rootcoord-dml")
        channels = [each for each in self.nodes.owners() if self._rng.choice(kinds) in each]
        self.nodes.stall(channels)
        await asyncio.sleep(self._rng.uniform(0.1, 2))
        self.nodes.go_on(channels)

    async def _clock(self, name: str) -> None:
        self.nodes.running[name].clock.jump_wall(self._rng.randint(-CLOCK_MS, CLOCK_MS))

    async def _late(self, _: str) -> None:
        """Appends to what clients write land after their outcome was called unknown."""
        self.nodes.log_faults.late = 0.02
        await asyncio.sleep(self._rng.uniform(0.5, 2))
        self.nodes.log_faults.late = 0.0


async def _grow(nodes: Nodes, client: Client, topics: Sequence[str]) -> None:
    while True:
        await asyncio.sleep(nodes.rng.uniform(0.5, 3))
        with suppress(DeadlineExceeded):  # an owner is away
            await client.alter_topic(nodes.rng.choice(topics), nodes.rng.randint(1, 8))


async def _simulate(seed: int, directory: Path) -> None:
    nodes = Nodes(directory, random.Random(seed), SimulatedWal)
    faults = QueueFaults(nodes)
    try:
        for name in NODES:
            nodes.settings[name] = Settings.model_validate({"rootCoord": {"dmlChannelNum": 1}})
            await nodes.start(name)
        growing, later, transactions = GrowthTraffic(nodes, 4), LaterTraffic(nodes), TransactionTraffic(nodes)
        async with AsyncExitStack() as stack:
            for each in (growing, later, transactions):
                await stack.enter_async_context(each.running())
            altering = asyncio.ensure_future(
                _grow(nodes, await stack.enter_async_context(nodes.client()), (growing.topic, later.topic))
            )
            try:
                await faults.happen()
            finally:
                altering.cancel()
                await asyncio.gather(altering, return_exceptions=True)
            await asyncio.sleep(3)
        growing.check()
        later.check()
        assert len(transactions.committed) > 5
    except BaseException:
        print(f"queue of seed {seed}:", *faults.trace, sep="\n")
        raise
    finally:
        await nodes.stop()


def simulate_queue(seed: int, directory: Path) -> None:
    """Run one queue on virtual time. One seed is one run."""
    clock = VirtualClock()
    run_virtual(_simulate(seed, directory / f"{seed}"), clock)


@pytest.mark.long
@pytest.mark.parametrize("number", range(SEEDS or 3))
def test_whatever_fails_a_queue_keeps_its_promises(seed: int, tmp_path: Path, number: int) -> None:
    simulate_queue(seed + number, tmp_path)
