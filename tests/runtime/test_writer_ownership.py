"""Owners that come, go and are superseded, and what they wrote without an answer."""

from __future__ import annotations

import asyncio

import pytest

from tidewal.runtime.clock import add_ms
from tidewal.runtime.errors import (
    Closed,
    DeadlineExceeded,
    Fenced,
    InvalidRequest,
    Unavailable,
)
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.log.wal import Append
from tidewal.runtime.ownership import Appended, ChannelGrant, ChannelOwnerObserver
from tidewal.runtime.streams.channel_reader import Granted
from tidewal.runtime.testing.clock import run_virtual
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryWal

# ---- ownership -------------------------------------------------------------------------------------------------------


async def test_nothing_is_acknowledged_before_the_fence_is_in_the_catalog(world):
    await world.channels("a")
    owner = world.owner()
    grant = ChannelGrant("a", 1, 0, add_ms(owner.clock.now(), 1_000))
    fence = await owner.channel_owner.acquire(grant)
    assert world.records("a")[-1].id == fence
    with pytest.raises(Unavailable):
        owner.channel_owner.append([("a", world.rows())])
    with pytest.raises(InvalidRequest, match="under term 2"):
        owner.channel_owner.activate("a", 2)
    owner.channel_owner.activate("a", 1)
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
        await owner.channel_owner.sync(["a"])
    owner.channel_owner.tick_all()
    assert isinstance(await world.outcome(owner.channel_owner.tick_now(["a"])), Unavailable)
    await owner.channel_owner.tick_now()  # in no channel
    await world.settle()
    assert following.stream.end_ts < owner.limit
    owner.channel_owner.renew(add_ms(owner.limit, 5_000))
    assert (await owner.channel_owner.append([("a", world.rows())])).ts > owner.limit
    await following.stop()


async def test_each_channel_has_a_limit_of_its_own(world):
    await world.channels("a", "b")
    owner = world.owner()
    await owner.own("a")
    await owner.channel_owner.acquire(ChannelGrant("b", 1, 0, add_ms(owner.limit, 10_000)))
    owner.channel_owner.activate("b", 1)
    following = world.follow("b")
    world.source.advance(10.1)
    for refused in (["a"], ["a", "b"]):
        with pytest.raises(Unavailable, match="limit of a"):
            await owner.channel_owner.sync(refused)
        with pytest.raises(Unavailable, match="limit of a"):
            owner.channel_owner.append([(channel, world.rows()) for channel in refused])
    appended = await owner.channel_owner.append([("b", world.rows())])
    assert appended.ts > owner.limit
    assert set((await owner.channel_owner.sync()).channels) == {"b"}
    owner.channel_owner.tick_all()
    await owner.channel_owner.tick_now()
    await world.settle()
    assert following.stream.end_ts > owner.limit
    await following.stop()


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
    retry = asyncio.ensure_future(
        world.outcome(owner.channel_owner.append([("a", world.rows())], producer="p", pseq=1))
    )
    entries = len(world.records("a"))
    assert owner.channel_owner.stalled
    with pytest.raises(Unavailable):
        owner.channel_owner.append([("a", world.rows())])
    with pytest.raises(Unavailable):
        await owner.channel_owner.sync(["a"])
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
        assert (await owner.channel_owner.append([("a", world.rows())], producer="p", pseq=1)).repeated
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
    assert owner.channel_owner.stalled == ["b"]
    assert not unknown.done()
    assert (await owner.channel_owner.append([("a", world.rows())])).ts
    await owner.own("b", term=2, previous_limit=owner.limit)
    assert isinstance(await unknown, Appended)
    assert not owner.channel_owner.stalled


@pytest.mark.parametrize("by", ["renewal", "term"])
async def test_what_was_answered_after_the_lease_waits_for_the_next_one(world, by):
    await world.channels("a")
    lease = [True]
    owner = world.owner(lease_holds=lambda: lease[0])
    await owner.own("a")
    lease[0] = False
    append = owner.channel_owner.append([("a", world.rows())])
    await world.settle()
    assert not append.done()
    with pytest.raises(Unavailable):
        await owner.channel_owner.sync()
    owner.channel_owner.renew(owner.limit)  # it does not count
    await world.settle()
    assert not append.done()
    lease[0] = True
    if by == "renewal":
        owner.channel_owner.renew(owner.limit)
    else:
        await owner.own("a", term=2, previous_limit=owner.limit)
    assert isinstance(await append, Appended)
    assert owner.channel_owner.stalled == []
    assert (await owner.channel_owner.sync()).channels["a"].cseq == (2 if by == "renewal" else 1)


async def test_an_owner_that_ends_past_its_lease_waits_for_no_other(world):
    await world.channels("a")
    lease = [True]
    owner = world.owner(lease_holds=lambda: lease[0])
    await owner.own("a")
    lease[0] = False
    append = owner.channel_owner.append([("a", world.rows())])
    await owner.channel_owner.close()
    assert isinstance(await world.outcome(append), DeadlineExceeded)


async def test_a_channel_that_stalls_stops_no_other(world):
    await world.channels("a", "b")
    plan = FaultPlan(0, channels="a")
    owner = world.owner(MemoryWal(world.log, plan))
    await owner.own("a", "b")
    following = world.follow("b")
    plan.rates = Rates(unknown=1.0)
    unknown = owner.channel_owner.append([("a", world.rows())])
    plan.rates = Rates()
    assert owner.channel_owner.stalled == ["a"]
    assert (owner.channel_owner.is_open("a"), owner.channel_owner.is_open("b")) == (False, True)
    appended = await owner.channel_owner.append([("b", world.rows(b"on"))])
    with pytest.raises(Unavailable, match="earlier append to a") as caught:
        owner.channel_owner.append([("b", world.rows()), ("a", world.rows())])
    assert caught.value.fields["channel"] == "a"
    assert (await owner.channel_owner.sync(["b"])).time >= appended.ts
    await owner.channel_owner.tick_now()
    owner.channel_owner.tick_all()
    await world.settle()
    assert [bytes(message.body) for message in following.messages] == [b"on"]
    assert not unknown.done()
    before = world.records("b")
    await owner.own("a", term=2, previous_limit=owner.limit)
    assert isinstance(await unknown, Appended)
    assert world.records("b") == before, "only the channel that stalled begins a new term"
    await following.stop()


async def test_a_channel_stalls_once_however_many_appends_are_in_flight(world):
    reports: list[list[str]] = []

    class Stalls(ChannelOwnerObserver):
        def stalled(self, channels, error) -> None:
            reports.append(list(channels))

    class Unanswering(MemoryWal):
        done = None

        def submit(self, entries, done):
            if self.done is None:
                super().submit(entries, done)
            else:
                self.done.append(done)

    await world.channels("a", "b")
    wal = Unanswering(world.log)
    owner = world.owner(wal, observer=Stalls())
    await owner.own("a", "b")
    wal.done = []
    for channels in ("a", "ab", "a"):
        owner.channel_owner.append([(channel, world.rows()) for channel in channels])
    answers, wal.done = wal.done, None
    unknown = Unavailable("no answer", outcome_unknown=True)
    answers[0](unknown)
    await owner.own("a", term=2, previous_limit=owner.limit)
    for answer in answers[1:]:
        answer(unknown)
    assert reports == [["a"], ["b"]], "the third was decided by the fence"
    assert owner.channel_owner.stalled == ["b"]


async def test_what_is_answered_after_a_stall_is_decided_by_the_next_fence(world):
    """The channel may be another owner's by then, and the record behind that one's fence."""

    class Held(MemoryWal):
        held = None

        def submit(self, entries, done):
            if self.held is None:
                super().submit(entries, done)
            else:
                self.held.append((list(entries), done))

    await world.channels("a")
    wal = Held(world.log)
    first, second = world.owner(wal), world.owner()
    await first.own("a")
    wal.held = []
    early = first.channel_owner.append([("a", world.rows(b"early"))])
    first.channel_owner.append([("a", world.rows(b"unknown"))])
    (entries, answer), (_, unanswered) = wal.held
    unanswered(Unavailable("no answer", outcome_unknown=True))
    await second.own("a", term=2, previous_limit=first.limit)
    MemoryWal.submit(wal, entries, answer)  # it comes into the log behind the fence, and the log says so
    await world.settle()
    assert not early.done()
    await first.channel_owner.close()
    assert isinstance(await world.outcome(early), DeadlineExceeded)


async def test_the_fence_of_one_channel_may_fail_alone(world):
    await world.channels("a", "b")
    plan = FaultPlan(0, channels="a")
    owner = world.owner(MemoryWal(world.log, plan))
    plan.rates = Rates(fail=1.0)
    limit = add_ms(owner.clock.now(), 10_000)
    with pytest.raises(Unavailable):
        await owner.channel_owner.acquire_all([ChannelGrant(name, 1, 0, limit) for name in "ab"])
    owner.channel_owner.activate("b", 1)
    with pytest.raises(InvalidRequest):
        owner.channel_owner.activate("a", 1)
    assert (await owner.channel_owner.append([("b", world.rows())])).ts


async def test_a_success_that_is_answered_during_a_new_term_is_decided_by_its_fence(world, holding_wal):
    """It may lie behind the fence, where readers drop it."""
    await world.channels("a")
    wal = holding_wal(world.log)
    owner = world.owner(wal)
    await owner.own("a")
    wal.holding = True
    append = owner.channel_owner.append([("a", world.rows(b"late"))], producer="p", pseq=1)
    wal.holding = False
    acquiring = asyncio.ensure_future(owner.own("a", term=2, previous_limit=owner.limit))
    while world.records("a")[-1].term < 2:  # noqa: ASYNC110 -- the fence is in the log, and not read yet
        await asyncio.sleep(0)
    wal.let_go()
    assert [bytes(record.body) for record in world.records("a")][-1] == b"late"
    await acquiring
    assert isinstance(await world.outcome(append), Unavailable)
    assert not (await owner.channel_owner.append([("a", world.rows(b"again"))], producer="p", pseq=1)).repeated


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
        await owner.channel_owner.acquire(ChannelGrant("a", 1, 0, owner.clock.now()))
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
