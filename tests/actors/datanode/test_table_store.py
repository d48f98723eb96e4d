"""Where tables lie is one seam: what is durable when on a file system, and a store of another kind works as well."""

from __future__ import annotations

import ast
import os
import sys
import uuid
from io import BytesIO
from pathlib import Path

import pytest
from deltalake import DeltaTable

import tidewal
from tidewal.actors.datanode.current_table import CurrentTable, compact
from tidewal.actors.datanode.log_table import CHECKPOINT_EVERY_COMMITS, LogTable
from tidewal.runtime.errors import ConfigError, DirectoryUnwritable
from tidewal.runtime.tables.digests import digest_in, digest_of
from tidewal.runtime.tables.table_metadata import commit_name
from tidewal.runtime.tables.table_store import (
    CURRENT,
    LOG,
    TableStore,
    open_tables,
    table_at,
)

sys.path.insert(0, str(Path(__file__).parent))
from versions import KEY, SCHEMA, V0, position, versions

# What touches tables outside the store and may not know that they lie on a file system.
FLOORS = ("actors/datanode", "actors/querynode", "actors/mixcoord", "spark_bridge/plan", "spark_bridge/scan")
FILE_SYSTEM = {"pathlib", "shutil", "os", "tempfile", "glob"}


def filled(store: TableStore) -> LogTable:
    log = LogTable.open(store.table("flights", LOG), SCHEMA, KEY)
    for t in range(1, 6):
        log.flush(versions([t]), start={V0: t - 1}, end={V0: t}, positions={V0: position(t)})
    compact(log, CurrentTable.open(store.table("flights", CURRENT), SCHEMA, KEY), 5)
    return log


def test_only_the_users_own_programs_read_the_files(tmp_path: Path):
    before = os.umask(0o022)
    try:
        store = open_tables(tmp_path / "tables")
        store.prepare()
        log = filled(store)
        current = CurrentTable.open(store.table("flights", CURRENT), SCHEMA, KEY)
        for t in range(6, CHECKPOINT_EVERY_COMMITS + 2):
            log.flush(versions([t]), start={V0: t - 1}, end={V0: t}, positions={V0: position(t)})
            compact(log, current, t)
        log.join_files()
        log.vacuum()
        current.vacuum()
    finally:
        os.umask(before)
    paths = list((tmp_path / "tables").rglob("*"))
    assert {path.name for path in paths} >= {f"{CHECKPOINT_EVERY_COMMITS:020}.checkpoint.parquet", "_last_checkpoint"}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o700}
    assert {path.name: path.stat().st_mode & 0o777 for path in paths if path.is_file()} == dict.fromkeys(
        (path.name for path in paths if path.is_file()), 0o600
    )


# ---- on a file system -----------------------------------------------------------------------------------------------


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of all files and folders that are synced, in their order."""
    paths: list[str] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    return paths


def test_rows_are_durable_before_the_commit_that_names_them_exists(tmp_path: Path, synced: list[str]) -> None:
    log = LogTable.open(tmp_path / "flights" / "log", SCHEMA, KEY)
    created = {str(tmp_path), *(str(tmp_path / part) for part in ("flights", "flights/log", "flights/log/_delta_log"))}
    assert created < set(synced), "the names of a new table are durable, up to the store"
    synced.clear()
    commit = DeltaTable.create_write_transaction

    def watched(table: DeltaTable, *arguments: object, **options: object) -> None:
        assert [Path(path).suffix for path in synced] == [".parquet", ""]
        assert synced[1] == log.location.uri
        commit(table, *arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DeltaTable, "create_write_transaction", watched)
        log.flush(versions([1]), start={V0: 0}, end={V0: 1}, positions={V0: position(1)})
    assert synced[2:] == [f"{log.location}/{commit_name(1)}", f"{log.location}/_delta_log"]


def test_what_a_compaction_writes_is_durable_before_its_commit(tmp_path: Path, synced: list[str]) -> None:
    log = LogTable.open(tmp_path / "log", SCHEMA, KEY)
    log.flush(versions([1, 2]), start={V0: 0}, end={V0: 2}, positions={V0: position(2)})
    current = CurrentTable.open(tmp_path / "current", SCHEMA, KEY)
    synced.clear()
    compact(log, current, 2)
    [added] = (tmp_path / "current").glob("*.parquet")
    assert added.name.startswith(Path(synced[0]).stem), "a file gets its digest into its name once it is synced"
    assert synced[1:] == [
        current.location.uri,
        f"{current.location}/{commit_name(1)}",
        f"{current.location}/_delta_log",
    ]


def test_a_created_file_has_the_digest_of_its_bytes(tmp_path: Path) -> None:
    name, size = table_at(tmp_path).create(f"part-{uuid.uuid4()}", lambda file: file.write(b"rows") and None)
    assert (tmp_path / name).read_bytes() == b"rows"
    assert (size, digest_in(name)) == (4, digest_of(BytesIO(b"rows")))


def test_a_table_is_there_with_its_first_commit_and_stays_there_without_its_log(tmp_path: Path) -> None:
    location = table_at(tmp_path / "log")
    assert not location.exists()
    (tmp_path / "log" / "_delta_log").mkdir(parents=True)
    assert not location.exists(), "the Delta library makes the folder before the commit"
    log = LogTable.open(location, SCHEMA, KEY)
    assert location.exists()
    log.flush(versions([1]), start={V0: 0}, end={V0: 1}, positions={V0: position(1)})
    for commit in (tmp_path / "log" / "_delta_log").glob("*.json"):
        commit.unlink()
    assert location.exists()


@pytest.mark.parametrize("uri", ["hdfs://host/tables/people/log", "file://host/tables", "gs:/tables"])
def test_tables_elsewhere_are_refused(uri: str) -> None:
    for opened in (open_tables, table_at):
        with pytest.raises(ConfigError) as caught:
            opened(uri)
        assert caught.value.key == "tables"


def test_a_store_is_named_by_path_or_url(tmp_path: Path) -> None:
    filled(open_tables(tmp_path))
    for uri in (str(tmp_path), f"file://{tmp_path}", f"file:{tmp_path}"):
        store = open_tables(uri)
        assert (store.uri, [table.name for table in store.tables()]) == (str(tmp_path), [LOG, CURRENT])
        assert {table.collection for table in store.tables()} == {"flights"}
    assert open_tables(tmp_path / "nowhere").tables() == []


def test_only_the_store_knows_the_file_system() -> None:
    root = Path(tidewal.__file__).parent
    for floor in FLOORS:
        for module in (root / floor).rglob("*.py"):
            for node in ast.walk(ast.parse(module.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                assert not FILE_SYSTEM & {name.partition(".")[0] for name in names}, module


def test_a_store_gets_one_id_whoever_asks_first_and_keeps_it(tmp_path: Path):
    one, other = (open_tables(tmp_path / name) for name in ("one", "other"))
    for store in (one, other):
        store.prepare()
    assert one.identity() == one.identity() == open_tables(tmp_path / "one").identity() != other.identity()
    assert one.tables() == []
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [".store"]


def test_a_store_that_cannot_be_written_gets_no_id(tmp_path: Path):
    (tmp_path / "tables").write_text("")
    with pytest.raises(DirectoryUnwritable):
        open_tables(tmp_path / "tables").identity()
