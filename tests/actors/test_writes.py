"""What writes do, and what they refuse: a clear typed error each, and nothing half-done."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

import pyarrow as pa
import pytest

import tidewal
from tidewal.actors import client as client_module
from tidewal.actors.proxy import sharded_rows
from tidewal.actors.rows import to_batch
from tidewal.runtime.errors import (
    CollectionNotFound,
    DeadlineExceeded,
    InvalidRows,
    MessageTooLarge,
    TidewalError,
)
from tidewal.runtime.log.names import pchannel_of
from tidewal.runtime.log.record import RecordType, decode
from tidewal.runtime.rows.row_codec import encode_rows
from tidewal.runtime.rows.schema import CollectionSchema, Field
from tidewal.runtime.rpc.protocol import Reply

ROWS = [{"id": 1, "name": "a", "height": 1.0}, {"id": 2, "name": "b", "height": None}]


async def rows_of(client, collection: str = "people") -> list[dict[str, object]]:
    answer = await client.query(collection, order_by=[("id", True)], consistency="strong")
    return answer.table.to_pylist()


@pytest.mark.every_log
async def test_inserts_upserts_and_deletes(home) -> None:
    async with home.people_client() as client:
        written = await client.insert("people", ROWS)
        assert written.rows == 2
        assert await rows_of(client) == ROWS
        later = await client.upsert("people", [{"id": 2, "name": "bb"}])
        assert later.ts > written.ts
        assert await rows_of(client) == [ROWS[0], {"id": 2, "name": "bb", "height": None}], "the whole row is replaced"
        assert (await client.delete("people", [1, 99])).rows == 2
        assert await rows_of(client) == [{"id": 2, "name": "bb", "height": None}]
        stats = await client.stats("people", consistency="strong")
        assert dict(stats.versions) == {"insert": 2, "upsert": 1, "delete": 2}


async def test_inserting_a_key_that_exists_replaces_its_row(home) -> None:
    async with home.people_client() as client:
        await client.insert("people", ROWS)
        await client.insert("people", [{"id": 1, "name": "again"}])
        assert await rows_of(client) == [{"id": 1, "name": "again", "height": None}, ROWS[1]]


async def test_writes_keep_their_order_over_a_collection_that_is_made_again(home, monkeypatch) -> None:
    """Those that the old one refused go before what was called after them, whichever learns first of the new one."""
    async with home.node() as node, node.client() as one, node.client() as two:
        schema = CollectionSchema("prices", [Field("id", "int64"), Field("price", "int64")], "id")
        await one.create_collection(schema, shards=1)
        await two.upsert("prices", [{"id": 1, "price": -1}])
        await one.drop_collection("prices")
        await one.create_collection(schema, shards=1)
        call, describes = two._rpc.call, itertools.count()

        async def slow_at_first(role: str, method: str, *given: Any, **named: Any) -> Reply:
            reply = await call(role, method, *given, **named)
            if method == "describe_collection" and not next(describes):
                await asyncio.sleep(0.05)
            return reply

        monkeypatch.setattr(two._rpc, "call", slow_at_first)
        writes: list[asyncio.Task[tidewal.WriteResult]] = []
        for number in range(60):
            writes.append(asyncio.create_task(two.upsert("prices", [{"id": 1, "price": number}])))
            await asyncio.sleep(0 if number % 5 else 0.001)
        written = [each.ts for each in await asyncio.gather(*writes)]
        assert written == sorted(written)
        assert await rows_of(one, "prices") == [{"id": 1, "price": 59}]


async def test_a_mixed_batch_applies_in_its_order_under_one_timestamp(home) -> None:
    async with home.people_client() as client:
        await client.insert("people", ROWS)
        batch = [
            {"_op": "delete", "id": 1},
            {"_op": "insert", "id": 1, "name": "new"},
            {"_op": "upsert", "id": 3, "name": "three"},
            {"_op": "delete", "id": 3},
            {"_op": "upsert", "id": 4, "name": "four"},
        ]
        assert (await client.apply("people", batch)).rows == 5
        found = {row["id"]: row["name"] for row in await rows_of(client)}
        assert found == {1: "new", 2: "b", 4: "four"}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["rows", "columns", "table", "batch"])
async def test_takes_rows_columns_and_arrow(home, form) -> None:
    table = pa.Table.from_pylist(ROWS)
    forms = {"rows": ROWS, "columns": table.to_pydict(), "table": table, "batch": table.to_batches()[0]}
    async with home.people_client() as client:
        await client.insert("people", forms[form])
        assert await rows_of(client) == ROWS


@pytest.mark.asyncio(loop_factories=["memory"])
@pytest.mark.parametrize(("shards", "ids"), [(1, [1, 2, 3]), (2, [1])], ids=["one shard", "one row of two shards"])
async def test_rows_of_one_shard_are_stored_as_the_client_has_encoded_them(home, monkeypatch, shards, ids) -> None:
    async with home.node() as node, node.client() as client:
        collection = await client.create_collection(home.PEOPLE, shards=shards)
        with monkeypatch.context() as patched:
            patched.setattr(sharded_rows, "encode_rows", lambda _: pytest.fail("the Proxy encodes them again"))
            await client.insert("people", home.people(*ids))
        sent = bytes(encode_rows(to_batch(home.people(*ids), home.PEOPLE, op="insert")))
        channels = {pchannel_of(vchannel) for vchannel in collection.vchannels}
        records = [decode(entry.payload) for name in channels for entry in home.log.channels[name].entries]
        assert [bytes(record.body) for record in records if record.type is RecordType.ROWS] == [sent]
        assert [row["id"] for row in await rows_of(client)] == ids


@pytest.mark.asyncio(loop_factories=["memory"])
@pytest.mark.parametrize("more", [64, 6 << 20], ids=["a little", "over the limit of a message"])
async def test_what_a_client_sends_beside_its_rows_is_not_stored(home, monkeypatch, more) -> None:
    async with home.node() as node, node.client() as client:
        collection = await client.create_collection(home.PEOPLE, shards=1)
        monkeypatch.setattr(client_module, "encode_rows", lambda rows: bytes(encode_rows(rows)) + bytes(more))
        await client.insert("people", ROWS)
        assert await rows_of(client) == ROWS
        entries = home.log.channels[pchannel_of(collection.vchannels[0])].entries
        records = [decode(entry.payload) for entry in entries]
        assert [bytes(record.body) for record in records if record.type is RecordType.ROWS] == [
            bytes(encode_rows(to_batch(ROWS, home.PEOPLE, op="insert")))
        ]


async def test_an_empty_batch_changes_nothing(home) -> None:
    async with home.people_client() as client:
        written = await client.insert("people", [])
        assert written.rows == 0
        await client.delete("people", [])
        assert await rows_of(client) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "column"),
    [
        ([{"name": "no key"}], "id"),
        ([{"id": None}], "id"),
        ([{"id": 1}, {"id": None}], "id"),
        ([{"id": "one"}], "id"),
        ([{"id": 2**63}], "id"),
        ([{"id": 1, "height": math.nan}], "height"),
        ([{"id": 1, "height": "tall"}], "height"),
        ([{"id": 1, "name": 7}], "name"),
        ([{"id": 1, "weight": 7.0}], "weight"),
        ({"id": [1, 2], "name": ["a"]}, None),
        (pa.table({"id": pa.array([1.5])}), "id"),
        ([{"id": 1}, 2], None),
    ],
)
async def test_refuses_rows_that_do_not_fit_as_a_whole(home, rows, column) -> None:
    async with home.people_client() as client:
        await client.insert("people", ROWS)
        error = await home.error_of(client.insert("people", rows))
        assert isinstance(error, InvalidRows)
        assert error.fields.get("column") == column
        assert await rows_of(client) == ROWS
        await client.insert("people", home.people(5))
        assert await client.count("people", consistency="strong") == 3


@pytest.mark.parametrize("vector", [[1.0, 2.0], [1.0] * 5, None, [1.0, 2.0, 3.0, math.nan], [1.0, 2.0, 3.0, math.inf]])
async def test_refuses_vectors_of_another_length_or_without_a_place(home, vector) -> None:
    async with home.client() as client:
        await client.create_collection(home.POINTS)
        await client.insert("points", [{"id": 1, "at": [0.0] * 4}])
        error = await home.error_of(client.insert("points", [{"id": 2, "at": [0.0] * 4}, {"id": 3, "at": vector}]))
        assert isinstance(error, InvalidRows)
        assert (error.column, error.row) == ("at", 1)
        assert await client.count("points", consistency="strong") == 1


async def test_an_unknown_operation_and_an_unknown_collection_are_named(home) -> None:
    async with home.people_client() as client:
        error = await home.error_of(client.apply("people", [{"_op": "replace", "id": 1}]))
        assert isinstance(error, InvalidRows)
        assert (error.column, error.row) == ("_op", 0)
        assert isinstance(await home.error_of(client.apply("people", [{"id": 1}])), InvalidRows)
        for call in (
            client.insert("nobody", ROWS),
            client.delete("nobody", [1]),
            client.flush("nobody"),
            client.compact("nobody"),
            client.cut("nobody"),
        ):
            assert isinstance(await home.error_of(call), CollectionNotFound)
        assert await rows_of(client) == []


@pytest.mark.slow
@pytest.mark.every_log
async def test_a_row_over_the_message_limit_is_refused_and_a_batch_over_it_is_split(home) -> None:
    big = "x" * (3 * 1024 * 1024)
    home.segment_bytes = 32 * 1024 * 1024
    async with home.people_client() as client:
        error = await home.error_of(client.insert("people", [*ROWS, {"id": 3, "name": big * 2}]))
        assert isinstance(error, MessageTooLarge)
        assert await rows_of(client) == []
        await client.insert("people", [{"id": id, "name": big} for id in range(1, 7)])
        assert await client.count("people", consistency="strong") == 6
        await client.flush("people")
    async with home.client() as client:
        assert await client.count("people", consistency="strong") == 6


@pytest.mark.slow
async def test_a_request_over_the_channels_limit_is_refused(home) -> None:
    async with home.people_client() as client:
        rows = [{"id": id, "name": "x" * 4_000_000} for id in range(20)]
        assert isinstance(await home.error_of(client.insert("people", rows)), MessageTooLarge)
        assert await rows_of(client) == []


async def test_a_write_that_is_cancelled_harms_no_other(home) -> None:
    async with home.people_client() as client:
        tasks = [asyncio.ensure_future(client.insert("people", home.people(id))) for id in range(20)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        found = {row["id"] for row in await rows_of(client)}
        assert set(range(1, 20, 2)) <= found


@pytest.mark.slow
@pytest.mark.every_log
async def test_writes_of_one_client_apply_in_the_order_of_the_calls(home) -> None:
    async with home.people_client() as client:
        written = await asyncio.gather(
            *(client.upsert("people", [{"id": 1, "name": str(number)}]) for number in range(200))
        )
        times = [each.ts for each in written]
        assert times == sorted(set(times))
        assert (await rows_of(client))[0]["name"] == "199"


async def test_text_keys_route_and_replace(home) -> None:
    schema = CollectionSchema("words", (Field("word", "varchar"), Field("n", "int32", nullable=True)), "word")
    async with home.client() as client:
        await client.create_collection(schema, shards=3)
        await client.insert("words", {"word": ["a", "b", "é" * 200], "n": [1, 2, 3]})
        await client.upsert("words", {"word": ["é" * 200], "n": [4]})
        found = (await client.get("words", ["é" * 200, "a", "zz"], consistency="strong")).table.to_pylist()
        assert {row["word"]: row["n"] for row in found} == {"a": 1, "é" * 200: 4}


async def test_a_closed_client_says_so(home) -> None:
    async with home.node() as node:
        async with node.client() as client:
            await client.create_collection(home.PEOPLE)
        error = await home.error_of(client.insert("people", ROWS))
        assert isinstance(error, TidewalError)
        assert not isinstance(error, DeadlineExceeded)
