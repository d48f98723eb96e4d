"""Rows of topics that others made: the columns of Spark's Kafka source, and nothing more.

`timestampType` is null: an entry does not say who gave it its time. On Pulsar, whose positions are no numbers, `_id`
takes the place of `offset`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

import pyarrow as pa

from ...runtime.clock import physical_ms
from ...runtime.log.wal import Entry, Headers, Tombstone
from .channel_range import ChannelRange
from .columns import TIME
from .topic_rows import HEADERS, TOPIC_COLUMNS

OFFSET_BYTES: Final = 8  # at the end of an id, where it is numbered
_COLUMNS: Final[dict[str, pa.DataType]] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "_id": pa.binary(),
    "timestamp": TIME,
    "timestampType": pa.int32(),
    HEADERS: TOPIC_COLUMNS[HEADERS],
}


def foreign_columns(*, numbered: bool, headers: bool = False) -> dict[str, pa.DataType]:
    """The columns in Arrow's types, of a log whose entries are `numbered` or not; with `headers` that of the headers,
    too."""
    without = {"_id" if numbered else "offset", *(() if headers else (HEADERS,))}
    return {name: kind for name, kind in _COLUMNS.items() if name not in without}


class ForeignRows:
    """The rows of `wanted`, with `columns`: each entry is one."""

    def __init__(self, wanted: ChannelRange, columns: Sequence[str] = ()) -> None:
        self._topic, _, number = wanted.channel.partition(":")
        self._partition = int(number or 0)
        self._columns = columns

    def count_entry(self, entry: Entry) -> int:
        """How many rows an entry gives."""
        return 1

    def pieces(self, batches: Iterable[list[Entry]]) -> Iterator[tuple[list[Entry], int, int]]:
        """The rows of entries, with their number and bytes."""
        for entries in batches:
            yield entries, len(entries), sum(len(entry.payload) for entry in entries)

    def to_arrow(self, held: Sequence[list[Entry]]) -> pa.RecordBatch:
        """The columns of some rows."""
        entries = list(chain.from_iterable(held))
        arrays = [pa.array(self._values(name, entries), type=_COLUMNS[name]) for name in self._columns]
        schema = pa.schema([(name, _COLUMNS[name]) for name in self._columns])
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _values(self, name: str, entries: Sequence[Entry]) -> Iterable[Any]:
        match name:
            case "key":
                return [entry.key for entry in entries]
            case "value":
                return [None if isinstance(entry.payload, Tombstone) else entry.payload for entry in entries]
            case "topic":
                return [self._topic] * len(entries)
            case "partition":
                return [self._partition] * len(entries)
            case "offset":
                return [int.from_bytes(entry.id[-OFFSET_BYTES:], "big") for entry in entries]
            case "_id":
                return [entry.id for entry in entries]
            case "timestamp":
                return [physical_ms(entry.timestamp) * 1000 for entry in entries]
            case "headers":
                return [_headers(entry.headers) for entry in entries]
            case _:
                return [None] * len(entries)


def _headers(headers: Headers) -> list[dict[str, object]] | None:
    """As Spark's Kafka source: null where there are none."""
    return [{"key": name, "value": value} for name, value in headers] or None
