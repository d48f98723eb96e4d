"""Wake threads and event loops: once for all results of one commit.

A signal is a write to a file. The write releases the interpreter lock, so the thread that is woken goes on at once,
where a lock, a queue or `call_soon_threadsafe` would wake it just to wait for the interpreter lock: half the cost of
handing a small append to the journal's thread and back.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from .errors import TidewalError
from .event_file import EventFile
from .log.wal import OnAppended

T = TypeVar("T")


class EventSignal:
    """Set by any thread; one thread or loop waits for it. Calls of `set` between two waits count as one."""

    def __init__(self) -> None:
        self._event = EventFile()
        self.file: int = self._event.file
        self._open = True
        self._lock = threading.Lock()  # so that `set` never writes to another file that got this one's number

    def set(self) -> bool:
        """Wake the waiting thread or loop. Returns False once the signal is closed, and does nothing then."""
        with self._lock:
            if self._open:
                self._event.set()
            return self._open

    def wait(self) -> None:
        """Return when `set` was called since the last `wait`."""
        self._event.take()

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._event.close()


class LoopNotifier:
    """Settles futures of one event loop, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, notifiers: LoopNotifiers) -> None:
        self.loop = loop
        self._notifiers = notifiers
        self._thread = threading.get_ident()
        self._queue: deque[tuple[asyncio.Future[Any], Any]] = deque()
        self.deferring: bool = False
        self._signalled = False
        self._signal = EventSignal()
        self._watched: list[int] | None = []  # None once closed
        self.watch(self._signal.file, self._on_signal)

    def settle(self, future: asyncio.Future[T], result: T | TidewalError) -> None:
        """Give the future its result or error; at once when called on the loop's own thread."""
        thread = threading.get_ident()
        if thread == self._thread:
            conclude(future, result)
            return
        self._queue.append((future, result))
        self._notify(thread)

    def settle_at_once(self, future: asyncio.Future[T], result: T | TidewalError) -> None:
        """As `settle`, and a thread that gathers results does not gather this one."""
        self.settle(future, result)
        if threading.get_ident() == self._notifiers.gathering_thread:
            self._notifiers.flush()

    def settle_all(self, futures: Sequence[asyncio.Future[T]], results: Sequence[T]) -> None:
        """Give each of the futures its result; at once when called on the loop's own thread."""
        thread = threading.get_ident()
        if thread == self._thread:
            for future, result in zip(futures, results, strict=True):
                if not future.done():
                    future.set_result(result)
            return
        self._queue.extend(zip(futures, results, strict=True))
        self._notify(thread)

    def watch(self, file: int, call: Callable[[], None]) -> None:
        """Make `call` on the loop whenever the file descriptor `file` is readable, until `close`. To be called on the
        loop's own thread."""
        if self._watched is not None:
            self._watched.append(file)
            self.loop.add_reader(file, call)

    def defer(self, call: Callable[[], None]) -> None:
        """Make `call` after the callbacks that are ready on the loop now; `deferring` until then. To be called on the
        loop's own thread."""
        self.deferring = True
        self.loop.call_soon(self._run_deferred, call)

    def _run_deferred(self, call: Callable[[], None]) -> None:
        self.deferring = False
        call()

    def _notify(self, thread: int) -> None:
        if self._signalled:
            return
        self._signalled = True
        if thread == self._notifiers.gathering_thread:
            self._notifiers.gathered.append(self)
        else:
            self.wake()

    def wake(self) -> None:
        """Let the loop take what was settled."""
        if not self._signal.set():
            try:
                self.loop.call_soon_threadsafe(self._take)
            except RuntimeError:  # the loop is closed, and no task of it waits any more
                self._queue.clear()

    def _on_signal(self) -> None:
        self._signal.wait()
        self._take()

    def _take(self) -> None:
        self._signalled = False  # before taking: what is added from now on is signalled again
        queue = self._queue
        while queue:
            future, result = queue.popleft()
            conclude(future, result)

    def close(self) -> None:
        """Close the signal; on the loop's own thread, unless the loop is closed. What is settled later goes through
        `call_soon_threadsafe`."""
        watched, self._watched = self._watched or (), None
        for file in watched:
            if not self.loop.is_closed():
                self.loop.remove_reader(file)
        self._signal.close()
        self._take()


def conclude(future: asyncio.Future[T], result: T | TidewalError) -> None:
    """Give a future of the running loop its result or error, unless the future is done, cancelled for example."""
    if future.done():
        return
    if isinstance(result, TidewalError):
        future.set_exception(result)
    else:
        future.set_result(result)


def call_on(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Make `call` on the loop, from any thread: at once where this is the loop's own, so that the order depends on no
    other thread; never once the loop is closed."""
    if asyncio._get_running_loop() is loop:  # pyright: ignore[reportPrivateUsage] -- get_running_loop raises elsewhere
        call()
        return
    with contextlib.suppress(RuntimeError):  # the loop is closed, and no task of it waits any more
        loop.call_soon_threadsafe(call)


def promise() -> tuple[asyncio.Future[list[bytes]], OnAppended]:
    """A future of the running loop, and the callback that settles it from any thread. Each wakes the loop on its own:
    `LoopNotifiers.promise` costs less where many results come together."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[bytes]] = loop.create_future()
    return future, lambda result: call_on(loop, partial(conclude, future, result))


class LoopNotifiers:
    """The notifier of each running loop. One thread may gather what it settles and wake each loop once, with
    `flush`."""

    def __init__(self) -> None:
        self.gathering_thread: int = 0
        self.gathered: list[LoopNotifier] = []
        self._notifiers: dict[asyncio.AbstractEventLoop, LoopNotifier] = {}
        self._closed = False

    def current(self) -> LoopNotifier:
        """The notifier of the running loop."""
        loop = asyncio.get_running_loop()
        notifier = self._notifiers.get(loop)
        return notifier if notifier is not None else self._add(loop)

    def _add(self, loop: asyncio.AbstractEventLoop) -> LoopNotifier:
        notifiers = {loop: LoopNotifier(loop, self)}
        for other, notifier in self._notifiers.items():
            if other.is_closed():
                notifier.close()
            else:
                notifiers[other] = notifier
        if self._closed:
            notifiers[loop].close()
        self._notifiers = notifiers
        return notifiers[loop]

    def promise(self) -> tuple[asyncio.Future[list[bytes]], OnAppended]:
        """A future of the running loop, and the callback that settles it from any thread."""
        notifier = self.current()
        future: asyncio.Future[list[bytes]] = notifier.loop.create_future()
        return future, partial(notifier.settle, future)

    def gather(self) -> None:
        """From now on, what the calling thread settles waits for its `flush`: a loop that is woken for the first of
        many results would only compete with this thread for the interpreter lock."""
        self.gathering_thread = threading.get_ident()

    def flush(self) -> None:
        gathered, self.gathered = self.gathered, []
        for notifier in gathered:
            notifier.wake()

    def close(self) -> None:
        """Close all signals, from a running loop; those of other loops a turn of these loops later."""
        self._closed = True
        running = asyncio.get_running_loop()
        for loop, notifier in self._notifiers.items():
            if loop is running or loop.is_closed():
                notifier.close()
            else:
                with contextlib.suppress(RuntimeError):  # closed meanwhile: `_add` of the next loop closes the signal
                    loop.call_soon_threadsafe(notifier.close)
