"""Topics that others made, with partitions, keys and headers: read and written beside other programs."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka.admin import NewTopic, RecordsToDelete

from tests.adapters import conftest as helpers
from tests.adapters.kafka.foreign_topics import (
    add_partitions,
    administration,
    channels_of,
    consumed,
    foreign_url,
    make_topic,
    offset_of,
    opened,
    partition,
    producing,
    read,
)
from tidewal.adapters.kafka import open_wal
from tidewal.runtime.clock import HybridClock
from tidewal.runtime.errors import (
    ChannelNotFound,
    ConfigError,
    InvalidRequest,
    PositionLost,
    Unsupported,
)
from tidewal.runtime.log.opening import open_wal as open_any
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
from tidewal.runtime.ownership import ChannelOwner
from tidewal.runtime.streams.stream import MsgStream
from tidewal.runtime.streams.tt_stream import TtMsgStream

pytestmark = pytest.mark.broker

MS = 1_700_000_000_000
HEADERS = [("kind", b"a"), ("kind", b"b"), ("no", None)]


async def test_what_another_producer_wrote_is_read_with_keys_headers_and_times(kafka):
    topic = await make_topic(kafka)
    async with producing(kafka) as producer:
        await producer.send_and_wait(
            topic,
            b"one",
            key=b"k",
            partition=2,
            timestamp_ms=MS,
            headers=HEADERS,
        )
        await producer.send_and_wait(topic, None, key=b"k", partition=2, timestamp_ms=MS + 1)
        await producer.send_and_wait(topic, b"", partition=2, timestamp_ms=MS + 2, headers=[("ts", bytes(8))])
    async with opened(kafka) as wal:
        assert wal.capabilities.foreign_topics
        assert [name for name in await wal.channels() if name.startswith(topic)] == channels_of(topic, 3)
        first, second, third = await read(wal, f"{topic}:2", From.EARLIEST, 3)
        info = await wal.describe(f"{topic}:2")
    assert (first.payload, first.key, first.timestamp) == (b"one", b"k", MS << 18)
    assert first.headers == tuple(HEADERS)
    assert isinstance(second.payload, Tombstone), "nothing is not the same as empty"
    assert second.payload == b""
    assert not isinstance(third.payload, Tombstone)
    assert third.key is None
    assert third.timestamp == (MS + 2) << 18, "the header of another program is not taken for Tidewal's"
    assert (info.first_id, info.latest_id) == (first.id, third.id)
    assert [offset_of(entry) for entry in (first, second, third)] == [0, 1, 2]


async def test_what_is_appended_another_consumer_reads(kafka):
    topic = await make_topic(kafka)
    async with opened(kafka, compression="gzip") as wal:
        ids = await wal.append_many(
            [
                Append(f"{topic}:1", b"plain"),
                Append(f"{topic}:1", TOMBSTONE, MS << 18, b"gone", (("kind", b"x"), ("no", None))),
            ]
        )
        assert await wal.latest_id(f"{topic}:1") == ids[-1]
        await wal.append(f"{topic}:1", b"", key=b"", headers=(("one", b""),))
        first, second, third = await consumed(kafka, topic, 3)
    assert [record.partition for record in (first, second, third)] == [1, 1, 1]
    assert (first.key, first.value, first.headers) == (None, b"plain", ())
    assert first.timestamp > MS, "no time means now"
    assert (second.key, second.value, second.timestamp) == (b"gone", None, MS)
    assert second.headers == (("kind", b"x"), ("no", None))
    assert (third.key, third.value, third.headers) == (b"", b"", (("one", b""),))


async def test_keys_lie_where_other_producers_put_them(kafka):
    topic = await make_topic(kafka, 12)
    keys = [b"key %d" % number for number in range(50)]
    async with producing(kafka) as producer, opened(kafka) as wal:
        theirs = {key: (await producer.send_and_wait(topic, b"theirs", key=key)).partition for key in keys}
        await wal.append_many([Append(topic, b"ours", key=key) for key in keys])
        without_key = await wal.append_many([Append(topic, b"none") for _ in range(3)])
        records = await consumed(kafka, topic, 103)
    ours = {record.key: record.partition for record in records if record.value == b"ours"}
    assert ours == theirs
    assert len({id[:8] for id in without_key}) == 1, "one batch without keys stays together"


async def test_appends_to_a_topic_that_was_just_made_wait_until_it_is_known(kafka):
    async with opened(kafka) as wal:
        topic = await make_topic(kafka)
        await wal.append(topic, b"new", key=b"k")
        with pytest.raises(ChannelNotFound, match="no topic"):
            await wal.append("nowhere", b"x")
        with pytest.raises(ChannelNotFound, match="has 3 partitions"):
            await wal.append(f"{topic}:3", b"x")
        with pytest.raises(ChannelNotFound, match="is a topic"):
            await anext(wal.read(topic, From.EARLIEST))
        assert [record.value for record in await consumed(kafka, topic, 1)] == [b"new"]


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_batches_of_every_compression_are_read(kafka, codec):
    if codec != "gzip":
        pytest.importorskip("cramjam")
    topic = await make_topic(kafka, 1)
    async with producing(kafka, compression_type=codec, linger_ms=50) as producer:
        sent = [await producer.send(topic, b"%d" % number * 100, key=b"k") for number in range(200)]
        await asyncio.gather(*sent)
    async with opened(kafka) as wal:
        entries = await read(wal, f"{topic}:0", From.EARLIEST, 200)
    assert [entry.payload for entry in entries] == [b"%d" % number * 100 for number in range(200)]
    assert {entry.key for entry in entries} == {b"k"}


async def test_only_committed_transactions_are_read(kafka):
    topic = await make_topic(kafka, 1)
    async with producing(kafka, transactional_id=topic) as producer:
        for number, commits in enumerate([False, True, False, True]):
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"%d" % number)
            await (producer.commit_transaction() if commits else producer.abort_transaction())
    async with opened(kafka) as wal:
        entries = await read(wal, f"{topic}:0", From.EARLIEST, 2)
        assert [entry.payload for entry in entries] == [b"1", b"3"]
        assert await wal.latest_id(f"{topic}:0") == entries[-1].id


async def test_positions_times_and_a_start_that_retention_moved(kafka):
    topic = await make_topic(kafka, 2)
    channel = f"{topic}:1"
    async with producing(kafka) as producer:
        for number in range(10):
            await producer.send_and_wait(topic, b"%d" % number, partition=1, timestamp_ms=MS + number)
    async with opened(kafka) as wal:
        entries = await read(wal, channel, From.EARLIEST, 10)
        behind = await read(wal, channel, FromId(entries[4].id), 5)
        assert behind == entries[5:]
        assert await read(wal, channel, FromTime((MS + 7) << 18), 3) == entries[7:]
        assert await wal.id_at(channel, (MS + 9) << 18) == entries[9].id
        async with administration(kafka) as admin:
            await admin.delete_records({partition(topic, 1): RecordsToDelete(before_offset=6)})
        assert (await read(wal, channel, From.EARLIEST, 4)) == entries[6:]
        with pytest.raises(PositionLost) as lost:
            await anext(wal.read(channel, FromId(entries[0].id)))
        assert lost.value.fields["first_available"] == entries[6].id


async def test_a_topic_that_was_deleted_and_made_again_is_another_one(kafka):
    topic = await make_topic(kafka, 1)
    async with opened(kafka) as wal:
        id = await wal.append(f"{topic}:0", b"old")
        reader = wal.read(f"{topic}:0", FromId(id))
        waiting = asyncio.ensure_future(anext(reader))
        async with administration(kafka) as admin:
            await admin.delete_topics([topic])
        with pytest.raises(ChannelNotFound):
            async with asyncio.timeout(60):
                await waiting
        assert f"{topic}:0" not in await wal.channels()
        async with administration(kafka) as admin:
            await admin.create_topics([NewTopic(topic, 1, 1)])
        again = await wal.append(f"{topic}:0", b"new")
        assert id != again
        with pytest.raises(PositionLost):
            await anext(wal.read(f"{topic}:0", FromId(id)))


async def test_new_partitions_appear(kafka):
    topic = await make_topic(kafka, 1)
    async with opened(kafka) as wal:
        await wal.append(f"{topic}:0", b"first")
        await add_partitions(kafka, topic, 3)
        await helpers.until(lambda: wal._catalog.find(f"{topic}:2") is not None)
        await wal.append(f"{topic}:2", b"third")
        assert (await read(wal, f"{topic}:2", From.EARLIEST, 1))[0].payload == b"third"


async def test_nothing_about_a_topic_is_changed(kafka):
    topic = await make_topic(kafka, 1)
    async with opened(kafka) as wal:
        id = await wal.append(f"{topic}:0", b"x")
        for call in (
            wal.create_channel("mine", ChannelPolicy()),
            wal.drop_channel(f"{topic}:0"),
            wal.truncate(f"{topic}:0", id),
            wal.hold(f"{topic}:0", "me", id),
        ):
            with pytest.raises(Unsupported):
                await call
        with pytest.raises(Unsupported, match="time-ticked"):
            TtMsgStream(wal)
        with pytest.raises(Unsupported, match="owner"):
            ChannelOwner(wal, HybridClock())
        for wrong in (Append(topic, b"x", key="text"), Append(topic, b"x", headers=(("a", "b"),))):  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest, match="encode"):
                await wal.append_many([wrong])


async def test_opening_leaves_no_topic_behind_and_works_read_only(kafka):
    topic = await make_topic(kafka, 1)
    async with producing(kafka) as producer:
        await producer.send_and_wait(topic, b"x")
    async with administration(kafka) as admin:
        before = set(await admin.list_topics())
        wal = await open_any(foreign_url(kafka), read_only=True)
        assert [entry.payload for entry in await read(wal, f"{topic}:0", From.EARLIEST, 1)] == [b"x"]
        await wal.close()
        assert set(await admin.list_topics()) == before


async def test_a_prefix_and_another_word_than_foreign_are_refused(kafka):
    with pytest.raises(ConfigError, match="no prefix"):
        await open_wal(f"{kafka.url}/mine?topics=foreign")
    with pytest.raises(ConfigError, match="own and foreign"):
        await open_wal(f"{kafka.url}?topics=others")


async def test_streams_carry_keys_headers_and_bodies_both_ways(kafka):
    topic = await make_topic(kafka, 3)
    channels = channels_of(topic, 3)
    async with opened(kafka) as wal, producing(kafka) as producer:
        writer = MsgStream(wal, HybridClock())
        writer.as_producer([topic])
        await writer.produce(
            [
                Record(RecordType.ROWS, key=b"a", tags={"kind": "text", "raw": b"\0"}, body=b"1"),
                Record(RecordType.ROWS, ts=MS << 18, key=b"b", headers=(("x", b"1"), ("x", b"2")), body=b"2"),
            ]
        )
        with pytest.raises(InvalidRequest, match="tag 'size' is of type int"):
            await writer.produce([Record(RecordType.ROWS, tags={"size": 3})])
        await producer.send_and_wait(topic, b"TW\x01 not a frame", key=b"c", headers=[("y", b"3")])
        reader = MsgStream(wal, HybridClock())
        reader.as_consumer(channels)
        found: dict[bytes, Record] = {}
        ends = {}
        while len(found) < 3:
            pack = await anext(reader)
            found |= {record.key: record for record in pack.messages}
            ends |= pack.end_positions
        await reader.close()
        assert found[b"a"].tags == {"kind": b"text", "raw": b"\0"}
        assert (found[b"b"].headers, found[b"b"].ts) == ((("x", b"1"), ("x", b"2")), MS << 18)
        assert (bytes(found[b"c"].body), found[b"c"].tags) == (b"TW\x01 not a frame", {"y": b"3"})

        await producer.send_and_wait(topic, b"later", key=b"a")
        again = MsgStream(wal, HybridClock())
        again.seek(ends.values())
        assert [bytes(record.body) for record in (await anext(again)).messages] == [b"later"]
        await again.close()
    theirs = {record.key: record for record in await consumed(kafka, topic, 4) if record.value != b"later"}
    assert theirs[b"a"].headers == (("kind", b"text"), ("raw", b"\0"))
    assert (theirs[b"b"].headers, theirs[b"b"].timestamp) == ((("x", b"1"), ("x", b"2")), MS)
