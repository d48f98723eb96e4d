"""Requests over the wire, and answers over several shards that equal those of one."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewal.actors.querynode.query import COUNT_COLUMN, QueryRequest, Request, SearchRequest, from_wire, run
from tidewal.actors.querynode.row_store import RowMemory, RowStore
from tidewal.actors.querynode.search import DISTANCE_COLUMN
from tidewal.actors.querynode.view import OrderBy
from tidewal.actors.rows import split_by_shard, to_batch
from tidewal.runtime.errors import BadRecord, InvalidFilter, InvalidRequest
from tidewal.runtime.rows.schema import CollectionSchema, Field

SCHEMA = CollectionSchema(
    "things",
    (Field("id", "varchar"), Field("n", "int64", nullable=True), Field("v", "float_vector", dim=2)),
    "id",
)


def stores(count: int, shards: int) -> list[RowStore]:
    rows = {
        "id": [f"key-{i:03}" for i in range(count)],
        "n": [None if i % 11 == 0 else i % 7 for i in range(count)],
        "v": np.stack([np.arange(count), np.full(count, 3)], axis=1),
    }
    result = [RowStore(SCHEMA, RowMemory(1 << 30)) for _ in range(shards)]
    for store, part in zip(result, split_by_shard(to_batch(rows, SCHEMA, op="insert"), SCHEMA, shards), strict=True):
        if part is not None:
            store.apply(part)
    return result


ONE, MANY = [store.snapshot() for store in stores(200, 1)], [store.snapshot() for store in stores(200, 5)]
THREES = sum(i % 7 == 3 and i % 11 != 0 for i in range(200))
REQUESTS: list[Request] = [
    QueryRequest(),
    QueryRequest("n > 3", ("id",), (OrderBy("n", False), OrderBy("id")), 7),
    QueryRequest(filter="n is null", count=True),
    SearchRequest("v", (1.5, 2.0), "L2", 5, "n > 1", ("id", "n")),
    SearchRequest("v", (1.5, 2.0)),
]


@pytest.mark.parametrize("request_", REQUESTS)
def test_wire_round_trip_through_msgpack(request_: Request) -> None:
    assert from_wire(msgpack.unpackb(msgpack.packb(request_.to_wire()))) == request_


@pytest.mark.parametrize("change", [{"v": 2}, {"kind": "delete"}, {"limit": "x"}, {"order_by": [["n"]]}, {"filter": 1}])
def test_malformed_queries(change: dict[str, object]) -> None:
    with pytest.raises(BadRecord):
        from_wire({**REQUESTS[1].to_wire(), **change})


@pytest.mark.parametrize("change", [{"vector": b"123"}, {"vector": "x"}, {"top_k": True}, {"columns": [1]}])
def test_malformed_searches(change: dict[str, object]) -> None:
    with pytest.raises(BadRecord):
        from_wire({**REQUESTS[3].to_wire(), **change})


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([None, "n > 3", "n is null or n == 2", "id like 'key-1%'", "n > 100"]),
    st.lists(st.builds(OrderBy, st.sampled_from(["n", "id"]), st.booleans()), min_size=1, max_size=3),
    st.none() | st.integers(0, 250),
    st.sampled_from([None, ("id",), ("n", "id"), ("v",)]),
)
def test_shards_answer_as_one(
    text: str | None, order: list[OrderBy], limit: int | None, columns: tuple[str, ...] | None
) -> None:
    request = QueryRequest(text, columns, tuple(order), limit)
    one, many = run(ONE, request), run(MANY, request)
    assert many.equals(one)
    assert many.column_names == list(columns or ("id", "n", "v"))


def test_counts_add_up() -> None:
    for views in (ONE, MANY):
        assert run(views, QueryRequest(count=True)).to_pylist() == [{COUNT_COLUMN: 200}]
        assert run(views, QueryRequest("n == 3", count=True)).to_pylist() == [{COUNT_COLUMN: THREES}]


def test_a_limit_without_order_holds_across_shards() -> None:
    assert run(MANY, QueryRequest(limit=9)).num_rows == 9
    assert run(MANY, QueryRequest("n == 3", limit=900)).num_rows == THREES


@pytest.mark.parametrize("metric", ["L2", "IP", "COSINE"])
def test_searches_merge(metric: str) -> None:
    request = SearchRequest("v", (50.2, 3.0), metric, 6, "n is not null", ("id",))
    one, many = run(ONE, request), run(MANY, request)
    assert many.column(DISTANCE_COLUMN).to_pylist() == one.column(DISTANCE_COLUMN).to_pylist()
    if metric == "L2":
        assert many.column("id").to_pylist() == ["key-050", "key-051", "key-049", "key-052", "key-048", "key-053"]


def test_refusals() -> None:
    with pytest.raises(InvalidFilter):
        run(MANY, QueryRequest("n >"))
    with pytest.raises(InvalidRequest, match="no column"):
        run(MANY, QueryRequest(columns=("wings",)))
    with pytest.raises(InvalidRequest, match="sorted by the vector"):
        run(MANY, QueryRequest(order_by=(OrderBy("v"),)))
    with pytest.raises(InvalidRequest, match="filter only"):
        run(MANY, QueryRequest(count=True, limit=5))
    with pytest.raises(InvalidRequest, match="no shard"):
        run([], QueryRequest())
