"""A directory that several logs of one process open, as processes do, and a disk that syncs on demand."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tidewal.adapters.rocksmq import open_wal
from tidewal.runtime.disk import RealDisk
from tidewal.runtime.log.wal import Wal

SEGMENT_BYTES = 256 * 1024
BOUND_S = 20.0  # how long a test waits for what takes a fraction of a second


class SlowDisk(RealDisk):
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
