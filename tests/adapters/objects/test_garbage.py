"""What is removed from the log is deleted from the store, after the grace time, and nothing else ever is."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest

from tests.adapters.objects.processes import (
    LEASE_S,
    QUICK,
    Process,
    Processes,
    appended,
    entries_of,
    until_owned,
    virtual,
)
from tests.adapters.objects.simulated_store import CreateFault, StoreRates
from tidewal.adapters.objects.block import BlockKind, decode_block
from tidewal.adapters.objects.log_objects import block_key
from tidewal.runtime.errors import PositionLost
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, FromId
from tidewal.runtime.testing.clock import elapse


@pytest.fixture
def processes() -> Processes:
    return Processes(pace=QUICK)


async def append_each(process: Process, channel: str, payloads: range) -> list[bytes]:
    """The ids of these payloads, each of which has a block of its own."""
    return [await process.wal.append(channel, b"%d" % at) for at in payloads]


def payloads(numbers: range) -> list[bytes]:
    return [b"%d" % at for at in numbers]


@virtual
async def test_what_is_truncated_is_deleted_after_the_grace_time(processes: Processes) -> None:
    owner = await processes.owner("a")
    ids = await append_each(owner, "a", range(100))
    await owner.wal.truncate("a", ids[70])
    there = processes.blocks(1)
    await elapse(QUICK.grace_s - 5)
    assert processes.blocks(1)[: len(there)] == there
    await elapse(30)
    assert processes.blocks(1)[0] > 50
    live = {section.key for section in owner.wal._state.names["a"].sections}
    assert {key for key in processes.objects.bodies if key.startswith("run/")} == {
        key for key in live if key.startswith("run/")
    }
    assert await entries_of((await processes.open()).wal, "a", 30) == payloads(range(70, 100))


@virtual
async def test_a_hold_keeps_entries_and_they_go_with_it(processes: Processes) -> None:
    """Schedule 10: a hold that comes behind a truncation keeps nothing of what that has removed."""
    owner = await processes.owner("a")
    ids = await append_each(owner, "a", range(60))
    await owner.wal.hold("a", "reader", ids[5])
    await owner.wal.truncate("a", ids[50])
    await elapse(3 * QUICK.grace_s)
    assert await entries_of((await processes.open()).wal, "a", 55) == payloads(range(5, 60))
    await owner.wal.hold("a", "reader", None)
    await owner.wal.truncate("a", ids[50])
    await owner.wal.hold("a", "late", ids[5])
    await elapse(3 * QUICK.grace_s)
    with pytest.raises(PositionLost):
        await anext(owner.wal.read("a", FromId(ids[5])))
    assert await entries_of((await processes.open()).wal, "a", 10) == payloads(range(50, 60))
    assert processes.blocks(1)[0] > 20


@virtual
async def test_an_owner_that_slept_through_fence_and_deletion_acknowledges_nothing(processes: Processes) -> None:
    """Schedule 3: it wakes with as many blocks as may be in flight, and its fence is still there."""
    zombie = await processes.owner("a")
    await append_each(zombie, "a", range(30))
    zombie.store.stop()
    asleep = asyncio.ensure_future(appended(zombie.wal, "a", [b"asleep"] * 100))
    successor = await processes.open()
    await until_owned(successor, "a")
    ids = await append_each(successor, "a", range(100, 160))
    await successor.wal.truncate("a", ids[-1])
    await elapse(3 * QUICK.grace_s)
    (fence,) = processes.blocks(1)
    key = block_key(1, fence)
    assert decode_block(processes.objects.bodies[key], key).header.kind is BlockKind.FENCE
    zombie.store.go_on()
    assert not any(isinstance(result, bytes) for result in await asleep)
    assert await entries_of(zombie.wal, "a", 1) == [b"159"]
    await elapse(3 * QUICK.grace_s)
    assert await entries_of((await processes.open()).wal, "a", 1) == [b"159"]


@virtual
async def test_an_attempt_that_arrives_after_its_block_was_deleted_changes_nothing(processes: Processes) -> None:
    """Schedule 5."""
    owner = await processes.owner("a")
    owner.store.rates = StoreRates(late_s=10 * QUICK.grace_s)
    late = {block_key(1, number): deque([CreateFault.LATE]) for number in range(2, 40)}
    owner.store.script.update(late)
    ids = await append_each(owner, "a", range(60))
    await owner.wal.truncate("a", ids[-1])
    await elapse(3 * QUICK.grace_s)
    assert 10 not in processes.blocks(1)
    for _ in range(10):
        await elapse(QUICK.grace_s)
        await append_each(owner, "a", range(60, 61))
        reader = await processes.open()
        assert (await entries_of(reader.wal, "a", 2))[:2] == [b"59", b"60"]
    assert 10 in processes.blocks(1)


@virtual
async def test_a_reader_that_slept_past_the_grace_time_misses_nothing(processes: Processes) -> None:
    """Schedule 9: the block that comes next for it was made and deleted meanwhile."""
    owner = await processes.owner("a", "held")
    reader, lagging = await processes.open(), await processes.open()
    await append_each(owner, "held", range(1))
    read, lags = reader.wal.read("held", From.EARLIEST), lagging.wal.read("a", From.EARLIEST)
    assert [bytes(entry.payload) for entry in await anext(read)] == [b"0"]
    await append_each(owner, "a", range(1))
    assert [bytes(entry.payload) for entry in await anext(lags)] == [b"0"]
    waiting, lost = asyncio.ensure_future(anext(read)), asyncio.ensure_future(anext(lags))
    for each in (reader, lagging):
        each.store.stop()
    await owner.wal.truncate("held", await owner.wal.append("held", b"skipped") + b"\0")
    ids = await append_each(owner, "a", range(1, 60))
    await owner.wal.append("held", b"last")
    await owner.wal.truncate("a", ids[-1])
    await elapse(3 * QUICK.grace_s)
    assert len(processes.blocks(1)) < 60
    for each in (reader, lagging):
        each.store.go_on()
    with pytest.raises(PositionLost):
        await lost
    with pytest.raises(PositionLost):
        await waiting
    assert [bytes(entry.payload) for entry in await anext(reader.wal.read("held", From.EARLIEST))] == [b"last"]
    assert await reader.wal.latest_id("a") == ids[-1]


@virtual
async def test_a_reader_at_an_owner_that_slept_past_the_grace_time_learns_what_was_removed(
    processes: Processes,
) -> None:
    """The owner does not know yet that it is one no more when an object is gone."""
    owner = await processes.owner("a")
    ids = [await owner.wal.append("a", bytes(200)) for _ in range(90)]
    await elapse(5)
    read = owner.wal.read("a", From.EARLIEST)
    assert (await anext(read))[-1].id < ids[60]
    owner.store.stop()
    reading = asyncio.ensure_future(anext(read))
    successor = await processes.open()
    await until_owned(successor, "a")
    await successor.wal.truncate("a", ids[-1])
    await elapse(3 * QUICK.grace_s)
    owner.store.go_on()
    with pytest.raises(PositionLost):
        await reading


@virtual
async def test_a_slow_reader_has_the_grace_time(processes: Processes) -> None:
    """It has looked, and reads on from what it knows; for so long what was truncated behind its back stays."""
    owner = await processes.owner("a")
    ids = await append_each(owner, "a", range(60))
    reader = await processes.open()
    channel = reader.wal._state.names["a"]
    await owner.wal.truncate("a", ids[-1])
    behind = channel.removed_to
    while behind < ids[-2]:
        await elapse(QUICK.grace_s / 5)
        entries = await reader.wal._sections.following(channel, behind)
        behind = entries[-1].id
    assert behind == ids[-1]


@virtual
async def test_retention_by_time_goes_by_the_time_of_the_store(processes: Processes) -> None:
    owner = await processes.open()
    await owner.wal.create_channel("a", ChannelPolicy(retention_s=1000))
    await owner.wal.create_channel("b", ChannelPolicy(retention_s=None))
    for channel in ("a", "b"):
        await owner.wal.append(channel, b"old")
    await elapse(900)
    await owner.wal.append("a", b"young")
    assert await entries_of(owner.wal, "a", 2) == [b"old", b"young"]
    await elapse(110)
    assert await entries_of(owner.wal, "a", 1) == [b"young"]
    await owner.wal.close()
    successor = await processes.open()
    await successor.wal.append("b", b"new")
    await elapse(900)
    assert (await successor.wal.describe("a")).first_id is None
    assert await entries_of(successor.wal, "b", 2) == [b"old", b"new"]


@virtual
async def test_retention_by_size_keeps_so_many_bytes_and_what_is_held(processes: Processes) -> None:
    owner = await processes.open()
    for channel in ("a", "held"):
        await owner.wal.create_channel(channel, ChannelPolicy(retention_bytes=10_000))
    entries = [Append(each, bytes(1000)) for each in ("a", "held")]
    ids = [await owner.wal.append_many(entries) for _ in range(4)]
    await owner.wal.hold("held", "h", ids[3][1])
    ids += [await owner.wal.append_many(entries) for _ in range(26)]
    await elapse(5)
    assert (await owner.wal.describe("a")).first_id == ids[20][0]
    assert (await owner.wal.describe("held")).first_id == ids[3][1]
    blocks = len(processes.blocks(1))
    await elapse(LEASE_S / 3)
    assert len(processes.blocks(1)) == blocks  # what is held is not truncated again and again


@virtual
async def test_a_successor_deletes_what_was_left_to_it(processes: Processes) -> None:
    """Schedule 11, of checkpoints: also what the first owner had not noted when it died."""
    owner = await processes.owner("a")
    ids = await append_each(owner, "a", range(90))
    await owner.wal.truncate("a", ids[-1])
    processes.kill(owner)
    successor = await processes.open()
    await until_owned(successor, "a")
    await append_each(successor, "a", range(90, 120))
    await elapse(3 * QUICK.grace_s)
    assert len(processes.blocks(1)) < 30
    checkpoints = [key for key in processes.objects.bodies if key.startswith("checkpoint/")]
    assert len(checkpoints) <= 2
    assert (await entries_of((await processes.open()).wal, "a", 32))[0] == b"89"


@virtual
async def test_a_log_without_garbage_costs_no_request(processes: Processes) -> None:
    """Schedule 15."""
    owner = await processes.owner("a")
    await append_each(owner, "a", range(60))
    await elapse(3 * QUICK.grace_s)
    before = dict(processes.objects.requests)
    await elapse(LEASE_S)
    after = processes.objects.requests
    assert (after["get"], after["delete"]) == (before["get"], before["delete"])
    checkpoints = after["list"] - before["list"]
    assert checkpoints <= 1  # one is due behind so many marks
    assert after["create"] - before["create"] - checkpoints <= 2  # its marks


@virtual
async def test_a_store_that_is_away_puts_maintenance_off(processes: Processes) -> None:
    """Schedule 14."""
    owner = await processes.owner("a")
    ids = await append_each(owner, "a", range(60))
    await owner.wal.truncate("a", ids[-1])
    await elapse(5)
    owner.store.down = True
    await elapse(2 * QUICK.grace_s)
    assert len(processes.blocks(1)) >= 60
    owner.store.down = False
    await elapse(10)
    assert len(processes.blocks(1)) < 60
    assert await entries_of(owner.wal, "a", 1) == [b"59"]
