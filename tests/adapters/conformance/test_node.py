"""A whole node on each log: nothing above the log knows the difference."""

from __future__ import annotations

import asyncio

import pytest

from tidewal.actors.standalone import Standalone
from tidewal.runtime.rows.schema import CollectionSchema, Field

SCHEMA = CollectionSchema("c", (Field("id", "int64"), Field("x", "int64")), "id")
ROWS = 200


@pytest.mark.slow
async def test_a_node_writes_reads_and_comes_back(backend, tmp_path):
    for life in range(2):
        wal = await backend.wal()
        async with asyncio.timeout(60), Standalone(wal, tmp_path / "tables") as node, node.client("test") as client:
            if life == 0:
                await client.create_collection(SCHEMA)
            first = life * ROWS
            await client.apply("c", [{"id": first + place, "x": life, "_op": "insert"} for place in range(ROWS)])
            await client.apply("c", [{"id": 0, "x": 10 + life, "_op": "upsert"}])
            await client.flush("c")
            keys = list(range(first + ROWS))
            found = (await client.get("c", keys, consistency="strong")).table
            assert sorted(found["id"].to_pylist()) == keys
            assert dict(zip(found["id"].to_pylist(), found["x"].to_pylist(), strict=True))[0] == 10 + life
            stored = (await client.query("c", f"x == {life}", consistency="strong")).table
            assert stored.num_rows == ROWS - (life == 0)  # of life 0 the row 0 was overwritten
        await wal.close()
