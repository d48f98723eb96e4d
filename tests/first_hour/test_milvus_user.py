"""A Milvus user: a collection with vectors, upserts, searches with filters, deletes and counts, without a cluster."""

from __future__ import annotations

import json

import pytest

from tests.first_hour.stranger import Stranger, example

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.in_turn(1, 3)]

VECTORS = """
import json
import numpy as np
import tidewal

DIM = 16
random = np.random.default_rng(7)
vectors = random.standard_normal((2000, DIM)).astype(np.float32)
asked = vectors[123] + 0.01
schema = tidewal.CollectionSchema(
    "books",
    (
        tidewal.Field("id", "int64"),
        tidewal.Field("genre", "varchar"),
        tidewal.Field("vector", "float_vector", dim=DIM),
    ),
    "id",
)
told = {}
with tidewal.connect_sync("data") as client:
    client.create_collection(schema, shards=2)
    genres = ["novel" if number % 3 else "poem" for number in range(2000)]
    client.insert("books", {"id": np.arange(2000), "genre": genres, "vector": vectors})
    for metric in ("L2", "IP", "COSINE"):
        near = client.search("books", "vector", asked, metric=metric, top_k=5, consistency="strong")
        told[metric] = near.table["id"].to_pylist()
    poems = client.search(
        "books", "vector", asked, top_k=5, filter='genre == "poem"', columns=["genre"], consistency="strong"
    )
    told["poems"] = poems.table["genre"].to_pylist()
    client.upsert("books", {"id": [5000], "genre": ["poem"], "vector": asked[None, :]})
    client.delete("books", [123])
    near = client.search("books", "vector", asked, metric="L2", top_k=1, consistency="strong")
    told["replaced"] = near.table["id"].to_pylist()
    told["count"] = client.count("books", consistency="strong")
    told["poems left"] = client.count("books", 'genre == "poem"', consistency="strong")
    told["gone"] = client.get("books", [123], consistency="strong").table.num_rows

squared = ((vectors - asked) ** 2).sum(axis=1)
inner = vectors @ asked
cosine = inner / np.linalg.norm(vectors, axis=1)
told["expected"] = [np.argsort(squared)[:5].tolist(), np.argsort(-inner)[:5].tolist(), np.argsort(-cosine)[:5].tolist()]
print(json.dumps(told))
"""


def test_vectors_are_found_filtered_replaced_and_deleted(stranger: Stranger) -> None:
    stranger.reads("README.md", "Tidewal")
    stranger.installs("'tidewal[node]'")
    page = stranger.reads("docs/collections.md")
    stranger.writes("first.py", example(page, "search"), typed=False)
    assert stranger.types("python first.py").splitlines()[-1] == "['id', '_distance'] [1]"
    # The example had the directory to itself; a node goes on with it, and other programs connect.
    stranger.starts("tidewal run --data data").until("running")
    stranger.writes("books.py", VECTORS)
    told = json.loads(stranger.types("python -W error books.py"))
    assert [told["L2"], told["IP"], told["COSINE"]] == told["expected"]
    assert told["poems"] == ["poem"] * 5
    assert told["replaced"] == [5000]
    assert (told["count"], told["gone"]) == (2000, 0)
    assert told["poems left"] == len(range(0, 2000, 3)) + 1 - (123 % 3 == 0)
    nearest = stranger.types("tidewal search data/log cities at '[37.0, -7.0]' --metric l2 --top-k 1 --json")
    assert json.loads(nearest.splitlines()[0])["id"] == 1
