"""Opening a directory: a new one, one without its index, and one that was closed."""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
from pathlib import Path

from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.disk import Disk
from tidewal.runtime.log.wal import Append, ChannelPolicy

from ..report import figure
from .limits import KIB, MIB, Bench

ROUNDS = 3
JOURNAL_BYTES = 1024 * MIB
CASES = (("64KiB", 64 * KIB, 16), ("1KiB", KIB, 64))  # bytes each, messages of a commit
LAST_SEGMENT = (("1KiB", KIB, 28_000), ("128B", 128, 150_000))  # bytes each, commits of one that nearly fill a segment


class UnsyncedDisk(Disk):
    """Writes a journal quickly that is to be opened, not to survive."""

    def sync(self, file: int) -> None:
        pass


def measure(bench: Bench) -> None:
    _fresh(bench)
    for name, size, together in CASES:
        _unindexed(bench, name, size, together)
    for name, size, commits in LAST_SEGMENT:
        _clean(bench, name, size, commits)


def _fresh(bench: Bench) -> None:
    times = [_opening_s(bench, bench.path(f"fresh{number}")) for number in range(ROUNDS)]
    size = sum(file.stat().st_blocks * 512 for file in Path(bench.path("fresh0")).rglob("*")) / MIB
    figure("wal.open.fresh_s", statistics.median(times), "s", (min(times), max(times)), {"directory_mib": size})


def _unindexed(bench: Bench, name: str, size: int, together: int) -> None:
    path = bench.path("unindexed")

    async def write() -> None:
        store = await RocksMQ.open(path, free_space_bytes=0, tail_bytes=0, disk=UnsyncedDisk())
        await store.create_channel("bench", ChannelPolicy())
        entries = [Append("bench", os.urandom(size)) for _ in range(together)]
        for _ in range(JOURNAL_BYTES // size // together):
            await store.append_many(entries)
        await store.close()

    bench.run(write())
    times: list[float] = []
    for _ in range(ROUNDS):
        shutil.rmtree(os.path.join(path, "index"))
        times.append(_opening_s(bench, path))
    shutil.rmtree(path)
    figure(f"wal.open.unindexed_1GiB_s.{name}", statistics.median(times), "s, from the page cache",
           (min(times), max(times)), {"messages_of_a_commit": together})  # fmt: skip


def _clean(bench: Bench, name: str, size: int, commits: int) -> None:
    """The last segment is nearly full of small commits: the most that there can be to look at."""
    path = bench.path(f"clean{size}")

    async def write() -> None:
        store = await RocksMQ.open(path, free_space_bytes=0, disk=UnsyncedDisk())
        await store.create_channel("bench", ChannelPolicy())
        entries, done = [Append("bench", bytes(size))], threading.Event()
        for _ in range(commits):
            done.clear()
            store.submit(entries, lambda _: done.set())
            done.wait()
        await store.close()

    bench.run(write())
    times = [_opening_s(bench, path) for _ in range(ROUNDS)]
    figure(f"wal.open.clean_s.{name}", statistics.median(times), "s", (min(times), max(times)), {"commits": commits})


def _opening_s(bench: Bench, path: str) -> float:
    began_s = time.perf_counter()
    store = bench.run(RocksMQ.open(path, free_space_bytes=0))
    elapsed_s = time.perf_counter() - began_s
    bench.run(store.close())
    return elapsed_s
