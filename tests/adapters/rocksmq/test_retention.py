"""Retention removes whole segments, never what a reader, group or holder needs, and frees their space."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.adapters.rocksmq.index.index import SegmentSummary
from tidewal.adapters.rocksmq.journal.channels import JournalledChannel, encode_id
from tidewal.adapters.rocksmq.journal.retention import STEP_LASTS_S, expendable
from tidewal.adapters.rocksmq.owner.channel_cache import channel_of
from tidewal.runtime.errors import PositionLost
from tidewal.runtime.groups.progress import GroupProgress
from tidewal.runtime.log.wal import Append, ChannelPolicy, Delivery, From, FromId
from tidewal.runtime.metrics.metrics import Metrics

SMALL = 64 * 1024
DAY_S = 24 * 3600.0


def removed(store) -> int:
    """How many segments retention has removed in all; maintenance may have been quicker than the test."""
    store.retain_now()
    return store._segments.first_epoch - 1


async def fill(store, channel, kilobytes, start=0):
    return [await store.append(channel, bytes([i % 256]) * 1024) for i in range(start, start + kilobytes)]


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    clock.advance(1.0)  # at least so long it is that they were filled, however long the log was closed
    assert removed(store) >= 1


DAY_MS = int(DAY_S * 1000)


@pytest.mark.slow
async def test_a_wall_clock_that_is_wrong_for_a_moment_makes_nothing_old(open_rocksmq, clock, rng):
    """Whatever it shows, also while segments are filled and when the log is opened, once it was right at first."""
    store = await open_rocksmq(clock=clock, segment_bytes=SMALL)
    await store.create_channel("a", ChannelPolicy(retention_s=14 * DAY_S))
    ids = await fill(store, "a", 150)
    await store.close()
    for _ in range(4):
        wrong_ms = rng.choice([-1, 1]) * rng.randrange(15, 10_000) * DAY_MS
        opened_wrong = rng.random() < 0.5
        clock.jump_wall(wrong_ms if opened_wrong else 0)
        store = await open_rocksmq(clock=clock, segment_bytes=SMALL)
        clock.jump_wall(0 if opened_wrong else wrong_ms)
        if rng.random() < 0.5:
            ids += await fill(store, "a", 150)
        for _ in range(10):
            clock.advance(60)
            assert removed(store) == 0
        clock.jump_wall(-wrong_ms)
        ids += await fill(store, "a", 150)
        for _ in range(3):
            clock.advance(STEP_LASTS_S)
            assert removed(store) == 0
        await store.close()
        clock.advance(STEP_LASTS_S)
    assert (await (await open_rocksmq(clock=clock, segment_bytes=SMALL)).describe("a")).first_id == ids[0]


@pytest.mark.slow
async def test_time_that_passed_while_the_log_was_closed_counts_once_it_has_lasted(open_rocksmq, clock):
    store = await open_rocksmq(clock=clock, segment_bytes=SMALL)
    await store.create_channel("a", ChannelPolicy(retention_s=DAY_S))
    old = await fill(store, "a", 200)
    await store.close()
    clock.advance(2 * DAY_S)
    store = await open_rocksmq(clock=clock, segment_bytes=SMALL)
    young = await fill(store, "a", 200)
    clock.advance(STEP_LASTS_S - 1)
    assert removed(store) == 0
    clock.advance(1)
    assert removed(store) >= 2
    first = (await store.describe("a")).first_id
    assert old[100] < first <= young[0]  # none of those that are an hour old


@pytest.mark.slow
async def test_a_wall_clock_that_was_set_back_for_good_keeps_nothing_for_ever(open_rocksmq, clock):
    store = await open_rocksmq(clock=clock, segment_bytes=SMALL)
    await store.create_channel("a", ChannelPolicy(retention_s=DAY_S))
    await fill(store, "a", 200)
    clock.jump_wall(-1000 * DAY_MS)
    clock.advance(DAY_S)
    assert removed(store) >= 2
    await fill(store, "a", 200)
    await store.close()
    gone = store._segments.first_epoch
    store = await open_rocksmq(clock=clock, segment_bytes=SMALL)
    clock.advance(DAY_S)
    store.retain_now()
    assert store._segments.first_epoch > gone


@pytest.mark.slow
async def test_a_reader_that_retention_overtakes_gets_an_error(open_rocksmq, clock, helpers):
    store = await open_rocksmq(clock=clock, segment_bytes=SMALL, tail_bytes=1)
    await store.create_channel("a", ChannelPolicy(retention_s=1.0))
    await fill(store, "a", 20)
    reader = store.read("a", From.EARLIEST)
    await anext(reader)
    await fill(store, "a", 300)
    clock.advance(DAY_S)
    assert removed(store) >= 3
    with pytest.raises(PositionLost):
        await asyncio.wait_for(helpers.drain(reader, []), 60)


@pytest.mark.slow
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
    assert sum(len(row[3]) for row in store.find("a").tail.rows) <= 4 * 1024 * 1024


# ---- by acknowledgement ----------------------------------------------------------------------------------------------

UNTIL_ACKED = ChannelPolicy(retention_s=None, delivery=Delivery.UNTIL_ACKED)
QUEUE = ChannelPolicy(retention_s=None, delivery=Delivery.QUEUE)


async def work(member, upto):
    """Take what comes up to an id, and acknowledge it."""
    async with asyncio.timeout(20):
        while True:
            delivered = await anext(member)
            done = [entry.id for entry in delivered.entries if entry.id <= upto]
            await member.acknowledge(delivered, done)
            if not done or done[-1] == upto:
                return


def segments(store):
    return len(store._segments.epochs)


@pytest.mark.slow
async def test_what_every_group_has_acknowledged_goes(open_rocksmq):
    store = await open_rocksmq(segment_bytes=SMALL, tail_bytes=1)
    await store.create_channel("a", UNTIL_ACKED)
    ids = await fill(store, "a", 300)
    assert removed(store) == 0  # no group has acknowledged anything
    fast, slow = await store.join("fast", ["a"]), await store.join("slow", ["a"])
    await work(fast, ids[-1])
    assert removed(store) == 0
    await work(slow, ids[150])
    half = removed(store)
    assert 1 <= half <= 3
    assert (await store.describe("a")).first_id <= ids[151]
    await slow.aclose()
    slow = await store.join("slow", ["a"])  # what it was given and did not acknowledge comes again
    await work(slow, ids[-1])
    assert removed(store) > half
    assert segments(store) == 1
    await slow.aclose()
    await store.drop_group("slow")
    await fill(store, "a", 300)
    before = removed(store)
    await store.drop_group("slow")  # absent is fine
    await fast.aclose()
    await store.drop_group("fast")
    assert removed(store) == before  # without groups, this rule removes nothing


async def test_what_is_kept_for_all_is_kept_whichever_group_acknowledged_it(open_rocksmq):
    store = await open_rocksmq(segment_bytes=SMALL)
    await store.create_channel("a", ChannelPolicy(retention_s=None))
    ids = await fill(store, "a", 200)
    await work(await store.join("g", ["a"]), ids[-1])
    assert removed(store) == 0
    assert (await store.describe("a")).first_id == ids[0]


async def test_without_any_rule_nothing_goes(open_rocksmq, clock):
    store = await open_rocksmq(clock=clock, segment_bytes=SMALL)
    for delivery in Delivery:
        await store.create_channel(delivery.value, ChannelPolicy(retention_s=None, delivery=delivery))
        await fill(store, delivery.value, 100)
    clock.advance(1000 * DAY_S)
    assert removed(store) == 0


@pytest.mark.slow
async def test_a_queue_gives_space_back_while_other_channels_live_on(open_rocksmq, tmp_path):
    store = await open_rocksmq(segment_bytes=SMALL)
    await store.create_channel("jobs", QUEUE)
    await store.create_channel("events", ChannelPolicy(retention_s=None, retention_bytes=100 * 1024))
    member = await store.join("workers", ["jobs"])
    sizes = []
    for _ in range(8):
        ids = []
        for _ in range(200):
            ids += await fill(store, "jobs", 1)
            await store.append("events", b"e" * 512)
        await work(member, ids[-1])
        assert (await store.describe("jobs")).first_id is None
        store.retain_now()
        sizes.append(sum(path.stat().st_size for path in (tmp_path / "log" / "journal").iterdir()))
    assert max(sizes[1:]) <= sizes[0] + 4 * SMALL, sizes


async def test_readers_begin_behind_what_a_queue_has_done(open_rocksmq, helpers):
    store = await open_rocksmq()
    await store.create_channel("jobs", QUEUE)
    ids = await fill(store, "jobs", 10)
    member = await store.join("workers", ["jobs"])
    delivered = await anext(member)
    await member.acknowledge(delivered, [*ids[:3], ids[5]])
    assert [e.id for e in await helpers.take(store, "jobs", From.EARLIEST, 7)] == ids[3:]  # 5 is the group's matter
    assert (await store.describe("jobs")).first_id == ids[3]


@pytest.mark.slow
async def test_a_dead_group_is_cut_off_counted_and_named(open_rocksmq, clock, caplog):
    """B12: the slowest group rules until the cap, and not beyond."""
    metrics = Metrics()
    store = await open_rocksmq(segment_bytes=SMALL, metrics=metrics, clock=clock)
    policy = ChannelPolicy(retention_s=DAY_S, retention_bytes=200 * 1024, delivery=Delivery.UNTIL_ACKED)
    await store.create_channel("a", policy)
    members = {name: await store.join(name, ["a"]) for name in ("alive", "dead")}
    await members["dead"].aclose()
    ids = await fill(store, "a", 150)
    await work(members["alive"], ids[-1])
    assert removed(store) == 0
    assert cut_off(metrics) == 0
    for _ in range(5):
        ids += await fill(store, "a", 70)
        await work(members["alive"], ids[-1])
    assert removed(store) >= 4  # what the living group has acknowledged is no reason; the cap is
    assert cut_off(metrics) == 1
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "retention cut group dead off in channel a: it was too far behind"
    ]
    first = (await store.describe("a")).first_id
    back = await store.join("dead", ["a"])
    with pytest.raises(PositionLost) as caught:
        await anext(back)
    assert caught.value.first_available == first
    await back.aclose()
    going_on = await store.join("dead", ["a"], reset_to=From.EARLIEST)
    assert (await anext(going_on)).entries[0].id == first
    await going_on.aclose()
    clock.advance(2 * DAY_S)
    await fill(store, "a", 100)
    assert cut_off(metrics) == 2  # by time, too
    assert segments(store) <= 3


def cut_off(metrics):
    return metrics.counter("rocksmq_groups_cut_off_total")._value.get()


@pytest.mark.parametrize("delivery", Delivery)
async def test_a_hold_is_above_all_rules(open_rocksmq, clock, helpers, delivery):
    policy = ChannelPolicy(retention_s=1.0, retention_bytes=1024, delivery=delivery)
    store = await open_rocksmq(clock=clock, segment_bytes=SMALL, tail_bytes=1)
    await store.create_channel("a", policy)
    await store.hold("a", "datanode", encode_id(1))
    ids = await fill(store, "a", 300)
    await work(await store.join("g", ["a"]), ids[-1])  # before maintenance may remove where the group begins
    await store.hold("a", "datanode", ids[150])
    await store.truncate("a", ids[-1])
    clock.advance(DAY_S)
    assert 1 <= removed(store) <= 3
    assert [e.id for e in await helpers.take(store, "a", From.EARLIEST, 150)] == ids[150:]
    await store.hold("a", "datanode", None)
    store.retain_now()
    assert segments(store) == 1


# ---- the rules together ----------------------------------------------------------------------------------------------


@st.composite
def journals(draw):
    """Segments with entries of three channels, and what is known of those: (number, id, bytes) per entry."""
    ids = dict.fromkeys((1, 2, 3), 0)
    filled = []
    for _ in range(draw(st.integers(1, 6))):
        entries = []
        for number in draw(st.lists(st.sampled_from(sorted(ids)), max_size=6)):
            ids[number] += 1
            entries.append((number, ids[number], draw(st.integers(1, 20))))
        filled.append(entries)
    policies = st.builds(
        ChannelPolicy,
        retention_s=st.sampled_from([None, 0.0, 2.0, 4.0]),
        retention_bytes=st.none() | st.integers(0, 60),
        delivery=st.sampled_from(Delivery),
    )
    some_id = st.integers(0, 12)
    channels = {}
    for number in draw(st.sets(st.sampled_from(sorted(ids)))):  # the others were dropped
        state = JournalledChannel(number, f"c{number}", draw(policies), truncated_to=draw(some_id))
        state.holds = draw(st.dictionaries(st.sampled_from("xy"), some_id, max_size=2))
        acked = draw(st.dictionaries(st.sampled_from("gh"), some_id, max_size=2))
        state.groups = {group: GroupProgress(encode_id(id)) for group, id in acked.items()}
        channels[number] = channel_of(state, 0, 0)
    return filled, channels


def may_go(entry, channel, younger_bytes, age_s):
    """Whether one entry may go: the rules as documented."""
    _, id, _ = entry
    if channel is None:
        return True
    if any(id >= held for held in channel.holds.values()):
        return False
    policy, groups = channel.policy, channel.groups.values()
    return (
        id < channel.truncated_to
        or (policy.retention_s is not None and age_s >= policy.retention_s)
        or (policy.retention_bytes is not None and younger_bytes >= policy.retention_bytes)
        or (
            policy.delivery is not Delivery.KEEP
            and bool(groups)
            and all(encode_id(id) <= progress.acked_to for progress in groups)
        )
    )


@pytest.mark.slow
@given(journals())
def test_a_segment_goes_when_every_entry_in_it_may(journal):
    filled, channels = journal
    now_ms = 1000 * (len(filled) - 1)  # one segment was full each second; the last is in use
    sealed = []
    for place, entries in enumerate(filled[:-1]):
        sealed.append((place, SegmentSummary(1000 * (place + 1), 0, 0, extents(entries))))
    gone = expendable(sealed, extents(filled[-1]), channels, lambda summary: now_ms - summary.sealed_ms)
    expected = []
    for place, entries in enumerate(filled[:-1]):
        later = [entry for segment in filled[place + 1 :] for entry in segment]
        younger = {number: sum(size for n, _, size in later if n == number) for number in (1, 2, 3)}
        age_s = (now_ms - 1000 * (place + 1)) / 1000
        if not all(may_go(entry, channels.get(entry[0]), younger[entry[0]], age_s) for entry in entries):
            break
        expected.append(place)
    assert gone == expected


def extents(entries):
    found = {}
    for number, id, size in entries:
        found[number] = id, size + found.get(number, (0, 0))[1]
    return found
