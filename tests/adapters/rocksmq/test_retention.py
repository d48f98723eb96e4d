"""Retention takes whole segments, never what somebody needs, and gives their space back."""

from __future__ import annotations

import asyncio

import pytest

from tidewal.runtime.errors import PositionLost
from tidewal.runtime.wal import Append, ChannelPolicy, From, FromId

SMALL = 64 * 1024
DAY_S = 24 * 3600.0


def removed(store) -> int:
    """How many segments retention has taken in all; the keeper may have been quicker than the test."""
    store.retain_now()
    return store._segments.first_epoch - 1


async def fill(store, channel, kilobytes, start=0):
    return [await store.append(channel, bytes([i % 256]) * 1024) for i in range(start, start + kilobytes)]


async def test_by_time(open_rocksmq, clock, helpers):
    store = await open_rocksmq(clock=clock, segment_bytes=SMALL)
    await store.create_channel("a", ChannelPolicy(retention_s=DAY_S))
    old = await fill(store, "a", 300)
    assert removed(store) == 0
    clock.advance(DAY_S / 2)
    young = await fill(store, "a", 100)
    clock.advance(DAY_S / 2 + 60)
    assert removed(store) >= 3
    with pytest.raises(PositionLost) as caught:
        await helpers.take(store, "a", FromId(old[0]), 1)
    first = (await store.describe("a")).first_id
    assert caught.value.first_available == first
    assert old[0] < first <= young[0]
    entries = await helpers.take(store, "a", From.EARLIEST, 100)
    assert entries[0].id == first
    await store.close()
    store = await open_rocksmq(clock=clock, segment_bytes=SMALL, tail_bytes=1)
    assert (await store.describe("a")).first_id == first
    assert [e.id for e in await helpers.take(store, "a", FromId(young[0], inclusive=True), 100)] == young
    with pytest.raises(PositionLost):
        await helpers.take(store, "a", FromId(old[0]), 1)
    clock.advance(2 * DAY_S)
    await store.create_channel("b", ChannelPolicy(retention_s=0))
    await fill(store, "b", 100)
    clock.advance(2 * DAY_S)
    await fill(store, "b", 100)
    store.retain_now()
    assert (await store.describe("a")).first_id is None
    assert await store.latest_id("a") == young[-1]
    assert await store.append("a", b"on") > young[-1]


async def test_by_size(open_rocksmq):
    store = await open_rocksmq(segment_bytes=SMALL)
    await store.create_channel("a", ChannelPolicy(retention_s=None, retention_bytes=100 * 1024))
    ids = await fill(store, "a", 500)
    assert removed(store) >= 4
    first = (await store.describe("a")).first_id
    assert first is not None
    kept = len([id for id in ids if id >= first])
    assert 100 <= kept <= 100 + 2 * SMALL // 1024


async def test_one_channel_that_keeps_everything_keeps_its_segments(open_rocksmq, clock):
    store = await open_rocksmq(clock=clock, segment_bytes=SMALL)
    await store.create_channel("catalog", ChannelPolicy(retention_s=None))
    await store.create_channel("a", ChannelPolicy(retention_s=1.0))
    record = await store.append("catalog", b"precious")
    await fill(store, "a", 200)
    clock.advance(DAY_S)
    assert removed(store) == 0
    snapshot = await store.append("catalog", b"snapshot")
    await store.truncate("catalog", snapshot)
    assert removed(store) >= 2
    assert record < snapshot == (await store.describe("catalog")).first_id


async def test_dropping_gives_the_space_back_and_files_are_used_again(open_rocksmq, tmp_path):
    store = await open_rocksmq(segment_bytes=SMALL, spare_segments=2)
    sizes = []
    for round_number in range(6):
        await store.create_channel(f"c{round_number}", ChannelPolicy(retention_s=None))
        await fill(store, f"c{round_number}", 300)
        await store.drop_channel(f"c{round_number}")
        store.retain_now()
        sizes.append(sum(path.stat().st_size for path in (tmp_path / "log" / "journal").iterdir()))
    assert max(sizes) <= 5 * SMALL


async def test_a_hold_survives_a_restart(open_rocksmq, clock, helpers):
    store = await open_rocksmq(clock=clock, segment_bytes=SMALL)
    await store.create_channel("a", ChannelPolicy(retention_s=1.0))
    ids = await fill(store, "a", 200)
    await store.hold("a", "datanode", ids[100])
    await store.close()
    clock.advance(DAY_S)
    store = await open_rocksmq(clock=clock, segment_bytes=SMALL)
    store.retain_now()
    assert [e.id for e in await helpers.take(store, "a", FromId(ids[100], inclusive=True), 100)] == ids[100:]
    await store.hold("a", "datanode", None)
    assert removed(store) >= 1


async def test_a_reader_that_retention_overtakes_is_told(open_rocksmq, clock, helpers):
    store = await open_rocksmq(clock=clock, segment_bytes=SMALL, tail_bytes=1)
    await store.create_channel("a", ChannelPolicy(retention_s=1.0))
    await fill(store, "a", 20)
    reader = store.read("a", From.EARLIEST)
    await anext(reader)
    await fill(store, "a", 300)
    clock.advance(DAY_S)
    assert removed(store) >= 3
    with pytest.raises(PositionLost):
        await asyncio.wait_for(helpers.drain(reader, []), 5)


async def test_payloads_in_hand_outlive_the_segment_they_came_from(open_rocksmq, clock, helpers):
    store = await open_rocksmq(clock=clock, segment_bytes=SMALL, tail_bytes=1)
    await store.create_channel("a", ChannelPolicy(retention_s=1.0))
    await fill(store, "a", 60)
    entries = await helpers.take(store, "a", From.EARLIEST, 60)
    for _ in range(4):
        clock.advance(DAY_S)
        await fill(store, "a", 130, start=100)
        store.retain_now()
    assert helpers.payloads(entries) == [bytes([i]) * 1024 for i in range(60)]


async def test_a_slow_reader_costs_bounded_memory_and_gets_everything(open_rocksmq):
    store = await open_rocksmq(segment_bytes=8 * 1024 * 1024, tail_bytes=1024 * 1024)
    await store.create_channel("a", ChannelPolicy())
    reader = store.read("a", From.EARLIEST)
    for i in range(0, 64, 4):
        await store.append_many([Append("a", bytes([j]) * 512 * 1024) for j in range(i, i + 4)])
    number = 0
    while number < 64:
        batch = await anext(reader)
        assert sum(len(entry.payload) for entry in batch) <= 4 * 1024 * 1024
        for entry in batch:
            assert bytes(entry.payload) == bytes([number]) * 512 * 1024
            number += 1
    assert store.find("a").tail.size <= 4 * 1024 * 1024
