"""A log that takes small messages only: rows are divided, requests and answers travel in fragments, and one row too
large is refused before anything is sent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from tests.brokers.fixtures import require
from tests.brokers.pulsar import PulsarStandalone
from tidewal.actors.client import Client
from tidewal.actors.standalone import Standalone
from tidewal.adapters.kafka.options import OVERHEAD_BYTES
from tidewal.adapters.kafka.settings import KafkaSettings
from tidewal.adapters.pulsar.wal import METADATA_BYTES
from tidewal.runtime.errors import MessageTooLarge
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.record import RecordType, decode
from tidewal.runtime.log.wal import Append, ChannelInfo, ChannelPolicy, OnAppended, Wal
from tidewal.runtime.rows.schema import CollectionSchema, Field
from tidewal.runtime.testing.memory import MemoryWal

LIMIT = 64 * 1024
SCHEMA = CollectionSchema("texts", (Field("id", "int64"), Field("text", "varchar", nullable=True)), "id")


class SmallWal(MemoryWal):
    """Takes no message over `LIMIT`, whatever a channel's policy says, as a broker may."""

    async def describe(self, channel: str) -> ChannelInfo:
        return replace(await super().describe(channel), backend_message_bytes=LIMIT)

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        for entry in entries:
            if len(entry.payload) > LIMIT:
                raise MessageTooLarge("over the broker's own limit", size=len(entry.payload), limit=LIMIT)
        super().submit(entries, done)


@pytest.fixture
async def wal() -> SmallWal:
    return SmallWal()


@pytest.fixture
async def client(wal: SmallWal, tmp_path) -> AsyncIterator[Client]:
    async with Standalone(wal, tmp_path) as node, node.client() as client:
        await client.create_collection(SCHEMA)
        yield client
    await wal.close()


def parts(wal: SmallWal) -> dict[str, list[list[int]]]:
    """For each channel of data the (part, parts, rows) of its records with rows."""
    found: dict[str, list[list[int]]] = {}
    for name, entries in wal.log.channels.items():
        records = [decode(entry.payload) for entry in entries.entries if "dml" in name]
        rows = [record for record in records if record.type is RecordType.ROWS]
        found[name] = [[*(each.part or (0, 0, 1))[1:], int(str(each.tags["rows"]))] for each in rows]
    return {name: records for name, records in found.items() if records}


async def test_a_batch_over_the_limit_is_one_batch_in_several_messages(client: Client, wal: SmallWal):
    rows = [{"id": number, "text": f"{number:04}" * 500} for number in range(300)]
    written = await client.insert("texts", rows)
    assert written.rows == 300
    found = parts(wal)
    assert len(found) == 2
    for records in found.values():
        assert len(records) >= 5
        assert [number for number, _, _ in records] == list(range(len(records)))
        assert {of for _, of, _ in records} == {len(records)}
    assert sum(count for records in found.values() for _, _, count in records) == 300
    answer = (await client.query("texts", "id >= 0", consistency="strong")).table  # larger than a message, too
    assert answer.nbytes > LIMIT
    assert sorted(answer.to_pylist(), key=lambda row: row["id"]) == rows
    await client.flush("texts")


async def test_one_row_over_the_limit_is_refused_and_nothing_of_its_batch_is_sent(client: Client, wal: SmallWal):
    rows = [{"id": number, "text": "x" * (LIMIT if number == 7 else 10)} for number in range(10)]
    with pytest.raises(MessageTooLarge, match="id='7'") as caught:
        await client.insert("texts", rows)
    assert LIMIT < int(caught.value.size or 0) < LIMIT + 2048
    assert LIMIT - 8192 < int(caught.value.limit or 0) < LIMIT
    assert parts(wal) == {}
    assert (await client.insert("texts", rows[:7])).rows == 7
    assert await client.count("texts", consistency="strong") == 7


# ---- real brokers ----------------------------------------------------------------------------------------------------

MIB = 1024 * 1024


async def check_a_node_under(limit: int, wal: Wal, tables: Path) -> None:
    """A batch of several times the limit goes in and comes back; a row of more is refused."""
    async with asyncio.timeout(60), Standalone(wal, tables) as node, node.client() as client:
        await client.create_collection(SCHEMA, shards=1)
        rows = [{"id": number, "text": f"{number:08}" * (limit // 64)} for number in range(40)]  # 5 times the limit
        assert (await client.insert("texts", rows)).rows == 40
        answer = (await client.query("texts", "id >= 0", consistency="strong")).table
        assert sorted(answer.to_pylist(), key=lambda row: row["id"]) == rows
        with pytest.raises(MessageTooLarge, match="id='99'") as caught:
            await client.insert("texts", [{"id": 99, "text": "x" * limit}])
        assert int(caught.value.limit or 0) < limit < int(caught.value.size or 0)
        assert await client.count("texts", consistency="strong") == 40
        (channel,) = data_channels(await wal.channels())
        assert (await wal.describe(channel)).max_message_bytes == limit


def data_channels(channels: list[str]) -> list[str]:
    return [name for name in channels if "dml" in name]


@pytest.mark.broker
async def test_kafka_is_asked_what_a_topic_takes(kafka):
    prefix = uuid4().hex
    wal = await open_wal(f"{kafka.url}/{prefix}")
    await wal.create_channel("a", ChannelPolicy())
    assert (await wal.describe("a")).max_message_bytes == ChannelPolicy().max_message_bytes
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.url.removeprefix("kafka://"))
    await admin.start()
    (topic,) = [name for name in await admin.list_topics() if name.startswith(f"{prefix}.a.")]
    await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, {"max.message.bytes": str(MIB)})])
    await admin.close()
    assert (await wal.describe("a")).max_message_bytes == MIB - OVERHEAD_BYTES
    await wal.append("a", os.urandom(MIB - OVERHEAD_BYTES))
    await wal.close()


@pytest.mark.broker
async def test_kafka_takes_less_where_the_settings_say_so(kafka, tmp_path: Path):
    settings = KafkaSettings.model_validate({"producer": {"message.max.bytes": "300000", "compression.type": "gzip"}})
    wal = await open_wal(f"{kafka.url}/{uuid4().hex}", settings=settings)
    await check_a_node_under(300_000, wal, tmp_path)
    with pytest.raises(MessageTooLarge):
        await wal.append(data_channels(await wal.channels())[0], bytes(300_001))
    await wal.close()


@pytest.mark.long
@pytest.mark.broker
async def test_pulsar_is_asked_at_the_start(tmp_path: Path):
    require("pulsar")
    settings = {"maxMessageSize": str(MIB), "nettyMaxFrameSizeBytes": str(2 * MIB)}
    broker = PulsarStandalone(tmp_path / "broker", settings=settings)
    try:
        await asyncio.to_thread(broker.start)
        wal = await open_wal(broker.url, web_url=broker.web_url)
        await check_a_node_under(MIB - METADATA_BYTES, wal, tmp_path)
        name = data_channels(await wal.channels())[0]
        await wal.append(name, bytes(MIB - METADATA_BYTES), 2**60)  # so much fits, all that belongs to it included
        await wal.close()
        wal = await open_wal(broker.url, web_url=broker.web_url, max_message_bytes=1000)
        assert (await wal.describe(name)).max_message_bytes == 1000
        await wal.close()
    finally:
        await asyncio.to_thread(broker.stop)
