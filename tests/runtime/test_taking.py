"""A bounded number of packs and deliveries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import tidewal
from tidewal.runtime.errors import InvalidRequest
from tidewal.runtime.testing import VirtualClock, run_virtual


async def ticks(upto: int) -> AsyncIterator[int]:
    """A number each second."""
    for number in range(upto):
        await asyncio.sleep(1)
        yield number


def taken(count: int | None, timeout_s: float | None, upto: int = 10) -> list[int]:
    return run_virtual(tidewal.take(ticks(upto), count, timeout_s=timeout_s), VirtualClock())


def test_ends_at_the_count_at_the_timeout_and_at_the_end_of_the_source() -> None:
    assert taken(3, None) == [0, 1, 2]
    assert taken(3, 60.5) == [0, 1, 2]
    assert taken(None, 2.5) == [0, 1]
    assert taken(5, 2.5) == [0, 1]
    assert taken(5, 0.5) == []
    assert taken(None, 60.5) == list(range(10))
    assert taken(0, None) == []


def test_a_bound_is_needed() -> None:
    for count, timeout_s in ((None, None), (-1, None), (None, -1.0)):
        with pytest.raises(InvalidRequest):
            taken(count, timeout_s)


async def test_a_source_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not 'events'"):
        await tidewal.take("events", 1)  # pyright: ignore[reportArgumentType]


def test_an_error_of_the_source_is_raised_also_a_timeout_of_its_own() -> None:
    async def failing() -> AsyncIterator[int]:
        yield 1
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        run_virtual(tidewal.take(failing(), 5, timeout_s=60), VirtualClock())


async def test_a_stream_goes_on_behind_what_was_taken_also_after_a_timeout() -> None:
    wal = await tidewal.open_wal("memory://")
    await wal.create_channel("events", tidewal.ChannelPolicy())
    stream = tidewal.MsgStream(wal, tidewal.HybridClock())
    stream.as_producer(["events"])
    stream.as_consumer(["events"])
    found: list[bytes] = []
    for number in range(3):
        assert await tidewal.take(stream, timeout_s=0.01) == []
        await stream.produce([tidewal.Record(tidewal.RecordType.ROWS, body=b"%d" % number)])
        found += [bytes(record.body) for pack in await tidewal.take(stream, 1) for record in pack.messages]
    assert found == [b"0", b"1", b"2"]
    await stream.close()
    await wal.close()


async def test_a_member_of_a_group_keeps_its_channels_over_a_timeout() -> None:
    wal = await tidewal.open_wal("memory://")
    await wal.create_channel("events", tidewal.ChannelPolicy())
    member = await wal.join("readers", ["events"])
    assert await tidewal.take(member, timeout_s=0.01) == []
    await wal.append("events", b"opened")
    [delivered] = await tidewal.take(member, 1, timeout_s=60)
    assert [bytes(entry.payload) for entry in delivered.entries] == [b"opened"]
    await member.acknowledge(delivered)
    assert await tidewal.take(member, 1, timeout_s=0.01) == []
    await member.aclose()
    await wal.close()
