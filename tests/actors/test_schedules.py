"""The schedules of several nodes that whole nodes are needed for; those of leases, claims and snapshots are in
`tests/cluster/test_schedules.py`, and docs/testing.md lists them all."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.actors.conftest import PEOPLE
from tests.actors.nodes import LEASE_S, NUMBERS, TAKEN_OVER_S, NodeProcess, Nodes, Traffic
from tests.actors.test_nodes import three  # noqa: F401 -- a fixture
from tidewal.actors.client import Client
from tidewal.actors.datanode.log_table import LogTable
from tidewal.actors.local_owner import WritePart
from tidewal.actors.placement_client import PlacementClient
from tidewal.actors.streamingnode.streamingnode import StreamingNode
from tidewal.runtime.catalog.catalog_log import CatalogLog
from tidewal.runtime.cluster.roles import QUERY_NODE, ROLE_NAMES
from tidewal.runtime.errors import CollectionExists, CollectionNotFound, Overloaded, TidewalError
from tidewal.runtime.log.record import RecordType
from tidewal.runtime.ownership import Appended
from tidewal.runtime.rows.schema import CollectionSchema
from tidewal.runtime.testing.simulation.wal import SimulatedWal

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.long]

LONG_S = 120.0


def people(*ids: int) -> list[dict[str, object]]:
    return [{"id": id, "name": "x", "height": 1.0} for id in ids]


@contextlib.asynccontextmanager
async def clients(nodes: Nodes, count: int) -> AsyncIterator[list[Client]]:
    """So many that each node is the door of one of them."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(nodes.client()) for _ in range(count)]


@contextlib.asynccontextmanager
async def beside(work: Callable[[], Coroutine[object, object, None]]) -> AsyncIterator[None]:
    """Run a coroutine function again and again meanwhile."""

    async def again() -> None:
        while True:
            await work()

    task = asyncio.create_task(again())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_11_a_door_whose_catalog_is_old_neither_takes_nor_shows_rows_of_an_earlier_collection(
    three: Nodes,  # noqa: F811
) -> None:
    """By turns a node hears nothing of the catalog for up to 30 s, while a name is dropped and used again: what was
    acknowledged is in the present collection and seen through each door, and nothing of the earlier ones is."""
    names = three.running["a"].node.node.names

    async def deafen() -> None:
        each = three.running[three.rng.choice("abc")]
        each.deaf.add(names.catalog)
        await asyncio.sleep(three.rng.uniform(0, 30))
        three.reconnect(each)
        await asyncio.sleep(three.rng.uniform(0, 3))

    async with clients(three, 9) as doors, beside(deafen):
        for turn in range(12):
            writer, reader, admin = three.rng.sample(doors, 3)
            await admin.create_collection(PEOPLE, shards=2, deadline_s=LONG_S)
            await writer.insert("people", people(*range(turn, turn + 5)), deadline_s=LONG_S)
            found = (await reader.query("people", columns=["id"], consistency="strong", deadline_s=LONG_S)).table
            assert sorted(found["id"].to_pylist()) == list(range(turn, turn + 5))
            await admin.drop_collection("people", deadline_s=LONG_S)
            with pytest.raises(CollectionNotFound):
                await reader.count("people", consistency="strong", deadline_s=LONG_S)
            with pytest.raises(CollectionNotFound):
                await writer.insert("people", people(1), deadline_s=LONG_S)


async def test_12_pipelined_writes_to_a_key_keep_their_order_while_owners_refuse_some_and_channels_move(
    three: Nodes,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    append = StreamingNode.append

    def sometimes_full(self: StreamingNode, part: WritePart) -> asyncio.Future[Appended]:
        if three.rng.random() < 0.1:
            raise Overloaded("no room; retry", limit="room")
        return append(self, part)

    async with clients(three, 6) as doors:
        await doors[0].create_collection(NUMBERS, shards=1)
        [channel] = {name for name in three.owners() if name.endswith("dml_0")}
        monkeypatch.setattr(StreamingNode, "append", sometimes_full)

        async def move() -> None:
            await PlacementClient(doors[0]).move(channel, three.rng.choice("abc"))
            await asyncio.sleep(three.rng.uniform(0, 0.3))

        async def overwrite(client: Client, key: int) -> int:
            """Values that rise in the order of the calls; returns the last that was acknowledged."""
            newest = 0
            for first in range(1, 120, 4):
                values = range(first, first + 4)
                writes = [
                    client.upsert("numbers", [{"id": key, "value": value}], deadline_s=LONG_S) for value in values
                ]
                outcomes = await asyncio.gather(*writes, return_exceptions=True)
                assert all(not isinstance(each, BaseException) or isinstance(each, Overloaded) for each in outcomes)
                acknowledged = [
                    value
                    for value, outcome in zip(values, outcomes, strict=True)
                    if not isinstance(outcome, BaseException)
                ]
                newest = max(acknowledged, default=newest)
            return newest

        async with beside(move):
            newest = await asyncio.gather(*(overwrite(client, key) for key, client in enumerate(doors)))
        monkeypatch.undo()
        rows = (await doors[0].get("numbers", list(range(6)), consistency="strong")).table
        assert dict(zip(rows["id"].to_pylist(), rows["value"].to_pylist(), strict=True)) == dict(enumerate(newest))


async def test_13_a_datanode_that_is_far_behind_loses_nothing_to_others_of_its_channel(three: Nodes) -> None:  # noqa: F811
    """One DataNode of several on a channel reads nothing while the others store and retention takes what it may; then
    it is killed. What it held the log for is stored by the next one."""
    async with three.client() as client:
        names = [f"people_{n}" for n in range(6)]
        for name in names:
            await client.create_collection(CollectionSchema(name, PEOPLE.fields, PEOPLE.primary_key), shards=1)
        channels = sorted(three.owners())
        written = dict.fromkeys(names, 0)

        async def write() -> None:
            for name in names:
                await client.insert(name, people(*range(written[name], written[name] + 10)), deadline_s=LONG_S)
                written[name] += 10

        await write()
        behind = three.running["b"]
        assert len({id for each in three.running.values() for id in each.role("datanode")._pipelines}) == len(names)
        assert behind.role("datanode")._pipelines
        behind.deaf.update(channels)
        for _ in range(5):
            await write()
            await asyncio.sleep(12)  # longer than the interval of flushes
            for channel in channels:
                last = three.log.channels[channel].entries[-1].id
                with contextlib.suppress(TidewalError):  # what holds keep stays
                    await three.running["a"].node.wal.truncate(channel, last)
        await three.kill("b")
        await asyncio.sleep(TAKEN_OVER_S + 1)
        await write()
        for name in names:
            await client.flush(name, deadline_s=LONG_S)
            assert (await client.compact(name, deadline_s=LONG_S))["rows"] == written[name]
            assert await client.count(name, consistency="strong", deadline_s=LONG_S) == written[name]


async def test_14_a_datanode_that_never_hears_that_it_has_stored_doubles_nothing(
    three: Nodes,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its commits succeed and the answer is lost; some of them it stands still behind, for longer than a takeover."""
    flush = LogTable.flush

    def answer_lost(self: LogTable, *args: object, **options: object) -> object:
        result = flush(self, *args, **options)
        chance = three.rng.random()
        if chance < 0.3:
            raise OSError("the answer is lost")
        if chance < 0.4:
            running = [each for each in three.running.values() if not each.process.paused]
            if len(running) == len("abc"):
                each = three.rng.choice(running)
                each.process.pause()
                three.loop.call_later(three.rng.uniform(1, 2) * TAKEN_OVER_S, each.process.resume)
        return result

    async with clients(three, 3) as doors:
        await doors[0].create_collection(PEOPLE, shards=2)
        monkeypatch.setattr(LogTable, "flush", answer_lost)
        for turn in range(40):
            await doors[turn % 3].insert("people", people(*range(10 * turn, 10 * turn + 10)), deadline_s=LONG_S)
            with contextlib.suppress(TidewalError):
                await doors[turn % 3].flush("people", deadline_s=20)
            for name, each in list(three.running.items()):
                if each.ended.is_set():  # it has read that it was given up
                    three.running.pop(name)
                    await three.start(name)
        monkeypatch.undo()
        await asyncio.sleep(2 * TAKEN_OVER_S)
        await doors[0].flush("people", deadline_s=LONG_S)
        stats = await doors[0].stats("people", consistency="strong")
        assert stats.versions["insert"] == stats.rows == 400
        assert (await doors[0].compact("people", deadline_s=LONG_S))["rows"] == 400


async def test_15_a_table_is_loaded_though_retention_is_faster(
    home, tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two QueryNodes need far longer for a table than the log keeps what is stored, and one of them is killed while it
    loads. Neither holds the log, and the other one has each row in the end."""
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    await nodes.start("rest", [role for role in ROLE_NAMES if role != QUERY_NODE])
    log = nodes.running["rest"].node.node.wal

    async def slow(call: Callable[[], object]) -> object:
        result = call()
        if isinstance(result, pa.RecordBatch):
            await asyncio.sleep(0.05 * result.num_rows)
        return result

    async with nodes.client() as client:
        await client.create_collection(PEOPLE, shards=2)
        channels, written = sorted(nodes.owners()), 0

        async def write() -> None:
            """Rows of which some are deleted later; all are stored, and leave the log as soon as holds allow that."""
            nonlocal written
            await client.insert("people", people(*range(written, written + 100)), deadline_s=LONG_S)
            await client.delete("people", [written - 200], deadline_s=LONG_S)
            written += 100
            await client.flush("people", deadline_s=LONG_S)
            for channel in channels:
                with contextlib.suppress(TidewalError):  # what holds keep stays
                    await log.truncate(channel, nodes.log.channels[channel].entries[-1].id)
            await asyncio.sleep(15)

        def holders() -> set[str]:
            return {holder for channel in channels for holder in nodes.log.channels[channel].holds}

        def loaded(name: str) -> list[str]:
            role = nodes.running[name].role("querynode")
            return [vchannel for _, vchannels in role.held() for vchannel in vchannels]

        for _ in range(20):
            await write()
        before = holders()
        monkeypatch.setattr("tests.actors.nodes.in_place", slow)
        for name in "qr":
            await nodes.start(name, (QUERY_NODE,))
        began_s = nodes.now_s()
        await write()
        assert not loaded("q")
        await nodes.kill("r")
        async with asyncio.timeout(3 * LONG_S):
            while not loaded("q"):
                await write()
        assert nodes.now_s() - began_s > 0.05 * 2000 > 15, "it was slower than retention"
        assert await client.count("people", consistency="strong", deadline_s=LONG_S) == written - (written // 100 - 2)
        assert holders() == before
    await nodes.stop()


async def test_17_a_node_that_half_of_the_others_cannot_reach_is_replaced(three: Nodes) -> None:  # noqa: F811
    """It hears and is not heard, is heard and does not hear, neither; and all of its loop stands still."""
    for how in ("unheard", "deaf", "apart", "still"):
        async with three.client() as client:
            with contextlib.suppress(CollectionExists):
                await client.create_collection(PEOPLE, shards=3)
            each = three.running[three.rng.choice("abc")]
            names = each.node.node.names
            if how in ("unheard", "apart"):
                each.cut.update((names.catalog, names.cluster))
            if how in ("deaf", "apart"):
                each.deaf.update((names.catalog, names.cluster))
            if how == "still":
                each.process.pause()
            before = await client.count("people", consistency="strong", deadline_s=LONG_S)
            for number in range(before, before + 20):
                await client.insert("people", people(number), deadline_s=LONG_S)
                await asyncio.sleep(LEASE_S / 10)
            assert await client.count("people", consistency="strong", deadline_s=LONG_S) == before + 20
            each.process.resume()
            three.reconnect(each)
            await asyncio.sleep(TAKEN_OVER_S)
            if each.ended.is_set():
                three.running.pop(each.name)
                await three.start(each.name)


BOUNDARIES = [
    (when, record)
    for when in ("before", "after")
    for record in ("create", "create_collection", "ready", "drop", "drop_collection", "dropped")
]


@pytest.mark.parametrize(("when", "record"), BOUNDARIES)
async def test_19_who_dies_at_a_record_of_a_ddl_is_finished_for(
    three: Nodes,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    record: str,
) -> None:
    """The leader, before or after each record of a DDL in the catalog, and owners, before or after those that they
    write into their channels. The name can be used again afterwards, and nothing of the first collection is back."""
    dying: list[NodeProcess] = []

    async def at(kind: str, own: object, write: Callable[[], Coroutine[object, object, Any]]) -> Any:
        """Write a record of this kind; its process may be killed at it."""
        if kind != record or dying:
            return await write()
        result = await write() if when == "after" else None
        if not dying:  # else another owner has come to its record meanwhile
            running = three.running.values()
            each = next(each for each in running if own in (each.role("mixcoord"), each.role("streamingnode")))
            dying.append(three.running.pop(each.name))
            three.loop.call_soon(each.process.kill)
            await asyncio.Event().wait()
        return result

    append, announce = CatalogLog.append, StreamingNode._append_to_all

    async def appending(self: CatalogLog, event: dict[str, object]) -> None:
        coordinators = [each.role("mixcoord") for each in three.running.values()]
        own = next((each for each in coordinators if each.catalog is self), None)
        await at(str(event["kind"]), own, partial(append, self, event))

    async def announcing(self: StreamingNode, vchannels: Sequence[str], type: RecordType) -> Any:
        return await at(type.name.lower(), self, partial(announce, self, vchannels, type))

    async with clients(three, 2) as (admin, other):
        monkeypatch.setattr(CatalogLog, "append", appending)
        monkeypatch.setattr(StreamingNode, "_append_to_all", announcing)
        await admin.create_collection(PEOPLE, shards=3, deadline_s=LONG_S)
        await admin.insert("people", people(*range(20)), deadline_s=LONG_S)
        assert await other.count("people", consistency="strong", deadline_s=LONG_S) == 20
        await admin.drop_collection("people", deadline_s=LONG_S)
        assert len(dying) == 1
        await other.create_collection(PEOPLE, shards=3, deadline_s=LONG_S)
        await other.insert("people", people(*range(100, 107)), deadline_s=LONG_S)
        found = (await admin.query("people", columns=["id"], consistency="strong", deadline_s=LONG_S)).table
        assert sorted(found["id"].to_pylist()) == list(range(100, 107))
        await other.flush("people", deadline_s=LONG_S)
        assert (await other.compact("people", deadline_s=LONG_S))["rows"] == 7
        await dying[0].process.buried()


async def test_20_nodes_are_added_drained_killed_all_and_come_back(three: Nodes) -> None:  # noqa: F811
    traffic = Traffic(three)
    async with traffic.running(), three.client() as client:
        cluster = PlacementClient(client)
        await three.start("d")
        await cluster.drain("a")
        await asyncio.sleep(3)
        await three.end("a")
        await cluster.uncordon("a")
        for name in list(three.running):
            await three.kill(name)
        await asyncio.sleep(three.rng.uniform(0, 2 * LEASE_S))
        for name in "abcd":
            await three.start(name, wait=False)
        asked = traffic.questions
        await asyncio.sleep(TAKEN_OVER_S + 5)
        assert traffic.questions > asked
    await traffic.check()
