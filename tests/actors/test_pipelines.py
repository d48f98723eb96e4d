"""What DataNode and QueryNode do with packs: unreadable rows become dead letters, and no query sees half a pack."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace

import pytest
from deltalake import DeltaTable

from tidewal.actors import collection_reader
from tidewal.actors.datanode.log_reader import read_current_at
from tidewal.actors.datanode.log_table import LogTable
from tidewal.actors.pchannels import pchannels_of
from tidewal.actors.proxy import sharded_rows
from tidewal.actors.querynode import pipeline as querynode_pipeline
from tidewal.actors.querynode.pipeline import RowPipeline
from tidewal.actors.querynode.row_store import RowStore
from tidewal.runtime.errors import CorruptLog, MemoryLimitExceeded, PositionLost, Unavailable
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.record import decode
from tidewal.runtime.streams import dispatcher
from tidewal.runtime.tables.table_store import CURRENT, LOG
from tidewal.runtime.testing.memory import MemoryWal

MEMORY_ONLY = pytest.mark.asyncio(loop_factories=["memory"])


@MEMORY_ONLY
async def test_rows_that_cannot_be_read_are_dead_letters_and_the_rest_goes_on(home, monkeypatch) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE, shards=1)
        await client.insert("people", home.people(1))
        record = sharded_rows._record
        with monkeypatch.context() as broken:
            broken.setattr(sharded_rows, "_record", lambda *of: replace(record(*of), body=b"no record batch"))
            await client.insert("people", home.people(9))
        await client.insert("people", home.people(2))
        assert await client.count("people", consistency="strong") == 2
        await client.flush("people")
        stored = DeltaTable(node.node.tables.table("people", LOG).uri).to_pyarrow_table()
        assert sorted(stored.column("id").to_pylist()) == [1, 2]
        letters = [decode(entry.payload) for entry in home.log.channels[Names().dead_letters].entries]
        assert {bytes(decode(letter.body).body) for letter in letters} == {b"no record batch"}


@pytest.mark.slow
async def test_a_reader_never_sees_part_of_a_batch_though_the_pack_is_applied_in_slices(home, monkeypatch) -> None:
    monkeypatch.setattr(querynode_pipeline, "ROWS_PER_SLICE", 8)
    batch_rows, batches, done = 64, 40, False
    async with home.people_client() as client:

        async def write() -> None:
            nonlocal done
            for batch in range(batches):
                first = batch * batch_rows
                await client.insert("people", home.people(*range(first, first + batch_rows)))
            done = True

        writer = asyncio.create_task(write())
        seen: list[int] = []
        while not done:
            seen.append(await client.count("people", consistency="eventually"))
        await writer
        assert all(count % batch_rows == 0 for count in seen), seen
        assert await client.count("people", consistency="strong") == batches * batch_rows


@MEMORY_ONLY
async def test_a_session_does_not_see_a_table_that_is_being_loaded(home) -> None:
    """A client that has written nothing asks for no time at all; the first shard is loaded, the second is not."""
    async with home.people_client() as client:
        await client.insert("people", home.people(*range(20)))
        await client.flush("people")
    loads, may = 0, asyncio.Event()

    async def blocking(call):
        nonlocal loads
        if getattr(call, "func", None) is read_current_at:
            loads += 1
            if loads == 2:
                await may.wait()
        return call()

    async with home.node(blocking=blocking) as node, node.client() as client:
        await home.until(lambda: loads == 2)
        count = asyncio.create_task(client.count("people", consistency="session"))
        await home.elapse(1)
        assert not count.done()
        may.set()
        assert await count == 20


@MEMORY_ONLY
@pytest.mark.parametrize("stored", [False, True])
async def test_rows_that_the_log_forgets_while_a_table_is_loaded_are_not_missing(home, monkeypatch, stored) -> None:
    """The DataNode flushes and lets go of the log between the QueryNode's look at the table and its start."""
    monkeypatch.setattr(dispatcher, "RECENT_BYTES", 0)  # what the DataNode has read is in memory else
    load, may, loads = RowPipeline._load, asyncio.Event(), 0

    async def slow(pipeline: RowPipeline):
        nonlocal loads
        loaded = await load(pipeline)
        loads += 1
        await may.wait()
        return loaded

    async with home.people_client() as client:
        await client.insert("people", home.people(1))
        if stored:
            await client.flush("people")
    monkeypatch.setattr(RowPipeline, "_load", slow)
    async with home.client() as client:
        await home.until(lambda: loads == 1)
        await client.insert("people", home.people(2))
        await client.flush("people")
        await client.insert("people", home.people(3))
        await home.elapse(1)
        for channel in home.log.channels.values():
            if "datanode-1" in channel.holds:
                channel.remove_before(channel.entries[-1].id)
        may.set()
        await home.elapse(1)
        assert await client.count("people", consistency="strong") == 3
        assert loads == 2


@MEMORY_ONLY
async def test_the_log_is_kept_for_a_collection_whose_table_cannot_be_opened(home, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise CorruptLog("a table that was damaged at once")

    monkeypatch.setattr(LogTable, "open", refuse)
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        found = await client.describe_collection("people")
        channels = [home.log.channels[name] for name in pchannels_of(found)]
        before = [channel.entries[-1].id for channel in channels]
        await client.insert("people", home.people(1))
        await home.until(lambda: "datanode people" in node.health().details["unreadable"])
        assert all(channel.holds["datanode-1"] <= id for channel, id in zip(channels, before, strict=True))
        await client.drop_collection("people")
        assert not any("datanode-1" in channel.holds for channel in channels)


@pytest.mark.slow
@MEMORY_ONLY
async def test_rows_that_the_log_forgot_before_they_were_stored_are_told(home) -> None:
    """Nothing removes what the DataNode holds, but a stranger with the log in hand."""
    async with home.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.create_collection(home.POINTS)
        await client.insert("people", home.people(1))
        await client.flush("people")
        await client.insert("people", home.people(2))
        await client.insert("people", home.people(3))
    for channel in home.log.channels.values():
        if channel.holds.keys() == {"datanode-1"}:
            channel.holds.clear()
            channel.remove_before(channel.entries[-1].id)
    async with home.node() as node, node.client() as client:
        await home.elapse(1)
        assert set(node.health().details["unreadable"]) == {"datanode people", "querynode people"}
        assert isinstance(await home.error_of(client.count("people", consistency="strong")), PositionLost)
        began = asyncio.get_running_loop().time()
        assert isinstance(await home.error_of(client.flush("people")), PositionLost)
        assert asyncio.get_running_loop().time() - began < 10, "it does not wait for the deadline"
        assert await client.count("points", consistency="strong") == 0
        assert not any(status.restarts for status in node.system.status())


@pytest.mark.slow
@MEMORY_ONLY
async def test_losses_that_are_over_do_not_count_for_the_next(home, monkeypatch) -> None:
    """Over months there may be more of them than a collection whose rows are gone has at once."""
    run, losses = RowPipeline.run, 0

    async def losing(pipeline: RowPipeline) -> None:
        nonlocal losses
        running = asyncio.create_task(run(pipeline))
        try:
            await asyncio.sleep(2 * collection_reader.UNREADABLE_MAX_S)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        losses += 1
        raise PositionLost("retention was faster")

    monkeypatch.setattr(collection_reader, "UNREADABLE_MAX_S", 5.0)
    monkeypatch.setattr(RowPipeline, "run", losing)
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(1))
        while losses < collection_reader.LOSSES_MAX + 2:
            await home.elapse(0.5)
            assert not node.health().details["unreadable"]
        await home.elapse(0.5)
        assert await client.count("people", consistency="strong") == 1


@pytest.mark.slow
@MEMORY_ONLY
@pytest.mark.parametrize("channels", [1, 2])
async def test_nothing_is_missing_where_shards_are_stored_up_to_different_times(home, channels: int) -> None:
    """As another process that flushes shards of its own would leave the table."""
    settings = {"root_coord": {"dml_channel_num": channels}}
    async with home.node(settings=settings) as node, node.client() as client:
        await client.create_collection(home.PEOPLE, shards=2)
        await client.insert("people", home.people(*range(10)))
        await client.flush("people")
        log = LogTable.open(node.node.tables.table("people", LOG).uri)
        await client.insert("people", home.people(*range(10, 30)))
        ahead = max(log.positions())
        before = log.flushed(ahead)
        others, position = (log.positions()[vchannel] for vchannel in sorted(log.positions()))
        entry = home.log.channels[position.channel].entries[-1]
        record = decode(entry.payload)
        await client.insert("people", home.people(30))
    position = replace(position, message_id=entry.id, term=record.term, cseq=record.cseq, timestamp=record.ts)
    assert record.ts > before
    log.flush([], start={ahead: before}, end={ahead: record.ts}, positions={ahead: position})
    async with home.client(settings=settings) as client:
        assert home.log.channels[others.channel].holds["datanode-1"] <= others.message_id
        assert await client.count("people", consistency="strong") == 31


@MEMORY_ONLY
async def test_a_question_whose_rows_go_as_its_wait_ends_gets_no_empty_answer(home, monkeypatch) -> None:
    """The pack that ends the wait is the one behind which the memory limit is passed."""
    advance, maintain = RowPipeline._advance, RowStore.maintain
    pipelines: list[RowPipeline] = []
    ended = False

    def watched(pipeline: RowPipeline, time: int) -> None:
        nonlocal ended
        pipelines.append(pipeline)
        waiting = len(pipeline._waiters)
        advance(pipeline, time)
        ended |= len(pipeline._waiters) < waiting

    def limited(store: RowStore) -> bool:
        if ended:
            raise MemoryLimitExceeded("full", limit="queryNode.memoryLimitBytes")
        return maintain(store)

    monkeypatch.setattr(RowPipeline, "_advance", watched)
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(1))
        assert await client.count("people", consistency="strong") == 1
        monkeypatch.setattr(RowStore, "maintain", limited)
        error = await home.error_of(pipelines[-1].wait_for(node.node.clock.now()))
        assert ended
        assert isinstance(error, MemoryLimitExceeded)


@MEMORY_ONLY
async def test_current_rows_follow_when_writing_stops(home) -> None:
    settings = {"dataNode": {"flushIntervalS": 10, "compactionIntervalS": 300}}
    path = home.tables / "people" / CURRENT

    def rows() -> list[int]:
        return sorted(DeltaTable(path).to_pyarrow_table()["id"].to_pylist())

    async with home.node(settings=settings) as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(1, 2))
        await home.elapse(250)
        assert not path.exists()
        await home.elapse(60)
        assert rows() == [1, 2]
        first = DeltaTable(path).version()
        await client.delete("people", [1])
        await home.elapse(310)
        assert rows() == [2]
        assert DeltaTable(path).version() == first + 1
        await client.insert("people", home.people(3))
        await client.flush("people")
    async with home.node(settings=settings):  # the tables of a node that was stopped before it was time
        await home.elapse(310)
        assert rows() == [2, 3]
        await home.elapse(1000)  # it stores once that it has read what the start of a node writes into its channels
        version = DeltaTable(path).version()
        await home.elapse(3000)
        assert DeltaTable(path).version() == version, "an idle collection whose table is complete costs nothing"


@MEMORY_ONLY
async def test_current_rows_wait_for_a_request_where_the_interval_is_0(home) -> None:
    async with home.node(settings={"dataNode": {"compactionIntervalS": 0}}) as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(1))
        await home.elapse(1000)
        assert not (home.tables / "people" / CURRENT).exists()
        assert (await client.compact("people"))["rows"] == 1


async def forget_the_log(home) -> None:
    """As retention does: of each data channel the last entry is left."""
    wal = await home.wal()
    for name, channel in home.log.channels.items():
        if "dml" in name and channel.entries:
            channel.holds.clear()
            await wal.truncate(name, channel.entries[-1].id)
    await wal.close()


@MEMORY_ONLY
@pytest.mark.parametrize("later", [0, 5])
async def test_tables_that_are_gone_are_not_taken_for_new_ones(home, later) -> None:
    """With the beginning of a collection gone from the log, what is left of it would look like all of it."""
    async with home.people_client() as client:
        await client.insert("people", home.people(*range(20)))
        await client.flush("people")
        await forget_the_log(home)
        if later:
            await client.insert("people", home.people(*range(100, 100 + later)))
    shutil.rmtree(home.tables / "people")
    async with home.node() as node, node.client() as client:
        await home.elapse(30)
        for question in (client.count("people", consistency="strong"), client.flush("people")):
            error = await home.error_of(question)
            assert isinstance(error, PositionLost)
            assert "restore the tables" in error.message
        assert "people" in str(node.health().details["unreadable"])


@MEMORY_ONLY
async def test_a_collection_without_rows_may_outlive_its_beginning_in_the_log(home) -> None:
    async with home.client() as client:
        await client.create_collection(home.PEOPLE)
        await home.elapse(700)
        await forget_the_log(home)
    async with home.client() as client:
        await client.insert("people", home.people(1))
        await home.elapse(700)
        assert await client.count("people", consistency="strong") == 1


@MEMORY_ONLY
async def test_a_flush_whose_event_and_hold_are_refused_for_a_moment_ends(home) -> None:
    """Also where no other flush follows."""
    to_refuse: set[str] = set()

    class Refusing(MemoryWal):
        async def append_many(self, entries):
            if any(entry.channel == Names().insert_events for entry in entries) and "event" in to_refuse:
                to_refuse.remove("event")
                raise Unavailable("the log is away for a moment")
            return await super().append_many(entries)

        async def hold(self, channel, holder, id):
            if "hold" in to_refuse:
                to_refuse.remove("hold")
                raise Unavailable("the log is away for a moment")
            await super().hold(channel, holder, id)

    home.memory = Refusing
    quiet = {"dataNode": {"flushIntervalS": 10, "compactionIntervalS": 0}}
    async with home.node(settings=quiet) as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(1))
        to_refuse |= {"event", "hold"}
        await home.elapse(30)
        assert not to_refuse
        metrics = node.node.metrics
        assert metrics.value("streamingnode_unflushed_bytes", collection_name="people") == 0
        assert metrics.value("actor_restart_total", actor="datanode") == 0


@MEMORY_ONLY
async def test_a_flush_that_fails_for_good_is_noticed_where_no_other_follows(home, monkeypatch) -> None:
    flush, failures = LogTable.flush, 0

    def failing_once(*arguments, **named):
        nonlocal failures
        failures += 1
        if failures == 1:
            raise CorruptLog("a defect")
        return flush(*arguments, **named)

    monkeypatch.setattr(LogTable, "flush", failing_once)
    quiet = {"dataNode": {"flushIntervalS": 10, "compactionIntervalS": 0}}
    async with home.node(settings=quiet) as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(1))
        await home.elapse(60)
        assert failures > 1
        assert node.node.metrics.value("streamingnode_unflushed_bytes", collection_name="people") == 0
