"""Records, packs, positions, heartbeats, cuts and row bodies: what was written comes back, damage is detected."""

from __future__ import annotations

import contextlib
import dataclasses
import struct

import msgpack
import pyarrow as pa
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from tidewal.runtime.catalog.cuts import Cut, CutEnd
from tidewal.runtime.catalog.flush_events import FlushEvent
from tidewal.runtime.clock import MAX_TIMESTAMP
from tidewal.runtime.errors import BadRecord, FormatTooNew
from tidewal.runtime.log.heartbeats import Announcement, announcements, heartbeat
from tidewal.runtime.log.record import (
    BODY_ALIGNMENT,
    MAX_HEADER_BYTES,
    MAX_RECORD_BYTES,
    BatchPart,
    Record,
    RecordType,
    claimed_type,
    decode,
    encode,
    make_record,
    read_header,
    stamp,
)
from tidewal.runtime.rows.row_codec import count_rows, decode_rows, encode_rows
from tidewal.runtime.streams.messages import MsgPack, Position

numbers = st.integers(0, MAX_TIMESTAMP)
words = st.text(max_size=40)
tags = st.dictionaries(
    words,
    st.one_of(words, st.integers(-(2**63), 2**63), st.floats(allow_nan=False), st.binary(), st.booleans(), st.none()),
)
parts = st.none() | st.integers(1, 9).flatmap(
    lambda of: st.builds(BatchPart, numbers, st.integers(0, of - 1), st.just(of))
)
records = st.builds(
    Record,
    type=st.sampled_from(RecordType),
    ts=numbers,
    term=numbers,
    cseq=numbers,
    producer=words,
    pseq=numbers,
    part=parts,
    vchannel=words,
    key=st.binary(max_size=40),
    tags=tags,
    trace=words,
    schema_version=numbers,
    body=st.binary(max_size=200),
)


def same(left: Record, right: Record) -> bool:
    return dataclasses.replace(left, body=bytes(left.body)) == dataclasses.replace(right, body=bytes(right.body))


def framed(header: bytes, body: bytes = b"", version: int = 1) -> bytes:
    """A record with a good checksum around any header."""
    rest = header + bytes(-len(header) % BODY_ALIGNMENT) + body
    return struct.pack("<2sBBIQ", b"TW", version, 0, len(header), xxhash.xxh3_64_intdigest(rest)) + rest


def test_a_record_made_in_a_hurry_is_as_any_other():
    fields = (RecordType.ROWS, 1, 2, 3, "p", 4, BatchPart(1, 0, 1), "v", b"key", {"tag": 1}, "trace", 5, b"body", b"id")
    made = make_record(*fields)
    assert made == Record(*fields)
    assert type(made) is Record
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.ts = 9  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
@given(records)
def test_what_was_encoded_comes_back(record):
    assert same(decode(encode(record), b"id"), dataclasses.replace(record, id=b"id"))
    stamped = decode(stamp(record, 5, 6, 7))
    assert same(stamped, dataclasses.replace(record, ts=5, term=6, cseq=7))


@given(records)
def test_a_record_claims_the_type_that_it_has(record):
    assert claimed_type(encode(record)) == record.type


@pytest.mark.parametrize(
    ("fields", "number", "type", "claimed"),
    [
        (b"\x9c", b"\x05", 5, 5),
        (b"\x9c", b"\xcd\x03\xf2", 1010, 1010),
        (b"\x9c", b"\xcc\x05", 5, None),
        (b"\x9c", b"\xce\x00\x00\x03\xf2", 1010, None),
        (b"\x9c", b"\xd1\x03\xf2", 1010, None),
        (b"\xdc\x00\x0c", b"\x05", 5, None),
        (b"\xdd\x00\x00\x00\x0c", b"\xcd\x03\xf2", 1010, None),
    ],
)
def test_of_a_header_in_another_form_of_msgpack_no_type_is_claimed(fields, number, type, claimed):
    payload = framed(fields + number + msgpack.packb(GOOD[1:])[1:])
    assert decode(payload).type == type
    assert claimed_type(payload) == claimed


@given(st.binary(max_size=40))
def test_bytes_that_are_no_record_claim_no_type_of_one(payload):
    assert claimed_type(payload) == -1 or payload.startswith(b"TW")


@pytest.mark.slow
@given(records, st.data())
def test_a_changed_byte_is_detected_or_changes_nothing(record, data):
    payload = bytearray(encode(record))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] ^= data.draw(st.integers(1, 255))
    try:
        found = decode(payload)
    except BadRecord:
        return
    assert same(found, record)


@pytest.mark.slow
@given(records, st.data())
def test_a_cut_or_lengthened_record_is_detected(record, data):
    payload = encode(record)
    with pytest.raises(BadRecord):
        decode(payload[: data.draw(st.integers(0, len(payload) - 1))])
    with pytest.raises(BadRecord):
        decode(payload + data.draw(st.binary(min_size=1, max_size=9)))


@given(st.binary(max_size=300), st.integers(0, 255))
def test_a_hostile_header_with_a_good_checksum_is_detected(header, version):
    with pytest.raises(BadRecord):
        decode(framed(header, version=version))


GOOD = (2, 1, 1, 1, "p", 1, None, "v", b"k", {}, "", 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (0, 77),
        (0, True),
        (0, {}),
        (1, -1),
        (1, 2**63),
        (2, 1.0),
        (2, 2**63 + 5),
        (3, 2**63),
        (4, b"p"),
        (5, None),
        (6, (1, 0)),
        (6, (1, 1, 1)),
        (6, ("a", 0, 1)),
        (6, 7),
        (6, b"\x00\x00\x02"),
        (7, 3),
        (8, "k"),
        (8, 10),
        (9, []),
        (9, {"a": [1]}),
        (9, {b"a": 1}),
        (9, {"a": {"b": 1}}),
        (10, None),
        (11, "0"),
    ],
)
def test_a_field_of_the_wrong_kind_is_detected(field, value):
    fields = list(GOOD)
    assert decode(framed(msgpack.packb(fields))).producer == "p"
    assert read_header(framed(msgpack.packb(fields))) is not None
    fields[field] = value
    with pytest.raises(BadRecord) as caught:
        decode(framed(msgpack.packb(fields)))
    assert caught.value.reason == "header"
    assert read_header(framed(msgpack.packb(fields))) is None


@pytest.mark.parametrize(
    "bomb",
    [
        b"\x91" * 60_000,  # arrays in arrays
        b"\x81\xa1k" * 20_000,  # maps in maps
        b"\xdd\xff\xff\xff\xff",  # an array of four billion
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdc\xff\xff" + b"\xc0" * 65_535,
        b"\xc7\x05\xff" + b"\xff" * 5,  # a timestamp of a wrong length
        b"\x82\xc0\xc0\x90\x90",  # keys that are none
        msgpack.packb("twelve chars"),
    ],
)
def test_a_bomb_does_not_go_off(bomb):
    with pytest.raises(BadRecord):
        decode(framed(bomb))
    assert read_header(framed(bomb)) is None
    with pytest.raises(BadRecord):
        Position.from_bytes(bomb)
    for read in (announcements, Cut.from_record):
        with pytest.raises(BadRecord):
            read(Record(RecordType.CUT, body=bomb))


def test_hostile_lengths_are_detected():
    for header_bytes in (1, MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1, 2**32 - 1):
        with pytest.raises(BadRecord):
            decode(struct.pack("<2sBBIQ", b"TW", 1, 0, header_bytes, 0))
    header = msgpack.packb((*GOOD[:4], "p" * MAX_HEADER_BYTES, *GOOD[5:]))
    unpadded = struct.pack("<2sBBIQ", b"TW", 1, 0, len(packed := msgpack.packb(GOOD)), xxhash.xxh3_64_intdigest(packed))
    for payload in (framed(header), unpadded + packed):
        with pytest.raises(BadRecord):
            decode(payload)
        assert read_header(payload) is None
    with pytest.raises(BadRecord) as caught:
        decode(bytes(MAX_RECORD_BYTES + 1))
    assert caught.value.reason == "length"


def test_a_header_over_the_limit_is_refused_before_it_is_written():
    with pytest.raises(BadRecord):
        encode(Record(RecordType.ROWS, tags={"t": "x" * MAX_HEADER_BYTES}))


def test_a_body_is_a_view_and_aligned():
    payload = encode(Record(RecordType.ROWS, producer="odd", body=b"0123456789"))
    body = decode(payload).body
    assert isinstance(body, memoryview)
    assert body.obj is payload
    assert (len(payload) - len(body)) % BODY_ALIGNMENT == 0


@pytest.mark.slow
@given(st.builds(Position, words, st.binary(), numbers, numbers, numbers, words, words), st.data())
def test_positions_come_back_and_damage_is_detected(position, data):
    wire = position.to_bytes()
    assert Position.from_bytes(wire) == position
    with pytest.raises(BadRecord):
        Position.from_bytes(wire[: data.draw(st.integers(0, len(wire) - 1))])


@given(st.binary(max_size=60))
@example(b"\xa0")
@example(b"\x80")
def test_arbitrary_bytes_are_no_position_heartbeat_or_cut(data):
    for read in (Position.from_bytes, lambda d: announcements(Record(RecordType.HEARTBEAT, body=d))):
        try:
            read(data)
        except BadRecord:
            continue
        assert data == b"\x90"  # no announcements
    with pytest.raises(BadRecord):
        Cut.from_record(Record(RecordType.CUT, body=data))


def test_heartbeats_and_cuts_come_back():
    sent = [Announcement("a", 1, 2, 3), Announcement("b", 4, 5, 6)]
    assert announcements(decode(encode(heartbeat(sent)))) == sent
    cut = Cut(99, {"a": CutEnd(1, 2, b"x"), "b": CutEnd(3, 4, b"y")})
    assert Cut.from_record(decode(encode(cut.to_record()))) == cut
    for body in ({"v": 0}, {"v": 1, "id": 1, "time": 2, "ends": [1]}, {"v": 1, "ends": {"a": 3}}, {"v": 1}):
        with pytest.raises(BadRecord):
            Cut.from_record(Record(RecordType.CUT, body=msgpack.packb(body)))


def test_a_cut_of_a_newer_tidewal_says_so_and_a_flush_event_is_passed_over():
    body = msgpack.packb({"v": 2, "what": "nobody knows"})
    with pytest.raises(FormatTooNew, match="upgrade") as raised:
        Cut.from_record(Record(RecordType.CUT, body=body))
    assert (raised.value.found, raised.value.supported) == (2, 1)
    with pytest.raises(BadRecord, match="version 2"):
        FlushEvent.from_record(Record(RecordType.FLUSHED, body=body))


def test_rows_come_back_and_damage_is_detected_or_harmless(rng):
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("vector", pa.list_(pa.float32(), 2))])
    rows = [[1, 2, None], ["a", None, "ccc"], [[1.0, 2.0], [3.0, 4.0], None]]
    batch = pa.record_batch(rows, schema=schema)
    body = bytes(encode_rows(batch))
    assert decode_rows(body, schema).equals(batch)
    for _ in range(300):
        damaged = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        with contextlib.suppress(BadRecord):
            decode_rows(bytes(damaged), schema).to_pylist()
    for cut in range(len(body)):
        try:
            decode_rows(body[:cut], schema)
        except BadRecord:
            continue
        pytest.fail(f"{cut} of {len(body)} bytes were taken for rows")


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_rows_are_refused_before_they_are_unpacked(compression, legacy):
    schema = pa.schema([("id", pa.int64()), ("at", pa.list_(pa.float32(), 2))])
    arrays = [pa.nulls(4096, field.type) for field in schema]
    bodies = []
    for chosen in (None, compression):
        options = pa.ipc.IpcWriteOptions(compression=chosen, use_legacy_format=legacy)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema, options=options) as writer:
            writer.write_batch(pa.record_batch(arrays, schema=schema))
        stream = pa.BufferReader(sink.getvalue())
        pa.ipc.read_message(stream)
        begin = stream.tell()
        message = pa.ipc.read_message(stream)
        bodies.append(sink.getvalue()[begin : begin + len(message.serialize())].to_pybytes())
    assert decode_rows(bodies[0], schema).num_rows == count_rows(bodies[0], schema) == 4096
    before = pa.total_allocated_bytes()
    for read in (decode_rows, count_rows):
        with pytest.raises(BadRecord, match="compressed"):
            read(bodies[1], schema)
    assert pa.total_allocated_bytes() == before


def test_a_pack_has_the_length_of_its_messages():
    assert len(MsgPack(0, 1, [Record(RecordType.ROWS)])) == 1
