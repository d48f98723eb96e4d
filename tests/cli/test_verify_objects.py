"""`tidewal verify objects` on a log in a directory."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.commands import Command
from tidewal.adapters.objects.directory_store import DirectoryStore
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.wal import ChannelPolicy


async def _fill(url: str) -> None:
    wal = await open_wal(url)
    await wal.create_channel("a", ChannelPolicy())
    for at in range(5):
        await wal.append("a", b"%d" % at)
    await wal.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    asyncio.run(_fill(f"file://{tmp_path}/log"))
    return tmp_path / "log"


def test_an_intact_log_is_said_to_be_so(command: Command, log: Path) -> None:
    ended = command("verify", "objects", f"file://{log}")
    assert ended.status == 0, ended.err
    assert ended.out.splitlines()[-1].startswith("intact; 8 objects, 5 entries, ")
    *parts, verdict = map(json.loads, command("verify", "objects", f"file://{log}", "--json").out.splitlines())
    assert [part["part"] for part in parts] == ["claims", "epoch 1", "checkpoints", "runs", "channels"]
    assert (verdict["intact"], verdict["entries"]) == (True, 5)


def test_damage_is_told_with_its_place(command: Command, log: Path) -> None:
    (block,) = (log / "l0").glob("*/0000000000000002")
    content = bytearray(block.read_bytes())
    content[-1] ^= 8
    block.write_bytes(content)
    ended = command("verify", "objects", f"file://{log}")
    assert ended.status == 1
    assert f"{block.relative_to(log)}  " in ended.out
    assert ended.out.splitlines()[-1].startswith("damaged: 1 of 5 parts, not wholly checked: 1 of 5 parts; ")
    ended = command("verify", "objects", f"file://{log}", "--json")
    epoch = json.loads(ended.out.splitlines()[1])
    assert (ended.status, epoch["state"], epoch["findings"][0]["key"]) == (1, "damaged", str(block.relative_to(log)))


def test_what_was_deleted_before_it_was_read_is_said_not_to_be_checked(
    command: Command, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted = "l0/0000000000000001/0000000000000002"
    get = DirectoryStore.get

    async def get_late(self: DirectoryStore, key: str, start: int = 0, end: int | None = None) -> bytes | None:
        if key == deleted:
            (log / key).unlink(missing_ok=True)
        return await get(self, key, start, end)

    monkeypatch.setattr(DirectoryStore, "get", get_late)
    ended = command("verify", "objects", f"file://{log}")
    assert ended.status == 2
    assert f"{deleted}  it was deleted before it was read" in ended.out
    assert ended.out.splitlines()[-1].startswith("not wholly checked: 1 of 5 parts; ")


def test_a_directory_without_a_log_is_no_intact_one(command: Command, tmp_path: Path) -> None:
    ended = command("verify", "objects", f"file://{tmp_path}/none")
    assert (ended.status, "there is no log" in ended.err) == (2, True)
    assert list(tmp_path.iterdir()) == []
