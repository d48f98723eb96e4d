"""Virtual time, controlled by a test."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

EPOCH_MS = 1_600_000_000_000  # where virtual wall clocks start: 2020-09-13


class VirtualClock:
    """A clock that moves only by its methods."""

    def __init__(self, wall_ms: int = EPOCH_MS) -> None:
        self._wall_ms = wall_ms
        self._monotonic = 0.0
        self._suspended = 0.0
        self._boots = 1

    def wall_ms(self) -> int:
        return self._wall_ms + int(self._monotonic * 1000)

    def monotonic(self) -> float:
        return self._monotonic

    def boot(self) -> str:
        return f"boot {self._boots}"

    def reboot(self) -> None:
        """Let nobody conclude from `monotonic` how much time has passed since before."""
        self._boots += 1

    def running(self) -> float:
        """Seconds, without those in which the machine was suspended: what an event loop uses."""
        return self._monotonic - self._suspended

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self._monotonic += seconds

    def jump_wall(self, ms: int) -> None:
        """Set the wall clock forward, or back with a negative `ms`, as an operator might."""
        self._wall_ms += ms

    def suspend(self, seconds: float) -> None:
        """Let `seconds` pass in which nothing runs and no timer comes nearer, as while a machine is suspended."""
        self._monotonic += seconds
        self._suspended += seconds


class MachineClock:
    """One of several machines in a virtual run: all share the time of the loop's clock, and each has a wall clock that
    can be set apart from the others'."""

    def __init__(self, shared: VirtualClock, boot: str = "") -> None:
        """`boot` names the machine; "" where processes on it cannot know that they are."""
        self._shared = shared
        self._boot = boot
        self._ahead_ms = 0

    def wall_ms(self) -> int:
        return self._shared.wall_ms() + self._ahead_ms

    def monotonic(self) -> float:
        return self._shared.monotonic()

    def boot(self) -> str:
        return self._boot

    def jump_wall(self, ms: int) -> None:
        """Set this machine's wall clock forward, or back with a negative `ms`."""
        self._ahead_ms += ms


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting, let virtual time pass."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:  # nothing is scheduled: only another thread can wake the loop
            return super().select(None)
        self._clock.advance(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time: sleeping costs nothing and its order depends on nothing outside. It
    cannot order work on other threads, so a deterministic run has none."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_JumpingSelector(clock))
        self.clock = clock
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self.clock.running()


def run_virtual(main: Coroutine[Any, Any, Result], clock: VirtualClock | None = None) -> Result:
    """Run `main` to its end on a virtual loop, like `asyncio.run`."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock or VirtualClock())) as runner:
        return runner.run(main)


async def until(true: Callable[[], object]) -> None:
    """Let the loop run until `true()` is true; the test's timeout ends the wait otherwise."""
    while not true():  # noqa: ASYNC110 -- what is waited for has no event to await
        await asyncio.sleep(0)


async def elapse(seconds: float) -> None:
    """Let virtual time pass."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop), "tests do not wait for real time"
    passed: asyncio.Future[None] = loop.create_future()
    loop.call_later(seconds, passed.set_result, None)
    await passed
