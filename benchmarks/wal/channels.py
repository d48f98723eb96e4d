"""What many channels cost: appends to 256 beside one, and 10,000 that nobody uses."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import resource
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import uvloop

from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.log.wal import ChannelPolicy

from ..report import figure, interleaved, per_second, ratio
from .limits import KIB, Bench, produce

MANY = [f"many{number}" for number in range(256)]
IN_FLIGHT = 16
ROUNDS = 500
IDLE = 10_000
IDLE_S = 3.0


def measure(bench: Bench) -> None:
    _many(bench)
    _idle(bench)


def _many(bench: Bench) -> None:
    store = bench.log.store
    for channel in MANY:
        bench.run(store.create_channel(channel, ChannelPolicy(retention_s=0)))
    payload = os.urandom(KIB)

    def appends_per_s(channels: list[str]) -> float:
        work = produce(store, IN_FLIGHT, payload, ROUNDS, channels)
        rate = per_second(IN_FLIGHT * ROUNDS, lambda: bench.run(work))
        bench.log.recycle()
        return rate

    measured = interleaved({"one": lambda: appends_per_s(MANY[:1]), "all": lambda: appends_per_s(MANY)}, rounds=9)
    ratio("wal.channels.256_vs_1", measured["one"], measured["all"], "cost of an append, ratio to one channel",
          appends_per_s=measured["all"].median)  # fmt: skip


def _idle(bench: Bench) -> None:
    """In a process of its own, so that memory which others left cannot hide what is taken."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        kib, share = pool.submit(_idle_costs, bench.path("idle")).result()
    figure("wal.channels.idle_10000", kib, "KiB of memory for each idle channel", beside={"cpu_share": share})


def _idle_costs(path: str) -> tuple[float, float]:
    """KiB of resident memory per channel with one entry, and the share of a core that all of them take."""

    async def run() -> tuple[float, float]:
        store = await RocksMQ.open(path, free_space_bytes=0)
        await store.create_channel("first", ChannelPolicy())
        await store.append("first", b"x" * 100)
        before = _resident_bytes()
        names = [f"idle{number}" for number in range(IDLE)]
        await asyncio.gather(*(store.create_channel(name, ChannelPolicy()) for name in names))
        await asyncio.gather(*(store.append(name, b"x" * 100) for name in names))
        taken = _resident_bytes() - before
        await asyncio.sleep(1)  # what the creation set off ends
        used_s = _cpu_s()
        await asyncio.sleep(IDLE_S)
        share = (_cpu_s() - used_s) / IDLE_S
        await store.close()
        return taken / IDLE / KIB, share

    return uvloop.run(run())


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
