"""Ephemeral channels that are dropped, or made again as the other kind, beside what is under way, in virtual time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import pytest

from tests.adapters.objects.linked_processes import LinkedProcess, LinkedProcesses
from tests.adapters.objects.processes import entries_of
from tests.adapters.objects.simulated_store import CreateFault
from tests.adapters.objects.test_links import EPHEMERAL, linked
from tidewal.adapters.objects.log_objects import block_key
from tidewal.runtime.errors import ChannelNotFound
from tidewal.runtime.log.wal import Append, ChannelPolicy, From
from tidewal.runtime.testing.clock import elapse

DURABLE = ChannelPolicy()
KINDS = [(EPHEMERAL, DURABLE), (DURABLE, EPHEMERAL)]


@linked
async def test_entries_of_a_channel_that_their_block_drops_are_not_kept(processes: LinkedProcesses) -> None:
    owner = await processes.owner("a")
    await owner.wal.create_channel("e", EPHEMERAL)
    number = owner.wal._committer._number
    appending = owner.wal.append_many([Append("a", b"durable"), Append("e", b"ephemeral")])
    (durable, ephemeral), _ = await asyncio.gather(appending, owner.wal.drop_channel("e"))
    assert owner.wal._committer._number == number + 1, "both are in one block"
    assert await owner.wal.latest_id("a") == durable
    assert ephemeral
    assert owner.wal._log.memory._channels == {}
    with pytest.raises(ChannelNotFound):
        await owner.wal.latest_id("e")


async def made_again(owner: LinkedProcess, policy: ChannelPolicy) -> None:
    await owner.wal.drop_channel("x")
    await owner.wal.create_channel("x", policy)


async def uses(process: LinkedProcess, payload: bytes) -> None:
    """All that a process asks of the channel: there it is, with this one entry."""
    reading = asyncio.ensure_future(entries_of(process.wal, "x", 1))
    id = await process.wal.append("x", payload)
    assert await process.wal.latest_id("x") == id
    assert (await process.wal.describe("x")).first_id == id
    assert await process.wal.id_at("x", 0) == id
    assert await reading == [payload]
    await process.wal.truncate("x", id)


@pytest.mark.parametrize("deaf", [False, True], ids=["told", "not told"])
def test_a_channel_that_is_made_again_as_the_other_kind_is_there_at_any_moment(deaf: bool) -> None:
    """Also for a process that has not heard of it yet."""

    @linked
    async def test(processes: LinkedProcesses) -> None:
        owner = await processes.owner("a")
        other = await processes.open(1)
        for before, after in KINDS:
            await made_again(owner, before)
            await uses(other, b"before")
            if deaf:
                other.wal._links.on_block = lambda *_: None  # type: ignore[method-assign]
            asks: list[Callable[[str], Awaitable[object]]] = [
                other.wal.latest_id,
                other.wal.describe,
                lambda name: other.wal.id_at(name, 0),
                lambda name: entries_of(other.wal, name, 1),
                lambda name: other.wal.truncate(name, b"\xff" * 16),
                lambda name: other.wal.hold(name, "holder", b"\0" * 16),
            ]
            for ask in asks:
                await made_again(owner, before)
                await owner.wal.append("x", b"x")
                await other.wal.latest_id("x")
                await made_again(owner, after)
                await owner.wal.append("x", b"x")
                await ask("x")
            assert bool(owner.wal._state.names["x"].holds) is not after.ephemeral
            await made_again(owner, before)
            await other.wal.latest_id("x")
            await made_again(owner, after)
            await uses(other, b"after")

    test()


@linked
async def test_a_channel_that_a_process_has_seen_before_its_owner_knows_it_is_waited_for(
    processes: LinkedProcesses,
) -> None:
    """The store has the block, and its answer has not come to the owner."""
    owner = await processes.owner("a", "x")
    other = await processes.open(1)
    await other.wal.append("a", b"linked")
    await owner.wal.drop_channel("x")
    key = block_key(*owner.wal._state.place)
    owner.store.script[key] = deque([CreateFault.CUT])
    creating = asyncio.create_task(owner.wal.create_channel("x", EPHEMERAL))
    while key not in processes.objects.bodies:
        await elapse(0.001)
    owner.store.down = True
    await other.wal._tail.catch_up()
    assert other.wal._state.names["x"].policy == EPHEMERAL
    assert "x" not in owner.wal._state.names
    asking = [asyncio.ensure_future(each) for each in (other.wal.latest_id("x"), other.wal.describe("x"))]
    await elapse(1)
    owner.store.down = False
    await creating
    assert await asking[0] is None
    assert (await asking[1]).policy == EPHEMERAL


@linked
async def test_a_reader_ends_with_the_channel_that_it_reads_also_where_another_has_its_name(
    processes: LinkedProcesses,
) -> None:
    owner = await processes.owner("a")
    other = await processes.open(1)
    for before, after in KINDS:
        await made_again(owner, before)
        reader = other.wal.read("x", From.EARLIEST)
        following = asyncio.ensure_future(anext(reader))
        await owner.wal.append("x", b"before")
        assert [bytes(entry.payload) for entry in await following] == [b"before"]
        await made_again(owner, after)
        await owner.wal.append("x", b"after")
        with pytest.raises(ChannelNotFound):
            await anext(reader)


@linked
async def test_a_durable_channel_that_was_an_ephemeral_one_is_there_without_an_owner(
    processes: LinkedProcesses,
) -> None:
    owner = await processes.owner("a")
    await made_again(owner, EPHEMERAL)
    others = [await processes.open(seed, may_own=False) for seed in range(2)]
    await made_again(owner, DURABLE)
    last = await owner.wal.append("x", b"x")
    processes.kill(owner)
    assert await others[0].wal.latest_id("x") == last
    assert await entries_of(others[1].wal, "x", 1) == [b"x"]
