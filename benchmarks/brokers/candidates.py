"""What the benchmarks of brokers share: Tidewal's own candidates, and how each candidate is measured and told."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from uuid import uuid4

from benchmarks.report import Rounds, figure
from tidewal.runtime.clock import HybridClock, compose
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, Wal

PAYLOAD = bytes(range(256)) * 4
IN_FLIGHT = 1000  # single appends under way
PACK, PACKS_IN_FLIGHT = 100, 20

Work = Callable[[str, int], Coroutine[Any, Any, float]]


class Candidates:
    """Candidates that share a broker; each produces into a topic of its own or reads the one that was filled."""

    def __init__(self, open_log: Callable[[], Awaitable[Wal]], count: int) -> None:
        self._open_log, self._count = open_log, count
        self._clock = HybridClock()
        self._cpu_us: dict[str, list[float]] = {}

    def measure(self, name: str, work: Work, topic: str = "") -> float:
        """Messages per second; connecting is not measured."""
        before = resource.getrusage(resource.RUSAGE_SELF)
        elapsed_s = asyncio.run(work(topic or uuid4().hex, self._count))
        after = resource.getrusage(resource.RUSAGE_SELF)
        spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self._cpu_us.setdefault(name, []).append(spent_s / self._count * 1e6)
        return self._count / elapsed_s

    def tell(self, name: str, rounds: dict[str, Rounds], ours: str, bare: str, client: str, measured: str = "") -> None:
        """Print what came of `ours`, beside what came of `bare`, a way of the bare `client`, `measured` under another
        name perhaps."""
        figure(
            name,
            rounds[ours].median,
            "messages/s",
            rounds[ours].spread,
            {
                f"{client}.{bare}": rounds[bare].median,
                "ratio": rounds[ours].median / rounds[bare].median,
                "cpu_us": min(self._cpu_us[ours]),
                "bare_cpu_us": min(self._cpu_us[measured or bare]),
            },
        )

    async def append(self, channel: str, count: int) -> float:
        wal = await self._open(channel)
        left = count

        async def one_after_another() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await wal.append(channel, PAYLOAD, self._clock.now())

        began_s = time.perf_counter()
        await asyncio.gather(*(one_after_another() for _ in range(IN_FLIGHT)))
        elapsed_s = time.perf_counter() - began_s
        await wal.close()
        return elapsed_s

    async def append_many(self, channel: str, count: int, *, plain: bool = False) -> float:
        """With `plain` all have one timestamp of whole milliseconds."""
        wal = await self._open(channel)
        left = count
        plain_stamp = compose(self._clock.clock.wall_ms(), 0)

        async def one_after_another() -> None:
            nonlocal left
            while left > 0:
                left -= PACK
                stamp = self._clock.now()
                stamps = [plain_stamp if plain else stamp + place for place in range(PACK)]
                await wal.append_many([Append(channel, PAYLOAD, each) for each in stamps])

        began_s = time.perf_counter()
        await asyncio.gather(*(one_after_another() for _ in range(PACKS_IN_FLIGHT)))
        elapsed_s = time.perf_counter() - began_s
        await wal.close()
        return elapsed_s

    async def read(self, channel: str, count: int) -> float:
        wal = await self._open_log()
        reader = wal.read(channel, From.EARLIEST)
        began_s = time.perf_counter()
        got = 0
        while got < count:
            got += len(await anext(reader))
        elapsed_s = time.perf_counter() - began_s
        await wal.close()
        return elapsed_s

    def fill(self, channel: str, *, plain: bool = False) -> None:
        """Write what `read` and the bare readers read."""
        asyncio.run(self.append_many(channel, self._count, plain=plain))

    async def _open(self, channel: str) -> Wal:
        wal = await self._open_log()
        await wal.create_channel(channel, ChannelPolicy())
        await wal.append(channel, PAYLOAD)
        return wal
