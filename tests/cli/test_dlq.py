"""`dlq list` and `dlq show`, over the letters that readers keep."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Command
from tidewal.runtime.clock import HybridClock
from tidewal.runtime.errors import BadRecord
from tidewal.runtime.log.dead_letters import DeadLetters
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.record import Record, RecordType
from tidewal.runtime.log.wal import ChannelPolicy, Entry

pytestmark = pytest.mark.slow

BAD = Entry(bytes(7) + b"\x01", 0, b"\xffno record")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The directory of a log with three letters: one entry twice, and a late record."""
    asyncio.run(fill(tmp_path / "log"))
    return tmp_path / "log"


async def fill(directory: Path) -> None:
    async with await open_wal(f"rocksmq://{directory}") as wal:
        channel = Names().dead_letters
        letters = DeadLetters(wal, HybridClock(), channel)
        await letters.open()
        for _ in range(2):
            letters.bad("orders", BAD, BadRecord("the checksum is wrong", reason="checksum"))
        tags = {"at": "the door"}
        letters.late("events", Record(RecordType.ROWS, 7, key=b"k", tags=tags, body=b"opened", id=bytes(8)))
        await wal.append(channel, b"of another program")  # and so all before is in the log


def listed(command: Command, log: Path, *options: object) -> list[dict[str, Any]]:
    ended = command("dlq", "list", log, "--json", *options)
    assert ended.status == 0, ended.err
    return [json.loads(line) for line in ended.out.splitlines()]


def test_letters_are_listed_each_bad_entry_once(command: Command, log: Path):
    bad, late = listed(command, log)
    assert (bad["channel"], bad["entry"], bad["reason"], bad["times"]) == ("orders", BAD.id.hex(), "checksum", 2)
    assert (bad["size"], bad["message"]) == (len(BAD.payload), "the checksum is wrong")
    assert (late["channel"], late["reason"], late["times"]) == ("events", "late", 1)
    table = command("dlq", "list", log).out
    assert table.split()[:4] == ["id", "time", "channel", "entry"]
    assert "checksum" in table


@pytest.mark.parametrize(
    ("options", "channels"),
    [
        (("--channel", "orders"), ["orders"]),
        (("--reason", "late"), ["events"]),
        (("--limit", 1), ["events"]),
        (("--channel", "other"), []),
    ],
)
def test_the_list_is_narrowed(command: Command, log: Path, options: tuple[object, ...], channels: list[str]):
    assert [each["channel"] for each in listed(command, log, *options)] == channels


def test_a_letter_is_shown_with_the_bytes_of_the_entry(command: Command, log: Path):
    bad, late = listed(command, log)
    shown = json.loads(command("dlq", "show", log, bad["id"], "--json").out)
    assert bytes.fromhex(shown["bytes_hex"]) == BAD.payload
    assert "record" not in shown
    shown = json.loads(command("dlq", "show", log, late["id"], "--json").out)
    assert shown["record"] == {"type": "ROWS", "ts": 7, "tags": {"at": "the door"}, "key": "k", "value": "opened"}
    assert "late" in command("dlq", "show", log, late["id"]).out


@pytest.mark.parametrize("id", ["ffffffffffffffff", "00", "first"])
def test_an_id_of_no_letter_is_refused(command: Command, log: Path, id: str):
    ended = command("dlq", "show", log, id)
    assert (ended.status, "`tidewal dlq list` prints" in ended.err) == (2, True), ended.err


def test_a_log_without_letters_has_none(command: Command, tmp_path: Path):
    async def make() -> None:
        async with await open_wal(f"rocksmq://{tmp_path}/log") as wal:
            await wal.create_channel("events", ChannelPolicy())

    asyncio.run(make())
    assert command("dlq", "list", tmp_path / "log").out == "none\n"
