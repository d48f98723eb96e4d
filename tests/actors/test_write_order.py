"""A client's writes are in each channel in the order of the calls, whatever the log refuses and whichever doors die: a
write that would come behind a later one is not written any more, and its client is told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.actors.nodes import NUMBERS, Nodes
from tidewal.actors.client import Client
from tidewal.runtime.cluster.roles import PROXY, ROLE_NAMES
from tidewal.runtime.errors import OutcomeUnknown, Unavailable
from tidewal.runtime.log.record import RecordType, decode
from tidewal.runtime.log.wal import Append, OnAppended
from tidewal.runtime.testing.histories.history_checks import rising
from tidewal.runtime.testing.simulation.wal import SimulatedWal

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]

OTHERS = replace(NUMBERS, name="others")
KEYS = range(50)  # some for each of three shards


@pytest.fixture
async def nodes(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    """Two nodes that own channels, and two doors."""
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    for name in "ab":
        await nodes.start(name, [role for role in ROLE_NAMES if role != PROXY])
    for name in ("door-1", "door-2"):
        await nodes.start(name, [PROXY])
    yield nodes
    await nodes.stop()


def refuse(nodes: Nodes, name: str, number: int) -> None:
    """Let the log refuse for certain, once, what the owner `name` appends of the writes with this number."""
    wal = nodes.running[name].node.wal
    submit, refused = wal.submit, list[Sequence[Append]]()

    def refusing(entries: Sequence[Append], done: OnAppended) -> None:
        records = [decode(entry.payload) for entry in entries]
        if not refused and any(each.type is RecordType.ROWS and each.pseq == number for each in records):
            refused.append(entries)
            done(Unavailable("the brokers refuse this append"))
        else:
            submit(entries, done)

    wal.submit = refusing  # type: ignore[method-assign]


def door_of(nodes: Nodes, client: Client) -> str:
    """The node that takes what this client writes."""
    members = nodes.running["a"].node.node.cluster
    return next(name for name in nodes.running if members.first(PROXY, client._rpc.name).startswith(f"{name}-"))


async def write(client: Client, value: int, keys: Sequence[int] = KEYS, collection: str = "numbers") -> Any:
    return await client.upsert(collection, [{"id": key, "value": value} for key in keys])


async def check(nodes: Nodes, client: Client, value: int) -> None:
    """The writes lie in the order of their numbers, and the last one is what is there."""
    for channel, stored in nodes.log.channels.items():
        records = [decode(entry.payload) for entry in stored.entries]
        rows = [(each.producer, each.pseq) for each in records if each.type is RecordType.ROWS]
        assert rising(channel, rows) == []
    found = (await client.get("numbers", list(KEYS), consistency="strong")).table
    assert set(found["value"].to_pylist()) == {value}


async def test_a_part_that_the_log_refuses_is_repeated_behind_no_later_write(nodes: Nodes) -> None:
    """Another owner has its part, so the door repeats what was refused."""
    async with nodes.client() as client:
        await client.create_collection(NUMBERS, shards=3)
        await write(client, 0)
        refuse(nodes, "b", 2)
        first, second = await asyncio.gather(write(client, 1), write(client, 2), return_exceptions=True)
        assert isinstance(first, OutcomeUnknown)
        assert first.outcome_unknown
        assert not isinstance(second, BaseException)
        await check(nodes, client, 2)


async def test_a_part_that_the_log_refuses_is_repeated_where_nothing_came_behind_it(nodes: Nodes) -> None:
    async with nodes.client() as client:
        await client.create_collection(NUMBERS, shards=3)
        await write(client, 0)
        refuse(nodes, "b", 2)
        await write(client, 1)
        await check(nodes, client, 1)


async def test_a_write_whose_refusal_was_lost_with_its_door_is_repeated_behind_no_later_one(nodes: Nodes) -> None:
    async with nodes.client() as client:
        await client.create_collection(NUMBERS, shards=1)
        await write(client, 0)
        owner, door = nodes.owners()["by-dev-rootcoord-dml_0"], door_of(nodes, client)
        refuse(nodes, owner, 2)
        replies = nodes.running[door].node.node.names.replies(client._rpc.name)
        nodes.running[door].cut.add(replies)
        writes = asyncio.gather(write(client, 1), write(client, 2), return_exceptions=True)
        await asyncio.sleep(0.2)
        await nodes.kill(door)
        first, second = await writes
        assert isinstance(first, OutcomeUnknown)
        assert not isinstance(second, BaseException)
        await check(nodes, client, 2)


async def test_a_write_for_which_a_door_reads_the_catalog_is_passed_by_none_of_its_client(nodes: Nodes) -> None:
    async with nodes.client() as client:
        await client.create_collection(NUMBERS, shards=1)
        await write(client, 0)
        door = nodes.running[door_of(nodes, client)]
        door.deaf.add(door.node.node.names.catalog)
        created = asyncio.ensure_future(client.create_collection(OTHERS, shards=16))
        await asyncio.sleep(1)
        assert created.done(), "the door need not have read of it"
        writes = [write(client, 1, collection="others"), write(client, 1)]
        both = asyncio.gather(*writes)
        await asyncio.sleep(1)
        door.deaf.clear()
        await both
        await check(nodes, client, 1)
