"""Control records that ride with entries: in one frame with them, in force before the submitter hears of it."""

from __future__ import annotations

import asyncio

import pytest

from tidewal.adapters.rocksmq.journal import channels as records
from tidewal.runtime.errors import JournalFailed, MessageTooLarge, Overloaded
from tidewal.runtime.log.wal import Append, ChannelPolicy, Durability
from tidewal.runtime.testing.disk import FaultyDisk

PLAIN = ChannelPolicy()


def submitted(store, entries, **more):
    """Submit to the store's appender; a future of the ids and of what the table had when they were acknowledged."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def done(result):
        heard = result, {state.name: dict(state.holds) for state in store._journal.table.by_number.values()}
        loop.call_soon_threadsafe(future.set_result, heard)

    store._appender.submit(entries, done, **more)
    return future


async def test_records_take_effect_before_done_and_survive_as_does_a_stamp(open_rocksmq):
    store = await open_rocksmq()
    await store.create_channel("a", PLAIN)
    number = store.find("a").number
    stamped = []

    def stamp(ids):
        assert store._registry.lock.locked()
        stamped.extend(ids)
        return records.hold(number, "stamp", ids[-1])

    entries = [Append("a", b"1"), Append("a", b"2")]
    two = [records.hold(number, "x", 1), records.hold(number, "y", 2)]
    ids, holds = await submitted(store, entries, records=two, stamp=stamp)
    expected = {"x": 1, "y": 2, "stamp": int.from_bytes(ids[-1], "big")}
    assert stamped == [int.from_bytes(id, "big") for id in ids]
    assert holds["a"].items() >= {"x": 1, "y": 2}.items()
    await store.close()
    again = await open_rocksmq()
    assert again.find("a").holds == expected
    assert again.find("a").latest_id == ids[-1]


@pytest.mark.parametrize("policy", [ChannelPolicy(ephemeral=True), ChannelPolicy(acks=Durability.NONE), None])
async def test_records_are_durable_whatever_the_channels_ask_for(open_rocksmq, policy):
    store = await open_rocksmq()
    await store.create_channel("held", PLAIN)
    if policy is not None:
        await store.create_channel("b", policy)
    number = store.find("held").number

    def stamp(ids):
        return records.hold(number, "x", 7 + len(ids))

    entries = [Append("b", b"1")] if policy is not None else []
    ids, _ = await submitted(store, entries, stamp=stamp)
    assert len(ids) == len(entries)
    if policy is not None:
        assert store.find("b").latest_id == ids[0]
    await store.close()
    assert (await open_rocksmq()).find("held").holds == {"x": 7 + len(entries)}


async def test_records_count_towards_what_a_commit_takes(open_rocksmq):
    store = await open_rocksmq(segment_bytes=1024 * 1024)
    await store.create_channel("a", PLAIN)
    with pytest.raises(MessageTooLarge):
        await submitted(store, [Append("a", b"1")], records=[bytes(1024 * 1024)])
    with pytest.raises(MessageTooLarge):
        await submitted(store, [], records=[bytes(1024 * 1024)])


async def test_a_failed_sync_takes_the_records_with_the_entries(open_rocksmq, helpers):
    disk = FaultyDisk()
    store = await open_rocksmq(disk=disk)
    await store.create_channel("a", PLAIN)
    await helpers.until(lambda: store._segments.ready)  # so that the next sync is the commit's
    number = store.find("a").number
    disk.fail("sync")
    result, holds = await submitted(store, [Append("a", b"1")], records=[records.hold(number, "x", 1)])
    disk.heal()
    assert isinstance(result, JournalFailed)
    assert result.outcome_unknown
    assert holds["a"] == {}


async def test_channels_end_where_a_snapshot_of_them_would_not_fit(open_rocksmq):
    store = await open_rocksmq(segment_bytes=256 * 1024)
    names = [f"{i:03d}-{'x' * 200}" for i in range(200)]
    outcomes = await asyncio.gather(*(store.create_channel(name, PLAIN) for name in names), return_exceptions=True)
    refused = [outcome for outcome in outcomes if outcome is not None]
    assert {type(error) for error in refused} == {Overloaded}
    assert {error.limit for error in refused} == {"channels"}
    made = await store.channels()
    for _ in range(16):  # into the next segments, each with all of them
        await store.append(made[-1], bytes(32 * 1024))
    await store.drop_channel(made[0])
    await store.create_channel(names[-1], PLAIN)
    await store.close()
    assert await (await open_rocksmq(segment_bytes=256 * 1024)).channels() == [*made[1:], names[-1]]
