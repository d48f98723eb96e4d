"""Producers that go on while brokers fail, and the check behind it: what was acknowledged is there, once, in order."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence

from tidewal.runtime.errors import TidewalError
from tidewal.runtime.log.wal import Entry, From, Wal

WITHIN_S = 60.0


class Producers:
    """Tasks that each number what they append to one channel, and what each append was told."""

    def __init__(self, wal: Wal, channel: str, count: int, window: int = 1) -> None:
        """Each of `count` producers has up to `window` appends under way."""
        self._wal, self._channel, self._window = wal, channel, window
        self.acked: dict[bytes, bytes] = {}  # id by payload
        self.failed: dict[bytes, TidewalError] = {}
        self.slowest_s = 0.0  # how long the slowest append took
        self._moved = asyncio.Event()
        self._stopping = False
        self._tasks = [asyncio.create_task(self._produce(number)) for number in range(count)]

    async def _produce(self, producer: int) -> None:
        room = asyncio.Semaphore(self._window)
        async with asyncio.TaskGroup() as under_way:
            for number in itertools.count():
                await room.acquire()
                if self._stopping:
                    return
                under_way.create_task(self._append(b"%d:%d" % (producer, number), room))

    async def _append(self, payload: bytes, room: asyncio.Semaphore) -> None:
        began_s = time.monotonic()
        try:
            self.acked[payload] = await self._wal.append(self._channel, payload)
        except TidewalError as error:
            self.failed[payload] = error
        self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
        self._moved.set()
        room.release()

    async def more(self, count: int) -> None:
        """Wait until so many more are acknowledged."""
        goal = len(self.acked) + count
        async with asyncio.timeout(WITHIN_S):
            while len(self.acked) < goal:
                await self._next()

    async def go_on_for(self, seconds: float) -> None:
        """Let them append, or try to, for so long."""
        await asyncio.wait(self._tasks, timeout=seconds)

    async def failures(self, count: int) -> None:
        """Wait until so many appends have failed."""
        async with asyncio.timeout(WITHIN_S):
            while len(self.failed) < count:
                await self._next()

    async def _next(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    async def stop(self) -> None:
        """Begin no more, and wait for what is under way."""
        self._stopping = True
        async with asyncio.timeout(WITHIN_S):
            await asyncio.gather(*self._tasks)

    def slowest_since(self) -> float:
        """How long the slowest append took since this was asked last."""
        slowest_s, self.slowest_s = self.slowest_s, 0.0
        return slowest_s

    async def check(self, wal: Wal) -> Sequence[Entry]:
        """All that was acknowledged is there once, under its id and in the order of its producer; all else was told to
        be unknown. Returns what is there."""
        entries = await everything(wal, self._channel)
        payloads = [bytes(entry.payload) for entry in entries]
        assert len(set(payloads)) == len(payloads), "something is doubled"
        ids = {payload: entry.id for payload, entry in zip(payloads, entries, strict=True)}
        assert {payload: ids.get(payload) for payload in self.acked} == self.acked
        unknown = {payload for payload, error in self.failed.items() if error.fields.get("outcome_unknown")}
        assert set(payloads) <= self.acked.keys() | unknown
        for producer in range(len(self._tasks)):
            numbers = [int(each.partition(b":")[2]) for each in payloads if each.startswith(b"%d:" % producer)]
            assert numbers == sorted(numbers)
        return entries


async def everything(wal: Wal, channel: str) -> list[Entry]:
    """All entries that are there now."""
    last = await wal.latest_id(channel)
    entries: list[Entry] = []
    reader: AsyncIterator[Sequence[Entry]] = wal.read(channel, From.EARLIEST)
    async with asyncio.timeout(WITHIN_S):
        while last is not None and (not entries or entries[-1].id < last):
            entries += await anext(reader)
    await reader.aclose()  # pyright: ignore[reportAttributeAccessIssue] -- see `Wal.read`
    return entries
