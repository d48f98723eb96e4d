"""Commits of consumer groups while the store does not answer, in virtual time."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial

import pytest

from tests.adapters.objects.linked_processes import LinkedProcess, LinkedProcesses
from tests.adapters.objects.processes import SETTINGS, entries_of
from tests.adapters.objects.simulated_store import CreateFault
from tests.adapters.objects.test_links import linked
from tidewal.adapters.objects.log_objects import block_key
from tidewal.runtime.errors import Fenced, TidewalError, Unavailable
from tidewal.runtime.log.wal import Append, From
from tidewal.runtime.testing.clock import elapse


@linked
async def test_no_entry_comes_again_while_its_commit_may_be_in_the_log(processes: LinkedProcesses) -> None:
    owner = await processes.owner("in", "out")
    await commits_once(processes, owner, owner)


@linked
async def test_nor_does_it_over_a_link(processes: LinkedProcesses) -> None:
    owner = await processes.owner("in", "out")
    await commits_once(processes, owner, await processes.open(1))


async def commits_once(processes: LinkedProcesses, owner: LinkedProcess, worker: LinkedProcess) -> None:
    """The store has the block of a commit, and its answer is lost for longer than appends wait."""
    await owner.wal.append("in", b"entry")
    member = await worker.wal.join("g", ["in"])
    delivered = await anext(member)
    key = block_key(*owner.wal._state.place)
    owner.store.script[key] = deque([CreateFault.CUT])
    committing = asyncio.create_task(member.commit([delivered], [Append("out", b"output")]))
    while key not in processes.objects.bodies:
        await elapse(0.001)
    owner.store.down = True
    with pytest.raises(Unavailable) as failed:
        await committing
    assert failed.value.fields["outcome_unknown"]
    again = asyncio.ensure_future(anext(member))
    await elapse(2 * SETTINGS.delivery_timeout_s)
    assert not again.done()
    owner.store.down = False
    await owner.wal.append("in", b"next")
    assert [bytes(entry.payload) for entry in (await again).entries] == [b"next"]
    assert await entries_of(owner.wal, "out", 1) == [b"output"]


@linked
async def test_an_entry_may_be_acknowledged_before_the_owner_knows_that_it_is_stored(
    processes: LinkedProcesses,
) -> None:
    owner = await processes.owner("in")
    worker = await processes.open(1)
    member = await worker.wal.join("g", ["in"])
    key = block_key(*owner.wal._state.place)
    owner.store.script[key] = deque([CreateFault.CUT])
    appending = asyncio.create_task(owner.wal.append("in", b"entry"))
    while key not in processes.objects.bodies:
        await elapse(0.001)
    owner.store.down = True
    delivered = await anext(member)
    acknowledging = asyncio.create_task(member.acknowledge(delivered))
    await elapse(1)
    owner.store.down = False
    await acknowledging
    assert (await owner.wal.groups())[0].positions == {"in": await appending}


@linked
async def test_a_group_begins_at_the_end_while_entries_are_on_their_way(processes: LinkedProcesses) -> None:
    """Where the last of them is of another channel its id is no position in this one."""
    owner = await processes.owner("in", "out")
    for channel in ("out", "in", "out"):
        block, sending = owner.wal._committer._number, asyncio.create_task(owner.wal.append(channel, b"on its way"))
        while owner.wal._committer._number == block:
            await elapse(0.001)
        member = await owner.wal.join("g", ["in"], start=From.LATEST)
        following = asyncio.ensure_future(anext(member))
        await sending
        await elapse(1)
        await owner.wal.append("in", b"new")
        assert [bytes(entry.payload) for entry in (await following).entries] == [b"new"]
        await member.aclose()
        await owner.wal.drop_group("g")


@linked
async def test_a_commit_under_way_when_the_owner_gives_up_is_decided_by_the_log(processes: LinkedProcesses) -> None:
    """The store has the first of two blocks, and the owner gets no answer for either before it ends its epoch."""
    owner = await processes.owner("a")
    results: dict[bytes, list[bytes] | TidewalError] = {}
    places = [(owner.wal._state.epoch, owner.wal._state.number + at) for at in range(2)]
    for place, payload in zip(places, (b"stored", b"lost"), strict=True):
        owner.store.script[block_key(*place)] = deque(
            [CreateFault.CUT if payload == b"stored" else CreateFault.REFUSED]
        )
        owner.wal._submit_here([Append("a", payload)], (), partial(results.__setitem__, payload))
        while owner.wal._committer._number == place[1]:
            await elapse(0.001)
    while block_key(*places[0]) not in processes.objects.bodies:
        await elapse(0.001)
    owner.store.down = True
    await owner.wal._committer.hand_over()
    assert not owner.wal._committer.owns
    await elapse(60)
    assert results == {}
    successor = await processes.open(1)
    last = await successor.wal.append("a", b"successor")
    owner.store.down = False
    assert await owner.wal.latest_id("a") == last
    assert isinstance(results.pop(b"lost"), Fenced)
    assert await entries_of(owner.wal, "a", 2) == [b"stored", b"successor"]
    [entry, _] = await anext(owner.wal.read("a", From.EARLIEST))
    assert results == {b"stored": [entry.id]}


@linked
async def test_a_commit_that_no_log_decides_any_more_has_an_unknown_outcome(processes: LinkedProcesses) -> None:
    owner = await processes.owner("a")
    results: list[list[bytes] | TidewalError] = []
    owner.store.down = True
    owner.wal._submit_here([Append("a", b"x")], (), results.append)
    processes.opened.remove(owner)
    await owner.wal.close()
    [result] = results
    assert isinstance(result, Unavailable)
    assert result.outcome_unknown
