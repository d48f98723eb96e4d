"""A node on a disk with too little space refuses rows, and does all else: it starts, answers, stores, drops."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from tests.actors.nodes import role_of
from tidewal.actors.datanode import pipeline
from tidewal.actors.standalone import Standalone
from tidewal.actors.streamingnode import streamingnode
from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.catalog.cuts import Cut
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import DeadlineExceeded, DiskPressure
from tidewal.runtime.log.names import Names, pchannel_of
from tidewal.runtime.log.record import decode
from tidewal.runtime.log.wal import From
from tidewal.runtime.rows.schema import CollectionSchema, Field
from tidewal.runtime.testing.disk import FaultyDisk

SCHEMA = CollectionSchema("c", (Field("id", "int64"), Field("v", "varchar", nullable=True)), "id")
SEGMENT_BYTES = 256 * 1024
WATERMARK = 10**6


def rows(first: int, count: int = 10) -> list[dict[str, object]]:
    return [{"id": i, "v": "x" * 1000} for i in range(first, first + count)]


async def open_log(tmp_path, disk) -> RocksMQ:
    return await RocksMQ.open(
        str(tmp_path / "log"), disk=disk, segment_bytes=SEGMENT_BYTES, free_space_bytes=WATERMARK, serve=False
    )


async def ready(log) -> None:
    while not (log._segments.ready and log.check_space()):  # noqa: ASYNC110 -- the maintenance thread has no event
        await asyncio.sleep(0)


@pytest.mark.slow
@pytest.mark.parametrize("free", [WATERMARK - 1, 0])
async def test_a_node_without_space_starts_reads_flushes_and_drops(tmp_path, seed, free) -> None:
    disk = FaultyDisk(seed)
    log = await open_log(tmp_path, disk)
    async with Standalone(log, tmp_path / "tables") as node, node.client() as client:
        await client.create_collection(SCHEMA, shards=2)
        await client.insert("c", rows(0))
        await ready(log)
    await log.close()

    disk.free = free
    log = await open_log(tmp_path, disk)
    async with asyncio.timeout(60):
        async with Standalone(log, tmp_path / "tables") as node, node.client() as client:
            assert await client.count("c", consistency="strong") == 10
            with pytest.raises(DiskPressure):
                await client.insert("c", rows(10))
            await client.flush("c")
            await client.cut("c")
            assert await client.count("c", consistency="strong") == 10
            disk.free = None
            await ready(log)
            await client.insert("c", rows(10))
            disk.free = free
            log.check_space()
            assert await client.count("c", consistency="strong") == 20
            await client.drop_collection("c")
            assert await client.list_collections() == []
    await log.close()


async def test_a_node_whose_log_refuses_appends_says_so_and_what_to_do(tmp_path, seed, caplog) -> None:
    disk = FaultyDisk(seed)
    log = await open_log(tmp_path, disk)
    async with Standalone(log, tmp_path / "tables") as node, node.client() as client:
        await ready(log)
        assert node.health().ok
        disk.free = WATERMARK - 1
        log.check_space()
        health, status = node.health(), (await client.status())["proxy"]
        assert not health.ok
        assert status is not None
        for told in (health.details["refused"], status["refused"], caplog.text):
            assert (
                "the limit (rocksmq.freeSpaceInMB) of the process that has the log open; free space on its disk" in told
            )
        disk.free = None
        log.check_space()
        assert node.health().ok
        assert "are accepted again" in caplog.text
    await log.close()


@pytest.mark.long
@pytest.mark.timeout(300)  # it fills a segment with requests and answers, which takes a busy machine a minute
async def test_the_lease_goes_on_while_the_disk_is_full(tmp_path, seed, monkeypatch) -> None:
    monkeypatch.setattr("tidewal.actors.streamingnode.streamingnode.EXTEND_S", 0.001)
    monkeypatch.setattr("tidewal.runtime.cluster.limits.FAR_MS", 0)  # each time a limit is stored
    disk = FaultyDisk(seed)
    log = await open_log(tmp_path, disk)
    async with Standalone(log, tmp_path / "tables") as node, node.client() as client:
        await client.create_collection(SCHEMA, shards=2)
        await ready(log)
        disk.free = 0
        written, unknown = 0, False
        async with asyncio.timeout(240):
            while not log._segments.short:  # what renewals write has come to the reserve
                try:  # not for long: where the first answer is late the client asks on, and the reserve is small
                    await client.insert("c", rows(written, 1), deadline_s=1)
                    written, unknown = written + 1, False
                except (DiskPressure, DeadlineExceeded) as error:
                    unknown = unknown or isinstance(error, DeadlineExceeded) or "outcome_unknown" in error.fields
                assert await client.count("c", consistency="strong") in (written, written + unknown)
            assert not node.system.failed
    await log.close()


@pytest.mark.slow
async def test_retention_frees_the_segments_of_rows_that_are_stored_and_keeps_a_cut_of_each_collection(
    tmp_path, seed, monkeypatch
):
    """An idle collection shares the channels of one that is written, and the cuts and events lie in all segments."""
    for name in ("IDLE_FLUSH_S", "READ_BACK_S", "SETTLED_S"):
        monkeypatch.setattr(pipeline, name, 0.5)
    monkeypatch.setattr(streamingnode, "IDLE_TICK_S", 0.5)
    settings = Settings.model_validate({"rocksmq": {"retentionSizeInMB": 0}, "dataNode": {"flushIntervalS": 0.2}})
    log = await open_log(tmp_path, FaultyDisk(seed))
    async with (
        asyncio.timeout(60),
        Standalone(log, tmp_path / "tables", settings=settings) as node,
        node.client() as client,
    ):
        for name in ("idle", "c"):
            await client.create_collection(replace(SCHEMA, name=name))
            await client.insert(name, rows(0))
            await client.flush(name)
        shared, _ = (await client.describe_collection("c")).vchannels
        written = pchannel_of(shared)
        ids = []
        for first in range(0, 4000, 100):
            await client.insert("c", rows(first, 100))
            ids.append((await log.describe(written)).latest_id)
        await client.flush("c")
        await client.create_collection(replace(SCHEMA, name="later"))  # so that the catalog goes on
        await role_of(node, "mixcoord").catalog.snapshot()
        await node.node.cluster.log.move_on()
        while ((await log.describe(written)).first_id or ids[-1]) < ids[30]:  # noqa: ASYNC110 -- a thread's work
            await asyncio.sleep(0.01)
        idle = await client.describe_collection("idle")
        while not await cuts(log, idle):  # noqa: ASYNC110 -- MixCoord stores it again
            await asyncio.sleep(0.01)
    await log.close()

    log = await open_log(tmp_path, FaultyDisk(seed))
    async with (
        asyncio.timeout(60),
        Standalone(log, tmp_path / "tables", settings=settings) as node,
        node.client() as client,
    ):
        await client.insert("idle", rows(10))
        assert await client.count("idle", consistency="strong") == 20
        assert await client.count("c", consistency="strong") == 4000
        await client.flush("idle")
    await log.close()


async def cuts(log, collection) -> list[Cut]:
    """The cuts of a collection in the log."""
    found: list[Cut] = []
    last = (await log.describe(Names().cuts)).latest_id
    async with aclosing(log.read(Names().cuts, From.EARLIEST)) as reader:
        async for entries in reader:
            found += [cut for entry in entries if (cut := Cut.from_record(decode(entry.payload)).of(collection))]
            if entries[-1].id >= last:
                break
    return found
