"""The channel owner: acknowledged means in the log, a tick never lies, a retry is recognised, an owner can be lost."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter

import pytest

from tidewal.runtime.clock import add_ms
from tidewal.runtime.errors import (
    BadRecord,
    MessageTooLarge,
    Overloaded,
    TidewalError,
    Unavailable,
)
from tidewal.runtime.log.record import BatchPart, Record, RecordType
from tidewal.runtime.ownership import AckManager, Appended
from tidewal.runtime.testing.clock import run_virtual
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryWal

# ---- time ------------------------------------------------------------------------------------------------------------


def test_timestamps_are_released_once_each_in_order_and_hold_the_watermark(rng):
    acks: AckManager[int] = AckManager()
    opened, released, now, watermark = {}, [], 0, 0
    while len(released) < 1_000:
        now += 1
        if len(opened) < 50 and rng.random() < 0.55:
            opened[now] = acks.begin(now, now)
            if rng.random() < 0.1:
                acks.withdraw(opened.pop(now))
        elif opened:
            ts = rng.choice(list(opened))
            released += acks.finish(opened.pop(ts))
        assert acks.watermark(now) < min(opened, default=now + 1)
        assert acks.watermark(now) >= watermark
        watermark = acks.watermark(now)
        assert len(acks) >= len(opened)
    assert released == sorted(set(released))


@pytest.mark.parametrize("round", range(4))
def test_ticks_never_lie_under_delays_and_failures(seed, round, make_world):
    rng = random.Random(seed + round)
    world = make_world()

    async def main() -> None:
        await world.channels("a", "b")
        plan = FaultPlan(seed + round, Rates(fail=0.2, delay=0.4, drop=0.2, duplicate=0.2))
        owner = world.owner(MemoryWal(world.log, plan))
        plan.rates, rates = Rates(), plan.rates
        await owner.own("a", "b")
        plan.rates = rates
        owner.channel_owner.renew(add_ms(owner.limit, 600_000))
        following, unordered = world.follow("a", "b"), world.follow("a", "b", ordered=False)
        outcomes: dict[bytes, Appended | TidewalError] = {}
        sizes: dict[bytes, int] = {}
        answered: list[int] = []
        watermarks: list[int] = []

        async def produce(name: str) -> None:
            for number in range(60):
                body = f"{name}{number}".encode()
                pairs = [(channel, world.rows(body)) for channel in rng.sample(["a", "b", "b", "a"], rng.randint(1, 3))]
                sizes[body] = len(pairs)
                outcomes[body] = await world.outcome(owner.channel_owner.append(pairs))
                if isinstance(outcomes[body], Appended):
                    answered.append(outcomes[body].ts)
                await asyncio.sleep(rng.random() * 0.03)

        async def beat() -> None:
            while True:
                owner.channel_owner.tick_all()
                watermarks.append((await owner.channel_owner.sync()).time)
                if rng.random() < 0.3:
                    await world.outcome(owner.channel_owner.tick_now())
                await asyncio.sleep(0.02)

        beats = asyncio.ensure_future(beat())
        await asyncio.gather(*(produce(name) for name in "xyz"))
        beats.cancel()
        plan.rates = Rates()
        await owner.channel_owner.tick_now()
        owner.channel_owner.tick_all()
        await asyncio.sleep(1)

        assert watermarks == sorted(watermarks)
        assert answered == sorted(answered)
        for channel in "ab":
            ticked_to = 0
            for record in world.records(channel):
                if record.type is RecordType.TIME_TICK:
                    ticked_to = max(ticked_to, record.ts)
                elif record.type is RecordType.ROWS:
                    assert record.ts > ticked_to
        acked = Counter({body: sizes[body] for body, outcome in outcomes.items() if isinstance(outcome, Appended)})
        assert 0 < len(acked) < len(outcomes)
        for follower in (following, unordered):
            packs = await follower.stop()
            for pack in packs:
                assert all(pack.begin_ts < message.ts <= pack.end_ts for message in pack.messages)
            assert Counter(bytes(message.body) for message in follower.messages) == acked
            assert follower.stream.late == 0
        await owner.channel_owner.close()

    run_virtual(main(), world.source)


async def test_idle_channels_store_nothing_and_their_readers_time_goes_on(world):
    await world.channels("a", "b")
    owner = world.owner()
    await owner.own("a", "b")
    following = world.follow("a", "b")
    await owner.channel_owner.append([("a", world.rows())])
    owner.channel_owner.tick_all()
    before = {name: len(world.records(name)) for name in "ab"}
    times = []
    for _ in range(100):
        world.source.advance(0.02)
        owner.channel_owner.tick_all()
        await world.settle()
        times.append(following.stream.end_ts)
    assert {name: len(world.records(name)) for name in "ab"} == before
    assert times == sorted(set(times))
    assert times[-1] > add_ms(times[0], 1_900)
    await following.stop()


async def test_a_tick_asked_for_during_a_tick_follows_it_at_once_and_is_shared(world, holding_wal):
    await world.channels("a")
    wal = holding_wal(world.log)
    owner = world.owner(wal)
    await owner.own("a")
    await owner.channel_owner.append([("a", world.rows())])
    wal.holding = True
    first = owner.channel_owner.tick_now()
    append = owner.channel_owner.append([("a", world.rows())])
    others = [owner.channel_owner.tick_now() for _ in range(10)]
    assert len(wal.held) == 2
    wal.held.pop(0)()  # the first tick is stored: another cannot cover what is still in flight
    await world.settle()
    assert first.done()
    wal.let_go()
    appended = await append
    await asyncio.gather(*others)
    await owner.channel_owner.tick_now()
    ticks = [record.ts for record in world.records("a") if record.type is RecordType.TIME_TICK]
    assert ticks[-1] >= appended.ts
    assert len(ticks) <= 3


async def test_a_tick_overtaken_by_its_appends_answer_is_followed_by_another(world, holding_wal):
    await world.channels("a")
    wal = holding_wal(world.log)
    owner = world.owner(wal)
    await owner.own("a")
    await owner.channel_owner.append([("a", world.rows())])
    wal.holding = True
    append = owner.channel_owner.append([("a", world.rows())])
    owner.channel_owner.tick_all()  # its tick stands below the append's timestamp, and behind it in the log
    wal.let_go()
    appended = await append
    owner.channel_owner.tick_all()
    assert max(r.ts for r in world.records("a") if r.type is RecordType.TIME_TICK) >= appended.ts


async def test_time_is_announced_while_the_loop_is_blocked(world):
    await world.channels("a")
    owner = world.owner()
    await owner.own("a")
    await owner.channel_owner.append([("a", world.rows())])
    following = world.follow("a")
    await world.settle()
    heartbeat = threading.Thread(target=lambda: [owner.channel_owner.tick_all() for _ in range(3)])
    heartbeat.start()
    heartbeat.join()  # blocks the loop
    beats = len(world.log.channels["heartbeats"].entries)
    assert beats >= 3
    assert world.records("a")[-1].type is RecordType.TIME_TICK
    for _ in range(5):
        await world.settle()
    assert following.stream.end_ts >= world.records("a")[-1].ts
    await following.stop()


# ---- batches ---------------------------------------------------------------------------------------------------------


async def test_records_that_share_a_channel_are_parts_of_one_whole(world):
    await world.channels("a", "b")
    owner = world.owner()
    await owner.own("a", "b")
    await owner.channel_owner.append(
        [("a", world.rows(b"1", "v0")), ("b", world.rows(b"2")), ("a", world.rows(b"3", "v1"))]
    )
    first, second = (record for record in world.records("a") if record.type is RecordType.ROWS)
    assert (first.part, second.part) == (BatchPart(first.ts, 0, 2), BatchPart(first.ts, 1, 2))
    assert world.records("b")[-1].part is None
    following = world.follow("a", "b")
    owner.channel_owner.tick_all()
    await world.settle()
    assert [[bytes(m.body) for m in pack.messages] for pack in await following.stop() if pack.messages] == [
        [b"1", b"3", b"2"]
    ]


async def test_an_append_that_is_refused_changes_nothing(world, holding_wal):
    await world.channels("a")
    wal = holding_wal(world.log)
    owner = world.owner(wal, inflight_bytes=1_000)
    await owner.own("a")
    before = await owner.channel_owner.sync()
    with pytest.raises(MessageTooLarge):
        owner.channel_owner.append([("a", world.rows(bytes(6 * 1024 * 1024)))])
    with pytest.raises(BadRecord):
        owner.channel_owner.append([("a", Record(RecordType.ROWS, tags={"t": "x" * 300_000}))])
    with pytest.raises(Unavailable):
        owner.channel_owner.append([("unknown", world.rows())])
    assert (await owner.channel_owner.sync()).time > before.time
    wal.holding = True
    first = owner.channel_owner.append([("a", world.rows(bytes(900)))])
    with pytest.raises(Overloaded) as caught:
        owner.channel_owner.append([("a", world.rows(bytes(200)))])
    assert caught.value.retryable
    assert (await owner.channel_owner.sync()).time < before.time + (1 << 30)
    wal.let_go()
    await first
    await owner.channel_owner.append([("a", world.rows(bytes(200)))])
    assert [record.cseq for record in world.records("a")] == [1, 2, 3]


async def test_an_append_returns_the_ids_of_its_records(world):
    await world.channels("a", "b")
    owner = world.owner()
    await owner.own("a", "b")
    appended = await owner.channel_owner.append([("a", world.rows()), ("b", world.rows())])
    assert appended.ids == (world.records("a")[-1].id, world.records("b")[-1].id)
