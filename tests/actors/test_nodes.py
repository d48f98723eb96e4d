"""Several nodes on one log are one system: whole processes, on virtual time, that share the work, are killed, stopped
for a while, started and ended. Clients notice a pause."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.actors.conftest import PEOPLE, in_place
from tidewal.actors.client import Client
from tidewal.actors.standalone import ROLE_NAMES, Standalone
from tidewal.runtime.errors import Fenced
from tidewal.runtime.rows.schema import CollectionSchema, Field
from tidewal.runtime.testing.clock import VirtualLoop
from tidewal.runtime.testing.faults import FaultPlan
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal
from tidewal.runtime.testing.simulation.process import SimulatedProcess, run_processes
from tidewal.runtime.testing.simulation.wal import LogFaults, SimulatedWal

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]

LEASE_S = 3.0
TAKEN_OVER_S = 1.1 * LEASE_S + 1
SPLIT = {
    "owner": ("mixcoord", "streamingnode"),
    "door": ("proxy",),
    "stores": ("datanode",),
    "answers": ("querynode",),
}
NUMBERS = CollectionSchema("numbers", (Field("id", "int64"), Field("value", "int64")), "id")


class OneOwnerWal(SimulatedWal):
    """As RocksMQ: one process owns the log, the others use it through that."""

    capabilities = replace(SimulatedWal.capabilities, one_node=True)


@dataclass
class NodeProcess:
    """A process with a whole node in it."""

    name: str
    process: SimulatedProcess = field(default_factory=SimulatedProcess)
    node: Standalone | None = None
    error: BaseException | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Nodes:
    """The processes of one cluster, and its log."""

    def __init__(self, directory: Path, rng: random.Random, wal: type[SimulatedWal]) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        run_processes(loop)
        self.log = MemoryLog()
        self.loop, self.rng, self._wal, self._directory = loop, rng, wal, directory
        self.running: dict[str, NodeProcess] = {}
        self._faults = LogFaults(rng)
        self._all: list[NodeProcess] = []

    def now_s(self) -> float:
        return self.loop.time()

    async def start(
        self, name: str, roles: Sequence[str] = ROLE_NAMES, *, wait: bool = True, predecessor: str = ""
    ) -> NodeProcess:
        each = NodeProcess(name)
        self._all.append(each)
        self.running[name] = each
        each.process.spawn(self._run(each, roles, predecessor))
        if wait:
            await asyncio.wait_for(each.ready.wait(), 60)
        return each

    async def _run(self, each: NodeProcess, roles: Sequence[str], predecessor: str) -> None:
        wal = self._wal(self.log, FaultPlan(1), each.process, self._faults, set(), set())
        options = {"clock": self.loop.clock, "threads": False, "blocking": in_place, "name": each.name}
        options["predecessor"] = predecessor
        try:
            async with Standalone(wal, self._directory / "tables", roles=roles, **options) as node:
                each.node = node
                each.ready.set()
                failed, leaving = asyncio.ensure_future(node.failed()), asyncio.ensure_future(each.leaving.wait())
                await asyncio.wait([failed, leaving], return_when=asyncio.FIRST_COMPLETED)
                leaving.cancel()
                each.error = failed.result() if failed.done() else None
                failed.cancel()
        finally:
            each.ended.set()

    async def kill(self, name: str) -> None:
        each = self.running.pop(name)
        each.process.kill()
        await each.process.buried()

    async def end(self, name: str) -> None:
        """Stop a node in good order."""
        each = self.running.pop(name)
        each.leaving.set()
        await asyncio.wait_for(each.ended.wait(), 60)

    @contextlib.asynccontextmanager
    async def client(self, name: str = "client") -> AsyncIterator[Client]:
        async with Client(MemoryWal(self.log), prefix="by-dev", name=f"{name}-{self.now_s()}") as client:
            yield client

    async def stop(self) -> None:
        for each in self._all:
            each.process.kill()
            await each.process.buried()


@pytest.fixture
async def split(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    """One process for each role, on a log with one owner."""
    nodes = Nodes(tmp_path, rng, OneOwnerWal)
    for name, roles in SPLIT.items():
        await nodes.start(name, roles)
    yield nodes
    await nodes.stop()


@pytest.fixture
async def three(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    """Three nodes with all roles, on a log as brokers have it."""
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    for name in "abc":
        await nodes.start(name)
    yield nodes
    await nodes.stop()


class Traffic:
    """Clients that write row after row, one that overwrites one key in a pipeline, and one that asks: what it is
    answered has all that was acknowledged before, and each row once."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.acknowledged = 0
        self.tried = 0
        self.overwritten = 0  # the last value that is acknowledged
        self.longest_s = 0.0
        self.questions = 0
        self._stopping = False

    async def prepare(self) -> None:
        async with self.nodes.client("prepare") as client:
            await client.create_collection(PEOPLE, shards=3)
            await client.create_collection(NUMBERS, shards=1)

    async def write(self, client: Client) -> None:
        while not self._stopping:
            self.tried += 1
            began_s = self.nodes.now_s()
            await client.insert("people", [{"id": self.tried, "name": "x", "height": 1.0}], deadline_s=120)
            self.acknowledged += 1
            self.longest_s = max(self.longest_s, self.nodes.now_s() - began_s)
            await asyncio.sleep(self.nodes.rng.uniform(0, 0.1))

    async def overwrite(self, client: Client) -> None:
        value = 0
        while not self._stopping:
            values = range(value + 1, value + 5)
            value = values[-1]
            await asyncio.gather(
                *(client.upsert("numbers", [{"id": 1, "value": each}], deadline_s=120) for each in values)
            )
            self.overwritten = value
            await asyncio.sleep(self.nodes.rng.uniform(0, 0.1))

    async def ask(self, client: Client) -> None:
        while not self._stopping:
            least, overwritten = self.acknowledged, self.overwritten
            count = await client.count("people", consistency="strong", deadline_s=120)
            assert least <= count <= self.tried
            rows = (await client.get("numbers", [1], consistency="strong", deadline_s=120)).table
            assert overwritten <= (rows["value"][0].as_py() if rows.num_rows else 0)
            self.questions += 1
            await asyncio.sleep(self.nodes.rng.uniform(0, 0.2))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.prepare()
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(self.nodes.client(f"c{n}")) for n in range(4)]
            works = (self.write, self.write, self.overwrite, self.ask)
            async with asyncio.TaskGroup() as tasks:
                for work, client in zip(works, clients, strict=True):
                    tasks.create_task(work(client))
                yield
                self._stopping = True

    async def check(self) -> None:
        """Each row that was acknowledged is there once, in memory and in the table."""
        async with self.nodes.client("check") as client:
            assert await client.count("people", consistency="strong") == self.acknowledged
            await client.flush("people")
            assert (await client.compact("people"))["rows"] == self.acknowledged
            stats = await client.stats("people", consistency="strong")
            assert stats.versions["insert"] == self.acknowledged
            rows = (await client.get("numbers", [1], consistency="strong")).table
            assert rows["value"].to_pylist() == [self.overwritten]


# ---- one process for each role --------------------------------------------------------------------------------------


async def test_each_role_may_have_a_process_of_its_own(split: Nodes) -> None:
    async with split.client() as client:
        await client.create_collection(PEOPLE, shards=3)
        await client.insert("people", [{"id": n, "name": "x", "height": 1.0} for n in range(100)])
        assert await client.count("people", consistency="strong") == 100
        assert await client.count("people", consistency="session") == 100
        await client.delete("people", [1, 2])
        await client.flush("people")
        assert (await client.compact("people"))["rows"] == 98
        await client.cut("people")
        await client.drop_collection("people")
        assert await client.list_collections() == []


@pytest.mark.parametrize("name", SPLIT)
async def test_a_process_with_one_role_that_is_killed_is_missed_until_it_is_back(split: Nodes, name: str) -> None:
    traffic = Traffic(split)
    async with traffic.running():
        for _ in range(3):
            await asyncio.sleep(split.rng.uniform(0.5, 4))
            await split.kill(name)
            await asyncio.sleep(split.rng.uniform(0, 5))
            await split.start(name, SPLIT[name])
        await asyncio.sleep(5)
    assert traffic.acknowledged > 50
    assert traffic.questions > 5
    await traffic.check()


# ---- nodes with all roles -------------------------------------------------------------------------------------------


def owners(nodes: Nodes) -> dict[str, str]:
    """The names of the nodes that own the channels, as any node sees it."""
    any_node = next(iter(nodes.running.values())).node
    assert any_node is not None
    proxy = next(cell for cell in any_node.system._cells.values() if cell.name == "proxy")._life.actor
    channels = proxy.catalog.catalog.channels
    return {name: state.owner.rpartition("-")[0] for name, state in channels.items()}


def leader(nodes: Nodes) -> str:
    any_node = next(iter(nodes.running.values())).node
    assert any_node is not None
    proxy = next(cell for cell in any_node.system._cells.values() if cell.name == "proxy")._life.actor
    return proxy.catalog.leader.node.rpartition("-")[0]


async def test_a_node_that_joins_takes_nothing_from_those_that_run(three: Nodes) -> None:
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=8)
        before = owners(three)
        assert set(before.values()) == set("abc"), "the channels are divided"
        began_s = three.now_s()
        await three.start("d")
        assert three.now_s() - began_s < 1
        await client.insert("people", [{"id": n, "name": "x", "height": 1.0} for n in range(50)])
        assert await client.count("people", consistency="strong") == 50
        assert owners(three) == before
        assert all(each.error is None for each in three.running.values())


async def test_the_channels_of_a_node_that_ends_are_others_at_once(three: Nodes) -> None:
    traffic = Traffic(three)
    async with traffic.running():
        for name in "ab":
            await asyncio.sleep(1)
            await three.end(name)
        await asyncio.sleep(1)
    assert set(owners(three).values()) == {"c"}
    assert traffic.longest_s < 1
    await traffic.check()


async def test_a_node_that_is_killed_is_replaced_within_a_lease(three: Nodes) -> None:
    traffic = Traffic(three)
    async with traffic.running():
        await asyncio.sleep(1)
        victim = owners(three)["by-dev-rootcoord-dml_0"]
        await three.kill(victim)
        await asyncio.sleep(10)
        assert victim not in owners(three).values()
    assert traffic.longest_s < TAKEN_OVER_S + 1
    await traffic.check()


async def test_a_node_that_knows_its_predecessor_dead_takes_its_place_at_once(three: Nodes) -> None:
    traffic = Traffic(three)
    async with traffic.running():
        await asyncio.sleep(1)
        victim = owners(three)["by-dev-rootcoord-dml_0"]
        dead = three.running[victim].node
        assert dead is not None
        await three.kill(victim)
        await three.start(victim, predecessor=dead.node.incarnation)
        await asyncio.sleep(3)
    assert traffic.longest_s < 2  # the clients repeat their requests
    await traffic.check()


async def test_writes_and_reads_do_not_miss_a_leader(three: Nodes) -> None:
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=1)
        lead = leader(three)
        [owner] = owners(three).values()
        if owner == lead:
            pytest.skip("the leader owns the channel, too")
        await three.kill(lead)
        began_s = three.now_s()
        await client.create_collection(NUMBERS, shards=1, deadline_s=60)
        assert three.now_s() - began_s < TAKEN_OVER_S + 1.3  # the client repeats its question


async def test_a_node_that_was_stopped_for_longer_than_its_lease_acknowledges_nothing_and_ends(three: Nodes) -> None:
    traffic = Traffic(three)
    async with traffic.running():
        await asyncio.sleep(1)
        victim = three.running.pop(owners(three)["by-dev-rootcoord-dml_0"])
        victim.process.pause()
        await asyncio.sleep(3 * LEASE_S)
        victim.process.resume()
        await asyncio.wait_for(victim.ended.wait(), 30)
        assert isinstance(victim.error, Fenced)
        await asyncio.sleep(1)
    await traffic.check()


async def test_random_kills_stops_and_starts_lose_and_double_nothing(three: Nodes) -> None:
    traffic, rng = Traffic(three), three.rng
    async with traffic.running():
        for _ in range(8):
            await asyncio.sleep(rng.uniform(0, 6))
            name = rng.choice(sorted(three.running))
            match rng.choice(["kill", "pause", "end"]):
                case "kill":
                    await three.kill(name)
                case "end":
                    await three.end(name)
                case _:
                    victim = three.running.pop(name)
                    victim.process.pause()
                    await asyncio.sleep(rng.uniform(0, 3 * LEASE_S))
                    victim.process.resume()
                    await asyncio.sleep(2)
                    victim.process.kill()
                    await victim.process.buried()
            await three.start(name, wait=rng.random() < 0.7)
        await asyncio.sleep(2 * TAKEN_OVER_S)
    assert traffic.acknowledged > 100
    assert traffic.questions > 10
    await traffic.check()
