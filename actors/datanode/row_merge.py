"""Put changed rows into a table of current rows: the files that hold a changed key are written again without it.

Tidewal writes these files itself, with Arrow. A merge of the Delta library stores text as Arrow's `string_view`, which
pyarrow, and so pandas and DuckDB, cannot compare with a text; and its files have no checksums.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction

from ...runtime.tables.table_store import TableLocation
from .delta_files import write_parquet

WRITTEN_BYTES: Final = 256 * 1024 * 1024  # in Arrow, of the rows that become one file


@dataclass(frozen=True, slots=True)
class _TouchedFile:
    """A file with rows of changed keys; `changed` marks them."""

    name: str
    size_bytes: int
    changed: pa.BooleanArray


def merge_rows(
    location: TableLocation, table: DeltaTable, changes: pa.Table, schema: pa.Schema, key: str
) -> list[AddAction | RemoveAction]:
    """Write the rows of `changes` that are no deletes, and the other rows of the files that hold one of its keys, as
    new durable files; return the actions that put these in the place of those.

    Each key is in `changes` once, and in the snapshot of `table` at most once. Reads the column of keys of all files.
    Holds `changes`, and beside it `WRITTEN_BYTES` and a row group.
    """
    touched = list(_touched(location, table, changes, schema, key))
    added = [
        write_parquet(location, rows, statistics=("_ts", key))
        for rows in _gathered(_merged(location, touched, changes, schema))
    ]
    now_ms = time.time_ns() // 1_000_000
    return [*added, *(RemoveAction(file.name, True, now_ms, file.size_bytes, {}) for file in touched)]


def _touched(
    location: TableLocation, table: DeltaTable, changes: pa.Table, schema: pa.Schema, key: str
) -> Iterator[_TouchedFile]:
    wanted = cast(Any, changes[key].combine_chunks())
    kind = cast(pa.DataType, schema.field(key).type)
    files = pa.table(table.get_add_actions(flatten=True)).select(["path", "size_bytes"]).to_pylist()
    for name, size_bytes in (cast("tuple[str, int]", tuple(file.values())) for file in files):
        with location.open(name) as stored:
            found = pq.read_table(stored, columns=[key], page_checksum_verification=True)[key]
        changed = pc.is_in(found.cast(kind), value_set=wanted)
        if pc.any(changed).as_py():
            yield _TouchedFile(name, size_bytes, changed)


def _merged(
    location: TableLocation, touched: list[_TouchedFile], changes: pa.Table, schema: pa.Schema
) -> Iterator[pa.Table]:
    """The rows of the new files, in pieces: those that change, then those that stay."""
    for batch in changes.filter(pc.field("_op") != "delete").select(schema.names).to_batches():
        yield pa.Table.from_batches([batch])
    for file in touched:
        start = 0
        with location.open(file.name) as stored, pq.ParquetFile(stored, page_checksum_verification=True) as opened:
            for group in range(opened.num_row_groups):
                rows = opened.read_row_group(group, columns=schema.names).select(schema.names).cast(schema)
                yield rows.filter(pc.invert(file.changed.slice(start, rows.num_rows)))
                start += rows.num_rows


def _gathered(pieces: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in tables of `WRITTEN_BYTES` or a piece more; none is empty."""
    gathered: list[pa.Table] = []
    size_bytes = 0
    for piece in pieces:
        if piece.num_rows:
            gathered.append(piece)
            size_bytes += piece.nbytes
        if size_bytes >= WRITTEN_BYTES:
            yield pa.concat_tables(gathered)
            gathered, size_bytes = [], 0
    if gathered:
        yield pa.concat_tables(gathered)
