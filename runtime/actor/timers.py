"""Timers and deadlines of an actor system, all behind one timer of the event loop.

They run on the loop's time, which is virtual on a virtual loop.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from typing import Protocol


class Timer:
    """A future callback, once or every `interval_s` seconds. `cancel` may be called at any time, also twice."""

    __slots__ = ("_timers", "callback", "cancelled", "interval_s")

    def __init__(self, timers: Timers, callback: Callable[[], None], interval_s: float | None) -> None:
        self._timers = timers
        self.callback: Callable[[], None] = callback
        self.interval_s: float | None = interval_s
        self.cancelled: bool = False

    def cancel(self) -> None:
        """Never call back again."""
        if not self.cancelled:
            self.cancelled = True
            self._timers.note_cancelled()


class Timers:
    """A heap of timers that shares one timer of the loop. Callbacks run on the loop, in the order they are due; those
    due at the same time in the order they were set. A callback must not raise."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = count()
        self._handle: asyncio.TimerHandle | None = None
        self._cancelled = 0
        self._closed = False

    def now(self) -> float:
        """The loop's time, seconds."""
        return self._loop.time()

    def after(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call back once, after `delay_s`."""
        return self._add(Timer(self, callback, None), self._loop.time() + delay_s)

    def every(self, interval_s: float, callback: Callable[[], None]) -> Timer:
        """Call back every `interval_s`. Calls missed while the loop was blocked are not made up for."""
        if interval_s <= 0:
            raise ValueError(f"interval_s must be above 0, not {interval_s}")
        return self._add(Timer(self, callback, interval_s), self._loop.time() + interval_s)

    def close(self) -> None:
        """Forget all timers; none is ever called again."""
        self._closed = True
        self._heap.clear()
        self._rearm()

    def note_cancelled(self) -> None:
        """Count a cancelled timer; they are removed together once they are the larger part of the heap."""
        self._cancelled += 1
        if self._cancelled > 64 and self._cancelled > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if not entry[2].cancelled]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def _add(self, timer: Timer, due_s: float) -> Timer:
        if not self._closed:
            heapq.heappush(self._heap, (due_s, next(self._order), timer))
            if self._heap[0][2] is timer:
                self._rearm()
        return timer

    def _rearm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
        if self._heap:
            self._handle = self._loop.call_at(self._heap[0][0], self._fire)

    def _fire(self) -> None:
        self._handle = None
        now = self._loop.time()
        while self._heap and self._heap[0][0] <= now:
            due_s, _, timer = heapq.heappop(self._heap)
            if timer.cancelled:
                continue
            if timer.interval_s is None:
                timer.cancelled = True  # it has fired: cancelling it now has nothing to remove from the heap
            else:
                next_s = max(due_s + timer.interval_s, now)
                heapq.heappush(self._heap, (next_s, next(self._order), timer))
            timer.callback()
        self._rearm()


class Expiring(Protocol):
    """What can have a deadline."""

    def expire(self) -> None:
        """Called when the deadline has passed. Must not raise."""
        ...


class Deadlines:
    """A wheel of deadlines: adding and removing one costs a dict entry, and never a timer of the loop.

    A deadline is never early and late by at most `tick_s` seconds.
    """

    def __init__(self, timers: Timers, tick_s: float = 0.02) -> None:
        self._timers = timers
        self._now = timers.now
        self._tick_s = tick_s
        self._slots: dict[int, dict[Expiring, None]] = {}

    def add(self, item: Expiring, deadline_s: float) -> dict[Expiring, None]:
        """Expire `item` in `deadline_s` seconds, unless it is removed before from the dict that is returned."""
        number = int((self._now() + deadline_s) / self._tick_s) + 1
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = {}
            self._timers.after(number * self._tick_s - self._now(), lambda: self._expire(number))
        slot[item] = None
        return slot

    def _expire(self, number: int) -> None:
        for item in self._slots.pop(number):
            item.expire()
