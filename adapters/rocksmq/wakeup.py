"""Wake event loops from other threads: one `call_soon_threadsafe` for all that one commit has to say to a loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from functools import partial
from typing import Any, TypeVar

from ...runtime.errors import TidewalError
from ...runtime.wal import OnAppended

T = TypeVar("T")


class Hub:
    """Settles futures of one event loop, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, hubs: Hubs) -> None:
        self.loop = loop
        self._hubs = hubs
        self._thread = threading.get_ident()
        self._queue: deque[tuple[asyncio.Future[Any], Any]] = deque()
        self._scheduled = False

    def settle(self, future: asyncio.Future[T], result: T | TidewalError) -> None:
        """Give the future its result or error; at once when called on the loop's own thread."""
        thread = threading.get_ident()
        if thread == self._thread:
            _set(future, result)
            return
        self._queue.append((future, result))
        if self._scheduled:
            return
        self._scheduled = True
        if thread == self._hubs.gathering_thread:
            self._hubs.gathered.append(self)
        else:
            self.wake()

    def wake(self) -> None:
        """Let the loop look at what was settled."""
        try:
            self.loop.call_soon_threadsafe(self._drain)
        except RuntimeError:  # the loop is closed, and with it went everybody who waited
            self._queue.clear()

    def _drain(self) -> None:
        self._scheduled = False  # before taking: whoever adds from now on schedules again
        while self._queue:
            _set(*self._queue.popleft())


def _set(future: asyncio.Future[T], result: T | TidewalError) -> None:
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

    def current(self) -> Hub:
        """The hub of the running loop."""
        loop = asyncio.get_running_loop()
        hub = self._hubs.get(loop)
        if hub is None:
            self._hubs = {known: other for known, other in self._hubs.items() if not known.is_closed()}
            hub = self._hubs[loop] = Hub(loop, self)
        return hub

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
            hub.wake()
