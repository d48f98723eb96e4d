"""Pulsar as the tests start it, seen by the bare client."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import pulsar as client_library
import pytest
from pulsar.asyncio import Client, PulsarException

from . import facts
from .fixtures import require
from .processes import LOOPBACK, listening
from .pulsar import PulsarStandalone

pytestmark = [pytest.mark.broker, pytest.mark.long]

WITHIN_S = 30.0
QUIET = client_library.ConsoleLogger(client_library.LoggerLevel.Error)


@pytest.fixture
def topic() -> str:
    return f"persistent://public/default/topic-{uuid4().hex}"


@asynccontextmanager
async def connected(node: PulsarStandalone) -> AsyncIterator[Client]:
    client = Client(node.url, logger=QUIET)
    try:
        yield client
    finally:
        await client.close()


async def consumed(client: Client, topic: str, count: int) -> list[bytes]:
    earliest = client_library.MessageId.wrap(client_library.MessageId.earliest)
    reader = await client.create_reader(topic, earliest)
    async with asyncio.timeout(WITHIN_S):
        found = [(await reader.read_next()).data() for _ in range(count)]
    await reader.close()
    return found


async def test_a_message_goes_in_and_comes_out(pulsar: PulsarStandalone, topic: str):
    async with connected(pulsar) as client:
        producer = await client.create_producer(topic)
        await producer.send(b"hello")
        assert await consumed(client, topic, 1) == [b"hello"]


async def test_the_largest_message_passes_and_a_larger_one_is_refused(pulsar: PulsarStandalone, topic: str):
    largest = os.urandom(facts.MESSAGE_BYTES)
    async with connected(pulsar) as client:
        producer = await client.create_producer(topic)
        await producer.send(largest)
        with pytest.raises(PulsarException, match="MessageTooBig"):
            await producer.send(bytes(facts.BROKER_MESSAGE_BYTES + 1))
        assert await consumed(client, topic, 1) == [largest]


async def test_a_number_that_was_stored_is_not_stored_again(pulsar: PulsarStandalone, topic: str):
    async with connected(pulsar) as client:
        producer = await client.create_producer(topic, "someone", batching_enabled=False)
        for sequence, message in ((1, b"one"), (1, b"one again"), (2, b"two")):
            await producer.send(message, sequence_id=sequence)
        assert await consumed(client, topic, 2) == [b"one", b"two"]


async def test_what_was_acknowledged_survives_a_kill(own_pulsar: PulsarStandalone, topic: str):
    expected = [b"%d" % number for number in range(100)]
    async with connected(own_pulsar) as client:
        producer = await client.create_producer(topic, batching_enabled=False)
        for message in expected:
            await producer.send(message)
    await asyncio.to_thread(own_pulsar.kill)
    assert not own_pulsar.running()
    await asyncio.to_thread(own_pulsar.restart)
    async with connected(own_pulsar) as client:
        assert await consumed(client, topic, 100) == expected


def test_without_deduplication_and_nothing_is_left_after_the_stop(tmp_path: Path, topic: str):
    require("pulsar")

    async def send_twice(node: PulsarStandalone) -> list[bytes]:
        async with connected(node) as client:
            producer = await client.create_producer(topic, "someone", batching_enabled=False)
            for _ in range(2):
                await producer.send(b"one", sequence_id=1)
            return await consumed(client, topic, 2)

    with PulsarStandalone(tmp_path, deduplication=False) as node:
        assert asyncio.run(send_twice(node)) == [b"one", b"one"]
        ports = [urlsplit(url).port for url in (node.url, node.web_url)]
        pid = node.pid()
        assert listening(pid) == {LOOPBACK}
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["pulsar.log"]
