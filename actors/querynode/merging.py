"""One result out of the results for the vchannels of a collection, each of which some QueryNode has answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from ...runtime.rows.schema import CollectionSchema
from .query import COUNT_COLUMN, Request, SearchRequest
from .search import merge_nearest
from .view import checked_columns, ordered, sort_keys


def part_of(request: Request, schema: CollectionSchema) -> Request:
    """What each vchannel is asked for `request`: besides its columns those that its rows are to be merged by. Raises
    `InvalidRequest` for a column that is not there."""
    if isinstance(request, SearchRequest) or not request.order_by:
        return request
    columns = checked_columns(schema, request.columns)
    keys = (name for name, _ in sort_keys(schema, request.order_by))
    return replace(request, columns=tuple(dict.fromkeys([*columns, *keys])))


def merged(request: Request, schema: CollectionSchema, parts: Sequence[pa.Table]) -> pa.Table:
    """The result of `request` over all rows, from those of `part_of(request)` over each vchannel, in any order."""
    if isinstance(request, SearchRequest):
        return merge_nearest(parts, request.metric, request.top_k)
    found = pa.concat_tables(parts)
    if request.count:
        return pa.table({COUNT_COLUMN: pa.array([pc.sum(found.column(COUNT_COLUMN)).as_py()], pa.int64())})
    keys = sort_keys(schema, request.order_by)
    return ordered(found, keys, request.limit).select(checked_columns(schema, request.columns))
