"""Topics that are deleted from outside, and made again: a channel is its very topic, and nothing else has its name."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.protocol.fetch import FetchRequest_v11
from aiokafka.protocol.produce import ProduceRequest_v8

from tidewal.adapters.kafka.catalog import ChannelCatalog
from tidewal.adapters.kafka.channel_access import SEEN_S
from tidewal.adapters.kafka.cluster import Cluster
from tidewal.adapters.kafka.requests import NO_ID, FetchById, ProduceById
from tidewal.runtime.errors import ChannelNotFound, CorruptLog
from tidewal.runtime.log.wal import ChannelPolicy, From, FromId

PLAIN = ChannelPolicy()
WITHIN_S = 30.0


async def delete(kafka, topic: str, *, make_again: bool = False) -> None:
    """As an administrator would. The controller answers before the broker has heard of it, and until then the broker
    takes appends."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        await admin.delete_topics([topic])
        while not make_again and topic in await admin.list_topics():
            pass
        while make_again:
            response = await admin.create_topics([NewTopic(topic, 1, 1)])
            make_again = bool(response.topic_errors[0][1])
    finally:
        await admin.close()


async def gone(wal, topic: str) -> None:
    """Return once the brokers do not have it any more."""
    cluster = wal._management._cluster
    async with asyncio.timeout(WITHIN_S):
        await wal._call(cluster.refresh)
        while topic in cluster.topics():
            await wal._call(cluster.refresh)


async def entries_of(kafka, topic: str) -> int:
    partition = TopicPartition(topic, 0)
    async with AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap) as consumer:
        return (await consumer.end_offsets([partition]))[partition]


@pytest.mark.broker
@pytest.mark.parametrize("make_again", [False, True], ids=["deleted", "made again"])
async def test_a_channel_whose_topic_was_deleted_says_so_everywhere_and_gives_no_id_twice(
    kafka, opening, helpers, make_again
):
    wal, other = await opening(kafka), await opening(kafka)
    await wal.create_channel("a", PLAIN)
    ids = [await wal.append("a", b"old %d" % number) for number in range(5)]
    read = []
    reading = asyncio.create_task(helpers.drain(wal.read("a", From.EARLIEST), read))
    member = await wal.join("g", ["a"])
    member_reads = asyncio.create_task(helpers.drain(member, []))
    await helpers.until(lambda: len(read) == 5)
    topic = wal._catalog.find("a").topic
    await delete(kafka, topic, make_again=make_again)
    calls = (
        lambda: wal.append("a", b"new"),
        lambda: reading,
        lambda: member_reads,
        lambda: other.append("a", b"new"),
        lambda: anext(other.read("a", FromId(ids[-1]))),
        lambda: wal.create_channel("a", PLAIN),
    )
    for call in calls:
        with pytest.raises(ChannelNotFound, match="deleted from outside"):
            await asyncio.wait_for(call(), WITHIN_S)
    channel = wal._catalog.find("a")
    await helpers.until(lambda: asyncio.get_running_loop().time() - channel.seen_at > SEEN_S)
    for call in (lambda: wal.latest_id("a"), lambda: wal.describe("a"), lambda: wal.truncate("a", ids[0])):
        with pytest.raises(ChannelNotFound, match="deleted from outside"):
            await asyncio.wait_for(call(), WITHIN_S)
    assert [entry.id for entry in read] == ids
    await wal.drop_channel("a")
    if make_again:  # it is not ours
        assert await entries_of(kafka, topic) == 0
    await wal.create_channel("a", PLAIN)
    assert await wal.append("a", b"anew") > ids[-1]


@pytest.mark.broker
async def test_without_its_catalog_a_log_is_not_begun_anew(kafka, opening):
    wal = await opening(kafka)
    await wal.create_channel("a", PLAIN)
    await wal.append("a", b"kept")
    await delete(kafka, f"{wal._options.prefix}.catalog")
    with pytest.raises(CorruptLog):
        await asyncio.wait_for(wal.create_channel("b", PLAIN), WITHIN_S)
    with pytest.raises(CorruptLog):
        await asyncio.wait_for(wal.channels(), WITHIN_S)
    with pytest.raises(CorruptLog, match="topics of channels"):
        await asyncio.wait_for(opening(kafka), WITHIN_S)


@pytest.mark.broker
async def test_two_who_make_a_topic_at_once_agree_which_it_is(kafka, opening):
    wals = [await opening(kafka) for _ in range(3)]
    for name in ("a", "b", "c"):
        await asyncio.gather(*(wal.create_channel(name, PLAIN) for wal in wals))
        assert len({await wal.append(name, b"x") for wal in wals}) == 3
        assert len({wal._catalog.find(name).topic_id for wal in wals}) == 1


@pytest.mark.broker
async def test_a_topic_that_another_makes_just_behind_the_look_for_it_was_not_deleted(kafka, opening, monkeypatch):
    wal, other = await opening(kafka), await opening(kafka)
    looked_for, asked = [], Cluster.topic_id

    async def late(self, topic):
        found = await asked(self, topic)
        if self is wal._management._cluster and topic not in looked_for:
            looked_for.append(topic)
            assert found is None
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(other.create_channel("a", PLAIN), loop))
        return found

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(Cluster, "topic_id", late)
    await wal.create_channel("a", PLAIN)
    assert await wal.append("a", b"x") < await other.append("a", b"y")


@pytest.mark.broker
async def test_channels_of_brokers_without_ids_are_there_when_these_are_upgraded(kafka, opening, helpers, monkeypatch):
    asked = Cluster.topic_id

    async def none(self, topic):
        return None if await asked(self, topic) is None else NO_ID

    wal = await opening(kafka)
    with monkeypatch.context() as old:
        old.setattr(Cluster, "topic_id", none)
        late = await opening(kafka)
        await late.create_channel("a", PLAIN)
        await late.create_channel("b", PLAIN)
        ids = [await late.append("a", b"before")]
        for log in (wal, late):
            log._catalog.find("a").seen_at = -SEEN_S
    ids.append(await late.append("a", b"behind"))
    new = await opening(kafka)
    for log in (wal, late, new):
        assert await log.latest_id("a") == ids[-1]
        ids.append(await log.append("a", b"after"))
        assert log._catalog.find("a").topic_id != NO_ID
    with monkeypatch.context() as old:  # brokers of two versions
        old.setattr(Cluster, "topic_id", none)
        mixed = await opening(kafka)
        assert await mixed.latest_id("a") == ids[-1]
        ids.append(await mixed.append("a", b"mixed"))
    read = []
    reading = asyncio.create_task(helpers.drain(mixed.read("a", From.EARLIEST), read))
    await helpers.until(lambda: [entry.id for entry in read] == ids)
    reading.cancel()
    for name in ("a", "b"):
        topic = new._catalog.find(name).topic
        await new.drop_channel(name)
        await gone(new, topic)


@pytest.mark.broker
async def test_a_topic_whose_maker_died_before_it_was_noted_goes_with_its_channel(kafka, opening, monkeypatch):
    class Killed(Exception):
        pass

    async def killed(self, channel, topic_id):
        raise Killed

    wal, other = await opening(kafka), await opening(kafka)
    with monkeypatch.context() as patched:
        patched.setattr(ChannelCatalog, "write_topic_id", killed)
        with pytest.raises(Killed):
            await wal.create_channel("a", PLAIN)
    topic = wal._catalog.find("a").topic
    await other.drop_channel("a")
    await gone(other, topic)


@pytest.mark.broker
async def test_a_log_that_another_process_begins_at_the_same_time_is_not_taken_for_a_lost_one(
    kafka, opening, monkeypatch
):
    asked, first = Cluster.topic_id, []

    async def late(self, topic):
        """What the brokers said of the catalog, once the other process is ready to work."""
        found = await asked(self, topic)
        if topic.endswith(".catalog") and not first:
            first.append(found)
            other = await opening(kafka)
            await other.create_channel("a", PLAIN)
        return found

    monkeypatch.setattr(Cluster, "topic_id", late)
    wal = await opening(kafka)
    assert first == [None]
    assert await wal.channels() == ["a"]


def test_brokers_that_know_no_ids_are_asked_by_name():
    produced = ProduceById(-1, 1000, "topic", bytes(16), b"batch")
    assert produced.prepare({0: (3, 12)}) == ProduceRequest_v8(None, -1, 1000, [("topic", [(0, b"batch")])])
    fetched = FetchById(100, 200, 1, "topic", bytes(16), 7).prepare({1: (4, 12)})
    assert isinstance(fetched, FetchRequest_v11)
    assert fetched.topics == [("topic", [(0, -1, 7, -1, 200)])]
