"""`send`, and what `tail` shows of messages: with and without a process that has the log open."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Command
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
    assert (ended.status, "or events" in ended.err, "--create" in ended.err) == (2, True, True)
    assert command("send", log, "event", "opened", "--create").out.startswith("1 messages sent to event, ")


def test_bytes_that_are_no_text_are_shown_in_hex(command: Command, log: Path):
    asyncio.run(fill(log, encode(Record(RecordType.ROWS, body=b"\xff\x00")), b"no record", b"\xff"))
    record, foreign, bad = tailed(command, log)
    assert record["value_hex"] == "ff00"
    assert (foreign["type"], foreign["value"]) == ("BAD", "no record")
    assert (bad["type"], bad["value_hex"]) == ("BAD", "ff")


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
