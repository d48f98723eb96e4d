"""The thread and event loop for all requests to the brokers, independent of the application's loops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from ...runtime.errors import Closed

T = TypeVar("T")

CANCEL_AGAIN_S = 1.0  # `asyncio.wait_for` of Python 3.11, which the library uses, may lose a cancellation

_log = logging.getLogger(__name__)


class _Loop(asyncio.SelectorEventLoop):
    """asyncio's own loop, whatever the policy of the process: uvloop is slower with batches of a MiB. It tracks its
    connections, since the library does not wait until they are closed: one with a silent peer would stay open."""

    def __init__(self) -> None:
        super().__init__()
        self._connections: weakref.WeakSet[asyncio.WriteTransport] = weakref.WeakSet()

    async def create_connection(self, *args: Any, **named: Any) -> tuple[Any, Any]:
        transport, protocol = await super().create_connection(*args, **named)
        self._connections.add(transport)
        return transport, protocol

    def drop_connections(self) -> None:
        """Abort all connections that are still open, discarding unsent data; before `close`."""
        for connection in tuple(self._connections):
            connection.abort()
        self.run_until_complete(asyncio.sleep(0))  # sockets close one iteration later


class IoThread:
    """One loop on one daemon thread. `start` and `stop` are called once each."""

    def __init__(self, name: str) -> None:
        self.loop: _Loop = _Loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopped = False

    def start(self) -> None:
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Schedule `call` on the loop, from any thread. Raises `Closed` once the thread has stopped."""
        try:
            self.loop.call_soon_threadsafe(call)
        except RuntimeError:
            raise Closed("the log is closed") from None

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in the background until `stop`; called on the loop."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that `make` returns on this loop and return its result; called from another loop. Raises
        what the coroutine raises, and `Closed` when the thread stops meanwhile."""

        def begin() -> None:
            task = self.loop.create_task(make())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(publish)
            running.append(task)

        def publish(task: asyncio.Task[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed: no task waits any more
                caller.call_soon_threadsafe(settle, task)

        def settle(task: asyncio.Task[T]) -> None:
            if answer.done():
                return
            error = Closed("the log is closed") if task.cancelled() else task.exception()
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(task.result())

        caller = asyncio.get_running_loop()
        answer: asyncio.Future[T] = caller.create_future()
        running: list[asyncio.Task[T]] = []
        self.post(begin)
        try:
            return await answer
        except asyncio.CancelledError:
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(lambda: [task.cancel() for task in running])
            raise

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a background task of a log has failed", exc_info=error)

    async def quit(self) -> None:
        """Cancel the background tasks; called on the loop."""
        await _cancel(self._tasks - {asyncio.current_task()})

    async def stop(self) -> None:
        """Cancel all tasks and end the thread; called from another loop."""
        if self._stopped:
            return
        self._stopped = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(_cancel(asyncio.all_tasks(self.loop)))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.drop_connections()
        self.loop.close()


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        ended, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
        await asyncio.gather(*ended, return_exceptions=True)  # so that their exceptions are retrieved
