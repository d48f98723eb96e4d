"""An event loop on a thread, for processes without one, and a reader of every kind of log over it."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, suppress
from types import TracebackType
from typing import Any, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from ..errors import Closed, InvalidRequest, PositionLost
from .wal import Entry, FromId, Wal

T = TypeVar("T")


class LoopThread:
    """An event loop on a daemon thread, which runs coroutines for the threads of a process without one.

    A fork has no copy of the thread: there each call raises `InvalidRequest` at once, and ending does nothing."""

    def __init__(self, name: str) -> None:
        """Start it. `name` is the thread's."""
        self._process = os.getpid()
        running = ExitStack()
        self._portal = running.enter_context(start_blocking_portal(name=name))
        self._thread = self._portal.call(threading.current_thread)
        self._own_loop = self._portal.call(asyncio.get_running_loop)
        self._later: set[asyncio.Task[None]] = set()
        # Also when the process ends: the portal waits for its thread, which the interpreter has frozen by then.
        self._end = weakref.finalize(self, _end, self._process, self._portal, running)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """The result of `work`, for any thread but the loop's own. Raises `TimeoutError` after `timeout_s` seconds, and
        `Closed` after `end`, also for what it cancelled, and `InvalidRequest` in a fork of the process."""
        if not self._is_here():
            work.close()
            raise InvalidRequest(
                f"made in another process: connect again there. Process {os.getpid()} is a fork of {self._process}, "
                f"and the thread {self._thread.name} has stayed behind"
            )
        try:
            running = self._portal.start_task_soon(lambda: work)
        except RuntimeError as error:  # the portal's own, for a loop that has ended
            work.close()
            raise self._ended() from error
        try:
            return running.result(timeout_s)
        except CancelledError as error:  # `end` cancels what is running
            raise self._ended() from error

    def entered(self, manager: AbstractAsyncContextManager[T]) -> AbstractContextManager[T]:
        """`manager` for a `with` statement of any thread but the loop's own: one task of the loop enters and leaves
        it; a fork of the process does not leave it."""
        return _Entered(self._portal.wrap_async_context_manager(manager), self._process)

    def _is_here(self) -> bool:
        """Whether this is the process that has the thread, and no fork of it."""
        return os.getpid() == self._process

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin `work`, and wait for nothing: the garbage collector calls this on any thread, in the midst of anything,
        such as while that holds a lock that the loop waits for. Does nothing where the loop has ended."""
        if self._is_here():
            with suppress(RuntimeError):  # the loop is closed
                self._own_loop.call_soon_threadsafe(self._begin, work)
                return
        work.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._later.add(task := self._own_loop.create_task(work))
        task.add_done_callback(self._later.discard)

    def _ended(self) -> Closed:
        return Closed(f"the thread {self._thread.name} has ended")

    def end(self) -> None:
        """Cancel what is running, stop the loop, and wait for its thread. A second call does nothing; the end of the
        process is one."""
        self._end()


def _end(process: int, portal: BlockingPortal, running: ExitStack) -> None:
    if os.getpid() != process:
        # A fork has the portal without its thread. By hand it is marked as stopped, so that `running`, which calls it
        # when it is collected as garbage, waits for nothing; a loop in debug mode complains of the foreign thread.
        with suppress(StopIteration, RuntimeError):
            portal.stop().send(None)
        return
    portal.call(portal.stop, True)
    running.close()


class _Entered(AbstractContextManager[T]):
    """`inside`, which only `process` leaves."""

    def __init__(self, inside: AbstractContextManager[T], process: int) -> None:
        self._inside, self._process = inside, process

    def __enter__(self) -> T:
        return self._inside.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._inside.__exit__(kind, error, trace) if os.getpid() == self._process else None


class LoopReader:
    """A `BlockingReader` for every kind of log: its `Wal`, opened for reading only at the first call, with the settings
    that the environment has. A `LoopThread` runs it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._wal: Wal | None = None
        self._loop: LoopThread | None = None
        self._closed = False

    def channels(self) -> list[str]:
        return self._run(self._opened().channels())

    def latest_id(self, channel: str) -> bytes | None:
        return self._run(self._opened().latest_id(channel))

    def id_at(self, channel: str, timestamp: int) -> bytes | None:
        return self._run(self._opened().id_at(channel, timestamp))

    def read(
        self, channel: str, after: bytes | None, upto: bytes | None, *, inclusive: bool = False
    ) -> Iterator[list[Entry]]:
        latest = self.latest_id(channel)
        if upto is not None and (latest is None or latest < upto):
            raise PositionLost(
                f"channel {channel} ends before {upto.hex()}", requested=upto, first_available=latest, channel=channel
            )
        end = latest if upto is None else upto
        if end is None or (after is not None and (after > end if inclusive else after >= end)):
            return
        if after is None:
            first = self.id_at(channel, 0)
            if first is None or first > end:
                return  # nothing is left of it, and the next entry may never come
            after, inclusive = first, True
        batches: Any = self._opened().read(channel, FromId(after, inclusive))
        try:
            while True:
                entries: list[Entry] = list(self._run(_next(batches, channel)))
                wanted = [entry for entry in entries if entry.id <= end]
                if wanted:
                    yield wanted
                if entries[-1].id >= end:
                    return
        finally:
            # An abandoned read is ended by the garbage collector, perhaps when the log is closed already.
            if self._loop is not None:
                self._loop.finish(batches.aclose())

    def alive(self) -> bool:
        """Clients of brokers connect again by themselves."""
        return self._wal is not None and not self._closed

    def close(self) -> None:
        self._closed = True
        loop, self._loop = self._loop, None
        if loop is not None:
            try:
                if self._wal is not None:
                    loop.run(self._wal.close())
            finally:
                loop.end()

    def _opened(self) -> Wal:
        if self._closed:
            raise Closed("the reader is closed")
        if self._wal is None:
            # Imported here: a reader that speaks a log's own protocol needs no settings.
            from ..config.loading import load_settings, wal_options
            from .opening import open_wal

            options = wal_options(load_settings(), self._url)
            self._wal = self._run(open_wal(self._url, read_only=True, **options))
        return self._wal

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:  # between the batches of a read, perhaps
            work.close()
            raise Closed("the reader is closed")
        if self._loop is None:
            self._loop = LoopThread("tidewal-blocking-reader")
        return self._loop.run(work)


async def _next(batches: Any, channel: str) -> list[Entry]:
    try:
        return await anext(batches)
    except StopAsyncIteration:
        raise Closed(f"the log was closed while {channel} was being read") from None
