"""Transactions over several pchannels at the owners of these: prepared, committed at one timestamp, or aborted."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from tidewal.runtime.clock import add_ms
from tidewal.runtime.errors import Unavailable
from tidewal.runtime.log.record import Record, RecordType
from tidewal.runtime.log.wal import From
from tidewal.runtime.ownership import ChannelOwner
from tidewal.runtime.ownership.prepared import TransactionId
from tidewal.runtime.streams.tt_stream import TtMsgStream
from tidewal.runtime.testing.memory import MemoryWal

LEASE_MS = 10_000


def prepare(owner: ChannelOwner, channels: str, world, pseq: int = 1, attempt: str = "x", body: bytes = b"t"):
    records = [(channel, world.rows(body)) for channel in channels]
    return owner.prepare(records, producer="p", pseq=pseq, attempt=attempt, rows=len(records), channels=2)


def id_of(pseq: int = 1, attempt: str = "x") -> TransactionId:
    return TransactionId("p", pseq, attempt)


def data(world, channel: str) -> list[tuple[bytes, int]]:
    found = [each for each in world.records(channel) if each.type is RecordType.ROWS]
    return [(bytes(each.body), each.ts) for each in found]


async def two_owners(world):
    await world.channels("a", "b")
    first, second = world.owner(), world.owner()
    await first.own("a")
    await second.own("b")
    return first, second


async def test_what_two_owners_have_prepared_comes_at_one_timestamp_before_all_that_is_written_later(world):
    first, second = await two_owners(world)
    follower = world.follow("a", "b")
    before = await first.channel_owner.append([("a", world.rows(b"before"))])
    at_a = (await prepare(first.channel_owner, "a", world)).ts
    world.source.advance(0.5)
    at_b = (await prepare(second.channel_owner, "b", world)).ts
    assert before.ts < at_a < at_b
    with pytest.raises(Unavailable, match="a transaction is being decided in a"):
        first.channel_owner.append([("a", world.rows(b"refused"))])
    assert (await first.channel_owner.sync()).time == at_a - 1  # and a strong read waits for nothing
    for owner in (first, second):
        owner.channel_owner.tick_all()
    await world.settle()
    assert [record.body for pack in follower.packs for record in pack.messages] == [b"before"]
    assert follower.stream.end_ts < at_a

    for owner, channel in ((first, "a"), (second, "b")):
        committed = await owner.channel_owner.commit_next(channel, {id_of(): at_b})
        assert (committed.ts, committed.rows) == (at_b, 1)
    later = await first.channel_owner.append([("a", world.rows(b"later"))])
    assert later.ts > at_b  # though the clock of this owner was behind
    for owner in (first, second):
        owner.channel_owner.tick_all()
    await world.settle()
    assert data(world, "a") == [(b"before", before.ts), (b"t", at_b), (b"later", later.ts)]
    [pack] = [pack for pack in follower.packs if any(record.body == b"t" for record in pack.messages)]
    assert sum(record.body == b"t" for record in pack.messages) == 2
    await follower.stop()


async def test_a_transaction_that_is_aborted_leaves_nothing_and_lets_others_write(world):
    first, _ = await two_owners(world)
    await prepare(first.channel_owner, "a", world)
    first.channel_owner.abort("a", id_of())
    later = await first.channel_owner.append([("a", world.rows(b"later"))])
    assert data(world, "a") == [(b"later", later.ts)]
    assert not first.channel_owner.prepared()["a"]
    successor = world.owner()
    await successor.own("a", term=2, previous_limit=first.limit)
    assert not successor.channel_owner.prepared()["a"]


async def test_the_next_owner_has_what_was_prepared_and_commits_it_below_its_own_fence(world, holding_wal):
    await world.channels("a")
    wal = holding_wal(world.log)
    owner = world.owner(wal)
    await owner.own("a")
    prepared = (await prepare(owner.channel_owner, "a", world)).ts
    follower = world.follow("a")
    wal.holding = True
    late = owner.channel_owner.commit_next("a", {id_of(): prepared})
    world.source.advance(5)
    successor = world.owner()
    await successor.own("a", term=2, previous_limit=owner.limit)
    assert [each.id for each in successor.channel_owner.prepared()["a"]] == [id_of()]
    with pytest.raises(Unavailable, match="being decided"):
        successor.channel_owner.append([("a", world.rows(b"refused"))])
    successor.channel_owner.tick_all()
    await world.settle()
    assert follower.stream.end_ts < prepared  # the fence says nothing of the time
    wal.let_go()  # behind the fence: it does not count
    await asyncio.gather(late, return_exceptions=True)
    committed = await successor.channel_owner.commit_next("a", {id_of(): prepared})
    assert committed.ts == prepared
    await successor.channel_owner.append([("a", world.rows(b"later"))])
    successor.channel_owner.tick_all()
    await world.settle()
    read = [record for pack in follower.packs for record in pack.messages]
    assert [(record.body, record.term) for record in read] == [(b"t", 2), (b"later", 2)]
    again = await prepare(successor.channel_owner, "a", world, attempt="y")
    assert (again.ts, again.repeated) == (prepared, True)  # its client asks once more
    await follower.stop()


async def test_what_is_prepared_goes_along_where_a_channel_is_given_up_in_good_order(world):
    first, _ = await two_owners(world)
    await first.channel_owner.append([("a", world.rows(b"before"))], producer="q", pseq=1)
    prepared = (await prepare(first.channel_owner, "a", world)).ts
    await prepare(first.channel_owner, "a", world, pseq=2)
    released = await first.channel_owner.release("a")
    successor = world.owner()
    await successor.own("a", term=2, previous_limit=released.limit, checkpoint=released.checkpoint)
    found, behind = successor.channel_owner.prepared()["a"]
    assert behind.id == id_of(2)
    assert (found.id, found.ts, found.durable) == (id_of(), prepared, True)
    assert [bytes(record.body) for record in found.records] == [b"t"]
    assert (await successor.channel_owner.commit_next("a", {id_of(): prepared})).ts == prepared
    successor.channel_owner.abort("a", id_of(2))
    assert (await successor.channel_owner.append([("a", world.rows(b"x"))], producer="q", pseq=1)).repeated


async def test_transactions_are_committed_in_the_order_of_their_timestamps(world):
    first, _ = await two_owners(world)
    owner = first.channel_owner
    at = [(await prepare(owner, "a", world, pseq=pseq, body=b"%d" % pseq)).ts for pseq in (1, 2, 3)]
    assert owner.commit_next("a", {id_of(2): at[2]}) is None  # the first may get a lower one
    assert owner.commit_next("a", {id_of(1): at[1]}) is None  # and the second the same one
    decided = {id_of(2): at[2] + 5, id_of(1): at[2] + 7}
    assert owner.commit_next("a", decided) is None  # and so may the third
    owner.abort("a", id_of(3))
    assert (await owner.commit_next("a", decided)).ts == at[2] + 5
    assert (await owner.commit_next("a", decided)).ts == at[2] + 7
    assert [body for body, _ in data(world, "a")] == [b"2", b"1"]


async def test_what_is_determined_at_a_time_before_the_commit_ends_before_it(world):
    first, _ = await two_owners(world)
    owner = first.channel_owner
    await owner.append([("a", world.rows(b"before"))])
    prepared = (await prepare(owner, "a", world)).ts
    asked, behind = (asyncio.ensure_future(owner.sync(["a"], at=prepared + more)) for more in (5, 10))
    await world.settle()
    assert not asked.done()  # the transaction may get that time
    await owner.commit_next("a", {id_of(): prepared + 10})
    assert (await asked).time == prepared + 5
    before, [committed] = (await asked).channels["a"], world.records("a")[-1:]
    assert before.cseq < committed.cseq
    assert (await behind).channels["a"].cseq == committed.cseq


async def test_no_transaction_joins_while_other_writes_wait(world):
    first, _ = await two_owners(world)
    owner = first.channel_owner
    await prepare(owner, "a", world)
    with pytest.raises(Unavailable):
        owner.append([("a", world.rows(b"refused"))])
    with pytest.raises(Unavailable, match="other writes wait"):
        prepare(owner, "a", world, pseq=2)
    owner.abort("a", id_of())
    with pytest.raises(Unavailable, match="other writes wait"):  # it comes again in a moment
        prepare(owner, "a", world, pseq=2)
    await owner.append([("a", world.rows(b"taken"))])
    await prepare(owner, "a", world, pseq=2)
    with pytest.raises(Unavailable):
        owner.append([("a", world.rows(b"given up"))])
    owner.abort("a", id_of(2))
    world.source.advance(1)
    await prepare(owner, "a", world, pseq=3)


async def test_a_write_that_was_refused_and_does_not_come_again_keeps_no_transaction_out(world):
    first, _ = await two_owners(world)
    await prepare(first.channel_owner, "a", world, 1)
    with pytest.raises(Unavailable, match="being decided"):
        first.channel_owner.append([("a", world.rows(b"refused"))])
    first.channel_owner.abort("a", id_of(1))
    with pytest.raises(Unavailable, match="other writes wait"):
        prepare(first.channel_owner, "a", world, 2)
    world.source.advance(1)
    await asyncio.gather(*(prepare(first.channel_owner, "a", world, pseq) for pseq in (2, 3, 4)))
    assert len(first.channel_owner.prepared()["a"]) == 3


async def test_while_a_recovered_transaction_is_not_decided_its_channel_gets_one_tick(world):
    first, _ = await two_owners(world)
    await prepare(first.channel_owner, "a", world)
    world.source.advance(1)
    successor = world.owner()
    await successor.own("a", term=2, previous_limit=first.limit)
    for _ in range(5):
        world.source.advance(0.1)
        successor.channel_owner.tick_all()
        await world.settle()
    ticks = [each for each in world.records("a") if each.type is RecordType.TIME_TICK]
    assert len(ticks) == 1
    successor.channel_owner.abort("a", id_of())
    successor.channel_owner.tick_all()
    await world.settle()
    assert world.records("a")[-1].type is RecordType.TIME_TICK


async def test_a_prepare_of_unknown_outcome_is_decided_by_the_next_fence(world, holding_wal):
    class UnknownWal(MemoryWal):
        """Says of each append but fences and ticks that it does not know; `lost` ones are not there."""

        unknown = lost = False

        def submit(self, entries, done):
            if not self.unknown:
                return super().submit(entries, done)
            error = Unavailable("no answer", outcome_unknown=True)
            if self.lost:
                return done(error)
            return super().submit(entries, lambda _: done(error))

    await world.channels("a")
    wal = UnknownWal(world.log)
    owner = world.owner(wal)
    await owner.own("a")
    for term, lost in ((2, True), (3, False)):
        wal.unknown, wal.lost = True, lost
        preparing = prepare(owner.channel_owner, "a", world, pseq=term)
        await world.settle()
        assert not preparing.done()
        assert owner.channel_owner.stalled == ["a"]
        wal.unknown = False
        await owner.own("a", term=term, previous_limit=owner.limit)
        if lost:
            with pytest.raises(Unavailable):
                await preparing
            assert not owner.channel_owner.prepared()["a"]
        else:
            prepared = (await preparing).ts
            wal.unknown = True
            committing = owner.channel_owner.commit_next("a", {id_of(term): prepared})
            await world.settle()
            wal.unknown = False
            await owner.own("a", term=term + 1, previous_limit=owner.limit)
            assert (await committing).ts == prepared
            assert not owner.channel_owner.prepared()["a"]
    assert data(world, "a") == [(b"t", prepared)]


@pytest.mark.parametrize("seed", range(12))
async def test_over_takeovers_and_aborts_every_reader_from_every_position_sees_all_or_nothing(world, seed: int) -> None:
    """Two channels, each with an owner that is replaced at random, while transactions over both and plain writes go on.
    What a reader gets that goes on from any pack is what the first one got behind it."""
    rng = random.Random(seed)
    await world.channels("a", "b")
    owners, terms = {}, dict.fromkeys("ab", 0)

    async def take_over(channel: str) -> None:
        before = owners.get(channel)
        terms[channel] += 1
        owners[channel] = world.owner(snapshot_records=rng.choice([3, 10_000]))
        checkpoint = b"" if before is None else before.channel_owner.checkpoints().get(channel, b"")
        await owners[channel].own(
            channel, term=terms[channel], previous_limit=0 if before is None else before.limit, checkpoint=checkpoint
        )

    def renew(channel: str) -> None:
        owners[channel].limit = add_ms(owners[channel].clock.now(), LEASE_MS)
        owners[channel].channel_owner.renew(owners[channel].limit)

    async def commit(channel: str, id: TransactionId, ts: int) -> None:
        while id in {each.id for each in owners[channel].channel_owner.prepared()[channel]}:
            if (committing := owners[channel].channel_owner.commit_next(channel, {id: ts})) is None:
                renew(channel)  # the other owner's clock is ahead by more than the limit
            else:
                await committing

    for channel in "ab":
        await take_over(channel)
    committed: dict[bytes, int] = {}
    for number in range(1, 25):
        world.source.advance(rng.random() * 0.3)
        channel = rng.choice("ab")
        for each in "ab":
            renew(each)
        match rng.randrange(4):
            case 0:
                await take_over(channel)
            case 1:
                await owners[channel].channel_owner.append([(channel, world.rows(b"w%d" % number))])
            case _:
                id = id_of(number)
                body = b"t%d" % number
                at = [(await prepare(owners[each].channel_owner, each, world, number, body=body)).ts for each in "ab"]
                if rng.random() < 0.4:
                    await take_over(channel)
                if rng.random() < 0.3:
                    for each in "ab":
                        owners[each].channel_owner.abort(each, id)
                else:
                    committed[body] = max(at)
                    for each in rng.sample("ab", 2):
                        if rng.random() < 0.3:
                            await take_over(each)
                        await commit(each, id, max(at))
        for each in "ab":
            if rng.random() < 0.5:
                owners[each].channel_owner.tick_all()
    for each in "ab":
        owners[each].channel_owner.tick_all()
    await world.settle()

    packs = await _packs(world, None)
    seen = [(record.ts, bytes(record.body)) for pack in packs for record in pack.messages]
    assert seen == sorted(seen, key=lambda each: each[0])
    for body, ts in committed.items():
        [pack] = [pack for pack in packs if any(record.body == body for record in pack.messages)]
        assert [record.ts for record in pack.messages if record.body == body] == [ts, ts]
    assert {body for _, body in seen if body.startswith(b"t")} == committed.keys()
    for place, pack in enumerate(packs):
        rest = [(record.ts, record.body) for each in packs[place + 1 :] for record in each.messages]
        again = await _packs(world, list(pack.end_positions.values()))
        assert [(record.ts, record.body) for each in again for record in each.messages] == rest


async def _packs(world, positions):
    """All that is there, from the beginning or from positions."""
    stream = TtMsgStream(MemoryWal(world.log), group="g")
    if positions is None:
        stream.as_consumer(["a", "b"], From.EARLIEST)
    else:
        stream.seek(positions)
    packs = []
    end = min(max(_time(record) for record in world.records(channel)) for channel in "ab")
    while stream.end_ts < end:
        packs.append(await anext(stream))
    await stream.close()
    return packs


def _time(record: Record) -> int:
    return 0 if record.type in (RecordType.FENCE, RecordType.PREPARE, RecordType.ABORT) else record.ts


async def test_a_snapshot_has_its_turn_though_a_transaction_is_always_prepared(world):
    await world.channels("a")
    node = world.owner(snapshot_records=10)
    await node.own("a")
    owner, refused = node.channel_owner, 0
    for pseq in range(1, 60):  # each is prepared before the one before it is committed
        world.source.advance(0.01)
        with contextlib.suppress(Unavailable):
            await prepare(owner, "a", world, pseq)
        refused += owner.prepared()["a"][-1:] == [] or owner.prepared()["a"][-1].id != id_of(pseq)
        for each in owner.prepared()["a"]:
            if each.id != id_of(pseq):
                await owner.commit_next("a", {each.id: each.ts})
        owner.tick_all()
        await world.settle()
    snapshots = [each for each in world.records("a") if each.type is RecordType.PRODUCERS]
    assert len(snapshots) >= 5
    assert refused <= 2 * len(snapshots)
    behind = [each for each in world.records("a") if each.id > owner.checkpoints()["a"]]
    assert len(behind) < 30, "what the next owner has to read"
