"""What does not grow with the number of collections."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from dataclasses import replace

import pytest
from deltalake import DeltaTable

from tidewal.actors import collection_reader
from tidewal.actors.collection_reader import CollectionReaderRole
from tidewal.actors.datanode import DataNode
from tidewal.actors.datanode.log_table import LogTable
from tidewal.runtime.streams.tt_stream import TtMsgStream
from tidewal.runtime.testing.memory import MemoryWal

MEMORY_ONLY = pytest.mark.asyncio(loop_factories=["memory"])
COLLECTIONS = 30


async def create(home, client, number: int) -> None:
    await client.create_collection(replace(home.PEOPLE, name=f"c{number}"))


@MEMORY_ONLY
async def test_one_more_collection_is_not_a_look_at_all_of_them(home, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at, serves, start = Counter[str](), DataNode.serves, CollectionReaderRole._start_pipelines

    def counted(role: DataNode, collection) -> bool:
        looked_at[collection.name] += 1
        return serves(role, collection)

    async with home.client() as client:
        for number in range(COLLECTIONS):
            await create(home, client, number)
        await home.elapse(2)
        monkeypatch.setattr(DataNode, "serves", counted)
        monkeypatch.setattr(CollectionReaderRole, "_start_pipelines", lambda role: looked_at.update((role.role,)))
        await home.elapse(30)  # while the limits of timestamps are raised
        assert not looked_at
        monkeypatch.setattr(CollectionReaderRole, "_start_pipelines", start)
        await create(home, client, COLLECTIONS)
        await home.elapse(2)
        assert set(looked_at) == {f"c{COLLECTIONS}"}


@MEMORY_ONLY
async def test_a_start_looks_for_no_collection_in_the_log(home) -> None:
    """The catalog says where those begin that have nothing in their table, and the tables say it of the others."""
    searched = Counter[str]()

    class Counting(MemoryWal):
        async def id_at(self, channel, timestamp):
            searched[channel] += 1
            return await super().id_at(channel, timestamp)

        async def describe(self, channel):
            searched[channel] += 1
            return await super().describe(channel)

    async with home.client() as client:
        for number in range(COLLECTIONS):
            await create(home, client, number)
        await client.insert("c0", home.people(*range(10)))
        await client.flush("c0")
        await client.insert("c1", home.people(1))
        described = await client.describe_collection("c1")
    home.memory = Counting
    async with home.client() as client:
        assert await client.describe_collection("c1") == described
        assert described.beginning is not None
        assert described.beginning.time > described.created_ts
        counts = [await client.count(f"c{number}", consistency="strong") for number in range(COLLECTIONS)]
        assert counts == [10, 1] + [0] * (COLLECTIONS - 2)
        pchannels = {channel for channel in searched if "dml" in channel}
        assert sum(searched[channel] for channel in pchannels) <= 3 * len(pchannels)  # by who acquires them


@MEMORY_ONLY
async def test_what_is_counted_by_channel_begins_once_for_each(home, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = Counter[str]()
    begin = collection_reader.dead_letters_from_zero

    def counted(metrics, channels) -> None:
        begun.update(channels)
        begin(metrics, channels)

    monkeypatch.setattr(collection_reader, "dead_letters_from_zero", counted)
    async with home.node() as node, node.client() as client:
        for number in range(COLLECTIONS):
            await create(home, client, number)
        await home.elapse(2)
        series = node.node.metrics.series("wal_dead_letter_message_total")
    assert set(begun.values()) == {2}  # by the DataNode and the QueryNode
    assert begun.keys() <= {channel for channel, _ in series}


@MEMORY_ONLY
async def test_idle_collections_get_no_packs_and_are_as_fresh_as_their_channels(
    home, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs, make = Counter[str](), TtMsgStream._pack

    def counted(stream: TtMsgStream, time: int):
        packs[stream.group] += 1
        return make(stream, time)

    async with home.client() as client:
        for number in range(COLLECTIONS):
            await create(home, client, number)
        await client.insert("c0", home.people(1))
        await client.flush("c0")
        await home.elapse(30)
        monkeypatch.setattr(TtMsgStream, "_pack", counted)
        await home.elapse(60)
        assert max(packs.values()) <= 3 * COLLECTIONS  # each hears of the time twice a minute
        packs.clear()
        for consistency in ("strong", "bounded", "eventually"):
            for number in range(COLLECTIONS):
                answer = await client.query(f"c{number}", consistency=consistency)
                assert answer.age_ms <= 500
                assert len(answer.table) == (number == 0)
        assert sum(packs.values()) <= 3


@MEMORY_ONLY
async def test_an_idle_collection_has_one_task_a_reader(home) -> None:
    async with home.client() as client:
        tasks: list[int] = []
        for first in (0, COLLECTIONS):  # the first ones are on all pchannels
            for number in range(first, first + COLLECTIONS):
                await create(home, client, number)
            await home.elapse(2)
            tasks.append(len(asyncio.all_tasks()))
        assert tasks[1] - tasks[0] < 3 * COLLECTIONS  # a few others come and go


@MEMORY_ONLY
async def test_tables_are_open_only_while_rows_are_stored(home, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, init = weakref.WeakSet[LogTable](), LogTable.__init__

    def counted(table: LogTable, *arguments) -> None:
        tables.add(table)
        init(table, *arguments)

    def open_tables() -> set[str]:
        gc.collect()
        return {str(table.location) for table in tables}

    monkeypatch.setattr(LogTable, "__init__", counted)
    async with home.client() as client:
        for number in range(COLLECTIONS):
            await create(home, client, number)
        await home.elapse(2)
        assert not open_tables()
        await client.insert("c0", home.people(*range(3)))
        await client.flush("c0")
        await home.elapse(1)
        assert open_tables() == {str(home.tables / "c0" / "log")}
        await home.elapse(120)
        assert not open_tables()
        await client.insert("c0", home.people(3))
        await client.flush("c0")
        assert DeltaTable(home.tables / "c0" / "log").to_pyarrow_table().num_rows == 4


@MEMORY_ONLY
async def test_rows_of_a_collection_that_was_idle_are_stored_in_time(home) -> None:
    async with home.client() as client:
        await create(home, client, 0)
        await home.elapse(60)
        await client.insert("c0", home.people(*range(3)))
        await home.elapse(10.5)
        assert DeltaTable(home.tables / "c0" / "log").to_pyarrow_table().num_rows == 3
        await home.elapse(301)
        assert DeltaTable(home.tables / "c0" / "current").to_pyarrow_table().num_rows == 3
