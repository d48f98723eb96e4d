"""A node whose tables lie in a bucket, as a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import Command, Start, said
from tests.objects.faulty_http import FaultyStore
from tidewal.runtime.tables import object_options

pytestmark = pytest.mark.slow


def test_a_node_keeps_its_tables_in_a_bucket_and_others_check_them(
    start: Start, command: Command, tmp_path: Path, bucket: str
) -> None:
    tables = f"{bucket}/tables"
    process = start("run", "--data", tmp_path / "data", "--tables", tables, "--json")
    where = said(process)
    assert where["tables"] == tables
    log = where["wal"]
    assert command("create", log, "things", "--field", "id:int64", "--primary-key", "id").status == 0
    (tmp_path / "things.jsonl").write_text('{"id": 1}\n{"id": 2}\n')
    assert command("insert", log, "things", tmp_path / "things.jsonl").status == 0
    assert command("compact", log, "things").status == 0
    checked = command("verify", "tables", tables)
    assert checked.status == 0, checked.err
    assert checked.out.splitlines()[-1].startswith("intact; 2 files, 4 rows")
    assert not (tmp_path / "data" / "tables").exists()


def test_a_prefix_without_tables_is_no_intact_one(command: Command, bucket: str) -> None:
    ended = command("verify", "tables", f"{bucket}/nowhere")
    assert (ended.status, "ConfigError" in ended.err) == (2, True)


def test_a_bucket_that_is_not_there_ends_a_node(command: Command, tmp_path: Path, bucket: str) -> None:
    ended = command("run", "--data", tmp_path / "data", "--tables", f"{bucket}-of-nobody/tables")
    assert ended.status == 2
    assert "NoSuchBucket" in ended.err


def test_a_store_that_is_away_is_a_line_and_no_traceback(
    command: Command, bucket: str, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_options, "RETRY_S", 1)
    faulty.fault = lambda request, forward: False
    ended = command("verify", "tables", f"{bucket}/tables")
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert "Unavailable" in ended.err
