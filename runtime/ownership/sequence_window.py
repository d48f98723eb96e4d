"""The numbers of a named producer's batches: which one is next, and which of them may be sent."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from ..errors import InvalidRequest, TidewalError
from .producers import REMEMBERED_PER_PRODUCER

WINDOW = 128
assert WINDOW <= REMEMBERED_PER_PRODUCER, "an outcome would be forgotten before all numbers below it are decided"


class SequenceWindow:
    """Admits a number once it is less than `WINDOW` above the lowest one that is undecided: in the log, or given up.

    The log remembers more outcomes of a producer than that. So when it forgets one, all numbers up to that are decided,
    also for the incarnations that come: what is forgotten is never taken for done although it was not.

    An undecided number that no call sends any more would shut the window for ever: its batch was refused, its deadline
    passed, or its process was killed. A source that numbers its batches is to send it again. For a call without one it
    is given up, and the log remembers that like a batch. Another batch does not get it: the first one may still be
    sent again, and would be taken for the other where their contents are the same.
    """

    def __init__(self, decided_to: Callable[[], int], check_open: Callable[[], None]) -> None:
        """All numbers up to `decided_to()` are decided. `check_open` raises once nothing more is sent."""
        self.last: int = 0  # the highest number used
        self._decided_to = decided_to
        self._known_to = 0  # what that returned last
        self._check_open = check_open
        self._calls: Counter[int] = Counter()  # by number, while they try
        self._queue: deque[tuple[int, asyncio.Future[int]]] = deque()  # of new numbers, 0 where a call has none yet
        self._giving_up = False
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def admitted(self, sequence: int | None, give_up: Callable[[int], Awaitable[None]]) -> AsyncGenerator[int]:
        """Wait until a batch may be sent, with `sequence` or with the next number, and hand out the number until the
        call is through. `give_up` makes a number decided. Raises `InvalidRequest` for a number that is not next, or
        too far above one that must be sent before."""
        number = await self._next(give_up) if sequence is None else await self._given(sequence)
        try:
            yield number
        except BaseException:
            self._leave(number)
            self.wake()
            raise
        self._leave(number)

    def wake(self) -> None:
        """Let what waits look again: a number was decided, no call sends it any more, or nothing more is sent."""
        self._changed.set()
        while self._queue and not self._giving_up:
            number, turn = self._queue[0]
            if not turn.done():  # nor was its call cancelled
                try:
                    self._check_open()
                except TidewalError as error:
                    turn.set_exception(error)
                else:
                    if not self._admit(number, turn):
                        return
            self._queue.popleft()

    def _admit(self, number: int, turn: asyncio.Future[int]) -> bool:
        """Whether it is the turn of the first in the queue: to send, or with 0 to give the lowest number up."""
        if self._within(number or self.last + 1):
            if not number:
                self.last += 1
                self._calls[self.last] += 1
            turn.set_result(number or self.last)
        elif not number and self._known_to + 1 not in self._calls:
            self._giving_up = True
            turn.set_result(0)
        else:
            return False
        return True

    async def _next(self, give_up: Callable[[int], Awaitable[None]]) -> int:
        turn = self._queued(0, self._queue.append)
        while True:
            try:
                number = await turn
                if number:
                    return number
                await give_up(self._known_to + 1)
            except BaseException:
                self._abandon(turn)
                raise
            self._giving_up = False
            turn = self._queued(0, self._queue.appendleft)

    def _abandon(self, turn: asyncio.Future[int]) -> None:
        """The call ends, and makes no use of its turn, where it came."""
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            if number := turn.result():
                self._leave(number)
            else:
                self._giving_up = False
        self.wake()

    async def _given(self, number: int) -> int:
        new = number == self.last + 1
        self._check(number)
        self.last = max(self.last, number)
        self._calls[number] += 1
        try:
            if new:
                await self._queued(number, self._queue.append)
            else:  # not in the queue, where what waits for this very number may stand before it
                while not self._within(number):
                    self._changed.clear()
                    await self._changed.wait()
                    self._check_open()
        except BaseException:
            self._leave(number)
            self.wake()
            raise
        return number

    def _queued(
        self, number: int, into_queue: Callable[[tuple[int, asyncio.Future[int]]], None]
    ) -> asyncio.Future[int]:
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        into_queue((number, turn))
        if self._queue[0][1] is turn:
            self.wake()
        return turn

    def _check(self, number: int) -> None:
        if not 0 < number <= self.last + 1:
            raise InvalidRequest(
                f"sequence is {number}, and the last batch has number {self.last}: the next one is {self.last + 1}",
                sequence=number,
            )
        if not self._within(number) and (lowest := self._known_to + 1) not in self._calls:
            raise InvalidRequest(
                f"sequence is {number}, and batch {lowest} is not in the log: send that one first",
                sequence=number,
                missing=lowest,
            )

    def _within(self, number: int) -> bool:
        if number > self._known_to + WINDOW:
            self._known_to = self._decided_to()
        return number <= self._known_to + WINDOW

    def _leave(self, number: int) -> None:
        self._calls[number] -= 1
        if not self._calls[number]:
            del self._calls[number]
