"""How far a replica is behind its source, message by message: from the moment at which the source is asked to append
one of 1 KiB to that at which a reader of the replica has it.

`tidewal replicate` runs as a process of its own; this one owns the source, writes, and reads the replica over the
socket of its owner. The capacity is what gets through while this one writes as fast as it can, and the lag is measured
at half of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import struct
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

import tidewal

from ..report import Figure, Rounds, figure
from . import replication_saves
from .bench import Bench

CHANNEL = "messages"
BODY_BYTES = 1024
BATCH = 500  # while writing as fast as possible
STEP_S = 0.01  # from one batch to the next at half of the capacity
READY_S = 60.0  # at most, until the replica can be read
ARRIVED_S = 120.0
BEGAN = struct.Struct(">d")


def measure(bench: Bench) -> list[Figure]:
    """From one RocksMQ to another: message by message, and what the replicator saves."""
    return uvloop.run(_measure(bench.folder(), bench)) + replication_saves.measure(bench)


async def _measure(folder: Path, bench: Bench) -> list[Figure]:
    sizes = bench.sizes
    source, replica = f"rocksmq://{folder / 'source'}", f"rocksmq://{folder / 'replica'}"
    async with await tidewal.open_wal(source) as wal:
        await wal.create_channel(CHANNEL, tidewal.ChannelPolicy())
        async with _replicating(source, replica), _arriving(replica) as arrivals:
            capacities = [await _capacity(wal, arrivals, sizes.messages) for _ in range(sizes.rounds + 1)][1:]
            capacity = Rounds(tuple(capacities))
            p50s, p99s = [], []
            for _ in range(sizes.rounds):
                lags = sorted(await _at_rate(wal, arrivals, capacity.median / 2, sizes.seconds / sizes.rounds))
                p50s.append(lags[len(lags) // 2] * 1000)
                p99s.append(lags[int(len(lags) * 0.99)] * 1000)
    p50, p99 = Rounds(tuple(p50s)), Rounds(tuple(p99s))
    return [
        figure("queue.replication.capacity", capacity.median, "messages/s", capacity.spread),
        figure("queue.replication.lag_p99", p99.median, "ms at half of the capacity", p99.spread, {"p50": p50.median}),
    ]


@contextlib.asynccontextmanager
async def _replicating(source: str, replica: str) -> AsyncGenerator[None]:
    command = [sys.executable, "-m", "tidewal", "replicate", "--from", source, "--to", replica]
    replicator = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert replicator.stderr is not None
    try:
        assert await replicator.stderr.readline(), "the replicator has ended"
        yield
    finally:
        replicator.send_signal(signal.SIGTERM)
        await replicator.communicate()


@dataclass(slots=True)
class Arrivals:
    """What a reader of the replica has: the lag of each message, and when the last one came."""

    lags: list[float] = field(default_factory=list)
    last_s: float = 0.0
    came: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, count: int) -> None:
        """Wait for so many."""
        async with asyncio.timeout(ARRIVED_S):
            while len(self.lags) < count:
                self.came.clear()
                await self.came.wait()


@contextlib.asynccontextmanager
async def _arriving(url: str) -> AsyncGenerator[Arrivals]:
    """Read the replica."""
    arrivals = Arrivals()
    async with asyncio.timeout(READY_S):
        wal = await tidewal.open_wal(url, read_only=True)
        while CHANNEL not in await wal.channels():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(STEP_S)

    async def read() -> None:
        async for entries in wal.read(CHANNEL, tidewal.From.EARLIEST):
            arrivals.last_s = time.perf_counter()
            arrivals.lags += [arrivals.last_s - BEGAN.unpack_from(entry.payload)[0] for entry in entries]
            arrivals.came.set()

    async with wal:
        reading = asyncio.create_task(read())
        try:
            yield arrivals
        finally:
            reading.cancel()
            await asyncio.wait({reading})


async def _append(wal: tidewal.Wal, count: int) -> None:
    body = BEGAN.pack(time.perf_counter()).ljust(BODY_BYTES, b"\0")
    await wal.append_many([tidewal.Append(CHANNEL, body) for _ in range(count)])


async def _capacity(wal: tidewal.Wal, arrivals: Arrivals, count: int) -> float:
    """Messages a second, from the first append to the last arrival."""
    before, began_s = len(arrivals.lags), time.perf_counter()
    for _ in range(count // BATCH):
        await _append(wal, BATCH)
    await arrivals.until(before + count // BATCH * BATCH)
    return count // BATCH * BATCH / (arrivals.last_s - began_s)


async def _at_rate(wal: tidewal.Wal, arrivals: Arrivals, rate: float, seconds: float) -> list[float]:
    """The lags, s, while so many messages a second are written."""
    before, written, began_s = len(arrivals.lags), 0, time.perf_counter()
    while (passed_s := time.perf_counter() - began_s) < seconds:
        count = int(rate * passed_s) - written
        if count > 0:
            await _append(wal, count)
            written += count
        await asyncio.sleep(STEP_S)
    await arrivals.until(before + written)
    return arrivals.lags[before:]
