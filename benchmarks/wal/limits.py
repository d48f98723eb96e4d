"""What the subjects share: the disk's limit, a log whose segments have been used before, and producers.

The limit is one `write` + `fdatasync` of the same bytes into blocks written before, on the same file system. Segments
are recycled, as in a log that has run for a while; their first lives, which are filled with zeros beside the appends,
are not measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import cached_property
from typing import TypeVar

from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.log.wal import Append, ChannelPolicy, Wal

T = TypeVar("T")

KIB, MIB = 1024, 1024 * 1024
SEGMENT_BYTES = 64 * MIB
RAW_BYTES = 256 * MIB
TO_RAW = "ratio to raw write+fdatasync"


class RawFile:
    """Blocks written before, to be written again in order."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        for offset in range(0, RAW_BYTES, MIB):
            os.pwrite(self._file, bytes(MIB), offset)
        os.fsync(self._file)
        self._at = 0

    def append(self, data: bytes) -> None:
        if self._at + len(data) > RAW_BYTES:
            self._at = 0
        os.pwrite(self._file, data, self._at)
        os.fdatasync(self._file)
        self._at += len(data)

    def read(self, size: int) -> None:
        for offset in range(0, size, MIB):
            assert len(os.pread(self._file, MIB, offset)) == MIB

    def close(self) -> None:
        os.close(self._file)


async def produce(wal: Wal, in_flight: int, payload: bytes, rounds: int, channels: Sequence[str] = ("bench",)) -> None:
    """Let `in_flight` producers each append `rounds` times, one after another, to the channels in turn."""

    async def one(first: int) -> None:
        for number in range(first, first + rounds):
            await wal.append(channels[number % len(channels)], payload)

    await asyncio.gather(*(one(number * rounds) for number in range(in_flight)))


class Log:
    """An owned RocksMQ whose segments have been recycled once, driven from synchronous code."""

    def __init__(self, directory: str, runner: asyncio.Runner) -> None:
        self._runner = runner
        self.url = f"rocksmq://{directory}"
        opening = RocksMQ.open(directory, segment_bytes=SEGMENT_BYTES, spare_segments=6, free_space_bytes=0)
        self.store = self.run(opening)
        self.run(self.store.create_channel("bench", ChannelPolicy(max_message_bytes=2 * MIB)))
        for _ in range(8):  # through the first lives of the segments
            self.append(8, bytes(MIB), 8)
        self.recycle()

    def run(self, work: Coroutine[None, None, T]) -> T:
        return self._runner.run(work)

    def append(self, in_flight: int, payload: bytes, rounds: int) -> None:
        self.run(produce(self.store, in_flight, payload, rounds))

    def append_many(self, count: int, payload: bytes, rounds: int) -> None:
        async def produce_batches() -> None:
            entries = [Append("bench", payload)] * count
            for _ in range(rounds):
                await self.store.append_many(entries)

        self.run(produce_batches())

    def recycle(self) -> None:
        """Let everything go but the segment in use."""
        self.run(self.store.truncate("bench", b"\x7f" * 8))
        self.store.retain_now()

    def close(self) -> None:
        self.run(self.store.close())


class Bench:
    """A scratch directory, a loop, and what is made there when a subject first asks for it."""

    def __init__(self, directory: str, runner: asyncio.Runner) -> None:
        self.directory, self.runner = directory, runner
        self._closing: list[Callable[[], None]] = []

    def path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def run(self, work: Coroutine[None, None, T]) -> T:
        return self.runner.run(work)

    @cached_property
    def raw(self) -> RawFile:
        raw = RawFile(self.path("raw"))
        self._closing.append(raw.close)
        return raw

    @cached_property
    def log(self) -> Log:
        log = Log(self.path("log"), self.runner)
        self._closing.append(log.close)
        return log

    def close(self) -> None:
        for close in reversed(self._closing):
            close()


@contextlib.contextmanager
def scratch() -> Generator[str]:
    directory = tempfile.mkdtemp(prefix="tidewal-bench-", dir=os.environ.get("TIDEWAL_BENCH_DIR"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)
