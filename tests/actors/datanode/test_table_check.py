"""Pages of the tables have checksums: damage is an error for readers, and told by `tidewal verify tables`."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

from tidewal.actors.datanode.current_table import CurrentTable, compact
from tidewal.actors.datanode.log_reader import read_current_at
from tidewal.actors.datanode.log_table import LogTable
from tidewal.cli.main import app
from tidewal.runtime.errors import CorruptLog, InvalidSchema

sys.path.insert(0, str(Path(__file__).parent))
from versions import KEY, SCHEMA, V0, position, versions

ROWS = 300


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The tables of one collection."""
    log = LogTable.open(tmp_path / "flights" / "log", SCHEMA, KEY)
    for start, end in ((0, ROWS), (ROWS, ROWS + 10)):
        log.flush(versions(range(start + 1, end + 1)), start={V0: start}, end={V0: end}, positions={V0: position(end)})
    compact(log, CurrentTable.open(tmp_path / "flights" / "current", SCHEMA, KEY), ROWS + 10)
    return tmp_path


def largest(root: Path) -> Path:
    return max((root / "flights" / "log").glob("*.parquet"), key=lambda path: path.stat().st_size)


def read(root: Path) -> pa.Table:
    return read_current_at(LogTable.open(root / "flights" / "log"), ROWS + 10).to_table().sort_by("id")


def verify(root: Path) -> tuple[int, list[dict]]:
    result = CliRunner().invoke(app, ["verify", "tables", str(root), "--json"])
    return result.exit_code, [json.loads(line) for line in result.output.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_in_a_page_is_no_answer_and_verify_finds_each_bit(root: Path, seed: int):
    print(f"seed {seed}")
    rng = random.Random(seed)
    expected, path = read(root), largest(root)
    sound = path.read_bytes()
    footer = len(sound) - 8 - int.from_bytes(sound[-8:-4], "little")
    refused = 0
    for _ in range(60):
        damaged, at = bytearray(sound), rng.randrange(len(sound))
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        assert verify(root)[0] == 1
        try:
            assert read(root).equals(expected) or at >= footer  # which has no checksum of its own
        except CorruptLog:
            refused += 1
    assert refused > 20


def test_verify_says_that_tables_are_sound(root: Path):
    status, told = verify(root)
    assert status == 0
    assert told[-1]["intact"]
    assert {(each["collection"], each["table"]) for each in told[:-1]} == {("flights", "log"), ("flights", "current")}
    assert told[-1]["rows"] == 2 * (ROWS + 10)


@pytest.mark.slow
def test_verify_names_what_is_missing_cut_or_no_table(root: Path):
    path = largest(root)
    sound = path.read_bytes()
    path.write_bytes(sound[: len(sound) // 2])
    status, told = verify(root)
    assert (status, [each["file"] for each in told[:-1] if each["damage"]]) == (1, [path.name])
    path.unlink()
    assert verify(root)[0] == 1
    result = CliRunner().invoke(app, ["verify", "tables", str(root)])
    assert path.name in result.output
    for commit in (root / "flights" / "log" / "_delta_log").iterdir():
        commit.unlink()
    assert verify(root)[0] == 1
    assert CliRunner().invoke(app, ["verify", "tables", str(root / "nowhere")]).exit_code != 0


TORN = {
    "cut short": lambda sound: sound[: len(sound) // 3],
    "empty": lambda sound: b"",
    "zeros": lambda sound: bytes(len(sound)),
    "no text": lambda sound: b"\xff" + sound[1:],
    "no object": lambda sound: b"[1]\n" + sound,
    "deep": lambda sound: b"[" * 100_000,
    "positions that are none": lambda sound: b'{"commitInfo": {"tidewal.positions": "[1]"}}',
}


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "with a checkpoint"])  # Delta reads no commit before it
@pytest.mark.parametrize("damage", TORN.values(), ids=TORN.keys())
def test_a_commit_that_cannot_be_parsed_is_told_with_its_file(root: Path, damage, checkpoint: bool):
    for name in ("log", "current"):
        path = root / "flights" / name
        commit = max((path / "_delta_log").glob("*.json"))
        sound = commit.read_bytes()
        if checkpoint:
            DeltaTable(path).create_checkpoint()
        commit.write_bytes(damage(sound))
        status, told = verify(root)
        assert status == 1
        [found] = [each for each in told[:-1] if each["damage"]]
        assert (found["table"], found["file"]) == (name, "")
        calls = [
            lambda path=path: LogTable.open(path).positions(),
            lambda: compact(
                LogTable.open(root / "flights" / "log"), CurrentTable.open(root / "flights" / "current"), ROWS + 10
            ),
        ]
        for call in calls[name == "current" :]:
            with pytest.raises(CorruptLog) as caught:
                call()
            assert str(path) in caught.value.message
            if checkpoint:
                assert str(commit) in caught.value.message + found["damage"]
                assert "copy it back" in caught.value.message
        commit.write_bytes(sound)
        assert verify(root)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("damage", [(b"message_id", b"message-id"), (rb"\"term\": 1", rb"\"term\": null")], ids=str)
def test_a_position_that_is_none_is_told_with_its_file(root: Path, damage: tuple[bytes, bytes]):
    path = root / "flights" / "log"
    commit = max((path / "_delta_log").glob("*.json"))
    sound = commit.read_bytes()
    commit.write_bytes(sound.replace(*damage))
    assert commit.read_bytes() != sound
    assert verify(root)[0] == 1
    with pytest.raises(CorruptLog, match=commit.name):
        LogTable.open(path).stored([V0])
    commit.write_bytes(sound)
    assert LogTable.open(path).stored([V0]) == (ROWS + 10, {V0: position(ROWS + 10)})


PROPERTIES = ["tidewal.schema", "tidewal.primaryKey", "tidewal.format", "delta.checkpointInterval"]


@pytest.mark.slow
@pytest.mark.parametrize("value", ["", "-1", None], ids=["empty", "wrong", "absent"])
@pytest.mark.parametrize("key", PROPERTIES)
def test_properties_that_are_damaged_are_told(root: Path, key: str, value: str | None):
    path = root / "flights" / "log"
    commit = path / "_delta_log" / f"{0:020}.json"
    actions = [json.loads(line) for line in commit.read_bytes().splitlines()]
    [properties] = [action["metaData"]["configuration"] for action in actions if "metaData" in action]
    del properties[key]
    if value is not None:
        properties[key] = value
    commit.write_text("\n".join(map(json.dumps, actions)))
    with pytest.raises((CorruptLog, InvalidSchema)) as caught:
        LogTable.open(path)
    assert str(path) in caught.value.message


@pytest.mark.slow
def test_joined_files_have_checksums_and_take_no_damage_over(root: Path):
    log = LogTable.open(root / "flights" / "log")
    path = largest(root)
    sound = path.read_bytes()
    path.write_bytes(sound.replace(sound[len(sound) // 2 :][:8], bytes(8)))
    with pytest.raises(CorruptLog):
        log.join_files()
    path.write_bytes(sound)
    expected = read(root)
    assert log.join_files() == 1
    joined = max((root / "flights" / "log").glob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    content = bytearray(joined.read_bytes())
    content[len(content) // 2] ^= 1
    joined.write_bytes(content)
    with pytest.raises(CorruptLog):
        assert read(root).equals(expected)
