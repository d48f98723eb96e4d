"""Heartbeats, leases and ticks on a thread of their own, which a handler that blocks the loop cannot starve."""

from __future__ import annotations

import asyncio
import heapq
import logging
import threading
from collections.abc import Callable
from itertools import count

from ..clock import Clock, SystemClock


class HeartbeatCallback:
    """A callback that the heartbeat thread calls every `interval_s` seconds, until it is cancelled."""

    __slots__ = ("callback", "cancelled", "interval_s", "name")

    def __init__(self, interval_s: float, callback: Callable[[], None], name: str) -> None:
        self.interval_s = interval_s
        self.callback = callback
        self.name = name
        self.cancelled = False

    def cancel(self) -> None:
        """Call no more. A call that is running on the heartbeat thread still ends."""
        self.cancelled = True


class HeartbeatThread:
    """Calls back periodically, on one daemon thread, or on an event loop that is given to `start` (virtual time).

    A callback that raises is reported and stays; one that takes longer than its interval misses turns, and delays the
    other callbacks of this thread. All methods may be called on any thread. `run_due` makes the calls that are due and
    needs neither thread nor loop: a test that owns the clock calls it itself.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        name: str = "tidewal-heartbeat",
        on_error: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._clock: Clock = clock or SystemClock()
        self._name = name
        self._on_error = on_error or _print_error
        self._callbacks: list[tuple[float, int, HeartbeatCallback]] = []
        self._order = count()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handle: asyncio.TimerHandle | None = None

    def every(self, interval_s: float, callback: Callable[[], None], name: str) -> HeartbeatCallback:
        """Call `callback` every `interval_s` seconds, for the first time in `interval_s`. `name` is for the report of
        an error. Raises `ValueError` unless `interval_s` is above 0."""
        if interval_s <= 0:
            raise ValueError(f"interval_s must be above 0, not {interval_s}")
        entry = HeartbeatCallback(interval_s, callback, name)
        with self._changed:
            heapq.heappush(self._callbacks, (self._clock.monotonic() + interval_s, next(self._order), entry))
            self._changed.notify()
        if self._loop is not None:
            self._turn_on_loop()
        return entry

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Start calling: on `loop` if given, else on a thread."""
        if loop is not None:
            self._loop = loop
            self._turn_on_loop()
        elif self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop and wait for the thread; after that no callback runs. A callback may call it, and is not waited for."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._handle is not None:
            self._handle.cancel()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def run_due(self) -> float | None:
        """Make the calls that are due. Returns the seconds until the next one, None when there is none."""
        while not self._stopping:
            with self._changed:
                now = self._clock.monotonic()
                while self._callbacks and self._callbacks[0][2].cancelled:
                    heapq.heappop(self._callbacks)
                if not self._callbacks:
                    return None
                due_s, order, entry = self._callbacks[0]
                if due_s > now:
                    return due_s - now
                # a missed call is not made up for: the next one is an interval from now
                following_s = due_s + entry.interval_s
                if following_s <= now:
                    following_s = now + entry.interval_s
                heapq.heapreplace(self._callbacks, (following_s, order, entry))
            try:
                entry.callback()
            except Exception as error:
                self._on_error(entry.name, error)
        return None

    def _run(self) -> None:
        while not self._stopping:
            self.run_due()
            with self._changed:
                # under the lock: a callback added after `run_due` looked has notified no waiting thread
                if not self._stopping:
                    self._changed.wait(self._pause_s())

    def _pause_s(self) -> float | None:
        return max(0.0, self._callbacks[0][0] - self._clock.monotonic()) if self._callbacks else None

    def _turn_on_loop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        pause_s = self.run_due()
        if pause_s is not None and self._loop is not None and not self._stopping:
            self._handle = self._loop.call_later(pause_s, self._turn_on_loop)


def _print_error(name: str, error: BaseException) -> None:
    logging.getLogger("tidewal.actor").error("heartbeat %s failed", name, exc_info=error)
