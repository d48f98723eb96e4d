"""The address of an actor: all that other code has of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic

from ..errors import InvalidRequest, Overloaded
from .question import Question
from .typevars import AnswerT_co, MessageT_contra

if TYPE_CHECKING:
    from .cell import Cell
    from .system import ActorSystem


class ActorRef(Generic[MessageT_contra, AnswerT_co]):
    """`ActorRef[MessageT, AnswerT]`: takes messages of the one type, and answers an `ask` with the other.

    Stays valid across restarts; once the actor has stopped every call raises `ActorStopped`.

    For the loop of its system only: from another thread, go through `loop.call_soon_threadsafe`.
    """

    __slots__ = ("_cell", "_deadlines", "_loop", "_mailbox", "_observer", "name")

    def __init__(self, cell: Cell, system: ActorSystem) -> None:
        self.name: str = cell.name
        self._cell = cell
        self._mailbox = cell.mailbox
        self._deadlines = system.deadlines
        self._observer = system.observer
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<ActorRef {self.name}>"

    @property
    def cell(self) -> Cell:
        """The actor's cell. For the runtime."""
        return self._cell

    def tell(self, message: MessageT_contra) -> None:
        """Send without waiting. Raises `Overloaded` when the mailbox is full: the message was not taken; `ActorStopped`
        when the actor has stopped."""
        try:
            self._mailbox.put(message)
        except Overloaded as error:
            self._observer.refused(self.name, str(error.fields["limit"]))
            raise

    async def send(self, message: MessageT_contra) -> None:
        """Send, waiting for room in the mailbox. Senders that wait are admitted in the order of their arrival."""
        await self._mailbox.put_when_room(message)

    def signal(self, message: MessageT_contra) -> None:
        """Send through the queue that is read first and never refuses. For few and small messages."""
        self._mailbox.put_signal(message)

    async def ask(self, message: MessageT_contra, *, deadline_s: float = 10.0) -> AnswerT_co:
        """Send and wait for the answer.

        Raises the handler's error (Tidewal's own as is, any other as `HandlerFailed`), `Overloaded` at once when the
        mailbox is full, `ActorStopped`, and `DeadlineExceeded` after `deadline_s`, when a message whose handling has
        not begun is dropped. A cancelled ask drops it too.
        """
        if asyncio.current_task() is self._cell.task:
            raise InvalidRequest(f"{self.name} asks itself: it would wait for itself", actor=self.name)
        future: asyncio.Future[Any] = self._loop.create_future()
        question = Question(self.name, message, future)
        try:
            self._mailbox.put(question, message)
        except Overloaded as error:
            self._observer.refused(self.name, str(error.fields["limit"]))
            raise
        slot = self._deadlines.add(question, deadline_s)
        try:
            return await future
        finally:
            slot.pop(question, None)
