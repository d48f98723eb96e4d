"""What it takes to migrate a log to another directory, beside copying the same bytes with `cp`.

    python -m benchmarks.migrate [--mib 1024] [--rounds 3]

A RocksMQ with one channel of 1 KiB messages goes to a new one: read, appended durably, read again on both sides and
compared. Beside it `cp -a` and `sync` of the old log's directory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

import tidewal
from benchmarks.report import figure, interleaved, ratio
from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.log.migration_state import MIGRATION_CHANNEL
from tidewal.runtime.migration.migration import migrate

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


def main() -> None:
    """Migrate and copy in turns."""
    parser = argparse.ArgumentParser(prog="benchmarks.migrate", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TIDEWAL_BENCH_DIR")) as directory:
        old, new = Path(directory) / "old", Path(directory) / "new"
        uvloop.run(fill(old, chosen.mib))
        cpu_s: list[float] = []

        def rate(work: Callable[[], float]) -> Callable[[], float]:
            def measure() -> float:
                took_s = work()
                shutil.rmtree(new)
                return chosen.mib / took_s

            return measure

        def copied() -> float:
            began_s = time.perf_counter()
            subprocess.run(["cp", "-a", old, new], check=True)
            subprocess.run(["sync", "-f", new], check=True)
            return time.perf_counter() - began_s

        candidates = {"migrate": rate(lambda: uvloop.run(migrated(old, new, cpu_s))), "cp": rate(copied)}
        measured = interleaved(candidates, chosen.rounds)
    cpu_mib_s = chosen.mib / statistics.median(cpu_s)
    figure("migrate.rocksmq", measured["migrate"].median, "MiB/s", measured["migrate"].spread,
           {"mib_a_cpu_second": cpu_mib_s})  # fmt: skip
    ratio("migrate.cp", measured["migrate"], measured["cp"], "ratio to cp", cp_mib_s=measured["cp"].median)


if __name__ == "__main__":
    main()
