"""The mailbox of an actor: three queues, with one reader that drains them.

Queues, in the order in which they are read: signals (never refused), supervision (crashes reported by child tasks), and
messages (bounded in number, and in bytes where the actor weighs its messages). Each queue is first in, first out.
 A mailbox belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from ..errors import ActorStopped, Overloaded

SIZE_LIMIT = "actor.mailboxSize"
BYTES_LIMIT = "actor.mailboxBytes"


class Envelope:
    """A message that the runtime wraps because its handling has a consequence: for an answer, a timer, a pack."""

    __slots__ = ()

    def abandon(self, error: Exception) -> None:
        """Give `error` to the sender that waits: this message will never be handled."""


class Mailbox:
    """A deque per queue and one waiting reader; senders that wait for room are admitted in the order of their arrival.

    `weigh` returns the bytes of a message. The message queue is full at `limit` messages or at `limit_bytes`, whichever
    comes first; the message that reaches the bytes is still taken, so one that is larger than the limit passes too.
    """

    __slots__ = (
        "_arrival", "_loop", "_parked", "_weights", "actor", "bytes_waiting", "closed", "crashes", "limit",
        "limit_bytes", "messages", "signals", "weigh",
    )  # fmt: skip

    def __init__(
        self,
        actor: str,
        loop: asyncio.AbstractEventLoop,
        limit: int,
        limit_bytes: int = 0,
        weigh: Callable[[object], int] | None = None,
    ) -> None:
        self.actor: str = actor
        self.limit: int = limit
        self.limit_bytes: int = limit_bytes
        self.weigh: Callable[[object], int] | None = weigh
        self.bytes_waiting: int = 0
        self.closed: bool = False
        self.signals: deque[object] = deque()
        self.crashes: deque[Exception] = deque()
        self.messages: deque[object] = deque()
        self._weights: deque[int] = deque()  # of `messages`, where there is a `weigh`
        self._parked: deque[tuple[object, object, asyncio.Future[None]]] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._loop = loop

    def put(self, message: object, content: object = None) -> None:
        """Add to the message queue; `content` is what to weigh, if not the message itself.

        Raises `Overloaded` when the queue is full and `ActorStopped` when the mailbox is closed.
        """
        if self.closed:
            raise self.stopped()
        if len(self.messages) >= self.limit or (self.weigh is not None and self.bytes_waiting >= self.limit_bytes):
            raise self._overloaded()
        if self.weigh is not None:
            self._add_weight(self.weigh(message if content is None else content))
        self.messages.append(message)
        arrival = self._arrival
        if arrival is not None:
            self._arrival = None
            if not arrival.done():
                arrival.set_result(None)

    async def put_when_room(self, message: object, content: object = None) -> None:
        """Add to the message queue, waiting for room. A cancelled wait adds nothing, unless room came first."""
        if self._parked or (self._is_full() and not self.closed):
            admitted: asyncio.Future[None] = self._loop.create_future()
            self._parked.append((message, content, admitted))
            await admitted
        else:
            self.put(message, content)

    def put_unbounded(self, message: object) -> None:
        """Add to the message queue whatever its length: for senders that bound themselves (timers, inputs)."""
        if self.weigh is not None:
            self._add_weight(0)
        self.messages.append(message)
        self.wake()

    def take(self) -> object:
        """Remove the first message of the queue, which must not be empty, and admit waiting senders."""
        message = self.messages.popleft()
        if self.weigh is not None:
            self.bytes_waiting -= self._weights.popleft()
        if self._parked:
            self._admit()
        return message

    def put_signal(self, message: object) -> None:
        """Add to the signal queue, which is read first and never refuses. Raises `ActorStopped` when closed."""
        if self.closed:
            raise self.stopped()
        self.signals.append(message)
        self.wake()

    def put_crash(self, error: Exception) -> None:
        """Make the reader crash with `error` before it reads another message."""
        self.crashes.append(error)
        self.wake()

    def wake(self) -> None:
        """Let the reader look again."""
        arrival = self._arrival
        if arrival is not None:
            self._arrival = None
            if not arrival.done():
                arrival.set_result(None)

    async def arrival(self) -> None:
        """Wait until something was added, or until `wake`. For the one reader."""
        self._arrival = self._loop.create_future()
        try:
            await self._arrival
        finally:
            self._arrival = None

    def close(self) -> None:
        """Take nothing more. What is inside stays readable; senders that wait for room get `ActorStopped`."""
        self.closed = True
        while self._parked:
            _, _, admitted = self._parked.popleft()
            if not admitted.done():
                admitted.set_exception(self.stopped())
        self.wake()

    def abandon(self, error: Exception) -> int:
        """Empty the closed mailbox, give `error` to senders that wait for an answer, and return how many messages were
        dropped."""
        dropped = len(self.signals) + len(self.messages)
        for queue in (self.signals, self.messages):
            while queue:
                message = queue.popleft()
                if isinstance(message, Envelope):
                    message.abandon(error)
        self.crashes.clear()
        self._weights.clear()
        self.bytes_waiting = 0
        return dropped

    def discard(self, kinds: tuple[type[Envelope], ...]) -> None:
        """Remove envelopes of `kinds`, which were put unbounded: what an ended life has read ahead is not for its
        successor."""
        kept = [not isinstance(message, kinds) for message in self.messages]
        for queue in (self.messages, self._weights):
            survivors = [item for item, keep in zip(queue, kept, strict=False) if keep]
            queue.clear()
            queue.extend(survivors)  # pyright: ignore[reportArgumentType] -- each queue gets its own items back

    def stopped(self) -> ActorStopped:
        """The error for a sender that adds to this mailbox after it was closed."""
        return ActorStopped(f"{self.actor} has stopped", actor=self.actor)

    def _is_full(self) -> bool:
        return len(self.messages) >= self.limit or (self.weigh is not None and self.bytes_waiting >= self.limit_bytes)

    def _add_weight(self, weight: int) -> None:
        self._weights.append(weight)
        self.bytes_waiting += weight

    def _admit(self) -> None:
        while self._parked and not self._is_full():
            message, content, admitted = self._parked.popleft()
            if not admitted.done():
                self.put(message, content)
                admitted.set_result(None)

    def _overloaded(self) -> Overloaded:
        if len(self.messages) >= self.limit:
            held, limit = f"{self.limit} messages", SIZE_LIMIT
        else:
            held, limit = f"{self.bytes_waiting} bytes", BYTES_LIMIT
        return Overloaded(
            f"the mailbox of {self.actor} holds {held}; try again after a pause", limit=limit, actor=self.actor
        )
