"""A Python developer: rows from a script, in a database that is there, today."""

from __future__ import annotations

import pytest

from tests.first_hour.stranger import Stranger, example

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.in_turn(1, 3)]

OWN = """
import tidewal
from datetime import UTC, datetime, timedelta

schema = tidewal.CollectionSchema(
    "orders",
    (
        tidewal.Field("id", "int64"),
        tidewal.Field("customer", "varchar"),
        tidewal.Field("price", "double", nullable=True),
        tidewal.Field("at", "timestamp"),
    ),
    "id",
)
start = datetime(2026, 1, 1, tzinfo=UTC)
with tidewal.connect_sync("data") as client:
    client.create_collection(schema)
    rows = [
        {"id": number, "customer": f"c{number % 7}", "price": number / 4, "at": start + timedelta(minutes=number)}
        for number in range(1000)
    ]
    client.insert("orders", rows)
    client.upsert("orders", [{"id": 0, "customer": "c0", "price": None, "at": start}])
    client.delete("orders", [7, 14])
    try:
        client.insert("orders", [{"id": "one", "customer": "c1", "at": start}])
    except tidewal.TidewalError as error:
        print(type(error).__name__, error)
    print(client.count("orders", consistency="strong"))
"""

LATER = """
import tidewal

with tidewal.connect_sync("data") as client:
    found = client.query(
        "orders",
        'customer == "c0" and at < "2026-01-01T01:00:00Z"',
        columns=["id", "price"],
        order_by=[("id", True)],
        consistency="strong",
    )
    print(found.table.to_pylist())
"""


def test_rows_are_written_asked_for_and_still_there_tomorrow(stranger: Stranger) -> None:
    page = stranger.reads("README.md", "Tidewal")
    stranger.installs("'tidewal[node]'")
    node = stranger.starts("tidewal run --data data")
    node.until("running")
    stranger.writes("cities.py", example(page, "connect_sync"), typed=False)
    assert stranger.types("python cities.py") == "[{'id': 2, 'name': 'Porto'}]\n"

    stranger.reads("docs/collections.md", "Connect", "Schema", "Writing", "Asking")
    stranger.writes("orders.py", OWN)
    refused, count = stranger.types("python -W error orders.py").splitlines()
    assert "id" in refused
    assert count == "998"

    assert node.end() == 0
    stranger.starts("tidewal run --data data").until("running")
    stranger.writes("later.py", LATER)
    expected = [{"id": 0, "price": None}] + [{"id": number, "price": number / 4} for number in (21, 28, 35, 42, 49, 56)]
    assert stranger.types("python -W error later.py") == f"{expected}\n"
