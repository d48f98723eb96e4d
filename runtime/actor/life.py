"""One life of an actor: from `on_start` to `on_stop`, with its tasks, timers, inputs and open answers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, Callable, Coroutine
from typing import Any

from ..errors import ActorStopped, HandlerFailed, TidewalError
from .actor import Actor
from .mailbox import Envelope, Mailbox
from .observer import Observer
from .question import Deferred, Question
from .timers import Timer, Timers

PACKS_READ_AHEAD = 2  # packs of one input that wait in the mailbox: the next is there when one has been handled
MESSAGES_PER_TURN = 256  # messages handled before other tasks of the loop get their turn


class Tick(Envelope):
    """A message from a timer."""

    __slots__ = ("message", "waiting")

    def __init__(self, message: object) -> None:
        self.message: object = message
        self.waiting: bool = False


class Pack(Envelope):
    """A pack from an input."""

    __slots__ = ("intake", "pack")

    def __init__(self, pack: object, intake: Intake) -> None:
        self.pack: object = pack
        self.intake: Intake = intake


class Intake:
    """Feeds one input into the mailbox, a few packs ahead."""

    def __init__(self, mailbox: Mailbox, loop: asyncio.AbstractEventLoop) -> None:
        self._mailbox = mailbox
        self._loop = loop
        self._ahead = 0
        self._room: asyncio.Future[None] | None = None

    async def run(self, stream: AsyncIterable[object]) -> None:
        """Read `stream` to its end, or until cancelled."""
        packs = aiter(stream)
        try:
            async for pack in packs:
                if self._ahead >= PACKS_READ_AHEAD:
                    self._room = self._loop.create_future()
                    await self._room
                self._ahead += 1
                self._mailbox.put_unbounded(Pack(pack, self))
        finally:
            if inspect.isasyncgen(packs):
                await packs.aclose()

    def taken(self) -> None:
        """One of its packs left the mailbox."""
        self._ahead -= 1
        if self._room is not None and not self._room.done():
            self._room.set_result(None)


class Life:
    """What an instance of an actor has from its start to its end, and the loop that handles its messages."""

    def __init__(
        self,
        actor: Actor,
        mailbox: Mailbox,
        timers: Timers,
        observer: Observer,
        request_stop: Callable[[], None],
    ) -> None:
        self.actor = actor
        self.handled: int = 0
        self.progress_s: float = timers.now()
        self._mailbox = mailbox
        self._timers = timers
        self._observer = observer
        self.stop = request_stop  # once the mailbox has been drained; returns at once
        self._loop = asyncio.get_running_loop()
        self._host = asyncio.current_task()
        self._tasks: set[asyncio.Task[object]] = set()
        self._intakes: set[asyncio.Task[object]] = set()
        self._repeating: list[Timer] = []
        self._open: set[Deferred[Any]] = set()
        self._handling = False
        self._draining = False
        self._ending = False
        self.interrupted_by: Exception | None = None

    # ---- what the actor's helpers do --------------------------------------------------------------------------------

    def spawn_task(self, coroutine: Coroutine[object, object, object], name: str) -> None:
        """Run a child task, as `Actor.spawn_task` says. Raises `ActorStopped` once the life is ending."""
        if self._ending:
            coroutine.close()
            raise ActorStopped(f"{self.actor.name} is ending: it starts no tasks", actor=self.actor.name)
        task = self._loop.create_task(coroutine, name=f"{self.actor.name}/{name}")
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def every(self, interval_s: float, message: object) -> Timer:
        """Handle `message` every `interval_s` seconds."""
        self._repeating = [timer for timer in self._repeating if not timer.cancelled]
        self._repeating.append(self._timers.every(interval_s, self._ticker(message)))
        return self._repeating[-1]

    def after(self, delay_s: float, message: object) -> Timer:
        """Handle `message` once, in `delay_s` seconds."""
        return self._timers.after(delay_s, self._ticker(message))

    def deferred(self) -> Deferred:
        """A future answer of this life."""
        return Deferred(self.actor.name, self._open)

    def crash(self, error: Exception) -> None:
        """Crash before the next message; a handler that is waiting is interrupted, since what failed may be what it
        waits for."""
        if self._ending:
            self._observer.cleanup_failed(self.actor.name, error)
            return
        self._mailbox.put_crash(error)
        if self._handling and self._host is not asyncio.current_task() and self.interrupted_by is None:
            self.interrupted_by = error
            if self._host is not None:
                self._host.cancel()

    # ---- the life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Run `on_start` and open the inputs. When it raises, nothing is left open."""
        try:
            await self.actor.on_start()
            for number, stream in enumerate(self.actor.inputs()):
                intake = Intake(self._mailbox, self._loop)
                task: asyncio.Task[object] = self._loop.create_task(
                    intake.run(stream), name=f"{self.actor.name}/input {number}"
                )
                self._intakes.add(task)
                task.add_done_callback(self._task_done)
        except BaseException:
            await self.release()
            raise

    async def serve(self) -> None:
        """Handle messages until the mailbox is closed and empty, or until one raises."""
        mailbox, on_message, now = self._mailbox, self.actor.on_message, self._timers.now
        signals, crashes, messages, take = mailbox.signals, mailbox.crashes, mailbox.messages, mailbox.take
        turn = MESSAGES_PER_TURN
        while True:
            if signals:
                message = signals.popleft()
            elif crashes:
                raise crashes.popleft()
            elif messages:
                message = take()
            elif mailbox.closed:
                return
            else:
                turn = MESSAGES_PER_TURN
                await mailbox.arrival()
                continue
            self._handling = True
            try:
                if isinstance(message, Envelope):
                    await self._open_envelope(message)
                else:
                    answer = await on_message(message)
                    if isinstance(answer, Deferred):
                        answer.detach(self._unanswered)
            except asyncio.CancelledError:
                if self._host is not None and self._host.cancelling():
                    raise
                raise self._cancelled_inside() from None
            finally:
                self._handling = False
            self.handled += 1
            self.progress_s = now()
            turn -= 1
            if not turn:
                turn = MESSAGES_PER_TURN
                await asyncio.sleep(0)

    def stop_feeding(self) -> None:
        """Let timers and inputs add nothing more, so that the mailbox can run empty."""
        self._draining = True
        for timer in self._repeating:
            timer.cancel()
        self._repeating.clear()
        for task in self._intakes:
            task.cancel()

    async def release(self) -> None:
        """End inputs, timers and tasks, and remove from the mailbox what this life has read ahead."""
        self._ending = True
        self.stop_feeding()
        await self._cancel(self._intakes)
        await self._cancel(self._tasks)
        self._mailbox.discard((Pack, Tick))
        self._mailbox.crashes.clear()

    def abandon_answers(self) -> None:
        """Fail the answers that are still open: they will never be given."""
        for deferred in tuple(self._open):
            deferred.abandon()

    # ---- internal ---------------------------------------------------------------------------------------------------

    async def _open_envelope(self, envelope: Envelope) -> None:
        if isinstance(envelope, Question):
            await self._answer(envelope)
        elif isinstance(envelope, Pack):
            envelope.intake.taken()
            await self.actor.on_pack(envelope.pack)
        elif isinstance(envelope, Tick):
            envelope.waiting = False
            answer = await self.actor.on_message(envelope.message)
            if isinstance(answer, Deferred):
                answer.detach(self._unanswered)

    async def _answer(self, question: Question) -> None:
        if question.future.done():  # the sender has given up: the request is not processed
            return
        try:
            answer = await self.actor.on_message(question.message)
        except TidewalError as error:
            question.fail(error)
        except Exception as error:
            question.fail(error)
            raise
        except asyncio.CancelledError:
            if self._host is not None and self._host.cancelling():
                question.fail(self.interrupted_by or self._mailbox.stopped())
                raise
            question.fail(self._cancelled_inside())
        else:
            if isinstance(answer, Deferred):
                answer.attach(question)
            else:
                question.answer(answer)

    def _ticker(self, message: object) -> Callable[[], None]:
        tick = Tick(message)

        def put() -> None:
            if not tick.waiting and not self._draining:
                tick.waiting = True
                self._mailbox.put_unbounded(tick)

        return put

    def _unanswered(self, error: Exception) -> None:
        self._observer.unanswered(self.actor.name, error)

    def _cancelled_inside(self) -> HandlerFailed:
        name = self.actor.name
        return HandlerFailed(f"{name} awaited something that was cancelled", actor=name, error="CancelledError")

    def _task_done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        self._intakes.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Exception):
            self.crash(error)

    async def _cancel(self, tasks: set[asyncio.Task[object]]) -> None:
        while tasks:
            waiting = tuple(tasks)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            tasks.difference_update(waiting)
