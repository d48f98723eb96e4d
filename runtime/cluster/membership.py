"""A process' own side of its membership: it registers, renews its lease, and knows when that is over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from math import inf

from ..clock import Clock
from ..errors import Fenced, PreconditionFailed, TidewalError
from ..ownership.lease import Lease
from ..replicated.records import Event
from ..waiting import ended
from .cluster_log import ClusterLog
from .state import NodeMember, Report

LEASE_S = 3.0
RENEW_S = 1.0
JOIN_PAUSE_S = 0.1  # before registering again, after an error that may pass

OnConfirmed = Callable[[float], None]


class NodeMembership:
    """The membership of this process, under the incarnation that is the `author` of `log`.

    The lease holds once a record of this process was *read back*, with no end of the membership before it in the log,
    and it holds for the member's `lease_ms` from the moment at which that record was *asked for*, by a clock that
    counts suspended time. So whatever the log delays, the lease is over before anyone who read that record may take it
    for over. A record that comes late extends the lease as far as it still can.

    `renew` is to be called every `RENEW_S` seconds, on a thread that a busy loop does not starve; it renews only while
    `may_renew` says that the loop has answered lately, and once the lease is over, only when the log was read to its
    end within a lease: a process that hangs, or that hears nothing, must not keep its channels. All else belongs to the
    log's loop, except `holds`.

    With `unwritten` a member that has the cluster to itself stores no renewals: it reads the log to its end instead.
    While that shows no other member, nobody has read of this one, so whoever may take its lease for over counts from a
    later moment than that of the reading.
    """

    def __init__(
        self,
        log: ClusterLog,
        clock: Clock,
        member: NodeMember,
        *,
        may_renew: Callable[[], bool] = lambda: True,
        report: Callable[[], Report] = dict[str, object],
        unwritten: bool = False,
    ) -> None:
        """`member` says what this process registers as; `report` returns what it says of itself with each renewal."""
        assert member.incarnation == log.author, "a process registers under the name that its records bear"
        self.member: NodeMember = member
        self.fenced: Fenced | None = None
        self._log, self._clock = log, clock
        self._may_renew, self._report, self._unwritten = may_renew, report, unwritten
        self._loop: asyncio.AbstractEventLoop  # that of `join`
        self._looking: asyncio.Task[None] | None = None
        self._lease = Lease(clock, member.lease_ms / 1000)
        self._asking = threading.Lock()
        self._number = 0
        self._asked_s: dict[int, float] = {}  # by the number of a record that was not read back yet
        self._registered = self._left = False
        self._ended = asyncio.Event()
        self._on_confirmed: list[OnConfirmed] = []
        log.observe(self._look)

    def holds(self) -> bool:
        """Whether this process may acknowledge and promise, as `ChannelOwner` asks. Callable from any thread."""
        return not self._left and self.fenced is None and self._lease.holds()

    def on_confirmed(self, call: OnConfirmed) -> None:
        """Call with the time at which a record of this process was asked for, when it is read back and counts."""
        self._on_confirmed.append(call)

    async def join(self, replaces: str = "") -> None:
        """Become a member. `replaces` names the incarnation that had the lock of this node's name before: its process
        is dead. Raises `Fenced` where this one was evicted meanwhile, and what has ended following the log."""
        self._check_not_ended()
        self._loop = asyncio.get_running_loop()
        while not self._registered:
            number = self._ask()
            event = {"kind": "register", **self.member.to_wire(), "number": number, "replaces": replaces}
            try:
                await self._log.propose(event)
            except PreconditionFailed:
                if not self._registered and self.fenced is None:  # it was evicted before it read its registration
                    self._end(Fenced(f"{self.member.incarnation} cannot become a member: it was one before"))
            except TidewalError as error:
                if not error.retryable:
                    raise
                await asyncio.sleep(JOIN_PAUSE_S)
            self._check_not_ended()

    def renew(self) -> None:
        """Ask for the lease anew, unless the loop hangs. Does not wait, and raises nothing: the next call tries again.
        From any thread."""
        if not self._registered or self._left or self.fenced is not None or not self._may_renew():
            return
        alone, holds = self._unwritten and self._is_alone(), self._lease.holds()
        if holds and not alone:
            self._write_renewal()
            return
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._begin_looking)

    def _write_renewal(self) -> None:
        with self._asking:
            try:
                self._log.submit(self._renewal(self._ask()))
            except TidewalError:
                return

    def _is_alone(self) -> bool:
        return len(self._log.cluster.members) <= 1

    def _begin_looking(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._read_to_the_end())

    async def _read_to_the_end(self) -> None:
        """Read the log to its end, and then renew the lease, without a record where the log need not be written and
        shows no other member."""
        asked_s = -inf
        while asked_s < self._oldest_s(self._clock.monotonic()):  # what took longer says nothing of now
            asked_s = self._clock.monotonic()
            try:
                await self._log.catch_up()
            except TidewalError:  # the next call tries again
                return
        if self._left or self.fenced is not None:
            return
        if self._unwritten and self._is_alone():
            self._confirm(asked_s)
        else:
            self._write_renewal()

    async def drain(self) -> None:
        """Say that this member is about to leave: it gets nothing new. Raises what the log raises."""
        if self._registered and self.fenced is None:
            await self._log.propose({"kind": "drain", "incarnation": self.member.incarnation})

    async def leave(self) -> None:
        """End the membership. Nothing may rest on the lease any more: what was owned was released before. Raises what
        the log raises; then the end of the lease is found by others."""
        self._left = True
        if self._looking is not None:
            await ended(self._looking)
        if self._registered and self.fenced is None:
            await self._log.propose({"kind": "leave", "incarnation": self.member.incarnation})

    async def until_fenced(self) -> Fenced:
        """Wait until the membership has ended by others, and return with which error."""
        await self._ended.wait()
        assert self.fenced is not None
        return self.fenced

    # ---- asking and reading back ------------------------------------------------------------------------------------

    def _ask(self) -> int:
        """The number of a new record that is about to be asked for."""
        now = self._clock.monotonic()
        self._number += 1
        self._asked_s = {number: asked for number, asked in list(self._asked_s.items()) if asked >= self._oldest_s(now)}
        self._asked_s[self._number] = now
        return self._number

    def _oldest_s(self, now: float) -> float:
        """What was asked for before this gives no lease any more."""
        return now - self.member.lease_ms / 1000

    def _renewal(self, number: int) -> Event:
        return {
            "kind": "renew",
            "incarnation": self.member.incarnation,
            "number": number,
            "report": dict(self._report()),
        }

    def _look(self, _: Event | None) -> None:
        """The log was read on: see what it says of this process. One look after each record, so that a renewal behind
        the end is never taken for one before it."""
        present = self._log.cluster.members.get(self.member.incarnation)
        if present is None:
            if self._registered and self.fenced is None:
                self._end(
                    Fenced(f"{self.member.incarnation} is no member of the cluster any more: its lease was ended")
                )
            return
        self._registered = True
        asked_s = self._asked_s.pop(present.number, None)
        if asked_s is not None:
            self._confirm(asked_s)

    def _confirm(self, asked_s: float) -> None:
        self._lease.renew(asked_s)
        for call in self._on_confirmed:
            call(asked_s)

    def _end(self, error: Fenced) -> None:
        self.fenced = error
        self._ended.set()

    def _check_not_ended(self) -> None:
        if self.fenced is not None:
            raise self.fenced
