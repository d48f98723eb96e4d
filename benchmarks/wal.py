"""Durable appends to RocksMQ beside the disk's own limit, the ephemeral path, history and the socket.

The limit is one `write` + `fdatasync` of the same bytes into blocks written before, taking turns with the log on the
same file system. A ratio of 1 means that the log costs nothing. Segments are recycled, as in a log that has run for a
while; the first lives of segments, which are filled with zeros beside the appends, are not measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TypeVar

import uvloop

from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.remote import BlockingClient
from tidewal.runtime.wal import Append, ChannelPolicy, From

from .report import Rounds, figure, interleaved, per_second

T = TypeVar("T")

KIB, MIB = 1024, 1024 * 1024
SEGMENT_BYTES = 64 * MIB
RAW_BYTES = 256 * MIB
CASES = (("8x1MiB", 8, MIB, 24), ("16x64KiB", 16, 64 * KIB, 64), ("1x1KiB", 1, KIB, 1000), ("16x1KiB", 16, KIB, 500),
         ("64x1KiB", 64, KIB, 200))  # name, in flight, bytes each, commits of all in a round  # fmt: skip


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


class Log:
    """A RocksMQ whose segments have been recycled once, driven from synchronous code."""

    def __init__(self, directory: str, runner: asyncio.Runner) -> None:
        self._runner = runner
        self.store = self.run(
            RocksMQ.open(directory, segment_bytes=SEGMENT_BYTES, spare_segments=6, free_space_bytes=0)
        )
        self.run(self.store.create_channel("bench", ChannelPolicy(max_message_bytes=2 * MIB)))

    def run(self, work: Coroutine[None, None, T]) -> T:
        return self._runner.run(work)

    def append(self, in_flight: int, payload: bytes, commits: int) -> None:
        async def produce() -> None:
            for _ in range(commits):
                await self.store.append("bench", payload)

        async def all_of_them() -> None:
            await asyncio.gather(*(produce() for _ in range(in_flight)))

        self.run(all_of_them())

    def recycle(self) -> None:
        """Let everything go but the segment in use."""
        self.run(self.store.truncate("bench", b"\x7f" * 8))
        self.store.retain_now()

    def close(self) -> None:
        self.run(self.store.close())


def appends(log: Log, raw: RawFile) -> None:
    for name, in_flight, size, commits in CASES:
        payload = os.urandom(size)
        together = payload * in_flight

        def by_log(in_flight: int = in_flight, payload: bytes = payload, commits: int = commits) -> float:
            rate = per_second(commits, lambda: log.append(in_flight, payload, commits))
            log.recycle()
            return rate

        def by_disk(together: bytes = together, commits: int = commits) -> float:
            return per_second(commits, lambda: [raw.append(together) for _ in range(commits)])

        measured = interleaved({"log": by_log, "raw": by_disk}, rounds=7)
        ratio(f"wal.append.{name}", measured["log"], measured["raw"], in_flight, size)


def ratio(name: str, ours: Rounds, limit: Rounds, in_flight: int, size: int) -> None:
    ratios = Rounds(tuple(one / other for one, other in zip(ours.values, limit.values, strict=True)))
    beside = {
        "messages_per_s": ours.median * in_flight,
        "mb_per_s": ours.median * in_flight * size / 1e6,
        "raw_mb_per_s": limit.median * in_flight * size / 1e6,
    }
    figure(name, ratios.median, "ratio to raw write+fdatasync", ratios.spread, beside)


def ephemeral(log: Log, count: int = 20_000) -> None:
    """One message at a time to a reader on the same loop, which answers nothing: submit, wake, read."""

    async def round_trips() -> float:
        with contextlib.suppress(Exception):
            await log.store.drop_channel("fast")
        await log.store.create_channel("fast", ChannelPolicy(ephemeral=True))
        reader = log.store.read("fast", From.EARLIEST)
        entries = [Append("fast", b"x" * 200)]
        read = asyncio.Event()

        async def consume() -> None:
            seen = 0
            async for batch in reader:
                seen += len(batch)
                read.set()
                if seen == count:
                    return

        task = asyncio.create_task(consume())
        await asyncio.sleep(0)
        began_s = time.perf_counter()
        for _ in range(count):
            read.clear()
            log.store.submit(entries, lambda _: None)
            await read.wait()
        elapsed_s = time.perf_counter() - began_s
        await task
        return elapsed_s / count * 1e6

    measured = interleaved({"us": lambda: log.run(round_trips())})["us"]
    figure("wal.ephemeral.us", measured.median, "us per message, one at a time", measured.spread)


def history(log: Log, raw: RawFile, directory: str) -> None:
    """128 MiB of 64 KiB messages from the files, by the owner and through the socket, beside bare preads."""
    count = 2048
    log.recycle()
    payload = os.urandom(64 * KIB)
    first = log.run(log.store.append("bench", payload))
    for _ in range(count // 64):
        log.run(log.store.append_many([Append("bench", payload)] * 64))
    log.run(flood_tail(log.store))

    async def by_owner() -> int:
        reader, seen = log.store.read("bench", From.EARLIEST), 0
        while seen < count:
            batch = await anext(reader)
            seen += sum(entry.id > first for entry in batch)
        return seen

    def by_socket() -> None:
        with BlockingClient(directory) as client:
            assert sum(len(batch) for batch in client.read("bench", first)) >= count

    size = count * len(payload) / 1e6
    measured = interleaved(
        {
            "owner": lambda: size * per_second(1, lambda: log.run(by_owner())),
            "socket": lambda: size * per_second(1, by_socket),
            "pread": lambda: size * per_second(1, lambda: raw.read(count * len(payload))),
        }
    )
    for name in ("owner", "socket"):
        figure(f"wal.history.{name}", measured[name].median, "MB/s", measured[name].spread,
               {"pread_mb_per_s": measured["pread"].median})  # fmt: skip


async def flood_tail(store: RocksMQ) -> None:
    """Push everything else out of the tail in memory."""
    await store.create_channel("other", ChannelPolicy(retention_s=0))
    for _ in range(10):
        await store.append_many([Append("other", bytes(MIB))] * 8)


def fresh(directory: str, runner: asyncio.Runner) -> None:
    times: list[float] = []
    for number in range(3):
        path = os.path.join(directory, f"fresh{number}")
        began_s = time.perf_counter()
        store = runner.run(RocksMQ.open(path))
        times.append(time.perf_counter() - began_s)
        runner.run(store.close())
        size = sum(file.stat().st_blocks * 512 for file in Path(path).rglob("*")) / MIB
    figure("wal.open.fresh_s", statistics.median(times), "s", (min(times), max(times)), {"directory_mib": size})


@contextlib.contextmanager
def scratch() -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="tidewal-bench-", dir=os.environ.get("TIDEWAL_BENCH_DIR"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def main() -> None:
    with scratch() as directory, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        fresh(directory, runner)
        raw = RawFile(os.path.join(directory, "raw"))
        log = Log(os.path.join(directory, "log"), runner)
        try:
            for _ in range(8):  # through the first lives of the segments
                log.append(8, bytes(MIB), 8)
            log.recycle()
            steps: list[Callable[[], None]] = [
                lambda: appends(log, raw),
                lambda: ephemeral(log),
                lambda: history(log, raw, os.path.join(directory, "log")),
            ]
            for step in steps:
                step()
        finally:
            log.close()
            raw.close()


if __name__ == "__main__":
    main()
