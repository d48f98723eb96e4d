"""What the next owner of a channel knows: retries, snapshots, strong points."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tidewal.runtime.errors import (
    OutcomeUnknown,
    Unavailable,
)
from tidewal.runtime.log.record import Record, RecordType
from tidewal.runtime.log.wal import From
from tidewal.runtime.ownership import AckManager, Appended, ChannelOwnerObserver
from tidewal.runtime.testing.memory import MemoryWal


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


async def test_numbers_that_are_to_rise_do_so_in_each_channel_under_each_owner(world, holding_wal):
    await world.channels("a", "b")
    wal = holding_wal(world.log)
    owner = world.owner(wal)
    await owner.own("a", "b")

    def append(owner, channels: str, pseq: int):
        records = [(channel, world.rows(b"x")) for channel in channels]
        return owner.channel_owner.append(records, producer="p", pseq=pseq, rows=1, in_order=True)

    wal.holding = True
    later, elsewhere = append(owner, "a", 7), append(owner, "b", 5)
    with pytest.raises(OutcomeUnknown, match="batch 6 of p is not in a"):
        append(owner, "a", 6)
    wal.let_go()
    await asyncio.gather(later, elsewhere)
    with pytest.raises(OutcomeUnknown, match="batch 6 of p is not in a"):
        append(owner, "ba", 6)
    assert (await append(owner, "a", 7)).repeated
    successor = world.owner()
    await successor.own("a", "b", term=2, previous_limit=owner.limit)
    with pytest.raises(OutcomeUnknown, match="batch 6 of p is not in a"):
        append(successor, "a", 6)
    assert not (await append(successor, "b", 6)).repeated


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
        assert (await successor.channel_owner.append([("a", world.rows())], producer="p", pseq=number)).repeated


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
    assert (await successor.channel_owner.append([("a", world.rows())], producer="p", pseq=4)).repeated


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
        assert (await successor.channel_owner.append([("a", world.rows())], producer="p", pseq=number)).repeated


async def test_strong_points_name_the_last_acknowledged_record(world):
    await world.channels("a", "b")
    owner = world.owner()
    await owner.own("a", "b")
    appended = await owner.channel_owner.append([("a", world.rows())])
    point = await owner.channel_owner.sync()
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
        assert (await successor.channel_owner.append([("a", world.rows())], producer="p", pseq=number)).repeated


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
    assert (await owner.channel_owner.sync()).channels["a"].term == 2


async def test_a_part_that_is_in_flight_does_not_answer_for_the_rest_of_its_batch(world, holding_wal):
    """The channels of a batch had two owners, and the one has got the other's while its own part is in flight."""
    await world.channels("a", "b")
    wal = holding_wal(world.log)
    owner = world.owner(wal)
    await owner.own("a", "b")
    wal.holding = True
    part = owner.channel_owner.append([("a", world.rows())], producer="p", pseq=1, channels=2)
    whole = [("a", world.rows()), ("b", world.rows(b"rest"))]
    with pytest.raises(Unavailable, match="without what is for b"):
        owner.channel_owner.append(whole, producer="p", pseq=1, channels=2)
    wal.let_go()
    await part
    assert not (await owner.channel_owner.append(whole, producer="p", pseq=1, channels=2)).repeated
    assert [record.body for record in world.records("b") if record.type is RecordType.ROWS] == [b"rest"]
    assert sum(record.type is RecordType.ROWS for record in world.records("a")) == 1


async def test_a_channel_that_is_released_is_looked_at_under_the_lock(world, holding_wal, monkeypatch):
    """The log answers on a thread of its own."""
    await world.channels("a")
    wal = holding_wal(world.log)
    owner = world.owner(wal)
    await owner.own("a")
    wal.holding = True
    appended = owner.channel_owner.append([("a", world.rows())])
    items, lock, unlocked = AckManager.items, owner.channel_owner._lock, list[bool]()

    def looked_at(self):
        unlocked.append(not lock._is_owned())
        return items(self)

    monkeypatch.setattr(AckManager, "items", looked_at)
    releasing = asyncio.ensure_future(owner.channel_owner.release("a"))
    await world.settle()
    wal.let_go()
    await releasing
    await appended
    assert unlocked
    assert not any(unlocked)
