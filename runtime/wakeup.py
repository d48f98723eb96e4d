"""Wake threads and event loops: once for all that one commit has to say.

A ring is a write to an eventfd. It lets go of the interpreter, so whoever is woken goes on at once, where a lock, a
queue or `call_soon_threadsafe` would wake it just to wait for the interpreter: half the cost of handing a small append
to the journal's thread and back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from .errors import TidewalError
from .wal import OnAppended

T = TypeVar("T")


class Bell:
    """Rung by any thread; one thread or loop waits for it. Rings while nobody waits count as one."""

    def __init__(self) -> None:
        self.file = os.eventfd(0)
        self._open = True
        self._lock = threading.Lock()  # so that no ring goes to another file that got this one's number

    def ring(self) -> bool:
        """Whether anybody can hear it: not once it is closed."""
        with self._lock:
            if self._open:
                os.eventfd_write(self.file, 1)
            return self._open

    def wait(self) -> None:
        """Return when it was rung since the last time."""
        os.eventfd_read(self.file)

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.file)


class Hub:
    """Settles futures of one event loop, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, hubs: Hubs) -> None:
        self.loop = loop
        self._hubs = hubs
        self._thread = threading.get_ident()
        self._queue: deque[tuple[asyncio.Future[Any], Any]] = deque()
        self.deferring = False
        self._rung = False
        self._bell = Bell()
        self._watched: list[int] | None = []  # None once closed
        self.watch(self._bell.file, self._answer)

    def settle(self, future: asyncio.Future[T], result: T | TidewalError) -> None:
        """Give the future its result or error; at once when called on the loop's own thread."""
        thread = threading.get_ident()
        if thread == self._thread:
            conclude(future, result)
            return
        self._queue.append((future, result))
        self._ring(thread)

    def settle_all(self, futures: Sequence[asyncio.Future[T]], results: Sequence[T]) -> None:
        """`settle` for many."""
        thread = threading.get_ident()
        if thread == self._thread:
            for future, result in zip(futures, results, strict=True):
                if not future.done():
                    future.set_result(result)
            return
        self._queue.extend(zip(futures, results, strict=True))
        self._ring(thread)

    def watch(self, file: int, call: Callable[[], None]) -> None:
        """Call on the loop when the file is readable, until `close`; on the loop's own thread."""
        if self._watched is not None:
            self._watched.append(file)
            self.loop.add_reader(file, call)

    def defer(self, call: Callable[[], None]) -> None:
        """Call on the loop's own thread when what is ready to run there has run; `deferring` until then."""
        self.deferring = True
        self.loop.call_soon(self._run_deferred, call)

    def _run_deferred(self, call: Callable[[], None]) -> None:
        self.deferring = False
        call()

    def _ring(self, thread: int) -> None:
        if self._rung:
            return
        self._rung = True
        if thread == self._hubs.gathering_thread:
            self._hubs.gathered.append(self)
        else:
            self.ring()

    def ring(self) -> None:
        """Let the loop look at what was settled."""
        if not self._bell.ring():
            try:
                self.loop.call_soon_threadsafe(self._take)
            except RuntimeError:  # the loop is closed, and with it went everybody who waited
                self._queue.clear()

    def _answer(self) -> None:
        self._bell.wait()
        self._take()

    def _take(self) -> None:
        self._rung = False  # before taking: whoever adds from now on rings again
        queue = self._queue
        while queue:
            future, result = queue.popleft()
            conclude(future, result)

    def close(self) -> None:
        """Give the bell back; on the loop's own thread, unless the loop is closed. What is settled later takes the
        loop's own way."""
        watched, self._watched = self._watched or (), None
        for file in watched:
            if not self.loop.is_closed():
                self.loop.remove_reader(file)
        self._bell.close()
        self._take()


def conclude(future: asyncio.Future[T], result: T | TidewalError) -> None:
    """Give a future of the running loop its result or error, unless nobody waits any more."""
    if future.done():
        return
    if isinstance(result, TidewalError):
        future.set_exception(result)
    else:
        future.set_result(result)


class Hubs:
    """The hub of each running loop. One thread may gather what it settles and wake each loop once, with `flush`."""

    def __init__(self) -> None:
        self.gathering_thread = 0
        self.gathered: list[Hub] = []
        self._hubs: dict[asyncio.AbstractEventLoop, Hub] = {}
        self._closed = False

    def current(self) -> Hub:
        """The hub of the running loop."""
        loop = asyncio.get_running_loop()
        hub = self._hubs.get(loop)
        return hub if hub is not None else self._add(loop)

    def _add(self, loop: asyncio.AbstractEventLoop) -> Hub:
        hubs = {loop: Hub(loop, self)}
        for other, hub in self._hubs.items():
            if other.is_closed():
                hub.close()
            else:
                hubs[other] = hub
        if self._closed:
            hubs[loop].close()
        self._hubs = hubs
        return hubs[loop]

    def promise(self) -> tuple[asyncio.Future[list[bytes]], OnAppended]:
        """A future of the running loop, and what settles it from any thread."""
        hub = self.current()
        future: asyncio.Future[list[bytes]] = hub.loop.create_future()
        return future, partial(hub.settle, future)

    def gather(self) -> None:
        """From now on, what the calling thread settles waits for its `flush`: a loop that is woken for the first of
        many would only fight with this thread for the interpreter."""
        self.gathering_thread = threading.get_ident()

    def flush(self) -> None:
        gathered, self.gathered = self.gathered, []
        for hub in gathered:
            hub.ring()

    def close(self) -> None:
        """Give all bells back, from a running loop; those of other loops a turn later."""
        self._closed = True
        running = asyncio.get_running_loop()
        for loop, hub in self._hubs.items():
            if loop is running or loop.is_closed():
                hub.close()
            else:
                with contextlib.suppress(RuntimeError):  # closed meanwhile: the bell goes with the next loop that asks
                    loop.call_soon_threadsafe(hub.close)
