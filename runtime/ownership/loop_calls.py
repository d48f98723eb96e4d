"""Actions that belong on the event loop, asked for on any thread."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable


class LoopCalls:
    """Calls actions on the running loop, in order. The loop is woken once for all that come meanwhile. `called` is set
    after each turn."""

    def __init__(self, lock: threading.RLock) -> None:
        self.called: asyncio.Event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._lock = lock
        self._waiting: deque[Callable[[], object]] = deque()

    def call(self, action: Callable[[], object]) -> None:
        """Call `action` on the loop."""
        with self._lock:
            self._waiting.append(action)
            if len(self._waiting) == 1:
                self._loop.call_soon_threadsafe(self._turn)

    def wake(self) -> None:
        """Set `called` on the loop."""
        self.call(_nothing)

    def _turn(self) -> None:
        with self._lock:
            actions = list(self._waiting)
            self._waiting.clear()
        for action in actions:
            action()
        self.called.set()


def _nothing() -> None:
    """For a turn without an action."""
