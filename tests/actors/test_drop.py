"""A collection is gone when its tables are, and not before: the next of its name never sees its rows."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter

import pytest

from tests.actors.nodes import role_of
from tidewal.actors.collection_reader import part_key
from tidewal.actors.datanode import datanode, pipeline
from tidewal.actors.datanode.current_table import CompactResult
from tidewal.actors.streamingnode import StreamingNode
from tidewal.runtime.errors import CollectionNotFound, DirectoryUnwritable, Fenced


@pytest.mark.slow
async def test_tables_that_cannot_be_removed_keep_the_name_taken_and_say_why(home, monkeypatch) -> None:
    def refuse(folder, **_) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    async with home.people_client() as client:
        await client.insert("people", home.people(1, 2))
        await client.flush("people")
        await client.compact("people")
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "rmtree", refuse)
            for call in (client.drop_collection("people"), client.create_collection(home.PEOPLE)):
                error = await home.error_of(call)
                assert isinstance(error, DirectoryUnwritable)
                assert str(home.tables / "people") in error.message
            assert await client.list_collections() == []
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        async with home.node() as node, node.client() as client:  # which goes on with the drop, and does without
            await client.create_collection(home.POINTS)
            assert isinstance(await home.error_of(client.create_collection(home.PEOPLE)), DirectoryUnwritable)
            assert not any(status.restarts for status in node.system.status())
    async with home.people_client() as client:
        await client.insert("people", home.people(3))
        await client.flush("people")
        assert (await client.compact("people"))["rows"] == 1
        assert await client.count("people", consistency="strong") == 1


@pytest.mark.parametrize("again", [False, True], ids=["gone", "made again"])
async def test_a_flush_that_comes_to_wait_behind_the_drop_ends(home, monkeypatch, again) -> None:
    waits, dropped = asyncio.Event(), asyncio.Event()
    stored = StreamingNode._stored

    async def late(self, collection, vchannels, ts) -> None:
        waits.set()
        await dropped.wait()
        await stored(self, collection, vchannels, ts)

    async with home.people_client() as client:
        await client.insert("people", home.people(1))
        monkeypatch.setattr(StreamingNode, "_stored", late)
        flush = asyncio.ensure_future(client.flush("people"))
        await waits.wait()
        await client.drop_collection("people")
        if again:
            await client.create_collection(home.PEOPLE)
        dropped.set()
        with pytest.raises(CollectionNotFound, match="dropped before all of it was stored"):
            await flush


@pytest.mark.slow
@pytest.mark.asyncio(loop_factories=["rocksmq"])
async def test_a_compaction_that_was_asked_for_ends_before_the_tables_are_removed(home, monkeypatch) -> None:
    order: list[str] = []
    remove = datanode._remove
    async with home.node() as node, node.client() as client:
        collection = await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(1))
        await client.flush("people")
        running = role_of(node, "datanode")._pipelines[part_key(collection)]
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def compact(*_: object) -> CompactResult:
            loop.call_soon_threadsafe(begun.set)
            while not running._ending.is_set():
                time.sleep(0.001)
            order.append("compacted")
            return CompactResult(0, 0, 0)

        monkeypatch.setattr(pipeline, "compact", compact)
        monkeypatch.setattr(datanode, "_remove", lambda *of: (order.append("removed"), remove(*of)))
        asked = asyncio.create_task(client.compact("people"))
        await begun.wait()
        await client.drop_collection("people")
        await asked
    assert order == ["compacted", "removed"]


@pytest.mark.asyncio(loop_factories=["memory"])
async def test_a_pipeline_that_fails_as_it_is_ended_does_not_begin_anew(home, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, run = Counter[str](), pipeline.FlushPipeline.run

    async def failing(self: pipeline.FlushPipeline) -> None:
        runs[self.collection.name] += 1
        try:
            await run(self)
        except asyncio.CancelledError:
            raise Fenced("another node stores it") from None

    monkeypatch.setattr(pipeline.FlushPipeline, "run", failing)
    async with home.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.drop_collection("people")
        await home.elapse(5)
        assert runs == {"people": 1}
        assert not (home.tables / "people").exists()
