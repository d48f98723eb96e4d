"""What it takes to migrate a log to another directory, beside copying the same bytes with `cp`.

A RocksMQ with one channel of 1 KiB messages goes to a new one: read, appended durably, read again on both sides and
compared. Beside it `cp -a` and `sync` of the old log's directory.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

import tidewal
from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.log.migration_state import MIGRATION_CHANNEL
from tidewal.runtime.migration.migration import migrate

from ..report import Figure, figure, interleaved, ratio
from .bench import Bench

KIB = 1024
BATCH = 1_000


async def fill(directory: Path, mib: int) -> None:
    """Append as many MiB of messages, each with a timestamp of its own."""
    async with await RocksMQ.open(str(directory)) as wal:
        await wal.create_channel("messages", tidewal.ChannelPolicy(retention_s=None))
        body = os.urandom(KIB)
        for begin in range(0, mib * KIB, BATCH):
            await wal.append_many([tidewal.Append("messages", body, begin + n + 1) for n in range(BATCH)])


async def migrated(old: Path, new: Path, cpu_s: list[float]) -> float:
    """The seconds that it took; those of the processor come into `cpu_s`. The old log is in use again behind it."""
    async with await RocksMQ.open(str(old), serve=False) as source, await RocksMQ.open(str(new), serve=False) as target:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        await migrate(source, target, f"rocksmq://{old}", f"rocksmq://{new}")
        took_s = time.perf_counter() - began_s
        cpu_s.append(time.process_time() - began_cpu_s)
        await source.drop_channel(MIGRATION_CHANNEL)
    return took_s


def measure(bench: Bench) -> list[Figure]:
    """Migrate and copy in turns."""
    folder, mib, cpu_s = bench.folder(), bench.sizes.mib, list[float]()
    old, new = folder / "old", folder / "new"
    uvloop.run(fill(old, mib))

    def rate(work: Callable[[], float]) -> Callable[[], float]:
        def measure() -> float:
            took_s = work()
            shutil.rmtree(new)
            return mib / took_s

        return measure

    def copied() -> float:
        began_s = time.perf_counter()
        subprocess.run(["cp", "-a", old, new], check=True)
        subprocess.run(["sync", "-f", new], check=True)
        return time.perf_counter() - began_s

    candidates = {"migrate": rate(lambda: uvloop.run(migrated(old, new, cpu_s))), "cp": rate(copied)}
    measured = interleaved(candidates, bench.sizes.rounds)
    shutil.rmtree(folder)
    speed = measured["migrate"]
    return [
        figure("queue.migration.rocksmq", speed.median, "MiB/s", speed.spread,
               {"mib_a_cpu_second": mib / statistics.median(cpu_s)}),
        ratio("queue.migration.cp", speed, measured["cp"], "ratio to cp", cp_mib_s=measured["cp"].median),
    ]  # fmt: skip
