"""From a DataFrame's columns to a collection's rows: the driver matches columns and fields before anything is written;
the tasks convert the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np
import pyarrow as pa
from pyarrow import compute

from ...runtime.errors import InvalidRows, InvalidSchema
from ...runtime.rows.row_codec import vectors
from ...runtime.rows.schema import FLOAT_TYPES, INTEGER_TYPES, OP_COLUMN, OPS, CollectionSchema, Field, FieldType
from ..scan.columns import DIM_METADATA

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

Array: TypeAlias = "pa.Array[Any]"
pc: Any = compute  # the stubs' overloads do not know of columns whose type shows at run time only

DEFAULT_OPERATION: Final = "upsert"
SHOWN_KEY: Final = 50  # characters of a row's key that an error shows

_OP_NAMES: Final = pa.array(list(OPS))
_FIELD_TYPES: Final[dict[str, FieldType]] = {
    "boolean": "bool",
    "byte": "int8",
    "short": "int16",
    "integer": "int32",
    "long": "int64",
    "float": "float",
    "double": "double",
    "string": "varchar",
    "timestamp": "timestamp",
    "timestamp_ntz": "timestamp",
    "date": "timestamp",
}


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Where each field's values come from: the index of a column, None for a field that is left null. `ops` is the
    index of the column `_op`; without it `operation` is that of all rows."""

    schema: CollectionSchema
    places: tuple[int | None, ...]
    operation: str
    ops: int | None


def plan_rows(given: StructType, schema: CollectionSchema, operation: str = "") -> RowPlan:
    """Match the columns of a DataFrame with the fields of a collection, names compared without regard to case.

    Columns that begin with `_` are the source's own and passed over, but for `_op`, which has the operation of each row
    unless `operation` is given. A nullable field may be missing. With the operation `delete` only the key counts.
    Values are converted as by the client: where nothing but the precision of floats is lost.

    Raises `InvalidSchema`, which names the column.
    """
    places = _places(given)
    ops = places.get(OP_COLUMN) if not operation else None
    if ops is not None and given.fields[ops].dataType.typeName() != "string":
        raise InvalidSchema(f"column {OP_COLUMN!r} must be a string: {', '.join(OPS)}")
    if ops is None:
        operation = operation or DEFAULT_OPERATION
    wanted = [field for field in schema.fields if operation != "delete" or field.name == schema.primary_key]
    known = {field.name.lower() for field in schema.fields}
    for name, place in places.items():
        if name not in known and not name.startswith("_"):
            raise InvalidSchema(
                f"collection {schema.name!r} has no field {given.fields[place].name!r}; it has "
                f"{', '.join(field.name for field in schema.fields)}: leave the column out, or rename it"
            )
    for field in wanted:
        _check(field, given, places.get(field.name.lower()), schema.name)
    names = {field.name for field in wanted}
    found = tuple(places.get(field.name.lower()) if field.name in names else None for field in schema.fields)
    return RowPlan(schema, found, operation, ops)


def schema_for(given: StructType, name: str, primary_key: str) -> CollectionSchema:
    """The schema of a new collection for the columns of a DataFrame, those that begin with `_` left out. All but the
    key and vectors may be null; a vector's dimension is known where the source has read it.

    Raises `InvalidSchema`, which names the column."""
    fields: list[Field] = []
    for column in given.fields:
        if column.name.startswith("_"):
            continue
        kind, dim = column.dataType.typeName().partition("(")[0], (column.metadata or {}).get(DIM_METADATA)
        if kind == "array" and dim:
            fields.append(Field(column.name, "float_vector", dim=int(dim)))
        elif column.name == primary_key and kind in ("byte", "short", "integer"):  # keys are int64
            fields.append(Field(column.name, "int64"))
        elif kind in _FIELD_TYPES:
            fields.append(Field(column.name, _FIELD_TYPES[kind], nullable=column.name != primary_key))
        else:
            raise InvalidSchema(
                f"column {column.name!r} is {column.dataType.simpleString()}, and no collection can be made for it: "
                "cast it, or create the collection with the client (vectors need a dimension)"
            )
    return CollectionSchema(name, tuple(fields), primary_key)


def _places(given: StructType) -> dict[str, int]:
    places: dict[str, int] = {}
    for place, column in enumerate(given.fields):
        name = column.name.lower()
        if name in places:
            raise InvalidSchema(f"two columns are called {column.name!r} (case does not count): rename one")
        places[name] = place
    return places


def _check(field: Field, given: StructType, place: int | None, collection: str) -> None:
    if place is None:
        if not field.nullable:
            raise InvalidSchema(
                f"column {field.name!r} is missing: it cannot be null in collection {collection!r} "
                f"({_described(field)})"
            )
        return
    kind = given.fields[place].dataType
    if not _converts(kind, field):
        raise InvalidSchema(
            f"column {given.fields[place].name!r} is {kind.simpleString()}, which does not convert to "
            f"{_described(field)} of collection {collection!r} without loss: cast it"
        )


def _converts(kind: DataType, field: Field) -> bool:
    integers, floats = {"byte", "short", "integer", "long"}, {"float", "double"}
    if kind.typeName() == "void":
        return field.nullable
    if field.type == "float_vector":
        item = getattr(kind, "elementType", None)
        return item is not None and kind.typeName() == "array" and item.typeName() in integers | floats
    allowed = {
        "bool": {"boolean"},
        "varchar": {"string"},
        "timestamp": {"timestamp", "timestamp_ntz", "date"},
        **dict.fromkeys(INTEGER_TYPES, integers),
        **dict.fromkeys(FLOAT_TYPES, integers | floats),
    }
    return kind.typeName().partition("(")[0] in allowed[field.type]


def _described(field: Field) -> str:
    return f"{field.type}({field.dim})" if field.dim else field.type


def log_rows(batch: pa.RecordBatch, plan: RowPlan) -> pa.RecordBatch:
    """The rows of `batch` as the log has them. Raises `InvalidRows`, which names the column and a row's key."""
    schema = plan.schema
    count = batch.num_rows
    key = cast(Array, batch.column(cast(int, plan.places[schema.fields.index(schema.key)])))
    if key.null_count:
        raise InvalidRows(f"the key {schema.primary_key!r} of {key.null_count} rows is null", column=schema.primary_key)
    arrays: list[Array] = []
    for field, place in zip(schema.fields, plan.places, strict=True):
        if place is None:
            arrays.append(cast(Array, pa.nulls(count, cast(Any, field.arrow_type()))))
        else:
            arrays.append(_converted(cast(Array, batch.column(place)), field, key))
    if plan.ops is None:
        arrays.append(pa.array(np.full(count, OPS[plan.operation], np.int8)))
    else:
        arrays.append(_op_codes(cast(Array, batch.column(plan.ops)), key))
    return pa.RecordBatch.from_arrays(arrays, schema=schema.row_arrow())


def _op_codes(names: Array, key: Array) -> Array:
    codes = pc.index_in(names.cast(pa.string()), value_set=_OP_NAMES)
    if codes.null_count:
        row = _first(codes.is_null())
        raise InvalidRows(
            f"{OP_COLUMN} of the row with the key {shown(key, row)} is {names[row].as_py()!r}; known are "
            f"{', '.join(OPS)}",
            column=OP_COLUMN,
        )
    return cast(Array, codes.cast(pa.int8()))


def _converted(array: Array, field: Field, key: Array) -> Array:
    target = field.arrow_type()
    if array.type == target:
        return array
    if field.dim is not None and not pa.types.is_null(array.type):
        wrong = pc.not_equal(pc.list_value_length(array), field.dim)
        if pc.any(wrong).as_py():
            row = _first(wrong)
            raise InvalidRows(
                f"column {field.name!r} of the row with the key {shown(key, row)} has {len(array[row])} floats, not "
                f"{field.dim}",
                column=field.name,
            )
    try:
        if pa.types.is_date(array.type):
            array = array.cast(pa.timestamp("us"))
        converted: Any = array.cast(target) if field.dim is None else vectors(array, field.dim)
    except (pa.ArrowException, OverflowError, ValueError) as error:
        raise InvalidRows(f"column {field.name!r} is not {_described(field)}: {error}", column=field.name) from None
    if field.type == "float" and pa.types.is_floating(array.type):
        overflown = pc.and_(pc.is_inf(converted), pc.is_finite(array))
        if pc.any(overflown).as_py():
            row = _first(overflown)
            raise InvalidRows(
                f"column {field.name!r} of the row with the key {shown(key, row)} is too large for a float",
                column=field.name,
            )
    return cast(Array, converted)


def _first(mask: Any) -> int:
    return int(pc.index(mask, True).as_py())


def shown(key: Array, row: int) -> str:
    """A row's key, for messages."""
    return repr(cast(object, key[row].as_py()))[:SHOWN_KEY]
