"""The log of a group, followed by several processes over a log in memory: silence, assignments, and snapshots."""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import suppress
from functools import partial

import pytest

from tidewal.runtime.errors import ChannelNotFound, Closed, Fenced, FormatTooNew, InvalidRequest, Unavailable
from tidewal.runtime.groups import group_log
from tidewal.runtime.groups.commands import (
    ChannelIdentity,
    ChannelsChanged,
    CommitOutputs,
    Drop,
    Join,
    Leave,
    Release,
    event_of,
)
from tidewal.runtime.groups.coordinator_client import Ack
from tidewal.runtime.groups.group_log import GroupLog
from tidewal.runtime.log.record import RecordType, encode
from tidewal.runtime.log.wal import ChannelPolicy, From, FromId
from tidewal.runtime.replicated.records import FeatureLevels, encode_event
from tidewal.runtime.testing.clock import VirtualClock
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

TOPIC = "log-of-g"
ids = (number.to_bytes(12, "big") for number in itertools.count())
CHANNELS = {f"c{n}": ChannelIdentity("1-a", 1, bytes(20), b"\x01" * 20, False) for n in range(4)}


class Process:
    """What a process has of the log."""

    def __init__(self, memory: MemoryLog, name: str, clock: VirtualClock | None = None) -> None:
        self._wal = MemoryWal(memory)
        self.process = name
        self.clock = clock or VirtualClock()
        self.timeout_s = 10.0
        self.opened: list[GroupLog] = []

    def __getattr__(self, name):
        return getattr(self._wal, name)

    async def follow(self) -> GroupLog:
        log = GroupLog(self, "g", TOPIC, clock=self.clock, new_id=partial(next, ids))
        await log.open()
        self.opened.append(log)
        return log


@pytest.fixture
async def start():
    """Start processes that follow one log, on one clock, `clock`."""
    memory, processes = MemoryLog(), []

    async def start_one(name: str) -> Process:
        processes.append(Process(memory, name, start_one.clock))
        if len(processes) == 1:
            await processes[0].create_channel(TOPIC, ChannelPolicy())
        return processes[-1]

    start_one.clock = VirtualClock()
    yield start_one
    for process in processes:
        for log in process.opened:
            await log.close()
        await process.close()


async def join(log, member, process, timeout_s=3.0):
    log.local[member] = asyncio.Event()
    await log.ask(Join(member, process.process, ["c*"], From.EARLIEST, timeout_s, CHANNELS, log.numbers_from()))


async def held(log, member):
    return {channel: assigned.epoch for channel, assigned in (await log.assignment(member, None, 0)).held.items()}


def acknowledge(member, channel, epoch, upto):
    return CommitOutputs(member, [Ack(channel, epoch, upto)], b"", "", [], {})


async def same(*logs):
    """Wait until all have read the same, which is the same state."""
    for each in logs:
        await each.catch_up()
    assert len({repr(each.state.to_wire()) for each in logs}) == 1


async def beat(start, *logs, times=1):
    for _ in range(times):
        start.clock.advance(1.0)
        for each in logs:
            each.beat()
        for each in logs:
            await each.catch_up()


async def test_a_member_silent_for_the_session_timeout_is_evicted_and_its_acknowledgement_fenced(start):
    a, b = await start("a"), await start("b")
    first, second = await a.follow(), await b.follow()
    await join(first, "m1", a)
    await join(second, "m2", b)
    assignment = await first.assignment("m1", None, 0)
    for channel in assignment.revoking:
        await first.ask(Release("m1", channel, assignment.held[channel].epoch))
    await same(first, second)
    epochs = await held(second, "m2")
    assert len(epochs) == 2
    await beat(start, first, second, times=10)
    assert set(first.state.members) == {"m1", "m2"}
    await beat(start, first, times=5)
    await same(first, second)
    assert set(second.state.members) == {"m1"}
    assert set(await held(first, "m1")) == set(CHANNELS)
    for channel, epoch in epochs.items():
        with pytest.raises(Fenced):
            await second.ask(acknowledge("m2", channel, epoch, b"\x01" * 20))


async def test_a_process_that_cannot_read_on_beats_no_more_and_its_member_is_evicted(start):
    a, b = await start("a"), await start("b")
    old, new = await a.follow(), await b.follow()
    await join(old, "m1", a)
    await join(new, "m2", b)
    new.fold.levels = FeatureLevels(1, 3)
    await new.raise_level(3)
    with pytest.raises(FormatTooNew):
        await old.catch_up()
    for _ in range(6):
        start.clock.advance(1.0)
        old.beat()
        new.beat()
        await new.catch_up()
    await new.catch_up()
    assert set(new.state.members) == {"m2"}


async def test_a_process_that_was_stopped_itself_evicts_no_member(start):
    a, b = await start("a"), await start("b")
    first, second = await a.follow(), await b.follow()
    await join(first, "m1", a)
    await join(second, "m2", b)
    await beat(start, first, second, times=3)
    start.clock.advance(100.0)  # both were stopped; the first beats before the second has come round
    first.beat()
    await same(first, second)
    await beat(start, first)
    assert set(first.state.members) == {"m1", "m2"}


async def test_what_is_being_revoked_is_taken_after_the_session_timeout(start):
    a, b = await start("a"), await start("b")
    first, second = await a.follow(), await b.follow()
    await join(first, "m1", a)
    await join(second, "m2", b)
    assert len((await first.assignment("m1", None, 0)).revoking) == 2
    await beat(start, first, second, times=3)
    assert len(await held(first, "m1")) == 4
    await beat(start, first, second, times=3)
    assert (len(await held(first, "m1")), len(await held(second, "m2"))) == (2, 2)


async def test_waiting_for_an_assignment_ends_when_it_changes(start):
    a = await start("a")
    log = await a.follow()
    await join(log, "m1", a)
    seen = (await log.assignment("m1", None, 0)).version
    waiting = asyncio.ensure_future(log.assignment("m1", seen, 60.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    await log.ask(ChannelsChanged({}, {"c0": "1-a"}))
    assert set((await waiting).held) == {"c1", "c2", "c3"}
    waiting = asyncio.ensure_future(log.assignment("m1", (await log.assignment("m1", None, 0)).version, 60.0))
    await asyncio.sleep(0)
    await log.close()
    with pytest.raises(Closed):
        await waiting


async def test_a_group_that_is_dropped_ends_for_its_followers(start):
    a, b = await start("a"), await start("b")
    first, second = await a.follow(), await b.follow()
    await join(first, "m1", a)
    with pytest.raises(InvalidRequest):
        await second.ask(Drop())
    await first.ask(Leave("m1"))
    await second.ask(Drop())
    assert second.state.dropped
    await b.drop_channel(TOPIC)
    with pytest.raises((Fenced, Unavailable)):
        await first.ask(Leave("m1"))


async def test_a_group_that_was_dropped_and_made_again_repeats_no_number(start):
    a = await start("a")
    seen = []
    for _ in range(2):
        log = await a.follow()
        for _ in range(5):  # numbers rise
            await join(log, "m1", a)
            assignment = log.state.assignment("m1")
            seen.append({assignment.version, *(held.epoch for held in assignment.held.values())})
            await log.ask(Leave("m1"))
        await log.ask(Drop())
        await a.drop_channel(TOPIC)
        await a.create_channel(TOPIC, ChannelPolicy())
        start.clock.advance(0.001)
    assert max(set().union(*seen[:5])) < min(set().union(*seen[5:]))


@pytest.mark.parametrize("unknown", [True, False])
async def test_what_may_lie_in_a_log_that_was_dropped_is_not_called_refused(start, monkeypatch, unknown):
    a = await start("a")
    log = await a.follow()
    await join(log, "m1", a)

    def submit(records, done):
        fields = {"outcome_unknown": True} if unknown else {}
        done(ChannelNotFound("dropped", channel=TOPIC, **fields))

    monkeypatch.setattr(a, "submit", submit, raising=False)
    with pytest.raises(Fenced) as caught:
        await log.ask(Leave("m1"))
    assert caught.value.fields.get("outcome_unknown", False) is unknown


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
async def test_all_see_the_same_while_snapshots_are_stored_and_processes_come_and_go(start, monkeypatch, seed):
    monkeypatch.setattr(group_log, "RECORDS_PER_SNAPSHOT", 15)
    rng = random.Random(seed)
    processes = [await start(f"p{n}") for n in range(3)]
    first = await processes[0].follow()
    begin = (await processes[0].describe(TOPIC)).first_id

    async def work(process, number):
        for turn in range(12):
            log = await process.follow()
            member = f"m{number}-{turn}"
            await join(log, member, process)
            for _ in range(rng.randrange(3, 15)):
                log.beat()
                assignment = await log.assignment(member, None, 0)
                for channel, assigned in assignment.held.items():
                    with suppress(Fenced):
                        if channel in assignment.revoking:
                            await log.ask(Release(member, channel, assigned.epoch))
                        else:
                            await log.ask(acknowledge(member, channel, assigned.epoch, rng.randbytes(20)))
            if rng.random() < 0.7:
                await log.ask(Leave(member))

    await asyncio.gather(*(work(process, number) for number, process in enumerate(processes)))
    late = await processes[0].follow()
    await same(first, late, *(process.opened[-1] for process in processes))
    assert (await processes[0].describe(TOPIC)).first_id > begin
    assert late.fold._first > begin


JOIN = event_of(b"", Join("x", "stranger", ["c*"], From.EARLIEST, 3.0, CHANNELS))["fields"]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("Join", {**JOIN, "member": [1]}),
        ("Join", {**JOIN, "channels": 5}),
        ("Join", {**JOIN, "session_timeout_s": "3"}),
        ("Join", {**JOIN, "session_timeout_s": 0}),
        ("Join", {**JOIN, "found": {"c0": ["1-a", "1", b"", b"", False]}}),
        ("Leave", {"member": [1]}),
        ("Stage", {"member": [1], "batch": b"", "outputs": []}),
        ("Published", {"commits": 3}),
        ("SeekGroup", {"channel": "c0", "found": {}, "upto": b""}),
        ("ChannelsChanged", {"found": {}, "gone": 4}),
    ],
)
async def test_a_record_with_a_field_of_another_type_is_counted_told_and_skipped(start, caplog, kind, fields):
    a, b = await start("a"), await start("b")
    first, second = await a.follow(), await b.follow()
    await join(first, "m1", a)
    event = {"kind": kind, "token": b"", "fields": fields}
    await a.append(TOPIC, encode(encode_event(RecordType.GROUP, event, "stranger", 1, None)))
    await join(second, "m2", b)
    await same(first, second, await a.follow())
    assert (first.skipped, second.skipped) == (1, 1)
    assert [record.levelname for record in caplog.records if TOPIC in record.message and kind in record.message][:1]
    assert set(first.state.members) == {"m1", "m2"}


async def test_a_process_that_fell_behind_a_snapshot_begins_anew(start, monkeypatch):
    monkeypatch.setattr(group_log, "RECORDS_PER_SNAPSHOT", 15)
    a, b = await start("a"), await start("b")
    first, second = await a.follow(), await b.follow()
    await join(first, "m1", a)
    epochs = await held(first, "m1")
    for number in range(100):
        await first.ask(acknowledge("m1", "c0", epochs["c0"], number.to_bytes(20, "big")))
    await same(first, second)
    read = b._wal.read
    positions = iter([FromId(bytes.fromhex("00")), *[None] * 100])
    monkeypatch.setattr(b._wal, "read", lambda channel, start: read(channel, next(positions) or start))
    third = await b.follow()  # its first place is lost
    await same(first, third)
