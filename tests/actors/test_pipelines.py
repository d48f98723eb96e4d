"""What DataNode and QueryNode do with packs: unreadable rows are put aside, and nobody looks at half a pack."""

from __future__ import annotations

import asyncio

import pytest
from deltalake import DeltaTable

from tidewal.actors.proxy import proxy
from tidewal.actors.querynode import pipeline as querynode_pipeline
from tidewal.runtime.names import Names
from tidewal.runtime.record import decode

MEMORY_ONLY = pytest.mark.asyncio(loop_factories=["memory"])


@MEMORY_ONLY
async def test_rows_that_cannot_be_read_are_dead_letters_and_the_rest_goes_on(home, monkeypatch) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE, shards=1)
        await client.insert("people", home.people(1))
        with monkeypatch.context() as broken:
            broken.setattr(proxy, "encode_rows", lambda rows: b"no record batch")
            await client.insert("people", home.people(9))
        await client.insert("people", home.people(2))
        assert await client.count("people", consistency="strong") == 2
        await client.flush("people")
        stored = DeltaTable(node.node.tables / "people" / "log").to_pyarrow_table()
        assert sorted(stored.column("id").to_pylist()) == [1, 2]
        letters = [decode(entry.payload) for entry in home.log.channels[Names().dead_letters].entries]
        assert {bytes(decode(letter.body).body) for letter in letters} == {b"no record batch"}


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
