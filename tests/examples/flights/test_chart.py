"""The chart: a PNG of the announced size for any windows, with what is drawn in it taken from them."""

from __future__ import annotations

import struct
import sys
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from examples.flights import chart
from examples.flights.expectation import expect
from tidewal.runtime.errors import InvalidRequest

pytestmark = pytest.mark.slow


def size_of(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


@pytest.mark.parametrize("limit", [0, 400, 30_000])
def test_any_number_of_events_can_be_drawn(tmp_path: Path, limit: int) -> None:
    pytest.importorskip("matplotlib")
    path = chart.draw(expect(limit).windows, tmp_path / "delays.png")
    assert size_of(path) == (1200, 780)


def test_hours_are_those_of_new_york_and_the_night_ends_the_day_before() -> None:
    windows = pa.table(
        {
            "origin": ["JFK", "JFK", "JFK", "EWR"],
            "hour": [
                datetime(2013, 1, 1, 15, tzinfo=UTC),  # 10:00 in winter
                datetime(2013, 7, 1, 14, tzinfo=UTC),  # 10:00 in summer
                datetime(2013, 7, 1, 4, tzinfo=UTC),  # midnight
                datetime(2013, 7, 1, 14, tzinfo=UTC),
            ],
            "departures": [1, 3, 1, 1],
            "mean_dep_delay": [10.0, 2.0, 200.0, 7.0],
        }
    )
    days = chart._by_hour_of_day(windows)
    assert {name: (hour.departures, hour.mean_minutes) for name, hour in days["JFK"].items()} == {
        10: (4, 4.0),
        24: (1, 200.0),
    }
    assert list(chart._worth_drawing(days["JFK"])) == [10]
    assert not days["LGA"]


def test_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    windows = expect(0).windows
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidRequest, match="pip install matplotlib"):
        chart.draw(windows, tmp_path / "delays.png")
    assert not list(tmp_path.iterdir())
