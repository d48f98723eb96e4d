"""The current table: at every T, and after any crash, the rows that applying the versions one by one leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from tidewal.actors.datanode import row_merge
from tidewal.actors.datanode.current_table import CurrentTable, compact
from tidewal.actors.datanode.log_reader import NewestVersions, read_current_at
from tidewal.actors.datanode.log_table import LogTable
from tidewal.actors.datanode.row_versions import ORDER, newest, stored_schema
from tidewal.runtime.errors import CorruptLog, InvalidRequest, InvalidSchema
from tidewal.runtime.tables.table_metadata import transaction_of

sys.path.insert(0, str(Path(__file__).parent))
from versions import KEY, SCHEMA, V0, V1, folder_of, position, versions

KEYS = [1, 2, 3, 1, 2, 4, 1, 3, 5, 2]
OPS = ["insert", "insert", "insert", "upsert", "delete", "insert", "delete", "upsert", "insert", "insert"]
STAMPS = list(range(1, 11))


def expected(t: int) -> dict[int, int]:
    """Key to `_ts` of the rows that are there at `t`."""
    rows: dict[int, int] = {}
    for ts, key, op in zip(STAMPS, KEYS, OPS, strict=True):
        if ts <= t:
            rows.pop(key, None)
            if op != "delete":
                rows[key] = ts
    return rows


def stored(path: Path) -> dict[int, int]:
    table = DeltaTable(path).to_pyarrow_table()
    found = dict(zip(table["id"].to_pylist(), table["_ts"].to_pylist(), strict=True))
    assert len(found) == table.num_rows
    return found


@pytest.fixture
def log(tmp_path: Path) -> LogTable:
    log = LogTable.open(tmp_path / "log", SCHEMA, KEY)
    rows = versions(STAMPS, keys=KEYS, ops=OPS)
    for start in (0, 3, 6):
        end = start + 4 if start == 6 else start + 3
        part = rows.slice(start, end - start)
        log.flush(part, start={V0: start}, end={V0: end}, positions={V0: position(end)})
    return log


@pytest.fixture
def current(tmp_path: Path) -> CurrentTable:
    return CurrentTable.open(tmp_path / "current", SCHEMA, KEY)


@pytest.mark.slow
@pytest.mark.parametrize("stops", [[10], [3, 10], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [5, 4, 7]])
@pytest.mark.parametrize("rows_per_step", [1, 3, 100])
def test_compaction_leaves_the_newest_row_of_each_key(
    log: LogTable, current: CurrentTable, stops: list[int], rows_per_step: int
) -> None:
    for upto in stops:
        result = compact(log, current, upto, rows_per_step=rows_per_step)
    reached = max(stops)
    assert stored(folder_of(current)) == expected(reached)
    assert (result.t, result.rows, current.t) == (reached, len(expected(reached)), reached)
    assert CurrentTable.open(folder_of(current)).t == reached


@pytest.mark.slow
def test_rows_keep_their_values(log: LogTable, current: CurrentTable) -> None:
    compact(log, current, 10)
    wanted = versions(STAMPS, keys=KEYS, ops=OPS).to_pylist()
    for row in DeltaTable(folder_of(current)).to_pyarrow_table().to_pylist():
        assert row == {name: wanted[row["_ts"] - 1][name] for name in [*SCHEMA.names, "_ts"]}


def test_filters_on_text_find_rows_in_duckdb_and_pandas(log: LogTable, current: CurrentTable) -> None:
    duckdb = pytest.importorskip("duckdb")
    pytest.importorskip("pandas")
    compact(log, current, 4)
    compact(log, current, 10)
    rows = DeltaTable(folder_of(current)).to_pyarrow_dataset()
    with duckdb.connect() as database:
        database.register("rows", rows)
        assert database.sql("select id from rows where name = 'row 8'").fetchall() == [(3,)]
    assert DeltaTable(folder_of(current)).to_pandas(filters=[("name", "=", "row 8")])["id"].to_list() == [3]


@pytest.mark.parametrize("key", ["id", "name"])
def test_files_that_the_delta_library_merged_are_read_and_replaced(tmp_path: Path, key: str) -> None:
    """Earlier builds let the Delta library write `current`; its texts are of the type string_view."""
    log = LogTable.open(tmp_path / "log", SCHEMA, key)
    log.flush(versions([1, 2]), start={V0: 0}, end={V0: 2}, positions={V0: position(2)})
    current = CurrentTable.open(tmp_path / "current", SCHEMA, key)
    earlier = read_current_at(log, 2).to_table().drop_columns(["_op", "_vchannel", "_term", "_cseq", "_row"])
    commit = CommitProperties(app_transactions=[Transaction(transaction_of("current"), 2)])
    merger = DeltaTable(folder_of(current)).merge(
        earlier.cast(stored_schema(earlier.schema)), "a.id = b.id", "a", "b", commit_properties=commit
    )
    merger.when_not_matched_insert_all().execute()
    [merged] = folder_of(current).glob("*.parquet")
    assert parquet.read_schema(merged).field("name").type == pa.string_view()

    change = versions([3], keys=[2], names=["row 2"])
    log.flush(change, start={V0: 2}, end={V0: 3}, positions={V0: position(3)})
    assert compact(log, current, 3).merged == 1
    assert stored(folder_of(current)) == {1: 1, 2: 3}
    assert not {Path(file).name for file in DeltaTable(folder_of(current)).file_uris()} & {merged.name}


def test_rows_fill_several_files_where_they_are_many(
    log: LogTable, current: CurrentTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    compact(log, current, 4)
    monkeypatch.setattr(row_merge, "WRITTEN_BYTES", 1)
    compact(log, current, 10)
    assert stored(folder_of(current)) == expected(10)
    assert len(DeltaTable(folder_of(current)).file_uris()) > 1


@pytest.mark.parametrize("t", [0, 2, 5, 7, 10])
def test_read_current_at_any_time(log: LogTable, t: int) -> None:
    found = read_current_at(log, t)
    table = found.to_table()
    assert dict(zip(table["id"].to_pylist(), table["_ts"].to_pylist(), strict=True)) == expected(t)
    assert table.num_rows == found.rows
    assert {op: count for op, count in found.counts.items() if count} == {op: OPS[:t].count(op) for op in set(OPS[:t])}
    assert table.select(SCHEMA.names).schema.types == SCHEMA.types


def test_read_one_vchannel(log: LogTable) -> None:
    log.flush(versions([5], keys=[77], vchannel=V1), start={V1: 0}, end={V1: 9}, positions={V1: position(9)})
    assert read_current_at(log, 9, vchannels=[V1]).to_table()["id"].to_pylist() == [77]
    assert read_current_at(log, 9).rows == len(expected(9)) + 1


def test_compaction_stops_at_what_every_vchannel_has_flushed(log: LogTable, current: CurrentTable) -> None:
    log.flush([], start={V1: 0}, end={V1: 9}, positions={V1: position(9)})
    with pytest.raises(InvalidRequest, match=V1):
        compact(log, current, 10)
    assert compact(log, current, 9).t == 9
    assert stored(folder_of(current)) == expected(9)


def test_time_without_rows_moves_the_table_too(log: LogTable, current: CurrentTable) -> None:
    compact(log, current, 10)
    log.flush([], start={V0: 10}, end={V0: 20}, positions={V0: position(20)})
    assert compact(log, current, 20).t == 20
    assert (CurrentTable.open(folder_of(current)).t, stored(folder_of(current))) == (20, expected(10))
    log.flush(versions([21], keys=[99]), start={V0: 20}, end={V0: 21}, positions={V0: position(21)})
    assert compact(log, current, 21).merged == 1
    assert stored(folder_of(current)) == expected(10) | {99: 21}


def test_a_compaction_overtaken_by_another_changes_nothing(log: LogTable, current: CurrentTable) -> None:
    other = CurrentTable.open(folder_of(current))
    compact(log, current, 4)
    rows = read_current_at(log, 2)
    # `other` still has the empty table in hand, as if it had read the log before `current` committed.
    assert not other.merge(_as_changes(rows.to_table()), 2)
    assert stored(folder_of(current)) == expected(4)
    assert compact(log, other, 10).t == 10
    assert compact(log, current, 7).t == 10
    assert stored(folder_of(current)) == expected(10)


def _as_changes(rows: pa.Table) -> NewestVersions:
    rows = rows.select([*SCHEMA.names, "_ts", "_op"])
    rows = rows.cast(stored_schema(rows.schema))
    return NewestVersions(rows.schema, rows.num_rows, {}, iter(rows.to_batches()))


CRASH = """
import os, signal, sys
from tidewal.actors.datanode import current_table
from tidewal.actors.datanode.log_table import LogTable
from tidewal.runtime.tables.local_store import LocalTableLocation
log = LogTable.open(sys.argv[1])
current = current_table.CurrentTable.open(sys.argv[2])
LocalTableLocation.sync = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
current_table.compact(log, current, 10, rows_per_step=5)
"""


@pytest.mark.slow
def test_a_compaction_killed_between_its_steps_goes_on_where_it_was(log: LogTable, current: CurrentTable) -> None:
    reached = []
    while current.t < 10:
        died = subprocess.run([sys.executable, "-c", CRASH, str(folder_of(log)), str(folder_of(current))], check=False)
        assert died.returncode == -signal.SIGKILL
        reached.append(current.t)
        assert stored(folder_of(current)) == expected(reached[-1])
    assert reached == [5, 10]
    assert compact(log, current, 10).merged == 0


@pytest.mark.slow
def test_joining_files_and_vacuum_keep_rows_and_positions(log: LogTable, current: CurrentTable) -> None:
    assert log.join_files() == 2
    assert log.join_files() == 0
    orphan, young = folder_of(log) / "part-old.parquet", folder_of(log) / "part-young.parquet"
    for file in (orphan, young):
        file.write_bytes(b"")
    long_ago = time.time() - 2 * 24 * 3600
    os.utime(orphan, (long_ago, long_ago))
    assert log.vacuum() == 1
    assert (orphan.exists(), young.exists()) == (False, True)
    with pytest.raises(InvalidRequest):
        log.vacuum(0)
    assert LogTable.open(folder_of(log)).positions() == log.positions() == {V0: position(10)}
    compact(log, current, 10, rows_per_step=3)
    assert current.vacuum() == 0
    assert stored(folder_of(current)) == expected(10)
    log.flush(versions([11]), start={V0: 10}, end={V0: 11}, positions={V0: position(11)})
    assert read_current_at(log, 11).rows == len(expected(10)) + 1


def test_a_flush_from_before_joining_starts_over(log: LogTable) -> None:
    other = LogTable.open(folder_of(log))
    log.join_files()
    assert not other.flush(versions([11]), start={V0: 10}, end={V0: 11}, positions={V0: position(11)}).replayed
    assert log.positions() == {V0: position(11)}


def test_missing_files_are_told(log: LogTable, current: CurrentTable) -> None:
    next(folder_of(log).glob("*.parquet")).unlink()
    with pytest.raises(CorruptLog):
        compact(log, current, 10)
    with pytest.raises(CorruptLog):
        read_current_at(log, 10)
    assert current.t == 0


def test_tables_of_different_columns(log: LogTable, tmp_path: Path) -> None:
    with pytest.raises(InvalidSchema):
        compact(log, CurrentTable.open(tmp_path / "other", SCHEMA.remove(1), KEY), 10)


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), unique=True),
    st.booleans(),
)
def test_newest_picks_the_highest_order_of_each_key(rows: list[tuple[int, int, int, int]], text: bool) -> None:
    keys = [f"k{row[0]}" if text else row[0] for row in rows]
    columns = {name: [row[place + 1] for row in rows] for place, name in enumerate(ORDER)}
    table = pa.table({"key": pa.array(keys, pa.string() if text else pa.int64()), **columns})
    picked = {row for row, mark in zip(rows, newest(table, "key"), strict=True) if mark}
    best: dict[int, tuple[int, int, int, int]] = {}
    for row in rows:
        best[row[0]] = max(best.get(row[0], row), row)
    assert picked == set(best.values())
