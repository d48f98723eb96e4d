"""Rows and vectors as a user writes them, for mypy and pyright in their strict modes, as `actors.py` is."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import tidewal


class Store:
    """A wrapper of a user: its arguments have the types of the client's."""

    def __init__(
        self,
        client: tidewal.Client,
        consistency: tidewal.Consistency = "strong",
        metric: tidewal.Metric = "L2",
    ) -> None:
        self._client = client
        self._consistency: tidewal.Consistency = consistency
        self._metric: tidewal.Metric = metric

    async def add(self, rows: tidewal.Rows) -> None:
        await self._client.insert("points", rows)

    async def remove(self, keys: tidewal.Keys) -> None:
        await self._client.delete("points", keys)

    async def near(
        self, vector: tidewal.Vector, filter: str, filter_params: tidewal.FilterParams
    ) -> tidewal.QueryResult:
        return await self._client.search(
            "points",
            "at",
            vector,
            metric=self._metric,
            filter=filter,
            filter_params=filter_params,
            consistency=self._consistency,
        )


async def with_numpy(store: Store, embedding: npt.NDArray[np.float32], of_a_library: npt.NDArray[Any]) -> None:
    """Embeddings are arrays."""
    await store.near(embedding, "id == {id}", {"id": 1})
    await store.near(of_a_library, "id in {ids}", {"ids": np.arange(3)})
    await store.near(np.ones(3), "id in {ids} and name == {name}", {"ids": [1, 2], "name": "x"})
    await store.near(np.arange(3), "name is {name}", {"name": None})
    await store.near([1.0, 2.0, 3.0], "flag == {flag}", {"flag": True})
    await store.near((1, 2, 3), "name in {names}", {"names": ("a", "b")})
    await store.add({"id": [1, 2], "at": np.ones((2, 3), np.float32)})
    await store.add([{"id": 1, "at": np.ones(3)}])


def sync(client: tidewal.SyncClient, embedding: npt.NDArray[np.float64]) -> tidewal.QueryResult:
    """The other client takes the same."""
    return client.search("points", "at", embedding, filter="id > {id}", filter_params={"id": np.pi})


async def wrong(client: tidewal.Client, store: Store) -> None:
    """What no checker lets pass."""
    await store.near("1, 2, 3", "", {})  # type: ignore
    await client.count("points", "id == {id}", filter_params={"id": {"a": 1}})  # type: ignore
    await client.count("points", consistency="storng")  # type: ignore
    Store(client, metric="l2")  # type: ignore


class Framed:
    """A data frame of a library with Arrow's interface."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        raise NotImplementedError


async def with_bad_rows(client: tidewal.Client, lines: list[str]) -> str:
    """The error says which of the user's own rows and columns is wrong."""
    try:
        await client.insert("points", Framed())
    except tidewal.errors.InvalidRows as error:
        line: str = "all" if error.row is None else lines[error.row]
        return f"{error.column or 'row'} of {line}"
    return ""


def unguarded(error: tidewal.errors.InvalidRows, lines: list[str]) -> str:
    """Not each error is one of a single row."""
    return lines[error.row]  # type: ignore
