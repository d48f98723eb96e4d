"""Processes beside one process: a strong read beside a writer at full speed, and how long a killed owner is missed.

    python -m benchmarks.cluster [--seconds 5] [--rounds 5] [--kills 5]

`cluster.loaded_strong_read.p50_ms` is the time of a strong `count` through the public client, with a writer of its own
process that keeps 8 batches of 1,000 rows in flight, over `tidewal run` and `tidewal run --processes 4` by turns, each
in a new directory: the value is that of the processes, the one process' and the ratio are beside it, and so are the
rows written. `cluster.owner_killed.s` is the longest wait of a client that writes row after row, while the process that
owns the log and its channels is killed and started again by its supervisor.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.proxy import narrow_batches, narrow_schema, write
from benchmarks.report import figure
from tidewal import connect

PAUSE_S = 0.005
READY_S = 60.0


@contextlib.contextmanager
def running(directory: Path, *options: str) -> Generator[dict[str, Any]]:
    """`tidewal run` in a directory: what it prints once it is ready, and its `pid`."""
    command = [sys.executable, "-m", "tidewal", "run", "--data", str(directory), "--json", "--log-level", "error"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE) as node:
        try:
            assert node.stdout is not None
            yield {**json.loads(node.stdout.readline()), "pid": node.pid}
        finally:
            node.send_signal(signal.SIGTERM)
            node.wait()


async def writer(directory: str, seconds: float) -> None:
    """Write at full speed, as a process of its own, and print the rows per second."""
    async with connect(directory) as client:
        print(await write(client, "narrow", list(narrow_batches()), seconds), flush=True)


async def loaded_reads(directory: Path, seconds: float) -> tuple[float, float]:
    """The median time of a strong read in ms, and the rows per second that were written meanwhile."""
    async with connect(directory) as client:
        await client.create_collection(narrow_schema(), shards=2)
        command = [sys.executable, "-m", "benchmarks.cluster", "--write", str(directory), "--seconds", str(seconds)]
        writing = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        try:
            while await client.count("narrow", consistency="strong") < 10_000:  # noqa: ASYNC110 -- another process writes
                await asyncio.sleep(PAUSE_S)
            times: list[float] = []
            while writing.returncode is None:
                began = time.perf_counter()
                await client.count("narrow", consistency="strong", deadline_s=60)
                times.append((time.perf_counter() - began) * 1000)
                await asyncio.sleep(PAUSE_S)
        finally:
            out, _ = await writing.communicate()
    return statistics.median(times), float(out)


async def loaded(seconds: float, rounds: int, scratch: Path) -> None:
    found: dict[str, list[tuple[float, float]]] = {"1": [], "4": []}
    for number in range(rounds):
        for processes, values in found.items():
            directory = scratch / f"{number}-{processes}"
            with running(directory, "--processes", processes):
                values.append(await loaded_reads(directory, seconds))
    one, four = ([read for read, _ in found[name]] for name in ("1", "4"))
    rows_one, rows_four = (statistics.median([rows for _, rows in found[name]]) for name in ("1", "4"))
    beside = {
        "one_process_ms": statistics.median(one),
        "ratio": statistics.median(four) / statistics.median(one),
        "rows_per_s": rows_four,
        "one_process_rows_per_s": rows_one,
        "rows_ratio": rows_four / rows_one,
    }
    figure(
        "cluster.loaded_strong_read.p50_ms",
        statistics.median(four),
        "ms",
        spread=(min(four), max(four)),
        beside=beside,
    )


async def killed(kills: int, directory: Path) -> Sequence[float]:
    """How long a write waited, for each kill of the owner."""
    waited: list[float] = []
    with running(directory, "--processes", "4", "--name", "bench"):
        async with connect(directory) as client:
            await client.create_collection(narrow_schema(), shards=2)
            batch = narrow_batches()[0].slice(0, 1)
            for _ in range(kills):
                await client.apply("narrow", batch)
                [owner] = await asyncio.to_thread(_children_named, "bench-owner")
                os.kill(owner, signal.SIGKILL)
                longest, end = 0.0, time.perf_counter() + 8
                while time.perf_counter() < end:
                    began = time.perf_counter()
                    await client.apply("narrow", batch, deadline_s=60)
                    longest = max(longest, time.perf_counter() - began)
                waited.append(longest)
    return waited


def _children_named(name: str) -> list[int]:
    """The processes with this name of a node among their arguments."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if name.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


async def main(seconds: float, rounds: int, kills: int) -> None:
    with tempfile.TemporaryDirectory(dir=os.environ.get("TIDEWAL_BENCH_DIR")) as scratch:
        await loaded(seconds, rounds, Path(scratch))
        waited = await killed(kills, Path(scratch) / "killed")
        figure("cluster.owner_killed.s", statistics.median(waited), "s", spread=(min(waited), max(waited)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--write", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        asyncio.run(writer(arguments.write, arguments.seconds))
    else:
        asyncio.run(main(arguments.seconds, arguments.rounds, arguments.kills))
