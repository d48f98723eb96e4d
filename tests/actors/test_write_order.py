"""A client's writes are in each channel in the order of the calls, whatever the log refuses and whichever doors die: a
write that would come behind a later one is not written any more, and its client is told."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.actors.nodes import NUMBERS, Nodes
from tests.actors.test_replicas import pchannels_by_key
from tidewal.actors.client import Client
from tidewal.runtime.cluster.roles import PROXY, ROLE_NAMES
from tidewal.runtime.errors import OutcomeUnknown, TidewalError, Unavailable
from tidewal.runtime.log.record import RecordType, decode
from tidewal.runtime.log.wal import Append, OnAppended
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.histories.client_history import outcome_of
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


def written(nodes: Nodes) -> Counter[tuple[str, str, int]]:
    """How often each channel has each write, by producer and number: in the order of the numbers."""
    found = Counter[tuple[str, str, int]]()
    for channel, stored in nodes.log.channels.items():
        term, rows = 0, list[tuple[str, int]]()
        for record in (decode(entry.payload) for entry in stored.entries):
            term = max(term, record.term if record.type is RecordType.FENCE else 0)
            if record.type is RecordType.ROWS and record.term == term:  # others no reader takes
                rows.append((record.producer, record.pseq))
        assert rising(channel, rows) == []
        found.update((channel, *each) for each in rows)
    return found


async def check(nodes: Nodes, client: Client, value: int) -> None:
    """The writes lie in the order of their numbers, and the last one is what is there."""
    assert written(nodes)
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


class Calls:
    """Writes without end, several at once, of one client; the channels and the outcome of each, by its number."""

    def __init__(self, nodes: Nodes, client: Client, channels: dict[int, str]) -> None:
        self._rng, self._client, self._channels = nodes.rng, client, channels
        self.outcomes: dict[int, tuple[set[str], str]] = {}
        self.stopping = False

    async def run(self) -> None:
        await self._client.describe_collection("numbers")
        number = 0
        async with asyncio.TaskGroup() as tasks:
            while not self.stopping:
                for _ in range(self._rng.randrange(1, 5)):
                    number += 1
                    tasks.create_task(self._write(number, self._rng.sample(KEYS, self._rng.choice([1, 2, 8, 30]))))
                await asyncio.sleep(self._rng.uniform(0, 0.2))

    async def _write(self, number: int, keys: Sequence[int]) -> None:
        outcome = "ok"
        try:
            if self._rng.random() < 0.3:
                await self._client.delete("numbers", keys, deadline_s=60)
            else:
                await self._client.upsert("numbers", [{"id": n, "value": number} for n in keys], deadline_s=60)
        except TidewalError as error:
            outcome = outcome_of(error)
        self.outcomes[number] = {self._channels[key] for key in keys}, outcome

    def check(self, found: Counter[tuple[str, str, int]]) -> None:
        for number, (channels, outcome) in self.outcomes.items():
            times = {found[channel, self._client._rpc.name, number] for channel in channels}
            assert times <= {"ok": {1}, "refused": {0}}.get(outcome, {0, 1}), (number, outcome)


@pytest.mark.long  # whole nodes under load for some ten seconds of virtual time
async def test_over_refusals_and_kills_order_is_kept_and_each_outcome_is_true(nodes: Nodes) -> None:
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(nodes.client()) for _ in range(3)]
        channels = pchannels_by_key(KEYS, (await clients[0].create_collection(NUMBERS, shards=6)).vchannels)
        wals = [nodes.running[name].node.wal for name in "ab"]
        for seed, wal in enumerate(wals):
            wal.faults = FaultPlan(seed, Rates(fail=0.1, delay=0.1), channels="rootcoord-dml")
        calls = [Calls(nodes, client, channels) for client in clients]
        async with asyncio.TaskGroup() as tasks:
            for each in calls:
                tasks.create_task(each.run())
            for name in ("door-1", "door-2", "a", "door-1"):
                await asyncio.sleep(nodes.rng.uniform(0.5, 2))
                await nodes.kill(name)
                await asyncio.sleep(nodes.rng.uniform(0, 2))
                await nodes.start(name, [PROXY] if name.startswith("door") else [r for r in ROLE_NAMES if r != PROXY])
            for wal in wals:
                wal.faults = None
            for each in calls:
                each.stopping = True
        found = written(nodes)
        for each in calls:
            each.check(found)
        outcomes = Counter(outcome for each in calls for _, outcome in each.outcomes.values())
        assert outcomes["ok"] > 100
        assert outcomes["unknown"] > 5
