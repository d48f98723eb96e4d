"""Many readers of one process wait at the sidecar at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.brokers.woodpecker import Sidecar
from tidewal.adapters.woodpecker import open_wal
from tidewal.runtime.log.wal import ChannelPolicy, From
from tidewal.runtime.testing.conformance.helpers import payloads, take

pytestmark = pytest.mark.broker

READERS = 300
ANSWER_S = 10.0  # less than a reader waits at the sidecar before it asks again


async def test_neither_a_read_of_what_is_there_nor_an_entry_waits_for_other_readers(
    new_sidecar: Callable[..., Sidecar],
) -> None:
    running = new_sidecar()
    running.start()
    async with await open_wal(running.url) as wal:
        await wal.create_channel("a", ChannelPolicy())
        await wal.append("a", b"before", 1)
        readers = [wal.read("a", From.EARLIEST) for _ in range(READERS)]
        for reader in readers:
            assert payloads(await anext(reader)) == [b"before"]
        waiting = [asyncio.ensure_future(anext(reader)) for reader in readers]
        await asyncio.sleep(0)  # until each has asked, but for those that wait for a turn
        async with asyncio.timeout(ANSWER_S):
            assert payloads(await take(wal, "a", From.EARLIEST, 1)) == [b"before"]
            await wal.append("a", b"behind", 2)
            for answer in waiting:
                assert payloads(await answer) == [b"behind"]
        for reader in readers:
            await reader.aclose()
