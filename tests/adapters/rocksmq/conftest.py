"""A directory that several logs of one process open, as processes do; a disk that syncs on demand; a log to salvage."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.rocksmq.salvaging import SMALL, Content
from tidewal.adapters.rocksmq import open_wal
from tidewal.runtime.disk import Disk
from tidewal.runtime.log.wal import Append, ChannelPolicy, Wal

SEGMENT_BYTES = 256 * 1024
COMMITS = 150  # of each incarnation of `log`
BOUND_S = 20.0  # how long a test waits for what takes a fraction of a second


class SlowDisk(Disk):
    """Syncs while `go_on` is set."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.go_on.set()

    def sync(self, file: int) -> None:
        self.go_on.wait(BOUND_S)
        super().sync(file)


@pytest.fixture
def slow_disk() -> SlowDisk:
    return SlowDisk()


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "log")


@pytest.fixture
async def opening(directory: str) -> AsyncIterator[Callable[..., Awaitable[Wal]]]:
    """Open the log of this test as processes do; all is closed at its end."""
    opened: list[Wal] = []

    async def open_one(own: bool | None = None, **options: Any) -> Wal:
        wal = await open_wal(f"rocksmq://{directory}", own=own, **{"segment_bytes": SEGMENT_BYTES, **options})
        opened.append(wal)
        return wal

    yield open_one
    for wal in opened:
        await wal.close()


@pytest.fixture
async def written() -> Content:
    """The payloads in `log`: channel → id → payload."""
    return {}


@pytest.fixture
async def log(open_rocksmq, tmp_path, written) -> Path:
    """A closed log of four channels over several segments; channel "d" comes late."""
    for incarnation in range(2):
        store = await open_rocksmq(segment_bytes=SMALL)
        for name in "abc" if incarnation == 0 else "abcd":
            await store.create_channel(name, ChannelPolicy())
        for commit in range(COMMITS):
            names = ("abc" if incarnation == 0 else "abcd")[: commit % 4 + 1]
            batch = [Append(name, f"{incarnation}:{commit}:{name} ".encode() * 40, commit + 1) for name in names]
            for id, append in zip(await store.append_many(batch), batch, strict=True):
                written.setdefault(append.channel, {})[id] = append.payload
        await asyncio.to_thread(store._maintenance.need_spare)  # so that the last segment is always the spare
        await store.close()
    return tmp_path / "log"


@pytest.fixture
def segments(log: Path) -> list[Path]:
    found = sorted((log / "journal").glob("*.segment"))
    assert len(found) > 4
    return found
