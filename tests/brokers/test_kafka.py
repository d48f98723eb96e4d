"""Kafka as the tests start it, seen by the bare client."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import MessageSizeTooLargeError

from . import facts
from .fixtures import require
from .kafka import KafkaCluster
from .processes import LOOPBACK, listening

pytestmark = [pytest.mark.broker, pytest.mark.long]

WITHIN_S = 30.0


@pytest.fixture
def topic() -> str:
    return f"topic-{uuid4().hex}"


@asynccontextmanager
async def producing(cluster: KafkaCluster, **options: object) -> AsyncIterator[AIOKafkaProducer]:
    options = {"enable_idempotence": True, "max_request_size": facts.BROKER_MESSAGE_BYTES, **options}
    async with AIOKafkaProducer(bootstrap_servers=cluster.bootstrap, **options) as producer:
        yield producer


async def create(cluster: KafkaCluster, topic: str, copies: int = 1) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=cluster.bootstrap)
    await admin.start()
    try:
        answer = await admin.create_topics([NewTopic(topic, 1, copies)])
    finally:
        await admin.close()
    assert [error[1] for error in answer.topic_errors] == [0]


async def consumed(cluster: KafkaCluster, topic: str, count: int) -> list[bytes]:
    partition = TopicPartition(topic, 0)
    async with AIOKafkaConsumer(bootstrap_servers=cluster.bootstrap) as consumer:
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        async with asyncio.timeout(WITHIN_S):
            return [(await consumer.getone()).value for _ in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    """Ask the brokers, who tell nobody, until they say so."""
    async with asyncio.timeout(WITHIN_S):
        while not await asyncio.to_thread(condition):
            pass


async def test_a_message_goes_in_and_comes_out(kafka: KafkaCluster, topic: str):
    await create(kafka, topic)
    async with producing(kafka) as producer:
        await producer.send_and_wait(topic, b"hello", partition=0)
    assert await consumed(kafka, topic, 1) == [b"hello"]


async def test_the_largest_message_passes_and_a_larger_one_is_refused(kafka: KafkaCluster, topic: str):
    largest = os.urandom(facts.MESSAGE_BYTES)
    await create(kafka, topic)
    async with producing(kafka) as producer:
        await producer.send_and_wait(topic, largest, partition=0)
    async with producing(kafka, enable_idempotence=False, max_request_size=2 * facts.MESSAGE_BYTES) as producer:
        with pytest.raises(MessageSizeTooLargeError):
            await producer.send_and_wait(topic, bytes(facts.BROKER_MESSAGE_BYTES + 1), partition=0)
    assert await consumed(kafka, topic, 1) == [largest]


async def test_what_was_acknowledged_survives_a_kill(own_kafka: KafkaCluster, topic: str):
    expected = [b"%d" % number for number in range(100)]
    await create(own_kafka, topic)
    async with producing(own_kafka) as producer:
        for message in expected:
            await producer.send_and_wait(topic, message, partition=0)
    await asyncio.to_thread(own_kafka.kill)
    assert not own_kafka.running()
    await asyncio.to_thread(own_kafka.restart)
    assert await consumed(own_kafka, topic, 100) == expected


async def test_another_node_leads_when_the_leader_is_killed(kafka3: KafkaCluster, topic: str):
    await create(kafka3, topic, copies=3)
    async with producing(kafka3) as producer:
        await producer.send_and_wait(topic, b"before", partition=0)
        killed = kafka3.partition(topic).leader
        await asyncio.to_thread(kafka3.kill, killed)
        await asyncio.wait_for(producer.send_and_wait(topic, b"after", partition=0), WITHIN_S)
    partition = kafka3.partition(topic)
    assert partition.leader not in (killed, -1)
    assert killed not in partition.in_sync
    await asyncio.to_thread(kafka3.restart, killed)
    await until(lambda: set(kafka3.partition(topic).in_sync) == {1, 2, 3})
    assert await consumed(kafka3, topic, 2) == [b"before", b"after"]


async def test_another_controller_leads_when_it_is_killed(kafka3: KafkaCluster):
    leader = kafka3.controller()
    assert leader in kafka3.nodes
    await asyncio.to_thread(kafka3.kill, leader)
    await until(lambda: kafka3.controller() not in (leader, -1))


async def test_a_paused_node_answers_nothing_until_resumed(own_kafka: KafkaCluster, topic: str):
    await create(own_kafka, topic)
    async with producing(own_kafka) as producer:
        await producer.send_and_wait(topic, b"before", partition=0)
        own_kafka.pause()
        sending = await producer.send(topic, b"meanwhile", partition=0)
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(own_kafka.metadata)
        assert not sending.done()
        own_kafka.resume()
        await asyncio.wait_for(sending, WITHIN_S)
    assert await consumed(own_kafka, topic, 2) == [b"before", b"meanwhile"]


def test_nothing_is_left_after_the_stop(tmp_path: Path):
    require("kafka")
    with KafkaCluster(tmp_path) as cluster:
        port = int(cluster.bootstrap.rpartition(":")[2])
        pid = cluster.pid()
        assert listening(pid) == {LOOPBACK}
        socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["node-1.log"]
