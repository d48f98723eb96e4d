"""The actors of one event loop: spawned, supervised, watched and stopped together."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Protocol, cast

from ..arguments import checked
from ..clock import Clock, SystemClock
from ..errors import Closed, InvalidRequest
from .actor import Actor
from .cell import ActorState, ActorStatus, Cell
from .heartbeat import HeartbeatThread
from .life import Life
from .mailbox import Mailbox
from .observer import Observer
from .question import Deferred
from .ref import ActorRef
from .supervision import NEVER_RESTART, Intensity, Supervision
from .timers import Deadlines, Timers
from .typevars import AnswerT, AnswerT_co, MessageT, MessageT_contra
from .watchdog import Watchdog

MAILBOX_SIZE = 1024  # messages: actor.mailboxSize
MAILBOX_BYTES = 64 * 1024 * 1024  # actor.mailboxBytes
BLOCKED_AFTER_MS = 500  # actor.blockedAfterMs
STOP_DEADLINE_S = 10.0  # actor.stopDeadline: to drain a mailbox
STOP_GRACE_S = 5.0  # actor.stopGrace: to clean up after the deadline has passed


class Spawnable(Protocol[MessageT_contra, AnswerT_co]):
    """An `Actor`, by the types of its `on_message`: so `spawn` returns an `ActorRef` with the types that the override
    declares, also where the class says only `Actor`."""

    _life: Life  # of `Actor`: no other class is taken for one

    async def on_message(self, message: MessageT_contra, /) -> AnswerT_co | Deferred[AnswerT_co]: ...


class Escalation:
    """Whether an actor has given up: false until then, and awaitable until it becomes true."""

    def __init__(self) -> None:
        self.actor: str | None = None
        self.error: BaseException | None = None
        self._happened = asyncio.Event()

    def __bool__(self) -> bool:
        return self._happened.is_set()

    def __await__(self) -> Generator[object, None, Escalation]:
        return self.wait().__await__()

    async def wait(self) -> Escalation:
        """Wait until an actor gives up; `actor` and `error` then say which and why."""
        await self._happened.wait()
        return self

    def happen(self, actor: str, error: BaseException) -> None:
        """Record the first actor that gave up. For the runtime."""
        if not self:
            self.actor, self.error = actor, error
            self._happened.set()


class ActorSystem:
    """An async context manager; leaving it stops all actors, the youngest first.

    Timers and deadlines run on the loop's time; `clock` is that of the heartbeat thread and the watchdog. `random_seed`
    decides the jitter of restarts. With `threads=False` heartbeats run on the loop and there is no watchdog, so that a
    run on a virtual loop is deterministic. `blocked_after_ms=None` leaves the watchdog out. The other parameters are
    the settings of the same name, in messages, bytes and seconds.
    """

    @checked
    def __init__(
        self,
        *,
        clock: Clock | None = None,
        mailbox_size: int = MAILBOX_SIZE,
        mailbox_bytes: int = MAILBOX_BYTES,
        blocked_after_ms: int | None = BLOCKED_AFTER_MS,
        stop_deadline_s: float = STOP_DEADLINE_S,
        stop_grace_s: float = STOP_GRACE_S,
        random_seed: int = 0,
        threads: bool = True,
        observer: Observer | None = None,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self.observer: Observer = observer or Observer()
        self.heartbeat: HeartbeatThread = HeartbeatThread(self.clock, on_error=self.observer.heartbeat_failed)
        self._mailbox_size = mailbox_size
        self._mailbox_bytes = mailbox_bytes
        self._blocked_after_ms = blocked_after_ms
        self._stop_deadline_s = stop_deadline_s
        self._stop_grace_s = stop_grace_s
        self._random = random.Random(random_seed)
        self._threads = threads
        self._cells: dict[str, Cell] = {}
        self._watchdog: Watchdog | None = None
        self._open = False

    async def __aenter__(self) -> ActorSystem:
        loop = asyncio.get_running_loop()
        self.loop = loop
        self.timers: Timers = Timers(loop)
        self.deadlines: Deadlines = Deadlines(self.timers)
        self.failed: Escalation = Escalation()
        self._open = True
        if self._threads:
            self.heartbeat.start()
            if self._blocked_after_ms is not None:
                self._watchdog = Watchdog(loop, self._blocked_after_ms, self.observer.blocked)
                self._watchdog.start()
        else:
            self.heartbeat.start(loop)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop all actors, the youngest first, then the heartbeat thread and the watchdog. A failed stop is reported,
        and raised after the others were stopped."""
        self._open = False
        problem: Exception | None = None
        try:
            for cell in reversed(tuple(self._cells.values())):
                try:
                    await cell.stop(self._stop_deadline_s, self._stop_grace_s)
                except Exception as error:
                    self.observer.cleanup_failed(cell.name, error)
                    problem = problem or error
        finally:
            self.timers.close()
            self.heartbeat.stop()
            if self._watchdog is not None:
                self._watchdog.stop()
        if problem is not None:
            raise problem

    @checked
    async def spawn(
        self,
        actor_or_factory: Spawnable[MessageT, AnswerT] | Callable[[], Spawnable[MessageT, AnswerT]],
        *,
        name: str,
        supervision: Supervision | None = None,
        mailbox_size: int | None = None,
    ) -> ActorRef[MessageT, AnswerT]:
        """Start an actor and wait for its `on_start`. Raises what the first `on_start` raises, and then keeps nothing;
        `InvalidRequest` for a name that is taken, `Closed` when the system does not run.

        A factory (or an `Actor` class) is called anew for each life. An instance has one life: if it crashes it gives
        up at once.
        """
        if not self._open:
            raise Closed("the actor system is not running; enter it with `async with`")
        holder = self._cells.get(name)
        if holder is not None and holder.state is not ActorState.FAILED:
            raise InvalidRequest(f"an actor named {name} is already running", actor=name)
        if isinstance(actor_or_factory, Actor):
            actor = cast("Actor", actor_or_factory)
            factory, rule = (lambda: actor), NEVER_RESTART
        else:
            factory, rule = cast("Callable[[], Actor]", actor_or_factory), supervision or Supervision()
        mailbox = Mailbox(name, self.loop, mailbox_size or self._mailbox_size, self._mailbox_bytes)
        cell = Cell(self, name, factory, mailbox, Intensity(rule, random.Random(self._random.random())))
        self._cells[name] = cell
        try:
            await asyncio.shield(cell.started)
        except asyncio.CancelledError:
            cell.cancel()
            raise
        return cell.ref

    @checked
    async def stop(self, ref: ActorRef, *, deadline_s: float | None = None) -> None:
        """Drain an actor and stop it: no new messages, waiting ones are handled, then `on_stop`.

        After `deadline_s` seconds the handler is cancelled and waiting messages are dropped. Raises what the last
        messages or `on_stop` raised, and `DeadlineExceeded` if the actor ignores even the cancellation.
        """
        if asyncio.current_task() is ref.cell.task:
            raise InvalidRequest(f"{ref.name} would wait for itself: call self.stop()", actor=ref.name)
        await ref.cell.stop(self._stop_deadline_s if deadline_s is None else deadline_s, self._stop_grace_s)

    def status(self) -> list[ActorStatus]:
        """One entry per actor that runs or has given up, in the order of spawning."""
        return [cell.status() for cell in self._cells.values()]

    @property
    def loop_lag_s(self) -> float:
        """How late the event loop runs callbacks that are due, in seconds; 0 without a watchdog."""
        return self._watchdog.lag_s if self._watchdog is not None else 0.0

    def escalate(self, actor: str, error: BaseException) -> None:
        """Record that an actor has given up. For the runtime."""
        self.failed.happen(actor, error)

    def forget(self, cell: Cell) -> None:
        """Remove an actor that has ended. For the runtime."""
        if cell.state is not ActorState.FAILED and self._cells.get(cell.name) is cell:
            del self._cells[cell.name]
