"""Two runs of one migration at once: the later one has it, whatever the earlier one was about to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from tests.runtime.test_migration import NEW, OLD, assert_same, content, filled, plain
from tidewal.runtime.errors import Fenced, InvalidRequest, Moved, PreconditionFailed, Unavailable, Unsupported
from tidewal.runtime.log.migration_state import (
    MIGRATION_CHANNEL,
    SHORT_BYTES,
    MigrationPhase,
    MigrationState,
    MigrationStates,
    change_migration_state,
    check_in_use,
    is_migration_channel,
    migration_state,
)
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.log.redaction import shown_url
from tidewal.runtime.log.wal import Append, ChannelInfo, ChannelPolicy, Entry, From, FromId, OnAppended, Start, Wal
from tidewal.runtime.migration import channel_copy
from tidewal.runtime.migration.migration import MigrationProof, cancel_migration, migrate
from tidewal.runtime.migration.migration_run import LOOK_VALID_S, SETTLE_S, MigrationRun
from tidewal.runtime.testing.clock import run_virtual
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

STILL_S = 10 * SETTLE_S  # how long a run stands still
BEGINNING = 4  # the steps of a run until its claim was read back
GROUPS = 100  # in a log with a proof that is not short
IN_FLIGHT_S = 30.0  # how long what a run has sent takes at most


class BrokerWal(MemoryWal):
    """A log that several processes write to, none of which it fences."""

    capabilities = replace(MemoryWal.capabilities, multi_process_write=True, one_node=False, one_machine=False)


class Gate:
    """Counts the steps of a run; the one that `left` counts down to takes `delay_s`."""

    def __init__(self, left: int, delay_s: float) -> None:
        self.left = left
        self.delay_s = delay_s
        self.reached = asyncio.Event()

    def delay(self) -> float:
        self.left -= 1
        if self.left:
            return 0
        self.reached.set()
        return self.delay_s

    async def pass_through(self) -> None:
        if delay := self.delay():
            await asyncio.sleep(delay)


class SlowWal(BrokerWal):
    """The log of a run of which one write is sent, and lands late."""

    def __init__(self, log: MemoryLog, gate: Gate) -> None:
        super().__init__(log)
        self._gate = gate

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        if delay := self._gate.delay():
            asyncio.get_running_loop().call_later(delay, super().submit, entries, done)
        else:
            super().submit(entries, done)

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        await self._gate.pass_through()
        await super().create_channel(channel, policy)

    async def drop_channel(self, channel: str) -> None:
        await self._gate.pass_through()
        await super().drop_channel(channel)

    async def seek_group(self, group: str, channel: str, start: Any) -> None:
        await self._gate.pass_through()
        await super().seek_group(group, channel, start)


class StillWal(BrokerWal):
    """The log of a run that stands still before it looks whether the migration is its own."""

    def __init__(self, log: MemoryLog, gate: Gate) -> None:
        super().__init__(log)
        self._gate = gate

    async def describe(self, channel: str) -> ChannelInfo:
        if channel == MIGRATION_CHANNEL:
            await self._gate.pass_through()
        return await super().describe(channel)


async def used(new_log: MemoryLog) -> tuple[Any, ...]:
    """A program opens the new log, appends, and moves a group on. Returns what is there then."""
    wal = BrokerWal(new_log)
    await check_in_use(wal, NEW)
    await wal.append("orders", b"next")
    entries = await content(wal, "orders")
    await wal.seek_group("midst", "orders", FromId(entries[-1].id))
    return await state_of(new_log)


async def state_of(log: MemoryLog) -> tuple[Any, ...]:
    wal = BrokerWal(log)
    groups = {group.name: group.positions for group in await wal.groups()}
    return log.dump(), sorted(log.channels), groups, {name: dict(each.holds) for name, each in log.channels.items()}


async def overtaken(step: int, kind: type[Any], delay_s: float, *, cancelled: bool) -> bool:
    """A run is overtaken at a step of it, by another run or by one that takes the migration back. Whether it has such a
    step."""
    old_log, new_log = MemoryLog(), MemoryLog()
    old, new = BrokerWal(old_log), BrokerWal(new_log)
    await filled(old)
    gate = Gate(step, delay_s)
    first = asyncio.create_task(migrate(kind(old_log, gate), kind(new_log, gate), OLD, NEW))
    reached = asyncio.create_task(gate.reached.wait())
    await asyncio.wait({first, reached}, return_when=asyncio.FIRST_COMPLETED)
    if first.done():
        reached.cancel()
        await first
        return False
    has_begun = (await migration_state(old)).phase is not MigrationPhase.OPEN
    if cancelled and has_begun:
        with suppress(InvalidRequest):  # the new log may be in use, for all that this run knows
            await cancel_migration(old, new, NEW)
            await check_in_use(old, OLD)
            assert set(new_log.channels) <= {MIGRATION_CHANNEL}
    await migrate(old, new, OLD, NEW)
    await assert_same(old, new)
    expected = await used(new_log)
    (ended,) = await asyncio.gather(first, return_exceptions=True)
    print(step, type(ended).__name__)
    assert isinstance(ended, Fenced | MigrationProof) or step <= BEGINNING
    assert await state_of(new_log) == expected
    assert not any(channel.holds for channel in new_log.channels.values())
    return True


@pytest.mark.parametrize("cancelled", [False, True], ids=["goes on", "taken back"])
@pytest.mark.parametrize(
    ("kind", "delay_s"), [(SlowWal, IN_FLIGHT_S), (StillWal, STILL_S)], ids=["in flight", "stands still"]
)
def test_a_run_that_is_overtaken_at_any_step_changes_nothing_more(
    kind: type[Any], delay_s: float, cancelled: bool
) -> None:
    steps = 1
    while run_virtual(overtaken(steps, kind, delay_s, cancelled=cancelled)):
        steps += 1
    assert steps > 20, steps


async def test_a_run_that_is_overtaken_doubles_nothing_on_each_log(backend: Any) -> None:
    class HeldWal(MemoryWal):
        """The old log of a run that stands still before it appends, until it is overtaken."""

        async def describe(self, channel: str) -> ChannelInfo:
            if channel == MIGRATION_CHANNEL and any(each.endswith("orders") for each in await new.channels()):
                reached.set()
                await goes_on.wait()
            return await super().describe(channel)

    reached, goes_on = asyncio.Event(), asyncio.Event()
    old, new = MemoryWal(MemoryLog()), await backend.wal()
    await filled(old)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(refused(HeldWal(old.log), new, Fenced))
        await reached.wait()
        await migrate(old, new, OLD, NEW, settle_s=0)
        await new.append("orders", b"next")
        goes_on.set()
    await first
    await old.append("orders", b"next")
    assert [payload for _, payload in await plain(new, "orders")] == [p for _, p in await plain(old, "orders")]


async def refused(old: Wal, new: Wal, error: type[Exception]) -> float:
    """Migrate to an error. Returns how long that took."""
    began = asyncio.get_running_loop().time()
    with pytest.raises(error):
        await migrate(old, new, OLD, NEW)
    return asyncio.get_running_loop().time() - began


def test_a_run_that_ended_with_an_error_is_not_waited_for() -> None:
    async def run() -> None:
        old, new = BrokerWal(), BrokerWal()
        await filled(old)
        await old.append("empty", encode(Record(RecordType.GROUP, key=b"id")))
        for _ in range(2):
            assert await refused(old, new, Unsupported) == 0
        assert (await migration_state(old)).run == ""
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0):  # cancelled, as by Ctrl-C: what it has sent is not known
                await migrate(old, SlowWal(new.log, Gate(1, STILL_S)), OLD, NEW)
        assert await refused(old, new, Unsupported) == SETTLE_S

    run_virtual(run())


def test_a_run_whose_append_may_still_land_is_waited_for() -> None:
    class Unsure(BrokerWal):
        def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
            if entries[0].channel == "orders":
                raise Unavailable("no answer", outcome_unknown=True)
            super().submit(entries, done)

    async def run() -> None:
        old, new = BrokerWal(), BrokerWal()
        await filled(old)
        assert await refused(old, Unsure(new.log), Unavailable) == 0
        assert await refused(old, Unsure(new.log), Unavailable) == SETTLE_S

    run_virtual(run())


def test_what_a_run_has_sent_to_the_old_log_alone_is_waited_for() -> None:
    class Dying(BrokerWal):
        """The old log of a run that is killed with its last request under way."""

        async def drop_channel(self, channel: str) -> None:
            if channel == MIGRATION_CHANNEL:
                loop, drop = asyncio.get_running_loop(), super().drop_channel
                loop.call_later(IN_FLIGHT_S, lambda: loop.create_task(drop(channel)))
                raise asyncio.CancelledError
            await super().drop_channel(channel)

    async def run() -> None:
        old, new = BrokerWal(), MemoryWal()
        await filled(old)
        await MigrationRun.begin(old, new, MigrationState(MigrationPhase.MIGRATING, "id", shown_url(NEW)))
        with pytest.raises(asyncio.CancelledError):
            await cancel_migration(Dying(old.log), new, NEW)
        with suppress(Fenced):  # what is waited for has taken the migration back
            await cancel_migration(old, new, NEW)
        await migrate(old, new, OLD, NEW)
        await asyncio.sleep(IN_FLIGHT_S)
        with pytest.raises(Moved):
            await check_in_use(old, OLD)

    run_virtual(run())


@pytest.mark.parametrize("phase", [MigrationPhase.MIGRATED, MigrationPhase.CANCELLING])
async def test_a_record_whose_answer_is_lost_is_not_taken_for_another_run(phase: MigrationPhase) -> None:
    class Lossy(MemoryWal):
        async def append(self, channel: str, payload: Any, *args: Any, **options: Any) -> Any:
            id = await super().append(channel, payload, *args, **options)
            if b'"phase": "%s"' % phase.encode() in payload:
                raise Unavailable("the answer is lost", outcome_unknown=True)
            return id

    old, new = MemoryWal(), MemoryWal()
    await filled(old)
    if phase is MigrationPhase.CANCELLING:
        await MigrationRun.begin(old, new, MigrationState(MigrationPhase.MIGRATING, "id", shown_url(NEW)))
        with pytest.raises(Unavailable, match="answer is lost"):
            await cancel_migration(Lossy(old.log), new, NEW)
        await cancel_migration(old, new, NEW)
    else:
        await refused(Lossy(old.log), new, Unavailable)
    await migrate(old, new, OLD, NEW)
    await assert_same(old, new)


def test_an_append_is_decided_before_a_run_lets_go() -> None:
    async def run() -> None:
        old, new = BrokerWal(), BrokerWal()
        await old.create_channel("orders", ChannelPolicy(retention_s=None))
        await old.append_many([Append("orders", b"1"), Append("orders", b"2")])
        await old.append("orders", bytes(channel_copy.APPEND_BYTES))
        await old.append("orders", encode(Record(RecordType.GROUP, key=b"id")))
        sent = 6  # behind what says `pending`, the channel and two appends: it is under way while the record is read
        began = asyncio.get_running_loop().time()
        with pytest.raises(Unsupported):
            await migrate(old, SlowWal(new.log, Gate(sent, IN_FLIGHT_S)), OLD, NEW)
        assert asyncio.get_running_loop().time() - began == IN_FLIGHT_S
        assert len(await content(new, "orders")) == 3

    run_virtual(run())


def test_a_log_that_answers_too_slowly_for_each_look_is_said_to() -> None:
    class Tired(BrokerWal):
        async def describe(self, channel: str) -> ChannelInfo:
            await asyncio.sleep(LOOK_VALID_S + 1)
            return await super().describe(channel)

    async def run() -> None:
        old, new = Tired(), BrokerWal()
        await filled(BrokerWal(old.log))
        async with asyncio.timeout(24 * 3600):
            with pytest.raises(Unavailable, match="needs over 5 s"):
                await migrate(old, new, OLD, NEW)
        await migrate(BrokerWal(old.log), new, OLD, NEW)

    run_virtual(run())


async def test_of_two_claims_at_once_the_first_in_the_log_counts() -> None:
    old, new = MemoryWal(), MemoryWal()
    first = await MigrationRun.begin(old, new, MigrationState(MigrationPhase.MIGRATING, "id", NEW))
    claims = [MigrationRun.claim(old, new, first.state) for _ in range(5)]
    ended = await asyncio.gather(*claims, return_exceptions=True)
    (won,) = [each for each in ended if isinstance(each, MigrationRun)]
    assert [type(each) for each in ended if each is not won] == [Fenced] * 4
    await won.change(MigrationPhase.MIGRATED, {})
    for run in (first, *(each for each in ended if isinstance(each, MigrationRun) and each is not won)):
        with pytest.raises(Fenced):
            await run.change(MigrationPhase.MIGRATED, {})
    with pytest.raises(PreconditionFailed):  # a record of the one before that lands late
        await change_migration_state(old, replace(first.state, phase=MigrationPhase.MIGRATED))
    assert await migration_state(old) == won.state


async def test_a_repeated_call_leaves_a_new_log_alone_that_goes_elsewhere() -> None:
    old, new, third = MemoryWal(), MemoryWal(), MemoryWal()
    await filled(old)
    proof = await migrate(old, new, OLD, NEW)
    await MigrationRun.begin(new, third, MigrationState(MigrationPhase.MIGRATING, "next", "memory://third"))
    assert await migrate(old, new, OLD, NEW) == proof
    with pytest.raises(Unavailable, match="memory://third"):
        await check_in_use(new, NEW)


async def test_what_a_program_brings_before_the_new_log_is_reserved_stays() -> None:
    class Window(BrokerWal):
        """A program opens the log, which is empty yet, just before it is reserved."""

        async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
            if channel == MIGRATION_CHANNEL:
                program = BrokerWal(self.log)
                await check_in_use(program, NEW)
                await program.create_channel("mine", ChannelPolicy())
                await program.append("mine", b"acknowledged")
            await super().create_channel(channel, policy)

    old, new = BrokerWal(), BrokerWal()
    await filled(old)
    assert await refused(old, Window(new.log), InvalidRequest) < SETTLE_S
    await check_in_use(new, NEW)
    await cancel_migration(old, new, NEW)
    await check_in_use(old, OLD)
    assert [payload for _, payload in await plain(new, "mine")] == [b"acknowledged"]


@pytest.mark.parametrize("killed", [False, True], ids=["refused", "killed"])
def test_a_second_migration_to_one_log_takes_nothing_from_the_first(killed: bool) -> None:
    async def run() -> None:
        one, two, new = BrokerWal(), BrokerWal(), BrokerWal()
        await filled(one)
        await two.create_channel("mine", ChannelPolicy())
        gate = Gate(1, IN_FLIGHT_S)  # what reserves the new log lands when that one is in use
        second = asyncio.create_task(migrate(two, SlowWal(new.log, gate), "memory://two", NEW))
        await gate.reached.wait()
        await migrate(one, new, OLD, NEW)
        await new.append("orders", b"acknowledged")
        if killed:
            second.cancel()
            await asyncio.wait({second})
            state = await migration_state(two)
            await change_migration_state(new, MigrationState(MigrationPhase.RESERVED, state.id, "memory://two"))
            with pytest.raises(Unavailable, match="memory://two"):
                await check_in_use(new, NEW)
        else:
            with pytest.raises(InvalidRequest, match="not empty"):
                await second
            await check_in_use(new, NEW)
        await cancel_migration(two, new, NEW)
        await check_in_use(two, "memory://two")
        await check_in_use(new, NEW)
        assert (await plain(new, "orders"))[-1][1] == b"acknowledged"

    run_virtual(run())


@pytest.mark.parametrize("let_go", [False, True], ids=["killed", "let go"])
def test_a_claim_that_lands_when_the_migration_was_taken_back_begins_nothing(let_go: bool) -> None:
    async def run() -> None:
        old, new = BrokerWal(), BrokerWal()
        await filled(old)
        state = MigrationState(MigrationPhase.MIGRATING, "id", shown_url(NEW))
        begun = await MigrationRun.begin(old, new, state)
        if let_go:
            with suppress(Unavailable):
                async with begun.letting_go():
                    raise Unavailable("the brokers are away")
        gate = Gate(1, SETTLE_S + IN_FLIGHT_S)
        late = asyncio.create_task(migrate(SlowWal(old.log, gate), new, OLD, NEW))
        await gate.reached.wait()
        await cancel_migration(old, new, NEW)
        await check_in_use(old, OLD)
        with pytest.raises(Fenced):
            await late
        await check_in_use(old, OLD)
        await migrate(old, new, OLD, NEW)
        await assert_same(old, new)

    run_virtual(run())


async def test_looks_at_the_old_log_read_no_proof_again() -> None:
    class Counting(MemoryWal):
        """Counts what is read of its state, in bytes."""

        count = 0

        async def read(self, channel: str, start: Start) -> AsyncGenerator[Sequence[Entry], None]:
            async for entries in super().read(channel, start):
                self.count += sum(len(each.payload) for each in entries if channel == MIGRATION_CHANNEL)
                yield entries

    class Away(MemoryWal):
        """A new log that never comes into use."""

        async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
            if channel != MIGRATION_CHANNEL and is_migration_channel(channel):
                raise Unavailable("the brokers are away")
            await super().create_channel(channel, policy)

    old, new = Counting(MemoryLog()), MemoryWal(MemoryLog())
    await filled(old)
    for number in range(GROUPS):
        await old.seek_group(f"group-{number}", "orders", From.EARLIEST)
    await refused(old, Away(new.log), Unavailable)
    entries = await content(old, MIGRATION_CHANNEL)
    for _ in range(3):
        await refused(old, Away(new.log), Unavailable)
    repeated = (await content(old, MIGRATION_CHANNEL))[len(entries) :]
    assert all(len(entry.payload) < SHORT_BYTES // 10 for entry in repeated)  # claims have no proof
    old.count = 0
    await migrate(old, new, OLD, NEW)
    assert old.count < GROUPS * SHORT_BYTES // 10


async def test_a_state_made_anew_is_read_from_its_beginning() -> None:
    """Dropped by a run that takes the migration back, and made again by another one, with as many entries."""
    old, new = MemoryWal(), MemoryWal()
    first = await MigrationRun.begin(old, new, MigrationState(MigrationPhase.MIGRATING, "id", NEW))
    (entry,) = await content(old, MIGRATION_CHANNEL)
    states = MigrationStates(old)
    assert await states.read() == first.state
    await old.drop_channel(MIGRATION_CHANNEL)
    assert await states.read() == MigrationState()
    assert await MigrationStates(old).read() == MigrationState()
    await MigrationRun.begin(old, new, MigrationState(MigrationPhase.MIGRATING, "next", NEW))
    assert entry.id == (await content(old, MIGRATION_CHANNEL))[0].id
    with pytest.raises(Fenced):
        await first.check()
