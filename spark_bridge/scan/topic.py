"""The tasks' side of topics: from a range of one channel to Arrow batches with Kafka's columns, and some of Tidewal's.

An entry that holds a Tidewal record gives its key, body and tags; what the owner of a channel writes for its readers
(ticks, fences, heartbeats, producers) gives no row. Any other entry is a value as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from ...runtime.clock import physical_ms
from ...runtime.errors import BadRecord, ChannelNotFound, PositionLost
from ...runtime.log.blocking_reader import BlockingReader
from ...runtime.log.record import MAGIC, Record, RecordType, Tags, TagValue, decode
from ...runtime.log.wal import Entry
from ...runtime.streams.channel_reader import ChannelReader
from .collection import BATCH_BYTES, BATCH_ROWS
from .columns import TIME, spark_type

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

HEADERS: Final = "headers"
TAGS: Final = "tags"
_HEADER = pa.struct([("key", pa.string()), ("value", pa.binary())])

TOPIC_COLUMNS: Final[dict[str, pa.DataType]] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "timestamp": TIME,
    "_ts": pa.int64(),
    "_time": TIME,
    "_channel": pa.string(),
    "_id": pa.binary(),
    "_watermark": pa.int64(),
    HEADERS: pa.list_(_HEADER),
}

_CONTROL: Final = frozenset(
    {RecordType.TIME_TICK, RecordType.FENCE, RecordType.HEARTBEAT, RecordType.PRODUCERS, RecordType.LEDGER}
)
_FOREIGN: Final = frozenset({"length", "frame", "version"})  # reasons for which bytes are no record of Tidewal's

_logger = logging.getLogger("tidewal.spark")


def topic_columns(*, headers: bool = False, tags: Sequence[str] = ()) -> dict[str, pa.DataType]:
    """The columns of topics in Arrow's types; those of `tags` (and with `headers` all, as Kafka's) come last."""
    found = {name: kind for name, kind in TOPIC_COLUMNS.items() if headers or name != HEADERS}
    return found | ({TAGS: pa.struct([(name, pa.string()) for name in tags])} if tags else {})


def topic_schema(columns: Mapping[str, pa.DataType]) -> StructType:
    """`columns` as Spark's schema."""
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(name, spark_type(kind)) for name, kind in columns.items()])


class TopicPlace(NamedTuple):
    """A place between two entries of a channel: just behind the one with `id`, or just before it. Places sort as they
    follow each other."""

    id: bytes
    behind: bool

    def __str__(self) -> str:
        if not self.id:
            return "earliest"
        return f"{'behind' if self.behind else 'at'} {self.id.hex()}"

    @classmethod
    def parse(cls, text: str) -> TopicPlace:
        """The place that `str` wrote as `text`. Raises `ValueError`."""
        if text == "earliest":
            return BEGINNING
        word, _, id = text.partition(" ")
        if word not in ("at", "behind") or not id:
            raise ValueError(f"{text!r} is no place: earliest, 'behind <id>' or 'at <id>'")
        return cls(bytes.fromhex(id), word == "behind")


BEGINNING: Final = TopicPlace(b"", True)


@dataclass(frozen=True, slots=True)
class TopicRange:
    """What one task reads: the entries of one channel between two places. With `fences` (not None) the channel has an
    owner: then records of a superseded owner and repeated records do not count, and of the rest those with `begin_ts <
    ts <= end_ts` do; `after` is the last (term, cseq) before `begin`, where that is known."""

    wal: str = field(repr=False)  # may say how to log in
    channel: str
    begin: TopicPlace
    end: TopicPlace
    fail_on_data_loss: bool
    fences: Mapping[int, bytes] | None = None
    after: tuple[int, int] = (0, 0)
    begin_ts: int = 0
    end_ts: int = 0
    watermark: int | None = None
    tags: tuple[str, ...] = ()


class TopicRow(NamedTuple):
    """One row. `ts` is 0 and `key` empty where there is none; `tags` are None where the entry is no record."""

    id: bytes
    ts: int
    key: bytes
    value: bytes | memoryview
    tags: Tags | None


def message_of(entry: Entry) -> TopicRow | None:
    """The row of an entry; None when it has none. Raises `BadRecord` for a record that is damaged."""
    if entry.payload[: len(MAGIC)] == MAGIC:
        try:
            return message_of_record(decode(entry.payload, entry.id), entry.timestamp)
        except BadRecord as error:
            if error.reason not in _FOREIGN:
                raise
    return TopicRow(entry.id, entry.timestamp, b"", entry.payload, None)


def message_of_record(record: Record, timestamp: int = 0) -> TopicRow | None:
    """The row of a record; None when it has none."""
    if record.type in _CONTROL:
        return None
    body = record.body if isinstance(record.body, bytes | memoryview) else bytes(record.body)
    return TopicRow(record.id, record.ts or timestamp, record.key, body, record.tags)


def entries_between(log: BlockingReader, wanted: TopicRange) -> Iterator[list[Entry]]:
    """The entries of `wanted`. Raises `PositionLost` and `ChannelNotFound` unless data loss is allowed."""
    try:
        yield from _read(log, wanted, wanted.begin)
    except (PositionLost, ChannelNotFound) as error:
        if wanted.fail_on_data_loss:
            raise type(error)(
                f"entries of {wanted.channel} are gone that were not read yet ({error.message}). Start with a new "
                "checkpoint and startingOffsets=earliest, or set failOnDataLoss=false to go on without them",
                **error.fields,
            ) from error
        _logger.warning("%s: entries are lost, going on with what there is: %s", wanted.channel, error.message)
        if wanted.begin != BEGINNING and isinstance(error, PositionLost):
            yield from _what_is_left(log, wanted)


def _what_is_left(log: BlockingReader, wanted: TopicRange) -> Iterator[list[Entry]]:
    try:
        yield from _read(log, wanted, BEGINNING)
    except (PositionLost, ChannelNotFound) as error:
        _logger.warning("%s: nothing is left of what was to be read: %s", wanted.channel, error.message)


def _read(log: BlockingReader, wanted: TopicRange, begin: TopicPlace) -> Iterator[list[Entry]]:
    for entries in log.read(wanted.channel, begin.id or None, wanted.end.id, inclusive=not begin.behind):
        within = entries if wanted.end.behind else [entry for entry in entries if entry.id < wanted.end.id]
        if within:
            yield within


def messages(log: BlockingReader, wanted: TopicRange) -> Iterator[TopicRow]:
    """The rows of `wanted`. A damaged record is skipped with a warning."""
    reader = channel_reader(wanted)
    for entries in entries_between(log, wanted):
        if reader is None:
            found = (_readable(wanted, entry) for entry in entries)
        else:
            records = reader.accept(entries)
            found = (message_of_record(each) for each in records if wanted.begin_ts < each.ts <= wanted.end_ts)
        yield from (message for message in found if message is not None)


def channel_reader(wanted: TopicRange) -> ChannelReader | None:
    """The reader of a channel that has an owner; None for other channels."""
    if wanted.fences is None:
        return None
    return ChannelReader(wanted.channel, fences=wanted.fences, after=wanted.after, on_bad=_warn)


def _readable(wanted: TopicRange, entry: Entry) -> TopicRow | None:
    try:
        return message_of(entry)
    except BadRecord as error:
        _warn(wanted.channel, entry, error)
        return None


def _warn(channel: str, entry: Entry, error: BadRecord) -> None:
    _logger.warning("%s: entry %s is skipped: %s", channel, entry.id.hex(), error.message)


def topic_batches(log: BlockingReader, wanted: TopicRange, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of `wanted` in batches of about 64 k rows or 16 MiB."""
    held: list[TopicRow] = []
    size = 0
    for message in messages(log, wanted):
        held.append(message)
        size += len(message.value)
        if len(held) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield _batch(held, wanted, columns)
            held, size = [], 0
    if held:
        yield _batch(held, wanted, columns)


def _batch(held: Sequence[TopicRow], wanted: TopicRange, columns: Sequence[str]) -> pa.RecordBatch:
    known = topic_columns(headers=True, tags=wanted.tags)
    arrays = [pa.array(_values(name, held, wanted), type=known[name]) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([(name, known[name]) for name in columns]))


def _values(name: str, held: Sequence[TopicRow], wanted: TopicRange) -> Iterable[Any]:
    match name:
        case "key":
            return [message.key or None for message in held]
        case "value":
            return [message.value for message in held]
        case "timestamp" | "_time":
            return [physical_ms(message.ts) * 1000 if message.ts else None for message in held]
        case "_ts":
            return [message.ts or None for message in held]
        case "_id":
            return [message.id for message in held]
        case "_channel":
            return [wanted.channel] * len(held)
        case "_watermark":
            return [wanted.watermark] * len(held)
        case "headers":
            return [_headers(message.tags) for message in held]
        case _:
            return [{tag: _text((message.tags or {}).get(tag)) for tag in wanted.tags} for message in held]


def _headers(tags: Tags | None) -> list[dict[str, object]] | None:
    return None if tags is None else [{"key": name, "value": _header(value)} for name, value in tags.items()]


def _header(value: TagValue) -> bytes | None:
    """Text and numbers as text; Kafka's headers are bytes."""
    if value is None or isinstance(value, bytes):
        return value
    return str(value).lower().encode() if isinstance(value, bool) else str(value).encode()


def _text(value: TagValue) -> str | None:
    found = _header(value)
    return None if found is None else found.decode(errors="replace")
