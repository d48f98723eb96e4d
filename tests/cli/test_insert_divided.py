"""`tidewal insert` into a log that takes small commits only."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.commands import Command, Start, said

pytestmark = pytest.mark.slow

COUNT = 3_000  # of rows, of a kilobyte each: one batch, and three commits or more


@pytest.fixture
def log(start: Start, command: Command, tmp_path: Path) -> str:
    """The URL of a log with segments of 1 MiB, and an empty collection "texts"."""
    settings = tmp_path / "settings.yaml"
    settings.write_text("rocksmq: {segmentSizeInMB: 1}\n")
    process = start("run", "--data", tmp_path / "data", "--config", settings, "--json")
    url = said(process)["wal"]
    fields = ("--field", "id:int64", "--field", "text:varchar")
    ended = command("create", url, "texts", *fields, "--primary-key", "id")
    assert ended.status == 0, ended.err
    return url


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_batch_that_no_commit_takes_is_divided(command: Command, log: str, tmp_path: Path, suffix: str):
    rows = [{"id": number, "text": f"{number:08}" * 125} for number in range(COUNT)]
    file = tmp_path / f"texts.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = command("insert", log, "texts", file)
    assert ended.out.startswith(f"{COUNT:,} rows written into texts, the last at ts "), ended.err
    assert command("query", log, "texts", "--count").out == f"{COUNT}\n"
    last = command("query", log, "texts", f"id == {COUNT - 1}", "--json").out
    assert json.loads(last)["text"] == rows[-1]["text"]


def test_a_row_that_no_commit_takes_is_named_with_its_line(command: Command, log: str, tmp_path: Path):
    rows = [{"id": number, "text": "x" * (2_000_000 if number == 7 else 10)} for number in range(10)]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = command("insert", log, "texts", file)
    assert "MessageTooLarge: line 8: " in ended.err
    assert "before it 7 rows were written" in ended.err
    assert command("query", log, "texts", "--count").out == "7\n"
