"""Channels on Kafka: what several processes agree on, what plain Kafka tools see, and what holds do to retention."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from tidewal.runtime.clock import compose
from tidewal.runtime.errors import ChannelExists, ChannelNotFound, InvalidRequest, PositionLost, Unavailable
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, FromId, FromTime

pytestmark = pytest.mark.broker

PLAIN = ChannelPolicy()
WITHIN_S = 30.0


def topic_of(wal, channel):
    return wal._catalog.find(channel).topic


async def settings_of(kafka, topic):
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        ((response, *_),) = [await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])]
    finally:
        await admin.close()
    return {entry[0]: entry[1] for entry in response.resources[0][4]}


async def test_what_one_process_makes_another_one_has(kafka, opening, helpers):
    one, two = await opening(kafka), await opening(kafka)
    await one.create_channel("a", PLAIN)
    assert await two.channels() == ["a"]
    ids = [await wal.append("a", b"x") for wal in (one, two, one)]
    assert [entry.id for entry in await helpers.take(two, "a", From.EARLIEST, 3)] == ids
    reader = one.read("a", FromId(ids[-1]))
    waiting = asyncio.ensure_future(anext(reader))
    await two.drop_channel("a")
    with pytest.raises(ChannelNotFound):
        await asyncio.wait_for(waiting, WITHIN_S)
    with pytest.raises(ChannelNotFound):
        await one.append("a", b"x")
    await two.create_channel("a", PLAIN)
    assert await one.append("a", b"y") > ids[-1]
    with pytest.raises(PositionLost):
        await anext(one.read("a", FromId(ids[-1])))


async def test_what_is_submitted_before_its_channel_is_known_keeps_its_order(kafka, opening, helpers, monkeypatch):
    wal = await opening(kafka)
    await wal.create_channel("a", PLAIN)
    find, here, looks = wal._catalog.find, threading.get_ident(), itertools.count()
    monkeypatch.setattr(
        wal._catalog,
        "find",
        lambda name: None if threading.get_ident() == here and next(looks) < 50 else find(name),
    )
    appends = [asyncio.ensure_future(wal.append("a", b"%d" % number)) for number in range(50)]
    await appends[0]
    appends += [asyncio.ensure_future(wal.append("a", b"%d" % number)) for number in range(50, 100)]
    ids = await asyncio.gather(*appends)
    assert next(looks) > 50
    assert ids == sorted(ids)
    assert helpers.payloads(await helpers.take(wal, "a", From.EARLIEST, 100)) == [
        b"%d" % number for number in range(100)
    ]


async def test_of_those_who_make_a_channel_at_once_one_policy_wins_for_all(kafka, opening):
    wals = await asyncio.gather(*(opening(kafka) for _ in range(3)))
    policies = [ChannelPolicy(max_message_bytes=1000 + number) for number in range(3)]
    for name in ("a", "b", "c"):
        made = [wal.create_channel(name, policy) for wal, policy in zip(wals, policies, strict=True)]
        answers = await asyncio.gather(*made, return_exceptions=True)
        assert [type(answer) for answer in answers if answer] == [ChannelExists] * 2
        winner = policies[answers.index(None)]
        assert [(await wal.describe(name)).policy for wal in wals] == [winner] * 3
        await wals[0].append(name, b"x")
        await wals[1].drop_channel(name)
        assert [await wal.channels() for wal in wals] == [[]] * 3
    assert (await opening(kafka))._catalog.names() == []


async def test_a_channel_whose_maker_died_before_its_topic_is_made_by_who_needs_it(kafka, opening, helpers):
    wal = await opening(kafka)
    for name in ("appended", "read", "asked"):
        await wal._io.call(lambda name=name: wal._catalog.write_channel(name, PLAIN))
    id = await wal.append("appended", b"x")
    assert await wal.latest_id("appended") == id
    assert await wal.latest_id("asked") is None
    reader = wal.read("read", From.EARLIEST)
    waiting = asyncio.ensure_future(anext(reader))
    channel = wal._catalog.find("read")
    await helpers.until(lambda: wal._reads.leader(channel.topic) is not None)
    id = await wal.append("read", b"x")
    assert [entry.id for entry in await asyncio.wait_for(waiting, WITHIN_S)] == [id]


async def test_who_only_reads_makes_no_topic_for_a_channel_whose_maker_died(kafka, opening):
    wal = await opening(kafka)
    await wal._io.call(lambda: wal._catalog.write_channel("half", PLAIN))
    half = wal._catalog.find("half")
    reading = await opening(kafka, read_only=True)
    for _ in range(2):
        assert await reading.channels() == []
        for call in (reading.describe("half"), reading.latest_id("half"), anext(reading.read("half", From.EARLIEST))):
            with pytest.raises(ChannelNotFound):
                await call
        assert await wal._io.call(lambda: wal._writes.topic_id(half.topic)) is None  # the controller says so
    await wal.create_channel("half", PLAIN)
    id = await wal.append("half", b"x")
    assert await reading.channels() == ["half"]
    assert (await anext(reading.read("half", From.EARLIEST)))[0].id == id


async def test_plain_kafka_tools_read_a_channel_and_write_into_it(kafka, opening, helpers):
    wal = await opening(kafka)
    await wal.create_channel("a", PLAIN)
    now_ms = int(time.time() * 1000)
    stamps = [compose(now_ms), compose(now_ms, 7), 42]
    await wal.append_many([Append("a", b"%d" % stamp, stamp) for stamp in stamps])
    partition = TopicPartition(topic_of(wal, "a"), 0)
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
        await producer.send_and_wait(partition.topic, b"theirs", key=b"k", partition=0, timestamp_ms=now_ms + 1)
        await producer.send_and_wait(partition.topic, None, key=b"k", partition=0, timestamp_ms=now_ms + 2)
    async with AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap) as consumer:
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        records = [await asyncio.wait_for(consumer.getone(), WITHIN_S) for _ in range(5)]
    assert [record.value for record in records[:4]] == [*(b"%d" % stamp for stamp in stamps), b"theirs"]
    assert [record.timestamp for record in records[:2]] == [now_ms, now_ms]
    assert records[2].timestamp >= now_ms  # stamped long ago: retention would remove it at once
    entries = await helpers.take(wal, "a", From.EARLIEST, 5)
    assert [entry.timestamp for entry in entries] == [*stamps, compose(now_ms + 1), compose(now_ms + 2)]
    assert helpers.payloads(entries)[3:] == [b"theirs", b""]


async def test_holds_switch_the_brokers_retention_off_and_on_and_keep_what_they_hold(kafka, opening, helpers):
    wal, other = await opening(kafka), await opening(kafka)
    await wal.create_channel("a", ChannelPolicy(retention_s=3600.0, retention_bytes=10**9))
    topic = topic_of(wal, "a")
    old = compose(int(time.time() * 1000) - 3000 * 1000)
    ids = await wal.append_many([Append("a", b"%d" % number, old + number) for number in range(10)])
    await wal.hold("a", "me", ids[6])
    await other.hold("a", "you", ids[4])
    held = await settings_of(kafka, topic)
    assert (held["retention.ms"], held["retention.bytes"]) == ("-1", "-1")
    channel = wal._catalog.find("a")
    await wal._io.call(lambda: wal._management._retention.remove_old(channel, 1000.0))
    assert (await other.describe("a")).first_id == ids[4]
    await other.hold("a", "you", None)
    await wal.truncate("a", ids[9])
    assert (await wal.describe("a")).first_id == ids[6]
    assert (await settings_of(kafka, topic))["retention.ms"] == "-1"
    await wal.hold("a", "me", None)
    free = await settings_of(kafka, topic)
    assert (free["retention.ms"], free["retention.bytes"]) == ("3600000", "1000000000")
    assert int(free["max.message.bytes"]) > PLAIN.max_message_bytes
    with pytest.raises(InvalidRequest):
        await wal.hold("a", "me", b"nonsense")


async def test_the_largest_message_passes_among_small_ones(kafka, opening, helpers):
    wal = await opening(kafka)
    await wal.create_channel("a", PLAIN)
    largest = bytes(range(256)) * (PLAIN.max_message_bytes // 256)
    sent = [b"before", largest, b"behind", largest]
    await asyncio.gather(*(wal.append("a", payload) for payload in sent))
    assert helpers.payloads(await helpers.take(wal, "a", From.EARLIEST, 4)) == sent


async def test_what_an_administrator_is_refused_is_raised(kafka, opening):
    wal = await opening(kafka)
    with pytest.raises(InvalidRequest):
        await wal.create_channel("a", ChannelPolicy(max_message_bytes=2**31))
    assert await wal.channels() == []
    impatient = await opening(kafka, replication_factor=7, delivery_timeout_s=1)
    with pytest.raises(Unavailable, match=r"only 1 broker.*replication_factor") as caught:
        await impatient.create_channel("a", PLAIN)
    assert caught.value.outcome_unknown
    assert await wal.channels() == ["a"]
    await wal.append("a", b"with as many copies as there can be")


async def test_a_slow_reader_holds_a_bounded_part(kafka, opening, helpers):
    wal = await opening(kafka, batch_bytes=60_000, fetch_bytes=100_000, prefetch_bytes=300_000)
    await wal.create_channel("a", PLAIN)
    ids = await wal.append_many([Append("a", bytes(50_000)) for _ in range(100)])
    reader = wal.read("a", From.EARLIEST)
    entries = list(await anext(reader))
    fetcher = reader._fetcher
    await helpers.until(lambda: fetcher.ready._size >= 300_000 and not fetcher._room.is_set())
    assert fetcher.ready._size <= 300_000 + 150_000
    while len(entries) < 100:
        entries += await asyncio.wait_for(anext(reader), WITHIN_S)
    assert [entry.id for entry in entries] == ids
    await reader.aclose()


@pytest.mark.parametrize("ends", ["committed", "aborted"])
async def test_a_start_by_time_behind_an_open_transaction_skips_nothing(kafka, opening, helpers, ends):
    wal = await opening(kafka)
    await wal.create_channel("a", PLAIN)
    now_ms = int(time.time() * 1000)
    stamp = compose(now_ms)
    earlier = await wal.append("a", b"earlier", stamp - compose(10))
    topic = topic_of(wal, "a")
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=uuid4().hex) as other:
        await other.begin_transaction()
        await other.send_and_wait(topic, b"in it", partition=0, timestamp_ms=now_ms)
        behind = await wal.append("a", b"acknowledged, behind it", stamp + 5)
        found = await wal.id_at("a", stamp)
        assert earlier < found < behind
        assert await wal.id_at("a", stamp + 5) == behind
        assert await wal.id_at("a", stamp + 6) is None
        await wal.seek_group("g", "a", FromTime(stamp))
        reader = wal.read("a", FromTime(stamp))
        reading = asyncio.ensure_future(anext(reader))
        await helpers.until(lambda: reader._fetcher is not None and reader._fetcher._loop is not None)
        await (other.commit_transaction() if ends == "committed" else other.abort_transaction())
    async with asyncio.timeout(WITHIN_S):
        entries = list(await reading)
        while entries[-1].id != behind:
            entries += await anext(reader)
    await reader.aclose()
    expected = [b"in it"] * (ends == "committed") + [b"acknowledged, behind it"]
    assert helpers.payloads(entries) == expected
    assert await wal.id_at("a", stamp) == entries[0].id
    member = await wal.join("g", ["a"])
    delivered = []
    async with asyncio.timeout(WITHIN_S):
        while len(delivered) < len(expected):
            delivered += (await anext(member)).entries
    assert helpers.payloads(delivered) == expected
    await member.aclose()


async def test_readers_that_are_closed_leave_no_connections(kafka, opening, helpers):
    wal = await opening(kafka)
    await wal.create_channel("a", PLAIN)
    await wal.append("a", b"x")
    sockets = wal._io.loop._connections

    def open_sockets():
        return sum(not each.is_closing() for each in tuple(sockets))

    before = open_sockets()
    for _ in range(20):
        readers = [wal.read("a", From.EARLIEST) for _ in range(3)]
        for reader in readers:
            await anext(reader)
        waiting = asyncio.ensure_future(anext(readers[0]))
        await asyncio.gather(*(reader.aclose() for reader in readers))
        with pytest.raises(StopAsyncIteration):
            await waiting
        async with asyncio.timeout(WITHIN_S):
            await helpers.until(lambda: open_sockets() <= before)
    await wal.append("a", b"y")
    assert helpers.payloads(await helpers.take(wal, "a", From.EARLIEST, 2)) == [b"x", b"y"]
