"""What Delta Lake says of damage, in Tidewal's errors: one line, which a log, a status and a terminal can show."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tidewal.actors.datanode.delta_errors import storage_errors
from tidewal.runtime.errors import CorruptLog


@pytest.fixture
def table(tmp_path: Path) -> DeltaTable:
    write_deltalake(tmp_path, pa.table({"id": [1, 2]}))
    return DeltaTable(tmp_path)


def test_a_missing_file_is_named_with_the_cause_and_without_colours(table: DeltaTable, tmp_path: Path):
    (file,) = tmp_path.glob("*.parquet")
    file.unlink()
    with pytest.raises(CorruptLog) as caught, storage_errors("things"):
        table.to_pyarrow_table()
    assert caught.value.message == (
        f"the table things cannot be read: Object at location {file} not found: No such file or directory (os error 2)"
    )


def test_a_damaged_commit_is_told_without_a_backtrace(table: DeltaTable, tmp_path: Path):
    (commit,) = (tmp_path / "_delta_log").glob("*.json")
    commit.write_text("{garbage")
    with pytest.raises(CorruptLog) as caught, storage_errors("things"):
        DeltaTable(tmp_path)
    assert caught.value.message.startswith("the table things cannot be read: Kernel error: Json error")
    assert "\n" not in caught.value.message
    assert "unknown" not in caught.value.message
