"""`tidewal run` on a log of brokers where a node runs already: they share the work, any of them may be killed, held or
ended, and clients that write meanwhile notice a pause."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.commands import said, tracebacks
from tests.turns import cases_in_turn
from tidewal.actors.client import Client
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.rows.schema import CollectionSchema, Field

pytestmark = [pytest.mark.broker, pytest.mark.slow]

ON_BROKERS_IN_TURN = pytest.mark.parametrize("broker_url", cases_in_turn(("kafka", "pulsar")), indirect=True)
THINGS = CollectionSchema("things", (Field("id", "int64"),), "id")
BOUND_S = 60.0
LEASE_S = 3.0
# What a lease, its detection and a client's next question take, and what a busy machine and its brokers may add.
TAKEN_OVER_S = 1.1 * LEASE_S + 2 + 20


class Writers:
    """Tasks that insert row after row. Whoever waits for them fails with them."""

    def __init__(self, client: Client, rng: random.Random, tasks: asyncio.TaskGroup) -> None:
        self.written = 0
        self.longest_s = 0.0
        self._tried = 0
        self._stopping = False
        self._client, self._rng = client, rng
        for _ in range(3):
            tasks.create_task(self._write())

    async def _write(self) -> None:
        now_s = asyncio.get_running_loop().time
        while not self._stopping:
            self._tried += 1
            began_s = now_s()
            await self._client.insert("things", [{"id": self._tried}], deadline_s=BOUND_S)
            self.written += 1
            self.longest_s = max(self.longest_s, now_s() - began_s)
            await asyncio.sleep(self._rng.expovariate(200))  # how busy the writers are

    async def more(self, count: int) -> None:
        """Wait until so many more are acknowledged."""
        wanted = self.written + count
        async with asyncio.timeout(BOUND_S):
            while self.written < wanted:  # noqa: ASYNC110 -- the tasks tell it in no other way
                await asyncio.sleep(0.01)

    async def pause_after(self, what: Callable[[], object]) -> float:
        """Do something to a node, and return how long the longest write then took, in seconds."""
        self.longest_s = 0.0
        what()
        await self.more(300)
        return self.longest_s

    def stop(self) -> None:
        self._stopping = True


class Nodes:
    """Processes of one cluster: the tables are in one directory, and each node has its own name."""

    def __init__(self, start: Callable[..., Any], data: Path, url: str) -> None:
        self._start, self._data, self._url = start, data, url

    async def start(self, name: str) -> subprocess.Popen[str]:
        """Start a node, and wait until it is ready."""
        node = self._start("run", "--data", self._data, "--wal", self._url, "--name", name, "--json")
        await asyncio.wait_for(asyncio.to_thread(said, node), BOUND_S)
        return node

    async def end(self, node: subprocess.Popen[str]) -> None:
        """End a node in good order."""
        node.send_signal(signal.SIGTERM)
        out, _ = await asyncio.to_thread(node.communicate, timeout=BOUND_S)
        assert node.returncode == 0, out
        assert not tracebacks(out)


@pytest.fixture
def nodes(start: Callable[..., Any], tmp_path: Path, broker_url: str) -> Nodes:
    return Nodes(start, tmp_path / "data", broker_url)


@asynccontextmanager
async def written(url: str, rng: random.Random) -> AsyncIterator[Writers]:
    """Write rows all the time; at the end each that was acknowledged is there, once, in memory and in the table."""
    wal = await open_wal(url)
    async with Client(wal) as client:
        await client.create_collection(THINGS, shards=4, deadline_s=BOUND_S)
        async with asyncio.TaskGroup() as tasks:
            writers = Writers(client, rng, tasks)
            await writers.more(100)
            yield writers
            writers.stop()
        assert await client.count("things", consistency="strong") == writers.written
        await client.flush("things")
        assert (await client.compact("things"))["rows"] == writers.written
    await wal.close()


@pytest.mark.long
@ON_BROKERS_IN_TURN
async def test_nodes_that_are_killed_and_ended_lose_and_double_nothing(
    nodes: Nodes, broker_url: str, rng: random.Random
) -> None:
    first = await nodes.start("first")
    async with written(broker_url, rng) as writers:
        second = await nodes.start("second")
        await writers.more(100)
        assert first.poll() is None, "the first goes on"
        pause_s = await writers.pause_after(first.kill)
        print(f"killed: {pause_s:.2f} s")
        assert pause_s < TAKEN_OVER_S
        third = await nodes.start("third")
        pause_s = await writers.pause_after(second.kill)
        print(f"killed: {pause_s:.2f} s")
        assert pause_s < TAKEN_OVER_S
        fourth = await nodes.start("fourth")
        writers.longest_s = 0.0
        await nodes.end(third)
        await writers.more(300)
        print(f"ended: {writers.longest_s:.2f} s")
    await nodes.end(fourth)


@pytest.mark.long
@ON_BROKERS_IN_TURN
async def test_a_node_that_is_held_past_its_lease_acknowledges_nothing_and_ends(
    nodes: Nodes, broker_url: str, rng: random.Random
) -> None:
    first = await nodes.start("first")
    async with written(broker_url, rng) as writers:
        second = await nodes.start("second")
        assert await writers.pause_after(lambda: first.send_signal(signal.SIGSTOP)) < TAKEN_OVER_S
        first.send_signal(signal.SIGCONT)
        out, _ = await asyncio.to_thread(first.communicate, timeout=BOUND_S)
        assert first.returncode == 2, out
        assert "Fenced: " in out
        assert not tracebacks(out), out[out.index("Traceback") :][:2000]
        await writers.more(100)
    await nodes.end(second)
