"""Consumer groups in the journal: what is stored of them, and what survives crashes, restarts and segments that go."""

from __future__ import annotations

import asyncio
import shutil

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.adapters.rocksmq.journal import channels as records
from tidewal.adapters.rocksmq.journal.channels import (
    ChannelTable,
    JournalledChannel,
    encode_id,
    ids_of_runs,
    runs_of_ids,
)
from tidewal.adapters.rocksmq.journal.dedup_table import AppendResult, wrote
from tidewal.runtime.errors import ChannelNotFound, DiskPressure, FormatTooNew, InvalidRequest, PositionLost
from tidewal.runtime.groups.progress import Change, GroupProgress
from tidewal.runtime.log.policy_codec import encode_policy
from tidewal.runtime.log.wal import Append, ChannelPolicy, Delivery, From, FromId
from tidewal.runtime.testing.disk import FaultyDisk

SMALL = 64 * 1024
PLAIN = ChannelPolicy()
FOREVER = ChannelPolicy(retention_s=None)


async def fill(store, channel, count, size=4):
    return [await store.append(channel, str(i).encode().ljust(size)) for i in range(count)]


async def one(member):
    async with asyncio.timeout(20):
        return await anext(member)


async def take(member, count):
    """Batches with the next `count` entries at least."""
    batches = []
    while sum(len(delivered.entries) for delivered in batches) < count:
        batches.append(await one(member))
    return batches


def position(store, channel, group):
    return store.find(channel).groups[group]


# ---- restarts and crashes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", ["same segment", "later segment", "older segments are gone"])
async def test_positions_and_single_acknowledgements_survive_a_restart(open_rocksmq, later):
    store = await open_rocksmq(segment_bytes=SMALL)
    await store.create_channel("a", FOREVER)
    ids = await fill(store, "a", 10)
    member = await store.join("g", ["a"])
    (delivered,) = [batch for batch in await take(member, 10) if batch.entries[0].id == ids[0]]
    await member.acknowledge(delivered, ids[:4])
    await member.acknowledge(delivered, [ids[6], ids[7], ids[9]])
    expected = GroupProgress(ids[3], {ids[6], ids[7], ids[9]})
    assert position(store, "a", "g") == expected
    if later != "same segment":
        await store.create_channel("filler", ChannelPolicy(retention_s=0))
        await fill(store, "filler", 100, 1024)
    if later == "older segments are gone":
        await store.create_channel("b", ChannelPolicy(retention_bytes=0))
        other = await store.join("g", ["b"])
        far = await fill(store, "b", 200, 1024)
        for batch in await take(other, 200):
            await other.acknowledge(batch)
        await store.truncate("a", encode_id(11))
        store.retain_now()
        assert store._segments.first_epoch > 1
    await store.close()
    store = await open_rocksmq(segment_bytes=SMALL)
    assert position(store, "a", "g") == expected
    if later == "older segments are gone":
        assert position(store, "b", "g") == GroupProgress(far[-1])
        assert (await store.groups())[0].positions == {"a": ids[3], "b": far[-1]}
        return
    member = await store.join("g", ["a"])
    assert [entry.id for entry in (await one(member)).entries] == [ids[4], ids[5], ids[8]]


async def test_outputs_and_position_lie_in_one_frame(open_rocksmq, tmp_path):
    """Cut the last frame: the outputs and the position are both gone; leave it: both are there."""
    store = await open_rocksmq()
    await store.create_channel("in", PLAIN)
    await store.create_channel("out", PLAIN)
    ids = await fill(store, "in", 3)
    member = await store.join("g", ["in"])
    delivered = await take(member, 3)
    before = store._journal._commits._segment.end
    (output,) = await member.commit(delivered, [Append("out", b"result")])
    shutil.copytree(tmp_path / "log", tmp_path / "whole", ignore=shutil.ignore_patterns("index", "socket"))
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    with open(store._journal._commits._segment.path.replace("/log/", "/cut/"), "r+b") as file:  # noqa: ASYNC230 -- a test
        file.seek(before + 40)
        file.write(b"torn")
    await store.close()
    for name, position_then, outputs_then in (("whole", ids[-1], [output]), ("cut", None, [])):
        shutil.rmtree(tmp_path / "log")
        (tmp_path / name).rename(tmp_path / "log")
        store = await open_rocksmq()
        assert (store.recovery.cut_offset == before) == (name == "cut")
        acked_to = position(store, "in", "g").acked_to
        assert acked_to == (position_then or encode_id(0))
        assert [await store.latest_id("out")] == (outputs_then or [None])
        await store.close()


async def test_a_power_cut_keeps_what_was_acknowledged(open_rocksmq, seed):
    disk = FaultyDisk(seed)
    store = await open_rocksmq(disk=disk)
    await store.create_channel("a", PLAIN)
    ids = await fill(store, "a", 20)
    member = await store.join("g", ["a"])
    for batch in await take(member, 20):
        for entry in batch.entries:
            await member.acknowledge(batch, [entry.id])
            assert position(store, "a", "g").acked_to == entry.id
    disk.cut_power()
    await store.close()
    disk.restore_power()
    store = await open_rocksmq(disk=disk)
    assert position(store, "a", "g") == GroupProgress(ids[-1])


async def test_a_dropped_channel_takes_its_positions_along(open_rocksmq):
    store = await open_rocksmq()
    await store.create_channel("a", PLAIN)
    ids = await fill(store, "a", 3)
    member = await store.join("g", ["*"])
    for batch in await take(member, 3):
        await member.acknowledge(batch)
    await store.drop_channel("a")
    assert await store.groups() == [type((await store.groups())[0])("g", {}, {member.id: frozenset()})]
    await store.create_channel("a", PLAIN)
    (again,) = await fill(store, "a", 1)
    assert again > ids[-1]
    assert [entry.id for entry in (await one(member)).entries] == [again]
    await store.close()
    store = await open_rocksmq()
    assert position(store, "a", "g").acked_to < again


async def test_a_channel_dropped_and_made_again_in_one_commit_is_a_new_one(open_rocksmq):
    store = await open_rocksmq()
    await store.create_channel("a", PLAIN)
    old = await fill(store, "a", 3)
    member = await store.join("g", ["*"])
    assert [entry.id for entry in (await one(member)).entries] == old  # and acknowledges none of it
    await asyncio.gather(store.drop_channel("a"), store.create_channel("a", PLAIN))
    (new,) = await fill(store, "a", 1)
    assert [entry.id for entry in (await one(member)).entries] == [new]


async def test_a_creation_whose_caller_was_cancelled_is_noticed(open_rocksmq, helpers):
    store = await open_rocksmq()
    member = await store.join("g", ["*"])
    creating = asyncio.ensure_future(store.create_channel("a", PLAIN))
    await asyncio.sleep(0)
    creating.cancel()
    await asyncio.gather(creating, return_exceptions=True)
    ids = await fill(store, "a", 3)  # the creation lies before them in the journal
    store._tick()
    assert [entry.id for batch in await take(member, 3) for entry in batch.entries] == ids


async def test_groups_are_notified_of_many_channels_together(open_rocksmq, helpers):
    store = await open_rocksmq()
    member = await store.join("g", ["*"])
    notified = []
    changed = store._management._changed
    store._management._changed = lambda: (notified.append(1), changed())
    await asyncio.gather(*[store.create_channel(f"c{number}", PLAIN) for number in range(200)])
    async with asyncio.timeout(20):
        await helpers.until(lambda: len(member.channels) == 200)
    assert len(notified) <= 50, "each creation was notified by itself"


async def test_dropping_a_group_is_durable_and_a_queue_stays_empty(open_rocksmq, helpers):
    store = await open_rocksmq()
    await store.create_channel("jobs", ChannelPolicy(delivery=Delivery.QUEUE))
    await store.create_channel("news", PLAIN)
    ids = {name: await fill(store, name, 5) for name in ("jobs", "news")}
    member = await store.join("g", ["*"])
    for batch in await take(member, 10):
        await member.acknowledge(batch)
    await member.aclose()
    await store.drop_group("g")
    for _ in range(2):
        assert await store.groups() == []
        assert (await store.describe("jobs")).first_id is None
        assert (await store.describe("news")).first_id == ids["news"][0]
        await store.close()
        store = await open_rocksmq()
    successor = await store.join("h", ["jobs"])
    (new,) = await fill(store, "jobs", 1)
    assert [entry.id for entry in (await one(successor)).entries] == [new]


async def test_acknowledging_goes_on_when_space_is_short(open_rocksmq, seed):
    disk = FaultyDisk(seed)
    store = await open_rocksmq(disk=disk, free_space_bytes=1000)
    await store.create_channel("a", PLAIN)
    ids = await fill(store, "a", 3)
    member = await store.join("g", ["a"])
    batches = await take(member, 3)
    disk.free = 999
    store.check_space()
    with pytest.raises(DiskPressure):
        await member.commit(batches, [Append("a", b"more")])
    for batch in batches:
        await member.acknowledge(batch)
    assert position(store, "a", "g").acked_to == ids[-1]


async def test_seeking_a_group(open_rocksmq):
    store = await open_rocksmq()
    await store.create_channel("a", PLAIN)
    ids = await fill(store, "a", 10)
    await store.seek_group("g", "a", FromId(ids[5], inclusive=True))
    assert position(store, "a", "g").acked_to == ids[4]
    await store.close()
    store = await open_rocksmq()
    member = await store.join("g", ["a"])
    assert [entry.id for entry in (await one(member)).entries] == ids[5:]
    await member.aclose()
    await store.seek_group("g", "a", From.EARLIEST)
    assert position(store, "a", "g").acked_to < ids[0]
    with pytest.raises(PositionLost):
        await store.seek_group("g", "a", FromId(encode_id(99)))


async def test_ids_that_are_none_never_reach_the_journal(open_rocksmq):
    store = await open_rocksmq()
    await store.create_channel("a", PLAIN)
    backend = store._coordinator._backend
    for change in (Change("g", "a", b"?"), Change("g", "a", None, (b"x" * 9,))):
        with pytest.raises(InvalidRequest):
            backend.commit([], [change], lambda _: None)
    with pytest.raises(ChannelNotFound):
        backend.commit([], [Change("g", "b", encode_id(1))], lambda _: None)
    assert position_names(store) == set()


def position_names(store):
    return {group for channel in store._registry.names.values() for group in channel.groups}


async def test_sessions_end_by_the_clock_of_the_log(open_rocksmq, clock):
    """Maintenance ticks twice a second; here the test ticks, and the clock does not move by itself."""
    store = await open_rocksmq(clock=clock)
    await store.create_channel("a", PLAIN)
    joined = asyncio.Event()
    store._coordinator.join("g", "silent", ["a"], From.EARLIEST, 30.0, lambda: None, _setter(joined))
    await joined.wait()
    pass_time(store, clock, 29)
    assert await members(store) == {"silent"}
    pass_time(store, clock, 2)
    assert await members(store) == set()


async def test_time_in_which_no_heartbeat_could_arrive_ends_no_session(open_rocksmq, clock):
    """The owner is suspended for an hour, as a laptop is: what members said meanwhile is read only then."""
    store = await open_rocksmq(clock=clock)
    await store.create_channel("a", PLAIN)
    for member in ("heard", "silent"):
        joined = asyncio.Event()
        store._coordinator.join("g", member, ["a"], From.EARLIEST, 30.0, lambda: None, _setter(joined))
        await joined.wait()
    pass_time(store, clock, 20)
    clock.advance(3600)
    pass_time(store, clock, 8)
    assert await members(store) == {"heard", "silent"}
    store._coordinator.beat("g", "heard")
    pass_time(store, clock, 4)
    assert await members(store) == {"heard"}
    pass_time(store, clock, 30)
    assert await members(store) == set()


def pass_time(store, clock, seconds):
    """As maintenance sees it."""
    for _ in range(2 * seconds):
        clock.advance(0.5)
        store._tick()


async def members(store):
    (info,) = await store.groups()
    return set(info.members)


def _setter(event):
    loop = asyncio.get_running_loop()

    def done(error):
        assert error is None
        loop.call_soon_threadsafe(event.set)

    return done


async def test_members_cost_an_idle_log_nothing(open_rocksmq, clock):
    """25 minutes in which nothing comes: twice a second the log looks at everything, and writes nothing (B18)."""
    store = await open_rocksmq(clock=clock)
    await store.create_channel("a", ChannelPolicy(delivery=Delivery.UNTIL_ACKED))
    await fill(store, "a", 3)
    member = await store.join("g", ["a"])
    for batch in await take(member, 3):
        await member.acknowledge(batch)
    before = store._journal._commits._segment.epoch, store._journal._commits._segment.end
    for _ in range(3000):
        clock.advance(0.5)
        store._tick()
    assert (store._journal._commits._segment.epoch, store._journal._commits._segment.end) == before
    assert member.channels == {"a"}


# ---- the table -------------------------------------------------------------------------------------------------------


def restored(table):
    copy = ChannelTable()
    copy.apply(table.snapshot(0))
    return copy


def snapshot_of(table):
    return table.by_number, table.next_number, table.boot, table.floor, table.clients.snapshot()


numbers = st.integers(1, 3)
message_ids = st.integers(1, 30).map(encode_id)
group_names = st.sampled_from(["g", "h"])
policies = st.sampled_from([PLAIN, FOREVER, ChannelPolicy(delivery=Delivery.QUEUE), ChannelPolicy(ephemeral=True)])
changes = st.builds(
    Change,
    group_names,
    st.just("ignored"),
    st.none() | message_ids,
    st.lists(message_ids, max_size=5).map(tuple),
    st.booleans(),
)
steps = st.one_of(
    st.builds(lambda n, p: records.create(JournalledChannel(n, f"c{n}", p)), numbers, policies),
    st.builds(records.drop, numbers),
    st.builds(records.truncate, numbers, st.integers(1, 30)),
    st.builds(records.hold, numbers, st.sampled_from("xy"), st.none() | st.integers(1, 30)),
    st.builds(records.acked, numbers, changes),
    st.builds(records.forget, group_names),
    st.builds(records.boot, numbers),
    st.builds(lambda n: wrote(b"c" * 16, n, n - 1, n, AppendResult(1, (n,))), numbers),
)


@pytest.mark.slow
@given(st.lists(steps, max_size=30))
def test_a_snapshot_says_all_that_the_records_said(bodies):
    table = ChannelTable()
    for body in bodies:
        table.apply(body)
        assert snapshot_of(restored(table)) == snapshot_of(table)


@pytest.mark.slow
@given(st.lists(steps, max_size=30))
def test_a_position_that_a_reader_got_does_not_change(bodies):
    table, seen = ChannelTable(), []
    for body in bodies:
        table.apply(body)
        for state in table.by_number.values():
            seen += [(progress, progress.acked_to, set(progress.acked)) for progress in state.groups.values()]
        assert all((p.acked_to, p.acked) == (acked_to, acked) for p, acked_to, acked in seen)


@given(st.sets(st.integers(0, 60)))
def test_runs_tell_their_ids(chosen):
    ids = {encode_id(number) for number in chosen}
    runs = runs_of_ids(ids)
    assert set(ids_of_runs(runs)) == ids
    assert len(runs) == 2 * len([number for number in chosen if number - 1 not in chosen])


@pytest.mark.slow
def test_ten_thousand_channels_have_a_small_snapshot():
    table = ChannelTable()
    for number in range(1, 10_001):
        table.apply(records.create(JournalledChannel(number, f"tenant-{number:05}", PLAIN)))
        table.apply(records.acked(number, Change("billing", "", encode_id(10**9))))
    assert len(table.snapshot(0)) <= 64 * 10_000


def test_a_snapshot_from_before_groups_is_understood():
    policy = {**encode_policy(PLAIN)}
    del policy["delivery"]
    fields = {
        "next_number": 8,
        "boot": 3,
        "floor": 5,
        "wall_ms": 1000,
        "channels": [[7, "a", policy, 0, 44, 900, 40, {"datanode": 41}]],
    }
    table = ChannelTable()
    table.apply(msgpack.packb(["snapshot", fields]))
    state = JournalledChannel(7, "a", PLAIN, 0, 44, 900, 40, {"datanode": 41})
    assert snapshot_of(table) == ({7: state}, 8, 3, 5, [])
    table.apply(records.acked(7, Change("g", "a", encode_id(42))))
    assert restored(table).by_number[7].groups == {"g": GroupProgress(encode_id(42))}


def test_positions_from_before_they_had_metadata_are_understood():
    table = ChannelTable()
    table.apply(records.create(JournalledChannel(7, "a", PLAIN)))
    table.apply(msgpack.packb(["acked", 7, "g", encode_id(42), [encode_id(44)], False]))
    expected = {"g": GroupProgress(encode_id(42), {encode_id(44)})}
    assert table.by_number[7].groups == restored(table).by_number[7].groups == expected


def test_records_of_a_later_version_are_reported_by_type():
    with pytest.raises(FormatTooNew):
        ChannelTable().apply(msgpack.packb(["merge", 1]))
