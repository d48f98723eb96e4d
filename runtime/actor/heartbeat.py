"""Heartbeats, leases and ticks on a thread of their own, which a handler that blocks the loop cannot starve."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from ..clock import Clock, SystemClock


class HeartbeatCallback:
    """A callback that the heartbeat thread calls again and again, until it is cancelled. Its methods may be called on
    any thread."""

    __slots__ = ("_heartbeat", "callback", "due_s", "interval_s", "last_interval_s", "name")

    def __init__(
        self, heartbeat: HeartbeatThread, interval_s: Callable[[], float], callback: Callable[[], None], name: str
    ) -> None:
        self._heartbeat = heartbeat
        self.interval_s: Callable[[], float] = interval_s
        self.callback: Callable[[], None] = callback
        self.name: str = name
        self.last_interval_s: float = interval_s()
        self.due_s: float = 0.0

    def within(self, pause_s: float) -> None:
        """Make the next call in `pause_s` seconds at the latest."""
        self._heartbeat.within(self, pause_s)

    def cancel(self) -> None:
        """Call no more. A call that is running on the heartbeat thread still ends."""
        self._heartbeat.remove(self)


class HeartbeatThread:
    """Calls back periodically, on one daemon thread, or on an event loop that is given to `start` (virtual time).

    The thread runs while there are callbacks. A callback that raises is reported and stays; one that takes longer than
    its interval misses turns, and delays the other callbacks of this thread. All methods may be called on any thread.
    `run_due` makes the calls that are due and needs neither thread nor loop: a test that owns the clock calls it.
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
        self._callbacks: list[HeartbeatCallback] = []  # few: each turn looks at all of them
        self._changed = threading.Condition()
        self._started = self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handle: asyncio.TimerHandle | None = None

    def every(
        self, interval_s: float | Callable[[], float], callback: Callable[[], None], name: str
    ) -> HeartbeatCallback:
        """Call `callback` every `interval_s` seconds, for the first time in `interval_s`. Where that is a function, it
        is asked for each next call, before the one that is due. `name` is for the report of an error. Raises
        `ValueError` unless `interval_s` is above 0."""
        if isinstance(interval_s, int | float) and interval_s <= 0:
            raise ValueError(f"interval_s must be above 0, not {interval_s}")
        entry = HeartbeatCallback(self, interval_s if callable(interval_s) else lambda: interval_s, callback, name)
        entry.due_s = self._clock.monotonic() + entry.last_interval_s
        with self._changed:
            self._callbacks.append(entry)
        self._turn()
        return entry

    def within(self, entry: HeartbeatCallback, pause_s: float) -> None:
        """`HeartbeatCallback.within`."""
        with self._changed:
            entry.due_s = min(entry.due_s, self._clock.monotonic() + pause_s)
        self._turn()

    def remove(self, entry: HeartbeatCallback) -> None:
        """`HeartbeatCallback.cancel`."""
        with self._changed:
            if entry in self._callbacks:
                self._callbacks.remove(entry)
            self._changed.notify()

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Start calling: on `loop` if given, else on a thread."""
        self._started, self._loop = True, loop
        self._turn()

    def stop(self) -> None:
        """Stop and wait for the thread; after that no callback runs. A callback may call it, and is not waited for."""
        with self._changed:
            self._stopping = True
            thread = self._thread
            self._changed.notify()
        if self._handle is not None:
            self._handle.cancel()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def run_due(self) -> float | None:
        """Make the calls that are due. Returns the seconds until the next one, None when there is none."""
        while not self._stopping:
            with self._changed:
                now = self._clock.monotonic()
                entry = min(self._callbacks, key=lambda each: each.due_s, default=None)
                if entry is None:
                    return None
                if entry.due_s > now:
                    return entry.due_s - now
                try:
                    entry.last_interval_s = entry.interval_s()
                except Exception as error:  # the interval before goes on
                    self._on_error(entry.name, error)
                # a missed call is not made up for: the next one is an interval from now
                next_s = entry.due_s + entry.last_interval_s
                entry.due_s = next_s if next_s > now else now + entry.last_interval_s
            try:
                entry.callback()
            except Exception as error:
                self._on_error(entry.name, error)
        return None

    def _turn(self) -> None:
        """Some call may be due earlier than the thread or loop knows."""
        if self._loop is not None:
            self._turn_on_loop()
            return
        with self._changed:
            if self._started and self._callbacks and self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            self.run_due()
            with self._changed:
                # under the lock: a callback added after `run_due` looked has notified no waiting thread
                if self._stopping or not self._callbacks:
                    self._thread = None
                    return
                self._changed.wait(max(0.0, min(each.due_s for each in self._callbacks) - self._clock.monotonic()))

    def _turn_on_loop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        pause_s = self.run_due()
        if pause_s is not None and self._loop is not None and not self._stopping:
            self._handle = self._loop.call_later(pause_s, self._turn_on_loop)


def _print_error(name: str, error: BaseException) -> None:
    logging.getLogger("tidewal.actor").error("heartbeat %s failed", name, exc_info=error)
