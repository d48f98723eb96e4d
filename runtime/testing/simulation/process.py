"""A simulated process: all that runs in it can be stopped for a while, or for ever, at any moment; and its clocks."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar, copy_context
from typing import Any

from ..clock import MachineClock, VirtualClock

BURIED_S = 0.001  # until the tasks of a killed process are cancelled again

_process: ContextVar[SimulatedProcess | None] = ContextVar("process", default=None)


class NodeClock(MachineClock):
    """The clocks of one machine of several. Its wall clock can be set; its monotonic clock can run at another rate than
    those of the others, and can stand still, as that of a virtual machine does which its host has paused."""

    def __init__(self, shared: VirtualClock) -> None:
        super().__init__(shared)
        self._true = shared
        self._passed_s, self._since_s, self._rate = 0.0, shared.monotonic(), 1.0

    def monotonic(self) -> float:
        return self._passed_s + (self._true.monotonic() - self._since_s) * self._rate

    def run_at(self, rate: float) -> None:
        """From now on `rate` seconds pass here in each second; 0: time stands still."""
        self._passed_s, self._since_s, self._rate = self.monotonic(), self._true.monotonic(), rate


class SimulatedProcess:
    """Tasks that `spawn` starts, and all that they start, belong to the process. While it is `paused` none of them runs
    on, timers that end meanwhile included: like a process that was stopped by a signal. One that was killed never runs
    again; its tasks are cancelled, and what it sends then is for the log to ignore (`dead`)."""

    def __init__(self) -> None:
        self.paused: bool = False
        self.dead: bool = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._gates: list[asyncio.Future[None]] = []
        self._deferred: list[Callable[[], object]] = []

    @property
    def running(self) -> bool:
        return not (self.paused or self.dead)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the process, on the present loop, which must have been prepared by `run_processes`."""
        context = copy_context()
        context.run(_process.set, self)
        return context.run(asyncio.get_running_loop().create_task, coroutine)

    def when_running(self, call: Callable[[], object]) -> None:
        """Make a call from outside: at once, when the process goes on, or never."""
        if self.paused:
            self._deferred.append(call)
        elif not self.dead:
            call()

    def pause(self) -> None:
        """Let nothing run until `resume`."""
        self.paused = not self.dead

    def resume(self) -> None:
        """Go on; first with what came from outside meanwhile."""
        self.paused = False
        deferred, self._deferred = self._deferred, []
        for call in deferred:
            call()
        gates, self._gates = self._gates, []
        for gate in gates:
            if not gate.done():
                gate.set_result(None)

    def kill(self) -> None:
        """End without a word."""
        self.dead, self._deferred = True, []
        self.resume()
        for task in self._tasks:
            task.cancel()

    async def buried(self) -> None:
        """Wait until nothing of a killed process is left. What it waits for in its end never comes."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=BURIED_S)

    def note(self, task: asyncio.Task[Any]) -> None:
        """Know a task of this process."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def gate(self) -> asyncio.Future[None]:
        """Done when the process goes on."""
        self._gates.append(asyncio.get_running_loop().create_future())
        return self._gates[-1]


def run_processes(loop: asyncio.AbstractEventLoop) -> None:
    """Let tasks of this loop belong to processes."""
    loop.set_task_factory(_new_task)


def _new_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **options: Any
) -> asyncio.Task[Any]:
    process = _process.get()
    if process is None:
        return asyncio.Task(coroutine, loop=loop, **options)
    task = asyncio.Task(_run(coroutine, process), loop=loop, **options)
    process.note(task)
    if process.dead:
        task.cancel()
    task.add_done_callback(lambda _: coroutine.close())  # it may never have begun
    return task


async def _run(coroutine: Any, process: SimulatedProcess) -> Any:
    return await _gated(coroutine, process)


@types.coroutine
def _gated(coroutine: Any, process: SimulatedProcess) -> Generator[Any, None, Any]:
    """Run `coroutine` step by step, each step only while the process is not paused."""
    error: BaseException | None = None
    while True:
        while process.paused:
            try:
                yield from process.gate()
            except BaseException as cancelled:
                error = cancelled
        try:
            awaited = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration as end:
            return end.value
        error = None
        try:
            yield awaited
        except BaseException as raised:
            error = raised
