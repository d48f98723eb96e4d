"""Several nodes on one log are one system: whole processes, on virtual time, that share the work, are killed, stopped
for a while, started and ended. Clients notice a pause."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.actors.conftest import PEOPLE
from tests.actors.nodes import LEASE_S, NUMBERS, TAKEN_OVER_S, Nodes, OneOwnerWal, Traffic
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import Fenced, WrongCluster
from tidewal.runtime.testing.simulation.wal import SimulatedWal

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]

SPLIT = {
    "owner": ("mixcoord", "streamingnode"),
    "door": ("proxy",),
    "stores": ("datanode",),
    "answers": ("querynode",),
}


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
        for _ in range(2):
            await asyncio.sleep(split.rng.uniform(0.5, 4))
            await split.kill(name)
            await asyncio.sleep(split.rng.uniform(0, 5))
            await split.start(name, SPLIT[name])
        await asyncio.sleep(5)
    assert traffic.acknowledged > 50
    assert traffic.questions > 5
    await traffic.check()


# ---- nodes with all roles -------------------------------------------------------------------------------------------


async def test_a_node_that_joins_takes_nothing_from_those_that_run(three: Nodes) -> None:
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=8)
        before = three.owners()
        assert set(before.values()) == set("abc"), "the channels are divided"
        began_s = three.now_s()
        await three.start("d")
        assert three.now_s() - began_s < 1
        await client.insert("people", [{"id": n, "name": "x", "height": 1.0} for n in range(50)])
        assert await client.count("people", consistency="strong") == 50
        assert three.owners() == before
        assert all(each.error is None for each in three.running.values())


async def test_the_channels_of_a_node_that_ends_are_others_at_once(three: Nodes) -> None:
    traffic = Traffic(three)
    async with traffic.running():
        for name in "ab":
            await asyncio.sleep(1)
            await three.end(name)
        await asyncio.sleep(1)
    assert set(three.owners().values()) == {"c"}
    assert traffic.longest_s < 1
    await traffic.check()


async def test_a_node_that_is_killed_is_replaced_within_a_lease(three: Nodes) -> None:
    traffic = Traffic(three)
    async with traffic.running():
        await asyncio.sleep(1)
        victim = three.owners()["by-dev-rootcoord-dml_0"]
        await three.kill(victim)
        await asyncio.sleep(10)
        assert victim not in three.owners().values()
    assert traffic.longest_s < TAKEN_OVER_S + 1
    await traffic.check()


async def test_a_node_that_knows_its_predecessor_dead_takes_its_place_at_once(three: Nodes) -> None:
    traffic = Traffic(three)
    async with traffic.running():
        await asyncio.sleep(1)
        victim = three.owners()["by-dev-rootcoord-dml_0"]
        dead = three.running[victim].node.node.incarnation
        await three.kill(victim)
        await three.start(victim, predecessor=dead)
        await asyncio.sleep(3)
    assert traffic.longest_s < 2  # the clients repeat their requests
    await traffic.check()


async def test_writes_and_reads_do_not_miss_a_leader(three: Nodes) -> None:
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=1)
        lead = three.leader()
        [owner] = three.owners().values()
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
        victim = three.running.pop(three.owners()["by-dev-rootcoord-dml_0"])
        victim.process.pause()
        await asyncio.sleep(3 * LEASE_S)
        victim.process.resume()
        await asyncio.wait_for(victim.ended.wait(), 30)
        assert isinstance(victim.error, Fenced)
        await asyncio.sleep(1)
    await traffic.check()


@pytest.mark.long
async def test_random_kills_stops_and_starts_lose_and_double_nothing(three: Nodes) -> None:
    traffic, rng = Traffic(three), three.rng
    async with traffic.running():
        for _ in range(5):
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


# ---- nodes that do not belong ---------------------------------------------------------------------------------------


async def test_a_node_with_other_tables_is_refused_and_disturbs_nobody(three: Nodes) -> None:
    three.tables["d"] = "others"
    stranger = await three.start("d", wait=False)
    await asyncio.wait_for(stranger.ended.wait(), 30)
    assert isinstance(stranger.error, WrongCluster)
    assert "the tables of this node are not those of a" in stranger.error.message
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=3)
        await client.insert("people", [{"id": 1, "name": "x", "height": 1.0}])
        assert await client.count("people", consistency="strong") == 1
    assert set(three.owners().values()) == set("abc")


async def test_a_node_without_the_secret_of_the_cluster_is_refused(three: Nodes) -> None:
    three.settings["d"] = Settings.model_validate({"cluster": {"secret": "another"}})
    stranger = await three.start("d", wait=False)
    await asyncio.wait_for(stranger.ended.wait(), 30)
    assert isinstance(stranger.error, WrongCluster)
    assert stranger.error.key == "cluster.secret"


@pytest.mark.long
async def test_an_idle_cluster_keeps_its_catalog_and_its_members_short(three: Nodes) -> None:
    """Owners raise their limits in the one, nodes renew in the other, and snapshots take the place of both."""
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=3)
        await asyncio.sleep(900)
        sizes = [len(three.log.channels[f"by-dev-{name}"].entries) for name in ("collection_schema", "cluster")]
        assert sizes[0] < 400, "of 900 records"
        assert sizes[1] < 2500, "of 2,700"
        assert await client.count("people", consistency="strong") == 0
