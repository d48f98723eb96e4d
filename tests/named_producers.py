"""What the tests of named producers share: a log that a process can be cut off from, and what is read of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tidewal.runtime.clock import HybridClock
from tidewal.runtime.errors import TidewalError
from tidewal.runtime.log.wal import Append, OnAppended
from tidewal.runtime.ownership.producer import Producer
from tidewal.runtime.streams.open_stream import open_stream
from tidewal.runtime.testing.clock import VirtualClock
from tidewal.runtime.testing.faults import FaultPlan
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

CHANNELS = ["orders-0", "orders-1"]
LEASE_S = 10.0


class CutOffWal(MemoryWal):
    """The log as a process sees it that can be cut off: what it sends, and what it is answered, arrives later."""

    def __init__(self, log: MemoryLog, faults: FaultPlan | None = None) -> None:
        super().__init__(log, faults)
        self.cut_off = False
        self._held: list[Callable[[], None]] = []

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        if self.cut_off:
            self._held.append(lambda: self._arrive(entries, done))
        else:
            super().submit(entries, lambda result: self._answer(done, result))

    def _arrive(self, entries: Sequence[Append], done: OnAppended) -> None:
        try:
            super().submit(entries, done)
        except TidewalError as error:
            done(error)

    def _answer(self, done: OnAppended, result: list[bytes] | TidewalError) -> None:
        if self.cut_off:
            self._held.append(lambda: done(result))
        else:
            done(result)

    def back(self) -> None:
        """Let all that was held back arrive, in order."""
        self.cut_off = False
        held, self._held = self._held, []
        for arrives in held:
            arrives()


def clock_of(clock: VirtualClock) -> HybridClock:
    return HybridClock(clock)


async def kill(producer: Producer) -> None:
    """What is left of a producer whose process is killed: nothing of it runs any more."""
    producer._heartbeat.stop()
    assert producer._renewing is not None
    producer._renewing.cancel()
    await asyncio.gather(producer._renewing, return_exceptions=True)
    await producer._state.close()


async def everything(log: MemoryLog, count: int, channels: Sequence[str] = CHANNELS) -> list[tuple[int, bytes]]:
    """The (timestamp, body) of the first `count` records, as a stream hands them out."""
    wal = MemoryWal(log)
    stream = open_stream(wal, channels, stalled_after_s=60.0)
    found: list[tuple[int, bytes]] = []
    while len(found) < count:
        found += [(record.ts, bytes(record.body)) for record in (await anext(stream)).messages]
    await stream.close()
    return found
