"""Checkpoints: opening reads the newest one and what lies behind it, whatever the hint says."""

from __future__ import annotations

import asyncio

import pytest

from tests.adapters.objects.processes import QUICK, Process, Processes, entries_of, until_owned, virtual
from tidewal.adapters.objects.block import SectionRow
from tidewal.adapters.objects.checkpoint import HEADER_BYTES, decode_checkpoint, encode_checkpoint
from tidewal.adapters.objects.checkpoints import checkpoint_key
from tidewal.adapters.objects.log_state import LogState
from tidewal.adapters.objects.stored_channel import Piece, StoredChannel, StoredSection, encode_id
from tidewal.runtime.errors import CorruptLog, FormatTooNew
from tidewal.runtime.log.wal import ChannelPolicy, Delivery, FromTime
from tidewal.runtime.testing.clock import elapse

LOG, WRITER = b"l" * 16, b"w" * 16
MIB = 1024 * 1024


@pytest.fixture
def processes() -> Processes:
    return Processes(pace=QUICK)


async def owner_with_checkpoints(processes: Processes, number: int) -> tuple[Process, list[bytes]]:
    """An owner of a log that has so many checkpoints at least, and some entries behind them; with all entries."""
    owner = await processes.owner("a")
    written: list[bytes] = []
    while owner.wal._log.checkpoints.newest < number:
        written.append(b"%d" % len(written))
        await owner.wal.append("a", written[-1])
    await owner.wal.append("a", b"behind")
    return owner, [*written, b"behind"]


@virtual
async def test_opening_reads_the_newest_checkpoint_and_what_is_behind_it(processes: Processes) -> None:
    _, written = await owner_with_checkpoints(processes, 3)
    before = processes.objects.requests["get"]
    reader = await processes.open()
    behind = reader.wal._state.blocks
    assert behind < len(written)
    assert processes.objects.requests["get"] - before <= 5 + behind + 2 * 32  # what is asked for beyond the end
    assert await entries_of(reader.wal, "a", len(written)) == written


@virtual
async def test_an_old_checkpoint_that_arrives_late_is_only_an_old_one(processes: Processes) -> None:
    """Schedule 12: what there is of checkpoints need not be without gaps."""
    owner, written = await owner_with_checkpoints(processes, 5)
    processes.kill(owner)
    bodies = processes.objects.bodies
    for number in (2, 3, 4):
        del bodies[checkpoint_key(number)]
    reader = await processes.open()
    assert reader.wal._log.checkpoints.newest == 5
    assert await entries_of(reader.wal, "a", len(written)) == written


@virtual
async def test_an_owner_that_slept_makes_no_checkpoint_behind_a_later_one(processes: Processes) -> None:
    owner, written = await owner_with_checkpoints(processes, 2)
    number = owner.wal._log.checkpoints.newest + 1
    owner.store.stop()
    making = asyncio.ensure_future(owner.wal._log.checkpoints.make())
    await elapse(1)
    successor = await processes.open()
    while successor.wal._log.checkpoints.newest < number:
        await elapse(1)
        try:
            await successor.wal.append("a", b"%d" % len(written))
            written.append(b"%d" % len(written))
        except Exception:
            continue
    owner.store.go_on()
    await making
    reader = await processes.open()
    assert reader.wal._state.epoch == 2
    assert await entries_of(reader.wal, "a", len(written)) == written


@pytest.mark.slow
@virtual
async def test_opening_a_log_of_100_gib_costs_a_bounded_number_of_requests(processes: Processes) -> None:
    """None of its 102,400 sections of 1 MiB is read."""
    owner = await processes.owner(*(f"c{at}" for at in range(10)))
    state = owner.wal._state
    for channel in state.channels():
        for number in range(10_240):
            row = SectionRow(channel.number, 1000, state.seq, 1, 2, number % 3 * MIB, MIB, 0)
            channel.add(StoredSection(f"run/{1:016x}/{number // 3:016x}", 1, 0, row, (Piece(0, row.first_seq),)))
            state.seq += 1000
    assert sum(section.row.length for channel in state.channels() for section in channel.sections) == 100 * 1024 * MIB
    await owner.wal._log.checkpoints.make()
    processes.kill(owner)
    before = sum(processes.objects.requests.values())
    reader = await processes.open()
    assert sum(processes.objects.requests.values()) - before <= 8  # format, list, checkpoint, blocks that are not there
    assert len(reader.wal._state.names["c3"].sections) == 10_240


def state_with_everything() -> LogState:
    """A state in which nothing has its default."""
    state = LogState()
    state.epoch, state.number, state.seq, state.highest, state.ends = 3, 5, 99, 7, {1: 4, 2: 9}
    channel = StoredChannel(7, "a", ChannelPolicy(retention_s=5, delivery=Delivery.QUEUE), encode_id(1, 2))
    row = SectionRow(7, 3, 10, 5, 6, 96, 30, 77)
    channel.add(StoredSection("l0/x/y", 2, 1234, row, (Piece(0, 10), Piece(2, 50))))
    channel.holds["h"] = encode_id(2, 11)
    state.put(channel)
    return state


def test_a_checkpoint_has_the_whole_state() -> None:
    state = state_with_everything()
    data = encode_checkpoint(LOG, WRITER, state)
    found = decode_checkpoint(data, "checkpoint/1", LOG)
    assert encode_checkpoint(LOG, WRITER, found) == data
    channel = found.names["a"]
    assert (found.place, found.seq, channel.policy.retention_s, channel.sections[0].last_id) == (
        (3, 5),
        99,
        5,
        encode_id(2, 50),
    )


@pytest.mark.parametrize("at", range(0, 300, 7))
def test_a_damaged_checkpoint_is_refused(at: int) -> None:
    data = bytearray(encode_checkpoint(LOG, WRITER, state_with_everything()))
    data[at % len(data)] ^= 1
    with pytest.raises((CorruptLog, FormatTooNew)):
        decode_checkpoint(bytes(data), "checkpoint/1", LOG)
    with pytest.raises(CorruptLog):
        decode_checkpoint(bytes(data[:HEADER_BYTES]), "checkpoint/1", LOG)


@virtual
async def test_time_is_found_in_what_a_checkpoint_says(processes: Processes) -> None:
    owner, written = await owner_with_checkpoints(processes, 2)
    id = await owner.wal.append("a", b"late", timestamp=2**62)
    await owner.wal.append("a", b"later", timestamp=5)
    reader = await processes.open()
    assert await reader.wal.id_at("a", 2**62) == id
    found = await anext(reader.wal.read("a", FromTime(2**62)))
    assert bytes(found[0].payload) == b"late"
    assert len(written) > 2


@virtual
async def test_a_look_into_the_store_that_ends_late_applies_nothing_that_the_owner_applies(
    processes: Processes,
) -> None:
    """It began before this process owned the log, and finds the first block of its own."""
    owner = await processes.open()
    await owner.wal._objects.make()
    got, store_get = asyncio.Event(), owner.store.get

    async def late_get(key: str, start: int = 0, end: int | None = None) -> bytes | None:
        if key.startswith("l0/"):
            await got.wait()
        return await store_get(key, start, end)

    await owner.wal._ownership.acquire()
    owner.wal._committer._writer, writer = None, owner.wal._committer._writer  # as it was a moment before
    owner.store.get = late_get  # type: ignore[method-assign]
    looking = asyncio.ensure_future(owner.wal._tail.catch_up())
    await elapse(1)
    owner.wal._committer._writer = writer
    await owner.wal.create_channel("a", ChannelPolicy())
    got.set()
    await looking
    await owner.wal.append("a", b"x")
    assert await entries_of(owner.wal, "a", 1) == [b"x"]


@virtual
async def test_an_owner_that_was_open_for_long_makes_its_checkpoints_behind_those_of_the_ones_before(
    processes: Processes,
) -> None:
    """It knows a checkpoint that was deleted long ago, and in the places of those that followed is none."""
    owner, written = await owner_with_checkpoints(processes, 2)
    successor = await processes.open()
    known = successor.wal._log.checkpoints.newest
    following = checkpoint_key(known + 1)
    while owner.wal._log.checkpoints.newest == known or following in processes.objects.bodies:
        await elapse(1)
        written.append(b"%d" % len(written))
        await owner.wal.append("a", written[-1])
        assert await successor.wal.latest_id("a") is not None  # so it looks again and again
    assert successor.wal._log.checkpoints.newest == known
    processes.kill(owner)
    written.append(b"successor")
    await until_owned(successor, "a")
    for _ in range(40):
        written.append(b"%d" % len(written))
        await successor.wal.append("a", written[-1])
    await elapse(3 * QUICK.grace_s)
    assert await entries_of((await processes.open()).wal, "a", len(written)) == written
