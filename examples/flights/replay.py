"""Write the events into the log at full speed, in their order: the durable ones are always a prefix of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from typing import cast

import pyarrow as pa

from tidewal import Client, errors

from .flights import COLLECTION

IN_FLIGHT = 8
FIRST_PAUSE_S = 0.02
PAUSE_S_MAX = 1.0


class Replay:
    """The writing side: batches in their order, `IN_FLIGHT` at the same time.

    The Proxy appends in the order of arrival, and a batch appears in the log whole or not at all. So after a crash at
    any moment the log holds the first n batches, and counting its row versions tells how many events that is.
    """

    def __init__(self, client: Client, batches: Sequence[pa.RecordBatch], done: int) -> None:
        self.written = 0  # rows acknowledged by this replay
        self.done = done  # rows acknowledged ever
        self.last_ts = 0
        self.pauses = 0
        self.latencies_ms: list[float] = []
        self.event_time: datetime | None = None
        self._client = client
        self._batches = batches
        self._started = time.perf_counter()
        self._ended: float | None = None

    @property
    def seconds(self) -> float:
        """How long the writing took, or takes so far."""
        return (self._ended or time.perf_counter()) - self._started

    @property
    def rate(self) -> float:
        """Events acknowledged per second."""
        return self.written / max(self.seconds, 1e-9)

    async def run(self) -> None:
        """Write all batches. After a retryable refusal and a pause one batch is sent alone, before the others
        follow."""
        window: deque[asyncio.Task[int]] = deque()
        acknowledged, pause_s, width = 0, FIRST_PAUSE_S, IN_FLIGHT
        self._started = time.perf_counter()
        try:
            while acknowledged < len(self._batches):
                for batch in self._batches[acknowledged + len(window) : acknowledged + width]:
                    window.append(asyncio.create_task(self._apply(batch)))
                try:
                    self.last_ts = await asyncio.shield(window[0])
                except (errors.Overloaded, errors.Unavailable) as refusal:
                    await _none_overtook(window, refusal)
                    width = 1
                    self.pauses += 1
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, PAUSE_S_MAX)
                else:
                    window.popleft()
                    self._count(self._batches[acknowledged])
                    acknowledged += 1
                    pause_s, width = FIRST_PAUSE_S, IN_FLIGHT
        finally:
            self._ended = time.perf_counter()
            await asyncio.gather(*window, return_exceptions=True)

    async def _apply(self, batch: pa.RecordBatch) -> int:
        started = time.perf_counter()
        written = await self._client.apply(COLLECTION, batch)
        self.latencies_ms.append((time.perf_counter() - started) * 1000)
        return written.ts

    def _count(self, batch: pa.RecordBatch) -> None:
        self.written += batch.num_rows
        self.done += batch.num_rows
        self.event_time = cast(datetime, batch.column("event_time")[-1].as_py())


async def _none_overtook(window: deque[asyncio.Task[int]], refusal: errors.TidewalError) -> None:
    """Wait for the batches that were sent behind a refused one, and raise if the log has accepted any: the order would
    be lost."""
    outcomes = await asyncio.gather(*window, return_exceptions=True)
    window.clear()
    for outcome in outcomes:
        if not isinstance(outcome, BaseException):
            raise errors.TidewalError(
                "the log took a batch behind one that it refused, so the events are out of order: start again in "
                f"another directory ({refusal.message})"
            ) from refusal
        if not isinstance(outcome, (errors.Overloaded, errors.Unavailable)):
            raise outcome
