"""The detector of handlers that block the event loop: a thread that pings the loop and names the task that blocks
it."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable

from ..clock import Clock, SystemClock
from .heartbeat import HeartbeatThread

LOOKS_PER_LIMIT = 4  # a stall is seen at most a quarter of the limit late


class Watchdog:
    """Reports each stall of the loop once, while it lasts: the task that runs, for how long, and where.

    Tasks of actors are named after them (`proxy`, or `proxy/tick` for a child task), so the name says whose handler
    it is. `report` is called on the watchdog's thread. Construct and `start` it on the loop's own thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        blocked_after_ms: int,
        report: Callable[[str, int, str], None],
        clock: Clock | None = None,
    ) -> None:
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._blocked_after_ms = blocked_after_ms
        self._report = report
        self._clock: Clock = clock or SystemClock()
        self._heartbeat = HeartbeatThread(self._clock, name="tidewal-watchdog")
        self._pinged_at: float | None = None
        self._answered_after_s = 0.0
        self._reported = False

    @property
    def lag_s(self) -> float:
        """How late the loop was at the last ping, or is by now."""
        pinged_at = self._pinged_at
        waiting_s = 0.0 if pinged_at is None else self._clock.monotonic() - pinged_at
        return max(self._answered_after_s, waiting_s)

    def start(self) -> None:
        """Start watching."""
        self._heartbeat.every(self._blocked_after_ms / 1000 / LOOKS_PER_LIMIT, self.look, "watchdog")
        self._heartbeat.start()

    def stop(self) -> None:
        """Stop watching, and wait for the thread."""
        self._heartbeat.stop()

    def look(self) -> None:
        """Ping the loop, or check how long the last ping has been waiting."""
        pinged_at = self._pinged_at
        if pinged_at is None:
            self._reported = False
            self._pinged_at = self._clock.monotonic()
            try:
                self._loop.call_soon_threadsafe(self._pong)
            except RuntimeError:  # the loop was closed
                self._heartbeat.stop()
            return
        blocked_ms = int((self._clock.monotonic() - pinged_at) * 1000)
        if blocked_ms >= self._blocked_after_ms and not self._reported:
            self._reported = True
            self._report(self._culprit(), blocked_ms, self._stack())

    def _pong(self) -> None:
        if self._pinged_at is not None:
            self._answered_after_s = self._clock.monotonic() - self._pinged_at
        self._pinged_at = None

    def _culprit(self) -> str:
        task = asyncio.current_task(self._loop)
        return task.get_name() if task is not None else "a callback of the loop"

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)  # pyright: ignore[reportPrivateUsage] -- no public way
        return "".join(traceback.format_stack(frame)) if frame is not None else ""
