"""Near a limit writes are slowed down, at its high water mark they are refused, below its low one all is as before.
What frees memory passes always."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.actors.conftest import PEOPLE, error_of
from tests.actors.nodes import LEASE_S, Nodes
from tests.actors.test_moves import until
from tidewal.actors.client import Client
from tidewal.actors.metrics import measure_limit
from tidewal.actors.rows import to_batch
from tidewal.actors.streamingnode.write_pressure import (
    APPEND_RATE,
    HELD_MAX_S,
    LOOK_S,
    MAX_UNFLUSHED,
    PAID_MAX_S,
    SLOWEST_RATE,
    Pace,
)
from tidewal.runtime.cluster.pressure import NODE_MEMORY, ROW_MEMORY
from tidewal.runtime.cluster.roles import QUERY_NODE, ROLE_NAMES
from tidewal.runtime.cluster.state import THROTTLED
from tidewal.runtime.config.loading import load_settings
from tidewal.runtime.errors import Overloaded
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.rows.row_codec import encode_rows
from tidewal.runtime.testing.simulation.wal import SimulatedWal

on_virtual_time = pytest.mark.asyncio(loop_factories=["memory"])

MIB = 1024 * 1024
ROWS = 100
REPORTED_S = 2.0  # a renewal, and a look


def rows_from(first: int, count: int = ROWS) -> list[dict[str, Any]]:
    return [{"id": first + n, "name": "x" * 1000, "height": 1.0} for n in range(count)]


async def fill(client: Client, first: int, most: int = 100, collection: str = "people") -> tuple[int, Overloaded]:
    """Insert until that is refused; returns the first key that was not taken, and the error."""
    for _ in range(most):
        try:
            await client.insert(collection, rows_from(first))
        except Overloaded as error:
            return first, error
        first += ROWS
        await asyncio.sleep(REPORTED_S / 4)
    raise AssertionError(f"never refused after {first} rows")


async def insert_again(client: Client, first: int, within_s: float) -> None:
    """Insert what was refused before, as soon as it is taken."""
    async with asyncio.timeout(within_s):
        while isinstance(await error_or_none(client, first), Overloaded):  # noqa: ASYNC110 -- the nodes' state
            await asyncio.sleep(LOOK_S)


async def error_or_none(client: Client, first: int) -> Overloaded | None:
    try:
        await client.insert("people", rows_from(first))
    except Overloaded as error:
        return error
    return None


def shown(nodes: Nodes, name: str) -> dict[tuple[str, ...], float]:
    return nodes.running[name].node.node.metrics.series("streamingnode_write_factor")


@pytest.fixture
async def nodes(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    """Two nodes that own channels, and a QueryNode `q` with little memory."""
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    nodes.settings["q"] = load_settings(arguments={"queryNode.memoryLimitBytes": 8 * MIB}, environment={})
    for name in "ab":
        await nodes.start(name, [role for role in ROLE_NAMES if role != QUERY_NODE])
    await nodes.start("q", [QUERY_NODE])
    yield nodes
    await nodes.stop()


@on_virtual_time
async def test_a_full_querynode_refuses_inserts_and_deletes_bring_them_back(nodes: Nodes) -> None:
    async with nodes.client() as client:
        await client.create_collection(PEOPLE, shards=2)
        taken, error = await fill(client, 0)
        assert error.retryable
        assert error.limit == ROW_MEMORY
        assert error.fields["collection"] == "people"
        assert error.fields["value"] >= error.fields["mark"] == int(0.95 * 8 * MIB)
        assert "at q" in error.message
        assert await client.count("people", consistency="strong") == taken, "the QueryNode has all that was taken"
        owner = nodes.owners()[sorted(nodes.owners())[0]]
        assert shown(nodes, owner) == {(ROW_MEMORY, ""): 0.0}
        await asyncio.sleep(REPORTED_S)
        members = nodes.running[owner].node.node.cluster.state.members.values()
        reported = {each.name: each.report.get(THROTTLED) for each in members}
        assert reported[owner][0] | {"value": 0} == {
            "limit": ROW_MEMORY,
            "value": 0,
            "low": int(0.85 * 8 * MIB),
            "high": int(0.95 * 8 * MIB),
            "factor": 0.0,
            "node": "q",
            "collection": "",
            "collections": 1,
        }
        for at in range(0, taken // 5, ROWS):  # a fifth
            await client.delete("people", list(range(at, min(at + ROWS, taken // 5))))
        await insert_again(client, taken, 20)
        assert await client.count("people", consistency="strong") == taken - taken // 5 + ROWS
        await asyncio.sleep(REPORTED_S)
        assert shown(nodes, owner) == {}


@on_virtual_time
async def test_a_full_querynode_refuses_no_writes_to_collections_that_it_does_not_have(nodes: Nodes) -> None:
    await nodes.start("r", [QUERY_NODE])
    async with nodes.client() as client:
        placed: dict[str, str] = {}  # one collection of each QueryNode
        while len(placed) < 2:
            name = f"people_{len(placed)}_{nodes.rng.randrange(1000)}"
            await client.create_collection(replace(PEOPLE, name=name), shards=1, replicas=1)
            await client.load_collection(name)
            [[node]] = (await client.load_state(name)).vchannels.values()
            placed[node] = name
        first, error = await fill(client, 0, collection=placed["q"])
        assert (error.limit, error.fields["collection"]) == (ROW_MEMORY, placed["q"])
        await client.insert(placed["r"], rows_from(first))
        await nodes.end("r")  # so that `q` is to have it, too
        q = nodes.running["q"].role("querynode")
        await until(lambda: placed["r"] in [found.name for found, vchannels in q.held() if vchannels])
        await asyncio.sleep(REPORTED_S)
        assert isinstance(await error_of(client.insert(placed["r"], rows_from(first + ROWS))), Overloaded)


@on_virtual_time
async def test_between_the_marks_the_refusal_stays_and_ends_with_the_lease_of_who_reported(nodes: Nodes) -> None:
    async with nodes.client() as client:
        await client.create_collection(PEOPLE, shards=2)
        taken, _ = await fill(client, 0)
        await client.delete("people", list(range(taken // 20)))  # by a twentieth: it is still above the low mark
        await asyncio.sleep(5 * REPORTED_S)
        assert isinstance(await error_of(client.insert("people", rows_from(taken))), Overloaded)
        await nodes.kill("q")
        await insert_again(client, taken, LEASE_S + REPORTED_S)


@on_virtual_time
async def test_the_memory_of_any_node_slows_and_refuses_writes_at_all_owners(nodes: Nodes) -> None:
    async with nodes.client() as client:
        await client.create_collection(PEOPLE, shards=4)
        used = [(80, 100)]
        measure_limit(nodes.running["q"].node.node.cluster, Metrics("q"), NODE_MEMORY, lambda: used[0])

        async def factors(value: int) -> set[float]:
            used[0] = value, 100
            await asyncio.sleep(REPORTED_S)
            return {factor for name in "ab" for factor in shown(nodes, name).values()}

        assert await factors(84) == set()
        assert await factors(87) == {0.6}, "between 85 and 90 in a line"
        await client.insert("people", rows_from(0))
        assert await factors(90) == {0.0}
        error = await error_of(client.insert("people", rows_from(ROWS)))
        assert isinstance(error, Overloaded)
        assert (error.limit, error.fields["value"], error.fields["mark"]) == (NODE_MEMORY, 90, 90)
        assert await factors(85) == {0.0}
        await client.delete("people", [1])
        await client.flush("people")
        assert await factors(84) == set()
        await client.insert("people", rows_from(ROWS))


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.floats(0, 3, allow_nan=False), st.integers(1, 5_000)), min_size=1, max_size=40),
)
def test_a_pace_lets_in_no_more_than_its_rate_and_what_one_write_is_ahead(rate: int, writes) -> None:
    """Clients that do not wait: each write comes some seconds after the one before it."""
    pace, now_s, paid, most = Pace("a.limit", rate), 0.0, 0.0, rate * PAID_MAX_S
    for passed_s, size in writes:
        now_s += passed_s
        if pace.ahead_s(now_s) <= HELD_MAX_S:
            paid += min(size, most)  # a larger one counts as what lies within its bound
            pace.take(size, now_s)
        assert paid <= rate * (now_s + HELD_MAX_S) * 1.001 + most


def test_a_huge_batch_at_the_slowest_pace_keeps_others_out_for_a_moment() -> None:
    pace = Pace("a.limit", SLOWEST_RATE)
    pace.take(64 * MIB, 0.0)
    assert pace.ahead_s(0.0) <= HELD_MAX_S, "the next client is let in at once, and waits"
    pace.take(64 * MIB, 0.0)
    assert pace.ahead_s(0.0) == HELD_MAX_S + PAID_MAX_S, "for as long at most others are refused"


@on_virtual_time
async def test_what_is_not_in_the_tables_slows_writes_and_then_refuses_them(home) -> None:
    awake = asyncio.Event()
    awake.set()

    async def asleep(call):
        task = asyncio.current_task()
        if task is not None and not task.get_name().startswith("mixcoord/"):
            await awake.wait()
        return call()

    settings = {
        "streamingNode": {"maxUnflushedBytes": 8 * MIB},
        "quotaAndLimits": {"limitWriting": {"slowdownRate": 2 * MIB}},
        "dataNode": {"flushIntervalS": 1.0},
    }
    async with home.client(settings=settings, blocking=asleep) as client:
        await client.create_collection(PEOPLE, shards=2)
        awake.clear()
        taken, error, took_s = 0, None, []
        loop = asyncio.get_running_loop()
        while error is None:
            began_s = loop.time()
            error = await error_or_none(client, taken)
            took_s.append(loop.time() - began_s)
            taken += 0 if error else ROWS
        assert error.limit == MAX_UNFLUSHED
        assert error.fields["mark"] == 4 * MIB, "each of two shards has half"
        await asyncio.sleep(LOOK_S)
        for answer in (await client.status()).values():
            [told] = answer["throttled"]
            assert (told["limit"], told["collection"], told["factor"]) == (MAX_UNFLUSHED, "people", 0.0)
        slowed = [each for each in took_s if each > 0.05]
        assert len(slowed) > 3
        assert took_s[0] < 0.01
        assert max(slowed) <= HELD_MAX_S + 0.01
        await client.delete("people", list(range(ROWS)))
        assert isinstance(await error_of(client.insert("people", rows_from(taken))), Overloaded)
        awake.set()
        await insert_again(client, taken, 10)
        assert await client.count("people", consistency="strong") == taken


@on_virtual_time
async def test_a_write_that_was_taken_is_not_refused_when_it_comes_again(home) -> None:
    async with home.client(settings={"streamingNode": {"maxUnflushedBytes": 1}}) as client:
        people = await client.create_collection(PEOPLE, shards=1)
        write = {"collection": "people", "id": people.id, "schema_version": people.schema.version, "producer": "p"}
        body = bytes(encode_rows(to_batch(rows_from(0), PEOPLE, op="insert")))
        first = await client._rpc.call("proxy", "write", {**write, "pseq": 1}, body)
        assert isinstance(await error_of(client.insert("people", rows_from(ROWS))), Overloaded)
        assert isinstance(await error_of(client._rpc.call("proxy", "write", {**write, "pseq": 2}, body)), Overloaded)
        again = await client._rpc.call("proxy", "write", {**write, "pseq": 1}, body)
        assert again.values["ts"] == first.values["ts"]


@on_virtual_time
async def test_an_append_rate_holds_acknowledgements_back_and_refuses_who_does_not_wait(home) -> None:
    rate = {"enabled": True, "slowdownThreshold": "1m"}
    async with home.people_client(settings={"streaming": {"walRateLimit": {"appendRate": rate}}}) as client:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for number in range(20):
            await client.insert("people", rows_from(number * ROWS))
        assert loop.time() - began_s > 20 * ROWS * 1000 / MIB * 0.9
        writes = [client.insert("people", rows_from(number * ROWS)) for number in range(20, 90)]
        results = await asyncio.gather(*writes, return_exceptions=True)
        refused = [each for each in results if isinstance(each, Overloaded)]
        assert {error.limit for error in refused} == {APPEND_RATE}
        assert 40 < len(refused) < 70
        await client.delete("people", [1])
        assert await client.count("people", consistency="strong") == (90 - len(refused)) * ROWS - 1
