"""A replicated state with several proposers, while the log fails, answers late and doubles records, processes die, and
snapshots replace what lies before them: all readers agree, and what was answered is so."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import pytest

from tidewal.runtime.errors import (
    BadRecord,
    CorruptLog,
    Fenced,
    FormatTooNew,
    FormatTooOld,
    InvalidRequest,
    PositionLost,
    PreconditionFailed,
    TidewalError,
    Unavailable,
)
from tidewal.runtime.log.record import RecordType, encode
from tidewal.runtime.log.wal import Append, ChannelPolicy, Entry, From, OnAppended
from tidewal.runtime.replicated import records
from tidewal.runtime.replicated.fold import Fold
from tidewal.runtime.replicated.records import Event, FeatureLevels, encode_event
from tidewal.runtime.replicated.replica import Replica, SnapshotPacing
from tidewal.runtime.testing.clock import run_virtual
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

CHANNEL = "state"
KEYS = 3


class Versions:
    """Keys with versions: a change names the version that it follows."""

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}
        self.applied: list[str] = []

    def apply(self, event: Event) -> None:
        if event["kind"] != "set":
            raise records.unknown_kind("test", event["kind"])
        if self.versions.get(event["key"], 0) != event["after"]:
            raise PreconditionFailed(f"{event['key']} has another version")
        self.versions[event["key"]] = event["after"] + 1
        self.applied.append(event["name"])

    def snapshot(self) -> object:
        return [self.versions, self.applied]

    def restore(self, snapshot: Any) -> None:
        self.versions, self.applied = snapshot


class LaterVersions(Versions):
    """A later Tidewal's: from the second feature level on a key can be removed."""

    kind_levels: ClassVar[dict[str, int]] = {"remove": 2}

    def apply(self, event: Event) -> None:
        if event["kind"] == "remove":
            self.versions.pop(event["key"], None)
            self.applied.append(event["name"])
        else:
            super().apply(event)


class VersionsOfAll(Versions):
    """Changes may be written by any author, though there is a leader."""

    own_kinds = frozenset({"set"})


class Unruly(MemoryWal):
    """Beside the faults of its plan: an append may land long after its error, or twice, and a reader may lag."""

    def __init__(self, log: MemoryLog, faults: FaultPlan, rng: random.Random, removed: list[Entry]) -> None:
        super().__init__(log, faults)
        self.late = self.twice = self.lag = 0.0
        self.removed = removed
        self._rng = rng

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        late, twice = self._rng.random() < self.late, self._rng.random() < self.twice
        land = partial(asyncio.get_running_loop().call_later, self._rng.uniform(0, 3), self._land, list(entries))

        def again(result: list[bytes] | TidewalError) -> None:
            if twice and (isinstance(result, list) or result.fields.get("outcome_unknown")):
                land()
            done(result)

        if late:
            land()
            done(Unavailable("it will land", outcome_unknown=True))
        else:
            super().submit(entries, again)

    def _land(self, entries: Sequence[Append]) -> None:
        MemoryWal(self.log).submit(entries, lambda _: None)

    async def read(self, channel, start):
        async for entries in super().read(channel, start):
            if self._rng.random() < self.lag:
                await asyncio.sleep(self._rng.uniform(0, 2))
            yield entries

    async def truncate(self, channel, id) -> None:
        self.removed += [entry for entry in self.log.channels[channel].entries if entry.id < id]
        await super().truncate(channel, id)


def replica_of(wal: MemoryWal, author: str, *, led: bool, state: type[Versions] = Versions) -> Replica[Versions]:
    pacing = SnapshotPacing(records=20, retry_records=5, factor=0.5)
    return Replica(wal, CHANNEL, state, RecordType.CATALOG, led=led, author=author, pacing=pacing)


@asynccontextmanager
async def replicas(
    *authors: str, led: bool = False, log: MemoryLog | None = None, state: type[Versions] = Versions
) -> AsyncIterator[list[Replica]]:
    log = log or MemoryLog()
    opened: list[Replica] = []
    for author in authors:
        wal = MemoryWal(log)
        await wal.create_channel(CHANNEL, ChannelPolicy())
        opened.append(replica_of(wal, author, led=led, state=state))
        await opened[-1].open()
    try:
        yield opened
    finally:
        for each in opened:
            await each.close()


def change(name: str, after: int = 0, key: str = "k") -> Event:
    return {"kind": "set", "key": key, "after": after, "name": name}


@dataclass
class Simulation:
    """Processes that propose, snapshot, lead and die; `answers` has what each proposal was told."""

    seed: int
    led: bool
    own: bool = False
    answers: dict[str, str] = field(default_factory=dict)
    removed: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.state = VersionsOfAll if self.own else Versions
        self.log = MemoryLog()
        self.wals: list[Unruly] = []
        self.faulty = True

    async def run(self) -> None:
        await MemoryWal(self.log).create_channel(CHANNEL, ChannelPolicy())
        await asyncio.gather(*(self._process(number) for number in range(4)))

    def _wal(self) -> Unruly:
        rates = Rates(fail=0.03, unknown=0.05, lost=0.05, delay=0.1, delay_s_max=0.5)
        wal = Unruly(self.log, FaultPlan(self.rng.randrange(2**32), rates), self.rng, self.removed)
        wal.late, wal.twice, wal.lag = 0.05, 0.1, 0.2
        self.wals.append(wal)
        return wal

    async def _process(self, number: int) -> None:
        for life in range(4):
            name = f"p{number}.{life}"
            replica = replica_of(self._wal(), name, led=self.led, state=self.state)
            with suppress(TidewalError):
                await replica.open()
                await asyncio.gather(*(self._work(replica, f"{name}.{task}") for task in range(2)))
            await replica.close()  # with what is on its way still there

    async def _work(self, replica: Replica[Versions], name: str) -> None:
        for step in range(self.rng.randrange(5, 25)):
            await asyncio.sleep(self.rng.uniform(0, 0.3))
            what = self.rng.random()
            if self.led and what < 0.15:
                with suppress(Fenced, Unavailable):
                    await replica.claim(replica._author)
            elif what < 0.2:
                with suppress(TidewalError):
                    await replica.snapshot()
            elif what < 0.25:
                garbage = self.rng.choice(
                    [b"garbage", encode(encode_event(RecordType.ROWS, {"kind": "x"}, "x", 1, None))]
                )
                MemoryWal(self.log).submit([Append(CHANNEL, garbage)], lambda _: None)
            else:
                await self._propose(replica, f"{name}.{step}")
                await replica.snapshot_if_due()

    async def _propose(self, replica: Replica[Versions], name: str) -> None:
        key = f"k{self.rng.randrange(KEYS)}"
        propose = replica.propose_own if self.own and self.rng.random() < 0.7 else replica.propose
        try:
            await propose(change(name, replica.fold.state.versions.get(key, 0), key))
            self.answers[name] = "accepted"
            assert name in replica.fold.state.applied, "what is accepted is in the state of its author"
        except TidewalError as error:
            self.answers[name] = "unknown" if error.fields.get("outcome_unknown") else "refused"

    async def check(self) -> None:
        await asyncio.sleep(10)  # what is on its way lands
        present = self.log.channels[CHANNEL].entries
        whole = Fold(self.state, RecordType.CATALOG, led=self.led)
        history = {entry.id: entry for entry in [*self.removed, *present]}
        for id in sorted(history):
            whole.read(history[id])
        # the snapshots among them are not to be used: this is the state from the first record on
        whole._pages = records.PageCollector()
        whole.finish()
        async with replicas("late", led=self.led, log=self.log, state=self.state) as [late]:
            assert late.fold.snapshot() == whole.snapshot(), "the state from a snapshot is the state from the start"
        applied = Counter(whole.state.applied)
        assert set(applied.values()) <= {1}, "nothing counts twice"
        for name, answer in self.answers.items():
            if answer != "unknown":
                assert applied[name] == (answer == "accepted"), (name, answer)
        assert set(applied) <= set(self.answers)


@pytest.mark.parametrize(("led", "own"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("round", range(8))
def test_all_readers_agree_and_answers_are_true(seed: int, round: int, led: bool, own: bool) -> None:
    def simulate() -> Simulation:
        simulation = Simulation(seed + round, led, own)

        async def main() -> None:
            await simulation.run()
            await simulation.check()

        run_virtual(main())
        return simulation

    simulation = simulate()
    assert simulation.removed, "snapshots have replaced entries"
    assert {"accepted", "refused"} <= set(simulation.answers.values())
    again = simulate()
    assert again.log.dump() == simulation.log.dump()
    assert again.answers == simulation.answers


def test_a_record_counts_once_and_only_where_its_precondition_holds() -> None:
    async def main() -> None:
        log = MemoryLog()
        async with replicas("a", "b", log=log) as [a, b]:
            await a.propose(change("first"), change("second", after=1))
            with pytest.raises(PreconditionFailed):
                await b.propose(change("third", after=1))
            again = log.channels[CHANNEL].entries[1]
            await MemoryWal(log).append(CHANNEL, again.payload)
            await b.propose(change("fourth", after=2))
            assert (await a.catch_up()).applied == b.fold.state.applied == ["first", "second", "fourth"]

    run_virtual(main())


class Losing(MemoryWal):
    """The next append is kept back, and its outcome unknown; `land` writes it."""

    kept: Sequence[Append] = ()
    losing = False

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        if not self.losing:
            return super().submit(entries, done)
        self.losing, self.kept = False, list(entries)
        return done(Unavailable("no answer", outcome_unknown=True))

    def land(self) -> None:
        super().submit(self.kept, lambda _: None)


def test_an_own_record_that_lands_late_has_no_effect_behind_the_next_one() -> None:
    async def main() -> None:
        wal = Losing()
        await wal.create_channel(CHANNEL, ChannelPolicy())
        replica = replica_of(wal, "a", led=False)
        await replica.open()
        wal.losing = True
        with pytest.raises(Unavailable) as caught:
            await replica.propose(change("lost"))
        assert not caught.value.fields.get("outcome_unknown"), "the record behind it was read back"
        await replica.propose(change("found"))
        wal.land()
        await replica.propose(change("next", after=1))
        assert replica.fold.state.applied == ["found", "next"]
        await replica.close()

    run_virtual(main())


@pytest.mark.parametrize("leads", [False, True])
def test_an_own_record_counts_under_whichever_leader_and_late_behind_none_of_its_author(leads: bool) -> None:
    async def main() -> None:
        log = MemoryLog()
        wal = Losing(log)
        await wal.create_channel(CHANNEL, ChannelPolicy())
        node = Replica(wal, CHANNEL, VersionsOfAll, RecordType.CATALOG, led=True, author="a")
        other = Replica(MemoryWal(log), CHANNEL, VersionsOfAll, RecordType.CATALOG, led=True, author="b")
        for each in (node, other):
            await each.open()
        with pytest.raises(Unavailable, match="leads"):
            await node.propose_own(change("too early"))
        await other.claim("b")
        await node.catch_up()
        if leads:
            await node.claim("a")
        await node.propose_own(change("first"))
        wal.losing = True
        with pytest.raises(Unavailable) as caught:
            await node.propose_own(change("lost", after=1))
        assert not caught.value.fields.get("outcome_unknown"), "the own record behind it was read back"
        await other.claim("b")
        await node.propose_own(change("second", after=1))
        wal.land()
        await node.propose_own(change("third", after=2))
        await other.propose(change("the leader's", after=3))
        with pytest.raises(Fenced):
            await node.propose(change("superseded", after=4))
        with pytest.raises(InvalidRequest, match="leader"):
            await node.propose_own({"kind": "level", "level": 2})
        for each in (node, other):
            assert (await each.catch_up()).applied == ["first", "second", "third", "the leader's"]
            await each.close()

    run_virtual(main())


class AnswersHeldBack(MemoryWal):
    """While `holding`, an append is stored at once, and answered when `answer` is called."""

    holding = False
    answer: Callable[[], object]

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        def answered(result: list[bytes] | TidewalError) -> None:
            self.answer = partial(done, result)

        super().submit(entries, answered if self.holding else done)


def test_a_log_may_answer_on_any_thread_when_nothing_else_wakes_the_loop() -> None:
    async def main() -> None:
        wal = AnswersHeldBack()
        await wal.create_channel(CHANNEL, ChannelPolicy())
        replica = replica_of(wal, "a", led=False)
        await replica.open()
        wal.holding = True
        for writing in (replica.propose(change("first")), replica.snapshot()):
            written = asyncio.ensure_future(writing)
            await replica.changed()  # it is read back before the log answers
            await asyncio.to_thread(wal.answer)
            await written
        assert replica.fold.state.applied == ["first"]
        await replica.close()

    with closing(asyncio.new_event_loop()) as loop:  # `asyncio.run` would wait for a task that is never woken
        loop.set_debug(True)  # a thread that settles a future without waking the loop gets an error
        loop.run_until_complete(main())


def test_a_snapshot_without_all_its_pages_is_none(monkeypatch) -> None:
    monkeypatch.setattr(records, "PAGE_BYTES", 64)

    async def main() -> None:
        log = MemoryLog()
        async with replicas("a", log=log) as [a]:
            for number in range(20):
                await a.propose(change(f"name {number}", after=number))
            await a.snapshot()
            entries = log.channels[CHANNEL].entries
            pages = [entry for entry in entries if b"as_of" in bytes(entry.payload)]
            assert len(pages) > 3
            async with replicas("b", log=log) as [b]:
                assert b.fold.state.applied == a.fold.state.applied
            entries.remove(pages[1])
            reader = replica_of(MemoryWal(log), "c", led=False)
            with pytest.raises(CorruptLog, match="no snapshot"):
                await reader.open()
            await reader.close()

    run_virtual(main())


def test_a_snapshot_of_a_superseded_leader_does_no_harm() -> None:
    """What it says was so after the record that it names, and the records behind that are applied to it."""

    async def main() -> None:
        log = MemoryLog()
        async with replicas("a", "b", led=True, log=log) as [a, b]:
            await a.claim("a")
            await a.propose(change("first"))
            as_of, pages = a.fold.as_of, records.pages_of(a.fold.snapshot(), a.fold.as_of, 1)
            await b.claim("b")
            await b.propose(change("second", after=1))
            for page in pages:
                payload = encode(encode_event(RecordType.CATALOG, page, "a", 0, a._standing))
                await MemoryWal(log).append(CHANNEL, payload)
            await MemoryWal(log).truncate(CHANNEL, as_of)
            with pytest.raises(Fenced):
                await a.propose(change("third", after=2))
            async with replicas("c", led=True, log=log) as [late]:
                assert late.fold.state.applied == ["first", "second"]
                assert late.fold.claim == b.fold.claim

    run_virtual(main())


def removal(name: str, key: str = "k") -> Event:
    return {"kind": "remove", "key": key, "name": name}


@asynccontextmanager
async def two_versions(log: MemoryLog, *, led: bool) -> AsyncIterator[list[Replica[Versions]]]:
    """Two processes on one log, the second of which knows the second feature level, and leads where one is to."""
    async with AsyncExitStack() as stack:
        found: list[Replica[Versions]] = []
        for author, state, highest in (("old", Versions, 1), ("new", LaterVersions, 2)):
            wal, levels = MemoryWal(log), FeatureLevels(1, highest)
            await wal.create_channel(CHANNEL, ChannelPolicy())
            found.append(Replica(wal, CHANNEL, state, RecordType.CATALOG, led=led, author=author, levels=levels))
            stack.push_async_callback(found[-1].close)
            await found[-1].open()
        if led:
            await found[-1].claim("new")
        yield found


@pytest.mark.parametrize("led", [False, True])
def test_what_needs_a_later_level_counts_for_no_version_before_the_log_has_that_level(led) -> None:
    async def main() -> None:
        log = MemoryLog()
        async with two_versions(log, led=led) as [old, new]:
            await new.propose(change("first"))
            for event in (removal("too early"), {**change("too early", after=1), "v": 2}):
                with pytest.raises(InvalidRequest, match="level"):
                    await new.propose(event)
            # As a process would write them that kept to no rule.
            for number, fields in enumerate([{}, {"v": 1}, {"v": 2}, {"v": 0}, {"kind": "unheard of"}], 100):
                claim = new.fold.claim if led else None
                record = encode_event(RecordType.CATALOG, {**removal("early"), **fields}, "unruly", number, claim)
                await new._log.append(CHANNEL, encode(record))
            await new.propose(change("second", after=1))
            await old.catch_up()
            assert old.ended is None
            assert old.skipped == new.skipped == 5
            assert old.fold.state.applied == new.fold.state.applied == ["first", "second"]
            assert old.fold.snapshot() == new.fold.snapshot(), "numbers and positions, too"
            await new.raise_level(2)
            await new.propose(removal("removed"))
            assert new.fold.state.versions == {}
            with pytest.raises(FormatTooNew, match="upgrade"):
                await old.catch_up()

    run_virtual(main())


@pytest.mark.parametrize("led", [False, True])
def test_a_log_begins_at_the_lowest_level_that_its_first_author_knows(led) -> None:
    async def main() -> None:
        wal = MemoryWal()
        await wal.create_channel(CHANNEL, ChannelPolicy())
        levels = FeatureLevels(2, 3)
        newer = Replica(wal, CHANNEL, LaterVersions, RecordType.CATALOG, led=led, author="a", levels=levels)
        await newer.open()
        if led:
            await newer.claim("a")
        await newer.propose(removal("removed"))
        for state, others in ((Versions, FeatureLevels(1, 1)), (LaterVersions, FeatureLevels(3, 4))):
            other = Replica(wal, CHANNEL, state, RecordType.CATALOG, led=led, author="b", levels=others)
            with pytest.raises(FormatTooNew if others.highest < 2 else FormatTooOld, match="level 2"):
                await other.open()
            await other.close()
        await newer.snapshot()
        after = Replica(wal, CHANNEL, LaterVersions, RecordType.CATALOG, led=led, author="c", levels=levels)
        await after.open()
        assert after.fold.level == 2
        for each in (newer, after):
            await each.close()

    run_virtual(main())


def test_whom_an_earlier_version_forestalls_in_beginning_a_log_does_not_follow_it(monkeypatch) -> None:
    async def main() -> None:
        wal = MemoryWal()
        await wal.create_channel(CHANNEL, ChannelPolicy())
        old = Replica(wal, CHANNEL, Versions, RecordType.CATALOG, led=False, author="a")
        levels = FeatureLevels(2, 3)
        new = Replica(wal, CHANNEL, LaterVersions, RecordType.CATALOG, led=False, author="b", levels=levels)
        begin = new.propose

        async def begin_second(*events: Event) -> None:
            await old.open()
            await begin(*events)

        monkeypatch.setattr(new, "propose", begin_second)
        with pytest.raises(FormatTooOld, match="level 1"):
            await new.open()
        for each in (old, new):
            await each.close()

    run_virtual(main())


def test_the_record_that_raises_the_level_ends_who_does_not_know_it() -> None:
    async def main() -> None:
        log = MemoryLog()
        async with replicas("old", "new", log=log) as [old, new]:
            new.fold.levels = FeatureLevels(1, 3)
            with pytest.raises(FormatTooNew):
                await old.raise_level(3)
            with pytest.raises(PreconditionFailed, match="level"):
                await new.raise_level(3)
            await new.propose({**change("first"), "v": 3})
            assert new.fold.state.applied == ["first"]
            with pytest.raises(FormatTooNew, match="upgrade"):
                await old.catch_up()

    run_virtual(main())


def test_a_process_stores_no_snapshot_of_a_state_that_lacks_a_record_of_a_newer_one() -> None:
    async def main() -> None:
        log = MemoryLog()
        async with replicas("old", "new", log=log) as [old, new]:
            new.fold.levels = FeatureLevels(1, 3)
            await new.propose(change("first"))
            await old.catch_up()
            before = old.fold.as_of, old.fold.snapshot()
            await new.raise_level(3)
            with pytest.raises(FormatTooNew):
                await old.changed()
            assert (old.fold.as_of, old.fold.snapshot()) == before
            entries = list(log.channels[CHANNEL].entries)
            with pytest.raises(FormatTooNew):
                await old.snapshot()
            old.pacing = SnapshotPacing(records=1, factor=0.0)
            await old.snapshot_if_due()
            assert log.channels[CHANNEL].entries == entries

    run_virtual(main())


def test_nothing_counts_before_the_log_has_begun() -> None:
    async def main() -> None:
        log = MemoryLog()
        wal = MemoryWal(log)
        await wal.create_channel(CHANNEL, ChannelPolicy())
        await wal.append(CHANNEL, encode(encode_event(RecordType.CATALOG, {"kind": "noop"}, "dead", 2, None)))
        async with replicas("a", "b", log=log) as [a, b]:
            await a.propose(change("first"))
            assert (await b.catch_up()).applied == ["first"]
        log.channels[CHANNEL].entries.pop(1)
        fold = Fold(Versions, RecordType.CATALOG, led=False)
        async with aclosing(wal.read(CHANNEL, From.EARLIEST)) as reader:
            for entry in await anext(reader):
                fold.read(entry)
        with pytest.raises(CorruptLog):
            fold.finish()

    run_virtual(main())


def test_a_page_that_claims_any_number_of_pages_costs_nothing() -> None:
    collector = records.PageCollector()
    page = {"v": 1, "as_of": b"1", "of": 10**12, "digest": b"12345678", "page": 0, "data": b""}
    collector.add(page)  # would take a terabyte
    for number in (-1, 10**12):
        with pytest.raises(BadRecord, match="page"):
            collector.add({**page, "page": number})
    assert collector.snapshot is None


class HeldWal(MemoryWal):
    """Keeps what is submitted until it is let go."""

    held: list[tuple[Any, OnAppended]] | None = None

    def submit(self, entries: Any, done: OnAppended) -> None:
        if self.held is None:
            super().submit(entries, done)
        else:
            self.held.append((entries, done))

    def let_go(self) -> None:
        held, self.held = self.held, None
        for entries, done in held or []:
            super().submit(entries, done)


def test_of_two_claims_under_one_name_one_wins() -> None:
    async def main() -> None:
        log = MemoryLog()
        wals = [HeldWal(log), HeldWal(log)]
        await wals[0].create_channel(CHANNEL, ChannelPolicy())
        nodes = [replica_of(wal, "", led=True) for wal in wals]
        for node, wal in zip(nodes, wals, strict=True):
            await node.open()
            wal.held = []
        claims = [asyncio.create_task(node.claim("same")) for node in nodes]
        await asyncio.sleep(0.05)
        for wal in reversed(wals):
            wal.let_go()
        await asyncio.gather(*claims)
        results = await asyncio.gather(*(node.propose(change("x")) for node in nodes), return_exceptions=True)
        assert [type(each) for each in results].count(Fenced) == 1
        assert nodes[0].fold.claim.term == 2  # both have won, one after the other
        for node in nodes:
            await node.close()

    run_virtual(main())


class HoledWal(MemoryWal):
    """Has lost an entry in the middle of its channel, for good."""

    hole = b""

    async def read(self, channel: str, start: Any) -> AsyncIterator[Sequence[Entry]]:
        async for entries in super().read(channel, start):
            for entry in entries:
                if entry.id == self.hole:
                    raise PositionLost("lost", requested=entry.id, first_available=entry.id + b"0", channel=channel)
                yield [entry]


def test_a_follower_ends_at_a_loss_that_is_there_for_good() -> None:
    async def main() -> None:
        log = MemoryLog()
        async with replicas("a", log=log) as [a]:
            for number in range(5):
                await a.propose(change(f"name {number}", after=number))
        wal = HoledWal(log)
        wal.hole = log.channels[CHANNEL].entries[3].id
        reader = replica_of(wal, "b", led=False)
        with pytest.raises(PositionLost):
            await reader.open()
        await reader.close()

    run_virtual(main())
