"""An append that its owner gave up lands later, through a proxy: ahead of the next fence it counts, behind
a tick that has passed it nobody sees it (guarantee 4).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tests.brokers.producers import everything
from tests.brokers.proxied import PROXIED
from tidewal.runtime.clock import HybridClock, add_ms
from tidewal.runtime.errors import Unavailable
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.record import Record, RecordType, decode
from tidewal.runtime.log.wal import ChannelPolicy, From
from tidewal.runtime.ownership import Appended, ChannelGrant, ChannelOwner
from tidewal.runtime.streams.tt_stream import TtMsgStream

CHANNEL = "a"
WITHIN_S = 60.0
LIMIT_MS = 600_000
SOON = {
    "kafka": {"request_timeout_s": 0.5, "delivery_timeout_s": 1},
    "pulsar": {"request_timeout_s": 2},
}

pytestmark = pytest.mark.slow


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.broker) for name in PROXIED])
async def scene(request, tmp_path):
    async with PROXIED[request.param](tmp_path) as proxied:
        wal = await open_wal(proxied.url, **SOON[request.param])
        scene = Scene(wal, proxied.proxy)
        await scene.open()
        yield scene
        await scene.close()


class Scene:
    """An owner whose appends go through the proxy, and a stream that follows."""

    def __init__(self, wal, proxy):
        self.wal, self.proxy = wal, proxy
        self.clock = HybridClock()
        self.writer = ChannelOwner(wal, self.clock)
        self.stream = TtMsgStream(wal)
        self.seen: list[Record] = []
        self._term, self._limit, self._fences = 0, 0, {}

    async def open(self):
        await self.wal.create_channel(CHANNEL, ChannelPolicy())
        await self.take()
        self.stream.as_consumer([CHANNEL], From.EARLIEST)

    async def close(self):
        await self.stream.close()
        await self.wal.close()

    async def take(self):
        """Take the channel under a new term, as often as it takes to get through."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                self._term += 1
                previous, self._limit = self._limit, add_ms(self.clock.now(), LIMIT_MS)
                grant = ChannelGrant(CHANNEL, self._term, previous, self._limit, fences=dict(self._fences))
                with suppress(Unavailable):
                    self._fences[self._term] = await self.writer.acquire(grant)
                    self.writer.activate(CHANNEL, self._term)
                    return

    def submit(self, body, number):
        return self.writer.append([(CHANNEL, Record(RecordType.ROWS, body=body))], producer="p", pseq=number, rows=1)

    async def append(self, body, number):
        appended = await self.submit(body, number)
        await self.writer.tick_now()
        return appended

    async def held_append(self, body, number):
        """An append that the proxy keeps until it is of unknown outcome. Nothing is promised from then on."""
        self.proxy.hold()
        append = self.submit(body, number)
        async with asyncio.timeout(WITHIN_S):
            while not self.writer.stalled:  # noqa: ASYNC110 -- the writer tells it to nobody else here
                await asyncio.sleep(0)
        assert not append.done()
        with pytest.raises(Unavailable):
            await self.writer.sync([CHANNEL])
        self.writer.tick_all()
        self.proxy.pass_new()
        return append

    async def until_seen(self, body):
        async with asyncio.timeout(WITHIN_S):
            while not any(record.body == body for record in self.seen):
                self.seen += (await anext(self.stream)).messages

    async def landed(self, body):
        """Wait until it is in the log, and return all records of that."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                records = [decode(entry.payload, entry.id) for entry in await everything(self.wal, CHANNEL)]
                if any(record.body == body for record in records):
                    return records


async def test_an_append_that_lands_late_is_never_seen_behind_a_tick_that_passed_it(scene):
    await scene.append(b"first", 1)
    await scene.until_seen(b"first")
    # ahead of the next fence: it has happened
    append = await scene.held_append(b"found", 2)
    scene.proxy.release()
    await scene.landed(b"found")
    await scene.take()
    assert isinstance(await append, Appended)
    assert (await scene.submit(b"found", 2)).repeated
    # behind it: it has not, and what lands later does not count
    append = await scene.held_append(b"late", 3)
    await scene.take()
    with pytest.raises(Unavailable) as caught:
        await append
    assert "outcome_unknown" not in caught.value.fields
    await scene.append(b"past it", 4)
    await scene.until_seen(b"past it")
    assert scene.stream.end_ts > 0
    scene.proxy.release()
    records = await scene.landed(b"late")
    await scene.append(b"late", 3)  # the same again, by whoever was told that it had not happened
    await scene.append(b"last", 5)
    await scene.until_seen(b"last")
    expected = [b"first", b"found", b"past it", b"late", b"last"]
    assert [bytes(record.body) for record in scene.seen] == expected
    assert scene.stream.late == 0
    assert scene.stream.counts[CHANNEL].fenced >= 1
    # it did land behind a tick that had passed it
    (late,) = [record for record in records if record.body == b"late"]
    ticks = [record for record in records if record.type is RecordType.TIME_TICK and record.id < late.id]
    assert max(tick.ts for tick in ticks) >= late.ts
    # and is not there for who reads from the beginning either
    other = TtMsgStream(scene.wal)
    other.as_consumer([CHANNEL], From.EARLIEST)
    again: list[bytes] = []
    async with asyncio.timeout(WITHIN_S):
        while b"last" not in again:
            again += [bytes(record.body) for record in (await anext(other)).messages]
    await other.close()
    assert again == expected
