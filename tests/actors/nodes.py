"""The nodes of one log, for tests: whole nodes in simulated processes, on virtual time, and clients that use them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.actors.conftest import PEOPLE, in_place
from tests.direct_network import MemoryNetwork
from tidewal.actors.client import Client
from tidewal.actors.standalone import Standalone
from tidewal.runtime.cluster.roles import ROLE_NAMES
from tidewal.runtime.cluster.version import THIS_VERSION, TidewalVersion
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import TidewalError
from tidewal.runtime.rows.schema import CollectionSchema, Field
from tidewal.runtime.testing.clock import MachineClock, VirtualLoop
from tidewal.runtime.testing.faults import FaultPlan
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal
from tidewal.runtime.testing.simulation.process import SimulatedProcess, run_processes
from tidewal.runtime.testing.simulation.wal import LogFaults, SimulatedWal

LEASE_S = 3.0
TAKEN_OVER_S = 1.1 * LEASE_S + 1
NUMBERS = CollectionSchema("numbers", (Field("id", "int64"), Field("value", "int64")), "id")


class OneOwnerWal(SimulatedWal):
    """As RocksMQ: one process owns the log, the others use it through that."""

    capabilities = replace(SimulatedWal.capabilities, one_node=True, one_machine=True)


def role_of(node: Standalone, name: str) -> Any:
    """The role of a running node."""
    return next(cell for cell in node.system._cells.values() if cell.name == name)._life.actor


@dataclass
class NodeProcess:
    """A process with a whole node in it, on a machine of its own: it appends to no channel in `cut`, and hears nothing
    of those in `deaf`."""

    name: str
    clock: MachineClock
    cut: set[str] = field(default_factory=set[str])
    deaf: set[str] = field(default_factory=set[str])
    process: SimulatedProcess = field(default_factory=SimulatedProcess)
    started: Standalone | None = None
    error: BaseException | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def node(self) -> Standalone:
        assert self.started is not None, "it was not ready yet"
        return self.started

    async def run(self, node: Standalone) -> None:
        """Let `node` work until it fails, or this is to leave."""
        self.started = node
        self.ready.set()
        failed, leaving = asyncio.ensure_future(node.failed()), asyncio.ensure_future(self.leaving.wait())
        await asyncio.wait([failed, leaving], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        self.error = failed.result() if failed.done() else None
        failed.cancel()

    def role(self, name: str) -> Any:
        return role_of(self.node, name)


class Nodes:
    """The processes of one cluster, its log, and the network for their direct connections: a node whose settings have
    an address takes such."""

    def __init__(self, directory: Path, rng: random.Random, wal: type[SimulatedWal]) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        run_processes(loop)
        self.log, self.network = MemoryLog(), MemoryNetwork()
        self.loop, self.rng, self._wal, self._directory = loop, rng, wal, directory
        self.running: dict[str, NodeProcess] = {}
        self.settings: dict[str, Settings] = {}  # by node
        self.tables: dict[str, str] = {}  # by node: where it has its tables, unless where all have them
        self.versions: dict[str, TidewalVersion] = {}  # by node: of its Tidewal, unless this one
        self.log_faults = LogFaults(rng)
        self._all: list[NodeProcess] = []
        self._clients = itertools.count()

    def now_s(self) -> float:
        return self.loop.time()

    async def start(
        self,
        name: str,
        roles: Sequence[str] = ROLE_NAMES,
        *,
        wait: bool = True,
        predecessor: str = "",
        ahead_ms: int = 0,
        boot: str = "",
    ) -> NodeProcess:
        """Start a node in a process of its own, on a machine whose wall clock is ahead by `ahead_ms`, and which others
        know again by its `boot`."""
        each = NodeProcess(name, MachineClock(self.loop.clock, boot))
        each.clock.jump_wall(ahead_ms)
        self._all.append(each)
        self.running[name] = each
        each.process.spawn(self._run(each, roles, predecessor))
        if wait:
            await asyncio.wait_for(each.ready.wait(), 60)
        return each

    async def _run(self, each: NodeProcess, roles: Sequence[str], predecessor: str) -> None:
        wal = self._wal(self.log, FaultPlan(1), each.process, self.log_faults, each.cut, each.deaf)
        options: dict[str, Any] = {"clock": each.clock, "threads": False, "blocking": in_place, "name": each.name}
        options |= {"predecessor": predecessor, "settings": self.settings.get(each.name)}
        options |= {"network": self.network.of(each.process)}
        tables = self._directory / self.tables.get(each.name, "tables")
        try:
            of_version = type("OfVersion", (Standalone,), {"_version": self.versions.get(each.name, THIS_VERSION)})
            async with of_version(wal, tables, roles=roles, **options) as node:
                await each.run(node)
        except TidewalError as error:  # it has not started
            each.error = error
        finally:
            each.ended.set()

    async def kill(self, name: str) -> NodeProcess:
        each = self.running.pop(name)
        each.process.kill()
        self.network.killed(each.process)
        await each.process.buried()
        return each

    async def end(self, name: str) -> None:
        """Stop a node in good order."""
        each = self.running.pop(name)
        each.leaving.set()
        await asyncio.wait_for(each.ended.wait(), 60)

    def cut_off(self, name: str, *, deaf: bool = True) -> NodeProcess:
        """Let no record of a node come to where nodes say that they live and who owns what; with `deaf` it does not
        hear of them either."""
        each = self.running[name]
        names = each.node.node.names
        each.cut.update((names.catalog, names.cluster))
        if deaf:
            each.deaf.update(each.cut)
        return each

    def reconnect(self, each: NodeProcess) -> None:
        each.cut.clear()
        each.deaf.clear()
        self.log_faults.release()

    def stall(self, channels: Iterable[str]) -> None:
        """Let these channels take no appends until they `go_on`."""
        self.log_faults.stalled.update(channels)

    def go_on(self, channels: Iterable[str]) -> None:
        for channel in channels:
            self.log_faults.go_on(channel)

    @contextlib.asynccontextmanager
    async def client(self, name: str = "client") -> AsyncIterator[Client]:
        async with Client(MemoryWal(self.log), prefix="by-dev", name=f"{name}-{next(self._clients)}") as client:
            yield client

    async def stop(self) -> None:
        for each in self._all:
            each.process.kill()
            await each.process.buried()

    # ---- what the nodes know ----------------------------------------------------------------------------------------

    def _catalog(self) -> Any:
        """The catalog as one of the nodes that are ready has read it."""
        return next(each for each in self.running.values() if each.started is not None).role("mixcoord").catalog

    def owners(self) -> dict[str, str]:
        """The names of the nodes that own the channels."""
        channels = self._catalog().catalog.channels
        return {name: state.owner.rpartition("-")[0] for name, state in channels.items()}

    def leader(self) -> str:
        """The name of the node that leads."""
        return self._catalog().leader.node.rpartition("-")[0]


class Traffic:
    """Clients that write row after row, one that overwrites one key in a pipeline, and one that asks: what it is
    answered has all that was acknowledged before, and each row once."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.acknowledged = 0
        self.tried = 0
        self.overwritten = 0  # the last value that is acknowledged
        self.longest_s = 0.0
        self.longest_question_s = 0.0
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
            least, overwritten, began_s = self.acknowledged, self.overwritten, self.nodes.now_s()
            count = await client.count("people", consistency="strong", deadline_s=120)
            assert least <= count <= self.tried
            rows = (await client.get("numbers", [1], consistency="strong", deadline_s=120)).table
            assert overwritten <= (rows["value"][0].as_py() if rows.num_rows else 0)
            self.questions += 1
            self.longest_question_s = max(self.longest_question_s, self.nodes.now_s() - began_s)
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
