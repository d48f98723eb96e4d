"""The rules of a schema, its wire form and its Arrow form."""

from __future__ import annotations

import msgpack
import pyarrow as pa
import pytest

from tidewal.runtime.errors import BadRecord, FormatTooNew, InvalidSchema
from tidewal.runtime.rows.schema import MAX_FIELDS, CollectionSchema, Field

KEY = Field("id", "int64")
FULL = CollectionSchema(
    "things",
    (
        Field("id", "varchar"),
        Field("flag", "bool", nullable=True),
        Field("tiny", "int8"),
        Field("small", "int16"),
        Field("medium", "int32"),
        Field("big", "int64"),
        Field("ratio", "float"),
        Field("value", "double"),
        Field("seen", "timestamp", nullable=True),
        Field("vector", "float_vector", dim=8),
    ),
    "id",
    version=3,
)


def test_wire_round_trip_through_msgpack() -> None:
    assert CollectionSchema.from_wire(msgpack.unpackb(msgpack.packb(FULL.to_wire()))) == FULL


def test_arrow_types() -> None:
    assert FULL.arrow().types == [
        pa.string(),
        pa.bool_(),
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.float32(),
        pa.float64(),
        pa.timestamp("us", tz="UTC"),
        pa.list_(pa.float32(), 8),
    ]
    assert FULL.row_arrow().names == [*FULL.arrow().names, "_op"]


def test_from_its_own_arrow_schema() -> None:
    again = CollectionSchema.from_arrow("things", FULL.arrow(), "id")
    assert again.arrow() == FULL.arrow()
    assert not again.key.nullable
    assert again.find("vector") == Field("vector", "float_vector", dim=8)
    assert again.find("absent") is None


def test_from_foreign_arrow_types() -> None:
    foreign = pa.schema(
        {
            "id": pa.large_string(),
            "a": pa.uint8(),
            "b": pa.uint32(),
            "c": pa.timestamp("ns"),
            "d": pa.date32(),
            "e": pa.dictionary(pa.int8(), pa.string()),
            "f": pa.list_(pa.float64(), 2),
        }
    )
    schema = CollectionSchema.from_arrow("c", foreign, "id")
    types = [each.type for each in schema.fields]
    assert types == ["varchar", "int16", "int64", "timestamp", "timestamp", "varchar", "float_vector"]
    with pytest.raises(InvalidSchema, match="decimal"):
        CollectionSchema.from_arrow("c", foreign.append(pa.field("g", pa.decimal128(5, 2))), "id")


@pytest.mark.parametrize(
    ("fields", "key", "message"),
    [
        ((), "id", "1 to 256"),
        ((KEY, *(Field(f"f{i}", "bool") for i in range(MAX_FIELDS))), "id", "1 to 256"),
        ((KEY,), "other", "not among"),
        ((Field("id", "double"),), "id", "int64 or varchar"),
        ((Field("id", "int64", nullable=True),), "id", "nullable"),
        ((KEY, Field("_ts", "int64")), "id", "reserved"),
        ((KEY, Field("1st", "int64")), "id", "field name"),
        ((KEY, Field("x" * 256, "int64")), "id", "field name"),
        ((KEY, Field("in", "int64")), "id", "filter language"),
        ((KEY, KEY), "id", "twice"),
        ((KEY, Field("ID", "int64")), "id", "twice"),
        ((KEY, Field("v", "float_vector")), "id", "dim"),
        ((KEY, Field("v", "float_vector", dim=32_769)), "id", "dim"),
        ((KEY, Field("v", "float_vector", nullable=True, dim=2)), "id", "nullable"),
        ((KEY, Field("a", "int8", dim=2)), "id", "only a float_vector"),
    ],
)
def test_broken_rules(fields: tuple[Field, ...], key: str, message: str) -> None:
    with pytest.raises(InvalidSchema, match=message):
        CollectionSchema("c", fields, key)


@pytest.mark.parametrize("name", ["", "a b", "ä", "a" * 256, "a\n"])
def test_collection_names(name: str) -> None:
    with pytest.raises(InvalidSchema, match="collection name"):
        CollectionSchema(name, (KEY,), "id")


@pytest.mark.parametrize(
    "change",
    [
        {"v": 0},
        {"v": "2"},
        {"name": 7},
        {"version": "x"},
        {"fields": "id"},
        {"fields": [["id", "int64", False]]},
        {"fields": [["id", 5, False, None]]},
        {"fields": [["id", "int64", False, "8"]]},
        {"fields": [7]},
    ],
)
def test_malformed_wire(change: dict[str, object]) -> None:
    with pytest.raises(BadRecord):
        CollectionSchema.from_wire({**FULL.to_wire(), **change})


def test_a_schema_of_a_newer_tidewal_says_so() -> None:
    with pytest.raises(FormatTooNew, match="upgrade") as raised:
        CollectionSchema.from_wire({"v": 2, "what": "nobody knows"})
    assert (raised.value.found, raised.value.supported) == (2, 1)
