"""What reaches a link late, over an earlier one, or never."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tests.adapters.objects.linked_processes import LinkedProcess, LinkedProcesses
from tests.adapters.objects.processes import LEASE_S, QUICK, entries_of
from tests.adapters.objects.test_links import linked
from tidewal.adapters.objects.link.messages import pack
from tidewal.adapters.objects.log_objects import block_key
from tidewal.runtime.errors import ChannelNotFound, Unavailable
from tidewal.runtime.testing.clock import elapse


def kept_alive(process: LinkedProcess) -> list[str]:
    """The groups whose members in this process send heartbeats."""
    routed = process.wal._routed_groups
    assert routed is not None
    return [group for group, _ in routed._heartbeat._timeouts_s]


@linked
async def test_a_block_that_had_arrived_before_a_long_sleep_says_nothing_of_those_behind_it(
    processes: LinkedProcesses,
) -> None:
    """A suspended process has it in the buffer of its socket. What follows was deleted meanwhile."""
    processes.quick()
    owner = await processes.owner("a")
    sleeper = await processes.open()
    epoch, number = sleeper.wal._state.place
    await owner.wal.append("a", b"arrived")
    arrived = processes.objects.bodies[block_key(epoch, number)]
    for at in range(60):
        last = await owner.wal.append("a", b"%d" % at)
    await owner.wal.truncate("a", last)
    await elapse(3 * QUICK.grace_s)
    assert block_key(epoch, number + 1) not in processes.objects.bodies
    sleeper.wal._links.on_block(epoch, number, arrived)
    await elapse(1)
    assert await sleeper.wal.latest_id("a") == last


@linked
async def test_what_is_read_late_of_a_link_that_was_dropped_is_not_behind_what_came_over_the_next(
    processes: LinkedProcesses,
) -> None:
    """What a process has sent before it breaks a link stays readable at the other end."""
    owner = await processes.owner("a")
    dropped = await processes.raw_link(owner)
    assert await dropped.ask("follow") is None
    following = await processes.raw_link(owner)
    assert await following.ask("follow") is None
    for link, payload in ((following, b"following"), (dropped, b"late")):
        with suppress(Unavailable):  # it is ended
            link.write(["submit", 1], pack([["a"], [[0, 0, payload]], []]))
        await elapse(1)
    await owner.wal.append("a", b"last")
    assert await entries_of(owner.wal, "a", 2) == [b"following", b"last"]


@linked
async def test_an_owner_that_has_lost_the_store_alone_is_replaced(processes: LinkedProcesses) -> None:
    """It answers over its links, and knows nothing: also where it was replaced by a process that is linked to none."""
    owner = await processes.owner("a")
    others = [await processes.open(seed) for seed in range(2)]
    waiting = await processes.open(3, may_own=False)
    for other in (*others, waiting):
        await other.wal.append("a", b"before")
    reading = asyncio.ensure_future(entries_of(waiting.wal, "a", 4))
    owner.store.down = True
    await elapse(5 * LEASE_S)
    assert all(other.linked for other in others)  # who does not write leaves the log alone
    unanswered = await asyncio.gather(*(other.wal.append("a", b"?") for other in others), return_exceptions=True)
    assert all(isinstance(result, Unavailable) and result.outcome_unknown for result in unanswered)
    await elapse(2 * LEASE_S)
    for other in (*others, waiting):
        await other.wal.append("a", b"after")
    assert sum(other.wal._committer.owns for other in others) == 1
    assert await reading == [b"before"] * 3 + [b"after"]
    owner.store.down = False
    await elapse(LEASE_S)
    await owner.wal.append("a", b"through the successor")
    assert owner.linked
    assert len([key for key in processes.objects.bodies if key.startswith("claim/")]) == 2


@linked
async def test_a_store_that_fails_for_all_costs_the_owner_nothing(processes: LinkedProcesses) -> None:
    owner = await processes.owner("a")
    others = [await processes.open(seed) for seed in range(2)]
    for other in others:
        await other.wal.append("a", b"before")
    for process in processes.opened:
        process.store.down = True
    await elapse(5 * LEASE_S)
    assert all(other.linked for other in others)
    for process in reversed(processes.opened):
        process.store.down = False
        await elapse(1)
    await elapse(5 * LEASE_S)
    assert owner.wal._committer.owns
    assert all(other.linked for other in others)


@linked
async def test_appends_wait_while_the_owner_closes_for_long(processes: LinkedProcesses) -> None:
    """It still owns the log, since what it has taken is not written: nothing new goes to it."""
    owner = await processes.owner("a")
    others = [await processes.open(seed) for seed in range(2)]
    for other in others:
        await other.wal.append("a", b"before")
    owner.store.down = True
    taken = asyncio.ensure_future(others[0].wal.append("a", b"taken"))
    await elapse(1)
    processes.opened.remove(owner)
    closing = asyncio.ensure_future(owner.wal.close())
    await elapse(1)
    appends = [asyncio.ensure_future(other.wal.append("a", b"next")) for other in others]
    await elapse(3)
    owner.store.down = False
    ids = [await taken, *await asyncio.gather(*appends)]
    assert ids[0] == min(ids)
    await closing


@linked
async def test_members_do_not_wait_for_another_owner_to_leave(processes: LinkedProcesses) -> None:
    owner = await processes.owner("a")
    others = [await processes.open(may_own=may_own) for may_own in (False, True)]
    for other in others:
        for at in range(3):
            await other.wal.join(f"g{at}", ["a"])
    processes.kill(owner)
    await elapse(1)
    began = asyncio.get_running_loop().time()
    for other in others:
        processes.opened.remove(other)
        await other.wal.close()
    assert asyncio.get_running_loop().time() - began < 5
    assert len([key for key in processes.objects.bodies if key.startswith("claim/")]) == 1


@linked
async def test_the_session_of_a_member_ends_also_where_it_had_its_channels_at_once(processes: LinkedProcesses) -> None:
    """Where the group has positions nothing is stored or moved when it joins."""
    await processes.owner("a")
    for seed in range(3):
        other = await processes.open(seed)
        member = await other.wal.join("g", ["a"], session_timeout_s=3)
        await elapse(10)
        assert set(member.channels) == {"a"}
        processes.kill(other)


@linked
async def test_members_whose_processes_were_killed_leave_nothing(processes: LinkedProcesses) -> None:
    owner = await processes.owner("a")
    for seed in range(5):
        killed = await processes.open(seed)
        await killed.wal.join("g", ["a"], session_timeout_s=3)
        processes.kill(killed)
        await elapse(10)
    other = await processes.open()
    await other.wal.join("g", ["a"])
    assert owner.wal._groups is not None
    assert len(owner.wal._groups.service._memberships) == 1


@linked
async def test_a_reading_from_before_this_process_owned_the_log_is_not_applied_behind_it(
    processes: LinkedProcesses,
) -> None:
    """It finds blocks that this process has put, and applied, since."""
    late = await processes.owner("a")
    await late.wal._committer.hand_over()
    await late.wal._tail.catch_up()
    get, go_on = late.store.get, asyncio.Event()

    async def slow(key: str, start: int = 0, end: int | None = None) -> bytes | None:
        if key == block_key(2, 0):
            await go_on.wait()
        return await get(key, start, end)

    late.store.get = slow
    reading = asyncio.ensure_future(late.wal._tail.catch_up())
    await elapse(1)
    await late.wal._objects.claim(2)
    late.wal._committer.start()
    last = await late.wal.append("a", b"x")
    await late.wal._committer.hand_over()
    go_on.set()
    await reading
    assert await late.wal.latest_id("a") == last


@linked
async def test_sessions_are_kept_alive_over_another_link(processes: LinkedProcesses) -> None:
    """A member asks for its channels every 20 s, and its heartbeats come between."""
    await processes.owner("a")
    worker = await processes.open(1)
    member, other = [await worker.wal.join(group, ["a"], session_timeout_s=3) for group in ("g", "h")]
    first = worker.wal._links.route.link
    assert first is not None
    first.end(Unavailable("it is cut"))
    await elapse(2)
    assert worker.wal._links.route.link not in (None, first)
    assert kept_alive(worker) == ["g", "h"]
    second = worker.wal._links.route.link
    assert second is not None
    second.end(Unavailable("it is cut"))
    await other.aclose()
    await elapse(2)
    assert kept_alive(worker) == ["g"], "one that left while there was no link"
    await member.aclose()


@linked
async def test_a_member_that_may_not_join_again_ends_its_session(processes: LinkedProcesses) -> None:
    """Where its heartbeats went on it would have channels that none reads."""
    owner = await processes.owner("a", "b")
    worker = await processes.open(1, may_own=False)
    joined = [await worker.wal.join(group, [name], session_timeout_s=3) for group, name in (("g", "a"), ("h", "b"))]
    member, other = joined
    await owner.wal.drop_channel("a")
    processes.kill(owner)
    successor = await processes.open(2)
    await successor.wal.append("b", b"successor")
    await elapse(5)
    with pytest.raises(ChannelNotFound):
        await anext(member)
    with pytest.raises(ChannelNotFound):
        await anext(member)
    assert kept_alive(worker) == ["h"]
    assert [bytes(entry.payload) for entry in (await anext(other)).entries] == [b"successor"]
