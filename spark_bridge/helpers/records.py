"""From rows back to records, on the executors: the bodies of `foreach_pack`. Does not import Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...runtime.errors import InvalidRequest
from ...runtime.rows.row_codec import encode_rows, vectors
from ...runtime.rows.schema import OP_COLUMN, OPS

NEEDED: Final = ("_ts", "_op", "_channel", "_cseq", "_row")
_NAMING: Final = ("_ts", "_channel", "_cseq", "_row")
COLUMNS: Final = "ts bigint, channel string, cseq bigint, id binary, key binary, body binary"

_ARROW: Final = pa.schema(
    [
        ("ts", pa.int64()),
        ("channel", pa.string()),
        ("cseq", pa.int64()),
        ("id", pa.binary()),
        ("key", pa.binary()),
        ("body", pa.binary()),
    ]
)
_OP_NAMES: Final = pa.array(list(OPS))


def encode_records(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """A row for each record that `batches` hold rows of, with its rows as a body of `schema`.

    Rows of a record that batches divide come together again. Raises `InvalidRequest` for rows that are not in the
    order of the log.
    """
    held: list[pa.RecordBatch] = []  # the rows of the last record, which the next batch may continue
    for batch in batches:
        rows = _as_in_the_log(batch, schema)
        slices = [rows.slice(start, count) for start, count in _records_in(rows)]
        if held and slices and _names(held[-1]) == _names(slices[0]):
            held.append(slices.pop(0))
        if slices:
            whole = [*([held] if held else []), *([part] for part in slices[:-1])]
            if whole:
                yield _encoded(whole, schema)
            held = [slices[-1]]
    if held:
        yield _encoded([held], schema)


def _as_in_the_log(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of `schema` in its types, then those that identify a record and a row's index in it."""
    columns: dict[str, Any] = {name: batch[name] for name in (*schema.names, *_NAMING)}
    for name, kind in zip(schema.names, schema.types, strict=True):
        if name == OP_COLUMN:
            columns[name] = cast(Any, pc).index_in(batch[name], value_set=_OP_NAMES).cast(kind)
        elif pa.types.is_fixed_size_list(kind):
            columns[name] = vectors(columns[name], kind.list_size)
        else:
            columns[name] = columns[name].cast(kind)
    return pa.RecordBatch.from_pydict(columns)


def _records_in(rows: pa.RecordBatch) -> Iterator[tuple[int, int]]:
    """The index of each record's first row, and the number of its rows."""
    if not rows.num_rows:
        return
    changes = _changes(rows, "_ts") | _changes(rows, "_cseq") | _changes(rows, "_channel")
    starts = np.flatnonzero(np.concatenate(([True], changes)))
    yield from zip(starts.tolist(), np.diff(np.append(starts, rows.num_rows)).tolist(), strict=True)


def _changes(rows: pa.RecordBatch, name: str) -> npt.NDArray[np.bool_]:
    """Whether each value of a column, but for the first one, is another than the one before."""
    column = cast(Any, rows[name])
    return cast(Any, pc).not_equal(column[1:], column[:-1]).to_numpy(zero_copy_only=False)


def _names(part: pa.RecordBatch) -> tuple[object, ...]:
    """The identity of a record. `_cseq` alone does not suffice: it begins anew with each owner of a channel."""
    return tuple(cast(Any, part[name][0]).as_py() for name in ("_ts", "_channel", "_cseq"))


def _encoded(records: list[list[pa.RecordBatch]], schema: pa.Schema) -> pa.RecordBatch:
    names = [pa.array(column) for column in zip(*(_names(slices[0]) for slices in records), strict=True)]
    bodies = pa.array([encode_rows(_body(slices, schema)) for slices in records], pa.binary())
    nothing = pa.nulls(len(records), pa.binary())
    return pa.RecordBatch.from_arrays([*names, nothing, nothing, bodies], schema=_ARROW)


def _body(slices: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    rows: pa.RecordBatch = slices[0] if len(slices) == 1 else cast(Any, pa).concat_batches(slices)
    if bool(np.any(np.diff(rows["_row"].to_numpy()) <= 0)):
        raise InvalidRequest("rows of one record are out of order: make packs before anything that shuffles")
    return rows.select(schema.names)
