"""The commands for collections, over a node that runs as a process of its own."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.commands import Command, as_processes, said, wait_until_read
from tidewal.cli import connect
from tidewal.cli.open_log import catalog_of, stored
from tidewal.runtime.clock import HybridClock
from tidewal.runtime.log.dead_letters import DeadLetters
from tidewal.runtime.log.names import Names, pchannel_of
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.record import RecordType, decode
from tidewal.runtime.signals import INTERRUPTED

pytestmark = pytest.mark.slow

FIELDS = ("--field", "id:int64", "--field", "name:varchar?", "--field", "at:timestamp?", "--field", "good:bool?")
VECTOR = ("--field", "place:float_vector:2")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the log of a node."""
    home = tmp_path_factory.mktemp("node")
    with as_processes("-m", "tidewal", cwd=home) as start:
        process = start("run", "--data", home / "data", "--json", "--log-level", "warn")
        yield said(process)["wal"]


@pytest.fixture
def things(command: Command, log: str, request: pytest.FixtureRequest) -> str:
    """An empty collection of each test's own."""
    name = request.node.name.partition("[")[0]
    ended = command("create", log, name, *FIELDS, *VECTOR, "--primary-key", "id")
    assert ended.status == 0, ended.err
    return name


def rows_of(command: Command, log: str, name: str, *arguments: object) -> list[dict[str, Any]]:
    ended = command("query", log, name, *arguments, "--json", "--order-by", "id")
    assert ended.status == 0, ended.err
    return [json.loads(line) for line in ended.out.splitlines()]


def test_a_collection_is_created_once_and_found_again(command: Command, log: str, things: str):
    ended = command("create", log, things, *FIELDS, *VECTOR, "--primary-key", "id", "--json")
    told = json.loads(ended.out)
    assert (told["collection"], told["primary_key"], told["shards"]) == (things, "id", 2)
    assert told["fields"][1] == {"name": "name", "type": "varchar", "nullable": True, "dim": None}
    assert told["fields"][4] == {"name": "place", "type": "float_vector", "nullable": False, "dim": 2}
    ended = command("create", log, things, *FIELDS, *VECTOR, "--primary-key", "id")
    assert ended.out.endswith("id:int64, name:varchar?, at:timestamp?, good:bool?, place:float_vector:2\n")
    other = ("--field", "id:int64", "--field", "name:varchar", "--field", "size:int32", "--primary-key", "id")
    ended = command("create", log, things, *other)
    assert (ended.status, "CollectionExists" in ended.err) == (2, True)
    assert "it has name:varchar?, not name:varchar" in ended.err
    assert "it has no size:int32" in ended.err
    assert "it has at:timestamp?, good:bool?, place:float_vector:2 besides" in ended.err
    ended = command("create", log, things, *FIELDS, *VECTOR, "--primary-key", "id", "--shards", "3")
    assert "2 shards, not 3" in ended.err


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        (".yaml", "primary_key: id\nfields:\n- {name: id, type: int64}\n- {name: place, type: float_vector, dim: 3}\n"),
        (".json", '{"primary_key": "id", "fields": [{"name": "id", "type": "int64", "nullable": false}]}'),
        (".parquet", None),
    ],
)
def test_a_file_has_the_fields(command: Command, log: str, tmp_path: Path, suffix: str, content: str | None):
    file = tmp_path / f"schema{suffix}"
    if content is None:
        pq.write_table(pa.table({"id": pa.array([1], pa.int64())}), file)
    else:
        file.write_text(content)
    ended = command("create", log, f"of_{suffix[1:]}", "--schema", file, "--primary-key", "id", "--json")
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["fields"][0]["type"] == "int64"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--field name:type"),
        (("--field", "id:int64"), "--primary-key"),
        (("--field", "id", "--primary-key", "id"), "write name:type"),
        (("--field", "id:in64", "--primary-key", "id"), "the nearest known one is 'int64'"),
        (("--field", "id:string", "--primary-key", "id"), "the nearest known one is 'varchar'"),
        (("--field", "id:DateTime", "--primary-key", "id"), "the nearest known one is 'timestamp'"),
        (("--field", "id:int", "--primary-key", "id"), "the nearest known one is 'int64'"),
        (("--field", "id:boolean", "--primary-key", "id"), "the nearest known one is 'bool'"),
        (("--field", "id:xyz", "--primary-key", "id"), "known are bool, double, float, float_vector, int16"),
        (("--field", "v:float_vector:two", "--primary-key", "v"), "'two'"),
        (("--schema", __file__), "test_collection_commands.py"),
    ],
)
def test_a_schema_that_is_none_is_said_in_one_line(command: Command, log: str, arguments: tuple[str, ...], said: str):
    ended = command("create", log, "never", *arguments)
    assert (ended.status, said in ended.err, ended.err.count("\n")) == (2, True, 1), ended.err


JSON_LINES = """{"id": 1, "name": "one", "at": "2026-01-02T03:04:05Z", "good": true, "place": [1, 0]}

{"id": 2, "place": [0, 1]}
"""
CSV = 'id,name,at,good,place\n1,one,2026-01-02T03:04:05,TRUE,"[1, 0]"\n2,,,,"[0, 1]"\n'


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", JSON_LINES), ("a.csv", CSV)])
def test_rows_of_a_text_file_are_written(
    command: Command, log: str, things: str, tmp_path: Path, name: str, content: str
):
    (tmp_path / name).write_text(content)
    ended = command("insert", log, things, tmp_path / name, "--json")
    assert ended.status == 0, ended.err
    told = json.loads(ended.out)
    assert (told["collection"], told["rows"]) == (things, 2)
    assert told["ts"] > 0
    first, second = rows_of(command, log, things)
    assert first == {"id": 1, "name": "one", "at": "2026-01-02T03:04:05+00:00", "good": True, "place": [1.0, 0.0]}
    assert (second["name"], second["at"], second["good"], second["place"]) == (None, None, None, [0.0, 1.0])


def test_rows_of_parquet_are_written_in_batches(command: Command, log: str, things: str, tmp_path: Path):
    count = 25_000
    vectors = pa.FixedSizeListArray.from_arrays(pa.array([0.5] * (2 * count), pa.float32()), 2)
    pq.write_table(pa.table({"id": list(range(count)), "place": vectors}), tmp_path / "many.parquet")
    ended = command("insert", log, things, tmp_path / "many.parquet")
    assert ended.out.startswith(f"25,000 rows written into {things}, the last at ts "), ended.err
    assert ended.err == ""
    assert command("query", log, things, "--count").out == "25000\n"
    assert json.loads(command("query", log, things, "id < 10", "--count", "--json").out) == {"count": 10}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "", "has no rows, it is empty or has only a header"),
        ("a.csv", "id,place\n", "has no rows, it is empty or has only a header"),
        ("a.jsonl", "\n\n", "has no rows"),
        ("a.parquet", None, "has no rows"),
    ],
)
def test_a_file_without_rows_is_said_to_have_none(
    command: Command, log: str, things: str, tmp_path: Path, name: str, content: str | None, said: str
):
    file = tmp_path / name
    if content is None:
        pq.write_table(pa.table({"id": pa.array([], pa.int64())}), file)
    else:
        file.write_text(content)
    ended = command("insert", log, things, file)
    assert (ended.status, ended.out, ended.err) == (0, f"0 rows written into {things}: {file} {said}\n", "")
    told = json.loads(command("insert", log, things, file, "--json").out)
    assert told == {"collection": things, "rows": 0, "ts": None, "time": None}


def test_what_query_prints_insert_reads_from_stdin(command: Command, log: str, things: str):
    program = [sys.executable, "-m", "tidewal", "insert", log, things, "-"]
    ended = subprocess.run(program, input=JSON_LINES, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("2 rows written")
    printed = command("query", log, things, "--json").out
    again = subprocess.run(program, input=printed, capture_output=True, text=True, check=True)
    assert again.stdout.startswith("2 rows written")
    assert {row["id"] for row in rows_of(command, log, things)} == {1, 2}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"id": 1, "place": [1, 2]}\n{"id": 2\n', "line 2: no JSON"),
        ("a.jsonl", '{"id": 1, "place": [1, 2]}\n\n{"id": "x", "place": [1, 2]}\n', "line 3: column 'id'"),
        ("a.jsonl", '{"id": 1, "place": [1, 2], "at": "now"}\n', "line 1: column 'at' cannot be 'now'"),
        ("a.jsonl", '{"id": 1, "place": [1, 2]}\n{"id": null, "place": [1, 2]}\n', "line 2: column 'id' is null"),
        ("a.jsonl", "[1]\n", "line 1: [1] is no object"),
        ("a.csv", 'id,place\n1,"[1, 2]"\nx,"[1, 2]"\n', "line 3: column 'id' cannot be 'x', but a whole number"),
        ("a.csv", f'id,place\n{2**64},"[1, 2]"\n', f"line 2: column 'id' cannot be '{2**64}', but a whole number"),
        ("a.csv", 'id;place\n1;"[1, 2]"\n', "the header is one column, 'id;place': give --delimiter ';'"),
        ("a.csv", "id,place\n1\n", "line 2: 1 values under 2 columns"),
        ("a.csv", '\nid,place,shoe\n1,"[1, 2]",4\n', "line 2: collection"),
        ("a.jsonl", '{"id": 1, "place": [1, 2]}\n{"id": 2, "place": [1, 2], "shoe": 4}\n', "line 2: collection"),
        (
            "a.jsonl",
            '{"id": 1, "place": [1, 2], "at": 5}\n',
            "line 1: column 'at' is not timestamp: int does not fit; give an ISO",
        ),
        ("a.jsonl", '{"id": 1, "place": [1, 2], "name": 5}\n', "does not fit; give a text; before it 0"),
        ("a.jsonl", '{"id": 9007199254740993.0, "place": [1, 2]}\n', "line 1: column 'id'"),
        ("a.jsonl.gz", "no gzip", "the file is no gzip"),
        ("a.jsonl", '{"id": 1, "_op": "insert", "place": [1, 2]}\n', "line 1: rows of one insert"),
        ("a.csv", "id,name,name\n1,a,b\n", "line 1: two columns are called 'name'"),
        ("a.csv", f'id,place\n1,"{"[" * 100_000}"\n', "line 2: column 'place' cannot be"),
        ("a.jsonl", '{"id": 1, "place": ' + "[" * 100_000 + "\n", "line 1: no JSON"),
        ("a.parquet", "no parquet", "no Parquet"),
    ],
)
def test_a_bad_row_is_named_with_its_line(
    command: Command, log: str, things: str, tmp_path: Path, name: str, content: str, said: str
):
    (tmp_path / name).write_text(content)
    ended = command("insert", log, things, tmp_path / name)
    assert (ended.status, said in ended.err, ended.err.count("\n")) == (2, True, 1), ended.err
    assert ended.err.endswith("; before it 0 rows were written\n")
    assert command("query", log, things, "--count").out == "0\n"


def test_a_signal_ends_an_insert_that_waits_for_its_input(log: str, things: str):
    program = [sys.executable, "-m", "tidewal", "insert", log, things, "-"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        os.write(process.stdin.fileno(), b'{"id": ')
        wait_until_read(process.stdin.fileno())
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == INTERRUPTED
        assert process.stderr is not None
        assert process.stderr.read() == b"stopped; 0 rows were written\n"


def test_a_signal_says_how_many_rows_were_written(command: Command, log: str, things: str):
    program = [sys.executable, "-m", "tidewal", "insert", log, things, "-"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        for number in range(10_000):  # one batch
            process.stdin.write(json.dumps({"id": number, "place": [1, 2]}).encode() + b"\n")
        process.stdin.flush()
        end_s = time.monotonic() + 60
        while command("query", log, things, "--count").out != "10000\n":
            assert time.monotonic() < end_s
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == INTERRUPTED
        assert process.stderr is not None
        assert process.stderr.read().startswith(b"stopped; ")


@pytest.mark.parametrize(
    ("name", "delimiter", "between"),
    [("a.tsv", (), "\t"), ("a.csv", ("--delimiter", ";"), ";"), ("a.csv.gz", ("--delimiter", r"\t"), "\t")],
)
def test_csv_may_have_another_delimiter_and_be_compressed(
    command: Command, log: str, things: str, tmp_path: Path, name: str, delimiter: tuple[str, ...], between: str
):
    content = f'id{between}name{between}place\n1.0{between}a, b{between}"[1, 2]"\n'.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    ended = command("insert", log, things, tmp_path / name, *delimiter)
    assert ended.status == 0, ended.err
    assert [(row["id"], row["name"]) for row in rows_of(command, log, things)] == [(1, "a, b")]


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ";;"), ("a.jsonl", ";"), ("a.csv", '"')])
def test_a_delimiter_that_cannot_be_is_refused(
    command: Command, log: str, things: str, tmp_path: Path, name: str, delimiter: str
):
    (tmp_path / name).write_text("")
    ended = command("insert", log, things, tmp_path / name, "--delimiter", delimiter)
    assert (ended.status, "--delimiter is" in ended.err) == (2, True), ended.err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'id,_op,place\n1,insert,"[1, 2]"\n2,upsert,"[1, 2]"\n1,delete,\n'),
        (
            "a.jsonl.gz",
            '{"id": 1.0, "_op": "insert", "place": [1, 2]}\n{"id": 2, "_op": "upsert", "place": [1, 2]}\n'
            '{"id": 1, "_op": "delete"}\n',
        ),
    ],
)
def test_changes_of_a_file_are_applied_in_their_order(
    command: Command, log: str, things: str, tmp_path: Path, name: str, content: str
):
    (tmp_path / name).write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    ended = command("apply", log, things, tmp_path / name)
    assert ended.out.startswith(f"3 changes applied to {things}, the last at ts "), ended.err
    assert [row["id"] for row in rows_of(command, log, things)] == [2]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"id": 1, "place": [1, 2]}\n', "each row must name its operation in a column _op"),
        ('{"id": 1, "_op": "remove"}\n', "line 1: _op is 'remove'; known: insert, upsert, delete"),
    ],
)
def test_a_change_without_a_known_operation_is_refused(
    command: Command, log: str, things: str, tmp_path: Path, content: str, said: str
):
    (tmp_path / "a.jsonl").write_text(content)
    ended = command("apply", log, things, tmp_path / "a.jsonl")
    assert (ended.status, said in ended.err) == (2, True), ended.err


def test_a_row_that_is_bad_in_a_later_batch_leaves_those_before(
    command: Command, log: str, things: str, tmp_path: Path
):
    lines = [json.dumps({"id": number, "place": [1, 2]}) for number in range(10_001)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"id": 7.5, "place": [1, 2]}']))
    ended = command("insert", log, things, tmp_path / "a.jsonl")
    assert "line 10002: column 'id'" in ended.err
    assert "before it 10,000 rows were written" in ended.err
    assert command("query", log, things, "--count").out == "10000\n"


def test_rows_are_printed_as_a_table(command: Command, log: str, things: str, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(JSON_LINES)
    command("insert", log, things, tmp_path / "a.jsonl")
    ended = command("query", log, things, "--columns", "id,name", "--order-by", "-id")
    assert [line.split() for line in ended.out.splitlines()] == [["id", "name"], ["2", "-"], ["1", "one"]]


def test_search_prints_the_nearest_first(command: Command, log: str, things: str, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(JSON_LINES)
    command("insert", log, things, tmp_path / "a.jsonl")
    ended = command("search", log, things, "place", "[0, 2]", "--metric", "l2", "--columns", "id", "--json")
    assert ended.status == 0, ended.err
    assert [json.loads(line)["id"] for line in ended.out.splitlines()] == [2, 1]
    ended = command("search", log, things, "place", "0, 2")
    assert (ended.status, "is no vector" in ended.err) == (2, True)


def test_compact_says_what_is_in_the_table(command: Command, log: str, things: str, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(JSON_LINES)
    command("insert", log, things, tmp_path / "a.jsonl")
    told = json.loads(command("compact", log, things, "--json").out)
    assert (told["collection"], told["rows"], told["merged"]) == (things, 2, 2)
    assert f"{things}/current has 2 rows as of " in command("compact", log, things).out


def test_a_collection_that_is_not_there_is_named(command: Command, log: str):
    ended = command("query", log, "nothings")
    assert (ended.status, "CollectionNotFound" in ended.err, "nothings" in ended.err) == (2, True, True)


def test_a_collection_is_listed_described_and_dropped(command: Command, log: str, things: str, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(JSON_LINES)
    command("insert", log, things, tmp_path / "a.jsonl")
    listed = [json.loads(line) for line in command("list", log, "--json").out.splitlines()]
    (found,) = [each for each in listed if each["collection"] == things]
    assert (found["rows"], found["shards"], found["primary_key"], found["fields"][0]["name"]) == (2, 2, "id", "id")
    assert json.loads(command("describe", log, things, "--json").out) == found
    (line,) = [line for line in command("list", log).out.splitlines() if things in line]
    fields = "id:int64, name:varchar?, at:timestamp?, good:bool?, place:float_vector:2"
    assert line.split(maxsplit=4) == [things, "2", "2", "id", f"{fields} "]
    assert ["place", "float_vector", "false", "2"] in [
        line.split() for line in command("describe", log, things).out.splitlines()
    ]
    ended = command("describe", log, f"{things}s")
    assert (ended.status, f"the nearest known one is {things!r}" in ended.err) == (2, True), ended.err
    ended = command("drop", log, things, "--yes")
    assert (ended.status, ended.out) == (0, f"{things} is dropped\n"), ended.err
    ended = command("describe", log, things)
    assert (ended.status, "CollectionNotFound" in ended.err) == (2, True)


def test_rows_are_deleted_by_key_or_filter(command: Command, log: str, things: str, tmp_path: Path):
    rows = [json.dumps({"id": number, "place": [1, 2]}) for number in range(5)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    command("insert", log, things, tmp_path / "a.jsonl")
    ended = command("delete", log, things, "--key", 0, "--key", 4, "--key", 77)
    assert (ended.status, ended.out.startswith(f"3 keys deleted from {things}, the last at ts ")) == (0, True)
    told = json.loads(command("delete", log, things, "--filter", "id > 2", "--yes", "--json").out)
    assert (told["collection"], told["keys"], told["ts"] > 0) == (things, 1, True)
    assert [row["id"] for row in rows_of(command, log, things)] == [1, 2]
    told = json.loads(command("delete", log, things, "--filter", "id > 50", "--yes", "--json").out)
    assert (told["keys"], told["ts"]) == (0, None)


@pytest.mark.parametrize("verb", [("drop",), ("delete", "--filter", "id > 0")])
def test_what_removes_rows_asks_before(
    command: Command, log: str, things: str, tmp_path: Path, verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a.jsonl").write_text(JSON_LINES)
    command("insert", log, things, tmp_path / "a.jsonl")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    ended = command(verb[0], log, things, *verb[1:])
    assert (ended.status, "2 rows" in ended.err, "--yes" in ended.err) == (2, True, True), ended.err
    monkeypatch.setattr(sys, "stdin", _Typed("n\n"))
    assert command(verb[0], log, things, *verb[1:]).status == 1
    assert command("query", log, things, "--count").out == "2\n"
    monkeypatch.setattr(sys, "stdin", _Typed("y\n"))
    assert command(verb[0], log, things, *verb[1:]).status == 0
    assert command("query", log, things, "--count").out != "2\n"


class _Typed(io.StringIO):
    """What a person types at a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--filter, or with --key"),
        (("--filter", "id > 0", "--key", "1"), "--filter, or with --key"),
        (("--key", "one"), "--key one: the primary key 'id' is int64"),
        (("--filter", "id >"), "InvalidFilter"),
    ],
)
def test_rows_to_delete_that_are_not_said_are_refused(
    command: Command, log: str, things: str, arguments: tuple[str, ...], said: str
):
    ended = command("delete", log, things, *arguments)
    assert (ended.status, said in ended.err, ended.err.count("\n")) == (2, True, 1), ended.err


def test_where_no_node_comes_a_command_says_what_to_start(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connect, "NODE_S", 0.3)
    ended = command("query", tmp_path / "data", "things")
    assert ended.status == 2
    assert f"answered within 0.3 s: start one (tidewal run --data {tmp_path / 'data'})" in ended.err
    with as_processes("-m", "tidewal", cwd=tmp_path) as start:
        process = start("run", "--data", tmp_path / "data", "--json", "--log-level", "warn")
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        process.wait()
    ended = command("query", tmp_path / "data" / "log", "things")
    assert f"answered within 0.3 s: start one (tidewal run --data {tmp_path / 'data'})" in ended.err
    assert (ended.status, ended.err.count("\n")) == (2, 1)


def test_a_command_waits_for_a_node_that_starts_beside_it(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connect, "NODE_S", 60.0)  # of a busy machine
    with as_processes("-m", "tidewal", cwd=tmp_path) as start:
        for _ in range(2):  # into a new directory, and on a log that the last node has left
            process = start("run", "--data", tmp_path / "data")
            ended = command("list", tmp_path / "data")
            assert (ended.status, ended.out) == (0, "none\n"), ended.err
            process.terminate()
            process.wait()


def test_a_letter_with_rows_is_replayed_through_the_node(command: Command, log: str, things: str):
    def insert(name: str) -> None:
        row = {"id": 1, "name": name, "place": [1.0, 2.0]}
        assert command("insert", log, things, _file(log, row), "--format", "jsonl").status == 0

    insert("first")

    async def keep() -> None:
        async with await open_wal(log, own=False) as wal:
            names = Names()
            catalog = (await catalog_of(wal, names)).state
            vchannels = catalog.collection(things).vchannels
            letters = DeadLetters(wal, HybridClock(), names.dead_letters)
            await letters.open()
            for channel in sorted({pchannel_of(each) for each in vchannels}):
                async for entry in stored(wal, channel):
                    record = decode(entry.payload, entry.id)
                    if record.type is RecordType.ROWS and record.vchannel in vchannels:
                        letters.late(channel, record)
                        cut = bytes(record.body)[:10]
                        letters.late(channel, replace(record, id=b"\xff" * len(record.id), body=cut))
            await wal.append(names.dead_letters, b"and so all before is in the log")

    asyncio.run(keep())
    insert("second")
    whole, damaged = [json.loads(line) for line in command("dlq", "list", log, "--json").out.splitlines()]
    ended = command("dlq", "replay", log, whole["id"])
    assert (ended.status, ended.out) == (0, f"{whole['id']} is replayed\n"), ended.err
    assert [row["name"] for row in rows_of(command, log, things)] == ["first"]
    assert command("dlq", "replay", log, whole["id"]).out == f"{whole['id']} was replayed before\n"
    ended = command("dlq", "replay", log, damaged["id"])
    assert (ended.status, "BadRecord" in ended.err) == (1, True)


def _file(log: str, row: dict[str, Any]) -> Path:
    path = Path(log.removeprefix("rocksmq://")).parent / "row.jsonl"
    path.write_text(json.dumps(row))
    return path


def test_a_collection_is_released_and_loaded(command: Command, log: str, things: str):
    ended = command("release", log, things)
    assert ended.out == f"{things} is released: its queries are refused until `tidewal load`\n"
    ended = command("query", log, things)
    assert (ended.status, "CollectionNotLoaded" in ended.err) == (2, True)
    ended = command("load", log, things, "--replicas", "3", "--json")
    assert json.loads(ended.out) == {"collection": things, "state": "Loaded", "replicas": 3}
    assert rows_of(command, log, things) == []
