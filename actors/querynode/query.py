"""Query requests: a query or a search, its wire form, and its result over the shards of a collection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

import numpy as np
import pyarrow as pa

from ...runtime.errors import BadRecord, InvalidRequest
from .filter import Filter, compile_filter
from .search import Metric, merge_nearest, search
from .view import OrderBy, ShardView, check_limit, check_order, checked_columns, ordered, sort_keys

COUNT_COLUMN: Final = "count(*)"
WIRE_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class QueryRequest:
    """Rows by filter. `count` asks for their number only: one row, one column `count(*)` (int64). `columns` of None
    are all; ties of `order_by` are in the order of the keys; without it which rows `limit` keeps is not defined."""

    filter: str | None = None
    columns: tuple[str, ...] | None = None
    order_by: tuple[OrderBy, ...] = ()
    limit: int | None = None
    count: bool = False

    def to_wire(self) -> dict[str, object]:
        """The wire form, which msgpack can pack."""
        return {
            "v": WIRE_VERSION,
            "kind": "query",
            "filter": self.filter,
            "columns": None if self.columns is None else list(self.columns),
            "order_by": [[name, ascending] for name, ascending in self.order_by],
            "limit": self.limit,
            "count": self.count,
        }


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """The `top_k` rows nearest to `vector`, see `search.search`."""

    column: str
    vector: tuple[float, ...]
    metric: Metric = "COSINE"
    top_k: int = 10
    filter: str | None = None
    columns: tuple[str, ...] | None = None

    def to_wire(self) -> dict[str, object]:
        """The wire form, which msgpack can pack; the vector is little-endian float32."""
        with np.errstate(over="ignore"):  # an infinite float is refused where the search runs
            vector = np.asarray(self.vector, dtype="<f4").tobytes()
        return {
            "v": WIRE_VERSION,
            "kind": "search",
            "column": self.column,
            "vector": vector,
            "metric": self.metric,
            "top_k": self.top_k,
            "filter": self.filter,
            "columns": None if self.columns is None else list(self.columns),
        }


Request: TypeAlias = QueryRequest | SearchRequest


def from_wire(wire: Mapping[str, object]) -> Request:
    """The request of a wire form. Raises `BadRecord` when that is malformed or of another version."""
    if wire.get("v") != WIRE_VERSION:
        raise BadRecord(f"request of wire version {wire.get('v')!r}, known is {WIRE_VERSION}", reason="version")
    kind = wire.get("kind")
    if kind == "query":
        return QueryRequest(
            _optional_text(wire, "filter"),
            _columns(wire),
            tuple(_order(item) for item in _list(wire.get("order_by"))),
            None if wire.get("limit") is None else _integer(wire, "limit"),
            wire.get("count") is True,
        )
    if kind == "search":
        column, vector, metric = wire.get("column"), wire.get("vector"), wire.get("metric")
        if not (isinstance(column, str) and isinstance(vector, bytes) and isinstance(metric, str)) or len(vector) % 4:
            raise BadRecord("a search needs a column, a vector of float32 and a metric", reason="request")
        floats = tuple(np.frombuffer(vector, dtype="<f4").tolist())
        filter_text, columns = _optional_text(wire, "filter"), _columns(wire)
        return SearchRequest(column, floats, cast(Metric, metric), _integer(wire, "top_k"), filter_text, columns)
    raise BadRecord(f"request of unknown kind {kind!r}", reason="request")


def run(views: Sequence[ShardView], request: Request) -> pa.Table:
    """The result over all shards of a collection, given as views of one schema (at least one).

    Callable from any thread on snapshots. Raises `InvalidFilter` and `InvalidRequest`.
    """
    if not views:
        raise InvalidRequest("there is no shard to ask")
    schema = views[0].schema
    where = None if request.filter is None else compile_filter(request.filter, schema)
    if isinstance(request, SearchRequest):
        return _search(views, request, where)
    if request.count:
        return _count(views, request, where)
    return query(views, where, request.columns, request.order_by, request.limit)


def _count(views: Sequence[ShardView], request: QueryRequest, where: Filter | None) -> pa.Table:
    if request.order_by or request.limit is not None or request.columns is not None:
        raise InvalidRequest("count(*) takes a filter only: no columns, order or limit")
    return pa.table({COUNT_COLUMN: pa.array([sum(view.count(where) for view in views)], pa.int64())})


def query(
    views: Sequence[ShardView],
    where: Filter | None = None,
    columns: Sequence[str] | None = None,
    order_by: Sequence[OrderBy] = (),
    limit: int | None = None,
) -> pa.Table:
    """The rows the filter holds for, with `columns` (all by default), sorted, at most `limit` of them.

    Rows that sort as equal are in the order of their keys; without `order_by` the order is not defined. Raises
    `InvalidRequest` for unknown columns, a vector to sort by, or a negative limit.
    """
    schema = views[0].schema
    names = checked_columns(schema, columns)
    check_order(schema, order_by)
    check_limit(limit)
    keys = sort_keys(schema, order_by)
    fetched = list(dict.fromkeys([*names, *(name for name, _ in keys)]))
    found = pa.concat_tables([view.rows(where, fetched, keys, limit) for view in views])
    return ordered(found, keys, limit).select(names)


def _search(views: Sequence[ShardView], request: SearchRequest, where: Filter | None) -> pa.Table:
    parts = [
        search(
            view,
            request.column,
            request.vector,
            metric=request.metric,
            top_k=request.top_k,
            where=where,
            columns=request.columns,
        )
        for view in views
    ]
    return merge_nearest(parts, request.metric, request.top_k)


def _optional_text(wire: Mapping[str, object], name: str) -> str | None:
    value = wire.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRecord(f"{name} of a request is text or nil", reason="request")
    return value


def _integer(wire: Mapping[str, object], name: str) -> int:
    value = wire.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadRecord(f"{name} of a request is an integer", reason="request")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list | tuple):
        raise BadRecord("a list is missing in a request", reason="request")
    return list(cast("Sequence[object]", value))


def _columns(wire: Mapping[str, object]) -> tuple[str, ...] | None:
    value = wire.get("columns")
    if value is None:
        return None
    names = _list(value)
    if not all(isinstance(name, str) for name in names):
        raise BadRecord("columns of a request are names", reason="request")
    return tuple(cast("list[str]", names))


def _order(item: object) -> OrderBy:
    match _list(item):
        case [str(name), bool(ascending)]:
            return OrderBy(name, ascending)
        case _:
            raise BadRecord("order_by of a request is a list of [column, ascending]", reason="request")
