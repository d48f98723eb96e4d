"""The class to derive actors from."""

from __future__ import annotations

from collections.abc import AsyncIterable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Generic

from ..arguments import checked
from .question import Deferred
from .timers import Timer
from .typevars import AnswerT, MessageT, PackT

if TYPE_CHECKING:
    from .life import Life
    from .ref import ActorRef
    from .system import ActorSystem


class Actor(Generic[MessageT, AnswerT, PackT]):
    """State that one handler at a time works on.

    `Actor[MessageT, AnswerT, PackT]` says the types of its messages, of its answers to them, and of the packs of its
    inputs, for type checkers only: nothing is checked while it runs. What is left out is `Any`; the address that
    `spawn` returns has the types of `on_message` as the class declares them.

    The system sets `name`, `system` and `ref` before `on_start`. A handler that raises crashes the actor, and a new
    instance replaces it; only a `TidewalError` raised in answering an `ask` is an answer like any other. See
    docs/actors.md for the guarantees.
    """

    name: str
    system: ActorSystem
    ref: ActorRef[MessageT, AnswerT]
    _life: Life  # set with the other three; the helpers below use it

    async def on_start(self) -> None:
        """Prepare, before the first message. If it raises it has cleaned up after itself: `on_stop` is not called."""

    async def on_message(self, message: MessageT, /) -> AnswerT | Deferred[AnswerT]:
        """Handle one message; the return value answers an `ask`. Return `self.deferred()` to answer it later."""
        raise TypeError(f"{self.name} takes no messages, but got {type(message).__name__}")

    async def on_pack(self, pack: PackT, /) -> None:
        """Handle one pack of an input."""
        raise TypeError(f"{self.name} takes no packs, but got {type(pack).__name__}")

    @staticmethod
    def weigh(message: Any, /) -> int:
        """The bytes of a message. Override it to bound the mailbox in bytes (`actor.mailboxBytes`) as well."""
        return 0

    def inputs(self) -> Iterable[AsyncIterable[PackT]]:
        """The streams to consume, opened anew in each life, after `on_start`."""
        return ()

    async def on_stop(self) -> None:
        """Clean up, after the last message of this life; also after a crash."""

    @checked
    def spawn_task(self, coroutine: Coroutine[object, object, object], *, name: str) -> None:
        """Run a child task beside the handlers. It is cancelled when this life ends; its failure crashes the actor."""
        self._life.spawn_task(coroutine, name)

    @checked
    def every(self, interval_s: float, message: MessageT) -> Timer:
        """Handle `message` every `interval_s` seconds; at most one of them waits in the mailbox."""
        return self._life.every(interval_s, message)

    @checked
    def after(self, delay_s: float, message: MessageT) -> Timer:
        """Handle `message` once, in `delay_s` seconds."""
        return self._life.after(delay_s, message)

    def deferred(self) -> Deferred[AnswerT]:
        """A future answer: return it from `on_message` and resolve it later."""
        return self._life.deferred()

    @checked
    def crash(self, error: Exception) -> None:
        """Crash before the next message is handled."""
        self._life.crash(error)

    def stop(self) -> None:
        """Stop once the mailbox has been drained. Returns at once."""
        self._life.stop()
