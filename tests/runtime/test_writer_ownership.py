"""Owners that come, go and are superseded, and what they wrote without an answer."""

from __future__ import annotations

import asyncio

import pytest

from tidewal.runtime.clock import add_ms
from tidewal.runtime.errors import (
    Closed,
    Fenced,
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
