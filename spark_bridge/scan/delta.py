"""Rows of a collection's history: from the Parquet files of a DataNode's table to Arrow batches in Spark's types, the
same that `collection_rows` makes of the log. Imports neither Spark nor Delta.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...runtime.clock import LOGICAL_BITS
from ...runtime.errors import CorruptLog, Unavailable
from ...runtime.rows.schema import CollectionSchema
from ...runtime.tables.table_store import table_at
from .batches import BATCH_BYTES, BATCH_ROWS, arrow_batches
from .collection_rows import Array
from .columns import TIME, arrow_schema

# Columns of a DataFrame that have another name in the table, or are made of one there (docs/delta.md).
_STORED_AS: Final = {
    "_time": "_ts",
    "_commit_timestamp": "_ts",
    "_commit_version": "_ts",
    "_watermark": "_ts",
    "_change_type": "_op",
    "_channel": "_vchannel",
}


@dataclass(frozen=True, slots=True)
class StoredRange:
    """What one task reads of the table at `table`: of the rows in its `files` those with
    `begin_ts < _ts <= end_ts`, of all vchannels or of those that are named. Complete in itself, and it names the files
    of one version of the table: reading it again gives the same rows."""

    table: str
    files: tuple[str, ...]
    begin_ts: int
    end_ts: int
    schema: CollectionSchema
    vchannels: tuple[str, ...] = ()


def stored_batches(wanted: StoredRange, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of `wanted` in batches of at most about 64 k rows or 16 MiB, of which two are in memory at a time.

    Raises `CorruptLog` when a file is gone or damaged, `Unavailable` when it cannot be read now.
    """
    schema = arrow_schema(wanted.schema, columns)
    rows = stored_rows(wanted, [_STORED_AS.get(name, name) for name in columns])
    pieces = ((each, each.num_rows, each.nbytes) for each in rows)
    return arrow_batches(pieces, lambda held: _spark_batch(held, schema, wanted.end_ts))


def stored_rows(wanted: StoredRange, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of `wanted` as they are in the table, with `columns` and those that select rows; a column that a file
    does not have yet is null. Row groups of other times are not read."""
    chosen_by = ["_ts", "_vchannel"] if wanted.vchannels else ["_ts"]
    needed = list(dict.fromkeys([*columns, *chosen_by]))
    location = table_at(wanted.table)
    for name in wanted.files:
        with (
            _errors_of(f"{location}/{name}"),
            location.open(name) as stored,
            pq.ParquetFile(stored, page_checksum_verification=True) as file,
        ):
            there = set(file.schema_arrow.names)
            for group in range(file.metadata.num_row_groups):
                if not _overlaps(file.metadata.row_group(group), wanted):
                    continue
                for batch in file.iter_batches(
                    _rows_at_once(file.metadata.row_group(group)),
                    row_groups=[group],
                    columns=[name for name in needed if name in there],
                    use_threads=False,  # Spark gives each task one core
                ):
                    rows = _wanted_of(batch, wanted)
                    if rows.num_rows:
                        yield rows


def _overlaps(group: pq.RowGroupMetaData, wanted: StoredRange) -> bool:
    for number in range(group.num_columns):
        column = group.column(number)
        if column.path_in_schema == "_ts" and column.statistics is not None and column.statistics.has_min_max:
            low, high = cast("tuple[int, int]", (column.statistics.min, column.statistics.max))
            return low <= wanted.end_ts and high > wanted.begin_ts
    return True


def _rows_at_once(group: pq.RowGroupMetaData) -> int:
    bytes_per_row = max(1, group.total_byte_size // max(1, group.num_rows))
    return max(1, min(BATCH_ROWS, BATCH_BYTES // bytes_per_row))


def _wanted_of(batch: pa.RecordBatch, wanted: StoredRange) -> pa.RecordBatch:
    ts = cast("npt.NDArray[np.int64]", batch.column("_ts").to_numpy())
    marks = (ts > wanted.begin_ts) & (ts <= wanted.end_ts)
    if wanted.vchannels:
        ours = cast(Array, pc.is_in(batch.column("_vchannel"), pa.array(wanted.vchannels)))
        marks &= cast("npt.NDArray[np.bool_]", ours.to_numpy(zero_copy_only=False))
    return batch if marks.all() else batch.filter(pa.array(marks))


def _spark_batch(held: Sequence[pa.RecordBatch], schema: pa.Schema, watermark: int) -> pa.RecordBatch:
    """The columns of `schema`. Files of before a column was added do not have it."""
    table = pa.concat_tables([pa.Table.from_batches([rows]) for rows in held], promote_options="default")
    arrays: list[Array] = []
    for name in schema.names:
        stored = _STORED_AS.get(name, name)
        kind = cast(pa.DataType, schema.field(name).type)
        if stored not in table.column_names:
            arrays.append(cast(Array, pa.nulls(table.num_rows).cast(kind)))
            continue
        chunks = table[stored]
        column = cast(Array, chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks())  # this one copies
        made = _MADE[name](column, watermark) if name in _MADE else column
        arrays.append(cast(Array, made.cast(kind)))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _time(ts: Array, watermark: int) -> Array:
    microseconds = (cast("npt.NDArray[np.int64]", ts.to_numpy()) >> LOGICAL_BITS) * 1000
    return cast(Array, pa.array(microseconds).view(TIME))


def _constant(ts: Array, watermark: int) -> Array:
    return pa.array(np.full(len(ts), watermark, np.int64))


_MADE: Final[dict[str, Callable[[Array, int], Array]]] = {
    "_time": _time,
    "_commit_timestamp": _time,
    "_watermark": _constant,
}


@contextmanager
def _errors_of(path: str) -> Generator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptLog(
            f"{path} is gone. Either the table was cleaned up since this read was planned: start it again. Or this "
            "machine does not see the folder in option history, which must have the same path for every executor",
            path=path,
        ) from error
    except pa.ArrowInvalid as error:
        raise CorruptLog(f"{path} cannot be read: {error}", path=path) from error
    except OSError as error:
        raise Unavailable(f"{path}: {error}", path=path) from error
