"""The columns of a DataFrame: the collection's, then what the log knows of each row.

| column | Spark type | meaning |
|---|---|---|
| `_ts` | bigint | log time of the row, a hybrid timestamp |
| `_time` | timestamp | its physical part, in milliseconds |
| `_op` | string | `insert`, `upsert` or `delete`; a delete has nothing but its key |
| `_channel` | string | the vchannel; all versions of a key come through one |
| `_watermark` | bigint | T of the cut the row was read up to: everything with `_ts` ≤ T has been read with it |
| `_cseq` | bigint | the record's number in its channel |
| `_row` | int | the row's index in its record |

Of two versions of a key the one with the higher `(_ts, _cseq, _row)` counts. With option `readChangeFeed` three columns
follow under Delta's names: `_change_type` (as `_op`), `_commit_version` (as `_ts`), `_commit_timestamp` (as `_time`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import pyarrow as pa

from ...runtime.errors import InvalidSchema
from ...runtime.rows.schema import CollectionSchema

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

ORDER: Final = ("_ts", "_cseq", "_row")
KEY_METADATA: Final = "tidewal.primaryKey"
DIM_METADATA: Final = "tidewal.dim"

TIME: Final = pa.timestamp("us", tz="UTC")

SYSTEM_COLUMNS: Final[dict[str, pa.DataType]] = {
    "_ts": pa.int64(),
    "_time": TIME,
    "_op": pa.string(),
    "_channel": pa.string(),
    "_watermark": pa.int64(),
    "_cseq": pa.int64(),
    "_row": pa.int32(),
}

CHANGE_COLUMNS: Final[dict[str, pa.DataType]] = {
    "_change_type": pa.string(),
    "_commit_version": pa.int64(),
    "_commit_timestamp": TIME,
}


def arrow_columns(schema: CollectionSchema, *, change_feed: bool = False) -> dict[str, pa.DataType]:
    """All columns of a collection's DataFrame, in the Arrow types that Spark takes: it knows no fixed-size lists. With
    `change_feed` also those of option `readChangeFeed`."""
    own = {each.name: _plain(each.arrow_type()) for each in schema.fields}
    return {**own, **SYSTEM_COLUMNS, **(CHANGE_COLUMNS if change_feed else {})}


def _plain(kind: pa.DataType) -> pa.DataType:
    return pa.list_(kind.value_type) if pa.types.is_fixed_size_list(kind) else kind


def spark_schema(schema: CollectionSchema, *, change_feed: bool = False) -> StructType:
    """The columns of `arrow_columns` as Spark's schema. Metadata marks the primary key, and the dimension of
    vectors."""
    from pyspark.sql.types import StructField, StructType

    metadata: dict[str, dict[str, Any]] = {each.name: {DIM_METADATA: each.dim} for each in schema.fields if each.dim}
    metadata[schema.primary_key] = {KEY_METADATA: True}
    known = arrow_columns(schema, change_feed=change_feed)
    return StructType([StructField(name, spark_type(kind), True, metadata.get(name)) for name, kind in known.items()])


def _fields(kind: pa.DataType) -> list[pa.Field[Any]]:
    return [cast("pa.StructType", kind).field(number) for number in range(kind.num_fields)]


def some_columns(known: StructType, asked: Sequence[str], what: str) -> StructType:
    """The columns named in `asked`, all where none is named. Raises `InvalidSchema` for one that `what` does not
    have."""
    from pyspark.sql.types import StructType

    there = {field.name: field for field in known.fields}
    for name in asked:
        if name not in there:
            raise InvalidSchema(f"{what} has no column {name!r}; it has {', '.join(there)}")
    return StructType([there[name] for name in asked]) if asked else known


def spark_type(kind: pa.DataType) -> DataType:
    """Spark's type for an Arrow type that it takes."""
    from pyspark.sql import types

    if pa.types.is_list(kind):
        return types.ArrayType(spark_type(kind.value_type))
    if pa.types.is_struct(kind):
        return types.StructType([types.StructField(each.name, spark_type(each.type)) for each in _fields(kind)])
    known: dict[pa.DataType, DataType] = {
        pa.bool_(): types.BooleanType(),
        pa.int8(): types.ByteType(),
        pa.int16(): types.ShortType(),
        pa.int32(): types.IntegerType(),
        pa.int64(): types.LongType(),
        pa.float32(): types.FloatType(),
        pa.float64(): types.DoubleType(),
        pa.string(): types.StringType(),
        pa.binary(): types.BinaryType(),
        TIME: types.TimestampType(),
    }
    return known[kind]


def chosen_columns(asked: StructType, known: StructType, what: str) -> tuple[str, ...]:
    """The names of the columns to read for `asked`, the schema that Spark works with: all that are `known`, or those
    that the user named. Raises `InvalidSchema` when it names another column or type."""
    names = tuple(field.name for field in asked.fields)
    own = some_columns(known, names, what)
    for field in asked.fields:
        kind = own[field.name].dataType
        if field.dataType != kind:
            raise InvalidSchema(
                f"column {field.name!r} is {kind.simpleString()}, not {field.dataType.simpleString()}: "
                "leave .schema(...) out, or correct it"
            )
    return names


def arrow_schema(schema: CollectionSchema, columns: Sequence[str]) -> pa.Schema:
    """The Arrow schema of `columns`."""
    known = arrow_columns(schema, change_feed=True)
    return pa.schema([(name, known[name]) for name in columns])
