"""What `tidewal promote --salvage` writes is durable before the source lets go of it, and is not overwritten."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tidewal.cli import salvage_file
from tidewal.cli.salvage_file import check_new, write_salvaged
from tidewal.runtime.errors import InvalidRequest
from tidewal.runtime.log.replication_state import ReplicationPhase, ReplicationState
from tidewal.runtime.log.wal import ChannelPolicy
from tidewal.runtime.replication.replicator import holder_of
from tidewal.runtime.testing import MemoryLog, MemoryWal

STATE = ReplicationState(ReplicationPhase.PROMOTED, "replica", "source")


async def held_source() -> MemoryWal:
    source = MemoryWal(MemoryLog())
    await source.create_channel("orders", ChannelPolicy())
    ids = [await source.append("orders", b"%d" % n) for n in range(4)]
    await source.hold("orders", holder_of(STATE), ids[0])
    return source


async def test_a_second_salvage_does_not_overwrite_the_first(tmp_path: Path) -> None:
    source, file = await held_source(), tmp_path / "left.jsonl"
    assert await write_salvaged(source, STATE, file) == 4
    lines = file.read_text()
    assert lines.count("\n") == 4
    assert not source.log.channels["orders"].holds
    with pytest.raises(InvalidRequest, match="is there already"):
        await write_salvaged(source, STATE, file)
    assert file.read_text() == lines


async def test_entries_are_held_until_the_file_is_durable(tmp_path: Path, monkeypatch: Any) -> None:
    source, file = await held_source(), tmp_path / "left.jsonl"

    def fail(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(salvage_file, "sync_file", fail)
    with pytest.raises(InvalidRequest, match="No space left"):
        await write_salvaged(source, STATE, file)
    assert source.log.channels["orders"].holds
    assert not file.exists()


async def test_of_two_salvages_into_one_file_one_is_refused(tmp_path: Path) -> None:
    """The second one would write over the file when the source holds nothing any more."""
    source, file = await held_source(), tmp_path / "left.jsonl"

    class Second(MemoryWal):
        error: InvalidRequest | None = None

        async def channels(self) -> list[str]:
            if self.error is None:
                with pytest.raises(InvalidRequest, match="another call is writing it") as raised:
                    await write_salvaged(source, STATE, file)
                self.error = raised.value
            return await super().channels()

    first = Second(source.log)
    assert await write_salvaged(first, STATE, file) == 4
    assert first.error is not None
    assert os.listdir(tmp_path) == [file.name]


async def test_a_file_that_cannot_be_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="there is no directory"):
        check_new(tmp_path / "missing" / "left.jsonl")
    check_new(Path("left.jsonl"))
