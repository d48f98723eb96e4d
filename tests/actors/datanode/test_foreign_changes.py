"""Other tools may read the tables, optimize and vacuum them; where one changes rows, T is no longer true."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable, write_deltalake
from typer.testing import CliRunner

from tidewal.actors.datanode.current_table import CurrentTable, compact
from tidewal.actors.datanode.log_reader import read_current_at
from tidewal.actors.datanode.log_table import LogTable
from tidewal.cli.main import app
from tidewal.runtime.errors import CorruptLog

sys.path.insert(0, str(Path(__file__).parent))
from versions import KEY, SCHEMA, V0, folder_of, position, versions

LAST = 5  # the version of the table, and its T


@pytest.fixture
def log(tmp_path: Path) -> LogTable:
    log = LogTable.open(tmp_path / "flights" / "log", SCHEMA, KEY)
    for t in range(1, LAST + 1):
        flush(log, t)
    assert log.version == LAST
    return log


def flush(log: LogTable, t: int):
    return log.flush(versions([t]), start={V0: t - 1}, end={V0: t}, positions={V0: position(t)})


def stored(log: LogTable) -> list[int]:
    return sorted(DeltaTable(folder_of(log)).to_pyarrow_table(columns=["_ts"])["_ts"].to_pylist())


def append(table: DeltaTable) -> None:
    write_deltalake(table, table.to_pyarrow_table().slice(0, 1), mode="append")


def overwrite(table: DeltaTable) -> None:
    write_deltalake(table, table.to_pyarrow_table().slice(0, 1), mode="overwrite")


def optimize(table: DeltaTable) -> None:
    table.optimize.compact()
    table.vacuum(0, dry_run=False, enforce_retention_duration=False)


def delete_and_restore_what_is_left(table: DeltaTable) -> None:
    table.delete("id < 3")
    table.optimize.compact()
    table.restore(LAST + 1)


CHANGES: dict[str, Callable[[DeltaTable], object]] = {
    "restore": lambda table: table.restore(1),
    "delete": lambda table: table.delete("id < 3"),
    "append": append,
    "overwrite": overwrite,
    "delete and restore": delete_and_restore_what_is_left,
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_rows_that_another_tool_changed_are_no_answer_until_it_is_undone(log: LogTable, change) -> None:
    other = LogTable.open(folder_of(log))
    other.positions()
    change(DeltaTable(folder_of(log)))
    left = stored(log)
    calls: list[Callable[[], object]] = [
        lambda: flush(log, LAST + 1),
        lambda: LogTable.open(folder_of(log)).flushed(V0),
        lambda: flush(LogTable.open(folder_of(log)), LAST),  # a replay, were the rows still there
        lambda: read_current_at(LogTable.open(folder_of(log)), LAST),
        lambda: read_current_at(log, LAST),
        log.join_files,
        log.vacuum,
        log.positions,
    ]
    for call in calls:
        with pytest.raises(CorruptLog, match=r"version 6 of .*log \([A-Z]+\) is another tool's") as caught:
            call()
    assert stored(log) == left
    error = caught.value
    assert error.fields["version"] == LAST + 1
    assert str(error.fields["operation"]) in error.message
    assert f"DeltaTable({str(folder_of(log))!r}).restore({LAST})" in error.message
    DeltaTable(folder_of(log)).restore(LAST)
    assert flush(other, LAST).replayed
    flush(log, LAST + 1)
    assert stored(log) == list(range(1, LAST + 2))
    assert LogTable.open(folder_of(log)).positions() == {V0: position(LAST + 1)}


@pytest.mark.slow
def test_what_keeps_the_rows_is_allowed(log: LogTable) -> None:
    optimize(DeltaTable(folder_of(log)))
    flush(log, LAST + 1)
    optimize(DeltaTable(folder_of(log)))
    DeltaTable(folder_of(log)).alter.set_table_properties({"a": "b"}, raise_if_not_exists=False)
    DeltaTable(folder_of(log)).create_checkpoint()
    flush(LogTable.open(folder_of(log)), LAST + 2)
    assert stored(log) == list(range(1, LAST + 3))
    assert log.flushed(V0) == LAST + 2


@pytest.mark.slow
def test_a_restore_from_before_an_optimize_undoes_it(log: LogTable) -> None:
    DeltaTable(folder_of(log)).optimize.compact()
    assert log.flushed(V0) == LAST  # has looked at it
    DeltaTable(folder_of(log)).delete("id < 3")
    DeltaTable(folder_of(log)).restore(LAST)
    flush(log, LAST + 1)
    assert stored(log) == list(range(1, LAST + 2))


@pytest.mark.slow
def test_current_rows_that_another_tool_changed_are_not_built_upon(log: LogTable) -> None:
    path = folder_of(log).parent / "current"
    compact(log, CurrentTable.open(path, SCHEMA, KEY), LAST)
    version = DeltaTable(path).version()
    optimize(DeltaTable(path))
    flush(log, LAST + 1)
    compact(log, CurrentTable.open(path), LAST + 1)
    opened, sound = CurrentTable.open(path), DeltaTable(path).version()
    assert (opened.t, opened.rows) == (LAST + 1, LAST + 1)
    assert CurrentTable.open(path).vacuum() == 0
    DeltaTable(path).restore(version)
    for table in (opened, CurrentTable.open(path)):
        with pytest.raises(CorruptLog, match=r"current \(RESTORE\) is another tool's"):
            compact(log, table, LAST + 1)
    DeltaTable(path).restore(sound)
    assert compact(log, opened, LAST + 1).rows == LAST + 1


@pytest.mark.slow
def test_verify_names_the_table_that_another_tool_changed(log: LogTable) -> None:
    root = folder_of(log).parent.parent
    compact(log, CurrentTable.open(folder_of(log).parent / "current", SCHEMA, KEY), LAST)
    for name, version in (("log", 1), ("current", 0)):
        sound = DeltaTable(folder_of(log).parent / name).version()
        assert verify(root)[0] == 0
        DeltaTable(folder_of(log).parent / name).restore(version)
        status, damaged = verify(root)
        assert status == 1
        assert [(each["table"], each["file"]) for each in damaged] == [(name, "")]
        assert "(RESTORE) is another tool's" in damaged[0]["damage"]
        DeltaTable(folder_of(log).parent / name).restore(sound)
    assert verify(root) == (0, [])


def verify(root: Path) -> tuple[int, list[dict]]:
    result = CliRunner().invoke(app, ["verify", "tables", str(root), "--json"])
    return result.exit_code, [told for line in result.output.splitlines() if (told := json.loads(line)).get("damage")]
