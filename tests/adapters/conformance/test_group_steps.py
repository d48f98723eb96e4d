"""Any backend: what becomes of a group's batch whose step failed, was cancelled, or whose end was not seen."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest

from tests.group_model import chaos, check, passes
from tidewal.runtime.errors import Fenced, InvalidRequest, Overloaded
from tidewal.runtime.groups.processing import Semantics, process
from tidewal.runtime.log.wal import Append, ChannelPolicy, From

PLAIN = ChannelPolicy()
IN_PROCESS = ("memory", "rocksmq", "rocksmq-socket")


@pytest.fixture(autouse=True)
def _needs_groups(backend):
    backend.needs("groups")


async def create(wal, *channels):
    for channel in channels:
        await wal.create_channel(channel, PLAIN)


async def fill(wal, channel, count, first=0):
    return await wal.append_many([Append(channel, str(first + n).encode()) for n in range(count)])


async def one(member):
    async with asyncio.timeout(20):
        return await anext(member)


async def batches(member, entries):
    """The next batches, until they hold so many entries: a broker divides them as it likes."""
    taken = [await one(member)]
    while sum(len(each.entries) for each in taken) < entries:
        taken.append(await one(member))
    return taken


async def outputs_of(wal, helpers):
    """All that is in `out`."""
    await wal.append("out", b"end")
    found = [b""]
    reader = wal.read("out", From.EARLIEST)
    async with asyncio.timeout(20):
        while found[-1] != b"end":
            found += helpers.payloads(await anext(reader))
    await reader.aclose()
    return found[1:-1]


async def acknowledged(wal, id):
    """Wait until the group has acknowledged channel `a` up to there."""
    async with asyncio.timeout(20):
        while not any((info.positions.get("a") or b"") >= id for info in await wal.groups()):  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.parametrize("semantics", list(Semantics))
async def test_processing_again_with_the_same_member_loses_nothing_that_failed(wal, helpers, semantics):
    await create(wal, "a", "out")
    member = await wal.join("g", ["a"])
    attempts = 0

    async def handle(delivered):
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise Overloaded("a trouble that passes")
        return [Append("out", bytes(entry.payload)) for entry in delivered.entries]

    await fill(wal, "a", 1)
    with pytest.raises(Overloaded):
        await process(wal, member, handle, semantics)
    last = (await fill(wal, "a", 1, 1))[-1]
    processing = asyncio.create_task(process(wal, member, handle, semantics))
    await acknowledged(wal, last)
    await member.aclose()
    await processing
    expected = [b"1"] if semantics is Semantics.AT_MOST_ONCE else [b"0", b"1"]
    if semantics is Semantics.EXACTLY_ONCE:
        assert await outputs_of(wal, helpers) == expected
    else:  # what was worked on while it left may be worked on again
        assert set(await outputs_of(wal, helpers)) <= set(expected)


async def test_what_is_given_back_is_delivered_again_and_nothing_passes_it(wal):
    await create(wal, "a", "out")
    ids = await fill(wal, "a", 3)
    member = await wal.join("g", ["a"])
    first = await batches(member, 3)
    await member.acknowledge(first[0], ids[:1])
    ids += await fill(wal, "a", 2, 3)
    pending = [each for each in first if each.entries[-1].id != ids[0]] + await batches(member, 2)
    member.redeliver(pending[0])
    member.redeliver(pending[0])
    for each in pending:
        with pytest.raises(Fenced):
            await member.acknowledge(each)
        with pytest.raises(Fenced):
            await member.commit([each], [Append("out", b"never")])
    again = await batches(member, 4)
    assert [entry.id for each in again for entry in each.entries] == ids[1:]
    member.redeliver(pending[0])  # of a lease that is over: nothing happens
    for each in again:
        await member.acknowledge(each)
    (info,) = await wal.groups()
    assert info.positions == {"a": ids[-1]}


async def test_a_commit_that_was_cancelled_and_is_made_again_doubles_nothing(wal, helpers):
    await create(wal, "a", "out")
    member = await wal.join("g", ["a"])
    await fill(wal, "a", 1)
    written, committed = 1, b""
    while not committed.startswith(b"30"):
        delivered = await one(member)
        outputs = [Append("out", bytes(entry.payload)) for entry in delivered.entries]
        committing = asyncio.create_task(member.commit([delivered], outputs))
        for _ in range(written):
            await asyncio.sleep(0)
        if written <= 30:
            committing.cancel()
            await fill(wal, "a", 1, written)
            written += 1
        (result,) = await asyncio.gather(committing, return_exceptions=True)
        if isinstance(result, asyncio.CancelledError):
            with pytest.raises(Fenced):
                await member.commit([delivered], outputs)
        else:
            assert isinstance(result, list)
            committed = outputs[-1].payload
    assert await outputs_of(wal, helpers) == [str(n).encode() for n in range(31)]


async def test_the_same_batch_committed_twice_at_once_is_refused(wal, helpers):
    await create(wal, "a", "out")
    await fill(wal, "a", 1)
    member = await wal.join("g", ["a"])
    delivered = await one(member)
    commits = [asyncio.create_task(member.commit([delivered], [Append("out", b"once")])) for _ in range(2)]
    first, second = await asyncio.gather(*commits, return_exceptions=True)
    assert isinstance(first, list)
    assert isinstance(second, InvalidRequest)
    assert await outputs_of(wal, helpers) == [b"once"]


@pytest.mark.parametrize("semantics", list(Semantics))
async def test_processing_ends_when_the_member_leaves_while_a_handler_works(wal, semantics):
    await create(wal, "a", "out")
    await fill(wal, "a", 1)
    member = await wal.join("g", ["a"])
    working, left = asyncio.Event(), asyncio.Event()

    async def handle(delivered):
        working.set()
        await left.wait()
        return [Append("out", bytes(entry.payload)) for entry in delivered.entries]

    processing = asyncio.create_task(process(wal, member, handle, semantics))
    async with asyncio.timeout(20):
        await working.wait()
        await member.aclose()
        left.set()
        await processing


@pytest.mark.slow
@pytest.mark.parametrize("semantics", list(Semantics))
async def test_outputs_equal_the_model_whatever_fails_and_is_cancelled(backend, helpers, seed, semantics):
    wal = await backend.wal()
    written: dict[str, list[bytes]] = {}
    counted = backend.name in IN_PROCESS  # where the test sees what moves the position

    async def pause(seconds):
        await asyncio.sleep(seconds / 10)

    with passes(lambda: written) if counted else nullcontext() as passed:
        async with asyncio.timeout(100):
            written.update(await chaos(wal, seed, semantics, pause, steps=60, seeks=counted))
    check(semantics, written, await outputs_of(wal, helpers), passed)
