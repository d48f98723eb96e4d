"""What it costs a replicator to save what it has, with a line, by the number of channels of the nodes.

A replicator in a process of its own, `python -m benchmarks.queue.replication_saves SOURCE REPLICA COUNT`, mirrors the
RocksMQ of a node here, one channel of which is written ten times a second, and says for each save the seconds of CPU
of its process, the seconds that passed, and the bytes of the replica's state.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

import tidewal
from tidewal.cli.replicate import opened_replica
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.replication.replicator import Replicator

from ..report import Figure, figure
from .bench import Bench

PARTITIONS = 64  # of a topic, at most
WRITE_S = 0.1
DEADLINE_S = 600.0


def measure(bench: Bench) -> list[Figure]:
    """From one RocksMQ to another, for each number of channels."""
    return [each for count in bench.sizes.channels for each in uvloop.run(_measure(bench.folder(), count, bench))]


async def _measure(folder: Path, channels: int, bench: Bench) -> list[Figure]:
    source = f"rocksmq://{folder / 'source'}"
    async with tidewal.standalone(folder / "data", wal=source) as node, node.client() as client:
        for begin in range(0, channels, PARTITIONS):
            await client.create_topic(f"t{begin}", min(PARTITIONS, channels - begin), deadline_s=DEADLINE_S)
        command = ["-m", "benchmarks.queue.replication_saves", source, f"rocksmq://{folder / 'replica'}"]
        replicator = await asyncio.create_subprocess_exec(
            *(sys.executable, *command, str(bench.sizes.rounds)), stdout=asyncio.subprocess.PIPE
        )
        ending = asyncio.create_task(replicator.communicate())
        while not ending.done():
            await client.send("t0", b"x" * 100, key="k")
            await asyncio.wait({ending}, timeout=WRITE_S)
    saves = [json.loads(line) for line in (await ending)[0].splitlines()]
    cpus_s, passed_s, sizes = zip(*saves, strict=True)
    return [
        _figure(f"save_cpu_{channels}", cpus_s, 1000, "ms of CPU"),
        _figure(f"save_{channels}", passed_s, 1000, "ms"),
        _figure(f"save_size_{channels}", sizes, 1 / 1024, "KiB"),
    ]


def _figure(name: str, values: Sequence[float], factor: float, unit: str) -> Figure:
    scaled = sorted(value * factor for value in values)
    return figure(f"queue.replication.{name}", statistics.median(scaled), unit, (scaled[0], scaled[-1]))


class _Measured(Replicator):
    """Says what each save with a line costs, and ends behind `left` of them."""

    left = 0

    async def save(self, **options: Any) -> None:
        began_cpu_s, began_s, had_line = time.process_time(), time.perf_counter(), bool(self.state.line)
        await super().save(**options)
        if had_line and self.left:
            size = sum(map(len, self.state.entries()))
            print(json.dumps([time.process_time() - began_cpu_s, time.perf_counter() - began_s, size]), flush=True)
            self.left -= 1


async def _replicate(source: str, replica: str, count: int) -> None:
    async with await open_wal(source) as old, opened_replica(old, source, replica) as new:
        replicator = _Measured(old, new, source)
        replicator.left = count
        running = asyncio.create_task(replicator.run())
        while replicator.left and not running.done():
            await asyncio.wait({running}, timeout=1.0)
        running.cancel()
        await asyncio.wait({running})


if __name__ == "__main__":
    uvloop.run(_replicate(sys.argv[1], sys.argv[2], int(sys.argv[3])))
