"""Compressed batches of other tools: what comes out is bounded before it is made, and none stops a channel."""

from __future__ import annotations

import gzip
import tracemalloc

import pytest
from aiokafka import AIOKafkaProducer, codec
from aiokafka.record import MemoryRecords
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy
from aiokafka.record.legacy_records import LegacyRecordBatchBuilder

from tidewal.adapters.kafka.batch import ProducerBatch
from tidewal.adapters.kafka.fetching import entries, foreign_entries, readable
from tidewal.adapters.kafka.options import CODECS
from tidewal.adapters.kafka.positions import prefix, to_rows
from tidewal.adapters.kafka.topics import UNPACKED_BYTES
from tidewal.adapters.kafka.unpacking import split
from tidewal.runtime.clock import compose
from tidewal.runtime.errors import CorruptLog
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, Tombstone

NOW_MS = 1_700_000_000_000
LIMIT = 100_000
PLAIN = ChannelPolicy()
PACKED = [
    pytest.param(name, marks=pytest.mark.skipif(not getattr(codec, f"has_{name}")(), reason="no package for it"))
    for name in ("gzip", "snappy", "lz4", "zstd")
]


def batch(*payloads, name="gzip"):
    return bytes(
        ProducerBatch(to_rows([compose(NOW_MS)] * len(payloads), payloads, NOW_MS), codec=CODECS[name]).build((1, 0), 0)
    )


def read(data, limit=LIMIT):
    return [bytes(entry.payload) for entry in entries(list(split(data)), 0, prefix(0), limit)]


@pytest.mark.parametrize("name", PACKED)
def test_what_fits_comes_out_as_it_was(name):
    payloads = [b"one" * 1000, b"", bytes(50_000)]
    assert read(batch(*payloads, name=name)) == payloads


@pytest.mark.parametrize("name", PACKED)
def test_a_batch_that_would_become_too_large_is_one_entry_without_payload(name, caplog):
    bombs = batch(b"before", name=name), batch(b"x", bytes(64 * LIMIT), name=name), batch(b"behind", name=name)
    assert len(bombs[1]) < LIMIT * 4
    tracemalloc.start()
    found = read(b"".join(bombs))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [b"before", b"", b"behind"]
    assert peak < 20 * LIMIT
    assert f"it is over {LIMIT} bytes" in caplog.text or "not unpacked" in caplog.text


def test_its_id_is_that_of_its_last_record():
    data = batch(b"x", bytes(2 * LIMIT), b"y")
    assert [entry.id[-1] for entry in entries(list(split(data)), 0, prefix(0), LIMIT)] == [2]
    assert entries(list(split(data)), 3, prefix(0), LIMIT) == []


@pytest.mark.parametrize("cut", [1, 20, 40])
def test_what_cannot_be_unpacked_stops_no_reader(cut):
    good = batch(b"x" * 1000)
    (packed,) = split(good)
    packed._data = packed._data[:-cut]  # as if it had been compressed so: the checksum is right
    assert [record.value for record in packed.unpacked(LIMIT)] == [None]


def test_gzip_in_several_members_is_bounded_as_a_whole():
    (packed,) = split(batch(b"x"))
    header = packed._data[:61]
    packed._data = header + b"".join(gzip.compress(bytes(LIMIT // 2)) for _ in range(3))
    assert [record.value for record in packed.unpacked(LIMIT)] == [None]


def test_what_is_not_compressed_is_handed_on_as_it_is():
    data = batch(b"x", name="none")
    (found,) = split(data)
    assert type(found) is type(MemoryRecords(data).next_batch())


@pytest.mark.broker
async def test_a_compression_bomb_is_a_bad_record_of_its_channel(kafka, opening, helpers):
    wal = await opening(kafka)
    await wal.create_channel("a", PLAIN)
    topic = wal._catalog.find("a").topic
    large = 4 * UNPACKED_BYTES
    async with AIOKafkaProducer(
        bootstrap_servers=kafka.bootstrap, compression_type="gzip", max_request_size=2 * large
    ) as producer:
        await producer.send_and_wait(topic, b"fine", partition=0)
        await producer.send_and_wait(topic, bytes(large), partition=0)
    behind = await wal.append_many([Append("a", b"behind")])
    found = await helpers.take(wal, "a", From.EARLIEST, 3)
    assert helpers.payloads(found) == [b"fine", b"", b"behind"]
    assert found[-1].id == behind[0]


def test_a_batch_of_others_that_cannot_be_unpacked_is_an_error_and_no_record_without_value():
    data = batch(bytes(LIMIT + 1))
    with pytest.raises(CorruptLog, match="cannot be unpacked") as caught:
        foreign_entries(list(split(data)), 0, b"id", LIMIT)
    assert (caught.value.fields["offset"], caught.value.fields["last_offset"]) == (0, 0)


class NoText(str):
    """The name of a header as programs in C may write it."""

    __slots__ = ()

    def encode(self, *_: object) -> bytes:
        return b"\xff"


def test_a_name_of_a_header_that_is_no_text_makes_its_batch_one_that_cannot_be_unpacked():
    builder = _DefaultRecordBatchBuilderPy(2, 0, 0, -1, -1, -1, LIMIT)
    builder.append(0, NOW_MS, b"k", b"fine", [])
    builder.append(1, NOW_MS, b"k", b"odd", [(NoText("n"), b"v")])
    data = bytes(builder.build())
    with pytest.raises(CorruptLog, match="offsets 0 to 1 cannot be unpacked"):
        foreign_entries(list(split(data)), 0, b"id", LIMIT)
    assert read(data) == [b""]


def test_what_lies_before_a_batch_that_cannot_be_unpacked_is_read_before_the_error():
    data = batch(b"before") + batch(bytes(LIMIT + 1)) + batch(b"behind")
    found, error = readable(foreign_entries, list(split(data)), 0, b"id", LIMIT)
    assert [entry.payload for entry in found] == [b"before"]
    assert isinstance(error, CorruptLog)


@pytest.mark.parametrize("codec", [0, 1])
@pytest.mark.parametrize("magic", [0, 1])
def test_messages_in_the_formats_before_batches_are_read(magic, codec):
    data = b""
    for first in (10, 12):
        builder = LegacyRecordBatchBuilder(magic, codec, 1 << 20)
        for offset in (0, 1):
            builder.append(offset, timestamp=5000 + offset, key=b"k", value=None if offset else b"%d" % first)
        built = bytearray(builder.build())
        if codec:  # the broker writes the last offset into the set, and relative ones stay within it
            built[:8] = (first + 1 if magic else 1).to_bytes(8, "big")
        data += bytes(built)
    found = foreign_entries(list(split(data)), 0, b"", LIMIT)
    assert [(entry.payload, isinstance(entry.payload, Tombstone), entry.key) for entry in found] == [
        (b"10", False, b"k"),
        (b"", True, b"k"),
        (b"12", False, b"k"),
        (b"", True, b"k"),
    ]
    assert {entry.time.timestamp() for entry in found} == ({5, 5.001} if magic else {0})
