"""Several nodes on one log, where the log itself does not keep them apart: the newest has it, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tidewal.actors.client import Client
from tidewal.actors.mixcoord import MixCoord
from tidewal.actors.mixcoord.mixcoord import LEASE_MS
from tidewal.actors.proxy import Proxy
from tidewal.adapters.memory import MemoryWal
from tidewal.runtime.errors import Fenced
from tidewal.runtime.writer import Writer

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])

LEASE_S = LEASE_MS / 1000


class SharedMemory(MemoryWal):
    """As a broker: whoever has its address may open it."""

    capabilities = replace(MemoryWal.capabilities, one_node=False)


@pytest.fixture
def shared(home):
    home.memory = SharedMemory
    return home


def now_s() -> float:
    return asyncio.get_running_loop().time()


class Writing:
    """A task that inserts row after row."""

    def __init__(self, home, client: Client, rng: random.Random) -> None:
        self.written = 0
        self.longest_s = 0.0
        self._home, self._client, self._rng = home, client, rng

    async def run(self) -> None:
        while True:
            began = now_s()
            await self._client.insert("people", self._home.people(self.written + 1))
            self.written += 1
            self.longest_s = max(self.longest_s, now_s() - began)
            await self._home.elapse(self._rng.uniform(0, 0.05))


@contextlib.asynccontextmanager
async def writing(home, rng: random.Random) -> AsyncIterator[Writing]:
    wal = await home.wal()
    async with Client(wal, prefix="by-dev", name="writing") as client:
        writer = Writing(home, client, rng)
        task = asyncio.ensure_future(writer.run())
        yield writer
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await wal.close()


async def test_the_newest_of_many_nodes_has_the_log_and_no_row_is_lost_or_doubled(shared, rng) -> None:
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(shared.node(name="0"))
        async with node.client() as client:
            await client.create_collection(shared.PEOPLE, shards=3)
        async with writing(shared, rng) as writer:
            for name in ("1", "2", "3"):
                await shared.elapse(rng.uniform(0, 4))
                before, began = node, now_s()
                node = await stack.enter_async_context(shared.node(name=name))
                assert now_s() - began < 2, "a node that lives lets go at once"
                error = await asyncio.wait_for(before.failed(), 1)
                assert isinstance(error, Fenced)
                assert f"{name}-" in error.message
                assert not before.health().ok
                await shared.elapse(1)
                assert node.health().ok
        assert writer.written > 20
        assert writer.longest_s < 3
        async with node.client() as client:
            assert await client.count("people", consistency="strong") == writer.written
            await client.flush("people")
            assert (await client.compact("people"))["rows"] == writer.written


@pytest.mark.parametrize(("away_s", "waited_s"), [(0, LEASE_S), (7, LEASE_S), (2 * LEASE_S + 1, 0)])
async def test_a_node_that_was_killed_is_waited_for_as_long_as_it_might_live(
    shared, monkeypatch, away_s, waited_s
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "channels", ())  # it has nothing to give back
        async with shared.people_client() as client:
            await client.insert("people", shared.people(1))
    await shared.elapse(away_s)
    began = now_s()
    async with shared.client(name="second") as client:
        await client.insert("people", shared.people(2))
        assert now_s() - began == pytest.approx(waited_s, abs=0.5)
        assert await client.count("people", consistency="strong") == 2


async def test_a_node_that_has_ended_is_not_waited_for(shared) -> None:
    async with shared.people_client() as client:
        await client.insert("people", shared.people(1))
    began = now_s()
    async with shared.client(name="second") as client:
        await client.insert("people", shared.people(2))
        assert now_s() - began < 1


async def test_a_coordinator_that_restarts_under_another_leader_does_not_take_the_log_back(shared, monkeypatch) -> None:
    end = MixCoord._end_when_deposed
    crashes = ["once"]

    async def crash_first(self) -> None:
        while not self.deposed:
            await self.catalog.changed()
        if crashes:
            raise RuntimeError(crashes.pop())
        await end(self)

    monkeypatch.setattr(MixCoord, "_end_when_deposed", crash_first)
    async with shared.node(name="first") as first:
        async with first.client() as client:
            await client.create_collection(shared.PEOPLE)
        async with shared.node(name="second") as second, second.client() as client:
            assert isinstance(await first.failed(), Fenced)
            await shared.elapse(5)
            assert not crashes
            assert not first.system.status()
            await client.insert("people", shared.people(1))
            assert not second.system.failed


async def test_a_proxy_that_is_refused_before_it_has_read_of_the_new_leader_ends_without_a_crash(
    shared, monkeypatch, caplog
) -> None:
    end = Proxy._end_when_deposed

    async def end_late(self) -> None:
        while not self.deposed:
            await self.catalog.changed()
        self.register()  # as after an append whose outcome it does not know
        await shared.elapse(0.5)
        await end(self)

    monkeypatch.setattr(Proxy, "_end_when_deposed", end_late)
    async with shared.node(name="first") as first:
        async with first.client() as client:
            await client.create_collection(shared.PEOPLE)
        async with shared.node(name="second"):
            assert isinstance(await first.failed(), Fenced)
    assert "crashed" not in caplog.text
