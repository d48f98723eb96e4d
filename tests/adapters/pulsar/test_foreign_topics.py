"""Topics that others made on Pulsar, with and without partitions: read, written, shared out beside other programs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from tests.adapters.pulsar.foreign_topics import TIME_S, Others
from tidewal.adapters.pulsar import open_wal
from tidewal.adapters.pulsar.foreign_topics import _java_hash
from tidewal.runtime.clock import HybridClock
from tidewal.runtime.errors import ChannelNotFound, ConfigError, InvalidRequest, Unavailable, Unsupported
from tidewal.runtime.log.record import Record, RecordType
from tidewal.runtime.log.wal import (
    TOMBSTONE,
    Append,
    ChannelPolicy,
    From,
    FromId,
    FromTime,
    Tombstone,
)
from tidewal.runtime.streams.stream import MsgStream
from tidewal.runtime.streams.tt_stream import TtMsgStream

pytestmark = pytest.mark.broker

MS = 1_700_000_000_000


def _by_definition(key: str) -> int:
    found = 0
    raw = key.encode("utf-16-be")
    for at in range(0, len(raw), 2):
        found = (31 * found + int.from_bytes(raw[at : at + 2], "big")) % 2**32
    return found % 2**31


def test_keys_are_hashed_as_java_does():
    assert [_java_hash(key) for key in ("a", "ab", "hello")] == [97, 3105, 99162322], "as Java's documentation has it"
    for key in ("Grüße", "🌊", "a long key with a negative hash code"):
        assert _java_hash(key) == _by_definition(key)


@pytest.fixture
def others(pulsar: Any) -> Iterator[Others]:
    found = Others(pulsar)
    yield found
    found.client.close()


@pytest.fixture
async def wal(others: Others):
    opened = await open_wal(others.url)
    yield opened
    await opened.close()


async def read(wal, channel, start, count):
    found = []
    reader = wal.read(channel, start)
    async with asyncio.timeout(TIME_S):
        async for entries in reader:
            found += entries
            if len(found) >= count:
                break
    await reader.aclose()
    return found


async def test_what_another_producer_wrote_is_read_with_keys_headers_and_times(others, wal):
    topic, plain = others.make(3), others.make()
    fields = {"partition_key": "k", "properties": {"kind": "a"}, "event_timestamp": MS}
    await asyncio.to_thread(others.send, f"{topic}-partition-2", b"one", **fields)
    await asyncio.to_thread(others.send, plain, b"two")
    assert await wal.channels() == sorted([f"{topic}:0", f"{topic}:1", f"{topic}:2", plain])
    (one,) = await read(wal, f"{topic}:2", From.EARLIEST, 1)
    assert (one.payload, one.key, one.headers, one.timestamp) == (b"one", b"k", (("kind", b"a"),), MS << 18)
    (two,) = await read(wal, plain, From.EARLIEST, 1)
    assert (two.payload, two.key, two.headers) == (b"two", None, ())
    assert two.timestamp > MS << 18, "the time of publishing"
    info = await wal.describe(plain)
    assert (info.first_id, info.latest_id) == (two.id, two.id)
    assert await wal.latest_id(f"{topic}:0") is None


async def test_what_is_appended_another_consumer_reads(others, wal):
    topic, plain = others.make(2), others.make()
    ids = await wal.append_many(
        [
            Append(f"{topic}:1", b"x", MS << 18, b"k", (("kind", b"a"),)),
            Append(plain, TOMBSTONE, key=b"gone"),
            Append(plain, b""),
        ]
    )
    (one,) = await asyncio.to_thread(others.consume, f"{topic}-partition-1", 1)
    assert (one.data(), one.partition_key(), one.properties(), one.event_timestamp()) == (b"x", "k", {"kind": "a"}, MS)
    gone, empty = await asyncio.to_thread(others.consume, plain, 2)
    assert (gone.has_null_value(), gone.partition_key()) == (True, "gone")
    assert (empty.has_null_value(), empty.data(), empty.properties()) == (False, b"", {})
    assert await wal.latest_id(plain) == ids[-1]
    entries = await read(wal, plain, From.EARLIEST, 2)
    assert [isinstance(entry.payload, Tombstone) for entry in entries] == [True, False]
    assert [entry.id for entry in entries] == ids[1:]
    assert await read(wal, plain, FromId(ids[1]), 1) == entries[1:]


async def test_a_key_decides_the_partition_as_in_the_java_client(others, wal):
    topic = others.make(4)
    keys = [f"key {number}" for number in range(30)]
    await wal.append_many([Append(topic, b"x", key=key.encode()) for key in keys])
    for number in range(4):
        expected = {key for key in keys if _by_definition(key) % 4 == number}
        entries = await read(wal, f"{topic}:{number}", From.EARLIEST, len(expected))
        assert {(entry.key or b"").decode() for entry in entries} == expected
    await wal.append_many([Append(topic, b"none") for _ in range(4)])
    assert [len(await read(wal, f"{topic}:{number}", From.EARLIEST, 1)) > 0 for number in range(4)] == [True] * 4


async def test_times_find_entries(others, wal):
    topic = others.make()
    ids = [await wal.append(topic, b"%d" % number, (MS + number) << 18) for number in range(10)]
    assert await wal.id_at(topic, (MS + 6) << 18) == ids[6]
    assert [entry.id for entry in await read(wal, topic, FromTime((MS + 8) << 18), 2)] == ids[8:]


async def test_nothing_about_a_topic_is_changed_and_nothing_is_made(others, wal):
    topic = others.make()
    id = await wal.append(topic, b"x")
    for call in (
        wal.create_channel("mine", ChannelPolicy()),
        wal.drop_channel(topic),
        wal.truncate(topic, id),
        wal.hold(topic, "me", id),
    ):
        with pytest.raises(Unsupported):
            await call
    with pytest.raises(Unsupported):
        TtMsgStream(wal)
    for missing in ("nowhere", "nowhere:0", f"{topic}:0"):
        with pytest.raises(ChannelNotFound):
            await wal.append(missing, b"x")
        with pytest.raises(ChannelNotFound):
            await anext(wal.read(missing, From.EARLIEST))
    for wrong in (
        Append(topic, b"x", key=b"\xff"),
        Append(topic, b"x", key=b""),
        Append(topic, b"x", headers=(("a", None),)),
        Append(topic, b"x", headers=(("a", b"1"), ("a", b"2"))),
    ):
        with pytest.raises(InvalidRequest):
            await wal.append_many([wrong])
    assert await wal.channels() == [topic]


async def test_a_namespace_that_is_not_there_and_a_wrong_word(others, pulsar):
    with pytest.raises(Unavailable, match="no namespace"):
        await open_wal(f"{pulsar.url}/public/{uuid4().hex}?topics=foreign&web_url={pulsar.web_url}")
    with pytest.raises(ConfigError, match="own and foreign"):
        await open_wal(others.url.replace("foreign", "mine"))


async def test_streams_carry_keys_headers_and_bodies_both_ways(others, wal):
    topic = others.make(2)
    writer = MsgStream(wal, HybridClock())
    writer.as_producer([topic])
    await writer.produce([Record(RecordType.ROWS, key=b"a", tags={"kind": "text"}, body=b"1")])
    await asyncio.to_thread(others.send, topic, b"2", partition_key="b")
    reader = MsgStream(wal, HybridClock())
    reader.as_consumer([f"{topic}:0", f"{topic}:1"])
    found = {}
    async with asyncio.timeout(TIME_S):
        while len(found) < 2:
            found |= {record.key: record for record in (await anext(reader)).messages}
    await reader.close()
    assert (found[b"a"].tags, found[b"a"].body, found[b"b"].body) == ({"kind": b"text"}, b"1", b"2")


async def take(member, count):
    found = []
    async with asyncio.timeout(TIME_S):
        while len(found) < count:
            delivered = await anext(member)
            found += [(delivered.channel, entry.payload) for entry in delivered.entries]
            await member.acknowledge(delivered)
    return found


async def test_a_group_shares_out_the_partitions_and_new_ones(others, wal):
    topic = others.make(2)
    for number in range(2):
        await wal.append(f"{topic}:{number}", b"%d" % number)
    first, second = [await wal.join("billing", [topic]) for _ in range(2)]
    found = [each for taken in await asyncio.gather(take(first, 1), take(second, 1)) for each in taken]
    assert sorted(found) == [(f"{topic}:0", b"0"), (f"{topic}:1", b"1")]
    assert not first.channels & second.channels
    await asyncio.to_thread(others.grow, topic, 3)
    async with asyncio.timeout(TIME_S):
        while f"{topic}:2" not in await wal.channels():  # noqa: ASYNC110 -- the broker makes it
            await asyncio.sleep(0.05)
    await wal.append(f"{topic}:2", b"2")
    await second.aclose()
    assert (f"{topic}:2", b"2") in await take(first, 1)
    await wal.append(f"{topic}:0", b"input")
    async with asyncio.timeout(TIME_S):
        delivered = await anext(first)
    with pytest.raises(Unsupported, match="outputs"):
        await first.commit([delivered], [Append(topic, b"x")])
    await first.aclose()
    again = await wal.join("billing", [topic])
    assert await take(again, 1) == [(f"{topic}:0", b"input")], "the refused commit moved nothing"
    await again.aclose()
    (info,) = await wal.groups()
    assert set(info.positions) == {f"{topic}:{number}" for number in range(3)}
    with pytest.raises(ChannelNotFound):
        await wal.join("billing", ["nowhere"])
    await wal.drop_group("billing")
