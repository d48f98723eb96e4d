"""Whether all readers of the log saw the same: one column for each reader, one row for each value compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa
from deltalake import DeltaTable
from pyarrow import compute

from tidewal import Client, errors

from .checksum import checksum
from .expectation import Expectation
from .flights import COLLECTION
from .retry import retry_until

pc = cast(Any, compute)  # its stubs refuse plain values as arguments

ORIGINS = ("EWR", "JFK", "LGA")
OPS = ("insert", "upsert", "delete")
DIGITS = 10  # of a number shown: more than any count here has


@dataclass(frozen=True, slots=True)
class ReaderView:
    """What one reader saw. `windows` is None for a reader that does not look back."""

    name: str
    versions: Mapping[str, int]
    current_rows: int
    checksum: int
    in_air_jfk: int
    windows: pa.Table | None = None

    @staticmethod
    def of(name: str, versions: Mapping[str, int], current: pa.Table, windows: pa.Table | None = None) -> ReaderView:
        """The view of a reader that holds `current` as its current rows."""
        in_air = pc.and_(pc.equal(current["status"], "departed"), pc.equal(current["origin"], "JFK"))
        return ReaderView(name, versions, current.num_rows, checksum(current), pc.sum(in_air).as_py() or 0, windows)

    def values(self) -> dict[str, str]:
        """The values that are compared, as text by name."""
        shown = {f"{op}s": f"{self.versions.get(op, 0):,}" for op in OPS}
        shown["current rows"] = f"{self.current_rows:,}"
        shown["their checksum"] = f"{self.checksum:016x}"
        shown["in the air from JFK"] = f"{self.in_air_jfk:,}"
        if self.windows is not None:
            shown["departure windows"] = f"{self.windows.num_rows:,}"
            shown["checksum of these"] = f"{checksum(self.windows):016x}"
        return shown


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that a reader saw and that was not expected."""

    what: str
    reader: str
    expected: str
    found: str


def expected_view(expectation: Expectation) -> ReaderView:
    """What pyarrow computes from the file alone."""
    return ReaderView(
        "expected",
        expectation.versions,
        expectation.current_rows,
        expectation.checksum,
        expectation.in_air_jfk,
        expectation.windows,
    )


async def querynode_view(client: Client, upto: int) -> ReaderView:
    """What the QueryNode holds, once it has applied everything up to `upto`; there must be no writes meanwhile."""
    stats = await retry_until(client.stats, COLLECTION, consistency="strong")
    tables: list[pa.Table] = []
    for origin in ORIGINS:  # a result is one message, which has a size limit
        answer = await retry_until(client.query, COLLECTION, f'origin == "{origin}"', consistency="strong")
        if answer.tsafe < upto:
            raise errors.TidewalError(f"a strong answer is as of {answer.tsafe}, before the cut at {upto}")
        tables.append(answer.table)
    return ReaderView.of("QueryNode", stats.versions, pa.concat_tables(tables))


def commits(tables: str) -> int:
    """How many commits the table `log` has, below the path or URL `tables`."""
    return DeltaTable(f"{tables}/{COLLECTION}/log").version() + 1


def delta_view(tables: str, upto: int) -> ReaderView:
    """What the two tables hold, opened with plain `deltalake`."""
    log = DeltaTable(f"{tables}/{COLLECTION}/log").to_pyarrow_table(
        columns=["_ts", "_op", "origin", "status", "event_time", "dep_delay"]
    )
    log = log.filter(pc.less_equal(log["_ts"], upto))
    counted = log.group_by("_op").aggregate([([], "count_all")]).to_pylist()
    versions = {cast(str, row["_op"]): cast(int, row["count_all"]) for row in counted}
    current = DeltaTable(f"{tables}/{COLLECTION}/current").to_pyarrow_table()
    return ReaderView.of("Delta", versions, current, _windows(log))


def _windows(log: pa.Table) -> pa.Table:
    """Departures and their mean delay by origin and hour of event time."""
    departures = log.filter(pc.and_(pc.equal(log["_op"], "upsert"), pc.equal(log["status"], "departed")))
    hour = pc.floor_temporal(departures["event_time"], unit="hour")
    means = departures.append_column("hour", hour).group_by(["origin", "hour"])
    table = means.aggregate([("dep_delay", "count"), ("dep_delay", "mean")])
    table = table.select(["origin", "hour", "dep_delay_count", "dep_delay_mean"])
    return table.rename_columns(["origin", "hour", "departures", "mean_dep_delay"])


def compare(expected: ReaderView, views: Sequence[ReaderView]) -> list[Difference]:
    """All values of `views` that differ from the expected ones."""
    wanted = expected.values()
    return [
        Difference(what, view.name, wanted[what], found)
        for view in views
        for what, found in view.values().items()
        if found != wanted[what]
    ]


def rows(expected: ReaderView, views: Sequence[ReaderView], good: str, bad: str) -> list[list[str]]:
    """The comparison as the rows of a table, each value marked. Of a checksum the first digits are shown."""
    shown = [view.values() for view in views]
    lines: list[list[str]] = []
    for what, wanted in expected.values().items():
        cells = [
            f"{each[what][:DIGITS]} {good if each[what] == wanted else bad}" if what in each else "-" for each in shown
        ]
        lines.append([what, wanted[:DIGITS], *cells])
    return lines
