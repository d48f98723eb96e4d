"""`tidewal dlq`, over the letters that readers and groups keep."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Command
from tidewal.cli import dlq, letters
from tidewal.cli.open_log import stored
from tidewal.runtime.clock import HybridClock
from tidewal.runtime.errors import BadRecord
from tidewal.runtime.groups.group_letters import GroupLetters
from tidewal.runtime.groups.processing import Semantics, process
from tidewal.runtime.groups.retry_policy import RetryPolicy
from tidewal.runtime.log.dead_letters import DeadLetters
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.record import Record, RecordType, decode, encode
from tidewal.runtime.log.wal import Append, ChannelPolicy, Entry

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


# ---- letters of groups, and what becomes of letters -----------------------------------------------------------------


def with_log(directory: Path, work: Any) -> Any:
    async def run() -> Any:
        async with await open_wal(f"rocksmq://{directory}") as wal:
            return await work(wal)

    return asyncio.run(run())


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """The directory of a log whose group `billing` has given up two orders, and a record."""

    async def work(wal: Any) -> None:
        for name in ("orders", "events", "out"):
            await wal.create_channel(name, ChannelPolicy())
        await wal.append_many([Append("orders", each, 5) for each in (b"3", b"four", b"5", b"six")])
        record = Record(RecordType.ROWS, 9, key=b"door", body=b"x")
        await wal.append_many(
            [Append("events", encode(record), 9), Append("events", encode(replace(record, term=3)), 9)]
        )

        async def refuse(delivered: Any) -> list[Append]:
            return [Append("out", b"%d" % int(entry.payload)) for entry in delivered.entries]

        member = await wal.join("billing", ["orders", "events"])
        retry = RetryPolicy(attempts=2, first_pause_s=0.001)
        await process(wal, member, refuse, Semantics.EXACTLY_ONCE, retry=retry, count=2)
        await member.aclose()

    with_log(tmp_path / "log", work)
    return tmp_path / "log"


def payloads_of(directory: Path, channel: str) -> list[bytes]:
    async def work(wal: Any) -> list[bytes]:
        return [bytes(entry.payload) async for entry in stored(wal, channel)]

    return with_log(directory, work)


def test_letters_of_groups_are_listed_and_shown(command: Command, poisoned: Path):
    letters = listed(command, poisoned, "--group", "billing")
    assert [each["channel"] for each in letters].count("orders") == 2
    first = next(each for each in letters if each["channel"] == "orders")
    assert (first["group"], first["reason"], first["attempts"], first["size"]) == ("billing", "handler", 2, 4)
    assert first["id"].startswith("g-")
    assert "invalid literal" in first["message"]
    shown = json.loads(command("dlq", "show", poisoned, first["id"], "--json").out)
    assert (shown["bytes"], shown["attempts"], shown["resolved"]) == ("four", 2, "")
    assert listed(command, poisoned, "--group", "other") == []


def test_a_letter_is_replayed_once_with_a_new_timestamp(command: Command, poisoned: Path):
    id = next(each["id"] for each in listed(command, poisoned) if each["channel"] == "orders")
    ended = command("dlq", "replay", poisoned, id)
    assert (ended.status, ended.out) == (0, f"{id} is replayed\n"), ended.err
    assert command("dlq", "replay", poisoned, id).out == f"{id} was replayed before\n"
    assert command("dlq", "drop", poisoned, id).out == f"{id} was replayed before\n"
    assert payloads_of(poisoned, "orders") == [b"3", b"four", b"5", b"six", b"four"]
    assert json.loads(command("dlq", "show", poisoned, id, "--json").out)["resolved"] == "replayed"
    assert id not in [each["id"] for each in listed(command, poisoned)]

    async def work(wal: Any) -> list[int]:
        return [entry.timestamp async for entry in stored(wal, "orders")]

    assert with_log(poisoned, work)[-1] > 1 << 40


def test_records_without_an_owner_are_replayed_and_those_of_owners_refused(command: Command, poisoned: Path):
    ended = command("dlq", "replay", poisoned, "--all", "--channel", "events")
    assert ended.status == 1
    assert "Unsupported" in ended.err
    again = [decode(each) for each in payloads_of(poisoned, "events")]
    assert [(each.key, each.term) for each in again] == [(b"door", 0), (b"door", 3), (b"door", 0)]
    assert again[-1].ts > again[0].ts
    assert len(listed(command, poisoned, "--channel", "events")) == 1


def test_dropped_letters_are_gone_and_their_channel_is_cut(command: Command, poisoned: Path):
    ids = [each["id"] for each in listed(command, poisoned)]
    ended = command("dlq", "drop", poisoned, "--all", "--reason", "handler")
    assert ended.out.splitlines() == [f"{id} is dropped" for id in ids]
    assert command("dlq", "list", poisoned).out == "none\n"
    assert command("dlq", "drop", poisoned, ids[0]).status == 0
    assert payloads_of(poisoned, "orders") == [b"3", b"four", b"5", b"six"]
    assert len(payloads_of(poisoned, Names().group_dead_letters)) == 1  # the last word alone


def test_what_a_group_gives_up_again_is_a_new_letter(command: Command, poisoned: Path):
    first = next(each for each in listed(command, poisoned) if each["channel"] == "orders")
    command("dlq", "drop", poisoned, first["id"])

    async def work(wal: Any) -> None:
        letters = GroupLetters(wal, "billing", Names().group_dead_letters, HybridClock())
        await letters.open()
        entry = Entry(bytes.fromhex(first["entry"]), 5, b"four")
        await wal.append_many([letters.letter("orders", entry, "crash", "again", 2)])

    with_log(poisoned, work)
    again = [each for each in listed(command, poisoned) if each["entry"] == first["entry"]]
    assert [each["reason"] for each in again if each["channel"] == "orders"] == ["crash"]


def test_a_reader_that_keeps_a_dropped_entry_again_does_not_bring_it_back(command: Command, log: Path):
    bad, late = listed(command, log)
    assert command("dlq", "drop", log, bad["id"]).status == 0
    asyncio.run(fill(log))
    assert [each["channel"] for each in listed(command, log)] == ["events"]
    ended = command("dlq", "replay", log, late["id"])
    assert (ended.status, "BadRecord" in ended.err) == (1, True)


def test_letters_beyond_those_that_are_listed_are_not_cut_away(
    command: Command, poisoned: Path, monkeypatch: pytest.MonkeyPatch
):
    older, newer = [each["id"] for each in listed(command, poisoned, "--channel", "orders")]
    assert command("dlq", "drop", poisoned, "--all", "--channel", "events").status == 0
    monkeypatch.setattr(letters, "MOST_LISTED", 1)
    assert [each["id"] for each in listed(command, poisoned)] == [newer]
    assert command("dlq", "drop", poisoned, newer).out == f"{newer} is dropped\n"
    assert command("dlq", "replay", poisoned, older).out == f"{older} is replayed\n"


def test_letters_that_come_while_others_are_dropped_are_kept(
    command: Command, poisoned: Path, monkeypatch: pytest.MonkeyPatch
):
    ids = [each["id"] for each in listed(command, poisoned)]

    async def given_up_meanwhile(wal: Any, names: Names) -> list[letters.DeadLetter] | None:
        found = await letters.open_of_groups(wal, names)
        of_group = GroupLetters(wal, "billing", names.group_dead_letters, HybridClock())
        await of_group.open()
        for number in (1, 2):
            entry = Entry(bytes([number] * 8), 5, b"new")
            await wal.append_many([of_group.letter("orders", entry, "crash", "just now", 2)])
        return found

    monkeypatch.setattr(dlq, "open_of_groups", given_up_meanwhile)
    assert command("dlq", "drop", poisoned, *ids).status == 0
    monkeypatch.undo()
    assert [each["entry"] for each in listed(command, poisoned)] == ["01" * 8, "02" * 8]


def test_a_letter_that_is_named_twice_is_replayed_once(command: Command, poisoned: Path):
    id = next(each["id"] for each in listed(command, poisoned) if each["channel"] == "orders")
    ended = command("dlq", "replay", poisoned, id, id)
    assert ended.out.splitlines() == [f"{id} is replayed", f"{id} was replayed before"]
    assert payloads_of(poisoned, "orders") == [b"3", b"four", b"5", b"six", b"four"]


def test_a_letter_that_was_replayed_and_is_gone_is_told_so(command: Command, poisoned: Path):
    ids = [each["id"] for each in listed(command, poisoned) if each["channel"] == "orders"]
    assert command("dlq", "replay", poisoned, *ids).status == 0
    assert command("dlq", "drop", poisoned, "--all").status == 0  # no open letter keeps these any more
    before = payloads_of(poisoned, "orders")
    ended = command("dlq", "replay", poisoned, ids[0])
    assert (ended.status, payloads_of(poisoned, "orders")) == (0, before)
    assert ended.out == f"{ids[0]} was replayed or dropped before, or retention has removed it\n"


@pytest.mark.parametrize("arguments", [(), ("--all", "g-00"), ("g-0000000000ffffff",), ("nothing",)])
def test_what_names_no_letter_changes_nothing(command: Command, poisoned: Path, arguments: tuple[str, ...]):
    before = payloads_of(poisoned, Names().group_dead_letters)
    for what in ("replay", "drop"):
        assert command("dlq", what, poisoned, *arguments).status == 2
    assert payloads_of(poisoned, Names().group_dead_letters) == before


def test_a_letter_that_was_cut_is_replayed_from_its_channel(command: Command, tmp_path: Path):
    async def work(wal: Any) -> None:
        await wal.create_channel(Names().group_dead_letters, ChannelPolicy(max_message_bytes=64 * 1024 + 10))
        await wal.create_channel("orders", ChannelPolicy())
        await wal.append("orders", b"0123456789abcdef" * 100)

        async def refuse(delivered: Any) -> list[Append]:
            raise ArithmeticError

        member = await wal.join("billing", ["orders"])
        await process(wal, member, refuse, Semantics.AT_LEAST_ONCE, retry=RetryPolicy(attempts=1), count=1)
        await member.aclose()

    with_log(tmp_path / "log", work)
    (letter,) = listed(command, tmp_path / "log")
    shown = json.loads(command("dlq", "show", tmp_path / "log", letter["id"], "--json").out)
    assert (letter["size"], shown["bytes"]) == (1600, "0123456789")
    assert command("dlq", "replay", tmp_path / "log", letter["id"]).status == 0
    assert payloads_of(tmp_path / "log", "orders") == [b"0123456789abcdef" * 100] * 2


# ---- letters that came along from another log -----------------------------------------------------------------------


def migrated(command: Command, log: Path, name: str) -> Path:
    new = log.parent / name
    ended = command("migrate", f"rocksmq://{log}", "--to", f"rocksmq://{new}")
    assert ended.status == 0, ended.err
    return new


def test_letters_go_along_to_another_log_open_or_not(command: Command, poisoned: Path):
    dropped, open_one = (each for each in listed(command, poisoned) if each["channel"] == "orders")
    assert command("dlq", "drop", poisoned, dropped["id"]).status == 0
    new = migrated(command, migrated(command, poisoned, "second"), "third")
    (there,) = (each for each in listed(command, new) if each["channel"] == "orders")
    assert {**there, "id": "", "moved": 0} == {**open_one, "id": ""}
    assert there["moved"] == 2
    ended = command("dlq", "replay", new, there["id"])
    assert ended.out == f"{there['id']} is replayed\n", ended.err
    assert payloads_of(new, "orders")[-1] == b"six"
    assert [each for each in listed(command, new) if each["channel"] == "orders"] == []


def test_an_entry_of_the_new_log_is_not_taken_for_that_of_an_earlier_one(command: Command, log: Path):
    """The ids of two logs may be the same bytes."""
    bad, _ = listed(command, log)
    assert command("dlq", "drop", log, bad["id"]).status == 0
    new = migrated(command, log, "new")
    asyncio.run(fill(new))
    again = [each for each in listed(command, new) if each["channel"] == "orders"]
    assert [(each["entry"], each["times"], each["moved"]) for each in again] == [(bad["entry"], 2, 0)]


def test_a_letter_that_was_cut_is_replayed_in_its_own_log_alone(command: Command, tmp_path: Path):
    async def work(wal: Any) -> None:
        await wal.create_channel("orders", ChannelPolicy())
        await wal.append("orders", bytes(1600))
        letters = GroupLetters(wal, "billing", Names().group_dead_letters, HybridClock())
        await wal.create_channel(letters.channel, ChannelPolicy(max_message_bytes=64 * 1024 + 10))
        await letters.open()
        (entry,) = [each async for each in stored(wal, "orders")]
        await wal.append_many([letters.letter("orders", entry, "crash", "it fell", 1)])

    with_log(tmp_path / "log", work)
    new = migrated(command, tmp_path / "log", "new")
    (letter,) = listed(command, new)
    ended = command("dlq", "replay", new, letter["id"])
    assert ended.status != 0
    assert "was brought here from another log" in ended.err
