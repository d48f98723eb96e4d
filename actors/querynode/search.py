"""Exact nearest-neighbour search over a `float_vector` column: every current row is compared, nothing is approximated.

Distances are Milvus': L2 is the *squared* Euclidean distance (smaller is nearer), IP the inner product and COSINE the
cosine of the angle (larger is nearer). The cosine with a zero vector is 0. Distances are computed in float32 products
summed by BLAS; L2 is computed from differences, so equal vectors are at 0 exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...runtime.errors import InvalidRequest
from ...runtime.rows.schema import CollectionSchema
from .filter import Filter
from .view import ShardView, checked_columns, indices_of

Metric: TypeAlias = Literal["L2", "IP", "COSINE"]
"""How the distance of two vectors is measured."""
Floats: TypeAlias = npt.NDArray[np.float32]

METRICS: Final = frozenset[str](get_args(Metric))
DISTANCE_COLUMN: Final = "_distance"
MAX_TOP_K: Final = 16_384  # as in Milvus
_BLOCK_FLOATS: Final = 1 << 18  # differences are computed in blocks that stay in the cache


def search(
    view: ShardView,
    column: str,
    vector: Sequence[float] | Floats,
    *,
    metric: Metric,
    top_k: int,
    where: Filter | None = None,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """The `top_k` rows nearest to `vector` among those the filter holds for, nearest first: `columns` (the primary key
    by default) and last `_distance` (float32). Ties come in the order they are found.

    Raises `InvalidRequest`: no such vector column, a vector of another length or with NaN, an unknown metric, `top_k`
    outside 1 to `MAX_TOP_K`.
    """
    query = checked_vector(view.schema, column, vector, metric, top_k)
    names = checked_columns(view.schema, [view.schema.primary_key] if columns is None else columns)
    parts: list[pa.Table] = []
    for rows, mask in view.selected(where):
        positions = np.flatnonzero(mask)
        if not len(positions):
            continue
        matrix = _matrix(cast("pa.FixedSizeListArray[Any, Any]", rows.column(column)), len(query))
        distances = _distances(matrix if len(positions) == len(matrix) else matrix[positions], query, metric)
        best = _nearest(distances, metric, top_k)
        found = pa.Table.from_batches([rows.select(names).take(indices_of(positions[best]))])
        parts.append(found.append_column(DISTANCE_COLUMN, pa.array(distances[best], pa.float32())))
    if not parts:
        return _nothing(view.schema, names)
    return merge_nearest(parts, metric, top_k)


def merge_nearest(parts: Sequence[pa.Table], metric: Metric, top_k: int) -> pa.Table:
    """The nearest rows of several results of `search`, nearest first."""
    table = pa.concat_tables(parts)
    distances = table.column(DISTANCE_COLUMN).to_numpy()
    return table.take(indices_of(_nearest(distances, metric, top_k)))


def checked_vector(
    schema: CollectionSchema, column: str, vector: Sequence[float] | Floats, metric: str, top_k: int
) -> Floats:
    """The vector to search for as float32, once everything about the search is known to be right."""
    field = schema.find(column)
    if field is None or field.type != "float_vector":
        raise InvalidRequest(f"collection {schema.name!r} has no vector column {column!r}")
    if metric not in METRICS:
        raise InvalidRequest(f"unknown metric {metric!r}; known: {', '.join(sorted(METRICS))}")
    if not 1 <= top_k <= MAX_TOP_K:
        raise InvalidRequest(f"top_k is 1 to {MAX_TOP_K}, not {top_k}")
    try:
        with np.errstate(over="ignore"):  # what is too large becomes infinite and is refused below
            query = np.asarray(vector, dtype=np.float32)
    except (TypeError, ValueError):
        raise InvalidRequest("the vector to search for is not a list of floats") from None
    if query.shape != (field.dim,):
        raise InvalidRequest(f"column {column!r} has {field.dim} floats a vector, the one to search for {query.shape}")
    if not np.isfinite(query).all():
        raise InvalidRequest("the vector to search for holds NaN or an infinite float")
    return query


def _matrix(column: pa.FixedSizeListArray[Any, Any], dim: int) -> Floats:
    """The vectors of a chunk as the rows of a matrix, without a copy."""
    floats = column.values.to_numpy(zero_copy_only=True)
    return floats[column.offset * dim : (column.offset + len(column)) * dim].reshape(-1, dim)


def _distances(matrix: Floats, query: Floats, metric: Metric) -> Floats:
    with np.errstate(over="ignore"):
        if metric == "L2":
            return _squared_distances(matrix, query)
        if metric == "IP":
            return matrix @ query
        return _cosines(matrix, query)


def _cosines(matrix: Floats, query: Floats) -> Floats:
    # Lengths in double: the square of a float may not fit in a float.
    length = np.linalg.norm(query.astype(np.float64))
    lengths = np.sqrt(np.einsum("ij,ij->i", matrix, matrix, dtype=np.float64))
    if length == 0:
        return np.zeros(len(matrix), dtype=np.float32)
    products = matrix @ (query / length).astype(np.float32)
    cosines = np.divide(products, lengths, out=np.zeros(len(matrix)), where=lengths > 0)
    return np.clip(cosines, -1.0, 1.0).astype(np.float32)


def _squared_distances(matrix: Floats, query: Floats) -> Floats:
    result = np.empty(len(matrix), dtype=np.float32)
    step = max(1, _BLOCK_FLOATS // len(query))
    for start in range(0, len(matrix), step):
        difference = matrix[start : start + step] - query
        np.einsum("ij,ij->i", difference, difference, out=result[start : start + step])
    return result


def _nearest(distances: Floats, metric: Metric, top_k: int) -> npt.NDArray[np.intp]:
    """The indices of the `top_k` nearest, nearest first."""
    far = distances if metric == "L2" else -distances
    if len(far) <= top_k:
        return np.argsort(far, kind="stable")
    nearest = np.argpartition(far, top_k - 1)[:top_k]
    return nearest[np.argsort(far[nearest], kind="stable")]


def _nothing(schema: CollectionSchema, names: Sequence[str]) -> pa.Table:
    return schema.arrow_of(names).append(pa.field(DISTANCE_COLUMN, pa.float32())).empty_table()
