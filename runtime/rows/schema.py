"""The schema of a collection: its fields in Milvus' terms, their Arrow types, and the rules for a schema.

Arrow columns are always declared nullable: a delete is a row that has nothing but its key. `Field.nullable` says which
fields of a whole row may be null; that is checked where rows are accepted (`actors/rows.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast, get_args

from ..arguments import checked, checked_fields
from ..errors import BadRecord, InvalidSchema, check_version

if TYPE_CHECKING:
    import pyarrow as pa  # where a type is asked for: catalogs are read without Arrow

FieldType: TypeAlias = Literal[
    "bool", "int8", "int16", "int32", "int64", "float", "double", "varchar", "timestamp", "float_vector"
]

FIELD_TYPES: Final[frozenset[str]] = frozenset(get_args(FieldType))
INTEGER_TYPES: Final = frozenset({"int8", "int16", "int32", "int64"})
FLOAT_TYPES: Final = frozenset({"float", "double"})
KEY_TYPES: Final = frozenset({"int64", "varchar"})

MAX_FIELDS: Final = 256
MAX_DIMENSION: Final = 32_768
WIRE_VERSION: Final = 1

OP_COLUMN: Final = "_op"

# Keywords of the filter language: a filter could never name a field called like this.
KEYWORDS: Final = frozenset({"and", "or", "not", "in", "like", "is", "null", "true", "false"})

_name_rule = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")


@cache
def _arrow_types() -> dict[str, pa.DataType]:
    import pyarrow as pa

    return {
        "bool": pa.bool_(),
        "int8": pa.int8(),
        "int16": pa.int16(),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "float": pa.float32(),
        "double": pa.float64(),
        "varchar": pa.string(),
        "timestamp": pa.timestamp("us", tz="UTC"),
    }


class Op(IntEnum):
    """The operation of a row in the log, as stored in its `_op` column (int8)."""

    INSERT = 0
    UPSERT = 1
    DELETE = 2


OPS: Final[Mapping[str, Op]] = {op.name.lower(): op for op in Op}


@checked_fields(InvalidSchema)
@dataclass(frozen=True, slots=True)
class Field:
    """One column: `dim` is the number of floats in a `float_vector`, None for all other types."""

    name: str
    type: FieldType
    nullable: bool = False
    dim: int | None = None

    def arrow_type(self) -> pa.DataType:
        """The Arrow type of the column; a vector is a fixed-size list of float32."""
        if self.type == "float_vector":
            import pyarrow as pa

            return pa.list_(pa.float32(), self.dim or 0)
        return _arrow_types()[self.type]


@checked_fields(InvalidSchema)
@dataclass(frozen=True)
class CollectionSchema:
    """Name, fields and primary key of a collection; `version` grows when fields are added.

    Raises `InvalidSchema` when made from fields that break a rule, so a schema that exists is a valid one. `fields` may
    be any sequence, and is a tuple then.
    """

    name: str
    fields: Sequence[Field]
    primary_key: str
    version: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", tuple(self.fields))
        _check(self)

    @cached_property
    def _by_name(self) -> dict[str, Field]:
        return {each.name: each for each in self.fields}

    @cached_property
    def _arrow(self) -> pa.Schema:
        import pyarrow as pa

        return pa.schema([pa.field(each.name, each.arrow_type()) for each in self.fields])

    @cached_property
    def _row_arrow(self) -> pa.Schema:
        import pyarrow as pa

        return self._arrow.append(pa.field(OP_COLUMN, pa.int8()))

    def arrow(self) -> pa.Schema:
        """The Arrow schema of the fields, in their order."""
        return self._arrow

    def arrow_of(self, names: Sequence[str]) -> pa.Schema:
        """The Arrow schema of some of the fields, in the order of `names`."""
        import pyarrow as pa

        return pa.schema([(name, self._by_name[name].arrow_type()) for name in names])

    def row_arrow(self) -> pa.Schema:
        """The Arrow schema of rows in the log: all fields, then `_op`."""
        return self._row_arrow

    def find(self, name: str) -> Field | None:
        """The field of that name, None when there is none."""
        return self._by_name.get(name)

    @property
    def key(self) -> Field:
        """The field of the primary key."""
        return self._by_name[self.primary_key]

    def to_wire(self) -> dict[str, object]:
        """The wire form of the schema: a map that msgpack can encode."""
        return {
            "v": WIRE_VERSION,
            "name": self.name,
            "version": self.version,
            "primary_key": self.primary_key,
            "fields": [[each.name, each.type, each.nullable, each.dim] for each in self.fields],
        }

    @staticmethod
    def from_wire(wire: Mapping[str, object]) -> CollectionSchema:
        """The schema of a wire form that `to_wire` returned.

        Raises `FormatTooNew` when the wire form is a newer Tidewal's, `BadRecord` when it is malformed, `InvalidSchema`
        when its content breaks a rule.
        """
        check_version("a schema", wire.get("v"), WIRE_VERSION)
        name, primary_key, version = (wire.get(part) for part in ("name", "primary_key", "version"))
        rows = wire.get("fields")
        if not (isinstance(name, str) and isinstance(primary_key, str) and isinstance(version, int)):
            raise BadRecord("a schema needs name, primary_key and version", reason="schema")
        if not isinstance(rows, list | tuple):
            raise BadRecord("a schema needs a list of fields", reason="schema")
        fields = tuple(_field_from_wire(row) for row in cast("Sequence[object]", rows))
        return CollectionSchema(name, fields, primary_key, version)

    @staticmethod
    @checked
    def from_arrow(name: str, schema: pa.Schema, primary_key: str) -> CollectionSchema:
        """The collection schema for data of an Arrow schema. The key and vectors become not-null, every other field
        is nullable as Arrow says. Types widen where Milvus has no such type (uint8 to int16, dates to timestamps).

        Raises `InvalidSchema` for types that no field can hold, and for broken rules.
        """
        fields = [_field_from_arrow(cast("pa.Field[Any]", schema.field(name)), primary_key) for name in schema.names]
        return CollectionSchema(name, tuple(fields), primary_key)


def _check(schema: CollectionSchema) -> None:
    _check_name("collection", schema.name)
    if not 1 <= len(schema.fields) <= MAX_FIELDS:
        raise InvalidSchema(f"a collection has 1 to {MAX_FIELDS} fields, not {len(schema.fields)}")
    seen: set[str] = set()
    for each in schema.fields:
        _check_field(each)
        # Delta and Spark compare names without regard to case.
        if each.name.lower() in seen:
            raise InvalidSchema(f"field {each.name!r} appears twice (names that differ in case only count as equal)")
        seen.add(each.name.lower())
    key = next((each for each in schema.fields if each.name == schema.primary_key), None)
    if key is None:
        raise InvalidSchema(f"the primary key {schema.primary_key!r} is not among the fields")
    if key.type not in KEY_TYPES:
        raise InvalidSchema(f"the primary key {key.name!r} is {key.type}; it must be int64 or varchar")
    if key.nullable:
        raise InvalidSchema(f"the primary key {key.name!r} cannot be nullable")
    if schema.version < 1:
        raise InvalidSchema(f"schema versions count from 1, not {schema.version}")


def _check_name(what: str, name: str) -> None:
    if not _name_rule.fullmatch(name):
        raise InvalidSchema(f"{what} name {name!r}: use a letter or _, then at most 254 letters, digits or _")


def _check_field(each: Field) -> None:
    _check_name("field", each.name)
    if each.name.startswith("_"):
        raise InvalidSchema(f"field name {each.name!r}: names that begin with _ are reserved")
    if each.name.lower() in KEYWORDS:
        raise InvalidSchema(f"field name {each.name!r} is a keyword of the filter language")
    if each.type not in FIELD_TYPES:
        raise InvalidSchema(f"field {each.name!r} has unknown type {each.type!r}; known: {sorted(FIELD_TYPES)}")
    if each.type != "float_vector":
        if each.dim is not None:
            raise InvalidSchema(f"field {each.name!r} is {each.type}: only a float_vector has a dim")
        return
    if each.dim is None or not 1 <= each.dim <= MAX_DIMENSION:
        raise InvalidSchema(f"vector {each.name!r} needs a dim of 1 to {MAX_DIMENSION}, not {each.dim}")
    if each.nullable:
        raise InvalidSchema(f"vector {each.name!r} cannot be nullable")


def _field_from_wire(row: object) -> Field:
    parts = list(cast("Sequence[object]", row)) if isinstance(row, list | tuple) else []
    if len(parts) != 4:
        raise BadRecord("a field is [name, type, nullable, dim]", reason="schema")
    name, kind, nullable, dim = parts
    if not (isinstance(name, str) and isinstance(kind, str) and isinstance(nullable, bool)):
        raise BadRecord("a field is [str, str, bool, int or nil]", reason="schema")
    if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool)):
        raise BadRecord(f"dim of field {name!r} is no integer", reason="schema")
    return Field(name, cast(FieldType, kind), nullable, dim)


def _field_from_arrow(each: pa.Field[Any], primary_key: str) -> Field:
    kind = _type_from_arrow(each)
    nullable = each.nullable and each.name != primary_key and kind != "float_vector"
    return Field(each.name, kind, nullable, each.type.list_size if kind == "float_vector" else None)


def _type_from_arrow(each: pa.Field[Any]) -> FieldType:
    import pyarrow as pa

    kind = each.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    for name, arrow in _arrow_types().items():
        if kind == arrow:
            return cast(FieldType, name)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "varchar"
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return "timestamp"
    if pa.types.is_fixed_size_list(kind) and pa.types.is_floating(kind.value_type):
        return "float_vector"
    widened: dict[pa.DataType, FieldType] = {pa.uint8(): "int16", pa.uint16(): "int32", pa.uint32(): "int64"}
    if kind in widened:
        return widened[kind]
    raise InvalidSchema(f"field {each.name!r} has Arrow type {kind}, which no field type can hold")
