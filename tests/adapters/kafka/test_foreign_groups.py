"""Groups on topics that others made: real consumer groups, which other programs and tools see."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka import AIOKafkaConsumer

from tests.adapters.kafka.foreign_topics import (
    add_partitions,
    administration,
    channels_of,
    committed,
    consumed,
    make_topic,
    offset_of,
    opened,
    partition,
    producing,
)
from tidewal.runtime.errors import ChannelNotFound, InvalidRequest
from tidewal.runtime.log.wal import TOMBSTONE, Append, From, FromId

pytestmark = pytest.mark.broker

TIME_S = 60


async def take(member, count):
    """So many entries that are delivered to the member, with their channels, acknowledged."""
    found = []
    async with asyncio.timeout(TIME_S):
        while len(found) < count:
            delivered = await anext(member)
            found += [(delivered.channel, entry) for entry in delivered.entries]
            await member.acknowledge(delivered)
    return found


async def fill(kafka, topic, partitions, each, first=0):
    async with producing(kafka) as producer:
        for number in range(partitions):
            for at in range(first, first + each):
                await producer.send_and_wait(topic, b"%d" % at, key=b"%d" % number, partition=number)


async def test_a_topic_means_all_its_partitions_and_its_lag_is_seen_by_others(kafka):
    topic = await make_topic(kafka, 4)
    group = f"billing-{topic}"
    await fill(kafka, topic, 4, 5)
    async with opened(kafka) as first, opened(kafka) as second:
        members = [await first.join(group, [topic]), await second.join(group, [topic])]
        found = [entry for taken in await asyncio.gather(*(take(member, 10) for member in members)) for entry in taken]
        assert members[0].channels | members[1].channels == set(channels_of(topic, 4))
        assert not members[0].channels & members[1].channels
        assert sorted((entry.key, entry.payload) for _, entry in found) == sorted(
            (b"%d" % number, b"%d" % at) for number in range(4) for at in range(5)
        )
        assert await committed(kafka, group, topic) == dict.fromkeys(range(4), 5)
        async with administration(kafka) as admin:
            (described,) = (await admin.describe_consumer_groups([group]))[0].groups
            assert described[3] == "consumer"
            assert len(described[5]) == 2
        (info,) = [info for info in await first.groups() if info.name == group]
        assert set(info.positions) == set(channels_of(topic, 4))
        assert frozenset.union(*info.members.values()) == set(channels_of(topic, 4))
        await asyncio.gather(*(member.aclose() for member in members))


async def test_a_group_goes_on_where_another_program_stopped_and_back(kafka):
    topic = await make_topic(kafka, 1)
    group = f"moved-{topic}"
    await fill(kafka, topic, 1, 6)
    theirs = AIOKafkaConsumer(
        topic, bootstrap_servers=kafka.bootstrap, group_id=group, auto_offset_reset="earliest", enable_auto_commit=False
    )
    await theirs.start()
    for _ in range(2):
        await theirs.getone()
    await theirs.commit({partition(topic, 0): 2})
    await theirs.stop()
    async with opened(kafka) as wal:
        member = await wal.join(group, [topic])
        async with asyncio.timeout(TIME_S):
            delivered = await anext(member)
        assert offset_of(delivered.entries[0]) == 2
        await member.acknowledge(delivered, [delivered.entries[0].id, delivered.entries[1].id])
        await member.aclose()
    theirs = AIOKafkaConsumer(topic, bootstrap_servers=kafka.bootstrap, group_id=group)
    await theirs.start()
    assert (await theirs.getone()).offset == 4
    await theirs.stop()


async def test_a_commit_moves_positions_and_writes_with_keys_or_neither(kafka):
    source, target = await make_topic(kafka, 2), await make_topic(kafka, 3)
    group = f"copy-{source}"
    await fill(kafka, source, 2, 3)
    async with opened(kafka) as wal:
        member = await wal.join(group, [source])
        copied = 0
        async with asyncio.timeout(TIME_S):
            while copied < 6:
                delivered = await anext(member)
                outputs = [
                    Append(target, entry.payload, entry.timestamp, entry.key, (("from", delivered.channel.encode()),))
                    for entry in delivered.entries
                ]
                ids = await member.commit([delivered], [*outputs, Append(f"{target}:0", TOMBSTONE, key=b"end")])
                assert len(ids) == len(outputs) + 1
                copied += len(outputs)
        assert await committed(kafka, group, source) == {0: 3, 1: 3}
        records = await consumed(kafka, target, copied)
        assert {record.partition for record in records if record.key == b"0"} == {
            record.partition for record in records if record.key == b"0"
        }
        assert all(
            record.headers == (("from", b"%s:%s" % (source.encode(), record.key)),)
            for record in records
            if record.value
        )
        await fill(kafka, source, 1, 1)
        async with asyncio.timeout(TIME_S):
            delivered = await anext(member)
        with pytest.raises(ChannelNotFound):
            await member.commit([delivered], [Append("nowhere", b"x")])
        assert await committed(kafka, group, source) == {0: 3, 1: 3}, "neither the output nor the position"
        await member.aclose()


async def test_new_partitions_are_assigned_from_their_first_entry(kafka):
    topic = await make_topic(kafka, 1)
    await fill(kafka, topic, 1, 1)
    async with opened(kafka) as wal:
        member = await wal.join(f"late-{topic}", [topic[:-3] + "*"], start=From.LATEST)
        await add_partitions(kafka, topic, 2)
        async with producing(kafka) as producer:
            await producer.client.force_metadata_update()
            await producer.send_and_wait(topic, b"new", partition=1)
        assert [(name, entry.payload) for name, entry in await take(member, 1)] == [(f"{topic}:1", b"new")]
        await member.aclose()


async def test_single_partitions_seeking_and_groups_without_members(kafka):
    topic = await make_topic(kafka, 2)
    group = f"one-{topic}"
    await fill(kafka, topic, 2, 4)
    async with opened(kafka) as wal:
        member = await wal.join(group, [f"{topic}:1"])
        taken = await take(member, 4)
        assert {name for name, _ in taken} == {f"{topic}:1"}
        await member.seek(f"{topic}:1", FromId(taken[1][1].id))
        assert [entry.payload for _, entry in await take(member, 2)] == [b"2", b"3"]
        with pytest.raises(InvalidRequest, match="has members"):
            await wal.seek_group(group, f"{topic}:0", From.LATEST)
        await member.aclose()
        await wal.seek_group(group, f"{topic}:0", From.LATEST)
        assert await committed(kafka, group, topic) == {0: 4, 1: 4}
        await wal.drop_group(group)
        assert await committed(kafka, group, topic) == {}
        with pytest.raises(ChannelNotFound):
            await wal.join(group, ["nowhere"])


async def test_members_of_other_clients_are_not_mixed(kafka):
    topic = await make_topic(kafka, 1)
    theirs = AIOKafkaConsumer(topic, bootstrap_servers=kafka.bootstrap, group_id=f"theirs-{topic}")
    await theirs.start()
    try:
        async with opened(kafka) as wal:
            with pytest.raises(InvalidRequest, match="another client"):
                await wal.join(f"theirs-{topic}", [topic])
    finally:
        await theirs.stop()
