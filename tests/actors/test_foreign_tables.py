"""Tables of another collection or of another log, at the place of a collection's own, are its matter alone."""

from __future__ import annotations

import pytest

from tidewal.runtime.errors import InvalidSchema, PositionMismatch
from tidewal.runtime.rows.schema import CollectionSchema, Field
from tidewal.runtime.testing.memory import MemoryLog

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])

OTHERS = CollectionSchema("people", (Field("number", "int64"), Field("what", "varchar")), "number")


async def fill_and_forget(home, schema: CollectionSchema, row: dict[str, object]) -> None:
    """Fill the tables of a collection from a log that is gone then, and keep them beside."""
    async with home.client() as client:
        await client.create_collection(schema)
        await client.insert(schema.name, [row])
        await client.flush(schema.name)
    home.tables.rename(home.directory / "others")
    home.log = MemoryLog()
    await home.elapse(1)


async def test_tables_with_other_columns_stop_their_collection_only(home) -> None:
    await fill_and_forget(home, OTHERS, {"number": 1, "what": "another"})
    async with home.people_client() as client:
        await client.create_collection(home.POINTS)
    own, others = home.tables / "people", home.directory / "others" / "people"
    own.rename(home.directory / "own")
    others.rename(own)
    async with home.node() as node, node.client() as client:
        await home.until(lambda: len(node.health().details["unreadable"]) == 2)
        assert set(node.health().details["unreadable"]) == {"datanode people", "querynode people"}
        for refused in (client.count("people", consistency="strong"), client.insert("people", home.people(1))):
            error = await home.error_of(refused)
            assert isinstance(error, InvalidSchema)
            assert "holds columns (number: int64" in error.message
            assert "\n" not in error.message
        await client.insert("points", [{"id": 1, "at": [0.0] * 4}])
        await client.flush("points")
        assert await client.count("points", consistency="strong") == 1
        assert not any(status.restarts for status in node.system.status())
        own.rename(others)
        (home.directory / "own").rename(own)
        while node.health().details["unreadable"]:
            await home.elapse(0.2)
        await client.insert("people", home.people(1))
        assert await client.count("people", consistency="strong") == 1


async def test_a_collection_is_not_created_over_the_tables_of_another_log(home) -> None:
    await fill_and_forget(home, home.PEOPLE, home.people(1)[0])
    others = home.directory / "others"
    async with home.client() as client:
        (others / "people").rename(home.tables / "people")
        error = await home.error_of(client.create_collection(home.PEOPLE))
        assert isinstance(error, PositionMismatch)
        assert str(home.tables / "people" / "log") in error.message
        assert "move that folder away" in error.message
        assert await client.list_collections() == []
        (home.tables / "people").rename(others / "people")
        await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(2))
        assert await client.count("people", consistency="strong") == 1


@pytest.mark.parametrize("shards", [1, 2])
async def test_rows_of_another_log_with_the_same_columns_are_not_adopted(home, shards) -> None:
    await fill_and_forget(home, home.PEOPLE, home.people(1)[0])
    async with home.client() as client:
        await client.create_collection(home.PEOPLE, shards=shards)
    own = home.tables / "people"
    own.rename(home.directory / "own")
    (home.directory / "others" / "people").rename(own)
    async with home.node() as node, node.client() as client:
        await home.until(lambda: len(node.health().details["unreadable"]) == 2)
        for refused in (client.count("people", consistency="strong"), client.insert("people", home.people(2))):
            error = await home.error_of(refused)
            assert isinstance(error, PositionMismatch)
            assert ("by-dev" in error.message) == (shards == 1)
        assert not any(status.restarts for status in node.system.status())
