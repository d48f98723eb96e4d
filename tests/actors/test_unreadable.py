"""What is wrong with the tables of one collection is the matter of that collection, and not of the node."""

from __future__ import annotations

import asyncio
import errno
import os
from functools import partial

import pytest
from deltalake import DeltaTable

from tidewal.actors.datanode import pipeline
from tidewal.actors.querynode.pipeline import RowPipeline
from tidewal.runtime.errors import CorruptLog, DirectoryUnwritable, DiskFull, Unavailable
from tidewal.runtime.tables.local_store import LocalTableLocation

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])


@pytest.mark.slow
async def test_a_missing_file_of_one_collection_leaves_the_others_alone_and_may_come_back(home) -> None:
    async with home.people_client() as client:
        await client.create_collection(home.POINTS)
        for rows in (home.people(1, 2), home.people(3)):
            await client.insert("people", rows)
            await client.flush("people")
        await client.insert("points", [{"id": 1, "at": [0.0] * 4}])
        await client.flush("points")
    lost = min((home.tables / "people" / "log").glob("*.parquet"))
    kept = lost.rename(home.directory / lost.name)
    async with home.node() as node, node.client() as client:
        assert await client.count("points", consistency="strong") == 1
        for consistency in ("strong", "bounded", "eventually"):
            assert isinstance(await home.error_of(client.count("people", consistency=consistency)), CorruptLog)
        assert list(node.health().details["unreadable"]) == ["querynode people"]
        assert node.health().ok
        labels = {"collection_name": "people", "role_name": "querynode"}
        assert node.node.metrics.value("wal_collection_unreadable", **labels) == 1
        await client.insert("people", home.people(4))
        await client.flush("people")
        assert await client.count("points", consistency="strong") == 1
        assert not any(status.restarts for status in node.system.status())
        kept.rename(lost)
        while node.health().details["unreadable"]:
            await home.elapse(0.2)
        assert await client.count("people", consistency="strong") == 4
        assert node.node.metrics.value("wal_collection_unreadable", **labels) == 0


@pytest.mark.slow
async def test_a_table_that_another_tool_restored_is_told_and_nothing_is_lost(home) -> None:
    path = home.tables / "people" / "log"
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        for number in range(3):
            await client.insert("people", home.people(number))
            await client.flush("people")
        sound = DeltaTable(path).version()
        DeltaTable(path).restore(sound - 1)
        await client.insert("people", home.people(3))
        began = asyncio.get_running_loop().time()
        error = await home.error_of(client.flush("people"))
        assert isinstance(error, CorruptLog)
        assert "(RESTORE) is another tool's" in error.message
        assert asyncio.get_running_loop().time() - began < 10, "it does not wait for the deadline"
        while not (told := node.health().details["unreadable"]):
            await home.elapse(0.2)
        assert list(told) == ["datanode people"]
        assert "(RESTORE) is another tool's" in told["datanode people"]
        assert await client.count("people", consistency="strong") == 4  # from memory and the log
    async with home.node() as node, node.client() as client:
        assert isinstance(await home.error_of(client.count("people", consistency="strong")), CorruptLog)
        DeltaTable(path).restore(sound)
        while node.health().details["unreadable"]:
            await home.elapse(0.2)
        await client.flush("people")
        assert await client.count("people", consistency="strong") == 4
    assert sorted(DeltaTable(path).to_pyarrow_table()["id"].to_pylist()) == [0, 1, 2, 3]


async def test_an_unreadable_collection_can_be_dropped_and_made_again(home) -> None:
    async with home.people_client() as client:
        await client.insert("people", home.people(1))
        await client.flush("people")
    for file in (home.tables / "people" / "log").glob("*.parquet"):
        file.unlink()
    async with home.client() as client:
        assert isinstance(await home.error_of(client.count("people", consistency="strong")), CorruptLog)
        await client.drop_collection("people")
        await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(2))
        assert (await client.query("people", consistency="strong")).table.column("id").to_pylist() == [2]


async def test_an_error_of_compaction_waits_for_the_next_and_loses_nothing(home, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise DiskFull("no space for the table")

    async with home.node(settings={"dataNode": {"compactionIntervalS": 1}}) as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        with monkeypatch.context() as patched:
            patched.setattr(pipeline, "compact", full)
            patched.setattr(pipeline, "FLUSHES_PER_VACUUM", 1)
            for number in range(3):
                await client.insert("people", home.people(number))
                await home.elapse(1)
                await client.flush("people")
            failed = node.node.metrics.value("datanode_maintenance_failed_total", collection_name="people")
            assert failed >= 2  # the last may still be to come
            assert isinstance(await home.error_of(client.compact("people")), DiskFull)
        assert not any(status.restarts for status in node.system.status())
        assert (await client.compact("people"))["rows"] == 3


async def test_files_that_no_reader_needs_are_removed_from_both_tables(home, monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "FLUSHES_PER_VACUUM", 1)
    async with home.node(settings={"dataNode": {"compactionIntervalS": 1}}) as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(1))
        await client.flush("people")
        await client.compact("people")
        unnamed = [home.tables / "people" / table / "part-old.parquet" for table in ("log", "current")]
        for file in unnamed:
            file.write_bytes(b"")
            os.utime(file, (0, 0))
        await client.insert("people", home.people(2))
        await client.flush("people")
        while any(file.exists() for file in unnamed):
            await home.elapse(0.2)


@pytest.mark.parametrize("times", [1, 3])
async def test_a_collection_whose_table_is_mended_is_loaded_once_more(home, times, monkeypatch) -> None:
    opened = 0
    load = pipeline.FlushPipeline.run

    async def run(self):
        nonlocal opened
        opened += 1
        if opened <= times:
            raise CorruptLog("a page")
        await load(self)

    monkeypatch.setattr(pipeline.FlushPipeline, "run", run)
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(1))
        while node.health().details["unreadable"] or opened < times + 1:
            await home.elapse(0.2)
        await client.flush("people")
        assert opened == times + 1


@pytest.mark.slow
async def test_a_flush_of_a_table_that_cannot_be_read_says_so_at_once_and_others_go_on(home) -> None:
    async with home.people_client() as client:
        await client.create_collection(home.POINTS)
        await client.insert("people", home.people(1))
        await client.flush("people")
    commit = max((home.tables / "people" / "log" / "_delta_log").glob("*.json"))
    sound = commit.read_bytes()
    commit.write_bytes(sound[: len(sound) // 2])
    async with home.node() as node, node.client() as client:
        await client.insert("people", home.people(2))
        for _ in range(2):
            began = asyncio.get_running_loop().time()
            assert isinstance(await home.error_of(client.flush("people")), CorruptLog)
            assert asyncio.get_running_loop().time() - began < 10
        await client.insert("points", [{"id": 1, "at": [0.0] * 4}])
        await client.flush("points")
        assert not any(status.restarts for status in node.system.status())
        commit.write_bytes(sound)
        while node.health().details["unreadable"]:
            await home.elapse(0.2)
        await client.flush("people")
        assert await client.count("people", consistency="strong") == 2


async def test_a_compaction_that_waits_for_tables_that_do_not_open_ends(home, monkeypatch) -> None:
    opening, failing = asyncio.Event(), asyncio.Event()

    async def fail(*_: object) -> None:
        opening.set()
        await failing.wait()
        raise CorruptLog("a file is gone")

    monkeypatch.setattr(pipeline.FlushPipeline, "_hold_start", fail)
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await opening.wait()
        compacting = asyncio.create_task(home.error_of(client.compact("people")))
        await home.elapse(0.1)
        failing.set()
        assert isinstance(await compacting, Unavailable)
        assert asyncio.get_running_loop().time() < 10


async def test_a_collection_stays_unreadable_while_it_is_loaded_again(home, monkeypatch) -> None:
    loads: list[dict[str, str]] = []
    broken = True
    labels = {"collection_name": "people", "role_name": "querynode"}
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(1))
        await client.flush("people")

    async def load(self):
        loads.append(node.health().details["unreadable"])
        assert len(loads) == 1 or node.node.metrics.value("wal_collection_unreadable", **labels) == 1
        if broken:
            raise CorruptLog("a page")
        return await whole(self)

    whole = RowPipeline._load
    monkeypatch.setattr(RowPipeline, "_load", load)
    async with home.node() as node, node.client() as client:
        while len(loads) < 3:
            await home.elapse(0.2)
        assert [list(told) for told in loads] == [[], *[["querynode people"]] * 2]
        collection = await client.describe_collection("people")
        lag_of = partial(node.node.metrics.value, "querynode_consume_tt_lag_ms", channel_name=collection.vchannels[0])
        before = lag_of()
        await home.elapse(10)
        assert lag_of() >= before + 9_000
        broken = False
        while node.health().details["unreadable"]:
            await home.elapse(0.2)
        assert node.node.metrics.value("wal_collection_unreadable", **labels) == 0
        assert await client.count("people", consistency="strong") == 1


def forbid(monkeypatch, method: str) -> list[str]:
    """Make `method` of the places of the tables of "people" fail as it does for a user without the permission (for the
    superuser no permission is missing), for as long as the returned list has anything in it."""
    forbidden = ["people"]
    allowed = getattr(LocalTableLocation, method)

    def checked(self, *args):
        if self.collection in forbidden:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self.uri)
        return allowed(self, *args)

    monkeypatch.setattr(LocalTableLocation, method, checked)
    return forbidden


@pytest.mark.parametrize("method", ["read", "exists"])
async def test_a_file_that_may_not_be_read_is_the_matter_of_its_collection_alone(home, method, monkeypatch) -> None:
    async with home.people_client() as client:
        await client.create_collection(home.POINTS)
        await client.insert("people", home.people(1))
        await client.flush("people")
        await client.insert("points", [{"id": 1, "at": [0.0] * 4}])
    forbidden = forbid(monkeypatch, method)
    async with home.node() as node, node.client() as client:
        error = await home.error_of(client.count("people", consistency="strong"))
        assert isinstance(error, DirectoryUnwritable)
        assert "people/log" in error.message
        assert "querynode people" in node.health().details["unreadable"]
        assert node.health().ok
        await client.insert("people", home.people(2))
        await client.flush("points")
        assert await client.count("points", consistency="strong") == 1
        await home.elapse(200)
        assert "querynode people" in node.health().details["unreadable"]
        assert not any(status.restarts for status in node.system.status())
        forbidden.clear()
        while node.health().details["unreadable"]:
            await home.elapse(0.2)
        await client.flush("people")
        assert await client.count("people", consistency="strong") == 2
    assert sorted(DeltaTable(home.tables / "people" / "log").to_pyarrow_table()["id"].to_pylist()) == [1, 2]


async def test_a_table_that_may_not_be_written_is_told_and_stores_all_once_it_may(home, monkeypatch) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.create_collection(home.POINTS)
        await client.insert("people", home.people(1))
        await client.flush("people")
        forbidden = forbid(monkeypatch, "create")
        await client.insert("people", home.people(2))
        began = asyncio.get_running_loop().time()
        assert isinstance(await home.error_of(client.flush("people")), DirectoryUnwritable)
        assert asyncio.get_running_loop().time() - began < 10, "it does not wait for the deadline"
        await client.insert("points", [{"id": 1, "at": [0.0] * 4}])
        await client.flush("points")
        for _ in range(100):
            assert list(node.health().details["unreadable"]) == ["datanode people"]
            await home.elapse(1)
        assert await client.count("people", consistency="strong") == 2  # from memory and the log
        forbidden.clear()
        while node.health().details["unreadable"]:
            await home.elapse(0.2)
        await client.flush("people")
        assert not any(status.restarts for status in node.system.status())
    assert sorted(DeltaTable(home.tables / "people" / "log").to_pyarrow_table()["id"].to_pylist()) == [1, 2]


async def test_a_log_that_cannot_be_written_is_the_matter_of_the_node(home, monkeypatch) -> None:
    async def fail(*_: object) -> None:
        raise DirectoryUnwritable("the log cannot be written", path=str(home.directory / "log"))

    async with home.people_client():
        pass
    monkeypatch.setattr(pipeline.FlushPipeline, "_hold_start", fail)
    async with home.node() as node:
        assert "the log cannot be written" in str(await node.failed())
