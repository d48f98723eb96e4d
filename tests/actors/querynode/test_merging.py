"""The results of vchannels, merged, are the result over all their rows: whatever the rows, and however they lie."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.actors.querynode.merging import merged, part_of
from tidewal.actors.querynode.query import QueryRequest, Request, SearchRequest, run
from tidewal.actors.querynode.row_store import RowMemory, RowStore
from tidewal.actors.querynode.view import OrderBy, ShardView
from tidewal.actors.rows import to_batch
from tidewal.runtime.errors import InvalidRequest
from tidewal.runtime.rows.schema import CollectionSchema, Field

SCHEMA = CollectionSchema(
    "things",
    (Field("id", "int64"), Field("n", "int64", nullable=True), Field("v", "float_vector", dim=2)),
    "id",
)
ROWS = st.lists(
    st.tuples(st.one_of(st.none(), st.integers(-3, 3)), st.integers(-9, 9), st.integers(0, 3)), max_size=30
)  # a value, a coordinate, and the vchannel of each
QUERIES = st.builds(
    QueryRequest,
    st.sampled_from([None, "n > 0", "n is null", "id in [1, 5, 9]"]),
    st.sampled_from([None, ("id",), ("n",), ("n", "id")]),
    st.sampled_from([(), (OrderBy("n"),), (OrderBy("n", False), OrderBy("id", False))]),
    st.one_of(st.none(), st.integers(0, 12)),
)
SEARCHES = st.builds(
    SearchRequest,
    st.just("v"),
    st.tuples(st.integers(-9, 9).map(float), st.just(1.0)),
    st.sampled_from(["L2", "IP", "COSINE"]),
    st.integers(1, 12),
    st.sampled_from([None, "n > 0"]),
)


def views(rows: Sequence[tuple[int | None, int, int]], of: Sequence[Sequence[int]]) -> list[ShardView]:
    """A view of each list of rows, by their numbers."""
    result: list[ShardView] = []
    for numbers in of:
        store = RowStore(SCHEMA, RowMemory(1 << 30))
        if numbers:
            values = {"id": list(numbers), "n": [rows[n][0] for n in numbers]}
            vectors = [[float(rows[n][1]), 1.0] for n in numbers]
            store.apply(to_batch({**values, "v": vectors}, SCHEMA, op="insert"))
        result.append(store.snapshot())
    return result


def both(rows: Sequence[tuple[int | None, int, int]], asked: Request) -> tuple[pa.Table, pa.Table]:
    """The result over all rows at one place, and that of their vchannels, merged."""
    shards = [[n for n, (*_, shard) in enumerate(rows) if shard == each] for each in range(4)]
    parts = [run([view], part_of(asked, SCHEMA)) for view in views(rows, shards)]
    return run(views(rows, [range(len(rows))]), asked), merged(asked, SCHEMA, parts)


@given(ROWS, QUERIES)
def test_rows_of_vchannels_merge_to_those_of_one(rows, asked: QueryRequest) -> None:
    whole, parts = both(rows, asked)
    assert parts.schema == whole.schema
    if asked.order_by:
        assert parts.to_pylist() == whole.to_pylist()
    elif asked.limit is None:
        assert sorted(map(repr, parts.to_pylist())) == sorted(map(repr, whole.to_pylist()))
    else:  # which rows is not defined, how many is
        assert parts.num_rows == whole.num_rows


@given(ROWS, st.sampled_from([None, "n > 0"]))
def test_counts_add_up(rows, filter: str | None) -> None:
    whole, parts = both(rows, QueryRequest(filter, count=True))
    assert parts.equals(whole)


@given(ROWS, SEARCHES)
def test_the_nearest_of_vchannels_are_the_nearest_of_all(rows, asked: SearchRequest) -> None:
    whole, parts = both(rows, asked)
    assert parts.schema == whole.schema
    assert parts["_distance"].to_pylist() == whole["_distance"].to_pylist()
    nearest = whole["_distance"].to_pylist()
    strictly = [row for row in whole.to_pylist() if row["_distance"] != nearest[-1]]
    found = parts.to_pylist()
    assert all(row in found for row in strictly), "only ties at the end may be others"


def test_what_cannot_be_asked_is_refused_before_it_is_sent() -> None:
    with pytest.raises(InvalidRequest):
        part_of(QueryRequest(columns=("x",), order_by=(OrderBy("id"),)), SCHEMA)
