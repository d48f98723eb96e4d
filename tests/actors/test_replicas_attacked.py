"""Questions that are under way while rows are loaded, handed over, released and dropped."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.actors.conftest import PEOPLE, error_of, people
from tests.actors.nodes import Nodes
from tests.actors.test_moves import until
from tests.actors.test_replicas import held, three
from tidewal.actors.client import Client
from tidewal.actors.collection_reader import CollectionReaderRole, rows_of
from tidewal.actors.placement_client import PlacementClient
from tidewal.actors.querynode import pipeline
from tidewal.actors.querynode.pipeline import RowPipeline
from tidewal.actors.querynode.querynode import FAN_OUT_S
from tidewal.runtime.catalog.catalog import Collection
from tidewal.runtime.clock import add_ms
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import CollectionNotFound, CollectionNotLoaded, DeadlineExceeded, MemoryLimitExceeded
from tidewal.runtime.log.record import Record
from tidewal.runtime.streams.messages import Position
from tidewal.runtime.testing.simulation.wal import SimulatedWal

__all__ = ["three"]

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]

CLIENTS = 6  # so that each QueryNode is the first of some


@contextlib.asynccontextmanager
async def clients_of(nodes: Nodes) -> AsyncIterator[list[Client]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(nodes.client()) for _ in range(CLIENTS)]


@contextlib.contextmanager
def owner_paused(nodes: Nodes) -> Iterator[None]:
    """While it is, strong questions wait."""
    nodes.running["rest"].process.pause()
    try:
        yield
    finally:
        nodes.running["rest"].process.resume()


async def test_a_question_has_all_rows_where_vchannels_leave_while_it_waits(three: Nodes) -> None:
    async with clients_of(three) as clients:
        await clients[0].create_collection(PEOPLE, shards=12, replicas=3)
        await clients[0].insert("people", people(*range(100)))
        await clients[0].load_collection("people")
        assert all(len(held(three, node)) == 12 for node in "abc")
        await clients[0].load_collection("people", replicas=1)
        with owner_paused(three):
            asked = [asyncio.ensure_future(each.count("people", consistency="strong")) for each in clients]
            await until(lambda: sum(len(held(three, node)) for node in "abc") == 12)
        assert await asyncio.gather(*asked) == [100] * CLIENTS


async def test_a_question_ends_where_the_collection_is_released_or_dropped_meanwhile(three: Nodes) -> None:
    async with clients_of(three) as clients:
        client = clients[0]
        await client.create_collection(PEOPLE, shards=4, replicas=1)
        to_come = add_ms((await client.insert("people", people(1))).ts, 8_000)
        for end, error in (
            (client.release_collection, CollectionNotLoaded),
            (client.drop_collection, CollectionNotFound),
        ):
            await client.load_collection("people")
            asked = [asyncio.ensure_future(error_of(each.count("people", at=to_come))) for each in clients]
            await asyncio.sleep(0.3)
            async with asyncio.timeout(2):
                await end("people")
                assert {type(each) for each in await asyncio.gather(*asked)} == {error}


async def test_a_question_that_no_node_can_answer_in_time_ends_with_an_error_and_no_node(
    three: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table takes longer to load than a question may."""
    load, may_load = RowPipeline._load, asyncio.Event()

    async def slowly(self: RowPipeline) -> tuple[int, list[Position]]:
        await may_load.wait()
        return await load(self)

    async with three.client() as client:
        monkeypatch.setattr(RowPipeline, "_load", slowly)
        await client.create_collection(PEOPLE, shards=4)
        await client.insert("people", people(*range(100)))
        roles = [three.running[node].role("querynode") for node in "abc"]
        assert isinstance(await error_of(client.count("people", deadline_s=2 * FAN_OUT_S)), DeadlineExceeded)
        may_load.set()
        assert await client.count("people", consistency="strong") == 100
        assert [three.running[node].role("querynode") for node in "abc"] == roles, "none was started again"


async def test_a_vchannel_that_is_to_come_back_while_others_are_asked_for_it_is_kept(
    home, tmp_path: Path, rng: random.Random
) -> None:
    """A node is drained, and asks who has its vchannels, which takes a second where one is silent; before it has heard
    from all it is to have them again, and those that got them let go of them."""
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    await nodes.start("rest", ("mixcoord", "streamingnode", "proxy", "datanode"))
    for name in "abc":
        await nodes.start(name, ("streamingnode", "querynode"))
    async with nodes.client() as client:
        await client.create_collection(PEOPLE, shards=12, replicas=1)
        await client.load_collection("people")
        at_a = held(nodes, "a")
        await nodes.kill("c")
        for wish, looks in (("drained", 30), ("", 80)):
            await PlacementClient(client)._cordon("a", wish)
            for _ in range(looks):
                assert at_a <= held(nodes, "a") | held(nodes, "b")
                await asyncio.sleep(0.02)
        await until(lambda: held(nodes, "a") == at_a and at_a.isdisjoint(held(nodes, "b")))
    await nodes.stop()


async def test_what_was_handed_over_is_not_decoded_any_more(three: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, str]] = []

    def counted(role: CollectionReaderRole, collection: Collection, record: Record) -> pa.RecordBatch | None:
        read.append((role.node.name, record.vchannel))
        return rows_of(role, collection, record)

    monkeypatch.setattr(pipeline, "rows_of", counted)
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=12, replicas=3)
        await client.load_collection("people", replicas=1)
        await until(lambda: sum(len(held(three, node)) for node in "abc") == 12)
        await client.insert("people", people(*range(100)))
        assert await client.count("people", consistency="strong") == 100
        assert {node: {v for name, v in read if name == node} for node in "abc"} == {n: held(three, n) for n in "abc"}
        for node in "abc":
            [part] = three.running[node].role("querynode")._rows()
            assert part._stream.vchannels == held(three, node)


async def test_past_rows_of_what_is_left_of_a_part_go_with_it(three: Nodes) -> None:
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=12, replicas=3)
        at = (await client.insert("people", people(*range(100)))).ts
        await client.load_collection("people")
        await client.load_collection("people", replicas=1)
        await until(lambda: sum(len(held(three, node)) for node in "abc") == 12)
        await asyncio.sleep(11)  # the time is in no memory any more
        assert await client.count("people", at=at) == 100
        memories = [three.running[node].role("querynode")._memory for node in "abc"]
        assert all(memory.used for memory in memories)
        await client.drop_collection("people")
        assert [memory.used for memory in memories] == [0, 0, 0]


@pytest.mark.parametrize("replicas", [1, 2])
async def test_what_memory_lacks_for_at_one_node_is_asked_of_others_or_named(
    home, tmp_path: Path, rng: random.Random, replicas: int
) -> None:
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    nodes.settings["a"] = Settings.model_validate({"queryNode": {"memoryLimitBytes": 10_000}})
    await nodes.start("rest", ("mixcoord", "streamingnode", "proxy", "datanode"))
    for name in "abc":
        await nodes.start(name, ("querynode",))
    async with clients_of(nodes) as clients:
        await clients[0].create_collection(PEOPLE, shards=12, replicas=replicas)
        await clients[0].insert("people", people(*range(1000)))
        async with asyncio.timeout(2):
            for each in clients:
                if replicas == 2:
                    assert await each.count("people", consistency="strong") == 1000
                else:
                    error = await error_of(each.count("people", consistency="strong"))
                    assert isinstance(error, MemoryLimitExceeded)
    await nodes.stop()


async def test_a_vchannel_that_is_to_have_more_replicas_while_others_are_asked_for_it_is_kept(three: Nodes) -> None:
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=12, replicas=3)
        await client.load_collection("people")
        await until(lambda: all(len(held(three, node)) == 12 for node in "abc"))
        three.running["c"].process.pause()  # so that the others ask for a second
        for replicas, looks in ((1, 6), (3, 15)):
            await client._rpc.call("mixcoord", "load_collection", {"collection": "people", "replicas": replicas})
            for _ in range(looks):
                assert [len(held(three, node)) for node in "abc"] == [12, 12, 12]
                await asyncio.sleep(0.1)
        three.running["c"].process.resume()


async def test_what_a_node_missed_for_longer_than_the_log_keeps_it_comes_from_the_table(
    three: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    """A QueryNode that hears nothing of a channel for a while goes on with the rows that it has."""
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=2, replicas=3)
        before = (await client.insert("people", people(*range(100)))).ts
        await client.load_collection("people")
        names = sorted(three.owners())
        parts = {node: three.running[node].role("querynode")._rows()[0] for node in "ab"}
        for node in "ab":
            three.running[node].deaf.update(names)
        await client.delete("people", list(range(50)))
        await client.upsert("people", people(*range(90, 120)))
        await client.flush("people")
        await asyncio.sleep(1)
        for name in names:
            await three.running["rest"].node.node.wal.truncate(name, three.log.channels[name].entries[-1].id)
        await client.insert("people", people(200))
        for node in "ab":
            three.reconnect(three.running[node])
        await three.kill("c")
        assert await client.count("people", consistency="strong", deadline_s=60) == 71
        assert await client.count("people", at=before, deadline_s=60) == 100
        for node, part in parts.items():
            assert three.running[node].role("querynode")._rows() == [part], "it began anew"
        stats = await client.stats("people", consistency="strong")
        assert (dict(stats.versions), stats.rows) == ({"insert": 101, "upsert": 30, "delete": 50}, 71)
    assert "goes on from its table" in caplog.text
