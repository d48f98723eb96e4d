"""The log table: each row once, whatever happens between the rows and their commit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError

from tidewal.actors.datanode.delta_files import checkpoint, open_delta
from tidewal.actors.datanode.file_joining import StoredFile, files_of, groups_to_join
from tidewal.actors.datanode.log_table import FlushResult, LogTable
from tidewal.runtime.errors import (
    CorruptLog,
    DirectoryUnwritable,
    Fenced,
    FormatTooNew,
    InvalidRequest,
    InvalidSchema,
)
from tidewal.runtime.tables.table_metadata import commit_name

sys.path.insert(0, str(Path(__file__).parent))
from versions import KEY, SCHEMA, V0, V1, position, versions


def flush(log: LogTable, rows: pa.Table, start: int, end: int, vchannel: str = V0) -> FlushResult:
    return log.flush(rows, start={vchannel: start}, end={vchannel: end}, positions={vchannel: position(end)})


def stored(path: Path) -> list[int]:
    return sorted(DeltaTable(path).to_pyarrow_table(columns=["_ts"])["_ts"].to_pylist())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "flights" / "log"


@pytest.fixture
def log(path: Path) -> LogTable:
    return LogTable.open(path, SCHEMA, KEY)


def parquet_files(path: Path) -> int:
    return len(list(path.glob("*.parquet")))


# ---- what Delta does by itself --------------------------------------------------------------------------------------


def test_delta_refuses_a_commit_on_an_old_snapshot_only_without_retries(log: LogTable, path: Path) -> None:
    schema = DeltaTable(path).schema()
    handles = [DeltaTable(path) for _ in range(3)]
    properties = [CommitProperties(max_commit_retries=retries) for retries in (0, 0, 3)]
    handles[0].create_write_transaction([], "append", schema, commit_properties=properties[0])
    with pytest.raises(CommitFailedError):
        handles[1].create_write_transaction([], "append", schema, commit_properties=properties[1])
    handles[2].create_write_transaction([], "append", schema, commit_properties=properties[2])
    assert DeltaTable(path).version() == 2


def test_delta_accepts_an_append_with_an_older_transaction(tmp_path: Path) -> None:
    rows = pa.table({"id": [1]})
    for version in (10, 5):
        transaction = CommitProperties(max_commit_retries=0, app_transactions=[Transaction("a", version, 0)])
        write_deltalake(tmp_path / "t", rows, mode="append", commit_properties=transaction)
    table = DeltaTable(tmp_path / "t")
    assert table.to_pyarrow_table().num_rows == 2
    assert table.transaction_version("a") == 5


# ---- a flush ---------------------------------------------------------------------------------------------------------


def test_rows_and_position_are_stored_in_one_commit(log: LogTable, path: Path) -> None:
    before = DeltaTable(path).version()
    result = flush(log, versions([1, 2, 3]), 0, 5)
    assert (result.rows, result.replayed, result.version) == (3, False, before + 1)
    assert DeltaTable(path).version() == before + 1
    again = LogTable.open(path)
    assert again.flushed(V0) == 5
    assert again.positions() == {V0: position(5)}
    assert again.flushed(V1) == 0


def test_plain_delta_reads_the_rows_that_were_flushed(log: LogTable, path: Path) -> None:
    rows = versions([1, 2, 3], names=["a", None, "c"], ops=["insert", "upsert", "delete"])
    flush(log, rows, 0, 3)
    found = DeltaTable(path).to_pyarrow_table().sort_by("_ts")
    assert found.column_names == rows.column_names
    assert found.to_pylist() == rows.to_pylist()
    assert found["at"].type == pa.timestamp("us", tz="UTC")
    assert LogTable.open(path).user_schema == SCHEMA


def test_op_codes_and_record_batches_are_taken_too(log: LogTable, path: Path) -> None:
    rows = versions([1, 2])
    rows = rows.set_column(rows.schema.get_field_index("_op"), "_op", pa.array([0, 2], pa.int8()))
    log.flush(rows.to_batches(), start={V0: 0}, end={V0: 2}, positions={V0: position(2)})
    assert DeltaTable(path).to_pyarrow_table()["_op"].to_pylist() == ["insert", "delete"]


def test_an_empty_flush_moves_the_position_only(log: LogTable, path: Path) -> None:
    flush(log, versions([1]), 0, 1)
    log.flush([], start={V0: 1}, end={V0: 9}, positions={V0: position(9)})
    assert log.flushed(V0) == 9
    assert log.positions() == {V0: position(9)}
    assert stored(path) == [1]


def test_a_replayed_flush_stores_nothing(log: LogTable, path: Path) -> None:
    flush(log, versions([1, 2]), 0, 2)
    files = parquet_files(path)
    assert flush(log, versions([1, 2]), 0, 2).replayed
    assert flush(LogTable.open(path), versions([1, 2]), 0, 2).replayed
    assert stored(path) == [1, 2]
    assert parquet_files(path) == files


def test_a_datanode_that_lost_its_channel_is_fenced_and_stores_nothing(log: LogTable, path: Path) -> None:
    flush(log, versions([1, 2]), 0, 2)
    newer = LogTable.open(path)
    flush(newer, versions([3]), 2, 3)
    # The old one still sees the table as it was after its own flush: its first commit conflicts, then it looks again.
    with pytest.raises(Fenced) as fenced:
        flush(log, versions([3, 4, 5]), 2, 5)
    assert (fenced.value.channel, fenced.value.stored) == (V0, 3)
    assert stored(path) == [1, 2, 3]
    with pytest.raises(Fenced):
        flush(log, versions([9]), 8, 9)


def test_a_vchannel_that_comes_back_is_flushed_on(log: LogTable, path: Path) -> None:
    flush(log, versions([1]), 0, 1)
    flush(LogTable.open(path), versions([2]), 1, 2)
    assert not flush(log, versions([3]), 2, 3).replayed
    assert stored(path) == [1, 2, 3]


def test_of_two_flushes_of_the_same_rows_from_one_snapshot_one_is_a_replay(log: LogTable, path: Path) -> None:
    other = LogTable.open(path)
    assert not flush(log, versions([1, 2]), 0, 2).replayed
    assert flush(other, versions([1, 2]), 0, 2).replayed
    assert stored(path) == [1, 2]


def test_flushes_of_other_vchannels_in_between_are_no_harm(log: LogTable, path: Path) -> None:
    other = LogTable.open(path)
    flush(log, versions([1]), 0, 1)
    flush(other, versions([2], vchannel=V1), 0, 2, V1)
    flush(log, versions([3]), 1, 3)
    assert log.positions() == other.positions() == {V0: position(3), V1: position(2)}
    assert stored(path) == [1, 2, 3]


def test_one_flush_of_several_vchannels_is_all_or_nothing(log: LogTable, path: Path) -> None:
    both = pa.concat_tables([versions([1]), versions([2], vchannel=V1)])
    ends = {V0: position(2), V1: position(2)}
    log.flush(both, start={V0: 0, V1: 0}, end={V0: 2, V1: 2}, positions=ends)
    flush(log, versions([3], vchannel=V1), 2, 3, V1)
    both = pa.concat_tables([versions([4]), versions([5], vchannel=V1)])
    with pytest.raises(Fenced, match=V1):
        log.flush(both, start={V0: 2, V1: 2}, end={V0: 5, V1: 5}, positions=ends)
    assert stored(path) == [1, 2, 3]


@pytest.mark.slow
def test_concurrent_flushers_of_different_vchannels_all_succeed(path: Path) -> None:
    LogTable.open(path, SCHEMA, KEY)
    failures: list[BaseException] = []

    def flusher(number: int) -> None:
        vchannel = f"ch_{number}"
        try:
            log = LogTable.open(path)
            for t in range(1, 11):
                flush(log, versions([t], vchannel=vchannel), t - 1, t, vchannel)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=flusher, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert stored(path) == sorted([*range(1, 11)] * 3)
    assert LogTable.open(path).positions() == {f"ch_{number}": position(10) for number in range(3)}


def test_a_commit_that_no_reader_sees_is_made_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library looks for other commits, and creates its own once others have committed and cleaned up."""
    slow, other = (LogTable.open(path, SCHEMA, KEY) for _ in range(2))

    def late(*_: object, **__: object) -> None:
        monkeypatch.undo()
        for t in (1, 2, 3):
            flush(other, versions([t], vchannel=V1), t - 1, t, V1)
        checkpoint(other.location, open_delta(other.location))
        for version in range(3):
            (path / commit_name(version)).unlink()
        (path / commit_name(1)).write_text("{}")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", late)
    assert not flush(slow, versions([1, 2]), 0, 2).replayed
    assert stored(path) == [1, 1, 2, 2, 3]
    assert LogTable.open(path).flushed(V0) == 2


@pytest.mark.slow
def test_positions_and_rows_survive_checkpoints_and_a_handle_left_behind(path: Path) -> None:
    stale = LogTable.open(path, SCHEMA, KEY, checkpoint_every_commits=4)
    log = LogTable.open(path)
    for t in range(1, 14):
        flush(log, versions([t]), t - 1, t)
    assert list((path / "_delta_log").glob("*.checkpoint.parquet"))
    assert stale.flushed(V0) == 13
    assert stale.positions() == {V0: position(13)}
    assert LogTable.open(path).positions() == {V0: position(13)}
    assert stored(path) == list(range(1, 14))


@pytest.mark.slow
def test_a_handle_from_before_a_clean_up_finds_its_way(path: Path) -> None:
    log = LogTable.open(path, SCHEMA, KEY, checkpoint_every_commits=4)
    flush(log, versions([1]), 0, 1)
    stale, bare = LogTable.open(path), DeltaTable(path)
    for t in range(2, 11):
        flush(log, versions([t]), t - 1, t)
    table = DeltaTable(path)
    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 0 seconds"})
    table.cleanup_metadata()
    assert not (path / "_delta_log" / f"{2:020}.json").exists()
    # The name of the next version is free again, but Delta does not take it.
    with pytest.raises(DeltaError, match="Invalid table version"):
        bare.create_write_transaction([], "append", bare.schema())
    assert not (path / "_delta_log" / f"{2:020}.json").exists()
    assert flush(stale, versions([2, 3]), 1, 3).replayed
    assert not flush(LogTable.open(path), versions([11], vchannel=V1), 0, 11, V1).replayed
    assert not flush(stale, versions([11]), 10, 11).replayed
    assert stored(path) == [*range(1, 12), 11]
    assert LogTable.open(path).positions() == {V0: position(11), V1: position(11)}


@pytest.mark.slow
def test_positions_outlive_commits_of_other_tools(log: LogTable, path: Path) -> None:
    for t in (1, 2, 3):
        flush(log, versions([t]), t - 1, t)
    DeltaTable(path).optimize.compact()
    assert log.positions() == LogTable.open(path).positions() == {V0: position(3)}
    flush(log, versions([4]), 3, 4)
    assert stored(path) == [1, 2, 3, 4]


def test_joining_leaves_large_files_alone_and_fills_up_to_a_size() -> None:
    mib = 1024 * 1024
    sizes = [15, 15, 15, 15, 15, 16, 15, 1, 70]
    files = [StoredFile(str(ts), size * mib, ts) for ts, size in enumerate(sizes)]
    assert [[file.lowest_ts for file in group] for group in groups_to_join(files)] == [[0, 1, 2, 3], [4, 6, 7]]
    assert groups_to_join(files[-1:]) == groups_to_join(files[:1]) == []


def test_of_two_that_join_the_same_files_one_changes_nothing(log: LogTable, path: Path) -> None:
    for t in (1, 2, 3):
        flush(log, versions([t]), t - 1, t)
    group = groups_to_join(files_of(DeltaTable(path)))[0]
    other = LogTable.open(path)
    assert log.join_files() == 2
    assert other._join(group) == 0
    assert stored(path) == [1, 2, 3]


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stamps", "start", "end"), [([1], 1, 2), ([3], 1, 2), ([2], 2, 2), ([2], 3, 2)])
def test_rows_outside_the_flush_are_refused(log: LogTable, stamps: list[int], start: int, end: int) -> None:
    with pytest.raises(InvalidRequest):
        flush(log, versions(stamps), start, end)
    assert log.version == 0


def test_rows_of_another_shape_are_refused(log: LogTable) -> None:
    rows = versions([1])
    for wrong in (
        rows.drop_columns(["name"]),
        rows.append_column("more", pa.array([1])),
        rows.set_column(0, "id", pa.array(["no number"])),
        rows.set_column(0, "id", pa.array([None], pa.int64())),
        versions([1], vchannel=V1),
        rows.set_column(rows.schema.get_field_index("_ts"), "_ts", pa.array([None], pa.int64())),
    ):
        with pytest.raises(InvalidRequest):
            flush(log, wrong, 0, 1)
    assert log.version == 0


def test_open_checks_schema_key_and_format(log: LogTable, path: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidSchema):
        LogTable.open(path, SCHEMA.remove(1), KEY)
    with pytest.raises(InvalidSchema):
        LogTable.open(path, SCHEMA, "name")
    with pytest.raises(InvalidSchema):
        LogTable.open(tmp_path / "new", SCHEMA, "absent")
    DeltaTable(path).alter.set_table_properties({"tidewal.format": "2"}, raise_if_not_exists=False)
    with pytest.raises(FormatTooNew):
        LogTable.open(path)
    write_deltalake(tmp_path / "foreign", pa.table({"id": [1]}))
    with pytest.raises(InvalidSchema):
        LogTable.open(tmp_path / "foreign")


# ---- failures --------------------------------------------------------------------------------------------------------


def test_an_absent_table_without_schema_is_an_error(path: Path) -> None:
    with pytest.raises(CorruptLog):
        LogTable.open(path)
    assert not path.exists()


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryUnwritable):
        LogTable.open(tmp_path / "file" / "log", SCHEMA, KEY)


def test_a_log_that_has_gone_is_not_started_anew(log: LogTable, path: Path) -> None:
    flush(log, versions([1]), 0, 1)
    for file in (path / "_delta_log").iterdir():
        file.unlink()
    with pytest.raises(CorruptLog):
        flush(log, versions([2]), 1, 2)
    assert not list((path / "_delta_log").iterdir())


def test_an_unreadable_commit(log: LogTable, path: Path) -> None:
    flush(log, versions([1]), 0, 1)
    (path / "_delta_log" / f"{1:020}.json").write_text("no json")
    with pytest.raises(CorruptLog):
        LogTable.open(path)


FULL_DISK = """
import resource, signal, sys
from test_log_table import *
from tidewal.runtime.errors import DiskFull
log = LogTable.open(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    flush(log, versions(range(2, 2000)), 1, 2000)
except DiskFull:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert log.flushed(V0) == 1
    flush(log, versions([2]), 1, 2)
    print("full, then fine")
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit_bytes", [0, 1000])
def test_a_full_disk_leaves_the_table_as_it_was(log: LogTable, path: Path, limit_bytes: int) -> None:
    flush(log, versions([1]), 0, 1)
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path), str(limit_bytes)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "full, then fine\n", done.stderr
    assert stored(path) == [1, 2]


CRASH = """
import os, sys
from test_log_table import *
from tidewal.actors.datanode import log_table
log = LogTable.open(sys.argv[1])
write_parquet = log_table.write_parquet
def write_and_die(*arguments, **options):
    write_parquet(*arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)
log_table.write_parquet = write_and_die
flush(log, versions([2, 3]), 1, 3)
"""


@pytest.mark.slow
def test_a_crash_between_the_rows_and_their_commit_leaves_no_rows(log: LogTable, path: Path) -> None:
    flush(log, versions([1]), 0, 1)
    died = subprocess.run([sys.executable, "-c", CRASH, str(path)], cwd=Path(__file__).parent, check=False)
    assert died.returncode == -signal.SIGKILL
    assert parquet_files(path) == 2
    assert stored(path) == [1]
    again = LogTable.open(path)
    assert again.flushed(V0) == 1
    assert not flush(again, versions([2, 3]), 1, 3).replayed
    assert stored(path) == [1, 2, 3]


ENDLESS = """
import sys
from test_log_table import *
log = LogTable.open(sys.argv[1])
t = log.flushed(V0)
while True:
    flush(log, versions([t + 1]), t, t + 1)
    t += 1
"""


@pytest.mark.slow
def test_kills_at_any_moment_leave_each_row_once(log: LogTable, path: Path) -> None:
    for kill_at in (4, 9):
        child = subprocess.Popen([sys.executable, "-c", ENDLESS, str(path)], cwd=Path(__file__).parent)
        # A new Parquet file is the sign: the child is between its rows and their commit, or just behind.
        while parquet_files(path) < kill_at and child.poll() is None:
            os.sched_yield()
        child.kill()
        assert child.wait() == -signal.SIGKILL
        again = LogTable.open(path)
        t = again.flushed(V0)
        assert stored(path) == list(range(1, t + 1))
        assert again.positions() == {V0: position(t)}
