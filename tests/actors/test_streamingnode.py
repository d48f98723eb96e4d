"""The owner of pchannels, apart from the door: it refuses what the log orders behind the end of a collection, and what
is under way when it ends goes on with the next."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.actors.nodes import role_of
from tidewal.actors.client import Client
from tidewal.actors.local_owner import WritePart
from tidewal.actors.rows import to_batch
from tidewal.actors.streamingnode.vchannels import VChannels
from tidewal.runtime.catalog.catalog import CREATING, DROPPING, READY, Collection
from tidewal.runtime.errors import CollectionNotFound, DeadlineExceeded, InvalidRows, TidewalError
from tidewal.runtime.log.names import pchannel_of
from tidewal.runtime.log.record import Record, RecordType, decode
from tidewal.runtime.logging_context import ROLE
from tidewal.runtime.rows.row_codec import encode_rows
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryWal

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])


class DoorBehind(MemoryWal):
    """A log whose catalog the Proxy reads late."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.reads = asyncio.Event()
        self.reads.set()

    async def read(self, channel, start):
        async with contextlib.aclosing(super().read(channel, start)) as batches:
            async for entries in batches:
                if channel.endswith("collection_schema") and ROLE.get() == "proxy":
                    await self.reads.wait()
                yield entries


def records_of(home, collection: Collection) -> list[RecordType]:
    """What the log has of a collection, channel by channel."""
    return [
        record.type
        for channel in sorted({pchannel_of(vchannel) for vchannel in collection.vchannels})
        for entry in home.log.channels[channel].entries
        if (record := decode(entry.payload)).vchannel in collection.vchannels
    ]


BEGIN, ROWS, END = RecordType.CREATE_COLLECTION, RecordType.ROWS, RecordType.DROP_COLLECTION


@pytest.mark.parametrize("again", [False, True], ids=["dropped", "dropped and made again"])
async def test_a_door_with_an_old_catalog_writes_nothing_behind_the_end_of_a_collection(home, again) -> None:
    home.memory = DoorBehind
    async with home.node() as node, node.client() as client, node.client("old") as old:
        first = await client.create_collection(home.PEOPLE, shards=1)
        await old.insert("people", home.people(1))
        node.node.wal.reads.clear()
        await client.drop_collection("people")
        if again:
            second = await client.create_collection(home.PEOPLE, shards=1)
        assert role_of(node, "proxy").catalog.catalog.collection("people") == first, "the door was not held back"
        direct = await home.error_of(old._rpc.call("proxy", "write", write_to(first), body(home)))
        assert isinstance(direct, CollectionNotFound)
        assert records_of(home, first) == [BEGIN, ROWS, END]
        writing = asyncio.create_task(old.insert("people", home.people(2)))
        if again:
            await home.elapse(1)  # the client has described it again, and now the door is the one that is behind
            node.node.wal.reads.set()
            assert (await writing).rows == 1
            assert records_of(home, second) == [BEGIN, ROWS]
        else:
            assert isinstance(await home.error_of(writing), CollectionNotFound)
            node.node.wal.reads.set()
        assert records_of(home, first) == [BEGIN, ROWS, END]


def reopen(node) -> None:
    """Have all channels acquired again."""
    owner = role_of(node, "streamingnode")
    owner.stalled(owner._owner.channels)


def write_to(collection: Collection) -> dict[str, object]:
    known = {"collection": collection.name, "id": collection.id, "schema_version": collection.schema.version}
    return {**known, "producer": "p", "pseq": 1}


def body(home) -> bytes:
    return bytes(encode_rows(to_batch(home.people(7), home.PEOPLE, op="insert")))


@pytest.mark.parametrize("again", [False, True], ids=["dropped", "dropped and made again"])
async def test_an_owner_that_restarts_knows_of_the_ends_that_are_in_the_log(home, again) -> None:
    home.memory = DoorBehind
    async with home.node() as node, node.client() as client:
        first = await client.create_collection(home.PEOPLE, shards=1)
        await client.create_collection(home.POINTS, shards=1)
        node.node.wal.reads.clear()
        await client.drop_collection("people")
        if again:
            await client.create_collection(home.PEOPLE, shards=1)
        role_of(node, "streamingnode").crash(RuntimeError("a bug"))
        error = await home.error_of(client._rpc.call("proxy", "write", write_to(first), body(home), deadline_s=60))
        assert isinstance(error, CollectionNotFound)
        assert records_of(home, first) == [BEGIN, END]
        await client.insert("points", [{"id": 1, "at": [0.0] * 4}])
        node.node.wal.reads.set()


async def test_a_collection_whose_end_cannot_be_written_takes_no_rows(home, monkeypatch) -> None:
    """The owner closes it before the record is submitted: the next attempt may come late."""
    async with home.node() as node, node.client() as client:
        collection = await client.create_collection(home.PEOPLE, shards=1)
        owner = role_of(node, "streamingnode")

        def refuse(*_: object) -> None:
            raise TidewalError("not now")

        with monkeypatch.context() as patched:
            patched.setattr(owner._owner, "append", refuse)
            await home.error_of(client.drop_collection("people"))
        records = [(pchannel_of(name), Record(ROWS, vchannel=name)) for name in collection.vchannels]
        with pytest.raises(CollectionNotFound):
            owner.append(WritePart("people", collection.id, 1, records, "p", 1, 1))
        await client.create_collection(home.PEOPLE, shards=1)  # which goes on with the drop
        await client.insert("people", home.people(1))
        assert records_of(home, collection) == [BEGIN, END]


async def test_vchannels_are_rebuilt_for_the_channels_that_were_acquired(home) -> None:
    def collection(id: int, state: str = READY) -> Collection:
        return Collection(id, home.PEOPLE, (f"x-dml_0_{id}v0", f"x-dml_1_{id}v1"), 1, state)

    def takes(id: int, shard: int, version: int = 1) -> bool:
        record = Record(ROWS, vchannel=f"x-dml_{shard}_{id}v{shard}")
        try:
            vchannels.check(WritePart("people", id, version, [(f"x-dml_{shard}", record)], "p", 1, 1))
        except CollectionNotFound:
            return False
        return True

    vchannels = VChannels()
    vchannels.rebuild(["x-dml_0"], [collection(1), collection(2, DROPPING), collection(3, CREATING)])
    assert [takes(id, 0) for id in (1, 2, 3, 4)] == [True, False, True, False]
    assert not takes(1, 1), "another channel"
    with pytest.raises(InvalidRows):
        takes(1, 0, version=2)
    vchannels.begin(collection(4), collection(4).vchannels)
    vchannels.rebuild(["x-dml_1"], [collection(1)])
    assert [takes(id, 0) for id in (1, 4)] == [True, True]
    assert [takes(id, 1) for id in (1, 4)] == [True, False]
    vchannels.end(collection(1).vchannels)
    assert not takes(1, 0)
    assert not takes(1, 1)


@pytest.mark.slow
async def test_all_that_is_under_way_when_an_owner_crashes_goes_on_with_the_next(home) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)

        async def use(number: int) -> None:
            await home.elapse(number / 200)
            await client.insert("people", home.people(number))
            assert (await client.get("people", [number], consistency="strong")).table.num_rows == 1
            await client.cut("people")
            if number % 10 == 0:
                await client.flush("people")

        async def crash() -> None:
            for pause_s in (0.05, 0.25):
                await home.elapse(pause_s)
                role_of(node, "streamingnode").crash(RuntimeError("a bug"))

        await asyncio.gather(crash(), *(use(number) for number in range(100)))
        assert await client.count("people", consistency="strong") == 100
        assert {status.name: status.restarts for status in node.system.status()}["streamingnode"] == 2
        stats = await client.stats("people", consistency="strong")
        assert dict(stats.versions)["insert"] == 100


async def test_a_flush_that_waits_when_the_owner_crashes_is_done_by_the_next(home) -> None:
    awake = asyncio.Event()

    async def asleep(call):
        task = asyncio.current_task()
        if task is not None and task.get_name().startswith("datanode"):
            await awake.wait()
        return call()

    async with home.node(blocking=asleep) as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        written = await client.insert("people", home.people(1))
        flushing = asyncio.create_task(client.flush("people"))
        await home.elapse(1)
        role_of(node, "streamingnode").crash(RuntimeError("a bug"))
        await home.elapse(1)
        awake.set()
        assert await flushing > written.ts


async def test_rows_in_flight_for_a_door_that_crashes_count_as_unflushed(home, seed) -> None:
    home.faults = FaultPlan(seed, Rates(delay=1.0, delay_s_max=1.0), channels="dml")
    async with home.node(settings={"dataNode": {"flushIntervalS": 1000.0}}) as node, node.client() as client:
        await client.create_collection(home.PEOPLE, shards=1)
        writing = asyncio.create_task(client.insert("people", home.people(*range(100))))
        owner = role_of(node, "streamingnode")._owner
        await home.until(lambda: owner.inflight_bytes)
        size = owner.inflight_bytes
        role_of(node, "proxy").crash(RuntimeError("a bug"))
        assert (await writing).rows == 100
        assert node.node.metrics.value("streamingnode_unflushed_bytes", collection_name="people") == size


async def test_a_write_that_no_owner_takes_in_time_is_certainly_not_written(home, monkeypatch) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        described = await client.describe_collection("people")
        node.node.local_owner.close_all()
        params = {**write_to(described), "deadline_s": 2.0}
        error = await home.error_of(client._rpc.call("proxy", "write", params, body(home), deadline_s=10))
        assert isinstance(error, DeadlineExceeded)
        assert "certainly not written" in error.message
        reopen(node)
        assert await client.count("people", consistency="strong") == 0


async def test_a_door_whose_channels_are_closed_serves_others_however_many_writes_it_holds(home, monkeypatch) -> None:
    monkeypatch.setattr("tidewal.actors.role.REQUESTS_MAX", 5)
    async with home.node() as node, node.client() as client:
        people = await client.create_collection(home.PEOPLE, shards=1)
        await client.create_collection(home.POINTS, shards=1)
        node.node.local_owner.close(pchannel_of(name) for name in people.vchannels)
        held = []
        for number in range(10):
            held.append(asyncio.create_task(client.insert("people", home.people(number))))
            await home.elapse(0.1)
        await client.insert("points", [{"id": 1, "at": [0.0] * 4}])
        assert not any(task.done() for task in held)
        reopen(node)
        assert all(written.rows == 1 for written in await asyncio.gather(*held))


async def test_a_role_of_another_process_asks_for_the_present_time_and_for_flushes_through_the_log(home) -> None:
    async with home.node() as node, node.client() as client:
        collection = await client.create_collection(home.PEOPLE, shards=1)
        await client.insert("people", home.people(1))
        wal = await home.wal()
        async with Client(wal, prefix="by-dev", name="another") as other:
            channels = [pchannel_of(name) for name in collection.vchannels]
            named = {"to": node.node.incarnation, "channels": channels}
            reply = await other._rpc.call("streamingnode", "sync", named)
            assert reply.values["channels"].keys() == set(channels)
            flushed = await other._rpc.call("streamingnode", "flush", {"id": collection.id, **named}, deadline_s=60)
            assert flushed.values["ts"] > reply.values["time"]
            error = await home.error_of(other._rpc.call("streamingnode", "flush", {"id": 99, **named}))
            assert isinstance(error, CollectionNotFound)
        await wal.close()


@pytest.mark.asyncio(loop_factories=["memory"])
async def test_what_an_owner_would_begin_as_it_ends_is_not_begun_and_no_failure(home) -> None:
    """One of its tasks reads in the catalog then that a channel is to move, or comes."""
    async with home.node() as node:
        owner = role_of(node, "streamingnode")
    begun: list[str] = []

    async def begin() -> None:
        begun.append("released")

    owner._spawn(begin(), "late")
    await home.elapse(1)
    assert not begun
