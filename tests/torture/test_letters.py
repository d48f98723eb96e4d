"""What is kept of a run that found a violation."""

from __future__ import annotations

import json
from pathlib import Path

from tests.torture.letters import save_dead_letters
from tidewal.runtime.clock import HybridClock
from tidewal.runtime.errors import BadRecord
from tidewal.runtime.log.dead_letters import DeadLetters
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.wal import Entry
from tidewal.runtime.testing.memory import MemoryWal


async def test_dead_letters_are_written_out(tmp_path: Path) -> None:
    wal, path = MemoryWal(), tmp_path / "letters.jsonl"
    letters = DeadLetters(wal, HybridClock(), Names().dead_letters)
    await letters.open()
    letters.bad("a", Entry(b"\x07", 0, b"junk"), BadRecord("no record", reason="magic"))
    await wal.latest_id(Names().dead_letters)
    assert await save_dead_letters(wal, path) == "1 in letters.jsonl"
    [found] = [json.loads(line) for line in path.read_text().splitlines()]
    assert (found["id"], found["channel"], found["reason"], found["body"]) == ("07", "a", "magic", b"junk".hex())


async def test_dead_letters_that_cannot_be_read_hide_no_violation(tmp_path: Path) -> None:
    assert "ChannelNotFound" in await save_dead_letters(MemoryWal(), tmp_path / "letters.jsonl")


async def test_garbage_among_dead_letters_hides_none(tmp_path: Path) -> None:
    wal, path = MemoryWal(), tmp_path / "letters.jsonl"
    letters = DeadLetters(wal, HybridClock(), Names().dead_letters)
    await letters.open()
    await wal.append(Names().dead_letters, b"junk")
    letters.bad("a", Entry(b"\x07", 0, b"junk"), BadRecord("no record", reason="magic"))
    await wal.latest_id(Names().dead_letters)
    assert await save_dead_letters(wal, path) == "2 in letters.jsonl"
    garbage, letter = [json.loads(line) for line in path.read_text().splitlines()]
    assert (garbage["body"], letter["channel"]) == (b"junk".hex(), "a")
