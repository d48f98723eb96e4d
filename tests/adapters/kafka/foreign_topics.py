"""Topics as another program has them: made, written and read by the library's own clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic

from tidewal.adapters.kafka import KafkaWal, open_wal
from tidewal.runtime.log.wal import Entry, Wal


def foreign_url(kafka: Any) -> str:
    return f"{kafka.url}?topics=foreign"


@asynccontextmanager
async def administration(kafka: Any) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


async def make_topic(kafka: Any, partitions: int = 3) -> str:
    """A topic of its own for one test, as its owner makes it. It keeps what is old, by its timestamps, too."""
    topic = f"orders-{uuid4().hex}"
    async with administration(kafka) as admin:
        await admin.create_topics([NewTopic(topic, partitions, 1, topic_configs={"retention.ms": "-1"})])
    return topic


async def add_partitions(kafka: Any, topic: str, count: int) -> None:
    async with administration(kafka) as admin:
        await admin.create_partitions({topic: NewPartitions(count)})


@asynccontextmanager
async def producing(kafka: Any, **options: Any) -> AsyncIterator[AIOKafkaProducer]:
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, **options)
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


async def consumed(kafka: Any, topic: str, count: int) -> list[Any]:
    """What another program's consumer reads of a topic, `count` records of it."""
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest", isolation_level="read_committed"
    )
    await consumer.start()
    try:
        return [await consumer.getone() for _ in range(count)]
    finally:
        await consumer.stop()


async def committed(kafka: Any, group: str, topic: str) -> dict[int, int]:
    """The offsets of a group by partition, as other tools see them."""
    async with administration(kafka) as admin:
        found = await admin.list_consumer_group_offsets(group)
    return {at.partition: each.offset for at, each in found.items() if at.topic == topic and each.offset >= 0}


@asynccontextmanager
async def opened(kafka: Any, **options: Any) -> AsyncIterator[KafkaWal]:
    wal = await open_wal(foreign_url(kafka), **{"delivery_timeout_s": 100.0, **options})
    try:
        yield wal
    finally:
        await wal.close()


async def read(wal: Wal, channel: str, start: Any, count: int) -> list[Entry]:
    """The next `count` entries of a channel."""
    found: list[Entry] = []
    reader: Any = wal.read(channel, start)
    async for entries in reader:
        found += entries
        if len(found) >= count:
            break
    await reader.aclose()
    return found


def channels_of(topic: str, partitions: int) -> Sequence[str]:
    return [f"{topic}:{number}" for number in range(partitions)]


def offset_of(entry: Entry) -> int:
    return int.from_bytes(entry.id[-8:], "big")


def partition(topic: str, number: int) -> TopicPartition:
    return TopicPartition(topic, number)
