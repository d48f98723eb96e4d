"""A log some of whose channels are slow: what is appended to them lands after a random time, all that waited at once,
and a batch over several channels lands in each when that one is ready. So cuts are drawn while writes are under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tidewal.runtime.errors import TidewalError
from tidewal.runtime.log.wal import Append, OnAppended, Payload
from tidewal.runtime.loop_bridge import promise


class LateWal:
    """`wal`, with appends to the channels whose name ends with one of `late` delayed by `delay_s()` each time one of
    them stands still. Make it on the loop that `wal` is used from."""

    def __init__(self, wal: Any, late: Collection[str], delay_s: Callable[[], float]) -> None:
        self._wal = wal
        self.capabilities = replace(wal.capabilities, atomic_batches=False)
        self._late = tuple(late)
        self._delay_s = delay_s
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, list[tuple[list[Append], OnAppended]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wal, name)

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        if not any(entry.channel.endswith(self._late) for entry in entries):
            self._wal.submit(entries, done)
            return
        joined = _Joined(entries, done)
        for channel in dict.fromkeys(entry.channel for entry in entries):
            places = [place for place, entry in enumerate(entries) if entry.channel == channel]
            part = [entries[place] for place in places], partial(joined.part_is_done, places)
            if channel.endswith(self._late):
                self._loop.call_soon_threadsafe(self._wait, channel, part)
            else:
                self._wal.submit(*part)

    async def append(self, channel: str, payload: Payload, timestamp: int = 0) -> bytes:
        return (await self.append_many([Append(channel, payload, timestamp)]))[0]

    async def append_many(self, entries: Sequence[Append]) -> list[bytes]:
        future, done = promise()
        self.submit(entries, done)
        return await future

    def _wait(self, channel: str, part: tuple[list[Append], OnAppended]) -> None:
        if channel not in self._waiting:
            self._waiting[channel] = []
            self._loop.call_later(self._delay_s(), self._land, channel)
        self._waiting[channel].append(part)

    def _land(self, channel: str) -> None:
        for entries, done in self._waiting.pop(channel):
            try:
                self._wal.submit(entries, done)
            except TidewalError as error:
                done(error)


class _Joined:
    """The answer of a batch whose channels answer one by one."""

    def __init__(self, entries: Sequence[Append], done: OnAppended) -> None:
        self._ids = [b""] * len(entries)
        self._done = done

    def part_is_done(self, places: list[int], result: list[bytes] | TidewalError) -> None:
        if isinstance(result, TidewalError):
            raise AssertionError(f"nothing fails here, but an append did: {result}")
        for place, id in zip(places, result, strict=True):
            self._ids[place] = id
        if all(self._ids):
            self._done(self._ids)
