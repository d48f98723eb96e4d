"""What of a log can be seen in Pulsar itself: topics, messages, cursors, and that nothing is left behind."""

from __future__ import annotations

import asyncio

import pulsar as client_library
import pytest

from tidewal.adapters.pulsar.ids import before_ledger
from tidewal.adapters.pulsar.topics import PulsarTopic, group_policy, group_topic
from tidewal.runtime.errors import ChannelExists, ChannelNotFound, ConfigError, PositionLost, Unavailable
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, FromId, FromTime

pytestmark = pytest.mark.broker

PLAIN = ChannelPolicy()
BOUND_S = 30


@pytest.fixture
def plain_client(pulsar):
    client = client_library.Client(pulsar.url, logger=client_library.ConsoleLogger(client_library.LoggerLevel.Error))
    yield client
    client.close()


async def test_no_subscription_is_left_behind(open_wal, web, helpers):
    wal = await open_wal()
    await wal.create_channel("a", PLAIN)
    ids = await wal.append_many([Append("a", bytes([i]), i) for i in range(5)])
    await wal.id_at("a", 3)
    closed, cancelled = wal.read("a", From.EARLIEST), wal.read("a", From.LATEST)
    await anext(closed)
    waiting = asyncio.ensure_future(anext(cancelled))
    await asyncio.to_thread(wal.last, "a")
    assert len(web.subscriptions("a")) >= 1
    await closed.aclose()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await wal.hold("a", "node 1/x", ids[2])
    await wal.close()
    async with asyncio.timeout(BOUND_S):
        while len(web.subscriptions("a")) > 1:  # noqa: ASYNC110 -- the broker has no event for it
            await asyncio.sleep(0)
    assert web.subscriptions("a") == ["tidewal-hold.node 1/x"]
    wal = await open_wal()
    await wal.hold("a", "node 1/x", None)
    await wal.hold("a", "node 1/x", None)
    assert web.subscriptions("a") == []


async def test_a_plain_client_reads_what_was_appended_and_is_read(open_wal, namespace, plain_client, helpers):
    wal = await open_wal()
    await wal.create_channel("a", PLAIN)
    timestamp = (1_700_000_000_123 << 18) | 7
    await wal.append("a", b"ours", timestamp)
    topic = f"persistent://{namespace}/a"
    reader = plain_client.create_reader(topic, client_library.MessageId.earliest)
    message = reader.read_next(10_000)
    assert message.data() == b"ours"
    assert message.event_timestamp() == 1_700_000_000_123
    assert message.properties() == {"tidewal.timestamp": str(timestamp)}
    plain_client.create_producer(topic).send(b"theirs", properties={"tidewal.timestamp": "soon"})
    entries = await helpers.take(wal, "a", From.EARLIEST, 2)
    assert [(entry.timestamp, entry.payload) for entry in entries] == [(timestamp, b"ours"), (0, b"theirs")]


async def test_positions_and_times_go_across_ledgers(open_wal, web, helpers):
    wal = await open_wal()
    await wal.create_channel("a", PLAIN)
    read = []
    reader = asyncio.create_task(helpers.drain(wal.read("a", From.EARLIEST), read))
    ids = []
    for ledger in range(4):
        for batch in range(3):
            begin = ledger * 30 + batch * 10
            ids += await wal.append_many([Append("a", b"x", 10 * i + 1) for i in range(begin, begin + 10)])
        await asyncio.to_thread(web.new_ledger, "a")
    assert len({id[:8] for id in ids}) == 4
    for index in (0, 9, 10, 29, 30, 31, 64, 119):
        assert await wal.id_at("a", 10 * index + 1) == ids[index]
        assert await wal.id_at("a", 10 * index - 4) == ids[index]
        assert (await helpers.take(wal, "a", FromTime(10 * index + 1), 1))[0].id == ids[index]
        taken = await helpers.take(wal, "a", FromId(ids[index], inclusive=True), 120 - index)
        assert [entry.id for entry in taken] == ids[index:]
    assert await wal.id_at("a", 1192) is None
    assert (await wal.describe("a")).latest_id == await wal.latest_id("a") == ids[-1]  # the newest ledger is empty
    async with asyncio.timeout(BOUND_S):
        await helpers.until(lambda: len(read) >= 120)
    assert [entry.id for entry in read] == ids
    reader.cancel()


async def test_late_entries_of_an_earlier_owner_hide_no_time(open_wal, helpers):
    wal = await open_wal()
    await wal.create_channel("a", PLAIN)
    times = [1, *range(10, 400, 10), 5, 6, *range(400, 500, 10), 7]
    ids = [await wal.append("a", b"x", time) for time in times]
    for time in (0, 10, 195, 200, 395, 400, 490):
        expected = next(id for id, found in zip(ids, times, strict=True) if found >= time)
        assert await wal.id_at("a", time) == expected
        assert (await helpers.take(wal, "a", FromTime(time), 1))[0].id == expected
    assert await wal.id_at("a", 491) is None


async def test_what_retention_removed_is_lost_and_a_slow_reader_is_told(open_wal, web, helpers):
    wal = await open_wal()
    await wal.create_channel("a", ChannelPolicy(max_message_bytes=1024 * 1024))
    old = await wal.append_many([Append("a", bytes(1024 * 1024), i) for i in range(100)])
    slow = wal.read("a", From.EARLIEST)
    got = list(await anext(slow))
    assert len(got) < 90  # what is read ahead is bounded
    await asyncio.to_thread(web.new_ledger, "a")
    new = await wal.append("a", b"new", 1000)
    await asyncio.to_thread(web.remove_old_ledgers, "a")
    with pytest.raises(PositionLost) as lost:
        await helpers.take(wal, "a", FromId(old[10]), 1)
    assert (lost.value.requested, lost.value.first_available) == (old[10], new)
    with pytest.raises(PositionLost) as lost:
        async with asyncio.timeout(BOUND_S):
            await helpers.drain(slow, got)
    assert lost.value.first_available == new
    assert [entry.id for entry in got] == old[: len(got)]
    assert len(got) < 100
    assert (await helpers.take(wal, "a", From.EARLIEST, 1))[0].id == new
    await slow.aclose()


async def test_a_reader_in_another_process_ends_when_the_channel_is_dropped(open_wal):
    here, there = await open_wal(), await open_wal()
    await here.create_channel("a", PLAIN)
    await here.append("a", b"x")
    reader = there.read("a", From.EARLIEST)
    await anext(reader)
    waiting = asyncio.ensure_future(anext(reader))
    await here.drop_channel("a")
    with pytest.raises(ChannelNotFound):
        async with asyncio.timeout(BOUND_S):
            await waiting
    with pytest.raises(ChannelNotFound):
        await there.latest_id("a")
    assert await there.channels() == []


@pytest.mark.parametrize("channel", ["x-partition-3", "__change_events", "by-dev-rootcoord-dml_2_1001v0", "x" * 250])
async def test_names_that_mean_something_to_pulsar_are_names_like_others(open_wal, helpers, channel):
    wal = await open_wal()
    await wal.create_channel(channel, PLAIN)
    assert await wal.channels() == [channel]
    id = await wal.append(channel, b"x")
    assert (await helpers.take(wal, channel, From.EARLIEST, 1))[0].id == id
    await wal.drop_channel(channel)
    assert await wal.channels() == []


async def test_a_topic_that_is_no_channel_is_left_alone(open_wal, web):
    wal = await open_wal()
    await asyncio.to_thread(web.call, "PUT", "/foreign")
    assert await wal.channels() == []
    with pytest.raises(ChannelExists):
        await wal.create_channel("foreign", PLAIN)
    with pytest.raises(ChannelNotFound):
        await wal.append("foreign", b"x")
    await wal.drop_channel("foreign")
    await asyncio.to_thread(web.subscriptions, "foreign")


RULE = "/autoTopicCreation"
TOPICS_MAKE_THEMSELVES = {"allowAutoTopicCreation": True, "topicType": "non-partitioned"}


async def test_a_namespace_made_before_has_no_topics_that_make_themselves(open_wal, web):
    await asyncio.to_thread(web.namespace, "PUT")
    await (await open_wal()).create_channel("a", PLAIN)
    assert (await asyncio.to_thread(web.namespace, "GET", RULE))["allowAutoTopicCreation"] is False
    await asyncio.to_thread(web.namespace, "POST", RULE, TOPICS_MAKE_THEMSELVES)
    await open_wal()
    assert (await asyncio.to_thread(web.namespace, "GET", RULE))["allowAutoTopicCreation"] is False
    await asyncio.to_thread(web.namespace, "POST", RULE, TOPICS_MAKE_THEMSELVES)
    await asyncio.to_thread(web.call, "PUT", "/foreign")
    with pytest.raises(ConfigError) as caught:
        await open_wal()
    assert "'foreign'" in caught.value.message


async def test_where_others_have_topics_that_are_not_stored_they_keep_making_themselves(
    open_wal, web, plain_client, namespace
):
    await asyncio.to_thread(web.namespace, "PUT")
    await asyncio.to_thread(plain_client.create_producer, f"non-persistent://{namespace}/live")
    with pytest.raises(ConfigError) as caught:
        await open_wal()
    assert "'live'" in caught.value.message
    assert await asyncio.to_thread(web.namespace, "GET", RULE) is None
    await asyncio.to_thread(plain_client.create_producer, f"non-persistent://{namespace}/another")


async def test_who_only_reads_changes_no_setting_and_begins_no_group(open_wal, web):
    with pytest.raises(Unavailable):
        await open_wal(read_only=True)
    await asyncio.to_thread(web.namespace, "PUT")
    await asyncio.to_thread(web.namespace, "POST", RULE, TOPICS_MAKE_THEMSELVES)
    with pytest.raises(ConfigError):
        await open_wal(read_only=True)
    assert await asyncio.to_thread(web.namespace, "GET", RULE) == TOPICS_MAKE_THEMSELVES
    wal = await open_wal()  # which switches it off
    await wal.create_channel("a", PLAIN)
    log = group_topic("not-begun")
    await wal.blocking(lambda: wal.admin.create(PulsarTopic(log, group_policy())))
    reading = await open_wal(read_only=True)
    assert await reading.groups() == []
    assert await wal.latest_id(log) is None
    reader = reading.read("a", From.EARLIEST)
    waiting = asyncio.ensure_future(anext(reader))
    await wal.append("a", b"x")
    await waiting
    await asyncio.to_thread(web.call, "DELETE", "/a?force=true")
    with pytest.raises(ChannelNotFound):
        async with asyncio.timeout(BOUND_S):
            await anext(reader)
    assert await reading.channels() == []
    assert not [topic for topic in await asyncio.to_thread(web.call, "GET", "") if topic.endswith("/a")]


@pytest.mark.parametrize("topics_make_themselves", [False, True])
async def test_no_append_is_acknowledged_into_a_channel_that_was_deleted(open_wal, web, topics_make_themselves):
    wal = await open_wal(request_timeout_s=5)
    await wal.create_channel("a", PLAIN)
    await wal.append("a", b"before")
    reader = wal.read("a", From.EARLIEST)
    await anext(reader)
    if topics_make_themselves:  # it was switched on again
        await asyncio.to_thread(web.namespace, "POST", RULE, TOPICS_MAKE_THEMSELVES)
    await asyncio.to_thread(web.call, "DELETE", "/a?force=true")
    async with asyncio.timeout(BOUND_S):
        for _ in range(3):
            with pytest.raises((ChannelNotFound, Unavailable)) as caught:
                await wal.append("a", b"nowhere")
        with pytest.raises(ChannelNotFound):
            await anext(reader)
    assert type(caught.value) is ChannelNotFound


async def test_a_channel_that_was_made_again_is_another(open_wal, web, helpers):
    wal = await open_wal()
    await wal.create_channel("a", PLAIN)
    begin = before_ledger(wal.contents("a").end.ledger)
    await asyncio.to_thread(web.new_ledger, "a")  # the first one stayed empty, and is removed
    id = await wal.append("a", b"old")
    assert [entry.id for entry in await helpers.take(wal, "a", FromId(begin), 1)] == [id]
    reader = wal.read("a", From.EARLIEST)
    await anext(reader)
    await asyncio.to_thread(web.call, "DELETE", "/a?force=true")
    other = await open_wal()
    await other.create_channel("a", PLAIN)
    new = await other.append("a", b"new")
    for position in (begin, id):
        with pytest.raises(PositionLost) as caught:
            await helpers.take(wal, "a", FromId(position), 1)
        assert caught.value.first_available == new
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(ChannelNotFound):
            await anext(reader)


async def test_retention_is_the_brokers(open_wal, web):
    wal = await open_wal()
    await wal.create_channel("all", ChannelPolicy(retention_s=None))
    await wal.create_channel("some", ChannelPolicy(retention_s=90, retention_bytes=1))
    await wal.create_channel("none", ChannelPolicy(retention_s=0))
    found = [await asyncio.to_thread(web.call, "GET", f"/{name}/retention") for name in ("all", "some", "none")]
    assert [(each["retentionTimeInMinutes"], each["retentionSizeInMB"]) for each in found] == [
        (-1, -1),
        (2, 1),
        (1, -1),
    ]
