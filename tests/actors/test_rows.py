"""What may become rows of a collection, what may not and how that is said, and the two ways to divide a batch."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
        ({"count": [1, 2.5, 3]}, "count", 1, "only integers"),
        ({"count": [1, 2, Decimal("3.5")]}, "count", 2, "only integers"),
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
