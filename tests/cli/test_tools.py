"""`verify`, `salvage` and `groups` on a log of several segments, with and without a process that has it open."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tidewal.adapters.rocksmq import RocksMQ
from tidewal.cli.groups import start_of
from tidewal.runtime.errors import InvalidRequest, PositionLost
from tidewal.runtime.log.wal import Append, ChannelPolicy, Delivery, From, FromId, FromTime
from tidewal.runtime.testing.conformance.helpers import submitted

SMALL = 64 * 1024


async def fill(directory: str) -> None:
    store = await RocksMQ.open(directory, segment_bytes=SMALL, serve=False)
    await store.create_channel("a", ChannelPolicy())
    for number in range(100):
        await store.append("a", bytes([number]) * 2000, number)
    member = await store.join("workers", ["a"])
    await member.acknowledge(await anext(member))
    await member.aclose()
    await store.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    asyncio.run(fill(str(tmp_path / "log")))
    return tmp_path / "log"


@pytest.fixture
def damaged(log: Path) -> Path:
    """The segment of `log` in whose middle a byte is wrong."""
    path = sorted((log / "journal").glob("*.segment"))[1]
    content = bytearray(path.read_bytes())
    content[SMALL // 2] ^= 8
    path.write_bytes(content)
    return path


def test_verify_says_that_a_log_is_intact(command: Callable[..., Any], log: Path):
    ended = command("verify", "journal", f"rocksmq://{log}")
    assert ended.status == 0, ended.err
    assert ended.out.splitlines()[-1].startswith("intact; ")
    assert "index checked" in ended.out


@pytest.mark.slow
def test_a_folder_without_tables_is_no_intact_one(command: Callable[..., Any], tmp_path: Path):
    (tmp_path / "data" / "tables").mkdir(parents=True)
    (tmp_path / "data" / "log").mkdir()
    assert command("verify", "tables", tmp_path / "data").status == 0  # of a node without collections
    assert command("verify", "tables", tmp_path / "data" / "tables").status == 0
    (tmp_path / "else").mkdir()
    for directory in (tmp_path / "data" / "log", tmp_path / "else"):
        ended = command("verify", "tables", directory)
        assert ended.status == 2
        assert "holds no tables: name the directory of a node" in ended.err


def test_verify_tells_damage_and_its_place(command: Callable[..., Any], log: Path, damaged: Path):
    ended = command("verify", "journal", log, "--json")
    assert ended.status == 1
    *segments, verdict = [json.loads(line) for line in ended.out.splitlines()]
    assert (verdict["intact"], verdict["damaged_segments"]) == (False, 1)
    (found,) = [segment for segment in segments if segment["state"] == "damaged"]
    assert found["path"] == str(damaged)
    assert found["findings"][0]["offset"] <= SMALL // 2 < found["findings"][0]["end"]
    assert found["findings"][0]["lost_frames"] == 1


@pytest.mark.slow
def test_an_open_log_is_verified_but_not_salvaged(command: Callable[..., Any], log: Path):
    async def look() -> tuple[Any, Any]:
        store = await RocksMQ.open(str(log), segment_bytes=SMALL)
        try:
            verified = await asyncio.to_thread(command, "verify", "journal", log)
            salvaged = await asyncio.to_thread(command, "salvage", log)
            await store.append("a", b"undisturbed")
            return verified, salvaged
        finally:
            await store.close()

    verified, salvaged = asyncio.run(look())
    assert verified.status == 0
    assert "not checked" in verified.out
    assert salvaged.status == 2
    assert "DirectoryInUse" in salvaged.err


async def read_to_the_end(log: Path) -> None:
    store = await RocksMQ.open(str(log), segment_bytes=SMALL, serve=False)
    try:
        last = await store.latest_id("a")
        async with asyncio.timeout(20):
            async for batch in store.read("a", From.EARLIEST):
                if batch[-1].id == last:
                    return
    finally:
        await store.close()


@pytest.mark.slow
def test_an_index_that_cannot_be_read_is_said_and_left_behind(command: Callable[..., Any], log: Path, tmp_path: Path):
    """By no traceback, and no word of lost entries."""
    for path in (log / "index").glob("*.log"):
        path.write_bytes(b"")
    for path in (log / "index").glob("MANIFEST*"):
        path.write_bytes(b"garbage")
    verified = command("verify", "journal", log)
    assert verified.status == 1
    assert "nothing is lost with it" in verified.out
    salvaged = command("salvage", log, tmp_path / "new")
    assert salvaged.status == 0
    assert f"the index {log / 'index'} cannot be read" in salvaged.out
    assert "PositionLost" not in salvaged.out
    assert command("verify", "journal", tmp_path / "new").status == 0
    asyncio.run(read_to_the_end(tmp_path / "new"))


@pytest.mark.slow
def test_salvage_reports_first_and_then_copies(command: Callable[..., Any], log: Path, damaged: Path, tmp_path: Path):
    new, accepting = tmp_path / "new", tmp_path / "accepting"
    before = {path: path.read_bytes() for path in log.rglob("*") if path.is_file()}
    reported = command("salvage", log)
    assert reported.status == 1, reported.err
    assert f"{damaged}  " in reported.out
    assert "damaged frames, 1 frames lost" in reported.out
    assert "a: ids" in reported.out
    assert "nothing was written" in reported.out
    done = json.loads(command("salvage", log, f"rocksmq://{new}", "--json").out)
    assert (done["copied_to"], done["stops_readers"]) == (str(new), True)
    assert (done["damages"][0]["path"], done["damages"][0]["frames"]) == (str(damaged), 1)
    assert {path: path.read_bytes() for path in log.rglob("*") if path.is_file()} == before
    verified = command("verify", "journal", new)
    assert verified.status == 0
    (loss,) = done["losses"]["a"]
    assert f"a: ids {loss['first']} to {loss['last']}: lost\n" in verified.out
    again = command("salvage", new)
    assert again.status == 0
    assert "nothing is damaged" in again.out
    assert f"a: ids {loss['first']} to {loss['last']}: lost\n" in again.out
    assert "tidewal salvage DIR NEW --accept" in again.out  # the way out, where readers still stop
    with pytest.raises(PositionLost, match="tidewal salvage DIR NEW --accept"):
        asyncio.run(read_to_the_end(new))
    (shown,) = json.loads(command("inspect", f"rocksmq://{new}", "--no-count", "--json").out)["journal"]["losses"]["a"]
    assert shown == loss
    assert not loss["accepted"]
    accepted = command("salvage", new, accepting, "--accept")
    assert accepted.status == 0
    assert "--accept" not in accepted.out
    assert "lost (accepted)" in command("salvage", accepting).out
    asyncio.run(read_to_the_end(accepting))


def test_a_sound_log_is_copied_whole(command: Callable[..., Any], log: Path, tmp_path: Path):
    reported = command("salvage", log)
    assert reported.status == 0
    assert "nothing is damaged" in reported.out
    copied = json.loads(command("salvage", log, tmp_path / "new", "--json").out)
    assert (copied["damages"], copied["losses"], copied["entries"]) == ([], {}, 100)
    asyncio.run(read_to_the_end(tmp_path / "new"))


def test_a_copy_that_did_not_end_is_refused(command: Callable[..., Any], log: Path, tmp_path: Path):
    assert command("salvage", log, tmp_path / "new").status == 0
    (tmp_path / "new" / "FORMAT").write_text("tidewal rocksmq incomplete\n")
    for arguments in (("inspect",), ("verify", "journal"), ("salvage",)):
        ended = command(*arguments, f"rocksmq://{tmp_path / 'new'}")
        assert ended.status == 2
        assert "IncompleteLog" in ended.err
        assert "remove the directory and salvage the damaged log again" in ended.err


@pytest.mark.parametrize("arguments", [("verify", "journal"), ("salvage",), ("groups", "list")])
def test_where_there_is_no_log_none_is_made(command: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...]):
    ended = command(*arguments, f"rocksmq://{tmp_path}")
    assert ended.status == 2
    assert "there is no log" in ended.err
    assert list(tmp_path.iterdir()) == []


def groups(command: Callable[..., Any], log: Path) -> list[dict[str, Any]]:
    ended = command("groups", "list", f"rocksmq://{log}", "--json")
    assert ended.status == 0, ended.err
    return json.loads(ended.out)


async def jobs(directory: str, *, stamped: bool) -> None:
    """Five jobs in a queue, of which the group has done the first."""
    store = await RocksMQ.open(directory, serve=False)
    await store.create_channel("jobs", ChannelPolicy(delivery=Delivery.QUEUE))
    for _ in range(5):
        if stamped:
            await store.append("jobs", b"job")
        else:
            await submitted(store, [Append("jobs", b"job")])
    member = await store.join("w", ["jobs"])
    delivered = await anext(member)
    await member.acknowledge(delivered.parts()[0])
    await member.aclose()
    await store.close()


@pytest.mark.parametrize("stamped", [True, False])
def test_a_group_that_goes_an_hour_back_keeps_what_nobody_has_worked_on(
    command: Callable[..., Any], tmp_path: Path, stamped: bool
):
    asyncio.run(jobs(str(tmp_path), stamped=stamped))
    place = groups(command, tmp_path)[0]["positions"]["jobs"]
    assert place["lag_entries"] == 4
    assert (place["lag_s"] is not None) == stamped
    hour_ago = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    ended = command("groups", "seek", f"rocksmq://{tmp_path}", "w", "jobs", hour_ago, "--json")
    assert json.loads(ended.out)["passed_over"] == 0
    assert groups(command, tmp_path)[0]["positions"]["jobs"]["lag_entries"] == 4


def test_what_a_seek_passes_over_is_said(command: Callable[..., Any], tmp_path: Path):
    asyncio.run(jobs(str(tmp_path), stamped=True))
    before = groups(command, tmp_path)[0]["positions"]["jobs"]
    ended = command("groups", "seek", f"rocksmq://{tmp_path}", "w", "jobs", "latest")
    assert f"from {before['acknowledged_to']} to {before['latest_id']}" in ended.out
    assert "passed over: 4 entries, which are removed: the channel is a queue" in ended.out


@pytest.mark.slow
def test_groups_are_shown_moved_and_dropped(command: Callable[..., Any], log: Path):
    url = f"rocksmq://{log}"
    (workers,) = groups(command, log)
    assert (workers["name"], workers["members"]) == ("workers", {})
    place = workers["positions"]["a"]
    assert place["acknowledged_to"] is not None
    assert command("groups", "seek", url, "workers", "a", "latest").status == 0
    place = groups(command, log)[0]["positions"]["a"]
    assert (place["behind"], place["lag_entries"], place["lag_s"]) == (False, 0, 0.0)
    assert re.search(r"delivered again: \d+ entries\n", command("groups", "seek", url, "workers", "a", "earliest").out)
    place = groups(command, log)[0]["positions"]["a"]
    assert (place["behind"], place["lag_entries"] > 0) == (True, True)
    misspelt = command("groups", "seek", url, "wokers", "a", "earliest")
    assert misspelt.status != 0
    assert "no group 'wokers'" in misspelt.err
    assert "the nearest known one is 'workers'" in misspelt.err
    header, row = command("groups", "list", url).out.splitlines()
    assert header.split() == ["group", "channel", "member", "acknowledged", "to", "lag_entries", "lag_s"]
    assert row.split()[:3] == ["workers", "a", "-"]
    assert int(row.split()[4]) == place["lag_entries"]
    assert [group["name"] for group in groups(command, log)] == ["workers"]
    assert command("groups", "seek", url, "others", "a", "earliest", "--create").status == 0
    assert [group["name"] for group in groups(command, log)] == ["others", "workers"]
    assert command("groups", "drop", url, "others").status == 0
    assert re.search(r"workers +a +- ", command("inspect", url).out)
    assert command("groups", "drop", url, "workers").status == 0
    assert groups(command, log) == []
    assert command("groups", "list", url).out == "none\n"


def test_places_in_a_channel():
    assert start_of("earliest") is From.EARLIEST
    assert start_of("00000000000000ff") == FromId((255).to_bytes(8, "big"), inclusive=True)
    assert start_of("1970-01-01T00:00:01Z") == FromTime(1000 << 18)
    assert start_of("1970-01-01T00:00:01") == FromTime(1000 << 18)
    with pytest.raises(InvalidRequest):
        start_of("yesterday")
