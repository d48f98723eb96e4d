"""For how long a handler may hold what it got: `ack_timeout_s` of a retry policy.

The time begins when the handler gets a batch and ends when it returns, so neither batches that wait for their turn nor
a commit under way use it up. Either the timer ends an attempt or the handler does, never both: a handler that was
cancelled by the timer commits nothing, whatever it returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar

from ..arguments import checked
from ..errors import AckTimeout, InvalidRequest

LOOKS = 8  # how often within its time a timer looks whether the process stood still: that does not count

_current: ContextVar[_AckTimer | None] = ContextVar("ack_timer", default=None)


@checked
def extend_ack_timeout(timeout_s: float | None = None) -> None:
    """Give the handler that runs, in this task, or in one or a thread that it has begun, `timeout_s` seconds from now
    (None: the `ack_timeout_s` of its policy), if it has less. Does nothing where no `ack_timeout_s` was set. Raises
    `AckTimeout` once the attempt is over, since what it made does not count then, and `InvalidRequest` for no time."""
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidRequest(f"timeout_s is {timeout_s}, and must be over 0", argument="timeout_s")
    timer = _current.get()
    if timer is not None:
        timer.extend(timeout_s)


def check_ack_timeout() -> None:
    """Raise `AckTimeout` where the attempt of the handler that runs is over: what it made does not count then."""
    timer = _current.get()
    if timer is not None:
        timer.check()


@asynccontextmanager
async def ack_timer(timeout_s: float | None) -> AsyncGenerator[None]:
    """Cancel what runs in here after `timeout_s` seconds (None: never), and raise `AckTimeout` then, even if it went on
    to its end. Time for which the event loop stood still is no time of the handler's."""
    timer = None if timeout_s is None else _AckTimer(timeout_s)
    token = _current.set(timer)  # also None: a handler without a limit has not that of one around it
    try:
        if timer is None:
            yield
            return
        async with timer.scope:
            timer.extend()
            yield
    except Exception as error:
        if timer is not None and timer.scope.expired():
            raise timer.ended() from error
        raise
    finally:
        if timer is not None:
            timer.stop()
        _current.reset(token)
    if timer is not None and timer.scope.expired():  # the handler has swallowed the cancellation
        raise timer.ended()


class _AckTimer:
    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._deadline = 0.0
        self._look: asyncio.TimerHandle | None = None
        self._stopped = False
        self.scope = asyncio.timeout(None)

    def extend(self, timeout_s: float | None = None) -> None:
        self.check()
        deadline = self._loop.time() + (timeout_s or self._timeout_s)
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            self._grant(deadline)
        else:  # of a thread, which must not touch the loop's timers
            self._loop.call_soon_threadsafe(self._grant, deadline)

    def check(self) -> None:
        if self._stopped or self.scope.expired():
            raise self.ended()

    def _grant(self, deadline: float) -> None:
        if self._stopped or self.scope.expired():  # it has ended since a thread asked
            return
        now = self._loop.time()
        if self._look is not None:  # what the loop stood still until now
            self._deadline += max(0.0, now - self._look.when())
        self._deadline = max(self._deadline, deadline)
        self.scope.reschedule(None)
        self._look_later(now)

    def stop(self) -> None:
        self._stopped = True
        if self._look is not None:
            self._look.cancel()

    def ended(self) -> AckTimeout:
        return AckTimeout(
            f"the handler held what it got for longer than ack_timeout_s, {self._timeout_s} s",
            timeout_s=self._timeout_s,
        )

    def _look_later(self, now: float) -> None:
        if self._look is not None:
            self._look.cancel()
        at = min(self._deadline, now + self._timeout_s / LOOKS)
        self._look = self._loop.call_at(at, self._looked, at)

    def _looked(self, expected: float) -> None:
        now = self._loop.time()
        self._deadline += max(0.0, now - expected)
        if now >= self._deadline:
            self.scope.reschedule(now)
        else:
            self._look_later(now)
