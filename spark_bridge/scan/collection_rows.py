"""Rows of a collection: from the records of its channels to Arrow batches in Spark's types. Imports no Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...runtime.clock import physical_ms
from ...runtime.errors import BadRecord, InvalidRequest
from ...runtime.log.record import Record, RecordType
from ...runtime.log.wal import Entry
from ...runtime.rows.row_codec import count_rows, decode_rows
from ...runtime.rows.schema import OP_COLUMN, OPS, CollectionSchema
from .channel_range import ChannelRange, records_of, warn_of_skipped
from .columns import TIME, arrow_schema

Array: TypeAlias = "pa.Array[Any]"

_OP_NAMES = pa.array(list(OPS))


class RecordRows(NamedTuple):
    """The rows of one record."""

    record: Record
    batch: pa.RecordBatch


class CollectionRows:
    """The rows of `wanted`, with `columns`: of each record only those are decoded, and `_op`."""

    def __init__(self, wanted: ChannelRange, columns: Sequence[str] = ()) -> None:
        assert wanted.schema is not None, "no range of a collection"
        self._wanted = wanted
        self._collection: CollectionSchema = wanted.schema
        self._columns = columns
        self._stored = self._collection.row_arrow()
        self._needed = [name for name in self._stored.names if name in columns or name == OP_COLUMN]
        self._vchannels = frozenset(wanted.vchannels)

    def wants(self, record: Record) -> bool:
        """Whether a record has rows of the range."""
        return record.type is RecordType.ROWS and record.vchannel in self._vchannels

    def count(self, record: Record) -> int:
        """How many rows a record has; 0 for one that the task will skip with a warning."""
        try:
            return count_rows(record.body, self._stored)
        except BadRecord:
            return 0

    def pieces(self, batches: Iterable[list[Entry]]) -> Iterator[tuple[RecordRows, int, int]]:
        """The decoded records of entries, in the order of the log, with their rows and bytes. A record that cannot be
        read is skipped with a warning; raises `InvalidRequest` for one of a later schema."""
        for records in records_of(self._wanted, batches, self.wants):
            for record in records:
                rows = self._decoded(record)
                if rows is not None:
                    yield RecordRows(record, rows), rows.num_rows, len(record.body)

    def _decoded(self, record: Record) -> pa.RecordBatch | None:
        if record.schema_version > self._collection.version:
            raise InvalidRequest(
                f"the schema of {self._collection.name!r} has changed (version {record.schema_version}, read as "
                f"{self._collection.version}): restart the query"
            )
        try:
            return decode_rows(record.body, self._stored, self._needed)
        except BadRecord as error:
            warn_of_skipped(self._wanted.channel, Entry(record.id, record.ts, b""), error)
            return None

    def to_arrow(self, held: Sequence[RecordRows]) -> pa.RecordBatch:
        """The columns of some records' rows."""
        table = pa.Table.from_batches([rows.batch for rows in held])
        arrays = [
            _spark_array(table[name]) if self._collection.find(name) else self._system_column(name, held, table)
            for name in self._columns
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(self._collection, self._columns))

    def _system_column(self, name: str, held: Sequence[RecordRows], table: pa.Table) -> Array:
        counts = [rows.batch.num_rows for rows in held]

        def repeated(values: Iterable[int]) -> Array:
            return pa.array(np.repeat(np.fromiter(values, np.int64, len(held)), counts))

        match name:
            case "_ts" | "_commit_version":
                return repeated(rows.record.ts for rows in held)
            case "_time" | "_commit_timestamp":
                return cast(Array, repeated(physical_ms(rows.record.ts) * 1000 for rows in held).view(TIME))
            case "_op" | "_change_type":
                return cast(Array, _OP_NAMES.take(_spark_array(table[OP_COLUMN])))
            case "_channel":
                places = {vchannel: place for place, vchannel in enumerate(self._wanted.vchannels)}
                return pa.array(self._wanted.vchannels).take(repeated(places[rows.record.vchannel] for rows in held))
            case "_watermark":
                return pa.array(np.full(sum(counts), self._wanted.watermark, np.int64))
            case "_cseq":
                return repeated(rows.record.cseq for rows in held)
            case "_row":
                return pa.array(_indexes_in_records(counts))
            case _:
                raise InvalidRequest(f"no column {name!r}")


def _spark_array(column: pa.ChunkedArray[Any]) -> Array:
    array: Array = column.combine_chunks()
    if pa.types.is_fixed_size_list(array.type):
        return cast(Array, array.cast(pa.list_(array.type.value_type)))
    return array


def _indexes_in_records(counts: Sequence[int]) -> npt.NDArray[np.int32]:
    """0, 1, … for each record anew."""
    starts = np.cumsum(counts) - counts
    return (np.arange(sum(counts)) - np.repeat(starts, counts)).astype(np.int32)
