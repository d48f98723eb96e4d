"""Any backend: a log that was opened to be read reads all that there is, refuses what writes, and makes nothing.

What there is on disk and at the brokers is looked at past the adapters.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from tests.backends import Backend
from tidewal.runtime.clock import HybridClock
from tidewal.runtime.errors import ReadOnly, Unavailable
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.read_only import ReadOnlyWal
from tidewal.runtime.log.record import Record, RecordType
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, FromId, FromTime, Wal
from tidewal.runtime.streams.stream import MsgStream

PLAIN = ChannelPolicy()
NO_WAITING = {"rocksmq-socket": {"failover_s": 0}}


async def reading(backend: Backend, wal: Wal) -> ReadOnlyWal:
    """The log that `wal` is, opened to be read: as from another process where one can open it."""
    log = await open_wal(backend.url, read_only=True) if backend.url else ReadOnlyWal(wal)
    backend.opened.append(log)
    assert isinstance(log, ReadOnlyWal)
    return log


async def outside(url: str) -> object:
    """The files, topics and settings of the log at `url`, and how far each topic goes; empty where there are none."""
    match urlsplit(url).scheme:
        case "kafka":
            return await topics_of_kafka(url)
        case "pulsar":
            return await asyncio.to_thread(namespace_of_pulsar, url)
        case "rocksmq":
            directory = Path(urlsplit(url).path)
            return {str(each): sorted(os.listdir(each)) for each in (directory, directory / "journal") if each.exists()}
        case _:
            return {}


async def topics_of_kafka(url: str) -> dict[str, int]:
    parts = urlsplit(url)
    async with AIOKafkaConsumer(bootstrap_servers=parts.netloc) as consumer:
        ours = [topic for topic in await consumer.topics() if topic.startswith(parts.path.strip("/") + ".")]
        ends: dict[TopicPartition, int] = await consumer.end_offsets([TopicPartition(topic, 0) for topic in ours])
    return {partition.topic: end for partition, end in ends.items()}


def namespace_of_pulsar(url: str) -> dict[str, object]:
    parts = urlsplit(url)
    namespace, (web_url,) = parts.path.strip("/"), parse_qs(parts.query)["web_url"]
    web = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(path: str) -> Any:
        try:
            with web.open(f"{web_url}/admin/v2/{path}", timeout=20) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    return None
            raise

    found = {"policies": get(f"namespaces/{namespace}")}
    for topic in get(f"persistent/{namespace}") or ():
        stats = get(f"{topic.replace('://', '/')}/internalStats")
        holds = {name: at["readPosition"] for name, at in stats["cursors"].items() if name.startswith("tidewal")}
        found[topic] = (stats["properties"], stats["lastConfirmedEntry"], holds)
    return {name: each for name, each in found.items() if each is not None}


def writing(wal: ReadOnlyWal, at: bytes) -> dict[str, Any]:
    """Every call that writes, by name."""
    return {
        "create_channel": lambda: wal.create_channel("b", PLAIN),
        "drop_channel": lambda: wal.drop_channel("a"),
        "append": lambda: wal.append("a", b"no"),
        "append_many": lambda: wal.append_many([Append("a", b"no")]),
        "truncate": lambda: wal.truncate("a", at),
        "hold": lambda: wal.hold("a", "me", at),
        "join": lambda: wal.join("others", ["a"]),
        "seek_group": lambda: wal.seek_group("workers", "a", From.EARLIEST),
        "drop_group": lambda: wal.drop_group("workers"),
    }


async def test_what_was_opened_to_be_read_reads_and_changes_nothing(backend: Backend, helpers):
    wal = await backend.wal()
    await wal.create_channel("a", PLAIN)
    ids = await wal.append_many([Append("a", b"%d" % number, number) for number in range(1, 11)])
    member = await wal.join("workers", ["a"])
    await member.acknowledge(await anext(member))
    await member.aclose()
    log = await reading(backend, wal)
    before = await outside(backend.url)

    assert bool(before) is bool(backend.url)
    assert (log.capabilities.read_only, wal.capabilities.read_only) == (True, False)
    assert log.name == wal.name
    assert await log.channels() == ["a"]
    assert await log.describe("a") == await wal.describe("a")
    assert (await log.latest_id("a"), await log.id_at("a", 5)) == (ids[-1], ids[4])
    assert [entry.id for entry in await helpers.take(log, "a", From.EARLIEST, 10)] == ids
    assert [entry.id for entry in await helpers.take(log, "a", FromId(ids[6]), 3)] == ids[7:]
    assert (await helpers.take(log, "a", FromTime(10), 1))[0].id <= ids[-1]
    (group,) = await log.groups()
    assert (group.name, group.members) == ("workers", {})

    for call, attempt in writing(log, ids[5]).items():
        with pytest.raises(ReadOnly) as caught:
            await attempt()
        assert caught.value.call == call
    with pytest.raises(ReadOnly):
        log.submit([Append("a", b"no")], lambda result: pytest.fail(str(result)))

    assert await outside(backend.url) == before
    assert await wal.channels() == ["a"]
    assert await wal.groups() == [group]
    info = await wal.describe("a")
    assert (info.first_id, info.latest_id) == (ids[0], ids[-1])


async def test_a_reader_sees_what_comes_later_and_streams_run_over_it(backend: Backend):
    wal = await backend.wal()
    await wal.create_channel("a", PLAIN)
    log = await reading(backend, wal)
    latest = log.read("a", From.LATEST)
    waiting = asyncio.ensure_future(anext(latest))
    stream = MsgStream(log, HybridClock())
    stream.as_consumer(["a"])
    producer = MsgStream(wal, HybridClock())
    producer.as_producer(["a"])
    async with asyncio.timeout(20):
        while not waiting.done():  # the reader begins where the channel ends once it is asked
            await producer.produce([Record(RecordType.ROWS, key=b"door")])
            await asyncio.wait([waiting], timeout=0.05)
        assert await log.latest_id("a") is not None
        assert (await anext(stream)).messages[0].key == b"door"
    refused = MsgStream(log, HybridClock())
    refused.as_producer(["a"])
    with pytest.raises(ReadOnly):
        await refused.produce([Record(RecordType.ROWS, key=b"door")])
    await latest.aclose()
    await stream.close()


async def test_where_there_is_no_log_none_is_made(backend: Backend):
    if not backend.url:
        pytest.skip("no other process can open it")
    parts = urlsplit(backend.url)
    url = parts._replace(path=parts.path + "0").geturl()
    with pytest.raises(Unavailable):
        await open_wal(url, read_only=True, **NO_WAITING.get(backend.name, {}))
    assert await outside(url) == {}


async def test_groups_are_listed_where_there_are_none_without_making_anything(backend: Backend):
    wal = await backend.wal()
    await wal.create_channel("a", PLAIN)
    log = await reading(backend, wal)
    before = await outside(backend.url)
    assert await log.groups() == []
    assert await outside(backend.url) == before
