"""A channel over many segments: order, reading, time, truncation, and what is left where it was dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.brokers.woodpecker import Sidecar, local
from tidewal.adapters.woodpecker import open_wal
from tidewal.runtime.errors import PositionLost
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, FromId, Wal
from tidewal.runtime.testing.conformance.helpers import payloads, take

pytestmark = pytest.mark.broker

COUNT = 400
PAYLOAD_BYTES = 2000


def segment_of(id: bytes) -> int:
    return int.from_bytes(id, "big") >> 40


@pytest.fixture
def rolling(new_sidecar: Callable[..., Sidecar], tmp_path: Path) -> Sidecar:
    """A sidecar whose segments end after 40 KB."""
    settings = local(tmp_path)
    settings["woodpecker"]["client"] = {"segmentRollingPolicy": {"maxSize": 40_000}}
    running = new_sidecar(settings=settings)
    running.start()
    return running


async def filled(wal: Wal) -> list[bytes]:
    """Append with 40 on their way at any time; the ids in the order of the calls."""
    await wal.create_channel("a", ChannelPolicy())
    turns = asyncio.Semaphore(40)

    async def append(number: int) -> bytes:
        async with turns:
            return await wal.append("a", bytes(PAYLOAD_BYTES), number + 1)

    return await asyncio.gather(*(append(number) for number in range(COUNT)))


async def test_appends_keep_their_order_over_segments(rolling: Sidecar) -> None:
    async with await open_wal(rolling.url) as wal:
        ids = await filled(wal)
        for _ in range(30):  # one behind the other, so that segments roll while nothing is on its way, too
            ids.append(await wal.append("a", bytes(PAYLOAD_BYTES), COUNT + 1))
        assert ids == sorted(set(ids))
        assert segment_of(ids[-1]) >= 3
        assert [entry.id for entry in await take(wal, "a", From.EARLIEST, len(ids))] == ids
    await asyncio.to_thread(rolling.process.kill)
    rolling.start()
    async with await open_wal(rolling.url) as wal:  # nothing is in memory now
        assert [entry.id for entry in await take(wal, "a", From.EARLIEST, len(ids))] == ids
        for number in (0, 7, COUNT // 2, COUNT - 1):
            assert await wal.id_at("a", number + 1) == ids[number]
        assert await wal.id_at("a", COUNT + 2) is None


async def test_truncation_is_exact_wherever_it_falls(rolling: Sidecar) -> None:
    async with await open_wal(rolling.url) as wal:
        ids = await filled(wal)
        first_of_segment = next(i for i in range(1, COUNT) if segment_of(ids[i]) > segment_of(ids[i - 1]))
        for cut in (1, first_of_segment, first_of_segment + 1, COUNT - 1):
            await wal.truncate("a", ids[cut])
            assert (await wal.describe("a")).first_id == ids[cut]
            assert (await take(wal, "a", FromId(ids[cut - 1]), 1))[0].id == ids[cut]
            with pytest.raises(PositionLost) as caught:
                await take(wal, "a", FromId(ids[cut - 1], inclusive=True), 1)
            assert caught.value.first_available == ids[cut]


async def test_a_channel_that_is_made_again_uses_no_id_again(rolling: Sidecar) -> None:
    async with await open_wal(rolling.url) as wal:
        old = await filled(wal)
        await wal.drop_channel("a")
        await wal.create_channel("a", ChannelPolicy())
        new = await wal.append_many([Append("a", b"new")])
        assert new[0] > old[-1]
        assert payloads(await take(wal, "a", From.EARLIEST, 1)) == [b"new"]
        for start in (FromId(old[0]), FromId(old[-1], inclusive=True)):
            with pytest.raises(PositionLost):
                await take(wal, "a", start, 1)
