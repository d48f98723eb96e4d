"""A lock that defers callbacks until it is free again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

Call = Callable[[], None]


class CallbackLock:
    """A reentrant lock. Calls given to `after` are made once the outermost entry has left, without the lock: a callback
    may take locks of its own, and enter this one again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._calls: dict[Call, None] = {}

    def after(self, call: Call) -> None:
        """Make `call` when the lock is free. The same call given twice by then is made once."""
        self._calls[call] = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        calls: dict[Call, None] = {}
        if self._depth == 0:
            calls, self._calls = self._calls, {}
        self._lock.release()
        for call in calls:
            call()
