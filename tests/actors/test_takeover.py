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
from tidewal.actors.streamingnode import StreamingNode
from tidewal.actors.streamingnode.granted_channels import GrantedChannels
from tidewal.runtime.errors import Fenced, TidewalError, Unavailable
from tidewal.runtime.log.record import Record, RecordType
from tidewal.runtime.ownership.lease import LEASE_S
from tidewal.runtime.testing.clock import MachineClock
from tidewal.runtime.testing.memory import MemoryWal

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])


class SharedMemory(MemoryWal):
    """As on brokers: every process with the address may open it."""

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


@pytest.mark.slow
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
                assert now_s() - began < 2, "a running node releases its channels at once"
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


@pytest.mark.slow
@pytest.mark.parametrize("step_ms", [0, 3_600_000, -3_600_000, 10 * 86_400_000])
@pytest.mark.parametrize("away_s", [0, 7, 2 * LEASE_S + 1])
async def test_a_node_that_was_killed_is_waited_for_as_long_as_it_might_live(
    shared, monkeypatch, away_s, step_ms
) -> None:
    """How long ago that was no clock can tell: that of the new node may be ahead."""

    async def killed(*_: object) -> None:
        """It gives nothing back."""

    with monkeypatch.context() as patch:
        patch.setattr(GrantedChannels, "release", killed)
        async with shared.people_client() as client:
            await client.insert("people", shared.people(1))
    await shared.elapse(away_s)
    began, clock = now_s(), MachineClock(asyncio.get_running_loop().clock)
    clock.jump_wall(step_ms)
    async with shared.client(name="second", clock=clock) as client:
        await client.insert("people", shared.people(2))
        assert now_s() - began == pytest.approx(LEASE_S, abs=0.5)
        assert await client.count("people", consistency="strong") == 2


class Partitioned(SharedMemory):
    """A log whose readers of the catalog can be cut off: the process learns of nothing, and still writes."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.connected = asyncio.Event()
        self.connected.set()

    async def read(self, channel, start):
        async with contextlib.aclosing(super().read(channel, start)) as batches:
            async for entries in batches:
                if channel.endswith("collection_schema"):
                    await self.connected.wait()
                yield entries


def role_of(node, name: str):
    """The role of a running node."""
    return next(cell for cell in node.system._cells.values() if cell.name == name)._life.actor


@pytest.mark.slow
@pytest.mark.parametrize("newer_ms", [0, 3_600_000], ids=["", "the newer is ahead"])
@pytest.mark.parametrize("step_ms", [0, -3_600_000, 3_600_000, 10 * 86_400_000])
async def test_an_owner_whose_clock_was_set_acknowledges_nothing_behind_its_lease(shared, step_ms, newer_ms) -> None:
    shared.memory = Partitioned
    clocks = [MachineClock(asyncio.get_running_loop().clock) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        older = await stack.enter_async_context(shared.node(name="older", clock=clocks[0]))
        async with older.client() as client:
            await client.create_collection(shared.PEOPLE, shards=1)
        clocks[0].jump_wall(step_ms)
        clocks[1].jump_wall(newer_ms)
        await shared.elapse(8)  # renewals go on
        older.node.wal.connected.clear()
        began = now_s()
        newer = await stack.enter_async_context(shared.node(name="newer", clock=clocks[1]))
        assert newer.node.local_owner.owns_all
        assert LEASE_S - 0.5 < now_s() - began < LEASE_S + 0.5
        owner = role_of(older, "streamingnode")._owner
        (channel,) = owner.channels
        with pytest.raises(Unavailable, match="lease"):
            await owner.sync()
        with pytest.raises((TidewalError, TimeoutError)):
            await asyncio.wait_for(owner.append([(channel, Record(RecordType.FLUSH, vchannel=channel))]), 60)
        async with newer.client() as client:  # the older one hears the questions, too, and can answer none
            for _ in range(5):
                await client.insert("people", shared.people(1))
                assert await client.count("people", consistency="strong") == 1
                await shared.elapse(0.3)
        older.node.wal.connected.set()
        assert isinstance(await asyncio.wait_for(older.failed(), 10), Fenced)


async def test_time_that_a_machine_was_suspended_counts_for_the_lease(shared) -> None:
    clock = asyncio.get_running_loop().clock
    async with shared.node() as node, node.client() as client:
        await client.create_collection(shared.PEOPLE)
        owner = role_of(node, "streamingnode")._owner
        await owner.sync()
        clock.suspend(LEASE_S + 1)
        with pytest.raises(Unavailable, match="lease"):
            await owner.sync()
        await shared.elapse(4)  # the lease is renewed
        await client.insert("people", shared.people(1))
        assert await client.count("people", consistency="strong") == 1


async def test_a_node_that_has_ended_is_not_waited_for(shared) -> None:
    async with shared.people_client() as client:
        await client.insert("people", shared.people(1))
    began = now_s()
    async with shared.client(name="second") as client:
        await client.insert("people", shared.people(2))
        assert now_s() - began < 1


async def test_a_coordinator_that_restarts_under_another_leader_does_not_take_the_log_back(shared, monkeypatch) -> None:
    end = MixCoord._end_when_superseded
    crashes = ["once"]

    async def crash_first(self) -> None:
        while not self.superseded:
            await self.catalog.changed()
        if crashes:
            raise RuntimeError(crashes.pop())
        await end(self)

    monkeypatch.setattr(MixCoord, "_end_when_superseded", crash_first)
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


async def test_an_owner_that_is_refused_before_it_has_read_of_the_new_leader_ends_without_a_crash(
    shared, monkeypatch, caplog
) -> None:
    end = StreamingNode._end_when_superseded

    async def end_late(self) -> None:
        while not self.superseded:
            await self.catalog.changed()
        self.stalled(self._owner.channels)  # as after an append whose outcome it does not know
        await shared.elapse(0.5)
        await end(self)

    monkeypatch.setattr(StreamingNode, "_end_when_superseded", end_late)
    async with shared.node(name="first") as first:
        async with first.client() as client:
            await client.create_collection(shared.PEOPLE)
        async with shared.node(name="second"):
            assert isinstance(await first.failed(), Fenced)
    assert "crashed" not in caplog.text
