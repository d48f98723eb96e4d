"""From the thread that reads a channel ahead to the iterator on an event loop: batches, bounded in bytes."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from ..errors import TidewalError
from ..loop_bridge import LoopNotifier

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """The batches of one channel that were read and not taken yet, in order, and the error that has ended the reading.

    `put` belongs to the reading thread, `take` and `wait` to the iterator's loop, `end` to any thread.
    """

    def __init__(self, limit_bytes: int, on_room: Callable[[], None]) -> None:
        """`on_room` is called, on any thread, whenever `has_room` becomes true again."""
        self._limit_bytes, self._on_room = limit_bytes, on_room
        self._lock = threading.Lock()
        self._batches: deque[tuple[T, int]] = deque()
        self._size = 0
        self._error: TidewalError | None = None
        self._waiting: tuple[LoopNotifier, asyncio.Future[None]] | None = None

    # ---- the iterator's side -----------------------------------------------------------------------------------------

    def take(self) -> T | None:
        """The next batch; None when there is none now. Raises the error that ended the reading, once all that was read
        before is taken."""
        with self._lock:
            if not self._batches:
                if self._error is not None:
                    raise self._error
                return None
            batch, size = self._batches.popleft()
            was_full = self._size >= self._limit_bytes
            self._size -= size
            room = was_full and self._size < self._limit_bytes
        if room:
            self._on_room()
        return batch

    async def wait(self, notifier: LoopNotifier) -> None:
        """Return when `take` may have a result. `notifier` is the one of the running loop."""
        waiter: asyncio.Future[None] = notifier.loop.create_future()
        with self._lock:
            if self._batches or self._error is not None:
                return
            self._waiting = notifier, waiter
        await waiter

    # ---- the reading side --------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self._error is not None

    def has_room(self) -> bool:
        """Whether to read on: less than the limit is waiting, or the reading has ended."""
        return self._size < self._limit_bytes or self._error is not None

    def put(self, batch: T, size: int) -> None:
        """Add a batch of `size` bytes, whether there is room or not; dropped once the reading has ended."""
        with self._lock:
            if self._error is None:
                self._batches.append((batch, size))
                self._size += size
                self._wake()

    def end(self, error: TidewalError, *, discard: bool = False) -> None:
        """End with `error`, which `take` raises behind all batches; the first one counts. With `discard` it replaces
        an earlier error and all batches."""
        with self._lock:
            if discard:
                self._batches.clear()
                self._size = 0
            if discard or self._error is None:
                self._error = error
            self._wake()
        self._on_room()

    def _wake(self) -> None:
        """Wake the iterator. The caller has the lock."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            notifier, waiter = waiting
            notifier.settle_at_once(waiter, None)
