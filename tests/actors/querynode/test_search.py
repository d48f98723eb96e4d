"""Exact search against scikit-learn's brute force on its digits, and what a search refuses."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from sklearn.datasets import load_digits
from sklearn.neighbors import NearestNeighbors

from tidewal.actors.querynode.filter import compile_filter
from tidewal.actors.querynode.row_store import RowMemory, RowStore
from tidewal.actors.querynode.search import DISTANCE_COLUMN, Metric, search
from tidewal.actors.rows import to_batch
from tidewal.runtime.errors import InvalidRequest
from tidewal.runtime.rows.schema import CollectionSchema, Field

SCHEMA = CollectionSchema(
    "digits", (Field("id", "int64"), Field("label", "int8"), Field("pixels", "float_vector", dim=64)), "id"
)
DIGITS = load_digits()
PIXELS = DIGITS.data.astype(np.float32)


@pytest.fixture(scope="module")
def store() -> RowStore:
    """All digits in chunks of uneven size, some of them written twice."""
    store = RowStore(SCHEMA, RowMemory(1 << 30))
    ids = np.arange(len(PIXELS))
    for start in [0, 100, 1000, 1001]:
        picked = ids[start : start + 900]
        rows = {"id": picked, "label": DIGITS.target[picked], "pixels": PIXELS[picked]}
        store.apply(to_batch(rows, SCHEMA, op="upsert"))
    assert store.row_count == len(PIXELS)
    return store


def expected_distances(pixels: np.ndarray, queries: np.ndarray, metric: Metric, top_k: int) -> np.ndarray:
    if metric == "IP":
        return np.sort(queries.astype(np.float64) @ pixels.astype(np.float64).T, axis=1)[:, ::-1][:, :top_k]
    name = "sqeuclidean" if metric == "L2" else "cosine"
    neighbours = NearestNeighbors(n_neighbors=top_k, algorithm="brute", metric=name).fit(pixels.astype(np.float64))
    distances = neighbours.kneighbors(queries.astype(np.float64))[0]
    return distances if metric == "L2" else 1 - distances


@pytest.mark.parametrize("metric", ["L2", "IP", "COSINE"])
@pytest.mark.parametrize("top_k", [1, 10, 1797])
def test_distances_equal_brute_force(store: RowStore, metric: Metric, top_k: int) -> None:
    queries = np.concatenate([PIXELS[::300], PIXELS[:3] + np.float32(0.5)])
    expected = expected_distances(PIXELS, queries, metric, top_k)
    for query, distances in zip(queries, expected, strict=True):
        found = search(store.view(), "pixels", query, metric=metric, top_k=top_k)
        np.testing.assert_allclose(found.column(DISTANCE_COLUMN).to_numpy(), distances, rtol=1e-4, atol=1e-4)
        ids = found.column("id").to_numpy()
        assert len(set(ids.tolist())) == top_k
        own = expected_distances(PIXELS[ids[:1]], query[None], metric, 1)
        np.testing.assert_allclose(own[0, 0], distances[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("metric", ["L2", "IP", "COSINE"])
def test_filtered_search_equals_brute_force_over_the_filtered(store: RowStore, metric: Metric) -> None:
    where = compile_filter("label in [3, 8] and id % 2 == 0", SCHEMA)
    ids = np.arange(len(PIXELS))
    chosen = PIXELS[np.isin(DIGITS.target, [3, 8]) & (ids % 2 == 0)]
    found = search(store.view(), "pixels", PIXELS[5], metric=metric, top_k=20, where=where, columns=["label", "pixels"])
    assert found.column_names == ["label", "pixels", DISTANCE_COLUMN]
    assert set(found.column("label").to_pylist()) <= {3, 8}
    expected = expected_distances(chosen, PIXELS[5:6], metric, 20)[0]
    np.testing.assert_allclose(found.column(DISTANCE_COLUMN).to_numpy(), expected, rtol=1e-4, atol=1e-4)


def test_a_row_is_found_as_soon_as_it_is_applied_and_not_when_deleted() -> None:
    store = RowStore(SCHEMA, RowMemory(1 << 30))
    assert search(store.view(), "pixels", PIXELS[0], metric="L2", top_k=3).num_rows == 0
    rows = {"id": [1, 2], "label": [0, 0], "pixels": PIXELS[:2]}
    store.apply(to_batch(rows, SCHEMA, op="insert"))
    found = search(store.view(), "pixels", PIXELS[0].tolist(), metric="L2", top_k=3)
    assert found.column("id").to_pylist() == [1, 2]
    assert found.column(DISTANCE_COLUMN)[0].as_py() == 0.0
    store.apply(to_batch({"id": [1]}, SCHEMA, op="delete"))
    assert search(store.view(), "pixels", PIXELS[0], metric="L2", top_k=3).column("id").to_pylist() == [2]


@pytest.mark.parametrize("metric", ["L2", "COSINE"])
def test_zero_and_huge_vectors_have_a_distance(metric: Metric) -> None:
    schema = CollectionSchema("c", (Field("id", "int64"), Field("v", "float_vector", dim=2)), "id")
    store = RowStore(schema, RowMemory(1 << 30))
    store.apply(to_batch({"id": [1, 2, 3], "v": [[0.0, 0.0], [3e38, 3e38], [1.0, 0.0]]}, schema, op="insert"))
    for vector in ([0.0, 0.0], [3e38, 0.0], [1.0, 1.0]):
        found = search(store.view(), "v", vector, metric=metric, top_k=3).column(DISTANCE_COLUMN)
        assert not any(math.isnan(distance) for distance in found.to_pylist())
    cosines = search(store.view(), "v", [1.0, 1.0], metric="COSINE", top_k=3)
    assert cosines.column("id").to_pylist() == [2, 3, 1]
    np.testing.assert_allclose(cosines.column(DISTANCE_COLUMN).to_numpy(), [1.0, math.sqrt(0.5), 0.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"column": "label"}, "no vector column"),
        ({"column": "wings"}, "no vector column"),
        ({"vector": [1.0] * 63}, "64 floats"),
        ({"vector": [math.nan] * 64}, "NaN"),
        ({"vector": [1e300] * 64}, "infinite"),
        ({"vector": ["x"] * 64}, "not a list of floats"),
        ({"vector": [[1.0] * 64]}, "64 floats"),
        ({"metric": "HAMMING"}, "unknown metric"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 16_385}, "top_k"),
        ({"columns": ["wings"]}, "no column"),
    ],
)
def test_refusals(store: RowStore, changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"column": "pixels", "vector": PIXELS[0], "metric": "L2", "top_k": 3, **changes}
    with pytest.raises(InvalidRequest, match=message):
        search(store.view(), **arguments)


def test_vectors_are_read_without_a_copy_from_slices() -> None:
    rows = {"id": range(10), "label": [0] * 10, "pixels": PIXELS[:10]}
    batch = to_batch(rows, SCHEMA, op="insert").slice(4, 3)
    store = RowStore(SCHEMA, RowMemory(1 << 30))
    store.apply(pa.RecordBatch.from_arrays(batch.columns, schema=batch.schema))
    found = search(store.view(), "pixels", PIXELS[5], metric="L2", top_k=1)
    assert found.to_pylist() == [{"id": 5, DISTANCE_COLUMN: 0.0}]
