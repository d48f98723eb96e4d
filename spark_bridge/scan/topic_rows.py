"""Rows of topics: from the entries of channels to Arrow batches with Kafka's columns, and some of Tidewal's.

An entry that holds a Tidewal record gives its key, body and tags; what the owner of a channel writes for its readers
(ticks, fences, heartbeats, producers) gives no row. Any other entry is a value as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from ...runtime.clock import physical_ms
from ...runtime.errors import BadRecord
from ...runtime.log.record import MAGIC, TIME_TYPES, Record, RecordType, Tags, TagValue, decode
from ...runtime.log.wal import Entry
from .channel_range import ChannelRange, records_of, warn_of_skipped
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

_CONTROL: Final = TIME_TYPES | {RecordType.HEARTBEAT, RecordType.LEDGER}
_FOREIGN: Final = frozenset({"length", "frame", "version"})  # reasons for which bytes are no record of Tidewal's


def topic_columns(*, headers: bool = False, tags: Sequence[str] = ()) -> dict[str, pa.DataType]:
    """The columns of topics in Arrow's types; those of `tags` (and with `headers` all, as Kafka's) come last."""
    found = {name: kind for name, kind in TOPIC_COLUMNS.items() if headers or name != HEADERS}
    return found | ({TAGS: pa.struct([(name, pa.string()) for name in tags])} if tags else {})


def topic_schema(columns: Mapping[str, pa.DataType]) -> StructType:
    """`columns` as Spark's schema."""
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(name, spark_type(kind)) for name, kind in columns.items()])


class TopicRow(NamedTuple):
    """One row. `ts` is 0 and `key` empty where there is none; `tags` are None where the entry is no record."""

    id: bytes
    ts: int
    key: bytes
    value: bytes | memoryview
    tags: Tags | None


class TopicRows:
    """The rows of `wanted`, with `columns`."""

    def __init__(self, wanted: ChannelRange, columns: Sequence[str] = ()) -> None:
        self._wanted = wanted
        self._columns = columns

    def wants(self, record: Record) -> bool:
        """Whether a record gives a row."""
        return record.type not in _CONTROL

    def count(self, record: Record) -> int:
        """How many rows a record gives."""
        return 1

    def count_entry(self, entry: Entry) -> int:
        """How many rows an entry of a channel without an owner gives; 0 for one that the task will skip."""
        try:
            return 0 if self._row(entry) is None else 1
        except BadRecord:
            return 0

    def pieces(self, batches: Iterable[list[Entry]]) -> Iterator[tuple[list[TopicRow], int, int]]:
        """The rows of entries, with their number and bytes. A damaged record is skipped with a warning."""
        for rows in self._rows_of_records(batches) if self._wanted.fences is not None else self._rows(batches):
            yield rows, len(rows), sum(len(row.value) for row in rows)

    def _rows_of_records(self, batches: Iterable[list[Entry]]) -> Iterator[list[TopicRow]]:
        for records in records_of(self._wanted, batches, self.wants):
            yield [_row_of(record) for record in records]

    def _rows(self, batches: Iterable[list[Entry]]) -> Iterator[list[TopicRow]]:
        for entries in batches:
            rows: list[TopicRow] = []
            for entry in entries:
                try:
                    row = self._row(entry)
                except BadRecord as error:
                    warn_of_skipped(self._wanted.channel, entry, error)
                else:
                    rows += [] if row is None else [row]
            yield rows

    def _row(self, entry: Entry) -> TopicRow | None:
        """The row of an entry; None when it has none. Raises `BadRecord` for a record that is damaged."""
        if entry.payload[: len(MAGIC)] == MAGIC:
            try:
                record = decode(entry.payload, entry.id)
                return _row_of(record, entry.timestamp) if self.wants(record) else None
            except BadRecord as error:
                if error.reason not in _FOREIGN:
                    raise
        return TopicRow(entry.id, entry.timestamp, b"", entry.payload, None)

    def to_arrow(self, held: Sequence[list[TopicRow]]) -> pa.RecordBatch:
        """The columns of some rows."""
        rows = list(chain.from_iterable(held))
        known = topic_columns(headers=True, tags=self._wanted.tags)
        arrays = [pa.array(self._values(name, rows), type=known[name]) for name in self._columns]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([(name, known[name]) for name in self._columns]))

    def _values(self, name: str, rows: Sequence[TopicRow]) -> Iterable[Any]:
        match name:
            case "key":
                return [row.key or None for row in rows]
            case "value":
                return [row.value for row in rows]
            case "timestamp" | "_time":
                return [physical_ms(row.ts) * 1000 if row.ts else None for row in rows]
            case "_ts":
                return [row.ts or None for row in rows]
            case "_id":
                return [row.id for row in rows]
            case "_channel":
                return [self._wanted.channel] * len(rows)
            case "_watermark":
                return [self._wanted.watermark] * len(rows)
            case "headers":
                return [_headers(row.tags) for row in rows]
            case _:
                return [{tag: _text((row.tags or {}).get(tag)) for tag in self._wanted.tags} for row in rows]


def _row_of(record: Record, timestamp: int = 0) -> TopicRow:
    body = record.body if isinstance(record.body, bytes | memoryview) else bytes(record.body)
    return TopicRow(record.id, record.ts or timestamp, record.key, body, record.tags)


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
