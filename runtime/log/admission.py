"""What was submitted to a log and is not answered yet: counted in bytes, and refused over a limit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ..errors import Closed, Overloaded

_log = logging.getLogger(__name__)


class PendingBytes:
    """The bytes that wait for a backend, of all calls of `submit` on one open log that are not answered.

    `lock` may guard more: what must happen together with `admit`, or not at all. A thread may take it again while it
    has it.
    """

    def __init__(self, limit_bytes: int, shown: str) -> None:
        """`shown` names the log in errors."""
        self.lock: threading.RLock = threading.RLock()
        self.bytes: int = 0
        self._limit_bytes, self._shown = limit_bytes, shown
        self._calls = 0
        self._closed = False
        self._on_drained: Callable[[], None] | None = None

    def admit(self, size: int) -> None:
        """Count one call of `size` bytes. One that is larger than the limit is admitted alone. The caller has the lock.
        Raises `Overloaded` (`limit`: "pending_bytes"), and `Closed` after `close`."""
        if self._closed:
            raise Closed(f"the log {self._shown} is closed")
        if self.bytes and self.bytes + size > self._limit_bytes:
            raise Overloaded(
                f"{self.bytes} bytes wait for {self._shown} already, the limit is {self._limit_bytes}",
                limit="pending_bytes",
            )
        self.bytes += size
        self._calls += 1

    def release(self, size: int, answer: Callable[[], None]) -> None:
        """Discount the bytes of one call, `answer` it, and count it as answered. An error of the answer, which is the
        caller's code, is logged. The answer may submit again: its bytes have room."""
        with self.lock:
            self.bytes -= size
        try:
            answer()
        except Exception:
            _log.exception("the callback of an append failed")
        finally:  # also where it ends the process or its thread: `close` waits for the count
            self._answered()

    def _answered(self) -> None:
        with self.lock:
            self._calls -= 1
            on_drained = None if self._calls else self._on_drained
        if on_drained is not None:
            on_drained()

    def close(self, on_drained: Callable[[], None]) -> None:
        """Admit no more. `on_drained` is called once all calls are answered: now, or on any thread."""
        with self.lock:
            self._closed = True
            if self._calls:
                self._on_drained = on_drained
                return
        on_drained()
