"""Streams with a filter have the messages that pass, and the times and positions of one that has all."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewal.runtime.clock import HybridClock
from tidewal.runtime.errors import InvalidFilter
from tidewal.runtime.filters.record_filter import RecordFilter
from tidewal.runtime.log.left_out import EntryFilter
from tidewal.runtime.log.record import BatchPart, Record, RecordType, encode
from tidewal.runtime.log.wal import Append, ChannelPolicy
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.streams.factory import Factory
from tidewal.runtime.streams.messages import MsgPack, Position
from tidewal.runtime.streams.open_stream import open_stream
from tidewal.runtime.streams.stream import MsgStream
from tidewal.runtime.streams.tt_stream import TtMsgStream
from tidewal.runtime.testing.clock import run_virtual
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

CHANNELS = ("c", "d")
WHERE = 'tag == "wanted"'


class SendingWal(MemoryWal):
    """A log whose owner leaves out what does not pass before it sends it, some entries an answer."""

    chance = random.Random(0)

    async def read_where(self, channel, start, where: RecordFilter):
        async for entries in self.read(channel, start):
            while entries:
                count = self.chance.randint(1, len(entries))
                sending = EntryFilter(where)
                sending.add(entries[:count])
                entries = entries[count:]
                yield sending.taken()


def story(chance: random.Random) -> list[Append]:
    """Two channels with owners: single records, batches, ticks, a new term with its fence, and records of the old."""
    appends: list[Append] = []
    place = {channel: [1, 0] for channel in CHANNELS}  # term and number
    for ts in range(10, 400, 10):
        channel = chance.choice(CHANNELS)
        term, cseq = place[channel]
        kind = chance.choice([RecordType.ROWS] * 6 + [RecordType.TIME_TICK, RecordType.FENCE])
        if kind is RecordType.FENCE:
            term, cseq = term + 1, 0
        count = chance.choice([1, 1, 1, 3]) if kind is RecordType.ROWS else 1
        for n in range(count):
            part = BatchPart(ts, n, count) if count > 1 else None
            tags = {"tag": "wanted" if chance.random() < 0.2 else "other"}
            record = Record(kind, ts=ts + n, term=term, cseq=cseq + 1 + n, part=part, tags=tags)
            appends.append(Append(channel, encode(record), ts))
        place[channel] = [term, cseq + count]
        if chance.random() < 0.1 and term > 1:
            zombie = Record(RecordType.ROWS, ts=ts, term=term - 1, cseq=900, tags={"tag": "wanted"})
            appends.append(Append(channel, encode(zombie), ts))
    for channel, (term, cseq) in place.items():
        tick = Record(RecordType.TIME_TICK, ts=500, term=term, cseq=cseq + 1)
        appends.append(Append(channel, encode(tick), 500))
    return appends


async def packs_of(stream: TtMsgStream, upto: int) -> list[MsgPack]:
    packs: list[MsgPack] = []
    while stream.end_ts < upto:
        packs.append(await anext(stream))
    await stream.close()
    return packs


def wanted(messages: list[Record]) -> list[Record]:
    """The messages that pass: a batch where any of it does."""
    passing = {each.part.batch for each in messages if each.part and each.tags["tag"] == "wanted"}
    return [
        each
        for each in messages
        if each.tags["tag"] == "wanted" or (each.part is not None and each.part.batch in passing)
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_packs_have_what_passes_and_time_and_positions_of_all(seed: int, at_owner: bool):
    chance = random.Random(seed)

    async def main() -> None:
        wal = SendingWal(MemoryLog()) if at_owner else MemoryWal(MemoryLog())
        SendingWal.chance = random.Random(seed)
        for channel in CHANNELS:
            await wal.create_channel(channel, ChannelPolicy())
        await wal.append_many(story(chance))
        everything = TtMsgStream(wal)
        everything.as_consumer(CHANNELS)
        read = await packs_of(everything, 500)
        some = TtMsgStream(wal, where=WHERE)
        some.as_consumer(CHANNELS)
        passed: list[MsgPack] = []
        places: dict[str, Position] = {}
        stop = chance.randint(1, 499)
        while some.end_ts < stop:
            passed.append(await anext(some))
            places = dict(passed[-1].end_positions)
        await some.close()
        again = TtMsgStream(wal, where=WHERE)  # goes on from a saved position
        again.seek(places.values())
        passed += await packs_of(again, 500)
        for pack, following in itertools.pairwise(passed):
            assert pack.end_ts == following.begin_ts
            assert all(pack.begin_ts < each.ts <= pack.end_ts for each in pack.messages)
        assert messages_of(passed) == wanted(messages_of(read))
        ends = [{name: (at.term, at.cseq) for name, at in packs[-1].end_positions.items()} for packs in (read, passed)]
        assert ends[0] == ends[1]

    run_virtual(main())


def messages_of(packs: list[MsgPack]) -> list[Record]:
    return [message for pack in packs for message in pack.messages]


async def test_each_way_to_open_a_stream_takes_a_filter():
    wal = MemoryWal(MemoryLog())
    await wal.create_channel("c", ChannelPolicy())
    for n in range(1, 7):
        tags = {"tag": "wanted" if n % 2 else "other"}
        await wal.append("c", encode(Record(RecordType.ROWS, ts=n, term=1, cseq=n, tags=tags)), n)
    factory = Factory(wal, HybridClock(), metrics=Metrics())
    streams = [
        MsgStream(wal, HybridClock(), where=WHERE),
        TtMsgStream(wal, where=WHERE),
        open_stream(wal, ["c"], where=WHERE),
        factory.stream(where=WHERE),
        factory.tt_stream(where=WHERE),
    ]
    for stream in streams:
        if not stream.counts:
            stream.as_consumer(["c"])
        found: list[int] = []
        async with asyncio.timeout(20):
            while len(found) < 3:
                found += [each.cseq for each in (await anext(stream)).messages]
        assert found == [1, 3, 5]
        await stream.close()
    with pytest.raises(InvalidFilter):
        open_stream(wal, ["c"], where="tag =")
