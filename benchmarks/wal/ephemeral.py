"""The path of ephemeral channels: one message at a time to a reader on the same loop."""

from __future__ import annotations

import asyncio
import time

from tidewal.runtime.log.wal import Append, ChannelPolicy, From

from ..report import figure, interleaved
from .limits import Bench

COUNT = 20_000


def measure(bench: Bench) -> None:
    store = bench.log.store
    bench.run(store.create_channel("fast", ChannelPolicy(ephemeral=True)))

    async def round_trips() -> float:
        """Microseconds to submit, wake the reader and have it read; it answers nothing."""
        reader = store.read("fast", From.LATEST)
        entries = [Append("fast", b"x" * 200)]
        read = asyncio.Event()

        async def consume() -> None:
            seen = 0
            async for batch in reader:
                seen += len(batch)
                read.set()
                if seen == COUNT:
                    return

        task = asyncio.create_task(consume())
        await asyncio.sleep(0)
        began_s = time.perf_counter()
        for _ in range(COUNT):
            read.clear()
            store.submit(entries, lambda _: None)
            await read.wait()
        elapsed_s = time.perf_counter() - began_s
        await task
        return elapsed_s / COUNT * 1e6

    measured = interleaved({"us": lambda: bench.run(round_trips())})["us"]
    figure("wal.ephemeral.us", measured.median, "us per message, one at a time", measured.spread)
