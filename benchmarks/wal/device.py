"""What the device writes for each byte that is appended, told by the kernel's count of sectors.

Not by `/proc/self/io`, which charges whole folios when a file is overwritten. Everything that is dirty is synced before
and after; what others write meanwhile is estimated from an idle time just before, and taken off.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from tidewal.runtime.log.wal import Append, ChannelPolicy

from ..report import figure
from .limits import KIB, MIB, Bench

CHANNELS = [f"amplified{number}" for number in range(16)]
CASES = ((4 * KIB, 1000), (64 * KIB, 100))  # bytes to each channel, commits
IDLE_S = 2.0
ROUNDS = 3
SECTOR_BYTES = 512


def measure(bench: Bench) -> None:
    counter = _counter(bench.directory)
    if isinstance(counter, str):
        figure("wal.device.amplification", float("nan"), f"not measurable here: {counter}")
        return
    store = bench.log.store
    for channel in CHANNELS:
        bench.run(store.create_channel(channel, ChannelPolicy(retention_s=0)))
    for size, commits in CASES:
        entries = [Append(channel, os.urandom(size)) for channel in CHANNELS]

        async def append(entries: list[Append] = entries, commits: int = commits) -> None:
            for _ in range(commits):
                await store.append_many(entries)

        values: list[float] = []
        idle_bytes_per_s = 0.0
        for _ in range(ROUNDS):
            idle_bytes_per_s = _written(counter, lambda: time.sleep(IDLE_S)) / IDLE_S
            began_s = time.perf_counter()
            written = _written(counter, lambda: bench.run(append()))
            background = idle_bytes_per_s * (time.perf_counter() - began_s)
            values.append((written - background) / (commits * len(entries) * size))
            store.retain_now()
        name = f"wal.device.amplification.{len(CHANNELS) * size // KIB}KiB"
        figure(name, statistics.median(values), "bytes at the device for each appended", (min(values), max(values)),
               {"idle_mb_per_s": idle_bytes_per_s / MIB})  # fmt: skip


def _counter(directory: str) -> Path | str:
    """The statistics of the block device below a directory, or why there are none."""
    device = os.stat(directory).st_dev
    path = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    if not path.exists():
        return f"{directory} is on no block device of its own ({os.major(device)}:{os.minor(device)})"
    return path


def _written(counter: Path, work: Callable[[], object]) -> int:
    """Bytes that the device wrote for `work`, synced before and after."""
    os.sync()
    before = int(counter.read_text().split()[6])
    work()
    os.sync()
    return (int(counter.read_text().split()[6]) - before) * SECTOR_BYTES
