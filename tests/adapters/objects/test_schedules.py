"""What may happen to the log between processes and a store that fails: nothing acknowledged is lost, nothing is there
twice, no gap is passed over. In virtual time, over the simulated store."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from tests.adapters.objects.processes import (
    LEASE_S,
    QUICK,
    SETTINGS,
    Process,
    Processes,
    appended,
    entries_of,
    until_owned,
    virtual,
)
from tests.adapters.objects.simulated_store import CreateFault, StoreRates
from tidewal.adapters.objects.block import BlockKind, decode_block
from tidewal.adapters.objects.log_objects import block_key, claim_key
from tidewal.adapters.objects.pace import PACE, MaintenancePace
from tidewal.runtime.errors import Fenced, Unavailable
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, FromId
from tidewal.runtime.testing.clock import elapse, run_virtual


def delay_blocks(process: Process, epoch: int, numbers: range) -> None:
    """Let the first attempts to put these blocks arrive late."""
    for number in numbers:
        process.store.script[block_key(epoch, number)] = deque([CreateFault.LATE])


@virtual
async def test_blocks_behind_a_gap_count_for_nothing(processes: Processes) -> None:
    """Schedule 1: 0, 1 and 3 are there, the fence goes to 2, and late ones are refused or passed over."""
    first = await processes.owner("a")
    await first.wal.append("a", b"before")
    end = len(processes.blocks(1))
    key = block_key(1, end)
    first.store.script[key] = deque([CreateFault.REFUSED] * 1000)
    lost = [asyncio.ensure_future(first.wal.append("a", b"lost%d" % at)) for at in range(2)]
    for task in lost:  # each in a block of its own
        await elapse(0.2)
        assert not task.done()
    while len(processes.blocks(1)) < end + 1:
        await elapse(0.1)
        lost.append(asyncio.ensure_future(first.wal.append("a", b"more")))
    assert end not in processes.blocks(1)
    first.store.stop()
    second = await processes.open()
    await until_owned(second, "a")
    assert decode_block(processes.objects.bodies[key], key).header.kind is BlockKind.FENCE
    first.store.go_on()
    assert {type(result) for result in await asyncio.gather(*lost, return_exceptions=True)} <= {Fenced, Unavailable}
    for process in (second, await processes.open()):
        assert await entries_of(process.wal, "a", 2) == [b"before", b"successor"]


@virtual
async def test_an_owner_that_slept_through_its_fence_acknowledges_nothing(processes: Processes) -> None:
    """Schedules 2 and 3: it wakes with as many blocks as may be in flight."""
    zombie = await processes.owner("a")
    await zombie.wal.append("a", b"before")
    zombie.store.stop()
    asleep = asyncio.ensure_future(appended(zombie.wal, "a", [b"asleep"] * 100))
    successor = await processes.open()
    await until_owned(successor, "a")
    zombie.store.go_on()
    results = await asleep
    assert not any(isinstance(result, bytes) for result in results)
    assert await entries_of(successor.wal, "a", 2) == [b"before", b"successor"]
    await successor.wal.append("a", b"after")
    assert await entries_of(zombie.wal, "a", 3) == [b"before", b"successor", b"after"]  # it reads what it has missed


@pytest.mark.parametrize("fault", [fault for fault in CreateFault if fault is not CreateFault.NONE])
@pytest.mark.parametrize("times", [1, 3])
def test_whatever_a_create_answers_the_block_is_there_once(fault: CreateFault, times: int) -> None:
    """Schedule 4."""
    processes = Processes()

    async def main() -> None:
        owner = await processes.owner("a")
        number = len(processes.blocks(1))
        owner.store.script[block_key(1, number)] = deque([fault] * times)
        ids = [await owner.wal.append("a", b"%d" % at) for at in range(3)]
        await elapse(60)  # what is late arrives
        assert await entries_of(owner.wal, "a", 3) == [b"0", b"1", b"2"]
        other = await processes.open()
        assert await entries_of(other.wal, "a", 3) == [b"0", b"1", b"2"]
        assert await other.wal.latest_id("a") == ids[-1]
        await processes.close()

    run_virtual(main())


@virtual
async def test_a_claim_whose_answer_is_lost_is_known_as_ones_own(processes: Processes) -> None:
    """Schedule 4, for the claim and the format."""
    owner = await processes.open()
    owner.store.script[claim_key(1)] = deque([CreateFault.CUT])
    owner.store.script["format"] = deque([CreateFault.DOUBLED])
    await owner.wal.create_channel("a", ChannelPolicy())
    assert processes.blocks(1) == [0]


@virtual
async def test_a_late_attempt_changes_nothing_once_its_place_is_taken(processes: Processes) -> None:
    """Schedule 5, without deletion: it lands after its resend, or after the fence."""
    owner = await processes.owner("a")
    delay_blocks(owner, 1, range(len(processes.blocks(1)), 50))
    await owner.wal.append("a", b"resent")
    asyncio.ensure_future(owner.wal.append("a", b"lost")).add_done_callback(lambda task: task.exception())
    await elapse(0.01)
    processes.kill(owner)
    successor = await processes.open()
    await until_owned(successor, "a")
    await elapse(60)
    found = await entries_of(successor.wal, "a", 2)
    assert found in ([b"resent", b"successor"], [b"resent", b"lost", b"successor"][:2])
    assert await entries_of((await processes.open()).wal, "a", 2) == found


@pytest.mark.parametrize("openers", [2, 10])
def test_of_openers_at_once_one_owns_the_log_and_nothing_is_lost(openers: int) -> None:
    """Schedule 6."""
    processes = Processes()

    async def main() -> None:
        first = await processes.owner("a")
        await first.wal.append("a", b"before")
        processes.kill(first)
        others = [await processes.open(seed) for seed in range(openers)]
        results = await asyncio.gather(*(appended(each.wal, "a", [b"%d" % at]) for at, each in enumerate(others)))
        acknowledged = [b"%d" % at for at, (result,) in enumerate(results) if isinstance(result, bytes)]
        assert len(acknowledged) == 1
        assert all(isinstance(result, (bytes, Unavailable, Fenced)) for (result,) in results)
        for each in others:
            assert await entries_of(each.wal, "a", 2) == [b"before", *acknowledged]
        await processes.close()

    run_virtual(main())


@pytest.mark.parametrize("step", range(12))
def test_a_takeover_may_end_after_any_of_its_requests(step: int) -> None:
    """Schedule 6: the process that takes over is killed after so many objects, and the next one finds its way."""
    processes = Processes()

    async def main() -> None:
        first = await processes.owner("a")
        await first.wal.append("a", b"before")
        processes.kill(first)
        there = len(processes.objects.bodies)
        second = await processes.open()
        trying = asyncio.ensure_future(second.wal.append("a", b"second"))
        while len(processes.objects.bodies) < there + min(step, 4) and not trying.done():
            await elapse(0.01)
        await elapse(step * 0.01)
        acknowledged = [b"second"] if trying.done() else []
        processes.kill(second)
        third = await processes.open()
        await until_owned(third, "a")
        found = await entries_of(third.wal, "a", 2 + len(acknowledged))
        assert found in ([b"before", b"second", b"successor"], [b"before", *acknowledged, b"successor"])
        assert await entries_of((await processes.open()).wal, "a", len(found)) == found
        trying.cancel()
        await processes.close()

    run_virtual(main())


@virtual
async def test_the_epoch_of_a_fast_owner_ends_within_two_seconds(processes: Processes) -> None:
    """Schedule 7: 200 blocks a second, requests of 40 ms: the cap bounds how far the fence is chased."""
    owner = await processes.owner("a")
    writing = True

    async def write() -> None:
        while writing:
            asyncio.ensure_future(owner.wal.append("a", b"x")).add_done_callback(lambda task: task.exception())
            await asyncio.sleep(0.005)

    writer = asyncio.ensure_future(write())
    await elapse(1)
    successor = await processes.open()
    await successor.wal._objects.claim(2)  # as if it had waited: an owner that writes is left alone otherwise
    async with asyncio.timeout(2):
        await successor.wal._ownership._end_lower_epochs(2)
    writing = False
    await writer
    found = len(processes.blocks(1))
    await elapse(5)
    assert len(processes.blocks(1)) == found


@virtual
async def test_a_strong_read_at_an_idle_owner_sees_what_its_successor_acknowledged(processes: Processes) -> None:
    """Schedule 8."""
    idle = await processes.owner("a")
    await idle.wal.append("a", b"before")
    idle.store.stop()
    successor = await processes.open()
    asking = asyncio.ensure_future(idle.wal.latest_id("a"))
    last = await until_owned(successor, "a")
    idle.store.go_on()
    assert await asking == last
    last = await successor.wal.append("a", b"after")
    assert await idle.wal.latest_id("a") == last


@virtual
async def test_an_owner_that_hands_over_takes_nothing_in_flight_into_its_next_epoch(processes: Processes) -> None:
    """Its block is on the way while another process, which is gone again, has put a fence in its place."""
    owner = await processes.owner("a")
    await owner.wal.append("a", b"before")
    late, arriving, store_create = block_key(1, len(processes.blocks(1))), asyncio.Event(), owner.store.create

    async def late_create(key: str, body: bytes) -> bool:
        if key == late:
            await arriving.wait()
        return await store_create(key, body)

    owner.store.create = late_create  # type: ignore[method-assign]
    lost = asyncio.ensure_future(owner.wal.append("a", b"lost"))
    await elapse(0.1)
    successor = await processes.open()
    await successor.wal._objects.claim(2)
    await successor.wal._ownership._end_lower_epochs(2)
    await successor.wal._objects.end_epoch(BlockKind.FENCE, 2, 0)
    asking = asyncio.ensure_future(owner.wal.latest_id("a"))
    await elapse(0.2)
    after = asyncio.ensure_future(owner.wal.append("a", b"after"))
    await elapse(LEASE_S)
    arriving.set()
    with pytest.raises(Fenced):
        await lost
    await asyncio.gather(asking, after)
    assert await owner.wal.latest_id("a") == after.result()
    for process in (owner, await processes.open()):
        assert await entries_of(process.wal, "a", 2) == [b"before", b"after"]


@virtual
async def test_many_strong_reads_cost_one_request(processes: Processes) -> None:
    owner = await processes.owner("a")
    await owner.wal.append("a", b"x")
    before = processes.objects.requests["get"]
    await asyncio.gather(*(owner.wal.latest_id("a") for _ in range(1000)))
    assert processes.objects.requests["get"] - before == 1


@virtual
async def test_a_reader_passes_no_gap_that_is_filled_later(processes: Processes) -> None:
    """Schedule 9, without deletion: the reader looks ahead and sees later blocks first."""
    owner = await processes.owner("a")
    reader = await processes.open()
    delay_blocks(owner, 1, range(2, 200, 7))
    reading = asyncio.ensure_future(entries_of(reader.wal, "a", 150))
    for at in range(150):
        await elapse(0.01)
        asyncio.ensure_future(owner.wal.append("a", b"%d" % at)).add_done_callback(lambda task: task.result())
    assert await reading == [b"%d" % at for at in range(150)]


@virtual
async def test_of_hold_and_truncation_the_first_in_the_log_decides(processes: Processes) -> None:
    """Schedule 10: every process that reads the log comes to the same."""
    owner = await processes.owner("a", "b")
    wal = owner.wal
    ids = await wal.append_many([Append("a", b"%d" % at) for at in range(10)])
    await asyncio.gather(*(wal.hold("a", "h", ids[5]), wal.truncate("a", ids[8]), wal.hold("a", "i", ids[2])))
    reader = await processes.open()
    first = (await reader.wal.describe("a")).first_id
    assert first == (await wal.describe("a")).first_id
    assert first in (ids[2], ids[5], ids[8])
    assert await entries_of(reader.wal, "a", 10 - ids.index(first)) == [
        b"%d" % at for at in range(ids.index(first), 10)
    ]
    old = await wal.append("b", b"old")
    await wal.drop_channel("b")
    await wal.create_channel("b", ChannelPolicy())
    assert await wal.latest_id("b") is None
    assert await wal.append("b", b"new") > old
    assert await entries_of(reader.wal, "b", 1) == [b"new"]


@virtual
async def test_processes_that_cannot_reach_each_other_do_not_claim_in_turns(processes: Processes) -> None:
    """Schedule 13: for ten minutes both want to write. One owns the log, and idles for a minute now and then."""
    processes_ = [await processes.open(seed) for seed in range(2)]
    await processes_[0].wal.create_channel("a", ChannelPolicy())
    for minute in range(10):
        for process in processes_:
            for result in await appended(process.wal, "a", [b"%d" % minute]):
                assert isinstance(result, (bytes, Unavailable))
        await elapse(60)
    claims = [key for key in processes.objects.bodies if key.startswith("claim/")]
    assert len(claims) == 1
    assert await entries_of(processes_[1].wal, "a", 10) == [b"%d" % minute for minute in range(10)]


@virtual
async def test_a_store_that_is_away_for_a_minute_costs_no_order(processes: Processes) -> None:
    """Schedule 14: appends have an unknown outcome after a while, and are in the log, in order, once it is back."""
    owner = await processes.owner("a")
    owner.store.down = True
    results: list[Any] = []
    for at in range(5):
        asyncio.ensure_future(owner.wal.append("a", b"%d" % at)).add_done_callback(
            lambda task: results.append(task.exception())
        )
        await elapse(0.1)
    await elapse(60)
    assert [(type(result), result.outcome_unknown) for result in results] == [(Unavailable, True)] * 5
    owner.store.down = False
    await owner.wal.append("a", b"after")
    assert await entries_of(owner.wal, "a", 6) == [b"0", b"1", b"2", b"3", b"4", b"after"]


@pytest.mark.slow
@virtual
async def test_ten_thousand_idle_channels_cost_no_request(processes: Processes) -> None:
    """Schedule 15: an idle owner puts its mark, whatever there is."""
    owner = await processes.owner()
    await asyncio.gather(*(owner.wal.create_channel(f"c{at}", ChannelPolicy()) for at in range(10_000)))
    assert len(processes.blocks(1)) < 20
    before = dict(processes.objects.requests)
    await elapse(1000)
    after = processes.objects.requests
    assert after["create"] - before["create"] <= 1000 / (LEASE_S * 2 / 3) + 1
    assert (after["get"], after["list"]) == (before["get"], before["list"])


def test_a_limit_of_dollars_is_kept_whatever_is_appended() -> None:
    """43 cents a day are a block each second; two seconds hold more than one that is full."""
    processes = Processes(settings=SETTINGS.model_copy(update={"max_dollars_per_day": 0.432, "block_bytes": 3000}))

    async def main() -> None:
        owner = await processes.owner("a")
        before = processes.objects.requests["create"]
        appends = []
        for _ in range(200):
            appends.append(asyncio.ensure_future(owner.wal.append("a", bytes(100))))
            await elapse(0.1)
        await asyncio.gather(*appends)
        assert 7 <= processes.objects.requests["create"] - before <= 23
        await processes.close()

    run_virtual(main())


@virtual
async def test_a_clean_stop_hands_over_without_waiting(processes: Processes) -> None:
    first = await processes.owner("a")
    await first.wal.append("a", b"before")
    await first.wal.close()
    second = await processes.open()
    began = asyncio.get_running_loop().time()
    await second.wal.append("a", b"successor")
    assert asyncio.get_running_loop().time() - began < 1
    assert await entries_of(second.wal, "a", 2) == [b"before", b"successor"]


@virtual
async def test_opening_and_reading_write_nothing(processes: Processes) -> None:
    owner = await processes.owner("a")
    id = await owner.wal.append("a", b"x")
    before = processes.objects.requests["create"]
    reader = await processes.open()
    assert await reader.wal.latest_id("a") == id
    assert await entries_of(reader.wal, "a", 1) == [b"x"]
    assert await reader.wal.groups() == []
    waiting = asyncio.ensure_future(anext(reader.wal.read("a", FromId(id))))
    await elapse(5)
    assert processes.objects.requests["create"] == before
    await owner.wal.append("a", b"y")
    assert [bytes(entry.payload) for entry in await waiting] == [b"y"]


@pytest.mark.parametrize("pace", [PACE, QUICK])
@pytest.mark.parametrize("seed", range(10))
def test_whatever_the_store_does_every_append_is_there_as_it_was_answered(seed: int, pace: MaintenancePace) -> None:
    """Owners that are killed over a store with every fault: what is acknowledged is there, in order, once; what was
    refused for certain is not there."""
    rates = StoreRates(refused=0.05, cut=0.05, late=0.05, conflict=0.05, doubled=0.05, hidden=0.05)
    processes = Processes(rates, pace=pace)

    async def main() -> None:
        acknowledged: list[bytes] = []
        refused: set[bytes] = set()
        for generation in range(4):
            owner = await processes.open(seed * 10 + generation)
            await until_owned_with(owner)
            names = [b"%d.%d" % (generation, at) for at in range(40)]
            tasks = {}
            for name in names:
                tasks[name] = asyncio.ensure_future(owner.wal.append("a", name))
                await elapse(0.02)
            await elapse(0.3)
            for name, task in tasks.items():
                if task.done() and task.exception() is None:
                    acknowledged.append(name)
                elif task.done() and not getattr(task.exception(), "outcome_unknown", False):
                    refused.add(name)
                elif not task.done():
                    task.cancel()
            if generation % 2:
                await elapse(2 * QUICK.grace_s)
            processes.kill(owner)
        reader = await processes.open(99)
        reader.store.rates = StoreRates()
        await elapse(60)
        found = await all_entries(reader)
        assert len(set(found)) == len(found)
        assert [name for name in found if name in set(acknowledged)] == acknowledged
        assert not refused & set(found)
        await processes.close()

    run_virtual(main())


async def until_owned_with(process: Process) -> None:
    while True:
        try:
            await process.wal.create_channel("a", ChannelPolicy())
            await process.wal.hold("a", "generation", None)
            await process.wal._ownership.acquire()
            return
        except Unavailable:
            await elapse(1)


async def all_entries(process: Process) -> list[bytes]:
    last = await process.wal.latest_id("a")
    found: list[bytes] = []
    async for entries in process.wal.read("a", From.EARLIEST):
        found += [bytes(entry.payload) for entry in entries]
        if last is not None and entries[-1].id >= last:
            return found
    return found
