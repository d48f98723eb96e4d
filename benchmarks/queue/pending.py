"""A node's start while messages wait that are due in the next 30 days: from where it is opened to the moment at which a
message that is due at once has been released in each partition; and the most memory that its process has had, beside
that of a start with nothing pending."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import re
import sys
import time
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import uvloop

import tidewal

from ..report import Figure, Rounds, figure
from .bench import Bench
from .delays import LOOK_S, PARTITIONS, RELEASED, TOPIC

BODY = b"x" * 100
BATCH, WINDOW = 5_000, 4
SEED = 17
SAID = 100_000  # so many more messages are pending each time that this says how far it is


class Start(NamedTuple):
    """Of a node, s from where it is opened, and of the processor until what is due is released; the memory is the most
    that its process has had."""

    ready_s: float
    released_s: float
    cpu_s: float
    memory_mib: float


def measure(bench: Bench) -> list[Figure]:
    """Fill one log, and start with it and with an empty one in turns, each time in a process of its own."""
    count, empty, full = bench.sizes.pending, bench.folder(), bench.folder()
    for directory, pending in ((empty, 0), (full, count)):
        uvloop.run(_fill(directory, pending))
    starts = [(_started(full), _started(empty)) for _ in range(min(3, bench.sizes.rounds))]
    released = Rounds(tuple(ours.released_s for ours, _ in starts))
    memory = Rounds(tuple(ours.memory_mib for ours, _ in starts))
    beside = {
        "pending": count,
        "ready_s": Rounds(tuple(ours.ready_s for ours, _ in starts)).median,
        "cpu_s": Rounds(tuple(ours.cpu_s for ours, _ in starts)).median,
        "with_none_s": Rounds(tuple(none.released_s for _, none in starts)).median,
    }
    with_none_mib = Rounds(tuple(none.memory_mib for _, none in starts)).median
    return [
        figure("queue.pending.start_s", released.median, "s", released.spread, beside),
        figure("queue.pending.memory", memory.median, "MiB", memory.spread, {"with_none_mib": with_none_mib}),
    ]


async def _fill(directory: Path, count: int) -> None:
    """Let so many messages be pending, those of one call with one random due time."""
    chance, sizes = random.Random(SEED), iter([BATCH] * (count // BATCH))
    began, now, sent = time.perf_counter(), datetime.now(UTC), 0
    async with tidewal.standalone(directory) as node, node.client() as client:
        await client.create_topic(TOPIC, PARTITIONS)

        async def sender() -> None:
            nonlocal sent
            for size in sizes:
                due = now + timedelta(hours=2, seconds=chance.uniform(0, 30 * 24 * 3600))
                await client.send(TOPIC, [BODY] * size, deliver_at=due, deadline_s=120)
                sent += size
                if sent % SAID == 0:
                    print(f"{sent} pending after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)

        await asyncio.gather(*(sender() for _ in range(WINDOW)))


def _started(directory: Path) -> Start:
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe(duplex=False)
    process = spawning.Process(target=_start, args=(theirs, directory))
    process.start()
    theirs.close()
    start: Start = ours.recv()
    process.join()
    return start


def _start(result: Connection, directory: Path) -> None:
    async def run() -> Start:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        async with tidewal.standalone(directory) as node, node.client() as client:
            ready_s = time.perf_counter() - began_s
            for partition in range(PARTITIONS):
                await client.send(
                    TOPIC, [BODY], partitioner=lambda _, __, to=partition: to, deliver_after_s=0, deadline_s=120
                )
            while node.node.metrics.value(RELEASED, topic_name=TOPIC) < PARTITIONS:  # noqa: ASYNC110 - a metric
                await asyncio.sleep(LOOK_S)
            released_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
            return Start(ready_s, released_s, cpu_s, _most_memory_mib())

    result.send(uvloop.run(run()))


def _most_memory_mib() -> float:
    """What this process has had, since it was started as a program; Linux only."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024
