"""`send`, and what `tail` shows of messages: with and without a process that has the log open."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Command, wait_until_read
from tidewal.actors.standalone import standalone
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.log.wal import ChannelPolicy

pytestmark = pytest.mark.slow


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The directory of a log with a channel `events`."""
    asyncio.run(fill(tmp_path / "log"))
    return tmp_path / "log"


async def fill(directory: Path, *payloads: bytes) -> None:
    async with await open_wal(f"rocksmq://{directory}") as wal:
        await wal.create_channel("events", ChannelPolicy())
        for payload in payloads:
            await wal.append("events", payload)


def tailed(command: Command, log: Path) -> list[dict[str, Any]]:
    ended = command("tail", log, "events", "--no-follow", "--json")
    assert ended.status == 0, ended.err
    return [json.loads(line) for line in ended.out.splitlines()]


def test_messages_are_sent_and_shown(command: Command, log: Path):
    ended = command("send", log, "events", "opened", "schließt", "--key", "door", "--tag", "floor=1", "--json")
    assert ended.status == 0, ended.err
    told = json.loads(ended.out)
    first, last = tailed(command, log)
    assert (told["channel"], told["messages"]) == ("events", 2)
    assert (told["id"], told["ts"], told["time"]) == (last["id"], last["ts"], last["time"])
    assert (first["value"], first["key"], first["tags"]) == ("opened", "door", {"floor": "1"})
    assert last["value"] == "schließt"
    assert "key=door" in command("tail", log, "events", "--no-follow", "--limit", 1).out


def test_a_filter_shows_some_messages(command: Command, log: Path):
    for floor in "121":
        assert command("send", log, "events", f"on {floor}", "--tag", f"floor={floor}").status == 0
    asyncio.run(fill(log, b"no record"))
    ended = command("tail", log, "events", "--no-follow", "--json", "--where", 'floor == "1"')
    assert [json.loads(line)["value"] for line in ended.out.splitlines()] == ["on 1", "on 1"]
    ended = command("tail", log, "events", "--no-follow", "--where", "floor = 1")
    assert ended.status == 2
    assert "at 6: found '='" in ended.err


@pytest.mark.parametrize("text", ["one\ntwo\n", "one\ntwo"])
def test_each_line_of_stdin_is_a_message(command: Command, log: Path, text: str):
    program = [sys.executable, "-m", "tidewal", "send", str(log), "events"]
    ended = subprocess.run(program, input=text, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("2 messages sent to events, the last with id ")
    assert [each["value"] for each in tailed(command, log)] == ["one", "two"]


def test_many_lines_come_in_their_order(command: Command, log: Path):
    lines = [f"line {number}" for number in range(20_000)]  # several reads
    program = [sys.executable, "-m", "tidewal", "send", str(log), "events"]
    subprocess.run(program, input="\n".join(lines), capture_output=True, text=True, check=True)
    assert [each["value"] for each in tailed(command, log)] == lines


def test_no_line_is_no_message(log: Path):
    program = [sys.executable, "-m", "tidewal", "send", str(log), "events", "--json"]
    ended = subprocess.run(program, input="", capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout) == {"channel": "events", "messages": 0, "id": None, "ts": None, "time": None}


def test_a_channel_is_made_where_that_is_wanted(command: Command, log: Path):
    ended = command("send", log, "event", "opened")
    assert (ended.status, "is 'events'" in ended.err, "--create" in ended.err) == (2, True, True)
    assert command("send", log, "event", "opened", "--create").out.startswith("1 messages sent to event, ")


def test_bytes_that_are_no_text_are_shown_in_hex(command: Command, log: Path):
    asyncio.run(fill(log, encode(Record(RecordType.ROWS, body=b"\xff\x00")), b"\xff"))
    record, raw = tailed(command, log)
    assert record["value_hex"] == "ff00"
    assert (raw["type"], raw["value_hex"]) == ("RAW", "ff")


def test_an_entry_that_is_no_record_is_raw_and_a_damaged_record_is_bad(command: Command, log: Path):
    intact = encode(Record(RecordType.ROWS, body=b"opened"))
    newer = intact[:2] + bytes([intact[2] + 1]) + intact[3:]
    asyncio.run(fill(log, b"no record", b"TWO words", b"", intact[:-1], intact[:10], newer))
    shown = tailed(command, log)
    raw, bad = shown[:3], shown[3:]
    assert [(each["type"], each["value"]) for each in raw] == [("RAW", text) for text in ("no record", "TWO words", "")]
    assert all(each["time"].startswith("20") and "reason" not in each for each in raw)
    assert [each["type"] for each in bad] == ["BAD"] * 3
    assert all(each["reason"] for each in bad)


def test_a_channel_that_has_an_owner_is_refused(command: Command, log: Path):
    asyncio.run(fill(log, encode(Record(RecordType.ROWS, 1, term=1, cseq=1))))
    ended = command("send", log, "events", "opened")
    assert (ended.status, "has an owner" in ended.err) == (2, True)
    assert len(tailed(command, log)) == 1


def test_channels_of_nodes_are_refused(command: Command, tmp_path: Path):
    async def once() -> None:
        async with standalone(tmp_path):
            pass

    asyncio.run(once())
    ended = command("send", tmp_path / "log", "by-dev-rootcoord-dml_0", "opened")
    assert (ended.status, "tidewal insert" in ended.err) == (2, True)


def test_a_tag_has_a_name_and_a_value(command: Command, log: Path):
    ended = command("send", log, "events", "opened", "--tag", "floor")
    assert (ended.status, "NAME=VALUE" in ended.err) == (2, True)


def test_the_prefix_is_that_of_the_environment(command: Command, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TIDEWAL__MSGCHANNEL__CHANNAMEPREFIX__CLUSTER"
    monkeypatch.setenv(name, "other")
    assert command("send", log, "by-dev-a", "text", "--create").status == 0
    refused = command("send", log, "other-a", "text", "--create")
    assert (refused.status, "belongs to the nodes" in refused.err) == (2, True)


@pytest.mark.parametrize("state", ["closed", "non-blocking"])
def test_stdin_that_cannot_be_waited_for_as_usual_hangs_no_command(command: Command, log: Path, state: str):
    program = [sys.executable, "-m", "tidewal", "send", str(log), "events"]
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    closing = {"preexec_fn": partial(os.close, 0)} if state == "closed" else {"stdin": reading}
    process: Any = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, **closing)
    if state == "non-blocking":
        os.write(writing, b"early\n")
        wait_until_read(writing)
        os.write(writing, b"late\n")
    os.close(writing)
    out, _ = process.communicate(timeout=50)
    os.close(reading)
    expected = [] if state == "closed" else ["early", "late"]
    assert out.startswith(f"{len(expected)} messages sent")
    assert [each["value"] for each in tailed(command, log)] == expected


def test_what_others_wrote_begins_no_line_and_commands_no_terminal(command: Command, log: Path):
    command("send", log, "events", "one\n2030-01-01  events  ROWS  value=forged\x1b[2J\u202e", "--key", "a\nb")
    told = command("tail", log, "events", "--no-follow").out
    assert told.count("\n") == 1
    assert "key=a\\nb" in told
    assert "value=one\\n2030-01-01  events  ROWS  value=forged\\x1b[2J\\u202e\n" in told
