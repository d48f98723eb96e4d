"""`Lookup`: rows of a node's collection as of the log time of an input's entries."""

from __future__ import annotations

import asyncio
import tracemalloc
from types import SimpleNamespace

import pytest

import tidewal
from tidewal.runtime.dataflow import lookup as module
from tidewal.runtime.dataflow.lookup import Lookup
from tidewal.runtime.errors import (
    ChannelNotFound,
    CollectionNotFound,
    InvalidRequest,
    MemoryLimitExceeded,
    PositionLost,
    WatermarkStalled,
)
from tidewal.runtime.log.record import RecordType
from tidewal.runtime.log.wal import Delivered, Entry

SCHEMA = tidewal.CollectionSchema(
    "cities", (tidewal.Field("id", "int64"), tidewal.Field("name", "varchar"), tidewal.Field("size", "int64")), "id"
)
WITHIN_S = 60

pytestmark = pytest.mark.slow


@pytest.fixture
async def node(tmp_path):
    async with tidewal.standalone(str(tmp_path / "data")) as node:
        yield node


@pytest.fixture
async def client(node):
    async with node.client() as client:
        yield client


@pytest.fixture
def orders(node):
    return Orders(node.node)


class Orders:
    """An input whose entries name a city; they are stamped by the node's clock."""

    def __init__(self, node) -> None:
        self.wal, self._clock = node.wal, node.clock

    async def open(self) -> None:
        await self.wal.create_channel("orders", tidewal.ChannelPolicy())

    async def append(self, city: int) -> int:
        time = self._clock.now()
        await self.wal.append("orders", str(city).encode(), time)
        return time


async def looked_up(wal, lookup, count, group="g"):
    """The name that each order finds, by a group that reads them all."""
    found: list[str | None] = []
    stop = asyncio.Event()

    async def handle(delivered, state):
        await lookup.follow(delivered)
        for entry in delivered.entries:
            city = lookup.get(int(bytes(entry.payload)), entry.timestamp)
            found.append(None if city is None else city["name"])
        if len(found) == count:
            stop.set()
        return []

    member = await wal.join(group, ["orders"])
    async with asyncio.timeout(WITHIN_S):
        await tidewal.process_keyed(wal, member, handle, f"{group}-names", stop=stop)
    await member.aclose()
    return found


async def write_at_random(client, orders, chance, steps) -> list[str | None]:
    """Change cities and order from them; the name that each order must find."""
    names: dict[int, str] = {}
    expected: list[str | None] = []
    for step in range(steps):
        city = chance.randrange(6)
        match chance.choice(["order", "order", "upsert", "delete"]):
            case "order":
                await orders.append(city)
                expected.append(names.get(city))
            case "upsert":
                names[city] = f"name {step}"
                await client.upsert("cities", [{"id": city, "name": names[city], "size": step}])
            case _:
                names.pop(city, None)
                await client.delete("cities", [city])
    return expected


async def test_each_entry_sees_the_collection_as_of_its_log_time_however_late_it_is_read(node, client, orders, rng):
    await client.create_collection(SCHEMA, shards=2)
    await orders.open()
    expected = await write_at_random(client, orders, rng, 120)
    for group in ("g", "h"):
        async with Lookup(node.node.wal, "cities") as lookup:
            assert await looked_up(node.node.wal, lookup, len(expected), group) == expected
            assert lookup.rebuilds == 0


async def test_it_waits_for_the_collection_to_reach_the_entry_and_follows_it_live(node, client, orders, rng):
    await client.create_collection(SCHEMA, shards=2)
    await orders.open()
    async with Lookup(node.node.wal, "cities") as lookup:
        reading = None
        expected: list[str | None] = []
        for city in range(10):
            await client.insert("cities", [{"id": city, "name": f"city {city}", "size": 0}])
            await orders.append(city)
            expected.append(f"city {city}")
            reading = reading or asyncio.create_task(looked_up(node.node.wal, lookup, 10))
        assert await reading == expected


async def test_older_versions_go_when_memory_is_short_and_are_read_again_when_they_are_asked_for(node, client, orders):
    await client.create_collection(SCHEMA, shards=2)
    times = []
    for number in range(60):
        await client.upsert("cities", [{"id": number % 3, "name": f"name {number}", "size": 0}])
        times.append(node.node.clock.now())
    async with Lookup(node.node.wal, "cities", max_bytes=8_000) as lookup:
        for number in (10, 30, 59, 5, 40):
            async with asyncio.timeout(WITHIN_S):
                await lookup.follow_to(times[number], times[number])
            for city in range(3):
                newest = max(each for each in range(number + 1) if each % 3 == city)
                assert lookup.get(city, times[number])["name"] == f"name {newest}"
            assert lookup.bytes <= 8_000
        assert lookup.rebuilds == 1
        with pytest.raises(InvalidRequest, match="was not followed"):
            lookup.get(1, node.node.clock.now())


async def test_rows_that_do_not_fit_are_told_with_the_limit_and_may_be_asked_for_again(node, client):
    await client.create_collection(SCHEMA)
    await client.insert("cities", [{"id": id, "name": "x" * 100, "size": 0} for id in range(100)])
    now = node.node.clock.now()
    async with Lookup(node.node.wal, "cities", max_bytes=10_000) as lookup:
        for _ in range(2):
            with pytest.raises(MemoryLimitExceeded) as caught:
                await lookup.follow_to(now, now)
            assert caught.value.limit == "lookup.max_bytes"


async def test_what_was_deleted_takes_no_memory(node, client):
    await client.create_collection(SCHEMA)
    async with Lookup(node.node.wal, "cities", max_bytes=20_000) as lookup:
        for first in range(0, 400, 20):
            ids = list(range(first, first + 20))
            await client.insert("cities", [{"id": id, "name": "x" * 10, "size": 0} for id in ids])
            await client.delete("cities", ids)
            now = node.node.clock.now()
            async with asyncio.timeout(WITHIN_S):
                await lookup.follow_to(now, now)
        assert lookup.bytes <= 20_000


async def test_a_key_that_one_batch_changes_twice_is_forgotten_once(node, client):
    await client.create_collection(SCHEMA)
    async with Lookup(node.node.wal, "cities", max_bytes=20_000) as lookup:
        for first in range(0, 400, 20):
            ids = list(range(first, first + 20))
            await client.insert("cities", [{"id": id, "name": "x" * 10, "size": 0} for id in ids])
            await client.delete("cities", ids + ids)
            now = node.node.clock.now()
            async with asyncio.timeout(WITHIN_S):
                await lookup.follow_to(now, now)
        assert lookup.get(399, now) is None
        assert lookup.bytes <= 20_000


async def test_a_lookup_may_be_there_before_the_first_node(tmp_path):
    async with (
        await tidewal.open_wal(f"rocksmq://{tmp_path}/data/log", own=True) as wal,
        Lookup(wal, "cities") as lookup,
    ):
        with pytest.raises(ChannelNotFound):
            await lookup.follow_to(1, 1)
        async with tidewal.Standalone(wal, tmp_path / "data" / "tables") as node, node.client() as client:
            await client.create_collection(SCHEMA)
            await client.insert("cities", [{"id": 1, "name": "Porto", "size": 7}])
            now = node.node.clock.now()
            async with asyncio.timeout(WITHIN_S):
                await lookup.follow_to(now, now)
            assert lookup.get(1, now)["name"] == "Porto"


async def test_the_estimate_of_memory_is_about_right(node, client):
    await client.create_collection(SCHEMA)
    await client.insert("cities", [{"id": id, "name": f"a city of number {id}", "size": id} for id in range(20_000)])
    now = node.node.clock.now()
    async with Lookup(node.node.wal, "cities") as lookup:
        tracemalloc.start()
        await lookup.follow_to(now, now)
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert 0.6 < taken / lookup.bytes < 1.6


async def test_columns_that_are_not_needed_are_left_out(node, client):
    await client.create_collection(SCHEMA)
    await client.insert("cities", [{"id": 1, "name": "Porto", "size": 7}])
    now = node.node.clock.now()
    async with Lookup(node.node.wal, "cities", columns=["name"]) as lookup:
        await lookup.follow_to(now, now)
        assert lookup.get(1, now) == {"id": 1, "name": "Porto"}
    async with Lookup(node.node.wal, "cities", columns=["mayor"]) as lookup:
        with pytest.raises(InvalidRequest, match="mayor"):
            await lookup.follow_to(now, now)


async def test_a_snapshot_stands_for_what_lies_before_it(node, client):
    await client.create_collection(SCHEMA, shards=2)
    before = node.node.clock.now()
    await client.insert("cities", [{"id": id, "name": f"city {id}", "size": 0} for id in range(10)])
    snapshot = await client.query("cities", consistency="strong")
    await client.upsert("cities", [{"id": 3, "name": "another", "size": 0}])
    await client.delete("cities", [4])
    after = node.node.clock.now()
    async with Lookup(node.node.wal, "cities", snapshot=snapshot) as lookup:
        async with asyncio.timeout(WITHIN_S):
            await lookup.follow_to(snapshot.tsafe, after)
        assert [lookup.get(id, snapshot.tsafe)["name"] for id in (3, 4, 5)] == ["city 3", "city 4", "city 5"]
        assert (lookup.get(3, after)["name"], lookup.get(4, after), lookup.get(5, after)["name"]) == (
            "another",
            None,
            "city 5",
        )
        with pytest.raises(PositionLost):
            await lookup.follow_to(before, after)


async def test_a_beginning_that_retention_has_removed_is_told(node, client, monkeypatch):
    await client.create_collection(SCHEMA)
    await client.insert("cities", [{"id": 1, "name": "Porto", "size": 7}])
    now = node.node.clock.now()
    async with Lookup(node.node.wal, "cities") as lookup:
        kinds = {kind.name: kind for kind in RecordType}
        monkeypatch.setattr(module, "RecordType", SimpleNamespace(**kinds | {"CREATE_COLLECTION": None}))
        with pytest.raises(PositionLost, match="snapshot="):
            await lookup.follow_to(now, now)


async def test_a_collection_that_is_not_there_or_was_dropped_is_told(node, client):
    async with Lookup(node.node.wal, "cities") as lookup:
        with pytest.raises(CollectionNotFound):
            await lookup.follow_to(1, 1)
        await client.create_collection(SCHEMA)
        await client.insert("cities", [{"id": 1, "name": "Porto", "size": 7}])
        now = node.node.clock.now()
        async with asyncio.timeout(WITHIN_S):
            await lookup.follow_to(now, now)
            await client.drop_collection("cities")
            now = node.node.clock.now()
            with pytest.raises(CollectionNotFound):
                await lookup.follow_to(now, now)


async def test_entries_without_a_timestamp_have_no_time_to_look_up(node):
    async with Lookup(node.node.wal, "cities") as lookup:
        with pytest.raises(InvalidRequest, match="no timestamp"):
            await lookup.follow(Delivered("orders", [Entry(b"1", 0, b"1")], 1))


async def test_a_time_that_the_collection_does_not_reach_stalls_and_may_be_waited_for_again(node, client):
    await client.create_collection(SCHEMA)
    await client.insert("cities", [{"id": 1, "name": "Porto", "size": 7}])
    ahead = node.node.clock.now() + (3_000 << 18)
    async with Lookup(node.node.wal, "cities", stalled_after_s=0.05) as lookup:
        with pytest.raises(WatermarkStalled):
            await lookup.follow_to(ahead, ahead)
        lookup._stream._stalled_after_s = None
        async with asyncio.timeout(WITHIN_S):
            await lookup.follow_to(ahead, ahead)
        assert lookup.get(1, ahead)["name"] == "Porto"
