"""Replicas: the QueryNodes of a cluster share the vchannels of collections, and answer questions together."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.actors.conftest import PEOPLE, error_of, people
from tests.actors.nodes import LEASE_S, NUMBERS, TAKEN_OVER_S, Nodes, Traffic
from tests.actors.test_moves import until
from tidewal.actors.client import Client
from tidewal.actors.placement_client import PlacementClient
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import CollectionNotLoaded
from tidewal.runtime.log.names import pchannel_of
from tidewal.runtime.rows.hashing import shard_of_key
from tidewal.runtime.testing.simulation.wal import SimulatedWal

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]


@pytest.fixture
async def three(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    """A node with all roles but QueryNode, and three QueryNodes."""
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    await nodes.start("rest", ("mixcoord", "streamingnode", "proxy", "datanode"))
    for name in "abc":
        await nodes.start(name, ("querynode",))
    yield nodes
    await nodes.stop()


def pchannels_by_key(keys: Iterable[int], vchannels: Sequence[str]) -> dict[int, str]:
    return {key: pchannel_of(vchannels[shard_of_key(key, len(vchannels))]) for key in keys}


async def holders(client: Client, collection: str = "people") -> dict[str, list[str]]:
    return {name: list(nodes) for name, nodes in (await client.load_state(collection)).vchannels.items()}


def held(nodes: Nodes, name: str, collection: str = "people") -> set[str]:
    """The vchannels of which a node has rows."""
    role = nodes.running[name].role("querynode")
    return {v for found, vchannels in role.held() if found.name == collection for v in vchannels}


async def test_each_vchannel_is_at_as_many_nodes_as_replicas(three: Nodes) -> None:
    async with three.client() as client:
        for replicas in (1, 2, 3):
            name = f"people{replicas}"
            await client.create_collection(replace(PEOPLE, name=name), shards=4, replicas=replicas)
            await client.load_collection(name)
            await client.insert(name, people(*range(50)))
            await asyncio.sleep(1)
            found = await holders(client, name)
            assert {len(nodes) for nodes in found.values()} == {replicas}
            for node in "abc":
                assert held(three, node, name) == {v for v, nodes in found.items() if node in nodes}
            assert await client.count(name, consistency="strong") == 50


async def test_answers_of_several_nodes_are_those_of_one(three: Nodes) -> None:
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=5, replicas=1)
        await client.insert("people", people(*range(100)))
        await client.delete("people", [7])
        first = await client.query("people", order_by=[("height", False)], limit=3, consistency="strong")
        assert first.table["id"].to_pylist() == [99, 98, 97]
        named = await client.query("people", "id < 9", columns=["name"], order_by=[("id", True)], consistency="session")
        assert named.table.to_pylist() == [{"name": f"n{n}"} for n in range(9) if n != 7]
        assert await client.count("people", "id >= 50", consistency="strong") == 50
        got = await client.get("people", [3, 7, 99], columns=["id"], consistency="strong")
        assert sorted(got.table["id"].to_pylist()) == [3, 99]
        stats = await client.stats("people", consistency="strong")
        assert (dict(stats.versions), stats.rows) == ({"insert": 100, "upsert": 0, "delete": 1}, 99)
        await asyncio.sleep(1)
        for consistency in ("bounded", "eventually"):
            assert await client.count("people", consistency=consistency) == 99
        assert await client.count("people", at=first.tsafe) == 99
        fanned = sum(three.running[n].node.node.metrics.value("querynode_fan_out_total") for n in "abc")
        assert fanned > 0


async def test_within_its_bound_a_question_waits_for_no_owner_that_was_killed(three: Nodes) -> None:
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=8, replicas=1)
        await client.insert("people", people(*range(50)))
        assert await client.count("people", consistency="strong") == 50
        await three.kill("rest")  # no other node owns channels: their time stands still
        for _ in range(4):
            await asyncio.sleep(1)
            began_s = three.now_s()
            for consistency in ("bounded", "eventually"):
                assert await client.count("people", consistency=consistency) == 50
            assert three.now_s() - began_s < 0.1
        fanned = sum(three.running[n].node.node.metrics.value("querynode_fan_out_total") for n in "abc")
        assert fanned > 8


async def test_a_released_collection_is_at_no_node(three: Nodes) -> None:
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=4)
        await client.insert("people", people(*range(20)))
        await client.load_collection("people", replicas=1)
        await client.release_collection("people")
        await until(lambda: not any(held(three, node) for node in "abc"))
        assert isinstance(await error_of(client.count("people")), CollectionNotLoaded)
        await client.load_collection("people", replicas=3)
        assert await client.count("people", consistency="strong") == 20


@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_node_that_joins_and_one_that_ends_leave_no_gap(three: Nodes, replicas: int) -> None:
    traffic = Traffic(three)
    async with traffic.running(), three.client() as client:
        for name in ("people", "numbers"):
            await client.load_collection(name, replicas=replicas)
        await asyncio.sleep(2)
        traffic.longest_question_s = 0.0
        await three.start("d", ("querynode",))
        await asyncio.sleep(3)
        for name in "ab":
            await three.end(name)
            await asyncio.sleep(2)
        assert traffic.longest_question_s < 1
        found = await holders(client)
        assert {len(nodes) for nodes in found.values()} == {replicas}
        assert {node for nodes in found.values() for node in nodes} <= {"c", "d"}
    assert traffic.questions > 20
    await traffic.check()


async def test_a_node_that_only_answers_is_drained_too(three: Nodes) -> None:
    async with three.client() as client:
        await three.start("q", ("querynode",))
        await client.create_collection(PEOPLE, shards=8, replicas=1)
        await client.insert("people", people(*range(40)))
        await asyncio.sleep(3)
        assert held(three, "q")
        assert await PlacementClient(client).drain("q") == "q"
        async with asyncio.timeout(10):
            while held(three, "q"):
                assert await client.count("people", consistency="strong") == 40
                await asyncio.sleep(0.1)
        assert await PlacementClient(client).uncordon("q") == "q"


@pytest.mark.long
async def test_with_two_replicas_a_kill_is_no_error_and_no_question_takes_a_second(three: Nodes) -> None:
    traffic = Traffic(three)
    async with traffic.running():
        await asyncio.sleep(2)
        for name in "ab":
            traffic.longest_question_s = 0.0
            await three.kill(name)
            await asyncio.sleep(6)
            assert traffic.longest_question_s < 1, name
            await three.start(name, ("querynode",))
            await asyncio.sleep(3)
    assert traffic.questions > 50
    await traffic.check()


async def test_with_one_replica_a_killed_node_is_replaced(three: Nodes) -> None:
    traffic = Traffic(three)
    async with traffic.running(), three.client() as client:
        for name in ("people", "numbers"):
            await client.load_collection(name, replicas=1)
        await asyncio.sleep(2)
        traffic.longest_question_s = 0.0
        await three.kill("a")
        await asyncio.sleep(10)
        assert traffic.longest_question_s < 6
        found = await holders(client)
        assert {node for nodes in found.values() for node in nodes} <= {"b", "c"}
    await traffic.check()


async def test_a_vchannel_that_comes_back_has_all_rows(three: Nodes) -> None:
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=6, replicas=1)
        for turn in range(4):
            await client.insert("people", people(*range(turn * 30, turn * 30 + 30)))
            await client.delete("people", [turn])
            if turn % 2 == 0:
                await three.start("d", ("querynode",))
            else:
                await three.end("d")
            await asyncio.sleep(3)
            assert await client.count("people", consistency="strong") == (turn + 1) * 29
            stats = await client.stats("people", consistency="strong")
            assert stats.rows == (turn + 1) * 29


async def test_strong_reads_of_two_owners_and_two_query_nodes_are_never_torn_whoever_dies(
    home, tmp_path: Path, rng: random.Random
) -> None:
    """Schedule 16: batches span two vchannels of one pchannel, which are at different QueryNodes, and a second pchannel
    of another owner; a replica is killed at any moment."""
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    for name in "ab":
        nodes.settings[name] = Settings.model_validate({"rootCoord": {"dmlChannelNum": 2}})
        await nodes.start(name, ("mixcoord", "streamingnode", "proxy", "datanode"))
    for name in "qrs":
        await nodes.start(name, ("querynode",))
    written, stopping = 0, False

    async def write(client: Client) -> None:
        nonlocal written
        while not stopping:
            batch = [{"id": n, "value": written + 1} for n in range(16)]
            await client.upsert("numbers", batch, deadline_s=60)
            written += 1
            await asyncio.sleep(rng.uniform(0, 0.1))

    async def ask(client: Client) -> None:
        while not stopping:
            least = written
            table = (await client.query("numbers", consistency="strong", deadline_s=60)).table
            by_channel: dict[str, set[int]] = {}
            for row in table.to_pylist():
                by_channel.setdefault(pchannels[row["id"]], set()).add(row["value"])
            assert table.num_rows in ((16,) if least else (0, 16))
            for channel, values in by_channel.items():
                assert len(values) == 1, (channel, values)
                assert min(values) >= least
            await asyncio.sleep(rng.uniform(0, 0.1))

    async with nodes.client() as client, nodes.client() as other:
        await client.create_collection(NUMBERS, shards=4, replicas=2)
        pchannels = pchannels_by_key(range(16), (await client.describe_collection("numbers")).vchannels)
        assert len(set(pchannels.values())) == 2
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(write(client))
            tasks.create_task(ask(other))
            for _ in range(4):
                await asyncio.sleep(rng.uniform(1, 3))
                name = rng.choice("qrs")
                await nodes.kill(name)
                await asyncio.sleep(rng.uniform(3, 6))
                await nodes.start(name, ("querynode",))
            stopping = True
    assert written > 20
    await nodes.stop()


async def test_nodes_report_which_vchannels_cannot_be_asked_for_yet(
    three: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load = asyncio.Event()

    async def when_it_may(call: Callable[[], object]) -> object:
        if getattr(call, "__name__", "") not in ("prepare", "identity"):  # of the store, at the start of a node
            await may_load.wait()
        return call()

    def reported(name: str) -> dict[str, Any]:
        members = three.running["rest"].node.node.cluster.members("querynode")
        return next(each.report["rows"] for each in members if each.name == name)

    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=3, replicas=4)
        await client.insert("people", people(*range(50)))
        await client.flush("people")
        await asyncio.sleep(3)
        there = reported("a")
        assert (there["ready"], there["waiting"], there["vchannels"]) == (3, 0, {})
        monkeypatch.setattr("tests.actors.nodes.in_place", when_it_may)
        node = (await three.start("d", ("querynode",))).node.node
        began_ms = node.clock.clock.wall_ms()
        await asyncio.sleep(5)
        loading = reported("d")
        assert (loading["ready"], loading["waiting"]) == (0, 3)
        assert set(loading["vchannels"]) == set((await client.describe_collection("people")).vchannels)
        for since_ms, why in loading["vchannels"].values():
            assert why == "loading"
            assert abs(since_ms - began_ms) <= 1_000
        assert node.metrics.value("querynode_load_rows_total") == 0
        may_load.set()
        await asyncio.sleep(2)
        ready = reported("d")
        assert (ready["ready"], ready["waiting"], ready["vchannels"]) == (3, 0, {})
        assert 5_000 <= ready["since_ms"] - began_ms <= 7_000
        assert node.metrics.value("querynode_load_rows_total") == 50
        assert node.metrics.value("querynode_load_bytes_total") > 50 * 8
        assert node.metrics.value("querynode_loading_num") == 0
        assert node.metrics.value("querynode_load_duration_seconds") == 1
        assert reported("a")["since_ms"] == there["since_ms"]


@pytest.mark.parametrize("known", [True, False])
async def test_a_killed_node_with_the_only_replica_is_replaced_by_its_next_life_at_once(
    three: Nodes, known: bool
) -> None:
    """It is not waited for that its lease ends, also where its next life does not know that it is dead."""
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=6, replicas=1)
        await client.insert("people", people(*range(60)))
        await client.load_collection("people")
        had = held(three, "a")
        assert had
        dead = await three.kill("a")
        await three.start("a", ("querynode",), predecessor=dead.node.node.incarnation if known else "")
        began_s = three.now_s()
        assert await client.count("people", consistency="strong") == 60
        assert three.now_s() - began_s < LEASE_S / 2
        assert held(three, "a") == had


async def test_two_nodes_of_one_name_answer_as_one(three: Nodes) -> None:
    """The later one is asked, and the earlier one keeps nothing that others have; all is there once."""
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=6, replicas=1)
        await client.insert("people", people(*range(60)))
        await client.load_collection("people")
        earlier = three.running.pop("a")
        await three.start("a", ("querynode",))
        for _ in range(20):
            assert await client.count("people", consistency="strong") == 60
            await asyncio.sleep(0.2)
        assert not any(vchannels for _, vchannels in earlier.role("querynode").held())
        await asyncio.sleep(10)
        assert not earlier.ended.is_set(), "it is told in `inspect cluster`, and ends nobody"


async def test_a_node_that_is_cut_off_past_its_lease_answers_only_what_names_it(three: Nodes) -> None:
    """It hears requests, and of the rest of the log nothing: what it has gets older and older (trap 34)."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(three.client()) for _ in range(6)]
        await clients[0].create_collection(PEOPLE, shards=2, replicas=3)
        await clients[0].insert("people", people(*range(10)))
        await clients[0].load_collection("people")
        for client in clients:
            assert await client.count("people", consistency="strong") == 10
        each = three.cut_off("a")
        each.deaf.update(three.owners(), (each.node.node.names.heartbeats,))
        await asyncio.sleep(TAKEN_OVER_S)
        await clients[0].insert("people", people(*range(10, 20)))
        await asyncio.sleep(1)
        for client in clients:
            assert await client.count("people", consistency="eventually") == 20
        asked = {"to": each.node.node.incarnation, "collection": "people", "consistency": "eventually"}
        reply = await clients[0]._rpc.call("querynode", "stats", asked)
        assert reply.values["rows"] == 10
