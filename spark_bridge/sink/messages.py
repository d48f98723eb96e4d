"""From a DataFrame's rows to a topic's messages: one record a row, with the columns of Spark's Kafka sink."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast

import pyarrow as pa
import xxhash
from pyarrow import compute

from ...runtime.clock import MAX_TIMESTAMP, HybridClock, compose, physical_ms
from ...runtime.errors import ConfigError, InvalidRows, InvalidSchema, MessageTooLarge
from ...runtime.log.record import Record, RecordType, stamp

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

VALUE: Final = "value"
COLUMNS: Final = ("key", VALUE, "headers", "timestamp", "topic")
MS_MAX: Final = physical_ms(MAX_TIMESTAMP)  # in the year 3084
_TEXT: Final = ("string", "binary")
_NO_TAGS: Final[Tags] = {}

Array: TypeAlias = "pa.Array[Any]"
pc: Any = compute
Tags: TypeAlias = "dict[str, bytes | str | None]"


class OutgoingMessage(NamedTuple):
    """One message as its channel will have it. `digest` identifies the row of the DataFrame."""

    channel: str
    timestamp: int
    payload: bytes
    digest: int = 0


@dataclass(frozen=True, slots=True)
class MessagePlan:
    """The index of each of `COLUMNS` that the DataFrame has."""

    places: dict[str, int]
    topics: tuple[str, ...]

    def targets(self, batch: pa.RecordBatch) -> set[str]:
        """The topics that rows of `batch` may go to. Raises `InvalidRows`."""
        if self.topics:
            return set(self.topics)
        column = cast(Array, batch.column(self.places["topic"]))
        if column.null_count:
            raise InvalidRows(f"column 'topic' is null in {column.null_count} rows", column="topic")
        return cast("set[str]", set(column.unique().to_pylist()))


def plan_messages(given: StructType, topics: tuple[str, ...]) -> MessagePlan:
    """Match the columns of a DataFrame with what a message has. Option `topic` goes before a column of that name.

    Raises `InvalidSchema`, which names the column, and `ConfigError` when nothing says which topic.
    """
    places: dict[str, int] = {}
    for place, column in enumerate(given.fields):
        name = column.name.lower()
        if name.startswith("_"):
            continue
        if name not in COLUMNS or name in places:
            what = "appears twice" if name in places else "is nothing that a message has"
            raise InvalidSchema(f"column {column.name!r} {what}: a topic takes {', '.join(COLUMNS)}")
        if not _fits(name, column.dataType):
            raise InvalidSchema(
                f"column {column.name!r} is {column.dataType.simpleString()}: key and value are string or binary, "
                "headers array<struct<key:string,value:binary>> or map<string,string>, timestamp is timestamp, topic "
                "is string"
            )
        places[name] = place
    if VALUE not in places:
        raise InvalidSchema("column 'value' is missing: it is what a message holds, as string or binary")
    if not topics and "topic" not in places:
        raise ConfigError(
            "nothing says where to write: option collection, option topic, or a column topic", key="topic"
        )
    if topics:
        places.pop("topic", None)
    return MessagePlan(places, topics)


def _fits(name: str, kind: DataType) -> bool:
    if name == "timestamp":
        return kind.typeName() in ("timestamp", "timestamp_ntz")
    if name == "headers":
        return kind.simpleString() in (
            "array<struct<key:string,value:binary>>",
            "array<struct<key:string,value:string>>",
            "map<string,string>",
            "map<string,binary>",
        )
    return kind.typeName().partition("(")[0] in (("string",) if name == "topic" else _TEXT)


class MessageMaker:
    """Makes the messages of one task. A message with a key goes to the channel of the key's hash, as in `MsgStream`;
    one without to each channel in turn. `limits` is the message size limit of each channel; channels may be added."""

    def __init__(self, plan: MessagePlan, producer: str, clock: HybridClock, limits: dict[str, int]) -> None:
        self._plan = plan
        self._producer = producer
        self._clock = clock
        self._limits = limits
        self._number = 0

    def messages(self, batch: pa.RecordBatch) -> Iterator[OutgoingMessage]:
        """The messages of the rows of `batch`. Raises `InvalidRows`, `MessageTooLarge`."""
        columns = {name: cast(Array, batch.column(place)) for name, place in self._plan.places.items()}
        values = bytes_of(columns[VALUE])
        if columns[VALUE].null_count:
            raise InvalidRows(f"column 'value' is null in row {values.index(None)}: a message needs one", column=VALUE)
        count = batch.num_rows
        keys = _keys(columns["key"]) if "key" in columns else [None] * count
        tags = _tags(columns["headers"]) if "headers" in columns else [_NO_TAGS] * count
        times = times_of(columns["timestamp"]) if "timestamp" in columns else [None] * count
        topics = self._topics(columns, keys)
        for key, value, tag, time, topic in zip(keys, values, tags, times, topics, strict=True):
            timestamp = self._clock.now() if time is None else time
            record = Record(
                RecordType.ROWS,
                producer=self._producer,
                pseq=self._number,
                key=key or b"",
                tags=tag,
                body=cast(bytes, value),
            )
            payload = stamp(record, timestamp, 0, 0)
            if len(payload) > self._limits[topic]:
                raise MessageTooLarge(
                    f"a message with the key {(key or b'')[:50]!r} takes {len(payload)} bytes; {topic} takes "
                    f"{self._limits[topic]}",
                    size=len(payload),
                    limit=self._limits[topic],
                )
            self._number += 1
            yield OutgoingMessage(topic, timestamp, payload, self._digest(key, cast(bytes, value), tag, time, topic))

    def _digest(self, key: bytes | None, value: bytes, tags: Tags, time: int | None, topic: str) -> int:
        """The digest of a row's own values: the channel of a row without a key depends on the other rows."""
        seed = xxhash.xxh3_64_intdigest(key) if key is not None else 0
        if tags or time is not None or not self._plan.topics:
            beside = (tags, time, () if self._plan.topics else topic)
            seed = xxhash.xxh3_64_intdigest(repr(beside).encode(), seed)
        return xxhash.xxh3_64_intdigest(value, seed)

    def _topics(self, columns: dict[str, Array], keys: Sequence[bytes | None]) -> Sequence[str]:
        topics = self._plan.topics
        if not topics:
            return cast("list[str]", columns["topic"].to_pylist())
        if len(topics) == 1:
            return topics * len(keys)
        return [
            topics[(xxhash.xxh3_64_intdigest(key) if key is not None else self._number + row) % len(topics)]
            for row, key in enumerate(keys)
        ]


def bytes_of(array: Array) -> list[bytes | None]:
    """Text as UTF-8, and bytes as they are."""
    return array.cast(pa.binary()).to_pylist()


def _keys(array: Array) -> list[bytes | None]:
    keys = bytes_of(array)
    if b"" in keys:
        row = keys.index(b"")
        raise InvalidRows(
            f"column 'key' is empty in row {row}: a record has a key or none, write null", column="key", row=row
        )
    return keys


def times_of(array: Array) -> list[int | None]:
    """Hybrid timestamps; a null is the time of writing. Raises `InvalidRows` for what is no time of a log: it begins a
    millisecond after 1970, since 0 says that there is no time."""
    ms: Any = pc.divide(array.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()), 1000)
    wrong = pc.or_(pc.less(ms, 1), pc.greater(ms, MS_MAX))
    if pc.any(wrong).as_py():
        row = cast(int, pc.index(wrong, True).as_py())
        raise InvalidRows(
            f"column 'timestamp' is {array.cast(pa.string())[row].as_py()} in row {row}: the times of a log go from "
            "the first millisecond after 1970 to the year 3084; write null for the time of writing",
            column="timestamp",
            row=row,
        )
    return [None if each is None else compose(each) for each in ms.to_pylist()]


def _tags(array: Array) -> list[Tags]:
    """Headers as tags. Raises `InvalidRows`, which names the row."""
    rows = cast("list[Any]", array.to_pylist())
    return [_tags_of(headers, row) if headers else _NO_TAGS for row, headers in enumerate(rows)]


def _tags_of(headers: list[Any], row: int) -> Tags:
    """Of an array of structs, or of the pairs of a map."""
    pairs = [
        (cast("dict[str, Any]", each)["key"], cast("dict[str, Any]", each)["value"]) if isinstance(each, dict) else each
        for each in headers
    ]
    tags = dict(pairs)
    if None in tags:
        raise InvalidRows(f"column 'headers' has a header without a key in row {row}", column="headers", row=row)
    if len(tags) < len(pairs):
        raise InvalidRows(
            f"column 'headers' has two headers of one name in row {row} ({', '.join(key for key, _ in pairs)[:200]}): "
            "a record's tags have one value each",
            column="headers",
            row=row,
        )
    return tags
