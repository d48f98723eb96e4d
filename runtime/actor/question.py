"""Questions and their answers: what `ask` sends, and `Deferred` for an answer that comes later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic

from ..errors import ActorStopped, DeadlineExceeded, HandlerFailed, TidewalError
from .mailbox import Envelope
from .typevars import AnswerT


class Question(Envelope):
    """A message whose sender waits for an answer. Hashed by identity: the deadline wheel keeps it in a dict."""

    __slots__ = ("actor", "future", "message")

    def __init__(self, actor: str, message: object, future: asyncio.Future[Any]) -> None:
        self.actor: str = actor
        self.message: object = message
        self.future: asyncio.Future[Any] = future

    def answer(self, value: object) -> None:
        """Answer with `value`, unless the sender has given up."""
        if not self.future.done():
            self.future.set_result(value)

    def fail(self, error: Exception) -> None:
        """Answer with `error`, unless the sender has given up."""
        if not self.future.done():
            self.future.set_exception(as_tidewal(self.actor, error))

    def expire(self) -> None:
        """Fail with `DeadlineExceeded`: the deadline has passed."""
        if not self.future.done():
            self.future.set_exception(DeadlineExceeded(f"{self.actor} did not answer in time", actor=self.actor))

    def abandon(self, error: Exception) -> None:
        self.fail(error)


class Deferred(Generic[AnswerT]):
    """A future answer: a handler returns it and is free for the next message.

    `resolve` or `fail` it once, at any time, also before it is returned; later calls change nothing. The ask's
    deadline holds. One that is still open when the actor's life ends fails with `ActorStopped`.
    """

    __slots__ = ("_actor", "_error", "_open", "_question", "_report", "_value", "done")

    def __init__(self, actor: str, open_: set[Deferred[Any]]) -> None:
        self._actor = actor
        self._open = open_
        self._question: Question | None = None
        self._report: Callable[[Exception], None] | None = None
        self._value: AnswerT | None = None
        self._error: Exception | None = None
        self.done: bool = False
        open_.add(self)

    def resolve(self, value: AnswerT) -> None:
        """Answer with `value`."""
        self._finish(value, None)

    def fail(self, error: Exception) -> None:
        """Answer with `error`; one that is not Tidewal's own reaches the sender as `HandlerFailed`."""
        self._finish(None, error)

    def abandon(self) -> None:
        """Fail with `ActorStopped`: the actor's life has ended before the answer."""
        self._report = None
        self.fail(ActorStopped(f"{self._actor} ended before it answered", actor=self._actor))

    def attach(self, question: Question) -> None:
        """Answer `question` with this value, now or when it is resolved. The runtime calls it."""
        self._question = question
        if self.done:
            self._deliver(question)

    def detach(self, report: Callable[[Exception], None]) -> None:
        """Give `report` the error if this fails: the sender waits for no answer. The runtime calls it."""
        if self._error is not None:
            report(self._error)
        self._report = report

    def _finish(self, value: AnswerT | None, error: Exception | None) -> None:
        if self.done:
            return
        self.done = True
        self._value, self._error = value, error
        self._open.discard(self)
        if self._question is not None:
            self._deliver(self._question)
        elif error is not None and self._report is not None:
            self._report(error)

    def _deliver(self, question: Question) -> None:
        if self._error is not None:
            question.fail(self._error)
        else:
            question.answer(self._value)


def as_tidewal(actor: str, error: Exception) -> TidewalError:
    """`error` as a sender may see it: Tidewal's own as is, any other as `HandlerFailed` with its cause."""
    if isinstance(error, TidewalError):
        return error
    name = type(error).__name__
    failed = HandlerFailed(f"{actor} failed: {name}: {error}", actor=actor, error=name)
    failed.__cause__ = error
    return failed
