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
    Closed,
    Fenced,
    MessageTooLarge,
    OutcomeUnknown,
    Overloaded,
    TidewalError,
    Unavailable,
)
from tidewal.runtime.log.record import BatchPart, Record, RecordType, encode
from tidewal.runtime.log.wal import Append, From
from tidewal.runtime.ownership import AckManager, Appended, ChannelGrant, ChannelOwnerObserver
from tidewal.runtime.streams.channel_reader import Granted
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
                watermarks.append(owner.channel_owner.sync_point().time)
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
    before = owner.channel_owner.sync_point()
    with pytest.raises(MessageTooLarge):
        owner.channel_owner.append([("a", world.rows(bytes(6 * 1024 * 1024)))])
    with pytest.raises(BadRecord):
        owner.channel_owner.append([("a", Record(RecordType.ROWS, tags={"t": "x" * 300_000}))])
    with pytest.raises(Unavailable):
        owner.channel_owner.append([("unknown", world.rows())])
    assert owner.channel_owner.sync_point().time > before.time
    wal.holding = True
    first = owner.channel_owner.append([("a", world.rows(bytes(900)))])
    with pytest.raises(Overloaded) as caught:
        owner.channel_owner.append([("a", world.rows(bytes(200)))])
    assert caught.value.retryable
    assert owner.channel_owner.sync_point().time < before.time + (1 << 30)
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


# ---- ownership -------------------------------------------------------------------------------------------------------


async def test_nothing_is_acknowledged_before_the_fence_is_in_the_catalog(world):
    await world.channels("a")
    owner = world.owner()
    grant = ChannelGrant("a", 1, 0, add_ms(owner.clock.now(), 1_000))
    fences = await owner.channel_owner.acquire([grant])
    assert world.records("a")[-1].id == fences["a"]
    with pytest.raises(Unavailable):
        owner.channel_owner.append([("a", world.rows())])
    owner.channel_owner.activate(["a"])
    assert (await owner.channel_owner.append([("a", world.rows())])).ts > 0


async def test_beyond_its_limit_an_owner_neither_stamps_nor_promises(world):
    await world.channels("a")
    owner = world.owner()
    await owner.own("a")
    following = world.follow("a")
    world.source.advance(10.1)
    with pytest.raises(Unavailable):
        owner.channel_owner.append([("a", world.rows())])
    with pytest.raises(Unavailable):
        owner.channel_owner.sync_point()
    owner.channel_owner.tick_all()
    assert isinstance(await world.outcome(owner.channel_owner.tick_now()), Unavailable)
    await world.settle()
    assert following.stream.end_ts < owner.limit
    owner.channel_owner.renew(add_ms(owner.limit, 5_000))
    assert (await owner.channel_owner.append([("a", world.rows())])).ts > owner.limit
    await following.stop()


async def test_the_lowest_limit_of_the_open_channels_holds_for_all(world):
    await world.channels("a", "b")
    owner = world.owner()
    await owner.own("a")
    await owner.channel_owner.acquire([ChannelGrant("b", 1, 0, add_ms(owner.limit, 10_000))])
    owner.channel_owner.activate(["b"])
    world.source.advance(10.1)
    with pytest.raises(Unavailable):
        owner.channel_owner.sync_point()


async def test_a_new_owner_stamps_above_the_old_limit_though_the_wall_clock_went_back(world):
    await world.channels("a")
    old = world.owner()
    await old.own("a")
    await old.channel_owner.append([("a", world.rows(b"old"))])
    world.source.jump_wall(-3_600_000)
    new = world.owner()
    await new.own("a", term=2, previous_limit=old.limit)
    assert (await new.channel_owner.append([("a", world.rows(b"new"))])).ts > old.limit


async def test_what_a_superseded_owner_still_writes_is_never_seen(world):
    await world.channels("a")
    old, new = world.owner(), world.owner()
    await old.own("a")
    await old.channel_owner.append([("a", world.rows(b"before"))])
    following = world.follow("a")
    fences = await new.own("a", term=2, previous_limit=old.limit)
    await old.channel_owner.append([("a", world.rows(b"zombie"))])
    old.channel_owner.tick_all()
    await new.channel_owner.append([("a", world.rows(b"after"))])
    new.channel_owner.tick_all()
    await world.settle()
    assert [bytes(m.body) for m in following.messages] == [b"before", b"after"]
    await following.stop()
    late = world.owner()
    await late.own("a", term=3, previous_limit=new.limit, fences={2: fences["a"]})
    assert len(await late.channel_owner.acquire([])) == 0


# ---- unknown outcomes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [True, False])
async def test_an_unknown_outcome_stalls_until_a_new_term_decides_it(world, written):
    await world.channels("a")
    plan = FaultPlan(0, channels="a")
    owner = world.owner(MemoryWal(world.log, plan))
    await owner.own("a")
    following = world.follow("a")
    plan.rates = Rates(unknown=1.0) if written else Rates(lost=1.0)
    unknown = owner.channel_owner.append([("a", world.rows(b"?"))], producer="p", pseq=1, rows=3)
    plan.rates = Rates()
    retry = asyncio.ensure_future(world.outcome(owner.channel_owner.append([], producer="p", pseq=1)))
    entries = len(world.records("a"))
    assert owner.channel_owner.stalled
    for refused in (lambda: owner.channel_owner.append([("a", world.rows())]), owner.channel_owner.sync_point):
        with pytest.raises(Unavailable):
            refused()
    owner.channel_owner.tick_all()
    await world.settle()
    assert len(world.records("a")) == entries
    assert not unknown.done()
    await owner.own("a", term=2, previous_limit=owner.limit)
    outcome = await world.outcome(unknown)
    assert not owner.channel_owner.stalled
    owner.channel_owner.tick_all()
    await world.settle()
    delivered = [bytes(message.body) for message in following.messages]
    if written:
        assert isinstance(outcome, Appended)
        assert await retry == outcome
        assert delivered == [b"?"]
        assert (await owner.channel_owner.append([], producer="p", pseq=1)).repeated
    else:
        assert isinstance(outcome, Unavailable)
        assert delivered == []
        assert not (await owner.channel_owner.append([("a", world.rows())], producer="p", pseq=1)).repeated
    await following.stop()


async def test_acquiring_one_more_channel_decides_nothing_in_the_others(world, holding_wal):
    await world.channels("a", "b")
    wal = holding_wal(world.log)
    owner = world.owner(wal)
    await owner.own("a")
    wal.holding = True
    append = owner.channel_owner.append([("a", world.rows())])
    held, wal.held = wal.held, []
    wal.holding = False
    await owner.own("b")
    await world.settle()
    assert not append.done()
    held[0]()
    assert (await append).ids


async def test_a_batch_over_two_channels_is_decided_when_both_are_acquired_again(world):
    await world.channels("a", "b")
    plan = FaultPlan(0)
    owner = world.owner(MemoryWal(world.log, plan))
    await owner.own("a", "b")
    plan.rates = Rates(unknown=1.0)
    unknown = owner.channel_owner.append([("a", world.rows()), ("b", world.rows())])
    plan.rates = Rates()
    await owner.own("a", term=2, previous_limit=owner.limit)
    await world.settle()
    assert owner.channel_owner.stalled
    assert not unknown.done()
    await owner.own("b", term=2, previous_limit=owner.limit)
    assert isinstance(await unknown, Appended)
    assert not owner.channel_owner.stalled


async def test_what_was_answered_after_the_lease_is_not_acknowledged(world):
    await world.channels("a")
    lease = [True]
    owner = world.owner(lease_holds=lambda: lease[0])
    await owner.own("a")
    lease[0] = False
    append = owner.channel_owner.append([("a", world.rows())])
    await world.settle()
    assert owner.channel_owner.stalled
    assert not append.done()
    lease[0] = True
    await owner.own("a", term=2, previous_limit=owner.limit)
    assert isinstance(await append, Appended)


@pytest.mark.parametrize("term", [1, 2, 3])
async def test_a_term_that_is_not_above_all_before_is_refused(world, term):
    """Readers would drop what is acknowledged under it."""
    await world.channels("a")
    limit = 0
    for before in (1, 3):
        first = world.owner()
        await first.own("a", term=before, previous_limit=limit)
        await first.channel_owner.append([("a", world.rows(b"first"))])
        limit = first.limit
    again = world.owner()
    with pytest.raises(Fenced, match="acquire it under a higher term than 3") as caught:
        await again.own("a", term=term, previous_limit=limit)
    assert (caught.value.channel, caught.value.term) == ("a", 3)
    with pytest.raises(Unavailable):
        again.channel_owner.append([("a", world.rows(b"lost"))])
    await again.own("a", term=4, previous_limit=limit)
    await again.channel_owner.append([("a", world.rows(b"second"))])
    following = world.follow("a")
    await world.settle()
    again.channel_owner.tick_all()
    await world.settle()
    assert [bytes(message.body) for message in following.messages] == [b"first", b"first", b"second"]
    await following.stop()


class Granting:
    """A catalog that has granted `term`."""

    def __init__(self, term: int) -> None:
        self.term = term

    def granted(self, pchannel: str) -> Granted:
        return Granted(self.term)

    async def catch_up(self) -> None: ...


async def test_an_owner_with_a_catalog_skips_and_reports_what_was_never_granted(world):
    class Bad(ChannelOwnerObserver):
        ids: tuple[bytes, ...] = ()

        def bad(self, channel, entry, error) -> None:
            assert (channel, error.reason) == ("a", "grant")
            self.ids += (entry.id,)

    await world.channels("a")
    catalog = Granting(1)
    first = world.owner(grants=catalog)
    await first.own("a")
    await first.channel_owner.append([("a", world.rows())])
    wal = MemoryWal(world.log)
    forged = [
        Record(RecordType.TIME_TICK, ts=2**63 - 1, term=2**62, cseq=1),
        Record(RecordType.ROWS, ts=1, term=2, cseq=9),
    ]
    ids = await wal.append_many([Append("a", encode(record)) for record in forged])
    bad, catalog.term = Bad(), 2
    second = world.owner(grants=catalog, observer=bad)
    await second.own("a", term=2, previous_limit=first.limit)
    assert list(bad.ids) == ids
    assert second.clock.last < add_ms(first.limit, 1_000), "only what counts moves the clock"
    await second.channel_owner.append([("a", world.rows())])
    catalog.term = 4
    with pytest.raises(Fenced, match="higher term than 3"):
        await second.own("a", term=3, previous_limit=second.limit)


async def test_a_grant_whose_limit_has_passed_writes_no_fence(world):
    await world.channels("a")
    owner = world.owner()
    with pytest.raises(Unavailable, match="ask for another grant"):
        await owner.channel_owner.acquire([ChannelGrant("a", 1, 0, owner.clock.now())])
    assert world.records("a") == []


@pytest.mark.parametrize("fault", ["none", "unknown", "delay"])
def test_close_ends_all_waiting_calls_and_returns_a_limit(world, fault):
    async def main() -> None:
        await world.channels("a")
        plan = FaultPlan(0)
        owner = world.owner(MemoryWal(world.log, plan))
        await owner.own("a")
        plan.rates = Rates(unknown=float(fault == "unknown"), delay=float(fault == "delay"))
        append = owner.channel_owner.append([("a", world.rows())])
        append.add_done_callback(lambda done: done.cancelled() or done.exception())
        limit = await owner.channel_owner.close()
        await asyncio.sleep(0)
        assert append.done()
        assert limit >= max(record.ts for record in world.records("a"))
        with pytest.raises(Closed):
            owner.channel_owner.append([("a", world.rows())])
        if fault != "unknown":
            assert world.records("a")[-1].type is RecordType.TIME_TICK

    run_virtual(main(), world.source)


# ---- recovery --------------------------------------------------------------------------------------------------------


async def test_a_retry_is_recognised_in_flight_afterwards_and_by_the_next_owner(world, holding_wal):
    await world.channels("a")
    wal = holding_wal(world.log)
    owner = world.owner(wal)
    await owner.own("a")
    wal.holding = True
    attempts = [
        owner.channel_owner.append([("a", world.rows(b"once"))], producer="p", pseq=7, rows=5) for _ in range(3)
    ]
    assert len(wal.held) == 1
    wal.let_go()
    results = await asyncio.gather(*attempts)
    assert len(set(results)) == 1
    after = await owner.channel_owner.append([("a", world.rows(b"once"))], producer="p", pseq=7, rows=5)
    assert (after.ts, after.rows, after.repeated) == (results[0].ts, 5, True)
    successor = world.owner()
    await successor.own("a", term=2, previous_limit=owner.limit)
    after = await successor.channel_owner.append([("a", world.rows(b"once"))], producer="p", pseq=7, rows=5)
    assert (after.ts, after.rows, after.repeated) == (results[0].ts, 5, True)
    assert sum(record.type is RecordType.ROWS for record in world.records("a")) == 1


class PartialWal(MemoryWal):
    """Commits each channel by itself, as brokers do, and loses those in `failing`; the error does not say which."""

    failing: frozenset[str] = frozenset()

    def submit(self, entries, done):
        kept = [entry for entry in entries if entry.channel not in self.failing]
        lost = len(kept) < len(entries)
        unknown = Unavailable("the broker does not answer", outcome_unknown=True)
        super().submit(kept, (lambda _: done(unknown)) if lost else done)


@pytest.mark.parametrize("snapshots", [False, True], ids=["read", "snapshots"])
async def test_a_batch_that_some_channels_have_is_written_to_the_others_when_it_is_repeated(world, snapshots):
    await world.channels("a", "b", "c")
    wal = PartialWal(world.log)
    owner = world.owner(wal)
    await owner.own("a", "b", "c")
    batch = [("a", world.rows(b"1")), ("b", world.rows(b"2")), ("b", world.rows(b"3")), ("c", world.rows(b"4"))]
    wal.failing = frozenset("bc")
    lost = owner.channel_owner.append(batch, producer="p", pseq=7, rows=4, digest=5)
    limit, terms = owner.limit, 1
    for failing in (frozenset("c"), frozenset()):  # each owner dies without an answer, and the next gets further
        terms += 1
        wal.failing = frozenset()
        owner = world.owner(wal, snapshot_records=1)
        await owner.own("a", "b", "c", term=terms, previous_limit=limit)
        limit = owner.limit
        if snapshots:  # what is known in part outlives the records it is known from
            owner.channel_owner.tick_all()
            owner.channel_owner.tick_all()
            checkpoints = owner.channel_owner.checkpoints()
            terms += 1
            owner = world.owner(wal)
            for channel in "abc":
                await owner.own(channel, term=terms, previous_limit=limit, checkpoint=checkpoints[channel])
            limit = owner.limit
        wal.failing = failing
        other = owner.channel_owner.append(batch, producer="p", pseq=7, rows=3, digest=6)
        assert (await other).repeated
        assert (await other).digest == 5
        with pytest.raises(OutcomeUnknown, match="for other channels now"):
            owner.channel_owner.append(batch[:2], producer="p", pseq=7, rows=2, digest=5)
        again = owner.channel_owner.append(batch, producer="p", pseq=7, rows=4, digest=5)
        if not failing:
            assert (await again)[1:3] == (4, False)
    after = await owner.channel_owner.append(batch, producer="p", pseq=7, rows=4, digest=5)
    assert (after.rows, after.repeated) == (4, True)
    assert not lost.done()
    successor = world.owner()
    await successor.own("a", "b", "c", term=terms + 1, previous_limit=limit)
    assert (await successor.channel_owner.append(batch, producer="p", pseq=7, rows=4, digest=5)).repeated
    bodies = Counter(
        bytes(record.body) for channel in "abc" for record in world.records(channel) if record.type is RecordType.ROWS
    )
    assert bodies == Counter([b"1", b"2", b"3", b"4"])


async def test_snapshots_bound_what_the_next_owner_reads_and_forget_no_producer(world):
    class Count(ChannelOwnerObserver):
        recovered_records = 0

        def recovered(self, channel: str, record: Record) -> None:
            self.recovered_records += 1

    await world.channels("a")
    owner = world.owner(snapshot_records=10)
    await owner.own("a")
    for number in range(95):
        await owner.channel_owner.append([("a", world.rows())], producer="p", pseq=number, rows=1)
        if number % 3 == 0:
            owner.channel_owner.tick_all()
    checkpoint = owner.channel_owner.checkpoints()["a"]
    count = Count()
    successor = world.owner(observer=count)
    await successor.own("a", term=2, previous_limit=owner.limit, checkpoint=checkpoint)
    assert 0 < count.recovered_records <= 20
    for number in range(95):
        assert (await successor.channel_owner.append([], producer="p", pseq=number)).repeated


async def test_a_checkpoint_that_retention_has_passed_is_no_obstacle(world):
    await world.channels("a")
    owner = world.owner(snapshot_records=2)
    await owner.own("a")
    for number in range(4):
        await owner.channel_owner.append([("a", world.rows())], producer="p", pseq=number, rows=1)
        owner.channel_owner.tick_all()
    checkpoint = owner.channel_owner.checkpoints()["a"]
    last = await owner.channel_owner.append([("a", world.rows())], producer="p", pseq=4, rows=1)
    assert b"" < checkpoint < last.ids[0]
    await MemoryWal(world.log).truncate("a", last.ids[0])
    successor = world.owner()
    await successor.own("a", term=2, previous_limit=owner.limit, checkpoint=checkpoint)
    assert (await successor.channel_owner.append([], producer="p", pseq=4)).repeated


async def test_a_snapshot_beside_an_open_append_does_not_hide_it_from_the_next_owner(world, holding_wal):
    await world.channels("a")
    wal = holding_wal(world.log)
    owner = world.owner(wal, snapshot_records=2)
    await owner.own("a")
    await owner.channel_owner.append([("a", world.rows())], producer="p", pseq=1)
    wal.holding = True
    second = owner.channel_owner.append([("a", world.rows())], producer="p", pseq=2)
    owner.channel_owner.tick_all()
    wal.let_go()
    await second
    successor = world.owner()
    checkpoint = owner.channel_owner.checkpoints()["a"]
    assert checkpoint
    await successor.own("a", term=2, previous_limit=owner.limit, checkpoint=checkpoint)
    for number in (1, 2):
        assert (await successor.channel_owner.append([], producer="p", pseq=number)).repeated


async def test_strong_points_name_the_last_acknowledged_record(world):
    await world.channels("a", "b")
    owner = world.owner()
    await owner.own("a", "b")
    appended = await owner.channel_owner.append([("a", world.rows())])
    point = owner.channel_owner.sync_point()
    last = world.records("a")[-1]
    assert point.time >= appended.ts
    assert point.channels["a"] == (last.term, last.cseq, last.id)
    assert point.channels["b"].cseq == 1
    assert owner.channel_owner.channels == ["a", "b"]
    following = world.follow("a", start=From.LATEST)
    await world.settle()
    owner.channel_owner.tick_all()
    await world.settle()
    assert following.messages == []
    assert following.stream.end_ts >= point.time
    await following.stop()


async def test_a_tick_answered_before_an_append_below_it_hides_nothing_from_the_next_owner(world, holding_wal):
    await world.channels("a")
    wal = holding_wal(world.log)
    owner = world.owner(wal, snapshot_records=2)
    await owner.own("a")
    await owner.channel_owner.append([("a", world.rows())], producer="p", pseq=1)
    wal.holding_answers = True
    owner.channel_owner.append([("a", world.rows())], producer="p", pseq=2)  # in the log, and never answered
    wal.holding_answers = False
    owner.channel_owner.tick_all()
    owner.channel_owner.tick_all()
    successor = world.owner()
    checkpoint = owner.channel_owner.checkpoints()["a"]
    assert checkpoint
    await successor.own("a", term=2, previous_limit=owner.limit, checkpoint=checkpoint)
    for number in (1, 2):
        assert (await successor.channel_owner.append([], producer="p", pseq=number)).repeated


async def test_owners_that_come_and_go_do_not_let_recovery_grow(world):
    await world.channels("a")
    checkpoint, limit = b"", 0
    for term in range(1, 6):
        owner = world.owner(snapshot_records=10)
        await owner.own("a", term=term, previous_limit=limit, checkpoint=checkpoint)
        for _ in range(4):
            await owner.channel_owner.append([("a", world.rows())])
        owner.channel_owner.tick_all()
        checkpoint, limit = owner.channel_owner.checkpoints()["a"], owner.limit
    assert checkpoint


async def test_an_answer_that_comes_after_the_new_fence_has_decided_changes_nothing(world):
    class LateAnswers(MemoryWal):
        late: list[object]

        def submit(self, entries, done):
            super().submit(entries, (lambda result: self.late.append(done)) if hasattr(self, "late") else done)

    await world.channels("a")
    wal = LateAnswers(world.log)
    owner = world.owner(wal)
    await owner.own("a")
    wal.late = []
    append = owner.channel_owner.append([("a", world.rows())])
    (answer,) = wal.late
    del wal.late
    await owner.own("a", term=2, previous_limit=owner.limit)
    assert isinstance(await append, Appended)
    answer(Unavailable("too late to matter", outcome_unknown=True))
    assert not owner.channel_owner.stalled
    assert owner.channel_owner.sync_point().channels["a"].term == 2
