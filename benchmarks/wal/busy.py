"""Sixteen producers on a loop whose other task burns the CPU in slices."""

from __future__ import annotations

import asyncio
import statistics
import time

from ..report import figure, interleaved
from .limits import KIB, Bench

SLICE_S = 0.001
ROUND_S = 1.0
IN_FLIGHT = 16


def measure(bench: Bench) -> None:
    latencies_ms: list[float] = []
    store = bench.log.store
    payload = bytes(KIB)

    async def beside_a_handler() -> float:
        """Appends per second."""
        end_s = time.perf_counter() + ROUND_S

        async def burn() -> None:
            while (now_s := time.perf_counter()) < end_s:
                while time.perf_counter() < now_s + SLICE_S:
                    pass
                await asyncio.sleep(0)

        async def produce() -> int:
            count = 0
            while (began_s := time.perf_counter()) < end_s:
                await store.append("bench", payload)
                latencies_ms.append((time.perf_counter() - began_s) * 1e3)
                count += 1
            return count

        _, *counts = await asyncio.gather(burn(), *(produce() for _ in range(IN_FLIGHT)))
        return sum(counts) / ROUND_S

    measured = interleaved({"rate": lambda: bench.run(beside_a_handler())})["rate"]
    percentiles = statistics.quantiles(latencies_ms, n=100)
    figure("wal.busy.16x1KiB", measured.median, "appends/s beside 1 ms slices of CPU", measured.spread,
           {"p50_ms": percentiles[49], "p99_ms": percentiles[98]})  # fmt: skip
    bench.log.recycle()
