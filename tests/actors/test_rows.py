"""What may become rows of a collection, what may not and how that is said, and the two ways to divide a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tidewal.actors.rows import check_values, split_by_bytes, split_by_shard, to_batch
from tidewal.runtime.errors import InvalidRows, MessageTooLarge
from tidewal.runtime.rows.hashing import shard_of_key
from tidewal.runtime.rows.row_codec import encode_rows
from tidewal.runtime.rows.schema import CollectionSchema, Field, Op

SCHEMA = CollectionSchema(
    "things",
    (
        Field("id", "varchar"),
        Field("count", "int32"),
        Field("value", "double", nullable=True),
        Field("ratio", "float", nullable=True),
        Field("seen", "timestamp", nullable=True),
        Field("flag", "bool", nullable=True),
        Field("vector", "float_vector", dim=2),
    ),
    "id",
)
GOOD: dict[str, list[object]] = {
    "id": ["a", "", "c"],
    "count": [1, 2, 3],
    "value": [1.5, None, -1.0],
    "ratio": [0.5, None, 1.0],
    "seen": [datetime(2013, 1, 1, tzinfo=UTC), None, datetime(2013, 1, 1, 12)],  # noqa: DTZ001 -- naive means UTC
    "flag": [True, None, False],
    "vector": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
}


def batch_of(rows: object, schema: CollectionSchema, *, op: str | None) -> pa.RecordBatch:
    """What the Proxy lets into the log of rows that a client has converted."""
    batch = to_batch(rows, schema, op=op)
    check_values(batch, schema)
    return batch


def with_column(**changes: object) -> dict[str, object]:
    return {**GOOD, **changes}


def test_all_forms_of_rows_become_the_same_batch() -> None:
    batch = batch_of(GOOD, SCHEMA, op="upsert")
    batch.validate(full=True)
    assert batch.schema == SCHEMA.row_arrow()
    assert batch.column("_op").to_pylist() == [Op.UPSERT] * 3
    assert batch.column("seen").to_pylist()[2] == datetime(2013, 1, 1, 12, tzinfo=UTC)
    plain = batch.drop_columns(["_op"])
    table = pa.Table.from_batches([plain.slice(0, 1), plain.slice(1)])
    for form in (plain, table, plain.to_pylist(), plain.to_pydict(), with_column(vector=np.array(GOOD["vector"]))):
        assert batch_of(form, SCHEMA, op="upsert") == batch


def test_columns_of_the_right_type_are_not_copied() -> None:
    batch = batch_of(GOOD, SCHEMA, op="insert")
    again = batch_of(batch.drop_columns(["_op"]), SCHEMA, op="insert")
    assert [c.buffers()[1] and c.buffers()[1].address for c in again.columns[:6]] == [
        c.buffers()[1] and c.buffers()[1].address for c in batch.columns[:6]
    ]


def test_safe_casts() -> None:
    foreign = pa.table(
        {
            "id": pa.array(["a", "b"]).dictionary_encode(),
            "count": pa.array([1, 2], pa.int64()),
            "value": pa.array([1, 2], pa.int8()),
            "ratio": pa.nulls(2),
            "seen": pa.array([0, 1000], pa.timestamp("ns", "Europe/Berlin")),
            "vector": pa.array([[1, 2], [3, 4]], pa.list_(pa.float64())),
        }
    )
    batch = batch_of(foreign, SCHEMA, op="insert")
    assert batch.schema == SCHEMA.row_arrow()
    assert batch.column("value").to_pylist() == [1.0, 2.0]
    assert batch.column("flag").null_count == 2


@pytest.mark.parametrize(
    ("changes", "column", "row", "message"),
    [
        ({"id": ["a", None, "c"]}, "id", 1, "null"),
        ({"id": ["a", 7, "c"]}, "id", 1, "varchar"),
        ({"id": ["a", "b", "\ud800"]}, "id", 2, "varchar"),
        ({"id": pa.array([1, 2, 3])}, "id", None, "int64, not varchar"),
        ({"count": [1, 2, None]}, "count", 2, "null"),
        ({"count": [1, 2**31, 3]}, "count", 1, "int32"),
        ({"count": [1, "2", 3]}, "count", 1, "int32"),
        ({"count": [True, 2, 3]}, "count", 0, "bool"),
        ({"count": [1, 2.5, 3]}, "count", 1, "float does not fit; give a whole number"),
        ({"count": [1, 2, Decimal("3.5")]}, "count", 2, "Decimal does not fit; give a whole number"),
        ({"count": pa.array([1, 2, 2**40])}, "count", 2, "int32"),
        ({"count": pa.array([1.0, 2.5, 3.0])}, "count", 1, "int32"),
        ({"count": pa.array([1.0, math.nan, 3.0])}, "count", 1, "int32"),
        ({"count": pa.array(["1", "2", "3"])}, "count", None, "string, not int32"),
        ({"value": [1.0, None, math.nan]}, "value", 2, "NaN"),
        ({"value": np.array([1.0, math.nan, math.nan])}, "value", 1, "NaN"),
        ({"ratio": [math.nan, None, 1.0]}, "ratio", 0, "NaN"),
        ({"ratio": pa.array([1.0, 1e300, 1.0])}, "ratio", 1, "too large"),
        ({"seen": [5, None, None]}, "seen", 0, "datetime"),
        ({"seen": pa.array([1, 2, 1000], pa.timestamp("ns"))}, "seen", 0, "lose data"),
        ({"flag": [1, 0, 1]}, "flag", 0, "bool"),
        ({"vector": [[1.0, 2.0], [3.0], [5.0, 6.0]]}, "vector", 1, "Length"),
        ({"vector": pa.array([[1.0, 2.0], [3.0, 4.0], [5.0]])}, "vector", 2, "1 floats, not 2"),
        ({"vector": np.zeros((3, 3))}, "vector", 0, "3 floats, not 2"),
        ({"vector": [[1.0, 2.0], None, [5.0, 6.0]]}, "vector", 1, "null"),
        ({"vector": [[1.0, 2.0], [3.0, None], [5.0, 6.0]]}, "vector", 1, "null, NaN or infinite"),
        ({"vector": [[1.0, 2.0], [3.0, 4.0], [5.0, math.inf]]}, "vector", 2, "infinite"),
        ({"vector": [[1.0, 2.0], [math.nan, 4.0], [5.0, 1.0]]}, "vector", 1, "NaN"),
        ({"wings": [1, 2, 3]}, "wings", None, "no column"),
        ({"_op": ["insert"] * 3}, "_op", None, "use apply"),
    ],
)
def test_bad_rows_name_column_and_row(changes: dict[str, object], column: str, row: int | None, message: str) -> None:
    with pytest.raises(InvalidRows, match=message) as caught:
        batch_of(with_column(**changes), SCHEMA, op="insert")
    assert caught.value.fields.get("column") == column
    assert caught.value.fields.get("row") == row


def test_missing_columns() -> None:
    for name in ("id", "count", "vector"):
        with pytest.raises(InvalidRows, match="is missing") as caught:
            batch_of({key: value for key, value in GOOD.items() if key != name}, SCHEMA, op="insert")
        assert caught.value.column == name


def test_shapeless_rows() -> None:
    with pytest.raises(InvalidRows, match="differ in length"):
        batch_of(with_column(count=[1]), SCHEMA, op="insert")
    with pytest.raises(InvalidRows, match="row 1 is a int"):
        batch_of([{"id": "a"}, 5], SCHEMA, op="insert")
    with pytest.raises(InvalidRows, match="unknown operation"):
        batch_of(GOOD, SCHEMA, op="replace")
    assert batch_of([], SCHEMA, op="insert").num_rows == 0
    assert batch_of([], SCHEMA, op=None).schema == SCHEMA.row_arrow()


@pytest.mark.parametrize("rows", [[{"id": "a", 5: 6}], {"id": ["a"], 5: [6]}, [{None: 1}], {b"id": ["a"]}])
def test_a_name_of_a_column_that_is_no_text_is_refused(rows: Any) -> None:
    with pytest.raises(InvalidRows, match=r"the column name .* not a text"):
        batch_of(rows, SCHEMA, op="insert")


class Model(BaseModel):
    id: str


@dataclass
class Record:
    id: str


class Named(NamedTuple):
    id: str


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        (Model(id="a"), r"a Model, .*: give row\.model_dump\(\)"),
        (Record("a"), r"a Record, .*: give dataclasses\.asdict\(row\)"),
        (Named("a"), r"a Named, .*: give row\._asdict\(\)"),
        (5, "a int, not a mapping of columns$"),
    ],
)
def test_rows_that_are_objects_are_refused_with_what_to_do(row: Any, hint: str) -> None:
    with pytest.raises(InvalidRows, match=hint) as caught:
        batch_of([row], SCHEMA, op="insert")
    assert caught.value.row == 0


def test_one_object_is_no_list_of_rows() -> None:
    with pytest.raises(InvalidRows, match=r"a Model, no list of mappings: give row\.model_dump\(\)"):
        batch_of(cast(Any, Model(id="a")), SCHEMA, op="insert")


def test_rows_that_can_be_read_once_only_are_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidRows, match=r"rows are a generator, which .*: make a list of it, list\(rows\)"):
        batch_of((dict(row) for row in [{"id": "a"}]), SCHEMA, op="insert")
    with pytest.raises(InvalidRows, match="rows are a map"):
        batch_of(map(dict, [{"id": "a"}]), SCHEMA, op="insert")


def test_a_sliced_batch_is_checked_in_its_own_rows() -> None:
    table = {"id": ["a", "b", "c"], "value": [math.nan, 1.0, math.nan]}
    schema = CollectionSchema("c", (Field("id", "varchar"), Field("value", "double")), "id")
    batch = pa.RecordBatch.from_pydict(table)
    assert batch_of(batch.slice(1, 1), schema, op="insert").num_rows == 1
    with pytest.raises(InvalidRows) as caught:
        batch_of(batch.slice(1), schema, op="insert")
    assert caught.value.row == 1


def test_nan_under_a_null_is_no_value() -> None:
    schema = CollectionSchema("c", (Field("id", "int64"), Field("value", "double", nullable=True)), "id")
    values = pa.array(np.array([1.0, math.nan]), mask=np.array([False, True]))
    assert batch_of({"id": [1, 2], "value": values}, schema, op="insert").column("value").null_count == 1


def test_a_float_buffer_may_end_with_part_of_a_number() -> None:
    schema = CollectionSchema("c", (Field("id", "int64"), Field("value", "double")), "id")
    buffer = pa.py_buffer(np.array([1.0, 2.0]).tobytes() + b"odd")
    values = pa.Array.from_buffers(pa.float64(), 2, [None, buffer])
    odd = pa.RecordBatch.from_arrays([pa.array([1, 2]), values, pa.array([0, 0], pa.int8())], ["id", "value", "_op"])
    check_values(odd, schema)


def test_deletes_need_their_key_only() -> None:
    batch = batch_of({"id": ["a", "b"]}, SCHEMA, op="delete")
    assert batch.column("_op").to_pylist() == [Op.DELETE] * 2
    assert batch_of(GOOD, SCHEMA, op="delete").column("count").null_count == 3
    with pytest.raises(InvalidRows, match="is missing"):
        batch_of({"count": [1]}, SCHEMA, op="delete")
    with pytest.raises(InvalidRows, match="null"):
        batch_of({"id": ["a", None]}, SCHEMA, op="delete")


def test_mixed_batches() -> None:
    rows = [
        {"id": "a", "count": 1, "vector": [1.0, 2.0], "_op": "insert"},
        {"id": "b", "_op": "delete"},
        {"id": "c", "count": 3, "vector": [5.0, 6.0], "_op": "upsert"},
    ]
    batch = batch_of(rows, SCHEMA, op=None)
    assert batch.column("_op").to_pylist() == [Op.INSERT, Op.DELETE, Op.UPSERT]
    assert batch_of(batch.set_column(7, "_op", pa.array(["insert", "delete", "upsert"])), SCHEMA, op=None) == batch
    with pytest.raises(InvalidRows, match="row 1: column 'count' is null"):
        batch_of([rows[0], {**rows[1], "_op": "upsert"}], SCHEMA, op=None)
    with pytest.raises(InvalidRows, match="row 1: _op is 'replace'"):
        batch_of([rows[0], {**rows[2], "_op": "replace"}], SCHEMA, op=None)
    with pytest.raises(InvalidRows, match="must name its operation"):
        batch_of(GOOD, SCHEMA, op=None)


def keyed(count: int) -> tuple[CollectionSchema, pa.RecordBatch]:
    schema = CollectionSchema("c", (Field("id", "varchar"), Field("n", "int64")), "id")
    return schema, batch_of({"id": [f"key-{i}" for i in range(count)], "n": range(count)}, schema, op="insert")


def test_split_by_shard_keeps_every_row_and_order() -> None:
    schema, batch = keyed(500)
    assert split_by_shard(batch, schema, 1) == [batch]
    parts = split_by_shard(batch, schema, 3)
    for shard, part in enumerate(parts):
        assert part is not None
        expected = [i for i in range(500) if shard_of_key(f"key-{i}", 3) == shard]
        assert part.column("n").to_pylist() == expected
        assert part.schema == batch.schema
    alone = split_by_shard(batch.slice(7, 1), schema, 16)
    assert [part is not None for part in alone] == [shard == shard_of_key("key-7", 16) for shard in range(16)]
    assert split_by_shard(batch.slice(0, 0), schema, 2) == [None, None]
    assert split_by_shard(batch.slice(0, 0), schema, 1) == [None]


@pytest.mark.parametrize("share", [0.9, 0.5, 0.2, 0.01])
def test_split_by_bytes_keeps_every_row_under_the_limit(share: float) -> None:
    schema = CollectionSchema("c", (Field("id", "varchar"), Field("text", "varchar")), "id")
    rows = {"id": [f"{i}" for i in range(1000)], "text": ["x" * (i % 97) for i in range(1000)]}
    batch = batch_of(rows, schema, op="insert")
    limit = max(500, int(batch.nbytes * share))
    parts = split_by_bytes(batch, limit)
    assert all(len(encode_rows(part)) <= limit for part in parts)
    assert len(parts) >= batch.nbytes / limit
    assert pa.Table.from_batches(parts).combine_chunks().to_batches()[0] == batch


def test_one_row_over_the_limit_is_named_with_both_sizes() -> None:
    schema = CollectionSchema("c", (Field("id", "varchar"), Field("text", "varchar")), "id")
    batch = batch_of({"id": ["a", "b", "c"], "text": ["", "x" * 5000, ""]}, schema, op="insert")
    with pytest.raises(MessageTooLarge) as caught:
        split_by_bytes(batch, 1000)
    assert caught.value.limit == 1000
    assert int(caught.value.size or 0) >= 5000


LONG = CollectionSchema(
    "c",
    (
        Field("id", "int64"),
        Field("text", "varchar", nullable=True),
        Field("number", "double", nullable=True),
        Field("at", "float_vector", dim=3),
    ),
    "id",
)


@pytest.mark.slow
@given(
    sizes=st.lists(st.none() | st.integers(0, 3000), min_size=1, max_size=60),
    shards=st.integers(1, 4),
    limit=st.integers(900, 8000),
)
def test_every_row_of_a_batch_is_in_one_message_and_in_its_place(sizes, shards, limit) -> None:
    rows = {
        "id": list(range(len(sizes))),
        "text": [None if size is None else "x" * size for size in sizes],
        "number": [None if size is None else size / 3 for size in sizes],
        "at": [[1.0, 2.0, size or 0] for size in sizes],
    }
    batch = batch_of(rows, LONG, op="upsert")
    for part in split_by_shard(batch, LONG, shards):
        if part is None:
            continue
        largest = max(len(encode_rows(part.slice(row, 1))) for row in range(part.num_rows))
        if largest > limit:
            with pytest.raises(MessageTooLarge, match="id=") as caught:
                split_by_bytes(part, limit, "id")
            assert caught.value.limit == limit
            assert limit < int(caught.value.size or 0) <= largest
            continue
        slices = split_by_bytes(part, limit, "id")
        assert all(len(encode_rows(each)) <= limit for each in slices)
        assert pa.Table.from_batches(slices).to_pylist() == part.to_pylist()
        if len(slices) > 1:
            assert len(encode_rows(part)) > limit


def test_a_batch_of_five_times_the_limit_is_five_messages_or_a_few_more() -> None:
    rows = {"id": list(range(500)), "text": ["x" * 1000] * 500, "at": [[0.0] * 3] * 500}
    batch = batch_of(rows, LONG, op="insert")
    limit = batch.nbytes // 5
    assert 5 <= len(split_by_bytes(batch, limit)) <= 10


ALL = CollectionSchema(
    "all",
    (
        Field("id", "int64"),
        Field("small", "int8", nullable=True),
        Field("ratio", "float", nullable=True),
        Field("value", "double", nullable=True),
        Field("name", "varchar", nullable=True),
        Field("seen", "timestamp", nullable=True),
        Field("flag", "bool", nullable=True),
        Field("vector", "float_vector", dim=2),
    ),
    "id",
)
NOON = datetime(2020, 1, 1, 12, tzinfo=UTC)
MIDNIGHT = datetime(2020, 1, 1, tzinfo=UTC)


def forms_of(name: str, array: pa.Array[Any]) -> list[object]:
    """One row with a column, as each kind of table that has Arrow's types."""
    vector = pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2))
    columns: dict[str, Any] = {"id": pa.array([1], pa.int64()), "vector": vector, name: array}
    return [pa.table(columns), pa.RecordBatch.from_pydict(columns), data_frame(pa.table(columns))]


def data_frame(table: pa.Table) -> object:
    """A data frame of another library, which has the columns of `table` as they are."""

    class Foreign:
        def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
            return table.__arrow_c_stream__(requested_schema)

    return Foreign()


@pytest.mark.parametrize(
    ("name", "array", "value"),
    [
        ("name", pa.array(["a"], pa.string_view()), "a"),
        ("name", pa.array(["a"], pa.large_string()), "a"),
        ("name", pa.array(["a"]).dictionary_encode(), "a"),
        ("name", pa.RunEndEncodedArray.from_arrays([1], pa.array(["a"])), "a"),
        ("id", pa.array([7], pa.int8()), 7),
        ("id", pa.array([7], pa.uint64()), 7),
        ("id", pa.array([7.0]), 7),
        ("small", pa.array([7], pa.int64()), 7),
        ("ratio", pa.array([1.5], pa.float16()), 1.5),
        ("value", pa.array([1.5], pa.float16()), 1.5),
        ("value", pa.array([7], pa.int64()), 7.0),
        ("value", pa.nulls(1), None),
        ("seen", pa.array([NOON], pa.timestamp("ns", "Europe/Paris")), NOON),
        ("seen", pa.array([NOON.replace(tzinfo=None)], pa.timestamp("s")), NOON),
        ("seen", pa.array([NOON.date()], pa.date32()), MIDNIGHT),
        ("vector", pa.array([[1.0, 2.0]], pa.large_list(pa.float64())), [1.0, 2.0]),
        ("vector", pa.array([[1, 2]], pa.list_(pa.int16(), 2)), [1.0, 2.0]),
    ],
    ids=str,
)
def test_types_of_arrow_that_mean_the_same_are_converted(name: str, array: pa.Array[Any], value: object) -> None:
    for rows in forms_of(name, array):
        assert batch_of(rows, ALL, op="insert").column(name).to_pylist() == [value]


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("name", pa.array([b"a"]), "is binary, not varchar: cast it first, in Arrow with .cast('string')"),
        ("name", pa.array([1]), "is int64, not varchar: cast it first, in Arrow with .cast('string')"),
        ("name", pa.array([{"a": 1}]), "is struct<a: int64>, not varchar: give a text, as str(value) in each row"),
        ("id", pa.array(["1"]), "is string, not int64: cast it first, in Arrow with .cast('int64')"),
        ("id", pa.array([Decimal(1)]), "is decimal128(1, 0), not int64: cast it first, in Arrow with .cast('int64')"),
        ("value", pa.array([Decimal("1.5")]), "not double: cast it first, in Arrow with .cast('double')"),
        ("value", pa.array([1], pa.duration("s")), "is duration[s], not double: give a number, as float(value) in"),
        ("flag", pa.array([1], pa.int8()), "is int8, not bool: cast it first, in Arrow with .cast('bool')"),
        (
            "seen",
            pa.array([1]),
            "is int64, not timestamp: cast it first, in Arrow with .cast(pyarrow.timestamp('us', 'UT",
        ),
        ("seen", pa.array(["2020-01-01"]), "is string, not timestamp: give a datetime in each row"),
        ("seen", pa.array([time(1)]), "is time64[us], not timestamp: give a datetime in each row"),
        (
            "vector",
            pa.array([["1", "2"]]),
            "not float_vector(2): cast it first, in Arrow with .cast(pyarrow.list_(pyarrow",
        ),
    ],
    ids=str,
)
def test_types_of_arrow_that_mean_something_else_are_named_with_what_to_do(
    name: str, array: pa.Array[Any], message: str
) -> None:
    for rows in forms_of(name, array):
        with pytest.raises(InvalidRows) as caught:
            batch_of(rows, ALL, op="insert")
        assert message in caught.value.message
        assert (caught.value.column, caught.value.row) == (name, None)


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("id", np.uint8(7), 7),
        ("value", np.float16(1.5), 1.5),
        ("flag", np.bool_(True), True),
        ("name", np.str_("a"), "a"),
        ("seen", date(2020, 1, 1), MIDNIGHT),
        ("seen", np.datetime64("2020-01-01T12:00:00"), NOON),
        ("seen", np.datetime64("2020-01-01"), MIDNIGHT),
        ("seen", np.datetime64("2020-01-01T12"), NOON),
        ("vector", (1, 2), [1.0, 2.0]),
        ("vector", np.array([1, 2], np.float16), [1.0, 2.0]),
    ],
)
def test_values_of_python_that_mean_the_same_are_converted(name: str, given: object, value: object) -> None:
    row = {"id": 1, "vector": [1.0, 2.0], name: given}
    assert batch_of([row, row], ALL, op="insert").column(name).to_pylist() == [value, value]


def test_times_of_numpy_may_have_any_unit() -> None:
    rows = {"id": [1], "vector": [[1.0, 2.0]], "seen": np.array(["2020-01-01T12"], "datetime64[h]")}
    assert batch_of(rows, ALL, op="insert").column("seen").to_pylist() == [NOON]


def test_dates_and_times_may_be_in_one_column() -> None:
    rows = [{"id": 1, "vector": [1.0, 2.0], "seen": seen} for seen in (MIDNIGHT.date(), None, NOON)]
    assert batch_of(rows, ALL, op="insert").column("seen").to_pylist() == [MIDNIGHT, None, NOON]


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("id", "1", "str does not fit; give a whole number, as int(value)"),
        ("id", True, "bool does not fit; give a whole number"),
        ("value", Decimal("1.5"), "Decimal does not fit; give a number, as float(value)"),
        ("ratio", 1e300, "too large for a float"),
        ("name", 1, "int does not fit; give a text, as str(value)"),
        ("name", b"a", "bytes does not fit; give a text, as value.decode()"),
        ("flag", "true", "str does not fit; give True or False"),
        ("seen", "2020-01-01", "str does not fit; give a datetime"),
        ("small", 300, "300"),
        ("vector", "ab", "str does not fit; give a list of numbers"),
    ],
)
def test_values_of_python_that_mean_something_else_are_named_with_what_to_do(
    name: str, given: object, message: str
) -> None:
    good = {"id": 1, "vector": [1.0, 2.0]}
    with pytest.raises(InvalidRows) as caught:
        batch_of([good, {**good, name: given}], ALL, op="insert")
    assert message in caught.value.message
    assert (caught.value.column, caught.value.row) == (name, 1)


def test_data_frames_are_rows() -> None:
    pandas = pytest.importorskip("pandas")
    polars = pytest.importorskip("polars")
    columns = {"id": [1, 2, 3], "value": [1.5, math.nan, None], "name": ["a", None, "c"], "vector": [[1.0, 2.0]] * 3}
    frame = pandas.DataFrame(columns)[lambda each: each.id > 1]  # its index is no range any more
    found = batch_of(frame, ALL, op="insert")
    assert found.column("id").to_pylist() == [2, 3]
    assert found.column("value").to_pylist() == [None, None]
    assert batch_of(frame.set_index("id"), ALL, op="insert") == found
    assert batch_of(polars.DataFrame(columns)[:1], ALL, op="insert").column("name").to_pylist() == ["a"]
    with pytest.raises(InvalidRows, match="the DataFrame does not convert to Arrow"):
        batch_of(pandas.DataFrame({"id": [1, "two"]}), ALL, op="insert")
