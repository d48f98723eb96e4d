"""What questions answer, how fresh they are, and what they refuse."""

from __future__ import annotations

import asyncio
import random

import pytest

from tidewal.actors.mixcoord import cut_drawer
from tidewal.runtime.catalog.cuts import Cut
from tidewal.runtime.clock import AHEAD_MS_MAX, LOGICAL_BITS, HybridClock, add_ms, physical_ms
from tidewal.runtime.errors import CollectionNotFound, InvalidFilter, InvalidRequest, MemoryLimitExceeded
from tidewal.runtime.log.record import decode

MEMORY_ONLY = pytest.mark.asyncio(loop_factories=["memory"])
ROUNDS = 1000


@pytest.mark.every_log
async def test_filters_projects_orders_and_limits(home) -> None:
    async with home.people_client() as client:
        await client.insert("people", home.people(*range(100)))

        async def asked(**options):
            return (await client.query("people", consistency="strong", **options)).table

        table = await asked(filter="height >= 45 and name != 'n97'", columns=["id"], order_by=[("id", False)], limit=4)
        assert table.to_pydict() == {"id": [99, 98, 96, 95]}
        assert (await asked(filter="id in [1, 2, 300]")).num_rows == 2
        assert (await asked(filter="name like 'n1%'")).num_rows == 11
        assert (await asked(filter="id > 1000")).num_rows == 0
        assert (await asked(limit=0)).num_rows == 0
        assert (await asked(order_by=[("height", False), ("id", True)], limit=1))["id"].to_pylist() == [99]
        assert await client.count("people", "id < 10", consistency="strong") == 10
        assert await client.count("people", consistency="strong") == 100
        got = await client.get("people", [3, 1, 1000], columns=["name"], consistency="strong")
        assert sorted(got.table["name"].to_pylist()) == ["n1", "n3"]


async def test_a_parameter_of_a_filter_is_a_value_whatever_is_in_it(home) -> None:
    async with home.client() as client:
        await client.create_collection(home.POINTS)
        await client.insert("points", [{"id": n, "at": [0.0, 0, 0, n]} for n in range(5)])
        asked = {"filter_params": {"ids": [1, 2]}, "consistency": "strong"}
        found = (await client.query("points", "id in {ids}", **asked)).table
        near = (await client.search("points", "at", [0.0, 0, 0, 4], metric="L2", filter="id in {ids}", **asked)).table
        assert (sorted(found["id"].to_pylist()), near["id"].to_pylist()) == ([1, 2], [2, 1])
        assert await client.count("points", "id in {ids}", **asked) == 2
    async with home.people_client() as client:
        names = ['x" or id != "', '/q"x', "a\\"]
        await client.insert("people", [{**row, "name": names[row["id"]]} for row in home.people(0, 1, 2)])
        for name in names:
            assert await client.count("people", "name == {n}", filter_params={"n": name}, consistency="strong") == 1
        for call in (
            client.query("people", "name == {n}"),
            client.count("people", "name == {n}", filter_params={"n": "x", "m": 1}),
            client.search("people", "at", [1.0], filter="name == {n}", filter_params={"n": b"x"}),
        ):
            error = await home.error_of(call)
            assert isinstance(error, InvalidFilter)
            assert error.parameter in ("n", "m")
        assert isinstance(await home.error_of(client.count("people", "id == 1", filter_params=[1])), InvalidRequest)


@pytest.mark.slow
@pytest.mark.parametrize("filter", ["id >", "id = = 1", "nobody == 1", "id == 'one'", "__import__('os')", "(" * 500])
async def test_a_broken_filter_is_an_invalid_filter(home, filter) -> None:
    async with home.people_client() as client:
        await client.insert("people", home.people(1))
        assert isinstance(await home.error_of(client.query("people", filter)), InvalidFilter)
        assert await client.count("people", consistency="strong") == 1


async def test_what_cannot_be_asked_is_named(home) -> None:
    async with home.people_client() as client:
        await client.insert("people", home.people(1))
        for call in (
            client.query("people", columns=["nobody"]),
            client.query("people", order_by=[("nobody", True)]),
            client.query("people", limit=-1),
            client.query("people", consistency="tomorrow"),
            client.get("people", ["one"]),
            client.get("people", [None]),
            client.get("people", [1.5]),
            client.get("people", [object()]),
            client.get("people", [2**70]),
            client.search("people", "height", [1.0]),
            client.search("people", "nobody", [1.0]),
        ):
            assert isinstance(await home.error_of(call), InvalidRequest)
        for call in (client.query("nobody"), client.get("nobody", [1]), client.count("nobody"), client.stats("nobody")):
            assert isinstance(await home.error_of(call), CollectionNotFound)
        assert await client.count("people", consistency="strong") == 1


async def test_a_search_that_does_not_fit_the_vectors_is_named(home) -> None:
    async with home.client() as client:
        await client.create_collection(home.POINTS)
        await client.insert("points", [{"id": 1, "at": [0.0, 0, 0, 1]}])
        for options in (
            {"vector": [1.0]},
            {"vector": [1.0, 0, 0, float("nan")]},
            {"vector": [1.0, 0, 0, 0], "top_k": 0},
            {"vector": [1.0, 0, 0, 0], "metric": "HAMMING"},
        ):
            assert isinstance(await home.error_of(client.search("points", "at", **options)), InvalidRequest), options


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.every_log
async def test_a_strong_read_sees_all_that_was_acknowledged(home, seed: int) -> None:
    """Behaviour G4: inserts, upserts and deletes of several clients, each asked for as soon as it is acknowledged."""
    random_ = random.Random(seed)
    async with home.node() as node, node.client("reader") as reader:
        await reader.create_collection(home.PEOPLE)
        rounds = ROUNDS if home.virtual else ROUNDS // 5

        async def work(number: int) -> None:
            async with node.client() as writer:
                for turn in range(rounds // 4):
                    id = number * 1_000_000 + turn
                    await writer.insert("people", home.people(id))
                    assert await names(id) == [f"n{id}"], "an acknowledged insert was not seen"
                    if random_.random() < 0.5:
                        await writer.upsert("people", home.people(id, name="new"))
                        assert await names(id) == ["new"], "an acknowledged upsert was not seen"
                    if random_.random() < 0.5:
                        await writer.delete("people", [id])
                        assert await names(id) == [], "an acknowledged delete was not seen"

        async def names(id: int) -> list[str]:
            return (await reader.get("people", [id], consistency="strong")).table["name"].to_pylist()

        await asyncio.gather(*(work(number) for number in range(4)))


@pytest.mark.slow
@pytest.mark.every_log
async def test_a_session_sees_its_own_writes(home) -> None:
    async with home.node() as node, node.client() as mine:
        await mine.create_collection(home.PEOPLE)
        for id in range(50):
            await mine.insert("people", home.people(id))
            assert await mine.count("people", consistency="session") >= id + 1


@MEMORY_ONLY
async def test_a_session_that_claims_a_write_days_ahead_is_refused(home) -> None:
    async with home.people_client() as client:
        written = await client.insert("people", home.people(1))
        client._session["people"] = written.ts + (AHEAD_MS_MAX + 60_000 << LOGICAL_BITS)
        error = await home.error_of(client.count("people", consistency="session"))
        assert isinstance(error, InvalidRequest)
        assert "days ahead" in error.message


@MEMORY_ONLY
async def test_a_session_that_wrote_under_a_clock_days_ahead_is_served(home, monkeypatch) -> None:
    """Also by a node whose own clock is right, and which has not taken the channels yet."""
    async with home.people_client() as client:
        await client.insert("people", home.people(1))
        monkeypatch.setattr(HybridClock, "believes", lambda clock, ts: False)
        assert await client.count("people", consistency="session") == 1


@MEMORY_ONLY
async def test_bounded_and_eventual_reads_say_how_old_they_are(home) -> None:
    settings = {"common": {"gracefulTime": 1000}}
    async with home.people_client(settings=settings) as client:
        await client.insert("people", home.people(1))
        await home.elapse(5)
        answer = await client.query("people", consistency="bounded")
        assert answer.table.num_rows == 1
        assert answer.age_ms <= 1000
        written = await client.insert("people", home.people(2))
        eventual = await client.query("people", consistency="eventually")
        assert eventual.waited_ms < 5
        strong = await client.query("people", consistency="strong")
        assert strong.tsafe >= written.ts
        assert strong.table.num_rows == 2
        assert physical_ms(strong.tsafe) <= physical_ms(written.ts) + 1000


@pytest.mark.slow
@MEMORY_ONLY
async def test_a_collection_over_the_memory_limit_says_so_and_others_go_on(home) -> None:
    async with home.people_client(settings={"queryNode": {"memoryLimitBytes": 4 * 1024 * 1024}}) as client:
        await client.create_collection(home.POINTS)
        await client.insert("points", [{"id": 1, "at": [1.0, 0, 0, 0]}])
        for start in range(0, 20_000, 1000):
            await client.insert("people", [{"id": id, "name": "x" * 500} for id in range(start, start + 1000)])
        error = await home.error_of(client.count("people", consistency="strong"))
        assert isinstance(error, MemoryLimitExceeded)
        assert isinstance(await home.error_of(client.get("people", [1], consistency="eventually")), MemoryLimitExceeded)
        assert await client.count("points", consistency="strong") == 1
        await client.insert("people", home.people(1))
        await client.flush("people")
        await client.drop_collection("people")
        await client.create_collection(home.PEOPLE)
        assert await client.count("people", consistency="strong") == 0


@MEMORY_ONLY
async def test_an_idle_node_stores_nothing_and_still_answers(home) -> None:
    async with home.people_client() as client:
        await client.insert("people", home.people(1))
        await client.flush("people")
        await home.elapse(2)
        before = stored(home)
        await home.elapse(0.2 * 100)
        assert stored(home) == before, "an idle node stores ticks"
        answer = await client.query("people", consistency="strong")
        assert answer.table.num_rows == 1
        assert stored(home) == before


@pytest.mark.slow
@MEMORY_ONLY
async def test_the_last_cut_of_an_idle_collection_is_stored_again_before_retention_takes_it(home, monkeypatch) -> None:
    monkeypatch.setattr(cut_drawer, "CUT_AGAIN_MS", 10_000)
    async with home.people_client() as client:
        await client.insert("people", home.people(1))
        await home.elapse(2)
        before = stored(home)
        await home.elapse(35)
        cuts = next(name for name in before if "cuts" in name)
        assert stored(home) == before | {cuts: before[cuts] + 3}
        old, new = (Cut.from_record(decode(entry.payload)) for entry in home.log.channels[cuts].entries[-2:])
        assert new.ends == old.ends
        assert new.time >= add_ms(old.time, 10_000)


def stored(home) -> dict[str, int]:
    return {
        name: len(channel.entries) for name, channel in home.log.channels.items() if "dml" in name or "cuts" in name
    }
