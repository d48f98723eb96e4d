"""Heartbeats, leases and ticks on a thread of their own, which a handler that blocks the loop cannot starve."""

from __future__ import annotations

import asyncio
import heapq
import logging
import threading
from collections.abc import Callable
from itertools import count

from ..clock import Clock, SystemClock


class Beat:
    """A callback that the heart calls every `interval_s` seconds, until it is cancelled."""

    __slots__ = ("callback", "cancelled", "interval_s", "name")

    def __init__(self, interval_s: float, callback: Callable[[], None], name: str) -> None:
        self.interval_s = interval_s
        self.callback = callback
        self.name = name
        self.cancelled = False

    def cancel(self) -> None:
        """Call no more. A call that is under way on the heart's thread still ends."""
        self.cancelled = True


class Heart:
    """Calls back periodically, on one daemon thread, or on an event loop that is given to `start` (virtual time).

    A callback that raises is reported and stays; one that takes longer than its interval misses turns, and delays the
    other callbacks of this heart. All methods may be called on any thread. `beat` makes the turns that are due and
    needs neither thread nor loop: a test that owns the clock calls it itself.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        name: str = "tidewal-heart",
        on_error: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._clock: Clock = clock or SystemClock()
        self._name = name
        self._on_error = on_error or _print_error
        self._beats: list[tuple[float, int, Beat]] = []
        self._order = count()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handle: asyncio.TimerHandle | None = None

    def every(self, interval_s: float, callback: Callable[[], None], name: str) -> Beat:
        """Call `callback` every `interval_s` seconds, for the first time in `interval_s`."""
        if interval_s <= 0:
            raise ValueError(f"interval_s must be above 0, not {interval_s}")
        beat = Beat(interval_s, callback, name)
        with self._changed:
            heapq.heappush(self._beats, (self._clock.monotonic() + interval_s, next(self._order), beat))
            self._changed.notify()
        if self._loop is not None:
            self._turn_on_loop()
        return beat

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Begin to beat: on `loop` if given, else on a thread."""
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

    def beat(self) -> float | None:
        """Make the turns that are due. Returns the seconds until the next one, None when there is none."""
        while not self._stopping:
            with self._changed:
                now = self._clock.monotonic()
                while self._beats and self._beats[0][2].cancelled:
                    heapq.heappop(self._beats)
                if not self._beats:
                    return None
                due_s, order, beat = self._beats[0]
                if due_s > now:
                    return due_s - now
                # a turn that was missed is not made up for: the next one is an interval from now
                following_s = due_s + beat.interval_s
                if following_s <= now:
                    following_s = now + beat.interval_s
                heapq.heapreplace(self._beats, (following_s, order, beat))
            try:
                beat.callback()
            except Exception as error:
                self._on_error(beat.name, error)
        return None

    def _run(self) -> None:
        while not self._stopping:
            self.beat()
            with self._changed:
                # under the lock, since a callback that was added after `beat` looked has notified nobody
                if not self._stopping:
                    self._changed.wait(self._pause_s())

    def _pause_s(self) -> float | None:
        return max(0.0, self._beats[0][0] - self._clock.monotonic()) if self._beats else None

    def _turn_on_loop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        pause_s = self.beat()
        if pause_s is not None and self._loop is not None and not self._stopping:
            self._handle = self._loop.call_later(pause_s, self._turn_on_loop)


def _print_error(name: str, error: BaseException) -> None:
    logging.getLogger("tidewal.actor").error("heartbeat %s failed", name, exc_info=error)
