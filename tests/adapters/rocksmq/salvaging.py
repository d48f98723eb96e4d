"""What the tests of salvage share: the frames of a journal, damage, and what a salvaged log must hold."""

from __future__ import annotations

import hashlib
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.rocksmq.damage import flip
from tidewal.adapters.rocksmq.check.journal_survey import JournalSurvey, ReadOnlyDisk
from tidewal.adapters.rocksmq.check.salvage import SalvageReport, salvage
from tidewal.adapters.rocksmq.check.verify import verify
from tidewal.runtime.clock import SystemClock
from tidewal.runtime.errors import PositionLost
from tidewal.runtime.log.wal import From, FromId

SMALL = 64 * 1024
WALL_MS = SystemClock().wall_ms()
NUMBERS = {"a": 1, "b": 2, "c": 3, "d": 4}  # of the channels
Content = dict[str, dict[bytes, bytes]]


class Frames:
    """Where the frames of a closed journal lie, and which entries are in each."""

    def __init__(self, log: Path) -> None:
        self.places: list[tuple[Path, int, int, dict[tuple[int, int], None]]] = []
        survey = JournalSurvey(ReadOnlyDisk(), str(log / "journal"))
        for segment in survey.segments:
            for frame in survey.walk(segment, None):
                entries = {(number, id): None for number, _, id, _ in frame.raw_rows() if number}
                self.places.append((Path(segment.path), frame.offset, frame.end, entries))
        survey.close()

    def of(self, path: Path) -> list[int]:
        return [place for place, (found, *_) in enumerate(self.places) if found == path]


def report(log: Path) -> SalvageReport:
    return salvage(str(log), None, wall_ms=WALL_MS)


def fingerprint(directory: Path) -> dict[str, str]:
    """Every file and folder with its content and when it was changed last."""
    return {
        str(path.relative_to(directory)): f"{path.stat().st_mtime_ns} "
        + (hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder")
        for path in sorted(directory.rglob("*"))
    }


def replace(log: Path, **options: Any) -> SalvageReport:
    """Salvage the log, which must stay as it is, and put the copy in its place; the damaged one is `damaged` then."""
    copy, damaged = log.with_name("copy"), log.with_name("damaged")
    before = fingerprint(log)
    found = salvage(str(log), str(copy), **({"wall_ms": WALL_MS} | options))
    assert fingerprint(log) == before
    assert {report.state for report in verify(str(copy), owned=False)} == {"ok"}
    shutil.rmtree(damaged, ignore_errors=True)
    log.rename(damaged)
    copy.rename(log)
    return found


def zero(path: Path, start: int, end: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(end - start))


def damage(path: Path, offset: int, end: int, rows: int, rng: random.Random) -> str:
    """Damage a frame in one of the ways that look different; say how."""
    how = rng.choice(["body", "header", "row", "channel", "zeros"])
    if how == "zeros":
        zero(path, offset, end)
        return how
    position = {
        "body": offset + 32 + 24 * rows,
        "header": offset + rng.randrange(32),
        "row": offset + 32 + rng.randrange(24 * rows),
        "channel": offset + 32 + 24 * rng.randrange(rows),
    }[how]
    bit = rng.randrange(8)
    flip(path, position, bit)
    return f"{how}, bit {bit} at {position}"


async def read_over_losses(store, channel: str) -> tuple[dict[bytes, bytes], list[tuple[bytes, bytes]]]:
    """Everything in a channel, and the ranges (first lost, first behind) at which a reader was stopped."""
    latest, start = await store.latest_id(channel), From.EARLIEST
    found: dict[bytes, bytes] = {}
    stopped: list[tuple[bytes, bytes]] = []
    while latest is not None and max(found, default=b"") < latest and all(behind <= latest for _, behind in stopped):
        reader = store.read(channel, start)
        try:
            while max(found, default=b"") < latest:
                found.update((entry.id, bytes(entry.payload)) for entry in await anext(reader))
        except PositionLost as error:
            stopped.append((error.requested, error.first_available))
            start = FromId(error.first_available, inclusive=True)
        await reader.aclose()
    return found, stopped


async def read_all(store) -> tuple[Content, dict[str, list[tuple[bytes, bytes]]]]:
    content, stopped = {}, {}
    for channel in await store.channels():
        content[channel], stopped[channel] = await read_over_losses(store, channel)
    return content, stopped


async def check(open_rocksmq, written: Content, frames: Frames, hit: set[int]) -> None:
    """What was not in the frames `hit` is there; what was is lost, and readers are stopped in front of it."""
    lost = {key for place in hit for key in frames.places[place][3]}
    store = await open_rocksmq(segment_bytes=SMALL)
    content, stopped = await read_all(store)
    for name, entries in written.items():
        gone = {id for id in entries if (NUMBERS[name], int.from_bytes(id, "big")) in lost}
        assert content[name] == {id: payload for id, payload in entries.items() if id not in gone}, name
        for id in gone:
            assert any(first <= id < behind for first, behind in stopped[name]), (name, id)
        for id in sorted(gone)[:1] + sorted(gone)[-1:]:
            with pytest.raises(PositionLost):
                await anext(store.read(name, FromId(id, inclusive=True)))
        for first, behind in stopped[name]:
            assert not any(first <= id < behind for id in content[name]), name
        new = await store.append(name, b"on it goes")
        assert new > max(entries)
    await store.close()
