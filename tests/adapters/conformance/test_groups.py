"""Any backend: consumer groups. Who gets what, what is delivered again and what is not, and how it all ends."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from tidewal.runtime.errors import ChannelNotFound, Closed, Fenced, InvalidRequest, PositionLost
from tidewal.runtime.groups.processing import Semantics, process
from tidewal.runtime.log.wal import Append, ChannelPolicy, Delivery, From, FromId, FromTime

PLAIN = ChannelPolicy()
QUEUE = ChannelPolicy(delivery=Delivery.QUEUE)
UNTIL_ACKED = ChannelPolicy(delivery=Delivery.UNTIL_ACKED)


@pytest.fixture(autouse=True)
def _needs_groups(backend):
    backend.needs("groups")


async def create(wal, *channels, policy=PLAIN):
    for channel in channels:
        await wal.create_channel(channel, policy)


async def fill(wal, channel, count, first=0):
    return await wal.append_many([Append(channel, str(i).encode(), i * 10) for i in range(first, first + count)])


async def collect(member, count, *, acknowledge=True):
    """The next `count` entries, by channel."""
    found: dict[str, list[bytes]] = {}
    got = 0
    async with asyncio.timeout(20):
        while got < count:
            delivered = await anext(member)
            found.setdefault(delivered.channel, []).extend(entry.id for entry in delivered.entries)
            got += len(delivered.entries)
            if acknowledge:
                await member.acknowledge(delivered)
    assert got == count, f"{got - count} entries more than were written"
    return found


async def one(member, entries=1):
    """A batch of at least so many entries: one that a broker has handed over in parts is taken again."""
    async with asyncio.timeout(20):
        while len((delivered := await anext(member)).entries) < entries:
            member.redeliver(delivered)
        return delivered


async def position(wal, group, channel):
    return {info.name: info.positions for info in await wal.groups()}.get(group, {}).get(channel)


async def having(member, *channels):
    """Wait until the member has just these channels. It acknowledges nothing, so nothing is taken from its feeds."""
    async with asyncio.timeout(20):
        while member.channels != set(channels):  # noqa: ASYNC110 -- the contract has no event for it
            await asyncio.sleep(0)


async def idle(member):
    """Make sure that the member gets nothing."""
    waiting = asyncio.ensure_future(anext(member))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not waiting.done(), waiting
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


def test_groups_are_declared(wal):
    assert wal.capabilities.groups
    assert wal.capabilities.individual_acks
    assert wal.capabilities.atomic_commits


@pytest.mark.slow
async def test_each_group_gets_everything_in_order(wal):
    await create(wal, "a")
    members = [await wal.join(f"group-{n}", ["a"]) for n in range(11)]
    ids = await fill(wal, "a", 10)
    for member in members:
        assert await collect(member, 10) == {"a": ids}
    assert [await position(wal, f"group-{n}", "a") for n in range(11)] == [ids[-1]] * 11


async def test_channels_are_divided_and_each_is_with_one_member(wal):
    channels = [f"c{n}" for n in range(7)]
    await create(wal, *channels)
    first = await wal.join("g", channels)
    assert first.channels == set(channels)
    second = await wal.join("g", channels)
    third = await wal.join("g", ["c*"])
    async with asyncio.timeout(20):
        while sorted(len(m.channels) for m in (first, second, third)) != [2, 2, 3]:  # noqa: ASYNC110 -- no event
            await asyncio.sleep(0)
    assert sorted([*first.channels, *second.channels, *third.channels]) == channels
    infos = await wal.groups()
    assert [info.name for info in infos] == ["g"]
    assert infos[0].members == {m.id: m.channels for m in (first, second, third)}


async def test_where_a_group_begins(wal):
    await create(wal, "a")
    ids = await fill(wal, "a", 3)
    late = await wal.join("late", ["a"], start=From.LATEST)
    early = await wal.join("early", ["a"])
    new = await fill(wal, "a", 2, 3)
    assert await collect(early, 5) == {"a": ids + new}
    assert await collect(late, 2) == {"a": new}


async def test_a_first_position_outlives_a_member_that_acknowledged_nothing(wal):
    await create(wal, "a")
    await fill(wal, "a", 3)
    member = await wal.join("late", ["a"], start=From.LATEST)
    await member.aclose()
    new = await fill(wal, "a", 2, 3)
    member = await wal.join("late", ["a"], start=From.LATEST)
    assert await collect(member, 2) == {"a": new}


async def test_a_new_channel_goes_to_a_pattern_from_its_first_entry(wal):
    await create(wal, "orders-1")
    member = await wal.join("g", ["orders-*"], start=From.LATEST)
    await create(wal, "orders-2", "returns-1")
    ids = await fill(wal, "orders-2", 3)
    await fill(wal, "returns-1", 3)
    assert await collect(member, 3) == {"orders-2": ids}
    assert member.channels == {"orders-1", "orders-2"}


async def test_a_dropped_channel_is_reported_by_name_and_passed_over_by_pattern(wal):
    await create(wal, "a", "b")
    named = await wal.join("named", ["a", "b"])
    matched = await wal.join("matched", ["*"])
    waiting = asyncio.ensure_future(anext(named))
    await idle(matched)
    await wal.drop_channel("a")
    with pytest.raises(ChannelNotFound):
        async with asyncio.timeout(20):
            await waiting
    ids = await fill(wal, "b", 2)
    assert await collect(named, 2) == {"b": ids}
    assert await collect(matched, 2) == {"b": ids}


async def test_a_channel_made_again_is_read_from_its_start(wal):
    await create(wal, "a")
    member = await wal.join("g", ["*"])
    await fill(wal, "a", 5)
    await collect(member, 5)
    await wal.drop_channel("a")
    await create(wal, "a")
    ids = await fill(wal, "a", 3)
    assert await collect(member, 3) == {"a": ids}


async def test_joining_moves_channels_and_nothing_is_lost_or_doubled(wal):
    channels = [f"c{n}" for n in range(4)]
    await create(wal, *channels)
    for channel in channels:
        await fill(wal, channel, 5)
    first = await wal.join("g", channels)
    seen = await collect(first, 20)
    second = await wal.join("g", channels)
    async with asyncio.timeout(20):
        while len(second.channels) < 2:
            await idle(first)
    expected = {channel: await fill(wal, channel, 5, 5) for channel in channels}
    mine, others = await collect(first, 10), await collect(second, 10)
    assert set(mine) == set(first.channels)
    assert set(others) == set(second.channels)
    assert {**mine, **others} == expected
    assert all(len(ids) == 5 for ids in seen.values())


async def test_a_channel_is_kept_until_what_was_delivered_is_acknowledged(wal):
    await create(wal, "a")
    first = await wal.join("g", ["a"])
    ids = await fill(wal, "a", 3)
    delivered = await one(first, 3)
    await create(wal, "b")
    second = await wal.join("g", ["b", "a"])
    third = await wal.join("g", ["a"])
    await idle(second)
    await first.acknowledge(delivered)
    await first.aclose()
    taker = await wal.join("g", ["a"])
    new = await fill(wal, "a", 2, 3)
    async with asyncio.timeout(20):
        readers = [asyncio.ensure_future(anext(member)) for member in (second, third, taker)]
        done, waiting = await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
    assert [[entry.id for entry in task.result().entries] for task in done] == [new]
    assert ids[-1] < new[0]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_what_is_not_acknowledged_is_delivered_again_after_a_leave(wal):
    await create(wal, "a")
    ids = await fill(wal, "a", 10)
    first = await wal.join("g", ["a"])
    second = await wal.join("g", ["a"])
    holder, other = (first, second) if first.channels else (second, first)
    delivered = await one(holder, 10)
    await holder.acknowledge(delivered, ids[:4])
    await holder.acknowledge(delivered, [ids[6]])
    await holder.aclose()
    assert await collect(other, 5) == {"a": [ids[4], ids[5], *ids[7:]]}
    assert await position(wal, "g", "a") == ids[-1]


async def test_an_output_that_is_no_bytes_is_refused_and_the_batch_stays(wal):
    await create(wal, "a", "out")
    await fill(wal, "a", 2)
    member = await wal.join("g", ["a"])
    delivered = await one(member)
    for payload in ("text", 5):
        with pytest.raises(InvalidRequest, match="encode it first"):
            await member.commit([delivered], [Append("out", b"good"), Append("out", payload)])
    assert await wal.latest_id("out") is None
    assert await member.commit([delivered], [Append("out", b"good")]) == [await wal.latest_id("out")]


async def test_an_acknowledgement_under_a_lease_that_is_over_is_fenced(wal):
    await create(wal, "a", "out")
    ids = await fill(wal, "a", 4)
    member = await wal.join("g", ["a"])
    delivered = await one(member)
    await member.seek("a", FromId(ids[1], inclusive=True))
    with pytest.raises(Fenced):
        await member.acknowledge(delivered)
    with pytest.raises(Fenced):
        await member.commit([delivered], [Append("out", b"never")])
    assert await wal.latest_id("out") is None
    assert await collect(member, 3) == {"a": ids[1:]}


async def test_single_acknowledgements_become_one_position(wal):
    await create(wal, "a")
    ids = await fill(wal, "a", 6)
    member = await wal.join("g", ["a"])
    delivered = await one(member, 6)
    for id in (ids[1], ids[2], ids[4]):
        await member.acknowledge(delivered, [id])
    assert await position(wal, "g", "a") < ids[0]
    await member.acknowledge(delivered, [ids[0]])
    assert await position(wal, "g", "a") == ids[2]
    await member.acknowledge(delivered, [ids[0]])  # again: fine
    await asyncio.gather(*(member.acknowledge(delivered, [id]) for id in (ids[5], ids[3])))
    assert await position(wal, "g", "a") == ids[5]


async def test_ids_that_were_not_delivered_cannot_be_acknowledged(wal):
    await create(wal, "a", "b")
    await fill(wal, "a", 3)
    (other,) = await fill(wal, "b", 1)
    member = await wal.join("g", ["a"])
    delivered = await one(member)
    with pytest.raises(InvalidRequest):
        await member.acknowledge(delivered, [bytes(len(other))])
    assert await position(wal, "g", "a") < delivered.entries[0].id


async def test_positions_outlive_the_log(backend):
    wal = await backend.wal()
    await create(wal, "a")
    ids = await fill(wal, "a", 10)
    member = await wal.join("g", ["a"])
    delivered = await one(member, 10)
    await member.acknowledge(delivered, ids[:3])
    await member.acknowledge(delivered, [ids[5], ids[8]])
    await wal.close()
    wal = await backend.wal()
    assert await position(wal, "g", "a") == ids[2]
    member = await wal.join("g", ["a"])
    assert await collect(member, 5) == {"a": [ids[3], ids[4], ids[6], ids[7], ids[9]]}


async def test_outputs_and_positions_are_committed_together(backend):
    wal = await backend.wal()
    await create(wal, "a", "b", "out")
    ids = {"a": await fill(wal, "a", 3), "b": await fill(wal, "b", 3)}
    member = await wal.join("g", ["a", "b"])
    delivered = [await one(member, 3), await one(member, 3)]
    assert {each.channel for each in delivered} == {"a", "b"}
    outputs = [Append("out", each.channel.encode()) for each in delivered]
    written = await member.commit(delivered, outputs)
    with pytest.raises(InvalidRequest):  # the same once more would double the outputs
        await member.commit(delivered, outputs)
    await wal.close()
    wal = await backend.wal()
    assert [await position(wal, "g", channel) for channel in "ab"] == [ids["a"][-1], ids["b"][-1]]
    assert await wal.latest_id("out") == written[-1]
    member = await wal.join("g", ["a", "b"])
    await idle(member)


async def test_a_commit_that_is_refused_moves_nothing(wal):
    await create(wal, "a")
    ids = await fill(wal, "a", 3)
    member = await wal.join("g", ["a"])
    delivered = await one(member, 3)
    with pytest.raises(ChannelNotFound):
        await member.commit([delivered], [Append("nowhere", b"x")])
    assert await position(wal, "g", "a") < ids[0]
    await member.acknowledge(delivered)
    assert await position(wal, "g", "a") == ids[-1]


@pytest.mark.parametrize(
    ("start", "first"),
    [
        (From.EARLIEST, 0),
        (From.LATEST, 10),
        (FromTime(35), 4),
        (FromTime(1000), 10),
        ("with", 6),
        ("behind", 7),
    ],
)
async def test_seeking(wal, start, first):
    await create(wal, "a")
    ids = await fill(wal, "a", 10)
    if isinstance(start, str):
        start = FromId(ids[6], inclusive=start == "with")
    member = await wal.join("g", ["a"])
    await collect(member, 10)
    await member.seek("a", start)
    ids += await fill(wal, "a", 1, 10)
    assert await collect(member, 11 - first) == {"a": ids[first:]}
    await member.aclose()
    with pytest.raises(Fenced):
        await member.seek("a", start)
    await wal.seek_group("g", "a", start)
    ids += await fill(wal, "a", 1, 11)
    again = await wal.join("g", ["a"])
    first = 11 if first == 10 else first  # the latest is another one now
    assert await collect(again, 12 - first) == {"a": ids[first:]}


async def test_seeking_a_group_is_refused_while_somebody_has_the_channel(wal):
    await create(wal, "a")
    ids = await fill(wal, "a", 3)
    member = await wal.join("g", ["a"])
    with pytest.raises(InvalidRequest):
        await wal.seek_group("g", "a", From.LATEST)
    with pytest.raises(PositionLost):
        await member.seek("a", FromId(b"\xff" * len(ids[0])))
    with pytest.raises(ChannelNotFound):
        await wal.seek_group("g", "nowhere", From.LATEST)
    await member.aclose()
    await wal.seek_group("g", "a", FromId(ids[1]))
    assert await position(wal, "g", "a") == ids[1]
    await wal.seek_group("never-joined", "a", FromId(ids[0]))
    member = await wal.join("never-joined", ["a"], start=From.LATEST)
    assert await collect(member, 2) == {"a": ids[1:]}


async def test_dropping_a_group(wal):
    await create(wal, "a")
    ids = await fill(wal, "a", 3)
    member = await wal.join("g", ["a"])
    await collect(member, 3)
    with pytest.raises(InvalidRequest):
        await wal.drop_group("g")
    await member.aclose()
    await wal.drop_group("g")
    await wal.drop_group("g")
    assert await wal.groups() == []
    member = await wal.join("g", ["a"])
    assert await collect(member, 3) == {"a": ids}


async def test_a_queue_forgets_what_is_acknowledged_and_has_one_group(wal, helpers):
    await create(wal, "jobs", policy=QUEUE)
    ids = await fill(wal, "jobs", 5)
    member = await wal.join("workers", ["jobs"])
    with pytest.raises(InvalidRequest):
        await wal.join("others", ["jobs"])
    delivered = await one(member, 5)
    await member.acknowledge(delivered, ids[:3])
    assert (await wal.describe("jobs")).first_id == ids[3]
    assert [entry.id for entry in await helpers.take(wal, "jobs", From.EARLIEST, 2)] == ids[3:]
    with pytest.raises(PositionLost):
        await member.seek("jobs", FromId(ids[0]))
    await member.acknowledge(delivered)
    new = await fill(wal, "jobs", 1, 5)
    assert [entry.id for entry in await helpers.take(wal, "jobs", From.EARLIEST, 1)] == new
    everything = await wal.join("others", ["*"])  # a pattern passes over it
    assert everything.channels == set()
    await everything.aclose()
    await member.aclose()
    with pytest.raises(InvalidRequest):  # it belongs to the group, not to its members
        await wal.join("others", ["jobs"])
    await wal.drop_group("workers")
    taking_over = await wal.join("others", ["jobs"])
    assert await collect(taking_over, 1) == {"jobs": new}


async def test_what_a_seek_passes_over_in_a_queue_is_done_and_goes(wal, helpers):
    await create(wal, "jobs", policy=QUEUE)
    ids = await fill(wal, "jobs", 5)
    member = await wal.join("workers", ["jobs"])
    await member.seek("jobs", FromId(ids[1]))
    assert (await wal.describe("jobs")).first_id == ids[2]
    assert await collect(member, 3, acknowledge=False) == {"jobs": ids[2:]}
    await member.aclose()
    await wal.seek_group("workers", "jobs", FromId(ids[3]))
    assert [entry.id for entry in await helpers.take(wal, "jobs", From.EARLIEST, 1)] == ids[4:]
    await wal.seek_group("workers", "jobs", From.LATEST)
    new = await fill(wal, "jobs", 1, 5)
    assert [entry.id for entry in await helpers.take(wal, "jobs", From.EARLIEST, 1)] == new


async def test_a_queue_tells_its_first_entry_and_goes_on_when_all_of_it_was_done(wal, helpers):
    await create(wal, "jobs", policy=QUEUE)
    ids = [*await fill(wal, "jobs", 5), *await fill(wal, "jobs", 5, 5)]  # two batches, on brokers
    member = await wal.join("workers", ["jobs"])
    await member.seek("jobs", FromId(ids[6]))
    assert (await wal.describe("jobs")).first_id == ids[7]
    for removed in (FromId(ids[0]), FromId(ids[6], inclusive=True)):
        with pytest.raises(PositionLost) as caught:
            await member.seek("jobs", removed)
        assert caught.value.first_available == ids[7]
    await member.seek("jobs", FromId(ids[6]))
    assert [entry.id for entry in await helpers.take(wal, "jobs", FromId(ids[6]), 3)] == ids[7:]
    assert await collect(member, 3) == {"jobs": ids[7:]}
    last = ids[9]
    for earliest in (True, False, True):
        info = await wal.describe("jobs")
        assert (info.first_id, info.latest_id) == (None, last)
        await member.seek("jobs", From.EARLIEST if earliest else FromId(last))
        new = await fill(wal, "jobs", 2)
        assert await collect(member, 2) == {"jobs": new}
        last = new[1]
    await member.aclose()


async def cut_off(backend, helpers):
    """A WAL where retention has removed what the group "dead" has yet to read of channel a, and what is left."""
    wal = await backend.wal()
    await create(wal, "a", "b")
    dead = await wal.join("dead", ["a"])
    await dead.aclose()
    await fill(wal, "a", 10)
    await helpers.fill_segment(wal)
    left = await fill(wal, "a", 3, 10)
    await backend.remove_before(wal, "a", left[0])
    return wal, left


async def test_a_group_that_retention_has_cut_off_is_told(backend, helpers):
    wal, left = await cut_off(backend, helpers)
    member = await wal.join("dead", ["a", "b"])
    other = await fill(wal, "b", 1)
    for _ in range(2):  # it stays so until somebody decides
        with pytest.raises(PositionLost) as lost:
            await collect(member, 2)
        assert lost.value.first_available == left[0]
    assert lost.value.requested is not None
    while await position(wal, "dead", "b") != other[-1]:  # the other channel goes on
        with suppress(PositionLost):
            await collect(member, 1)
    await member.seek("a", From.EARLIEST)
    delivered = await one(member)
    while delivered.channel != "a":
        delivered = await one(member)
    assert [entry.id for entry in delivered.entries] == left


@pytest.mark.parametrize("reset_to", list(From))
async def test_with_reset_to_it_goes_on_by_itself(backend, helpers, reset_to):
    wal, left = await cut_off(backend, helpers)
    member = await wal.join("dead", ["a"], reset_to=reset_to)
    waiting = asyncio.ensure_future(one(member))
    if reset_to is From.LATEST:
        async with asyncio.timeout(20):
            while await position(wal, "dead", "a") != left[-1]:  # noqa: ASYNC110 -- the contract has no event for it
                await asyncio.sleep(0)
    new = await fill(wal, "a", 1, 13)
    delivered = await waiting
    assert delivered.entries[0].id == (left if reset_to is From.EARLIEST else new)[0]


@pytest.mark.slow
async def test_a_member_that_blocks_the_loop_stays(wal):
    await create(wal, "a")
    ids = await fill(wal, "a", 2)
    member = await wal.join("g", ["a"], session_timeout_s=1.0)
    delivered = await one(member, 2)
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        pass
    await member.acknowledge(delivered)
    assert await position(wal, "g", "a") == ids[-1]


async def test_turns_go_round_the_channels(wal):
    await create(wal, "busy", "quiet")
    member = await wal.join("g", ["busy", "quiet"])
    for _ in range(3):
        await fill(wal, "busy", 600)
    await fill(wal, "quiet", 1)
    await having(member, "busy", "quiet")
    order = []
    async with asyncio.timeout(20):
        while "quiet" not in order:
            order.append((await anext(member)).channel)
            await fill(wal, "busy", 10)
            assert len(order) < 50, "the quiet channel starves"


async def test_a_member_whose_leaving_was_cancelled_leaves_all_the_same(wal):
    """As in a worker that ends its tasks: they stop iterating, leaving among them, and it joins again."""
    await create(wal, "a", "b")
    for steps in range(6):
        leaving = await wal.join("g", ["a", "b"])
        await having(leaving, "a", "b")
        begun = asyncio.ensure_future(leaving.aclose())
        for _ in range(steps):
            await asyncio.sleep(0)
        begun.cancel()
        await asyncio.gather(begun, return_exceptions=True)
        await leaving.aclose()
        (info,) = await wal.groups()
        assert leaving.id not in info.members, steps


async def test_leaving_and_closing_end_the_iteration(wal):
    await create(wal, "a")
    leaving, staying = await wal.join("one", ["a"]), await wal.join("two", ["a"])
    waiting = [asyncio.ensure_future(anext(member, None)) for member in (leaving, staying)]
    await asyncio.sleep(0)
    await leaving.aclose()
    await leaving.aclose()
    async with asyncio.timeout(20):
        assert await waiting[0] is None
    assert not waiting[1].done()
    await wal.close()
    async with asyncio.timeout(20):
        assert await waiting[1] is None
    for call in (wal.join("g", ["a"]), wal.groups(), wal.drop_group("g"), wal.seek_group("g", "a", From.LATEST)):
        with pytest.raises(Closed):
            await call


async def test_acknowledging_after_leaving_is_refused(wal):
    await create(wal, "a")
    await fill(wal, "a", 1)
    member = await wal.join("g", ["a"])
    delivered = await one(member)
    await member.aclose()
    with pytest.raises(Closed):
        await member.acknowledge(delivered)


@pytest.mark.parametrize(
    ("group", "channels", "error"),
    [
        ("", ["a"], InvalidRequest),
        ("g/h", ["a"], InvalidRequest),
        ("g*", ["a"], InvalidRequest),
        ("x" * 251, ["a"], InvalidRequest),
        ("g", [], InvalidRequest),
        ("g", ["a", "b/c"], InvalidRequest),
        ("g", [""], InvalidRequest),
        ("g", ["nowhere"], ChannelNotFound),
        ("g", ["fleeting"], InvalidRequest),
    ],
)
async def test_bad_names(wal, group, channels, error):
    await create(wal, "a")
    await create(wal, "fleeting", policy=ChannelPolicy(ephemeral=True))
    with pytest.raises(error):
        await wal.join(group, channels)
    assert await wal.groups() == []


async def test_what_one_group_has_not_acknowledged_stays(wal):
    await create(wal, "a", policy=UNTIL_ACKED)
    ids = await fill(wal, "a", 4)
    first, other = await wal.join("one", ["a"]), await wal.join("two", ["a"])
    delivered = await one(first)
    await first.acknowledge(delivered)
    assert (await wal.describe("a")).first_id == ids[0]  # the other group has had nothing of it
    assert await collect(other, 4) == {"a": ids}


@pytest.mark.parametrize(
    ("semantics", "worked", "copied"),
    [
        (Semantics.AT_MOST_ONCE, [b"0", b"2"], [b"2"]),
        (Semantics.AT_LEAST_ONCE, [b"0", b"0", b"2"], [b"0", b"2"]),
        (Semantics.EXACTLY_ONCE, [b"0", b"0", b"2"], [b"0", b"2"]),
    ],
)
async def test_one_argument_says_what_becomes_of_work_that_failed_in_the_middle(
    wal, helpers, semantics, worked, copied
):
    await create(wal, "a", "out")
    seen = []

    async def handle(delivered):
        seen.extend(helpers.payloads(delivered.entries))
        if len(seen) == 1:
            raise ArithmeticError
        return [Append("out", bytes(entry.payload)) for entry in delivered.entries]

    await fill(wal, "a", 1)
    member = await wal.join("g", ["a"])
    with pytest.raises(ArithmeticError):
        await process(wal, member, handle, semantics)
    await member.aclose()
    member = await wal.join("g", ["a"])
    await fill(wal, "a", 1, 2)
    processing = asyncio.create_task(process(wal, member, handle, semantics))
    found = await helpers.take(wal, "out", From.EARLIEST, len(copied))
    await member.aclose()
    with suppress(Closed):  # where it left before the last acknowledgement
        await processing
    assert seen == worked
    assert helpers.payloads(found) == copied
