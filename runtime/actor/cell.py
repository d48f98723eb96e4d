"""One actor in its system: one mailbox, and the lives that follow one another in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ..errors import ActorStopped, DeadlineExceeded
from ..logging_context import ROLE
from .actor import Actor
from .life import Life
from .mailbox import Mailbox
from .ref import ActorRef
from .supervision import Intensity

if TYPE_CHECKING:
    from .system import ActorSystem


class ActorState(Enum):
    """The state of an actor between its spawning and its end."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ActorStatus:
    """The status of an actor. `idle_s` is the time since it last finished a message; with a `mailbox_depth` above 0
    that is the time it has been stuck."""

    name: str
    state: ActorState
    restarts: int
    mailbox_depth: int
    handled: int
    idle_s: float


class Cell:
    """Starts an actor, restarts it as its supervision says, and ends it. Owned by one `ActorSystem`."""

    def __init__(
        self,
        system: ActorSystem,
        name: str,
        factory: Callable[[], Actor],
        mailbox: Mailbox,
        intensity: Intensity,
    ) -> None:
        self.name = name
        self.mailbox = mailbox
        self.state: ActorState = ActorState.STARTING
        self.restarts: int = 0
        self.ref: ActorRef = ActorRef(self, system)
        self._system = system
        self._factory = factory
        self._intensity = intensity
        self._life: Life | None = None
        self._handled_before = 0
        self._cut = False
        self._pause: asyncio.Future[None] | None = None
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.task: asyncio.Task[None] = loop.create_task(self._run(), name=name)
        self.task.add_done_callback(self._task_done)

    def status(self) -> ActorStatus:
        """The status as of now."""
        life = self._life
        handled = self._handled_before + (life.handled if life else 0)
        idle_s = self._system.timers.now() - life.progress_s if life else 0.0
        depth = len(self.mailbox.messages) + len(self.mailbox.signals)
        return ActorStatus(self.name, self.state, self.restarts, depth, handled, idle_s)

    def request_stop(self) -> None:
        """Take no more messages, and end once those in the mailbox are handled."""
        if self.state in (ActorState.STARTING, ActorState.RUNNING):
            self.state = ActorState.STOPPING
        self.mailbox.close()
        if self._life is not None:
            self._life.stop_feeding()
        self._end_pause()

    async def stop(self, deadline_s: float, grace_s: float) -> None:
        """Stop, and wait for the end. After `deadline_s` the handler is cancelled; `on_stop` then has `grace_s`.

        Raises what the last messages or `on_stop` raised, or `DeadlineExceeded` if the actor does not end even then.
        """
        self.request_stop()
        timers = self._system.timers
        limits = [timers.after(deadline_s, self.cancel), timers.after(deadline_s + grace_s, self._give_up_waiting)]
        try:
            await asyncio.shield(self.ended)
        finally:
            if self.ended.done():
                for limit in limits:
                    limit.cancel()

    def cancel(self) -> None:
        """End now: the handler is cancelled, waiting messages are dropped, `on_stop` is called."""
        self.request_stop()
        self._cut = True
        self.task.cancel()

    def _give_up_waiting(self) -> None:
        self.task.cancel()
        if not self.ended.done():
            error = DeadlineExceeded(f"{self.name} does not stop, although it was cancelled", actor=self.name)
            self.ended.set_exception(error)

    # ---- the supervised run -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        problem: BaseException | None = None
        ROLE.set(self.name)  # of this task, and of all that it starts
        try:
            problem = await self._lives()
        except asyncio.CancelledError:
            if not self._cut:
                raise
        except Exception as error:  # not the actor's: its supervision has handled those
            self.state, problem = ActorState.FAILED, error
            self._system.escalate(self.name, error)
        finally:
            self._close(problem)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # at most an exit (KeyboardInterrupt, SystemExit), which has passed through the loop

    async def _lives(self) -> BaseException | None:
        """Run one life after another until stopped or given up. Returns what kept the stop from being clean: the error
        of a crash or of an `on_stop`."""
        while True:
            error, cleanup_error = await self._live()
            if error is None:
                return cleanup_error
            if cleanup_error is not None:
                self._system.observer.cleanup_failed(self.name, cleanup_error)
            if not self.started.done():
                self.started.set_exception(error)
                return None
            if self.mailbox.closed:
                return error
            pause_s = self._intensity.pause_after_crash(self._system.timers.now())
            self._system.observer.crashed(self.name, error, pause_s)
            if pause_s is None:
                self.state = ActorState.FAILED
                self._system.escalate(self.name, error)
                return None
            self.state = ActorState.RESTARTING
            await self._wait(pause_s)
            if self.mailbox.closed:
                return None
            self.restarts += 1

    async def _live(self) -> tuple[Exception | None, Exception | None]:
        """Run one life. Returns the error that it crashed with, and the one that its cleanup raised."""
        try:
            actor = self._factory()
            life = self._life = self._equip(actor)
            await life.start()
        except Exception as error:
            return error, None
        if self.mailbox.closed:
            life.stop_feeding()
        else:
            self.state = ActorState.RUNNING
            if self.restarts:
                self._system.observer.restarted(self.name, self.restarts)
        if not self.started.done():
            self.started.set_result(None)
        crash: Exception | None = None
        cancelled: asyncio.CancelledError | None = None
        try:
            await life.serve()
        except Exception as error:
            crash = error
        except asyncio.CancelledError as error:
            if life.interrupted_by is not None:
                crash = life.interrupted_by
            else:
                cancelled = error
        if life.interrupted_by is not None or self._cut:
            self.task.uncancel()
        cleanup_error = await self._end(life)
        if cancelled is not None and not self._cut:
            raise cancelled
        return crash, cleanup_error

    async def _end(self, life: Life) -> Exception | None:
        try:
            await life.release()
            await life.actor.on_stop()
        except Exception as error:
            return error
        finally:
            life.abandon_answers()
            self._handled_before += life.handled
            self._life = None
        return None

    def _equip(self, actor: Actor) -> Life:
        life = Life(actor, self.mailbox, self._system.timers, self._system.observer, self.request_stop)
        if type(actor).weigh is not Actor.weigh and self.restarts == 0:
            self.mailbox.weigh = actor.weigh
        actor.name, actor.system, actor.ref = self.name, self._system, self.ref
        actor._life = life  # pyright: ignore[reportPrivateUsage] -- set here only, read by the actor's own helpers
        return life

    async def _wait(self, pause_s: float) -> None:
        self._pause = asyncio.get_running_loop().create_future()
        timer = self._system.timers.after(pause_s, self._end_pause)
        try:
            await self._pause
        finally:
            timer.cancel()
            self._pause = None

    def _end_pause(self) -> None:
        if self._pause is not None and not self._pause.done():
            self._pause.set_result(None)

    def _close(self, problem: BaseException | None) -> None:
        if self.state is not ActorState.FAILED:
            self.state = ActorState.STOPPED
        self.mailbox.close()
        dropped = self.mailbox.abandon(self.mailbox.stopped())
        if dropped:
            self._system.observer.dropped(self.name, dropped)
        stopped = ActorStopped(f"{self.name} ended before it had started", actor=self.name)
        for future, error in ((self.started, stopped), (self.ended, problem)):
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
                future.exception()  # marked as retrieved: it was reported, so it is not lost without a waiting task
        self._system.forget(self)
