"""Where readers start, how they wait and end, and that they lose nothing."""

from __future__ import annotations

import asyncio

import pytest

from ...errors import PositionLost
from ...log.wal import Append, ChannelPolicy, From, FromId, FromTime, Wal
from .backend_under_test import BackendUnderTest, ConformanceTests
from .helpers import PLAIN, create, fill, idle, reading, take

EPHEMERAL = ChannelPolicy(ephemeral=True)


async def filled(wal: Wal, count: int = 100) -> list[bytes]:
    """Channel `a` with so many entries; their ids."""
    await create(wal, "a")
    return await fill(wal, "a", count)


class TestReading(ConformanceTests):
    """Where readers start, how they wait and end, and that they lose nothing."""

    async def test_from_an_id_with_it_and_behind_it(self, wal: Wal) -> None:
        ids = await filled(wal)
        assert [e.id for e in await take(wal, "a", FromId(ids[50], inclusive=True), 50)] == ids[50:]
        assert [e.id for e in await take(wal, "a", FromId(ids[50]), 49)] == ids[51:]

    async def test_going_back_is_legal(self, wal: Wal) -> None:
        ids = await filled(wal)
        await take(wal, "a", From.EARLIEST, 80)
        assert (await take(wal, "a", FromId(ids[10], inclusive=True), 1))[0].id == ids[10]

    async def test_latest_gives_only_what_comes_after(self, wal: Wal) -> None:
        await filled(wal)
        reader = reading(wal, "a", From.LATEST)
        waiting = asyncio.ensure_future(anext(reader))
        await idle(waiting)
        id = await wal.append("a", b"new")
        assert [entry.id for entry in await waiting] == [id]
        await reader.aclose()

    @pytest.mark.parametrize("policy", [PLAIN, EPHEMERAL], ids=["durable", "ephemeral"])
    async def test_an_empty_channel_waits_and_then_delivers(self, wal: Wal, policy: ChannelPolicy) -> None:
        await wal.create_channel("a", policy)
        readers = [reading(wal, "a", From.EARLIEST), reading(wal, "a", FromTime(7)), reading(wal, "a", From.LATEST)]
        tasks = [asyncio.ensure_future(anext(reader)) for reader in readers]
        for task in tasks:
            await idle(task)
        id = await wal.append("a", b"first", 7)
        for task, reader in zip(tasks, readers, strict=True):
            assert [entry.id for entry in await task] == [id]
            await reader.aclose()

    async def test_by_time(self, backend: BackendUnderTest, wal: Wal) -> None:
        backend.needs("seek_by_time")
        ids = await filled(wal)
        for timestamp, expected in ((0, 0), (1, 0), (2, 1), (11, 1), (555, 56), (991, 99)):
            assert await wal.id_at("a", timestamp) == ids[expected]
            entries = await take(wal, "a", FromTime(timestamp), 1)
            assert entries[0].id <= ids[expected]
        assert await wal.id_at("a", 992) is None
        reader = reading(wal, "a", FromTime(992))
        waiting = asyncio.ensure_future(anext(reader))
        for _ in range(20):
            await asyncio.sleep(0)
        late = await wal.append("a", b"late", 1000)
        assert (await waiting)[0].id == late
        await reader.aclose()

    async def test_closing_ends_a_waiting_reader_without_error(self, wal: Wal) -> None:
        await wal.create_channel("a", PLAIN)
        reader = reading(wal, "a", From.EARLIEST)
        waiting = asyncio.ensure_future(anext(reader, None))
        await idle(waiting)
        await wal.close()
        assert await asyncio.wait_for(waiting, 60) is None

    async def test_readers_are_independent(self, wal: Wal) -> None:
        ids = await filled(wal, 10)
        one, two = reading(wal, "a", From.EARLIEST), reading(wal, "a", FromId(ids[7]))
        assert (await anext(two))[0].id == ids[8]
        assert (await anext(one))[0].id == ids[0]
        await one.aclose()
        extra = await wal.append("a", b"x")
        assert extra in [entry.id for entry in await anext(two)] or extra in [entry.id for entry in await anext(two)]
        await two.aclose()

    async def test_a_position_that_never_existed_is_lost_at_once(self, wal: Wal) -> None:
        ids = await filled(wal, 3)
        future = (int.from_bytes(ids[-1], "big") + 5).to_bytes(len(ids[-1]), "big")
        for start in (FromId(future), FromId(future, inclusive=True), FromId(b"?")):
            with pytest.raises(PositionLost) as caught:
                await asyncio.wait_for(anext(reading(wal, "a", start)), 60)
            assert caught.value.requested == start.id

    async def test_a_removed_position_is_lost_and_names_the_first_there_is(
        self, backend: BackendUnderTest, wal: Wal
    ) -> None:
        backend.needs("truncate")
        ids = await filled(wal, 10)
        await backend.end_segment(wal)
        later = await wal.append_many([Append("a", b"later", 1000)] * 3)
        await backend.remove_before(wal, "a", later[0])
        for start in (FromId(ids[3]), FromId(ids[0], inclusive=True)):
            with pytest.raises(PositionLost) as caught:
                await asyncio.wait_for(anext(reading(wal, "a", start)), 60)
            assert caught.value.first_available == later[0]
        assert [e.id for e in await take(wal, "a", From.EARLIEST, 3)] == later
        assert [e.id for e in await take(wal, "a", FromId(ids[9]), 3)] == later  # nothing between was removed
        assert (await wal.describe("a")).first_id == later[0]
        await wal.truncate("a", ids[0])  # a smaller id later is harmless
        assert await wal.append("a", b"x") > later[-1]

    async def test_a_hold_keeps_what_truncation_would_take(self, backend: BackendUnderTest, wal: Wal) -> None:
        backend.needs("truncate")
        ids = await filled(wal, 10)
        await wal.hold("a", "reader", ids[4])
        await wal.hold("a", "other", ids[6])
        await backend.remove_before(wal, "a", ids[9])
        assert [e.id for e in await take(wal, "a", FromId(ids[4], inclusive=True), 6)] == ids[4:]
        await wal.hold("a", "reader", None)
        await backend.remove_before(wal, "a", ids[9])
        assert [e.id for e in await take(wal, "a", FromId(ids[6], inclusive=True), 4)] == ids[6:]

    async def test_latest_id_follows_acknowledgements(self, wal: Wal) -> None:
        await wal.create_channel("a", PLAIN)
        assert await wal.latest_id("a") is None
        for i in range(5):
            id = await wal.append("a", bytes([i]))
            assert await wal.latest_id("a") == id

    async def test_an_ephemeral_channel_forgets_its_oldest_and_slow_readers_go_on_there(
        self, backend: BackendUnderTest, wal: Wal
    ) -> None:
        backend.needs("ephemeral_bounds")
        await wal.create_channel("e", ChannelPolicy(ephemeral=True, ephemeral_bytes=10_000))
        first = await wal.append("e", b"first")
        reader = reading(wal, "e", From.EARLIEST)
        assert (await anext(reader))[0].id == first
        ids = [await wal.append("e", bytes(1000)) for _ in range(30)]
        entries = await anext(reader)
        assert entries[0].id > ids[0]
        assert entries[0].id < ids[-1]
        while entries[-1].id != ids[-1]:
            entries = await anext(reader)
        assert ((await wal.describe("e")).first_id or b"") > first
        await reader.aclose()

    @pytest.mark.slow
    async def test_many_readers_and_writers_miss_no_wakeup(self, wal: Wal) -> None:
        await wal.create_channel("a", PLAIN)
        readers = [asyncio.create_task(take(wal, "a", From.EARLIEST, 400)) for _ in range(4)]

        async def produce():
            for _ in range(100):
                await wal.append("a", b"x")

        await asyncio.gather(*(produce() for _ in range(4)))
        lists = await asyncio.gather(*readers)
        assert all(entries == lists[0] for entries in lists)
