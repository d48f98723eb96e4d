"""Sixteen producers on a loop whose other task burns the CPU in slices.

With Python's own switch interval of 5 ms the journal's writer can starve: the loop lets go of the interpreter lock for
an instant between slices, which wakes the waiting writer, but by the time it runs the loop has the lock again; and each
such wake-up begins the writer's 5 ms anew, after which it could demand the lock. An interval under the slice ends that.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time

from ..report import figure, interleaved
from .limits import KIB, Bench

SLICE_S = 0.001
ROUND_S = 1.0
IN_FLIGHT = 16
INTERVALS_MS = (0.5, 5.0)  # the interpreter's switch interval: one that suits, Python's own


def measure(bench: Bench) -> None:
    latencies_ms: dict[float, list[float]] = {interval_ms: [] for interval_ms in INTERVALS_MS}
    store = bench.log.store
    payload = bytes(KIB)

    async def beside_a_handler(latencies: list[float]) -> float:
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
                latencies.append((time.perf_counter() - began_s) * 1e3)
                count += 1
            return count

        _, counts = await asyncio.gather(burn(), asyncio.gather(*(produce() for _ in range(IN_FLIGHT))))
        return sum(counts) / ROUND_S

    def switching(interval_ms: float) -> float:
        usual_s = sys.getswitchinterval()
        sys.setswitchinterval(interval_ms / 1e3)
        try:
            return bench.run(beside_a_handler(latencies_ms[interval_ms]))
        finally:
            sys.setswitchinterval(usual_s)

    measured = interleaved({str(interval_ms): lambda i=interval_ms: switching(i) for interval_ms in INTERVALS_MS})
    for interval_ms in INTERVALS_MS:
        percentiles = statistics.quantiles(latencies_ms[interval_ms], n=100)
        rounds = measured[str(interval_ms)]
        figure(f"wal.busy.16x1KiB.switch_{interval_ms:g}ms", rounds.median, "appends/s beside 1 ms slices of CPU",
               rounds.spread, {"p50_ms": percentiles[49], "p99_ms": percentiles[98]})  # fmt: skip
    bench.log.recycle()
