"""`verify`, `repair` and `groups` on a log of several segments, with and without a process that has it open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidewal.adapters.rocksmq import RocksMQ
from tidewal.cli.groups import start_of
from tidewal.runtime.errors import InvalidRequest, PositionLost
from tidewal.runtime.log.wal import ChannelPolicy, From, FromId, FromTime

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
def test_an_open_log_is_verified_but_not_repaired(command: Callable[..., Any], log: Path):
    async def look() -> tuple[Any, Any]:
        store = await RocksMQ.open(str(log), segment_bytes=SMALL)
        try:
            verified = await asyncio.to_thread(command, "verify", "journal", log)
            repaired = await asyncio.to_thread(command, "repair", log)
            await store.append("a", b"undisturbed")
            return verified, repaired
        finally:
            await store.close()

    verified, repaired = asyncio.run(look())
    assert verified.status == 0
    assert "not checked" in verified.out
    assert repaired.status == 2
    assert "DirectoryInUse" in repaired.err


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
def test_an_index_that_cannot_be_read_is_said_and_mended(command: Callable[..., Any], log: Path):
    """By no traceback, and no word of lost entries."""
    for path in (log / "index").glob("*.log"):
        path.write_bytes(b"")
    for path in (log / "index").glob("MANIFEST*"):
        path.write_bytes(b"garbage")
    verified = command("verify", "journal", log)
    assert verified.status == 1
    assert "nothing is lost with it" in verified.out
    repaired = command("repair", log, "--apply")
    assert repaired.status == 0
    assert "index: set aside" in repaired.out
    assert command("verify", "journal", log).status == 0
    asyncio.run(read_to_the_end(log))


@pytest.mark.slow
def test_repair_plans_first_and_then_does_it(command: Callable[..., Any], log: Path, damaged: Path):
    before = damaged.read_bytes()
    planned = command("repair", log)
    assert planned.status == 1, planned.err
    assert "lost of a: ids" in planned.out
    assert "nothing was changed" in planned.out
    assert damaged.read_bytes() == before
    done = json.loads(command("repair", log, "--apply", "--json").out)
    assert (Path(done["aside"]) / damaged.name).read_bytes() == before
    assert command("verify", "journal", log).status == 0
    again = command("repair", log)
    assert again.status == 0
    assert "earlier: a: ids" in again.out
    assert "nothing to repair" in again.out
    assert "tidewal repair --accept --apply" in again.out  # the way out, where readers still stop
    with pytest.raises(PositionLost, match="tidewal repair --accept --apply"):
        asyncio.run(read_to_the_end(log))
    (loss,) = json.loads(command("inspect", f"rocksmq://{log}", "--no-count", "--json").out)["journal"]["losses"]["a"]
    assert not loss["accepted"]
    accepted = command("repair", log, "--accept", "--apply")
    assert accepted.status == 0
    assert "--accept" not in accepted.out
    assert "(accepted)" in command("repair", log).out
    asyncio.run(read_to_the_end(log))


def test_repair_of_a_sound_log_does_nothing(command: Callable[..., Any], log: Path):
    before = {path: path.read_bytes() for path in (log / "journal").iterdir()}
    ended = command("repair", log, "--apply")
    assert ended.status == 0
    assert "nothing to repair" in ended.out
    assert {path: path.read_bytes() for path in (log / "journal").iterdir()} == before


@pytest.mark.parametrize("arguments", [("verify", "journal"), ("repair",), ("groups", "list")])
def test_where_there_is_no_log_none_is_made(command: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...]):
    ended = command(*arguments, f"rocksmq://{tmp_path}")
    assert ended.status == 2
    assert "there is no log" in ended.err
    assert list(tmp_path.iterdir()) == []


def groups(command: Callable[..., Any], log: Path) -> list[dict[str, Any]]:
    ended = command("groups", "list", f"rocksmq://{log}", "--json")
    assert ended.status == 0, ended.err
    return json.loads(ended.out)


@pytest.mark.slow
def test_groups_are_shown_moved_and_dropped(command: Callable[..., Any], log: Path):
    url = f"rocksmq://{log}"
    (workers,) = groups(command, log)
    assert (workers["name"], workers["members"]) == ("workers", {})
    place = workers["positions"]["a"]
    assert place["acknowledged_to"] is not None
    assert command("groups", "seek", url, "workers", "a", "latest").status == 0
    assert not groups(command, log)[0]["positions"]["a"]["behind"]
    assert command("groups", "seek", url, "workers", "a", "earliest").status == 0
    assert groups(command, log)[0]["positions"]["a"]["behind"]
    misspelt = command("groups", "seek", url, "wokers", "a", "earliest")
    assert misspelt.status != 0
    assert "no group wokers" in misspelt.err
    assert [group["name"] for group in groups(command, log)] == ["workers"]
    assert command("groups", "seek", url, "others", "a", "earliest", "--create").status == 0
    assert [group["name"] for group in groups(command, log)] == ["others", "workers"]
    assert command("groups", "drop", url, "others").status == 0
    assert "workers: 0 members" in command("inspect", url).out
    assert command("groups", "drop", url, "workers").status == 0
    assert groups(command, log) == []


def test_places_in_a_channel():
    assert start_of("earliest") is From.EARLIEST
    assert start_of("00000000000000ff") == FromId((255).to_bytes(8, "big"), inclusive=True)
    assert start_of("1970-01-01T00:00:01Z") == FromTime(1000 << 18)
    assert start_of("1970-01-01T00:00:01") == FromTime(1000 << 18)
    with pytest.raises(InvalidRequest):
        start_of("yesterday")
