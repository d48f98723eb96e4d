"""A record: the content of one channel entry, and its bytes.

    2 bytes magic "TW", 1 byte version, 1 byte 0, 4 bytes header length, 8 bytes xxh3-64 of header and body,
    header (a msgpack array, in the order of `Record`'s fields), zeros up to a multiple of 16, body

All integers are little-endian. The header is read without touching the body, so dispatch, tag filters and inspection
never decode rows. All input is hostile until length, version and checksum have passed; every fault ends
as one typed `BadRecord`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias, cast

import msgpack
import xxhash

from ..arguments import check_values
from ..clock import MAX_TIMESTAMP, to_datetime
from ..errors import BadRecord, InvalidRequest
from .wal import Headers, Payload

MAGIC = b"TW"
VERSION = 1
MAX_HEADER_BYTES = 256 * 1024
BODY_ALIGNMENT = 16  # so that computing on columns in the body needs no copy
MAX_RECORD_BYTES = 64 * 1024 * 1024

NOT_A_RECORD = ("length", "frame", "checksum")  # reasons of `BadRecord` for bytes that no Tidewal wrote, of any version

_PREFIX = struct.Struct("<2sBBIQ")
_HEADER_FIELDS = 12
_unpack_prefix, _digest = _PREFIX.unpack_from, xxhash.xxh3_64_intdigest
_unpack_claim = struct.Struct(
    f">{len(MAGIC)}s{_PREFIX.size - len(MAGIC)}xBBH"
).unpack_from  # how a header of msgpack begins
_FIELDS_OF_HEADER, _UINT16 = 0x90 | _HEADER_FIELDS, 0xCD  # of msgpack
_unpackb = cast("Callable[..., tuple[Any, ...]]", msgpack.unpackb)
DECODE_ERRORS = (ValueError, TypeError, RecursionError, MemoryError, msgpack.UnpackException)

TagValue: TypeAlias = str | int | float | bytes | bool | None
Tags: TypeAlias = Mapping[str, TagValue]
_BYTES = (bytes, bytearray, memoryview)
_TAG_TYPES = (str, int, float, bytes, type(None))
_UNPACKED_TAG_TYPES = frozenset({*_TAG_TYPES, bool})
_NUMBER_BITS = MAX_TIMESTAMP.bit_length()


class RecordType(IntEnum):
    """What a record says. Below 1000 the numbers are Milvus' (`messagespb.MessageType`)."""

    TIME_TICK = 1
    ROWS = 2  # rows of one vchannel with an `_op` column: inserts, upserts and deletes alike
    FLUSH = 4
    CREATE_COLLECTION = 5
    DROP_COLLECTION = 6
    FENCE = 1000
    HEARTBEAT = 1001
    PRODUCERS = 1002
    REQUEST = 1003
    REPLY = 1004
    CUT = 1005
    CATALOG = 1006
    FLUSHED = 1007
    QUERY = 1008
    DEAD_LETTER = 1009
    LEDGER = 1010
    GROUP = 1011
    STATE = 1012
    PRODUCER = 1013
    CLUSTER = 1014
    DELAYED = 1015
    CANCELLED = 1016
    MESSAGE = 1017  # of a topic's partition
    EPOCH_END = 1018  # no message of the topic follows in this partition
    EPOCH_BEGIN = 1019  # the first record of a partition that follows others: its body names their EPOCH_ENDs
    PREPARE = 1020  # what a transaction over several pchannels will write here, once it is decided
    ABORT = 1021  # that transaction will write nothing here
    DELAYED_PAGE = 1022  # many records of those that are DELAYED, or CANCELLED, once more


_TYPES = {int(each): each for each in RecordType}  # `RecordType(kind)` takes ten times as long

# What channel owners append of their own accord, or for a collection as a whole: not data.
CONTROL_TYPES = frozenset(
    {
        RecordType.TIME_TICK,
        RecordType.FLUSH,
        RecordType.CREATE_COLLECTION,
        RecordType.DROP_COLLECTION,
        RecordType.FENCE,
        RecordType.PRODUCERS,
        RecordType.EPOCH_END,
        RecordType.EPOCH_BEGIN,
        RecordType.PREPARE,
        RecordType.ABORT,
    }
)


# What carries nothing but time and the state of channels: no reader delivers it.
TIME_TYPES = frozenset(
    {
        RecordType.TIME_TICK,
        RecordType.FENCE,
        RecordType.PRODUCERS,
        RecordType.EPOCH_END,
        RecordType.EPOCH_BEGIN,
        RecordType.PREPARE,
        RecordType.ABORT,
    }
)


# What says nothing of the time of its channel: a transaction that was prepared before it may be committed behind it,
# at a lower timestamp than its own (`ownership/prepared.py`).
TIMELESS_TYPES = frozenset({RecordType.FENCE, RecordType.PREPARE, RecordType.ABORT})


class BatchPart(NamedTuple):
    """This record is part `number` (from 0) of `of` of one batch in its channel, seen whole or not at all."""

    batch: int
    number: int
    of: int


@dataclass(frozen=True, slots=True)
class Record:
    """One record. `ts`, `term` and `cseq` are stamped by the channel's owner; `id` is filled in when it is read.

    `headers` are those of an entry in a topic that others made, also such as share a name; what is read from there has
    them as `tags`, too. A channel of Tidewal keeps `tags` alone."""

    type: RecordType
    ts: int = 0
    term: int = 0
    cseq: int = 0
    producer: str = ""
    pseq: int = 0
    part: BatchPart | None = None
    vchannel: str = ""
    key: bytes = b""
    tags: Tags = field(default_factory=dict[str, TagValue])
    trace: str = ""
    schema_version: int = 0
    body: Payload = b""
    id: bytes = b""
    headers: Headers = ()

    @property
    def time(self) -> datetime:
        """The physical part of `ts`, UTC."""
        return to_datetime(self.ts)


HEADER_FIELDS = tuple(each.name for each in fields(Record) if each.name not in ("body", "id", "headers"))
"""The fields of a header, in order."""


class _OpenRecord:
    """A `Record` whose fields are being set: a frozen one sets each by a call, which takes four times as long."""

    __slots__ = tuple(each.name for each in fields(Record))  # as `Record` has them: so it can become one


def make_record(
    kind: RecordType,
    ts: int,
    term: int,
    cseq: int,
    producer: str,
    pseq: int,
    part: BatchPart | None,
    vchannel: str,
    key: bytes,
    tags: Tags,
    trace: str,
    schema_version: int,
    body: Payload,
    id: bytes = b"",
) -> Record:
    """`Record` with these fields, on the hot paths of reading and of appending: in a quarter of the time."""
    made: Any = _OpenRecord()
    made.type = kind
    made.ts = ts
    made.term = term
    made.cseq = cseq
    made.producer = producer
    made.pseq = pseq
    made.part = part
    made.vchannel = vchannel
    made.key = key
    made.tags = tags
    made.trace = trace
    made.schema_version = schema_version
    made.body = body
    made.id = id
    made.headers = ()
    made.__class__ = Record
    return made


def header_of(record: Record) -> tuple[Any, ...]:
    """The header of `record`, as `read_header` finds it in its bytes."""
    return (
        record.type,
        record.ts,
        record.term,
        record.cseq,
        record.producer,
        record.pseq,
        record.part,
        record.vchannel,
        record.key,
        record.tags,
        record.trace,
        record.schema_version,
    )


def encode(record: Record) -> bytes:
    """The bytes of `record`, without its `id` and `headers`. Raises `BadRecord` for a header that is too large."""
    return stamp(record, record.ts, record.term, record.cseq)


def stamp(record: Record, ts: int, term: int, cseq: int) -> bytes:
    """The bytes of `record` with the owner's stamp `ts`, `term` and `cseq`, without a copy of the record: this is on
    the hot path of an append. Raises `BadRecord` for a header that is too large, and `InvalidRequest` for a field of
    a wrong type, with which no reader could use the record."""
    producer, vchannel, key, trace = record.producer, record.vchannel, record.key, record.trace
    # Not every caller checks its types.
    names = isinstance(producer, str) and isinstance(vchannel, str)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not (names and isinstance(key, _BYTES) and _are_tags(record.tags)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _unfit(record)
    try:
        header = cast(
            bytes,
            msgpack.packb(
                (
                    int(record.type),
                    ts,
                    term,
                    cseq,
                    producer,
                    record.pseq,
                    record.part,
                    vchannel,
                    key,
                    record.tags,
                    trace,
                    record.schema_version,
                )
            ),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise _unfit(record) from error
    if len(header) > MAX_HEADER_BYTES:
        raise BadRecord(f"a header of {len(header)} bytes is over the limit of {MAX_HEADER_BYTES}", reason="header")
    header_bytes = len(header)
    header += bytes(-header_bytes % BODY_ALIGNMENT)
    try:
        digest = xxhash.xxh3_64(header)
        digest.update(record.body)
        return b"".join((_PREFIX.pack(MAGIC, VERSION, 0, header_bytes, digest.intdigest()), header, record.body))
    except TypeError as error:  # the digest takes a text, too
        raise _unfit(record) from error


def _are_tags(tags: object) -> bool:
    if not isinstance(tags, dict):
        return False
    found = cast("dict[object, object]", tags)
    for name, value in found.items():  # noqa: SIM110 - `all` takes twice as long, on the hot path
        if not (isinstance(name, str) and isinstance(value, _TAG_TYPES)):
            return False
    return True


def _unfit(record: Record) -> InvalidRequest:
    """The error for a record of which a field has a wrong type."""
    try:
        check_values(Record, record)
    except InvalidRequest as error:
        return error
    return InvalidRequest("tags of Record must map texts to texts, numbers, bytes or None", argument="tags")


def claims_record(payload: Payload) -> bool:
    """Whether `payload` begins as a record does, so that one which cannot be decoded is damaged or too new, and no
    entry of another kind. Behind the two letters comes a version, which no text has there."""
    start = bytes(memoryview(payload)[: len(MAGIC) + 1])
    return start.startswith(MAGIC) and start[len(MAGIC) :] < b" "


def decode(payload: Payload, id: bytes = b"") -> Record:
    """The record in `payload`; its body is a view into `payload`. Raises `BadRecord` for anything that is not
    intact."""
    view = memoryview(payload)
    header, body_at = _unpacked(view)
    return _from_fields(header, view[body_at:], id)


def read_header(payload: Payload) -> tuple[Any, ...] | None:
    """The header of the record in `payload`, for a part of what `decode` costs: this is on the hot path of filters.
    None for whatever `decode` refuses."""
    view = memoryview(payload)
    try:
        magic, version, _, header_bytes, checksum = _unpack_prefix(view)
        content = view[_PREFIX.size :]
        if magic != MAGIC or version != VERSION or not _fits(header_bytes, len(view)) or _digest(content) != checksum:
            return None
        header = _unpackb(content[:header_bytes], use_list=False)
        return None if _fault_in(header) else header
    except (struct.error, *DECODE_ERRORS):
        return None


def record_type(payload: Payload) -> RecordType | None:
    """The type of the record in `payload`; None for whatever `decode` refuses."""
    header = read_header(payload)
    return None if header is None else _TYPES[header[0]]


def claimed_type(payload: Payload) -> int | None:
    """The type that the record in `payload` has, if there is an intact one: any number where there is none. It takes a
    sixth of the time of `record_type`, and rules types out. None where only that can tell."""
    try:
        magic, fields, first, number = _unpack_claim(payload)
    except struct.error:  # too short for a record
        return -1
    if magic != MAGIC:
        return -1
    if fields != _FIELDS_OF_HEADER:
        return None
    if first < 0x80:  # a number of msgpack by itself
        return first
    return number if first == _UINT16 else None


def header_size(payload: Payload) -> int:
    """Bytes of the header of an intact record."""
    return _unpack_prefix(payload)[3]


def _fits(header_bytes: int, record_bytes: int) -> bool:
    """Whether a record of that size can have a header of that size."""
    body_at = _PREFIX.size + header_bytes + -header_bytes % BODY_ALIGNMENT
    return header_bytes <= MAX_HEADER_BYTES and body_at <= record_bytes <= MAX_RECORD_BYTES


def _unpacked(view: memoryview) -> tuple[tuple[Any, ...], int]:
    """What the header unpacks to, and where the body begins. Raises `BadRecord`."""
    if not _PREFIX.size <= len(view) <= MAX_RECORD_BYTES:
        raise BadRecord(f"{len(view)} bytes cannot be a record", reason="length")
    magic, version, _, header_bytes, checksum = _PREFIX.unpack_from(view)
    if magic != MAGIC or not _fits(header_bytes, len(view)):
        raise BadRecord("not a Tidewal record", reason="frame")
    if version != VERSION:
        raise BadRecord(f"record version {version}, this Tidewal reads {VERSION}", reason="version")
    if xxhash.xxh3_64_intdigest(view[_PREFIX.size :]) != checksum:
        raise BadRecord("checksum does not match", reason="checksum")
    header_end = _PREFIX.size + header_bytes
    try:
        header = _unpackb(view[_PREFIX.size : header_end], use_list=False)
    except DECODE_ERRORS as error:  # its length is not under the checksum
        raise BadRecord(f"not a Tidewal record: {error}", reason="frame") from error
    return header, header_end + -header_bytes % BODY_ALIGNMENT


def _fault_in(header: tuple[Any, ...]) -> str:
    """Why what was unpacked, be it a tuple or not, is no header of a record; empty where it is one. It asks for types,
    not for classes that derive from them: this is on the hot path, and msgpack makes none."""
    if type(header) is not tuple or len(header) != _HEADER_FIELDS:
        return "it has other fields"
    kind, ts, term, cseq, producer, pseq, part, vchannel, key, tags, trace, schema_version = header
    if not type(kind) is type(ts) is type(term) is type(cseq) is type(pseq) is type(schema_version) is int:
        return "a number is missing"
    if (ts | term | cseq | pseq | schema_version) >> _NUMBER_BITS:  # also of a negative one
        return "a number is out of range"
    if kind not in _TYPES:
        return f"{kind} is no type of records"
    if not type(producer) is type(vchannel) is type(trace) is str:
        return "a name is not text"
    if not (type(key) is bytes and type(tags) is dict):
        return "key or tags have the wrong type"
    for name, value in cast("dict[object, object]", tags).items():
        if type(name) is not str or type(value) not in _UNPACKED_TAG_TYPES:
            return "a tag has the wrong type"
    return "" if part is None or _is_part(part) else "a batch part outside its batch"


def _is_part(part: tuple[Any, ...]) -> bool:
    if type(part) is not tuple or len(part) != 3:
        return False
    batch, number, of = part
    return type(batch) is type(number) is type(of) is int and 0 <= number < of


def _from_fields(header: tuple[Any, ...], body: memoryview, id: bytes) -> Record:
    fault = _fault_in(header)
    if fault:
        raise BadRecord(f"unreadable header: {fault}", reason="header")
    kind, ts, term, cseq, producer, pseq, part, vchannel, key, tags, trace, schema_version = header
    return make_record(
        _TYPES[kind],
        ts,
        term,
        cseq,
        producer,
        pseq,
        None if part is None else BatchPart(*part),
        vchannel,
        key,
        tags,
        trace,
        schema_version,
        body,
        id,
    )
