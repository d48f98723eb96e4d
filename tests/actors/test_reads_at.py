"""Questions about one time: `at`, and iterators, whose pages are of the time of the first."""

from __future__ import annotations

import asyncio
import random

import pytest

from tidewal.actors.querynode import loaded_collections
from tidewal.actors.querynode.past_rows import KEPT_S
from tidewal.actors.querynode.pipeline import RowPipeline
from tidewal.actors.querynode.row_store import RowMemory, RowStore
from tidewal.runtime.clock import add_ms
from tidewal.runtime.errors import InvalidRequest, MemoryLimitExceeded
from tidewal.runtime.rows.schema import CollectionSchema, Field

MEMORY_ONLY = pytest.mark.asyncio(loop_factories=["memory"])
# How long rows that ended stay in memory: always long enough, never, and for some of the writes of a test.
WINDOWS = {"from memory": 3600.0, "from the table": 0.0, "from both": 0.02}


def keeping(retention_s: float) -> dict[str, object]:
    return {"query_node": {"retention_duration": retention_s}}


@pytest.mark.parametrize("retention_s", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
async def test_each_past_state_is_read_as_it_was(home, seed: int, retention_s: float) -> None:
    """Against a dictionary for each write: rows, counts and gets, of times in any order."""
    chance = random.Random(seed)
    async with home.people_client(settings=keeping(retention_s)) as client:
        states, rows = dict[int, dict[int, float]](), dict[int, float]()
        for _ in range(12):
            written = home.people(*chance.sample(range(20), 5))
            for row in written:
                row["height"] = chance.random()
            if chance.random() < 0.3 and rows:
                gone = chance.sample(sorted(rows), 1)
                ts = (await client.delete("people", gone)).ts
                rows = {key: value for key, value in rows.items() if key not in gone}
            else:
                ts = (await client.upsert("people", written)).ts
                rows = rows | {row["id"]: row["height"] for row in written}
            states[ts] = rows
        for ts in chance.sample(sorted(states), 8):
            expected = states[ts]
            answer = await client.query("people", columns=["id", "height"], at=ts)
            assert answer.tsafe == ts
            assert {row["id"]: row["height"] for row in answer.table.to_pylist()} == expected
            assert await client.count("people", "height < 0.5", at=ts) == sum(x < 0.5 for x in expected.values())
            got = await client.get("people", list(range(20)), columns=["id"], at=ts)
            assert sorted(got.table["id"].to_pylist()) == sorted(expected)
            assert (await client.count("people", at=ts - 1)) in {len(state) for state in (*states.values(), {})}


async def test_a_state_outlives_the_node_that_wrote_it(home) -> None:
    async with home.people_client() as client:
        first = (await client.insert("people", home.people(1, 2))).ts
        await client.delete("people", [1])
    async with home.client() as client:
        assert await client.count("people", at=first) == 2
        assert await client.count("people", consistency="strong") == 1


async def test_a_state_before_the_table_is_read_where_the_table_was_loaded(home) -> None:
    async with home.people_client() as client:
        first = (await client.insert("people", home.people(1, 2))).ts
        await client.delete("people", [1])
        await client.upsert("people", home.people(3))
        await client.flush("people")
    async with home.client() as client:
        assert await client.count("people", at=first) == 2
        assert (await client.get("people", [1, 3], at=first)).table["id"].to_pylist() == [1]
        assert await client.count("people", consistency="strong") == 2


async def test_a_time_without_rows_is_named(home) -> None:
    async with home.people_client() as client:
        created = (await client.describe_collection("people")).created_ts
        ts = (await client.insert("people", home.people(1))).ts
        for at in (1, created - 1, add_ms(ts, 60_000)):
            error = await home.error_of(client.query("people", at=at))
            assert isinstance(error, InvalidRequest)
            assert str(at) in error.message
        assert isinstance(await home.error_of(client.query("people", at=-1)), InvalidRequest)
        assert await client.count("people", at=created) == 0
        assert await client.count("people", at=add_ms(ts, 100)) == 1  # waits until that is the past


@MEMORY_ONLY
async def test_rows_of_past_times_leave_memory_when_nobody_asks_for_them(home, monkeypatch) -> None:
    memories: list[RowMemory] = []
    monkeypatch.setattr(
        loaded_collections, "RowMemory", lambda *args: memories.append(RowMemory(*args)) or memories[-1]
    )
    async with home.people_client(settings=keeping(0.0)) as client:
        (memory,) = memories
        first = (await client.insert("people", home.people(*range(100)))).ts
        await client.delete("people", list(range(100)))
        await home.elapse(1)
        before = memory.used
        assert await client.count("people", at=first) == 100
        with_past = memory.used
        assert with_past > before
        assert await client.count("people", at=first) == 100  # of the same rows
        assert memory.used == with_past
        await home.elapse(40)
        assert memory.used == before
        await client.count("people", at=first)
        await client.drop_collection("people")
        assert memory.used == 0


@MEMORY_ONLY
async def test_past_rows_give_way_to_those_that_are_written(home) -> None:
    settings = keeping(0.0)
    settings["query_node"]["memory_limit_bytes"] = 60_000
    async with home.people_client(settings=settings) as client:
        first = (await client.insert("people", home.people(*range(150)))).ts
        await client.delete("people", list(range(100)))
        assert await client.count("people", at=first) == 150
        await client.insert("people", home.people(*range(200, 350)))
        assert await client.count("people", consistency="strong") == 200
        error = await home.error_of(client.count("people", at=first))
        assert isinstance(error, MemoryLimitExceeded)  # and what is current is answered all the same
        assert await client.count("people", consistency="strong") == 200


@MEMORY_ONLY
async def test_what_takes_long_to_load_is_loaded_once_for_all_pages(home, monkeypatch) -> None:
    loads, load = 0, RowPipeline._load_past

    async def slowly(*args) -> list[RowStore]:
        nonlocal loads
        loads += 1
        await asyncio.sleep(2 * KEPT_S)
        return await load(*args)

    monkeypatch.setattr(RowPipeline, "_load_past", slowly)
    async with home.people_client(settings=keeping(0.0)) as client:
        at = (await client.insert("people", home.people(*range(30)))).ts
        await client.delete("people", [1])
        pages = client.query_iterator("people", batch_size=10, at=at, deadline_s=300)
        found = []
        async for page in pages:
            found += page.table["id"].to_pylist()
            await home.elapse(1)
        assert (found, loads) == (list(range(30)), 1)


@pytest.mark.parametrize("retention_s", WINDOWS.values(), ids=WINDOWS)
async def test_the_pages_of_an_iterator_are_of_one_time(home, retention_s: float) -> None:
    """Whatever is written between them."""
    async with home.people_client(settings=keeping(retention_s)) as client:
        await client.insert("people", home.people(*range(100)))
        for options, expected in (
            ({}, list(range(100))),
            ({"filter": "id >= {low} and id != 50", "filter_params": {"low": 30}}, [*range(30, 50), *range(51, 100)]),
            ({"limit": 25, "columns": ["name"]}, list(range(25))),
            ({"limit": 0}, []),
        ):
            found, times = [], set()
            async for page in client.query_iterator("people", batch_size=20, consistency="strong", **options):
                assert page.table.num_rows <= 20
                assert page.table.column_names == options.get("columns", page.table.column_names)
                found += [int(name[1:]) for name in page.table["name"].to_pylist()]
                times.add(page.tsafe)
                await client.delete("people", list(range(0, 100, 3)))
                await client.upsert("people", home.people(*range(1, 100, 7), *range(1000, 1010)))
            assert found == expected
            assert len(times) <= 1
            await client.delete("people", list(range(1000, 1010)))
            await client.upsert("people", home.people(*range(100)))


async def test_an_iterator_goes_on_after_a_restart(home) -> None:
    async with home.people_client() as client:
        await client.insert("people", home.people(*range(30)))
        pages = client.query_iterator("people", batch_size=10, consistency="strong")
        first = await anext(pages)
        await client.delete("people", list(range(30)))
    async with home.client() as client:
        rest = client.query_iterator("people", "id > {last}", filter_params={"last": 9}, at=first.tsafe)
        assert [row["id"] async for page in rest for row in page.table.to_pylist()] == list(range(10, 30))


async def test_an_iterator_over_a_collection_that_others_created_anew_has_all_rows(home) -> None:
    """By another key, and what was the key is not unique any more."""
    fields = Field("id", "int64"), Field("code", "varchar")
    async with home.node() as node, node.client() as client, node.client() as other:
        await client.create_collection(CollectionSchema("things", fields, "id"))
        await other.drop_collection("things")
        await other.create_collection(CollectionSchema("things", fields, "code"))
        await other.insert("things", [{"id": n // 7, "code": f"{n:02}"} for n in range(50)])
        pages = client.query_iterator("things", batch_size=10, consistency="strong")
        assert [int(row["code"]) async for page in pages for row in page.table.to_pylist()] == list(range(50))


async def test_what_an_iterator_cannot_be_is_named(home) -> None:
    async with home.people_client() as client:
        for options in ({"batch_size": 0}, {"limit": -1}, {"columns": ["nobody"]}, {"filter": "id >"}):
            with pytest.raises(InvalidRequest):
                async for _ in client.query_iterator("people", **options):
                    pass


@MEMORY_ONLY
async def test_a_question_that_came_while_the_table_was_loaded_is_answered_in_time(home, monkeypatch) -> None:
    fill = RowPipeline._fill

    async def slowly(*args, **options) -> None:
        await asyncio.sleep(1)
        await fill(*args, **options)

    async with home.people_client() as client:
        written = (await client.insert("people", home.people(1))).ts
        await client.flush("people")
        await client.release_collection("people")
        monkeypatch.setattr(RowPipeline, "_fill", slowly)
        loading = asyncio.create_task(client.load_collection("people"))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(7):
            assert await client.count("people", at=add_ms(written, 5_000)) == 1
        await loading
