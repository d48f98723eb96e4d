"""A handler that blocks the event loop: time goes on in the log, and the one to blame is named."""

from __future__ import annotations

import logging
import time

import pytest

from tidewal.actors.querynode import QueryNode
from tidewal.runtime.log.heartbeats import announcements
from tidewal.runtime.log.record import RecordType, decode
from tidewal.runtime.log.wal import From

pytestmark = pytest.mark.asyncio(loop_factories=["rocksmq"])

BLOCKED_S = 1.5
TICK_MS = 50


async def records_of(wal, channel: str) -> list:
    latest = await wal.latest_id(channel)
    found = []
    entries = wal.read(channel, From.EARLIEST)
    async for batch in entries:
        found += [decode(entry.payload) for entry in batch]
        if batch[-1].id >= latest:
            break
    await entries.aclose()
    return found


@pytest.mark.slow
async def test_ticks_and_heartbeats_go_on_while_a_handler_blocks(home, monkeypatch, caplog) -> None:
    window: list[int] = []
    query = QueryNode._query

    async def busy(self, request):
        window.append(self.node.clock.now())
        until = time.monotonic() + BLOCKED_S
        while time.monotonic() < until:
            sum(range(1000))
        window.append(self.node.clock.now())
        return await query(self, request)

    monkeypatch.setattr(QueryNode, "_query", busy)
    caplog.set_level(logging.WARNING)
    async with home.node(settings={"proxy": {"timeTickInterval": TICK_MS}}) as node, node.client() as client:
        collection = await client.create_collection(home.PEOPLE, shards=1)
        written = await client.insert("people", home.people(1))
        assert await client.count("people", consistency="eventually") in (0, 1)
        begin, end = window
        wal, names = node.node.wal, node.node.names
        times = [
            told.time
            for record in await records_of(wal, names.heartbeats)
            for told in announcements(record)
            if begin < told.time < end
        ]
        assert len(times) >= BLOCKED_S * 1000 / TICK_MS / 2, "the heartbeat thread stood still"
        channel = collection.vchannels[0].rsplit("_", 1)[0]
        ticks = [each.ts for each in await records_of(wal, channel) if each.type is RecordType.TIME_TICK]
        assert any(written.ts <= tick < end for tick in ticks), "no tick was stored"
    blamed = [record.getMessage() for record in caplog.records if "block" in record.getMessage()]
    assert any("querynode" in message for message in blamed), blamed
