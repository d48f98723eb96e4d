"""One time over several channels, and where each of them ends at it, while the log answers in any order."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from tidewal.runtime.errors import DeadlineExceeded, Overloaded, Unavailable
from tidewal.runtime.log.record import RecordType
from tidewal.runtime.testing.clock import run_virtual
from tidewal.runtime.testing.memory import MemoryWal


class Answering(MemoryWal):
    """Keeps its answers, which may be given in any order."""

    def __init__(self, log) -> None:
        super().__init__(log)
        self.answers = []
        self.holding = False

    def submit(self, entries, done):
        if self.holding:
            super().submit(entries, lambda result: self.answers.append(lambda: done(result)))
        else:
            super().submit(entries, done)


async def in_flight(world, wal, *batches):
    """An owner with an append in flight for each of `batches`, the channels of its records."""
    await world.channels("a", "b", "c")
    owner = world.owner(wal)
    await owner.own("a", "b", "c")
    wal.holding = True
    appends = [owner.channel_owner.append([(channel, world.rows()) for channel in batch]) for batch in batches]
    return owner, appends


async def test_no_append_is_waited_for_that_nothing_overtook(world):
    wal = Answering(world.log)
    owner, (first, second) = await in_flight(world, wal, "a", "ab")
    wal.answers.pop(0)()
    acknowledged = await first
    syncing = asyncio.ensure_future(owner.channel_owner.sync(["a", "b"]))
    await asyncio.sleep(0)
    point = syncing.result()
    assert acknowledged.ts <= point.time
    assert point.channels["a"].id == acknowledged.ids[0]
    assert point.channels["b"].cseq == 1
    wal.answers.pop(0)()
    assert (await second).ts > point.time


async def test_an_append_that_was_overtaken_is_waited_for_and_the_ends_are_those_of_one_time(world):
    wal = Answering(world.log)
    owner, (slow, fast, later) = await in_flight(world, wal, "a", "b", "ab")
    wal.answers.pop(1)()
    acknowledged = await fast
    syncing = asyncio.ensure_future(owner.channel_owner.sync(["a", "b"]))
    alone = await owner.channel_owner.sync(["b"])
    assert alone.channels["b"].id == acknowledged.ids[0]
    await world.settle()
    assert not syncing.done()
    wal.answers.pop(1)()  # the later one is durable before the slow one
    wal.answers.pop(0)()
    point = await syncing
    assert point.time == acknowledged.ts
    assert [point.channels[name].id for name in "ab"] == [(await slow).ids[0], acknowledged.ids[0]]
    assert (await later).ts > point.time


async def test_a_channel_that_stalls_ends_the_wait_for_its_time(world):
    wal = Answering(world.log)
    owner, (slow, fast) = await in_flight(world, wal, "a", "b")
    wal.answers.pop(1)()
    await fast
    syncing = asyncio.ensure_future(world.outcome(owner.channel_owner.sync(["a", "b"])))
    await asyncio.sleep(0)
    wal.holding = False
    await owner.own("a", term=2, previous_limit=owner.limit)
    assert isinstance(await syncing, Unavailable)
    await slow


step = st.one_of(
    st.sampled_from(["a", "b", "c", "ab", "bc", "abc"]),
    st.integers(0, 5),
    st.sampled_from(["sync", "sync some", "again"]),
)


@given(st.lists(step, max_size=40))
def test_a_time_has_all_that_was_acknowledged_and_its_ends_are_exact(make_world, steps):
    world = make_world()

    async def main() -> None:
        wal = Answering(world.log)
        await world.channels("a", "b", "c")
        owner = world.owner(wal)
        await owner.own("a", "b", "c")
        wal.holding = True
        acknowledged: dict[str, int] = dict.fromkeys("abc", 0)
        appends, syncs = [], []

        def note(channels: str):
            def noted(append) -> None:
                acknowledged.update({name: max(acknowledged[name], append.result().ts) for name in channels})

            return noted

        for each in steps:
            if isinstance(each, int):
                if wal.answers:
                    wal.answers.pop(each % len(wal.answers))()
            elif each.startswith("sync"):
                names = "abc" if each == "sync" else "ac"
                least = max(acknowledged[name] for name in names)
                syncs.append((least, 0, asyncio.ensure_future(owner.channel_owner.sync(list(names)))))
            elif each == "again":
                at = max(acknowledged.values(), default=0) if not syncs else syncs[0][0]
                syncs.append((at, at, asyncio.ensure_future(owner.channel_owner.sync(list("abc"), at=at, exact=True))))
            else:
                append = owner.channel_owner.append([(name, world.rows()) for name in each])
                append.add_done_callback(note(each))
                appends.append(append)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        while wal.answers:
            wal.answers.pop()()
        await asyncio.gather(*appends)
        for least, at, sync in syncs:
            point = await sync
            assert point.time >= least
            assert at in (0, point.time), "what was acknowledged behind it since counts for nothing"
            for name, end in point.channels.items():
                below = [record for record in world.records(name) if record.ts <= point.time]
                assert below[-1].id == end.id

    run_virtual(main(), world.source)


async def test_ticks_of_one_channel_wait_for_no_other(world):
    class Silent(MemoryWal):
        silent = ""

        def submit(self, entries, done):
            if any(entry.channel == self.silent for entry in entries):
                if len(entries) > 1:
                    raise Unavailable("the log refuses what is for this channel")
                return  # never answered
            super().submit(entries, done)

    await world.channels("a", "b")
    wal = Silent(world.log)
    owner = world.owner(wal)
    await owner.own("a", "b")
    for _ in range(2):
        wal.silent = ""
        appended = await owner.channel_owner.append([("b", world.rows()), ("a", world.rows())])
        wal.silent = "a"
        owner.channel_owner.tick_all()
        ticks = [record.ts for record in world.records("b") if record.type is RecordType.TIME_TICK]
        assert ticks[-1] >= appended.ts
    await owner.channel_owner.tick_now(["b"])


async def test_a_channel_in_flight_leaves_room_to_the_others(world, holding_wal):
    await world.channels("a", "b", "c")
    wal = holding_wal(world.log)
    owner = world.owner(wal, inflight_bytes=1_000, limit_name="a.limit")
    await owner.own("a", "b", "c")
    wal.holding = True
    taken: dict[str, int] = dict.fromkeys("abc", 0)
    appends = []
    for name in ("a", "b", "c"):
        refused = None
        while refused is None:
            try:
                appends.append(owner.channel_owner.append([(name, world.rows(bytes(50)))]))
                taken[name] += 50
            except Overloaded as error:
                refused = error
        assert (refused.fields["limit"], refused.fields["channel"]) == ("a.limit", name)
    assert taken == {"a": 500, "b": 250, "c": 150}
    wal.let_go()
    await asyncio.gather(*appends)
    assert owner.channel_owner.inflight_bytes == 0
    large = owner.channel_owner.append([("a", world.rows(bytes(5_000)))])  # one batch always passes
    assert (await large).ids


async def test_what_a_next_owner_must_read_is_bounded_in_bytes(world):
    await world.channels("a", "b")
    owner = world.owner(snapshot_bytes=1_000)
    await owner.own("a", "b")
    for _ in range(12):
        await owner.channel_owner.append([("a", world.rows(bytes(100)))])
        owner.channel_owner.tick_all()
    types = {name: {record.type for record in world.records(name)} for name in "ab"}
    assert RecordType.PRODUCERS in types["a"]
    assert RecordType.PRODUCERS not in types["b"], "each channel has a snapshot of its own"


async def test_a_batch_without_records_changes_nothing(world):
    await world.channels("a")
    owner = world.owner()
    await owner.own("a")
    before = await owner.channel_owner.append([("a", world.rows())])
    assert (await owner.channel_owner.append([], producer="p", pseq=1)).ts > before.ts
    assert len(world.records("a")) == 2


async def test_a_close_waits_for_no_answer_that_has_come_though_a_stalled_channel_has_the_rest_of_the_batch(world):
    wal = Answering(world.log)
    owner, (lost, both) = await in_flight(world, wal, "b", "ab")
    _, answer_both = wal.answers
    owner.channel_owner._appends._on_appended(  # what the log says in place of the first answer
        owner.channel_owner._appends._undecided()[1].batch, Unavailable("no answer", outcome_unknown=True)
    )
    assert owner.channel_owner.stalled == ["b"]
    wal.holding = False
    closing = asyncio.ensure_future(owner.channel_owner.close())
    await world.settle()
    assert not closing.done()
    answer_both()
    await world.settle()
    assert closing.done()
    for append in (lost, both):
        assert isinstance(await world.outcome(append), DeadlineExceeded)


async def test_a_close_waits_for_no_answer_that_has_come_though_one_before_it_came_after_the_lease(world):
    wal, lease = Answering(world.log), [True]
    await world.channels("a")
    owner = world.owner(wal, lease_holds=lambda: lease[0])
    await owner.own("a")
    wal.holding = True
    late, refused = (owner.channel_owner.append([("a", world.rows())]) for _ in range(2))
    lease[0] = False
    wal.answers.pop(0)()
    closing = asyncio.ensure_future(owner.channel_owner.close())
    await world.settle()
    assert not closing.done()
    refusal = Overloaded("no room", limit="disk")
    owner.channel_owner._appends._on_appended(owner.channel_owner._appends._undecided()[1].batch, refusal)
    await world.settle()
    assert closing.done()
    assert isinstance(await world.outcome(late), DeadlineExceeded)
    assert await world.outcome(refused) is refusal
