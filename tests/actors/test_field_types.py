"""Each type of columns is known wherever types are told apart: a type that is added and forgotten fails here."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tidewal.actors.querynode.filter import compile_filter
from tidewal.actors.rows import to_batch
from tidewal.runtime.errors import InvalidFilter, InvalidRows
from tidewal.runtime.rows.schema import FIELD_TYPES, CollectionSchema, Field

VALUES: dict[str, Any] = {
    "bool": True,
    **dict.fromkeys(["int8", "int16", "int32", "int64"], 7),
    **dict.fromkeys(["float", "double"], 0.5),
    "varchar": "seven",
    "timestamp": datetime(2026, 1, 7, tzinfo=UTC),
    "float_vector": [1.0, 2.0],
}


def schema_of(kind: str) -> CollectionSchema:
    field = Field("value", kind, dim=2) if kind == "float_vector" else Field("value", kind, nullable=True)
    return CollectionSchema("c", (Field("id", "int64"), field), "id")


@pytest.mark.parametrize("kind", sorted(FIELD_TYPES))
def test_values_of_each_type_are_written_from_python_and_from_arrow(kind: str) -> None:
    schema = schema_of(kind)
    batch = to_batch([{"id": 1, "value": VALUES[kind]}], schema, op="insert")
    again = to_batch(batch.select(["id", "value"]), schema, op="insert")
    assert again.column("value").to_pylist() == batch.column("value").to_pylist() == [VALUES[kind]]


@pytest.mark.parametrize("kind", sorted(FIELD_TYPES))
def test_a_wrong_value_of_each_type_is_refused_with_what_to_give(kind: str) -> None:
    with pytest.raises(InvalidRows, match="value"):
        to_batch([{"id": 1, "value": object()}], schema_of(kind), op="insert")


@pytest.mark.parametrize("kind", sorted(FIELD_TYPES))
def test_a_filter_knows_each_type_or_refuses_it(kind: str) -> None:
    if kind == "float_vector":
        with pytest.raises(InvalidFilter):
            compile_filter("value == 1", schema_of(kind))
    else:
        compile_filter("value is null", schema_of(kind))
