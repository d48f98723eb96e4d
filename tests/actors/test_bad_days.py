"""What does not fit or is not there, in a cluster of several nodes: each is a typed error, and nothing is half done."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.actors.conftest import PEOPLE, error_of, in_place, people
from tests.actors.nodes import Nodes
from tidewal.actors.client import Client
from tidewal.actors.placement_client import PlacementClient
from tidewal.cli.inspect_cluster import conditions
from tidewal.cli.stored_cluster import cluster_of
from tidewal.runtime.cluster.roles import DATA_NODE, PROXY, QUERY_NODE, ROLE_NAMES
from tidewal.runtime.cluster.state import ROWS, UNREADABLE
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import CorruptLog, InvalidRequest, PositionMismatch, TidewalError
from tidewal.runtime.log.names import Names
from tidewal.runtime.testing.memory import MemoryWal
from tidewal.runtime.testing.simulation.wal import SimulatedWal

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]


@pytest.fixture
async def nodes(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    """Two nodes with all roles but three, and a node for each of those."""
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    for name in "ab":
        await nodes.start(name, ("mixcoord", "streamingnode"))
    for role in (PROXY, DATA_NODE, QUERY_NODE):
        await nodes.start(role, (role,))
    yield nodes
    await nodes.stop()


async def told(nodes: Nodes) -> list[str]:
    """The conditions that `tidewal inspect cluster` names."""
    found = await cluster_of(MemoryWal(nodes.log), Names("by-dev"))
    return list(conditions(found, nodes.loop.clock.wall_ms()))


@pytest.mark.parametrize("role", [PROXY, DATA_NODE, QUERY_NODE])
async def test_what_a_role_does_that_no_member_offers_ends_with_an_error_and_is_done_once_it_is_there(
    nodes: Nodes, role: str
) -> None:
    async with nodes.client() as client:
        await client.create_collection(PEOPLE, shards=2)
        await client.insert("people", people(1))
        asked: dict[str, Callable[[], object]] = {
            PROXY: lambda: client.insert("people", people(2), deadline_s=10),
            DATA_NODE: lambda: client.flush("people", deadline_s=10),
            QUERY_NODE: lambda: client.count("people", consistency="strong", deadline_s=10),
        }
        await nodes.kill(role)
        began_s = nodes.now_s()
        error = await error_of(asked[role]())
        assert isinstance(error, TidewalError)
        assert error.retryable
        assert nodes.now_s() - began_s <= 11
        assert f"no member offers the role {role}" in await told(nodes)
        await nodes.start(role, (role,))
        await client.insert("people", people(3), deadline_s=20)
        await client.flush("people", deadline_s=20)
        count = await client.count("people", consistency="strong", deadline_s=20)
        assert count == 2 or (count == 3 and role == PROXY and error.outcome_unknown)
        assert (await client.compact("people", deadline_s=20))["rows"] == count


async def test_channels_go_to_no_node_that_cannot_own_them(nodes: Nodes) -> None:
    async with nodes.client() as client:
        await client.create_collection(PEOPLE, shards=2)
        channel = sorted(nodes.owners())[0]
        owner = nodes.owners()[channel]
        for name in (QUERY_NODE, "nobody"):
            for call in (PlacementClient(client).move(channel, name), PlacementClient(client).pin(channel, name)):
                error = await error_of(call)
                assert isinstance(error, InvalidRequest)
                assert name in error.message
        await asyncio.sleep(2)
        assert nodes.owners()[channel] == owner


async def test_a_node_with_the_prefix_of_another_cluster_takes_nothing_of_its_tables(nodes: Nodes) -> None:
    nodes.settings["stranger"] = Settings.model_validate({"msgChannel": {"chanNamePrefix": {"cluster": "other"}}})
    async with nodes.client() as client, Client(MemoryWal(nodes.log), prefix="other", name="strange") as other:
        await client.create_collection(PEOPLE, shards=2)
        await client.insert("people", people(1, 2))
        await client.flush("people")
        await nodes.start("stranger", ROLE_NAMES)
        assert await other.list_collections() == []
        error = await error_of(other.create_collection(PEOPLE))
        assert isinstance(error, PositionMismatch)
        assert await other.list_collections() == []
        await client.insert("people", people(3))
        await client.flush("people")
        assert await client.count("people", consistency="strong") == 3
        assert "stranger" not in nodes.owners().values()


async def test_a_querynode_whose_tables_are_away_says_so_and_others_answer(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = True

    async def blocking(call: Callable[[], object]) -> object:
        if away and getattr(getattr(call, "func", None), "__name__", "") == "open_own_table":
            raise CorruptLog("the tables are away")
        return await in_place(call)

    async with nodes.client() as client:
        await client.create_collection(PEOPLE, shards=2)
        await client.insert("people", people(*range(20)))
        await client.flush("people")
        monkeypatch.setattr("tests.actors.nodes.in_place", blocking)
        late = await nodes.start("late", (QUERY_NODE,))
        monkeypatch.undo()
        for _ in range(10):
            assert await client.count("people", consistency="strong") == 20
            await asyncio.sleep(0.5)
        report = next(each.report for each in late.node.node.cluster.members(QUERY_NODE) if each.name == "late")
        assert report[UNREADABLE] == ["people"]
        assert (report[ROWS]["ready"], report[ROWS]["waiting"]) == (0, 2)
        assert {why for _, why in report[ROWS]["vchannels"].values()} == {"CorruptLog"}
        said = await told(nodes)
        assert "late cannot read or write the tables of: people; `tidewal status` says why" in said
        assert any(each.startswith("late has 0 vchannels ready, and not yet: ") for each in said)
        away = False
        await asyncio.sleep(15)
        report = next(each.report for each in late.node.node.cluster.members(QUERY_NODE) if each.name == "late")
        assert (report.get(UNREADABLE) or [], report[ROWS]["ready"], report[ROWS]["waiting"]) == ([], 2, 0)


@pytest.mark.parametrize("ahead_s", [600, -600])
async def test_a_clock_ten_minutes_off_is_named_and_rows_are_there_once(nodes: Nodes, ahead_s: int) -> None:
    async with nodes.client() as client:
        await client.create_collection(PEOPLE, shards=4)
        await client.insert("people", people(1, 2))
        await nodes.start("off", ROLE_NAMES, ahead_ms=1000 * ahead_s)
        await asyncio.sleep(3)
        await PlacementClient(client).move(sorted(nodes.owners())[0], "off")
        for id in range(3, 13):
            await client.upsert("people", people(id, 1))
        await nodes.kill("a")
        for _ in range(10):
            assert await client.count("people", consistency="strong", deadline_s=30) == 12
        where = "ahead of" if ahead_s > 0 else "behind"
        assert f"the clock of off is 600 s {where} the others': set it, or use NTP" in await told(nodes)


async def test_two_nodes_of_one_name_are_named(nodes: Nodes) -> None:
    earlier = nodes.running[QUERY_NODE].node.node.incarnation
    later = (await nodes.start(QUERY_NODE, (QUERY_NODE,))).node.node.incarnation
    named = f"2 members are named querynode: {earlier}, {later}; one hangs, or two nodes have one name"
    assert named in await told(nodes)
