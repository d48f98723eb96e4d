"""From a user's rows to the record batch that goes into the log, and how it is split by shard and by size.

A batch of the log has every column of the schema, in the schema's types and order, and last `_op` (int8, see
`runtime.rows.schema.Op`). The client converts rows to such a batch (`to_batch`), the Proxy, which trusts no client,
checks its values (`check_values`). All checks run on whole columns; only a batch that failed one is searched for the
row to name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import is_dataclass
from datetime import date, datetime, time
from functools import cache
from types import NoneType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import compute

from ..runtime.errors import InvalidRows, MessageTooLarge
from ..runtime.nearest import nearest
from ..runtime.rows.hashing import shard_of
from ..runtime.rows.schema import FLOAT_TYPES, INTEGER_TYPES, OP_COLUMN, OPS, CollectionSchema, Field, Op


class ArrowTable(Protocol):
    """A table that gives its columns to Arrow: of pyarrow (a batch, too), or a data frame of pandas or Polars. Said by
    this method, and not by pyarrow's classes, it has a type also where pyarrow has none, without its stubs."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


Columns: TypeAlias = Mapping[str, Sequence[object] | npt.NDArray[Any]]
Rows: TypeAlias = ArrowTable | Sequence[Mapping[str, object]] | Columns
"""Rows to write: a batch or table of pyarrow, a list of mappings, a mapping of columns (lists or arrays), or a data
frame of pandas or Polars."""

# The stubs' overloads do not know of columns whose type shows at run time only.
pc: Any = compute

ROWS_OVERHEAD_BYTES = 512  # of a column in an encoded batch, and of the batch, beside the data; more than any takes
SHOWN_KEY = 50  # characters of a row's key that an error shows

_PANDAS_INDEX = "__index_level_"  # begins the name of an index without one


class _Values(NamedTuple):
    """Python values for fields of a type: of which types they are, and how an error says that. Where `strict`, Arrow
    would take others, too, and change what they mean."""

    types: tuple[type, ...]
    words: str
    strict: bool = False


_VALUES: Final[Mapping[str, _Values]] = {
    "bool": _Values((bool, np.bool_), "True or False"),
    **dict.fromkeys(INTEGER_TYPES, _Values((int, np.integer), "a whole number, as int(value)", strict=True)),
    **dict.fromkeys(FLOAT_TYPES, _Values((int, float, np.number), "a number, as float(value)", strict=True)),
    "varchar": _Values((str,), "a text, as str(value)", strict=True),
    "timestamp": _Values((date, np.datetime64), "a datetime", strict=True),
    "float_vector": _Values((list, tuple, np.ndarray), "a list of numbers"),
}

_CONVERSION_ERRORS = (pa.ArrowException, OverflowError, TypeError, ValueError)


def to_batch(rows: Rows, schema: CollectionSchema, *, op: str | None) -> pa.RecordBatch:
    """Convert `rows` to one batch of the log, with the columns and types of `schema`.

    `op` is "insert", "upsert" or "delete" for all rows, or None when each row names its own in a column `_op` (or has
    its code, as the log does). A delete needs its key only: with `op="delete"` other columns are ignored, in a mixed
    batch they may be null. A nullable column may be left out and is null then. Numbers and timestamps are cast where
    nothing but the precision of floats is lost (int32 to int64), and so are other forms of the same (dictionaries,
    large and view types); timestamps without a zone are UTC. Columns already of the right type are not copied. The
    index of a pandas DataFrame is left out, unless it has a name.

    Raises `InvalidRows` (with `column` and, where one row is wrong, `row`, counted from 0): a missing or unknown
    column, a wrong type, a vector of the wrong length, an unknown name in `_op`. Which values there may be is for
    `check_values` to say.
    """
    columns, count = _columns_of(rows)
    ops = _ops(columns.pop(OP_COLUMN, None), op, count)
    for name in columns:
        if schema.find(name) is None:
            near = nearest(name, (each.name for each in schema.fields))
            raise InvalidRows(f"collection {schema.name!r} has no column {name!r}{near}", column=name)
    if op == "delete":
        columns = {name: column for name, column in columns.items() if name == schema.primary_key}
    arrays = [_column(field, columns.get(field.name), ops, field is schema.key) for field in schema.fields]
    return pa.RecordBatch.from_arrays([*arrays, ops], schema=schema.row_arrow())


def check_values(batch: pa.RecordBatch, schema: CollectionSchema) -> None:
    """Raise `InvalidRows` (with `column` and `row`, counted from 0) unless the log may have the rows of `batch`, which
    has the columns and types of `schema` and `_op`: for a null where none may be, NaN anywhere (null says "unknown"),
    an infinite float in a vector, an unknown code in `_op`."""
    ops = cast("pa.Array[Any]", batch.column(OP_COLUMN))
    _refuse_unknown_codes(ops)
    for field, array in zip(schema.fields, cast("list[pa.Array[Any]]", batch.columns), strict=False):  # `_op` is last
        if field.type in FLOAT_TYPES:
            _refuse_nan(field, array)
        elif field.type == "float_vector":
            _refuse_bad_floats(field, array)
        if array.null_count and not field.nullable:
            nulls = _needed(pc.is_null(array), ops, field is schema.key)
            if pc.any(nulls).as_py():
                _fail(field, _first(nulls), "is null and cannot be")


def split_by_shard(batch: pa.RecordBatch, schema: CollectionSchema, shards: int) -> list[pa.RecordBatch | None]:
    """The rows of each shard, in their order; None for a shard that gets none."""
    if shards == 1:
        return [batch if batch.num_rows else None]
    shard = shard_of(cast("pa.Array[Any]", batch.column(schema.primary_key)), shards)
    parts: list[pa.RecordBatch | None] = []
    for number in range(shards):
        rows = np.flatnonzero(shard == number)
        whole = len(rows) == batch.num_rows
        parts.append(None if not len(rows) else batch if whole else batch.take(cast(pa.Int64Array, pa.array(rows))))
    return parts


def split_by_bytes(batch: pa.RecordBatch, limit: int, key: str = "") -> list[pa.RecordBatch]:
    """The batch as consecutive slices that take at most `limit` bytes each as `encode_rows` writes them.

    Raises `MessageTooLarge(size, limit)` when a single row takes more than that; it is named by the column `key`.
    """
    if batch.nbytes + ROWS_OVERHEAD_BYTES * (batch.num_columns + 1) <= limit:
        return [batch]
    size = pa.ipc.get_record_batch_size(batch)
    if size <= limit:
        return [batch]
    if batch.num_rows == 1:
        shown = str(cast(object, batch.column(key)[0].as_py()))[:SHOWN_KEY] if key else ""
        which = f"the row of {key}={shown!r}" if key else "one row"
        raise MessageTooLarge(f"{which} takes {size} bytes, its message {limit} at most", size=size, limit=limit)
    parts = min(batch.num_rows, -(-size // limit))
    step = -(-batch.num_rows // parts)
    slices = (batch.slice(start, step) for start in range(0, batch.num_rows, step))
    return [piece for part in slices for piece in split_by_bytes(part, limit, key)]


def _columns_of(rows: Rows) -> tuple[dict[str, object], int]:
    """The columns by name, not yet typed, and the number of rows."""
    if isinstance(rows, Mapping):
        return _of_mapping(rows)
    if isinstance(rows, pa.RecordBatch | pa.Table) or hasattr(rows, "__arrow_c_stream__"):
        table = rows if isinstance(rows, pa.RecordBatch | pa.Table) else _table_of(cast("ArrowTable", rows))
        if len(set(table.schema.names)) < len(table.schema.names):
            raise InvalidRows("two columns have the same name")
        return dict(zip(table.schema.names, cast("list[object]", table.columns), strict=True)), table.num_rows
    return _of_list(cast("Sequence[Mapping[str, object]]", rows))


def _of_mapping(columns: Mapping[str, object]) -> tuple[dict[str, object], int]:
    _check_names(columns)
    lengths: dict[str, int] = {}
    for name, column in columns.items():
        if isinstance(column, str | bytes) or not isinstance(column, Sized):
            raise InvalidRows(
                f"column {name!r} is {column!r}, no list of values; for one row give a list of it, [{{…}}]", column=name
            )
        lengths[name] = len(column)
    if len(set(lengths.values())) > 1:
        raise InvalidRows(f"columns differ in length: {lengths}")
    return dict(columns), next(iter(lengths.values()), 0)


def _of_list(rows: Sequence[Mapping[str, object]]) -> tuple[dict[str, object], int]:
    if not isinstance(rows, Sized):  # pyright: ignore[reportUnnecessaryIsInstance] -- users are not type-checked
        kind, hint = type(cast(object, rows)).__name__, _mapping_hint(rows)
        if hint or not isinstance(rows, Iterable):
            raise InvalidRows(f"rows are a {kind}, no list of mappings{hint}")
        raise InvalidRows(f"rows are a {kind}, which can be read once only: make a list of it, list(rows)")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] -- as above
            kind, hint = type(cast(object, row)).__name__, _mapping_hint(row)
            raise InvalidRows(f"row {number} is a {kind}, not a mapping of columns{hint}", row=number)
    names = dict.fromkeys(name for row in rows for name in row)
    _check_names(names)
    return {name: [row.get(name) for row in rows] for name in names}, len(rows)


def _check_names(names: Iterable[object]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise InvalidRows(f"the column name {name!r} is a {type(name).__name__}, not a text")


def _mapping_hint(row: object) -> str:
    """The end of an error's sentence that says how to make a mapping of an object with fields; "" for another one."""
    if hasattr(row, "model_dump"):  # pydantic's
        return ": give row.model_dump() for each row"
    if is_dataclass(row):
        return ": give dataclasses.asdict(row) for each row"
    return ": give row._asdict() for each row" if hasattr(row, "_asdict") else ""


def _table_of(frame: ArrowTable) -> pa.Table:
    try:
        table = pa.table(cast(Any, frame))
    except _CONVERSION_ERRORS as error:
        raise InvalidRows(f"the {type(frame).__name__} does not convert to Arrow: {error}") from None
    return table.select([name for name in table.column_names if not name.startswith(_PANDAS_INDEX)])


@cache
def _op_names() -> pa.Array[Any]:
    # Not when this is imported: with its first array pyarrow imports pandas, where that is installed, and a command
    # that converts no rows would take half as long again.
    return cast("pa.Array[Any]", pa.array(list(OPS)))


def _ops(given: object, op: str | None, count: int) -> pa.Array[Any]:
    """The `_op` column as the log has it."""
    if op is not None:
        if given is not None:
            raise InvalidRows(f"rows of one {op} cannot have a column {OP_COLUMN}; use apply", column=OP_COLUMN)
        if op not in OPS:
            raise InvalidRows(f"unknown operation {op!r}; known: {', '.join(OPS)}", column=OP_COLUMN)
        return pa.array(np.full(count, OPS[op], dtype=np.int8))
    if given is None:
        if count:
            raise InvalidRows(f"each row must name its operation in a column {OP_COLUMN}", column=OP_COLUMN)
        return pa.array([], pa.int8())
    if isinstance(given, pa.Array) and cast("pa.Array[Any]", given).type == pa.int8():
        return cast("pa.Array[Any]", given)
    names = _typed(Field(OP_COLUMN, "varchar"), cast(object, given))
    codes = pc.index_in(names, value_set=_op_names())
    if codes.null_count:
        row = _first(codes.is_null())
        raise InvalidRows(
            f"row {row}: {OP_COLUMN} is {names[row].as_py()!r}; known: {', '.join(OPS)}", column=OP_COLUMN, row=row
        )
    return codes.cast(pa.int8())


def _refuse_unknown_codes(codes: pa.Array[Any]) -> None:
    known = pc.is_in(codes, value_set=pa.array([int(op) for op in Op], pa.int8()))
    if not pc.all(known, min_count=0).as_py():
        row = _first(pc.invert(known))
        raise InvalidRows(f"row {row}: unknown code in {OP_COLUMN}", column=OP_COLUMN, row=row)


def _column(field: Field, given: object, ops: pa.Array[Any], is_key: bool) -> pa.Array[Any]:
    """The column in the type of its field; one that is left out is null."""
    if given is not None:
        return _typed(field, given)
    array = cast("pa.Array[Any]", pa.nulls(len(ops), cast(Any, field.arrow_type())))
    if not field.nullable and pc.any(_needed(pc.is_null(array), ops, is_key)).as_py():
        raise InvalidRows(f"column {field.name!r} is missing", column=field.name)
    return array


def _needed(nulls: pa.Array[Any], ops: pa.Array[Any], is_key: bool) -> pa.Array[Any]:
    """Of the `nulls` of a column, those where a value must be: a delete needs its key only."""
    return nulls if is_key else pc.and_(nulls, pc.not_equal(ops, int(Op.DELETE)))


def _typed(field: Field, given: object) -> pa.Array[Any]:
    """The column in the type of its field, cast where that is safe."""
    target = field.arrow_type()
    array: Any
    if isinstance(given, pa.ChunkedArray):
        array = cast("pa.ChunkedArray[Any]", given).combine_chunks()
    elif isinstance(given, np.ndarray):
        array = _from_numpy(field, cast("np.ndarray[tuple[int, ...], np.dtype[np.generic]]", given))
    elif isinstance(given, pa.Array):
        array = cast("pa.Array[Any]", given)
    else:
        values = list(cast("Sequence[object]", given))
        return _converted(field, len(values), lambda start, end: _from_objects(field, values[start:end]))
    if array.type == target:
        return array
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    elif pa.types.is_run_end_encoded(array.type):
        array = pc.run_end_decode(array)
    if not _is_castable(array.type, field):
        raise InvalidRows(
            f"column {field.name!r} is {array.type}, not {_describe(field)}: {_cast_advice(array, field)}",
            column=field.name,
        )
    if field.type == "float_vector":
        _refuse_wrong_length(field, array)
    return _converted(field, len(array), lambda start, end: _cast(array.slice(start, end - start), target))


def _from_objects(field: Field, values: list[object]) -> pa.Array[Any]:
    """Python values as an array. What Arrow would convert without a word, but Milvus' types tell apart, is refused."""
    wanted = _VALUES[field.type]
    kinds = set(map(type, values)) - {NoneType}
    wrong = [kind for kind in kinds if not issubclass(kind, wanted.types) or (kind is bool and field.type != "bool")]
    words = "a text, as value.decode()" if field.type == "varchar" and wrong[:1] == [bytes] else wanted.words
    misfit = TypeError(f"{wrong[0].__name__} does not fit; give {words}") if wrong else None
    if misfit and wanted.strict:
        raise misfit
    try:
        if date in kinds:
            values = [datetime.combine(each, time()) if type(each) is date else each for each in values]
        if np.datetime64 in kinds:  # Arrow takes these without a zone only
            values = [_in_unit_of_arrow(each) if type(each) is np.datetime64 else each for each in values]
            return _cast(cast("pa.Array[Any]", pa.array(cast(Any, values))), field.arrow_type())
        if field.type == "float":
            return _cast(
                pa.array(values, pa.float64(), from_pandas=False), field.arrow_type()
            )  # it refuses what would be infinite
        return pa.array(values, field.arrow_type(), from_pandas=False)
    except _CONVERSION_ERRORS as error:
        raise misfit or error from None


def _cast_advice(array: Any, field: Field) -> str:
    """What to do about a column whose type means another thing than that of its field."""
    target = field.arrow_type()
    try:
        array.slice(0, 1).cast(target)
    except _CONVERSION_ERRORS:
        return f"give {_VALUES[field.type].words} in each row"
    named = {
        "timestamp": "pyarrow.timestamp('us', 'UTC')",
        "float_vector": f"pyarrow.list_(pyarrow.float32(), {field.dim})",
    }
    return f"cast it first, in Arrow with .cast({named.get(field.type, repr(str(target)))})"


def _from_numpy(field: Field, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> pa.Array[Any]:
    try:
        if values.ndim == 2:
            return cast("pa.Array[Any]", pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1]))
        return pa.array(_in_unit_of_arrow(values) if values.dtype.kind == "M" else values)
    except _CONVERSION_ERRORS as error:
        raise InvalidRows(f"column {field.name!r} is not {field.type}: {error}", column=field.name) from None


def _in_unit_of_arrow(times: Any) -> Any:
    """Times of NumPy, one or an array, in seconds where their unit is one that Arrow does not have, such as the day."""
    unit = np.datetime_data(times.dtype)[0]
    return times if unit in ("s", "ms", "us", "ns") else times.astype("datetime64[s]")


def _is_castable(kind: pa.DataType, field: Field) -> bool:
    """Whether a cast keeps the meaning. Arrow would also turn 7 into "7" and "7" into 7."""
    types = pa.types
    if types.is_null(kind):
        return True
    if field.type == "varchar":
        return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    if field.type == "timestamp":
        return types.is_timestamp(kind) or types.is_date(kind)
    if field.type == "float_vector":
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        item = cast("pa.ListType[Any]", kind).value_type if is_list else kind
        return is_list and (types.is_floating(item) or types.is_integer(item))
    return field.type != "bool" and (types.is_integer(kind) or types.is_floating(kind))


def _cast(array: pa.Array[Any], target: pa.DataType) -> pa.Array[Any]:
    """A safe cast. Narrowing a float may lose precision but not its magnitude."""
    if pa.types.is_date(array.type):
        array = array.cast(pa.timestamp("us"))
    cast_array = array.cast(target)
    if target == pa.float32() and pa.types.is_floating(array.type):
        overflown = pc.and_(pc.is_inf(cast_array), pc.is_finite(array))
        if pc.any(overflown).as_py():
            raise ValueError("a value is too large for a float")
    return cast_array


def _converted(field: Field, count: int, convert: Callable[[int, int], pa.Array[Any]]) -> pa.Array[Any]:
    """The conversion of all rows; when that fails, the first row that fails is looked for by halving."""
    try:
        return convert(0, count)
    except _CONVERSION_ERRORS:
        good, bad = 0, count  # rows below `good` convert; somewhere below `bad` one does not
    reason = "does not convert"
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            convert(good, middle)
            good = middle
        except _CONVERSION_ERRORS:
            bad = middle
    try:
        convert(good, bad)
    except _CONVERSION_ERRORS as error:
        reason = str(error)
    raise InvalidRows(
        f"row {good}: column {field.name!r} is not {_describe(field)}: {reason}", column=field.name, row=good
    )


def _describe(field: Field) -> str:
    return f"{field.type}({field.dim})" if field.dim else field.type


def _refuse_wrong_length(field: Field, array: pa.Array[Any]) -> None:
    if pa.types.is_null(array.type):
        return
    wrong = pc.not_equal(pc.list_value_length(array), field.dim)
    if pc.any(wrong).as_py():
        row = _first(wrong)
        _fail(field, row, f"has {len(array[row])} floats, not {field.dim}")


def _refuse_nan(field: Field, array: pa.Array[Any]) -> None:
    dtype = np.float32 if field.type == "float" else np.float64
    end = array.offset + len(array)  # the buffer may go on behind it, with part of a number
    values = np.frombuffer(cast(bytes, array.buffers()[1] or b""), dtype=dtype, count=end)[array.offset :]
    # Slots under a null may hold anything, NaN too: only a NaN that shows up here is worth the exact look.
    if len(values) and np.isnan(values.min()):
        nans = pc.is_nan(array)
        if pc.any(nans).as_py():
            _fail(field, _first(nans), "is NaN; use null for a value that is not known")


def _refuse_bad_floats(field: Field, array: pa.Array[Any]) -> None:
    floats = cast("pa.Array[Any]", cast(Any, array).flatten())  # of the rows that are not null
    if not floats.null_count:
        finite = np.isfinite(floats.to_numpy(zero_copy_only=True))
        if finite.all():
            return
    else:
        finite = pc.is_finite(floats).fill_null(False).to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False))
    row = int(rows[int(np.argmin(finite)) // cast(int, field.dim)])
    _fail(field, row, "holds a null, NaN or infinite float")


def _first(mask: pa.Array[Any]) -> int:
    return int(pc.index(mask, True).as_py())


def _fail(field: Field, row: int, what: str) -> None:
    raise InvalidRows(f"row {row}: column {field.name!r} {what}", column=field.name, row=row)
