"""What a node on a log of one machine stores while nothing is written, and where the next one goes on."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.actors.conftest import PEOPLE, people
from tests.actors.nodes import Nodes, OneOwnerWal
from tidewal.runtime.cluster import coordinator
from tidewal.runtime.cluster.limits import FAR_MS, LIMIT_MS
from tidewal.runtime.cluster.roles import COORDINATOR, DATA_NODE, PROXY, QUERY_NODE, STREAMING_NODE
from tidewal.runtime.testing.memory import MemoryWal

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])


@pytest.fixture
async def nodes(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    """Nobody yet, on a log that one process owns."""
    nodes = Nodes(tmp_path, rng, OneOwnerWal)
    yield nodes
    await nodes.stop()


async def test_a_node_alone_stores_one_limit_each_ten_minutes_while_nothing_is_written(home) -> None:
    stored = Counter[str]()

    class Counting(MemoryWal):
        def submit(self, appends, done) -> None:
            stored.update(each.channel for each in appends)
            super().submit(appends, done)

    home.memory = Counting
    async with home.people_client(settings={"proxy": {"time_tick_interval": 1_000}}) as client:
        await client.insert("people", people(1))
        await home.elapse(30)  # the row is flushed
        stored.clear()
        await home.elapse(19 * 60)
        assert stored.pop("by-dev-heartbeats") == pytest.approx(19 * 60, abs=2), "which is in memory alone"
        assert stored in ({"by-dev-collection_schema": 1}, {"by-dev-collection_schema": 2})


async def test_a_quiet_catalog_and_cluster_keep_no_segment_for_ever(home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "MOVE_ON_S", 60.0)
    async with home.people_client():
        await home.elapse(20)
        channels = [home.log.channels["by-dev-collection_schema"], home.log.channels["by-dev-cluster"]]
        before = [channel.end for channel in channels]
        await home.elapse(90)
        assert all(channel.first >= end - 1 for channel, end in zip(channels, before, strict=True))


async def insert(nodes: Nodes, id: int) -> int:
    async with nodes.client() as client:
        return (await client.insert("people", people(id), deadline_s=60)).ts


async def idle_node(nodes: Nodes, **options) -> int:
    """Start a node, write a row, and let minutes pass. Returns the row's timestamp."""
    await nodes.start("first", boot="boot", **options)
    async with nodes.client() as client:
        await client.create_collection(PEOPLE)
    written = await insert(nodes, 1)
    await asyncio.sleep(150)
    return written


@pytest.mark.parametrize("step_ms", [0, -3_600_000])
async def test_a_node_that_was_killed_is_followed_where_its_limit_had_risen_to(nodes: Nodes, step_ms: int) -> None:
    await idle_node(nodes)
    promised = (await nodes.kill("first")).node.node.clock.last
    second = await nodes.start("second", boot="boot", ahead_ms=step_ms)
    assert await insert(nodes, 2) > promised
    assert second.node.node.clock.ahead_ms + step_ms <= LIMIT_MS + 1_000
    async with nodes.client() as client:
        assert await client.count("people", consistency="strong") == 2


async def test_a_machine_that_has_lost_its_time_goes_on_behind_all_that_is_stored(nodes: Nodes) -> None:
    await idle_node(nodes)
    promised = (await nodes.kill("first")).node.node.clock.last
    second = await nodes.start("second", boot="another", ahead_ms=-3_600_000)
    assert await insert(nodes, 2) > promised
    assert second.node.node.clock.ahead_ms - 3_600_000 == pytest.approx(FAR_MS - 150_000, abs=60_000)


async def test_the_owner_among_several_processes_stores_no_limits_while_it_is_idle(nodes: Nodes) -> None:
    writing = (COORDINATOR, STREAMING_NODE, PROXY)
    await nodes.start("readers", (DATA_NODE, QUERY_NODE), wait=False)
    await idle_node(nodes, roles=writing)
    catalog = nodes.log.channels["by-dev-collection_schema"]
    before = catalog.end
    await asyncio.sleep(60)
    assert catalog.end == before
    await nodes.kill("first")
    second = await nodes.start("second", writing, boot="boot")
    await insert(nodes, 2)
    assert second.node.node.clock.ahead_ms <= LIMIT_MS + 1_000
