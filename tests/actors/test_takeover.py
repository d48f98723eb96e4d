"""Who gets the channels of a node that is gone, and when: nothing is acknowledged twice, and nobody waits for much
longer than a lease."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.actors.conftest import PEOPLE, error_of, people
from tests.actors.nodes import LEASE_S, NUMBERS, TAKEN_OVER_S, NodeProcess, Nodes, OneOwnerWal
from tidewal.actors.client import Client
from tidewal.actors.placement_client import PlacementClient
from tidewal.actors.rows import to_batch
from tidewal.runtime.catalog.catalog_log import CatalogLog
from tidewal.runtime.clock import HybridClock
from tidewal.runtime.cluster.roles import ROLE_NAMES
from tidewal.runtime.errors import Fenced, InvalidRequest, TidewalError, Unavailable
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.record import Record, RecordType
from tidewal.runtime.rows.row_codec import encode_rows
from tidewal.runtime.rpc.protocol import Reply
from tidewal.runtime.testing.memory import MemoryWal
from tidewal.runtime.testing.simulation.wal import SimulatedWal

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])

STEPS_MS = [0, 3_600_000, -3_600_000, 10 * 86_400_000]
AT_ONCE_S = 0.5
REPEATED_S = 1.2  # until a client has asked again, whose door was the one that is gone


@pytest.fixture
async def nodes(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    """Nobody yet, on a log as brokers have it."""
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    yield nodes
    await nodes.stop()


@pytest.fixture
async def embedded(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    """Nobody yet, on a log that one process owns."""
    nodes = Nodes(tmp_path, rng, OneOwnerWal)
    yield nodes
    await nodes.stop()


async def written(nodes: Nodes, *ids: int) -> None:
    async with nodes.client() as client:
        await client.insert("people", people(*ids), deadline_s=60)


async def counted(nodes: Nodes) -> int:
    async with nodes.client() as client:
        return await client.count("people", consistency="strong", deadline_s=60)


async def first_row(nodes: Nodes, name: str = "first") -> None:
    """Start a node, from which nothing is to move for balance, and write a row."""
    await nodes.start(name)
    async with nodes.client() as client:
        await PlacementClient(client).balance(on=False)
        await client.create_collection(PEOPLE)
    await written(nodes, 1)


async def owned_by(nodes: Nodes, *names: str) -> float:
    """Wait until these nodes own all channels, and return when."""
    async with asyncio.timeout(60):
        while set(nodes.owners().values()) != set(names):  # noqa: ASYNC110 -- the catalogs are those of other processes
            await asyncio.sleep(0.01)
    return nodes.now_s()


def lease_ends_s(each: NodeProcess) -> float:
    """Up to when a node may acknowledge and promise, as it knows itself."""
    return each.node.node.cluster._membership._lease._ends_s


# ---- killed ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("step_ms", STEPS_MS)
@pytest.mark.parametrize("away_s", [0, 1, 7])
async def test_a_node_that_was_killed_is_waited_for_as_long_as_it_might_live(nodes: Nodes, away_s, step_ms) -> None:
    """How long ago that was no clock can tell: that of the new node may be ahead."""
    await first_row(nodes)
    await asyncio.sleep(nodes.rng.uniform(0, 2))
    dead = await nodes.kill("first")
    await asyncio.sleep(away_s)
    began_s = nodes.now_s()
    second = await nodes.start("second", ahead_ms=step_ms)
    writing = asyncio.create_task(written(nodes, 2))
    owned_s = await owned_by(nodes, "second")
    assert owned_s > lease_ends_s(dead)
    assert LEASE_S <= owned_s - began_s < TAKEN_OVER_S
    await writing
    assert nodes.now_s() - owned_s < REPEATED_S
    assert await counted(nodes) == 2
    assert second.error is None


@pytest.mark.slow
@pytest.mark.parametrize("step_ms", STEPS_MS)
@pytest.mark.parametrize("others", [1, 2])
async def test_those_that_know_a_killed_node_count_from_when_they_last_heard_of_it(
    nodes: Nodes, others, step_ms
) -> None:
    await first_row(nodes)
    for number in range(others):
        await nodes.start(f"other{number}", ahead_ms=step_ms)
    await asyncio.sleep(nodes.rng.uniform(4, 6))
    assert set(nodes.owners().values()) == {"first"}
    began_s, dead = nodes.now_s(), await nodes.kill("first")
    writing = asyncio.create_task(written(nodes, *range(2, 20)))
    owned_s = await owned_by(nodes, *nodes.running)
    assert lease_ends_s(dead) < owned_s < began_s + TAKEN_OVER_S
    await writing
    assert nodes.now_s() - owned_s < REPEATED_S
    assert await counted(nodes) == 19


@pytest.mark.parametrize("step_ms", STEPS_MS)
async def test_where_one_process_owns_the_log_the_next_one_waits_for_nobody(embedded: Nodes, step_ms) -> None:
    await first_row(embedded)
    await embedded.kill("first")
    began_s = embedded.now_s()
    await embedded.start("second", ahead_ms=step_ms)
    await written(embedded, 2)
    assert embedded.now_s() - began_s < AT_ONCE_S
    assert await counted(embedded) == 2


async def test_a_node_that_has_ended_is_not_waited_for(nodes: Nodes) -> None:
    await first_row(nodes)
    await nodes.end("first")
    began_s = nodes.now_s()
    await nodes.start("second")
    await written(nodes, 2)
    assert nodes.now_s() - began_s < AT_ONCE_S
    assert await counted(nodes) == 2


# ---- cut off --------------------------------------------------------------------------------------------------------


async def write_through(each: NodeProcess, client: Client, id: int) -> Reply:
    """Ask this very node to write a row."""
    people = await client.describe_collection("people")
    known = {"collection": "people", "id": people.id, "schema_version": people.schema.version}
    known["to"] = each.node.node.incarnation
    rows = bytes(encode_rows(to_batch([{"id": id}], PEOPLE, op="insert")))
    return await client._rpc.call("proxy", "write", {**known, "producer": "p", "pseq": id}, rows, deadline_s=10)


async def read_through(each: NodeProcess, client: Client) -> Reply:
    """Ask this very node how many rows there are now."""
    fresh = {"collection": "people", "consistency": "strong", "session_ts": 0, "to": each.node.node.incarnation}
    return await client._rpc.call("querynode", "stats", fresh, deadline_s=10)


@pytest.mark.slow
@pytest.mark.parametrize("newer_ms", [0, 3_600_000], ids=["", "the newer is ahead"])
@pytest.mark.parametrize("step_ms", STEPS_MS)
async def test_an_owner_whose_clock_was_set_acknowledges_nothing_behind_its_lease(
    nodes: Nodes, step_ms, newer_ms, caplog
) -> None:
    """It learns of nothing, and still hears its clients and writes to its channels."""
    await first_row(nodes, "older")
    older = nodes.running["older"]
    await nodes.start("newer", ahead_ms=newer_ms)
    older.clock.jump_wall(step_ms)
    await asyncio.sleep(8)  # renewals go on
    async with nodes.client() as client:
        await write_through(older, client, 2)
        assert (await read_through(older, client)).values["rows"] == 2
    nodes.cut_off("older")
    nodes.running.pop("older")
    began_s = nodes.now_s()
    assert lease_ends_s(older) < await owned_by(nodes, "newer") < began_s + TAKEN_OVER_S
    owner = older.role("streamingnode")._owner
    channel = next(iter(owner.channels))
    with pytest.raises(Unavailable, match="lease"):
        await owner.sync()
    with pytest.raises((TidewalError, TimeoutError)):
        await asyncio.wait_for(owner.append([(channel, Record(RecordType.FLUSH, vchannel=channel))]), 60)
    async with nodes.client() as client:
        assert isinstance(await error_of(write_through(older, client, 1_000)), TidewalError)
        assert isinstance(await error_of(read_through(older, client)), TidewalError)
    for id in range(3, 12):  # each by another client: nodes divide them
        await written(nodes, id)
        assert await counted(nodes) == id
        await asyncio.sleep(0.3)
    nodes.reconnect(older)
    await asyncio.wait_for(older.ended.wait(), 10)
    assert isinstance(older.error, Fenced)
    assert "crashed" not in caplog.text
    assert await counted(nodes) == 11


@pytest.mark.slow
async def test_a_node_that_is_cut_off_for_less_than_its_lease_keeps_what_it_has(nodes: Nodes) -> None:
    await first_row(nodes)
    await nodes.start("other")
    for _ in range(3):
        await asyncio.sleep(3)
        first = nodes.cut_off("first")
        await asyncio.sleep(LEASE_S - 1.2)  # the last renewal is up to 1 s old
        nodes.reconnect(first)
        await written(nodes, 2)
    assert set(nodes.owners().values()) == {"first"}
    assert first.error is None


@pytest.mark.slow
async def test_a_node_that_hears_and_cannot_be_heard_ends_when_it_reads_that_it_was_given_up(nodes: Nodes) -> None:
    await first_row(nodes)
    await nodes.start("other")
    await asyncio.sleep(5)
    first = nodes.cut_off("first", deaf=False)
    nodes.running.pop("first")
    await asyncio.wait_for(first.ended.wait(), 3 * TAKEN_OVER_S + 10)
    assert isinstance(first.error, Fenced)
    await written(nodes, 2)
    assert await counted(nodes) == 2


async def test_time_that_a_machine_was_suspended_counts_for_the_lease(nodes: Nodes) -> None:
    await first_row(nodes)
    first = nodes.running["first"]
    owner = first.role("streamingnode")._owner
    await owner.sync()
    nodes.loop.clock.suspend(LEASE_S + 1)
    with pytest.raises(Unavailable, match="lease"):
        await owner.sync()
    await asyncio.sleep(2)  # the lease is renewed: there is nobody else
    await written(nodes, 2)
    assert await counted(nodes) == 2
    assert first.error is None


# ---- the coordinator ------------------------------------------------------------------------------------------------


def term(nodes: Nodes, name: str) -> tuple[str, int]:
    """Who leads, and under which term, as this node knows it."""
    leader = nodes.running[name].role("mixcoord").catalog.leader
    return leader.node, leader.term


@pytest.mark.slow
async def test_a_coordinator_that_restarts_under_another_leader_does_not_take_the_lead(nodes: Nodes) -> None:
    await first_row(nodes)
    await nodes.start("second")
    before, owners = term(nodes, "first"), nodes.owners()
    nodes.running["second"].role("mixcoord").crash(RuntimeError("a bug"))
    await asyncio.sleep(2 * TAKEN_OVER_S)
    restarts = {status.name: status.restarts for status in nodes.running["second"].node.system.status()}
    assert restarts["mixcoord"] == 1
    assert term(nodes, "first") == term(nodes, "second") == before
    await nodes.kill("first")
    await asyncio.sleep(2 * TAKEN_OVER_S)
    after = term(nodes, "second")
    assert after[1] > before[1]
    await nodes.start("first")
    await asyncio.sleep(2 * TAKEN_OVER_S)
    assert term(nodes, "first") == term(nodes, "second") == after
    assert set(nodes.owners().values()) == {"second"} != set(owners.values())
    await written(nodes, 2)
    assert await counted(nodes) == 2


@pytest.mark.slow
async def test_a_leader_whose_coordinator_crashes_leads_on_and_keeps_its_channels(nodes: Nodes) -> None:
    await first_row(nodes)
    await nodes.start("second")
    owners, lead = nodes.owners(), nodes.leader()
    for number in range(3):
        nodes.running[lead].role("mixcoord").crash(RuntimeError("a bug"))
        async with nodes.client() as client:
            await client.create_collection(PEOPLE if number else NUMBERS, deadline_s=60)
        await written(nodes, number + 2)
    assert nodes.leader() == lead
    assert owners.items() <= nodes.owners().items()
    assert await counted(nodes) == 4
    assert all(each.error is None for each in nodes.running.values())


# ---- in good order --------------------------------------------------------------------------------------------------


async def test_a_node_that_ends_leaves_its_channels_to_nobody(nodes: Nodes) -> None:
    """While it ends it still leads, and must not grant itself what it has just given back."""
    await first_row(nodes)
    await nodes.end("first")
    catalog = CatalogLog(MemoryWal(nodes.log), Names(), HybridClock(nodes.loop.clock))
    await catalog.open()
    channels = {(state.owner, state.term) for state in catalog.catalog.channels.values()}
    await catalog.close()
    assert channels == {("", 1)}


@pytest.mark.slow
async def test_a_client_does_not_learn_that_its_door_ends(nodes: Nodes) -> None:
    """Whatever its door has begun and cannot answer any more, another one answers."""
    await first_row(nodes)
    second = await nodes.start("second")
    channels = set(nodes.owners())
    async with asyncio.TaskGroup() as tasks, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(nodes.client()) for _ in range(8)]
        for client in clients:
            await client.describe_collection("people")
        nodes.stall(channels)
        writing = [
            tasks.create_task(client.insert("people", people(number), deadline_s=60))
            for number, client in enumerate(clients, 2)
        ]
        await asyncio.sleep(0.1)
        ending = tasks.create_task(nodes.end("second"))  # which owns nothing, and is the door of some
        await asyncio.sleep(20)
        nodes.go_on(channels)
        await asyncio.gather(ending, *writing)
    assert second.error is None
    assert await counted(nodes) == 9


async def test_a_proxy_in_another_process_has_a_position_decided_with_a_transaction(embedded: Nodes) -> None:
    """Nothing takes it to the owner of the log, which could store it in the commit."""
    await embedded.start("owner", [name for name in ROLE_NAMES if name != "proxy"])
    await embedded.start("door", ["proxy"])
    async with embedded.client() as client:
        await client.create_topic("in", 1)
        await client.create_topic("out", 1)
        await client.send("in", "1")
        async with await client.subscribe("in", "g") as member:
            for body in ("x", "y"):
                pack = await anext(member)
                began = embedded.now_s()
                async with client.transaction() as t:
                    await t.send("out", body)
                    await t.acknowledge(member, pack)
                assert embedded.now_s() - began < 5
                await client.send("in", "2")
            again = client.transaction()
            await again.send("out", "z")
            await again.acknowledge(member, pack)
            with pytest.raises(InvalidRequest):
                await again.commit()
        async with await client.subscribe("in", "g") as member:
            assert [bytes(each.body) for each in (await anext(member)).messages] == [b"2"]
