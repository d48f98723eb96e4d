"""Exact vector search through the client, on scikit-learn's digits, against distances by brute force."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tidewal.runtime.rows.schema import CollectionSchema, Field

DIGITS = CollectionSchema(
    "digits", (Field("id", "int64"), Field("digit", "int8"), Field("pixels", "float_vector", dim=64)), "id"
)
TOP = 20


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    data = load_digits()
    return data.data.astype(np.float32), data.target.astype(np.int8)


def brute_force(metric: str, vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """The distances as the client reports them, nearest first."""
    wide, asked = vectors.astype(np.float64), query.astype(np.float64)
    if metric == "L2":
        return np.sort(((wide - asked) ** 2).sum(axis=1))
    products = wide @ asked
    if metric == "COSINE":
        products = products / (np.linalg.norm(wide, axis=1) * np.linalg.norm(asked))
    return np.sort(products)[::-1]


async def fill(client, digits) -> None:
    pixels, target = digits
    await client.create_collection(DIGITS)
    await client.insert("digits", {"id": np.arange(len(target)), "digit": target, "pixels": pixels})


def distances(answer) -> list[float]:
    name = next(name for name in answer.table.schema.names if name not in ("id", "digit", "pixels"))
    return answer.table[name].to_pylist()


@pytest.mark.parametrize("metric", ["L2", "IP", "COSINE"])
async def test_finds_what_brute_force_finds(home, digits, metric) -> None:
    pixels, target = digits
    async with home.client() as client:
        await fill(client, digits)
        for row in (0, 500, 1796):
            query = pixels[row]
            answer = await client.search(
                "digits", "pixels", query.tolist(), metric=metric, top_k=TOP, columns=["id"], consistency="strong"
            )
            assert distances(answer) == pytest.approx(brute_force(metric, pixels, query)[:TOP].tolist(), rel=1e-4)
            chosen = await client.search(
                "digits", "pixels", query.tolist(), metric=metric, top_k=TOP, filter="digit == 3", columns=["digit"]
            )
            assert set(chosen.table["digit"].to_pylist()) == {3}
            expected = brute_force(metric, pixels[target == 3], query)[:TOP].tolist()
            assert distances(chosen) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
async def test_a_new_row_is_found_and_a_deleted_one_is_not(home, digits) -> None:
    async with home.client() as client:
        await fill(client, digits)
        odd = np.full(64, 1000.0, dtype=np.float32)

        async def nearest() -> int:
            answer = await client.search(
                "digits", "pixels", odd.tolist(), metric="L2", top_k=1, columns=["id"], consistency="strong"
            )
            return answer.table["id"][0].as_py()

        before = await nearest()
        await client.insert("digits", {"id": [9999], "digit": [0], "pixels": [odd]})
        assert await nearest() == 9999
        await client.delete("digits", [9999])
        assert await nearest() == before
        await client.flush("digits")
    async with home.client() as client:
        assert await client.count("digits", consistency="strong") == len(digits[1])
