"""Groups whose broker dies or stands still: no member falls silent, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.adapters.pulsar.group_steps import BOUND_S, append, create, one, payloads
from tidewal.runtime.errors import Fenced, Unavailable

pytestmark = pytest.mark.broker


@pytest.fixture
def pulsar(own_pulsar):
    """Tests kill and pause it."""
    return own_pulsar


@pytest.mark.long
async def test_a_broker_killed_and_restarted_silences_no_member(open_wal, pulsar):
    wal, other = await open_wal(), await open_wal()
    await create(wal, "c0", "c1", "empty")
    first = await wal.join("g", ["c*", "empty"])
    second = await other.join("g", ["c*", "empty"])
    got = {}

    async def work(member):
        async for delivered in member:
            with contextlib.suppress(Fenced):
                await member.acknowledge(delivered)
                got.setdefault(delivered.channel, []).extend(payloads(delivered))

    workers = [asyncio.create_task(work(member)) for member in (first, second)]
    written = {"c0": [], "c1": [], "empty": []}

    async def write(numbers, *channels):
        for number in numbers:
            for channel in channels:
                await append(wal, channel, number)
                written[channel].append(str(number))

    await write(range(20), "c0", "c1")
    writing = asyncio.create_task(write(range(20, 60), "c0", "c1"))
    await asyncio.to_thread(pulsar.kill)
    await asyncio.to_thread(pulsar.restart)
    async with asyncio.timeout(BOUND_S):
        await writing
        await write(range(3), "empty")
        while got != written:
            assert not any(worker.done() for worker in workers)
            await asyncio.sleep(0)
        (info,) = await wal.groups()
    assert info.positions == {channel: await wal.latest_id(channel) for channel in written}
    assert first.channels | second.channels == set(written)
    assert not first.channels & second.channels
    for worker in workers:
        worker.cancel()


async def test_leaving_and_closing_wait_for_no_broker_for_ever(open_wal, pulsar):
    wal = await open_wal(request_timeout_s=2)
    await create(wal, "c0")
    member, other = await wal.join("g", ["c*"]), await wal.join("h", ["c*"])
    waiting = asyncio.ensure_future(anext(other, None))
    pulsar.pause()
    async with asyncio.timeout(BOUND_S):
        await member.aclose()
        await wal.close()
        (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
    assert outcome is None or isinstance(outcome, Unavailable)
    pulsar.resume()


@pytest.mark.long
async def test_a_position_in_an_empty_channel_outlives_the_broker(open_wal, pulsar):
    wal = await open_wal()
    await create(wal, "c0")
    member = await wal.join("g", ["c0"])
    await member.aclose()
    await wal.close()
    await asyncio.to_thread(pulsar.kill)
    await asyncio.to_thread(pulsar.restart)
    wal = await open_wal()
    await append(wal, "c0", 1)
    member = await wal.join("g", ["c0"])
    assert payloads(await one(member)) == ["1"]
