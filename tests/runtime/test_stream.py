"""The plain stream: what is produced arrives once, in the order of its channel, where the repack function sends it."""

from __future__ import annotations

import asyncio

import pytest

from tidewal.runtime.clock import HybridClock
from tidewal.runtime.errors import ChannelNotFound, Closed, InvalidRequest, PositionLost, PositionMismatch, Unavailable
from tidewal.runtime.log.record import BatchPart, Record, RecordType, encode
from tidewal.runtime.log.wal import Append, ChannelPolicy, From
from tidewal.runtime.streams.messages import Position
from tidewal.runtime.streams.stream import MsgStream
from tidewal.runtime.streams.stream_base import CHANNEL_BUFFER_BYTES_MIN
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryWal


@pytest.fixture
async def wal():
    log = MemoryWal()
    for name in ("c1", "c2"):
        await log.create_channel(name, ChannelPolicy())
    yield log
    await log.close()


def message(body: bytes, key: bytes = b"", type: RecordType = RecordType.ROWS) -> Record:
    return Record(type, key=key, body=body)


def producer(wal: MemoryWal, *channels: str, **options: object) -> MsgStream:
    stream = MsgStream(wal, HybridClock())
    stream.as_producer(channels, **options)
    return stream


def consumer(wal: MemoryWal, *channels: str, start: From = From.EARLIEST, **options: object) -> MsgStream:
    stream = MsgStream(wal, HybridClock(), **options)
    stream.as_consumer(channels, start)
    return stream


async def take(stream: MsgStream, count: int) -> list[Record]:
    messages: list[Record] = []
    async for pack in stream:
        messages += pack.messages
        if len(messages) >= count:
            break
    return messages


def bodies(messages: list[Record]) -> list[bytes]:
    return [bytes(message.body) for message in messages]


async def test_every_type_arrives_once_as_it_was_sent(wal):
    sent = [
        Record(kind, producer="p", pseq=number, vchannel="v", key=b"k%d" % number, tags={"n": number}, body=b"b")
        for number, kind in enumerate(RecordType)
    ]
    ids = await producer(wal, "c1", "c2").produce(sent)
    received = await take(consumer(wal, "c1", "c2", "c1"), len(sent))
    assert sorted(
        (r.type, r.producer, r.pseq, r.vchannel, r.key, dict(r.tags), bytes(r.body)) for r in received
    ) == sorted((r.type, r.producer, r.pseq, r.vchannel, r.key, dict(r.tags), bytes(r.body)) for r in sent)
    assert sorted(r.id for r in received) == sorted(id for channel in ids.values() for id in channel)
    assert all(r.ts > 0 and r.term == 0 for r in received)


async def test_a_broadcast_reaches_every_channel(wal):
    stream = producer(wal, "c1", "c2")
    results = [await stream.broadcast(message(b"%d" % number)) for number in range(3)]
    assert all({channel: len(ids) for channel, ids in result.items()} == {"c1": 1, "c2": 1} for result in results)
    assert sorted(bodies(await take(consumer(wal, "c1", "c2"), 6))) == [b"0", b"0", b"1", b"1", b"2", b"2"]


async def test_messages_go_where_their_key_sends_them_and_keep_their_order(wal):
    stream = producer(wal, "c1", "c2")
    for number in range(50):
        await stream.produce([message(b"%d" % number, key=b"k%d" % (number % 7))])
    by_key: dict[bytes, set[str]] = {}
    for channel in ("c1", "c2"):
        received = await take(consumer(wal, channel), len(wal.log.channels[channel].entries))
        for key in {r.key for r in received}:
            by_key.setdefault(key, set()).add(channel)
            numbers = [int(bytes(r.body)) for r in received if r.key == key]
            assert numbers == sorted(numbers)
    assert len(by_key) == 7
    assert all(len(channels) == 1 for channels in by_key.values())
    assert {channel for channels in by_key.values() for channel in channels} == {"c1", "c2"}


async def test_a_repack_function_is_used_as_it_is(wal):
    def split(messages, channels):
        return [(channels[-1], message(body)) for m in messages for body in (b"1" + m.body, b"2" + m.body)]

    ids = await producer(wal, "c1", "c2", repack=split).produce([message(b"x")])
    assert {channel: len(found) for channel, found in ids.items()} == {"c2": 2}
    assert bodies(await take(consumer(wal, "c2"), 2)) == [b"1x", b"2x"]
    stray = producer(wal, "c1", repack=lambda messages, channels: [("c2", messages[0])])
    with pytest.raises(InvalidRequest):
        await stray.produce([message(b"stray")])
    assert len(wal.log.channels["c2"].entries) == 2


async def test_the_edges_of_producing(wal):
    stream = producer(wal, "c1")
    assert await stream.produce([]) == {}
    none = MsgStream(wal, HybridClock())
    for call in (none.produce([]), none.produce([message(b"x")]), none.broadcast(message(b"x"))):
        with pytest.raises(InvalidRequest):
            await call
    with pytest.raises(ChannelNotFound):
        await producer(wal, "c1", "missing").broadcast(message(b"x"))
    assert wal.log.channels["c1"].entries == []
    failing = producer(MemoryWal(wal.log, FaultPlan(0, Rates(fail=1))), "c1")
    with pytest.raises(Unavailable):
        await failing.produce([message(b"x")])
    await stream.close()
    with pytest.raises(Closed):
        await stream.produce([message(b"x")])


async def test_through_an_owner_messages_are_stamped_and_acknowledged(world):
    await world.channels("a", "b")
    owner = world.owner()
    await owner.own("a", "b")
    stream = MsgStream(owner.wal, owner.clock)
    stream.as_producer(["a", "b"], owner=owner.channel_owner)
    ids = await stream.broadcast(world.rows(b"x"))
    assert ids == {name: [world.records(name)[-1].id] for name in "ab"}
    assert {(r.term, r.cseq) for name in "ab" for r in world.records(name)[-1:]} == {(1, 2)}
    await stream.close()


async def test_seek_goes_on_within_a_batch(wal):
    parts = [Record(RecordType.ROWS, ts=9, term=1, cseq=2 + n, part=BatchPart(9, n, 3)) for n in range(3)]
    records = [Record(RecordType.ROWS, ts=5, term=1, cseq=1), *parts, Record(RecordType.ROWS, ts=10, term=1, cseq=5)]
    await wal.append_many([Append("c1", encode(record), record.ts) for record in records])
    everything = await take(consumer(wal, "c1"), 5)
    for number, message in enumerate(everything[:4]):
        for include_current in (False, True):
            stream = MsgStream(wal, HybridClock())
            stream.seek([stream.position_of("c1", message)], include_current=include_current)
            async with asyncio.timeout(5):
                received = await take(stream, 1)
            assert [each.cseq for each in received] == list(range(2 + number - include_current, 6))
            await stream.close()


async def test_a_batch_that_no_owner_has_numbered_has_no_position_within(wal):
    await producer(wal, "c1").produce([Record(RecordType.ROWS, part=BatchPart(1, n, 2)) for n in range(2)])
    received = await take(consumer(wal, "c1"), 2)
    for message in received:
        with pytest.raises(InvalidRequest, match="batch"):
            MsgStream(wal, HybridClock()).position_of("c1", message)


async def test_seek_goes_on_behind_the_position_or_with_it(wal):
    ids = (await producer(wal, "c1").produce([message(b"%d" % n) for n in range(10)]))["c1"]
    everything = await take(consumer(wal, "c1"), 10)
    reader = MsgStream(wal, HybridClock())
    at = reader.position_of("c1", everything[5])
    assert at.message_id == ids[5]
    for include_current, first in ((False, 6), (True, 5)):
        stream = MsgStream(wal, HybridClock())
        stream.seek([Position.from_bytes(at.to_bytes())], include_current=include_current)
        received = await take(stream, 10 - first)
        assert bodies(received) == [b"%d" % n for n in range(first, 10)]
        assert received[-1].id == await stream.latest_id("c1")
        await stream.close()


@pytest.mark.parametrize("owned", [True, False])
async def test_reopening_at_every_pack_gives_each_message_once(world, owned, rng):
    await world.channels("a", "b")
    owner = world.owner()
    if owned:
        await owner.own("a", "b")
    sender = MsgStream(owner.wal, owner.clock)
    sender.as_producer(["a", "b"], owner=owner.channel_owner if owned else None)
    received: list[Record] = []
    saved: dict[str, Position] = {}
    sent = [b"%d" % number for number in range(40)]
    for body in sent:
        await sender.produce([message(body, key=body)])
        if owned and rng.random() < 0.3:
            owner.channel_owner.tick_all()
        if rng.random() < 0.5 or body == sent[-1]:
            reader = consumer(owner.wal, "a", "b")
            if any(position.message_id for position in saved.values()):
                reader.seek([position for position in saved.values() if position.message_id])
            while not received or max(int(bytes(r.body)) for r in received) < int(body):
                pack = await anext(reader)
                received += [r for r in pack.messages if r.type is RecordType.ROWS]
                saved = dict(pack.end_positions)
            await reader.close()
    assert sorted(bodies(received)) == sorted(sent)


async def test_wrong_starts_are_refused(wal):
    await producer(wal, "c1").produce([message(b"x")])
    beyond = Position("c1", bytes(7) + b"\x09", 0, 0, 0, "memory")
    stream = MsgStream(wal, HybridClock())
    stream.seek([beyond])
    with pytest.raises(PositionLost):
        await anext(stream)
    with pytest.raises(InvalidRequest):
        stream.seek([beyond])
    await stream.close()
    subscribed = consumer(wal, "c2")
    with pytest.raises(InvalidRequest, match="not read"):
        subscribed.seek([beyond])
    with pytest.raises(PositionMismatch):
        MsgStream(wal, HybridClock()).seek([Position("c1", b"x", 0, 0, 0, "kafka")])
    with pytest.raises(InvalidRequest):
        await anext(MsgStream(wal, HybridClock()))
    with pytest.raises(InvalidRequest):
        consumer(wal, "c1").as_consumer(["c2"])
    with pytest.raises(InvalidRequest):
        MsgStream(wal, HybridClock()).as_consumer([])
    with pytest.raises(ChannelNotFound):
        await anext(consumer(wal, "missing"))
    with pytest.raises(InvalidRequest):
        stream.position_of("c1", message(b"never read"))


async def test_from_the_latest_only_what_comes_afterwards_arrives(wal):
    sender = producer(wal, "c1")
    await sender.produce([message(b"old")])
    stream = consumer(wal, "c1", start=From.LATEST)
    waiting = asyncio.ensure_future(anext(stream))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    await sender.produce([message(b"new")])
    assert bodies((await waiting).messages) == [b"new"]
    await stream.close()


async def test_a_cancelled_reader_leaves_no_task_and_loses_nothing(wal):
    stream = consumer(wal, "c1")
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await producer(wal, "c1").produce([message(b"x")])
    assert bodies((await anext(stream)).messages) == [b"x"]
    await stream.close()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert len(asyncio.all_tasks()) == 1


async def test_a_bad_record_between_good_ones_is_skipped(wal):
    handed: list[bytes] = []
    sender = producer(wal, "c1")
    await sender.produce([message(b"1")])
    bad = await wal.append("c1", b"junk")
    await sender.produce([message(b"2")])
    stream = consumer(wal, "c1", on_bad=lambda channel, entry, error: handed.append(entry.id))
    pack = await anext(stream)
    assert (bodies(pack.messages), handed) == ([b"1", b"2"], [bad])
    assert pack.end_positions["c1"].message_id == await wal.latest_id("c1")
    await stream.close()


async def test_what_is_not_taken_is_bounded(wal):
    body = bytes(100_000)
    await wal.append_many([Append("c1", b"junk")])
    stream = consumer(wal, "c1", buffer_bytes=1)
    waiting = asyncio.ensure_future(anext(stream))
    sender = producer(wal, "c1")
    for _ in range(40):
        await sender.produce([message(body)])
        for _ in range(3):
            await asyncio.sleep(0)
    assert stream.buffered_bytes < CHANNEL_BUFFER_BYTES_MIN + 2 * len(body)
    received = (await waiting).messages + await take(stream, 39)
    assert len(received) == 40
    await stream.close()
