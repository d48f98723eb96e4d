"""Try again what a handler of a consumer group could not process, and make a dead letter of it in the end.

Attempts are counted with the group's position, so that a handler which ends its process reaches the limit, too: before
the first batch of an assignment epoch, and before each attempt after a failed one, the member stores the id of the
first entry and the number of the attempt. From the second attempt on the entries of a batch are processed one by one,
each acknowledged by itself, so that its good ones are not lost with a bad one. Meanwhile the channel is paused, and
nothing passes the batch; the other channels go on.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import isawaitable
from typing import Generic, NamedTuple, cast
from weakref import WeakKeyDictionary

import msgpack

from ..clock import HybridClock
from ..errors import AckTimeout, Fenced, InvalidRequest, MessageTooLarge, TidewalError
from ..log.record import DECODE_ERRORS
from ..log.wal import Append, Wal
from ..metrics.metrics import Metrics
from .ack_timer import ack_timer
from .group_letters import GroupLetters
from .metadata_layers import Layer, unwrap, wrap
from .nack import Nack
from .retry_policy import RetryPolicy
from .work import (
    Batch,
    D,
    Left,
    LogAway,
    Member,
    check_awaitable,
    ends_once_closed,
    has_lost,
    is_acknowledged,
    of_the_log,
    outputs_of,
)

TURN_S = 1.0  # for how long the units of a batch that is held back are processed before other channels have their turn
BETWEEN_TURNS_S = 0.001
UNCOUNT_S = 2.0  # for how long an end that is no attempt's fault waits until the attempt is taken back

_log = logging.getLogger("tidewal.groups")

Complete = Callable[[D, Sequence[Append], bytes | None], Awaitable[None]]
Prepare = Callable[[D], Awaitable[None]]
Discard = Callable[[D], bool]


# By member and channel, attempts that may be stored as begun and do not count: the handler was not called, or not at
# fault. To take one back durably may fail, and a member goes on in a later call of `process`: they outlive `Retries`.
_excused: WeakKeyDictionary[object, dict[str, set[Attempts]]] = WeakKeyDictionary()


class _HandlerRaised(Exception):
    """The handler raised `error`, or what it returned did."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Attempts(NamedTuple):
    """How many attempts were begun at what begins with the entry `id`; `alone`: that was no more than one unit."""

    id: bytes = b""
    begun: int = 0
    alone: bool = True

    def to_bytes(self) -> bytes:
        """The wire form; b"" for none."""
        return cast(bytes, msgpack.packb(self)) if self.begun else b""

    @classmethod
    def from_bytes(cls, data: bytes) -> Attempts:
        """What `to_bytes` wrote; none for anything else."""
        with suppress(*DECODE_ERRORS):
            id, begun, alone = cast("list[object]", msgpack.unpackb(data))
            if isinstance(id, bytes) and type(begun) is int and type(alone) is bool:
                return cls(id, begun, alone)
        return cls()


@dataclass(slots=True, eq=False)
class _Held(Generic[D]):
    """A batch that is held back: its units in order, the number of attempts made at the first of them, the last error
    (None: its process ended), and when to go on."""

    units: deque[D]
    made: int
    error: Exception | None
    due: float
    waits: int = 0  # attempts that did not count, in a row
    turn_ends: float = 0.0
    goes_on: bool = True  # with the next unit in this turn


class Retries(Generic[D]):
    """Retries for one member. `complete` appends the outputs of a batch and acknowledges it, with metadata (None leaves
    what is stored). `prepare` comes before each attempt, and its errors are not the handler's. `discard` forgets what
    an attempt that failed has changed; where that takes back more than the batch, it gives all of it back to the member
    and returns False."""

    def __init__(
        self,
        wal: Wal,
        member: Member[D],
        handle: Callable[[D], Awaitable[Sequence[Append] | None]],
        complete: Complete[D],
        policy: RetryPolicy,
        metrics: Metrics | None,
        clock: HybridClock,
        *,
        prepare: Prepare[D] | None = None,
        discard: Discard[D] | None = None,
    ) -> None:
        self._wal, self._member, self._handle, self._complete = wal, member, handle, complete
        self._prepare, self._discard = prepare, discard
        self._policy, self._metrics = policy, metrics
        self._letters = GroupLetters(wal, member.group, policy.dead_letters, clock)
        self._chance = random.Random(policy.seed)
        self._held: dict[str, _Held[D]] = {}
        self._errors: dict[str, tuple[bytes, Exception]] = {}  # of entries that went back: the last error, by channel
        self._epochs: dict[str, int] = {}  # the assignment epochs whose first batch was counted
        self._retried = None if metrics is None else metrics.counter("wal_group_retry_total", group=member.group)

    async def open(self) -> None:
        """Create the channel of dead letters where it is missing. Raises `Left` on a closed log."""
        with ends_once_closed():
            await self._letters.open()

    @property
    def due(self) -> float | None:
        """When, by the loop's clock, the next attempt is due; None while nothing is held back."""
        return min((held.due for held in self._held.values()), default=None)

    async def work(self, delivered: D) -> bool:
        """Process a batch that was delivered now. Returns whether it is done; if not, it is held back."""
        self._held.pop(delivered.channel, None)  # of an assignment epoch that is over
        id, error = self._errors.pop(delivered.channel, (b"", None))
        error = error if id == delivered.first else None
        before = await self._begun(delivered)
        if before.begun:
            made = before.begun if before.alone else 0  # which of several ended the process is not known
            self._hold(_Held(deque(delivered.parts()), made, error if made else None, self._now()))
            return await self._go_on(delivered.channel)
        try:
            await self._attempt(delivered, 1, None)
            return True
        except _HandlerRaised as failed:
            if not self._discarded(delivered):  # it goes back with what was before it: no attempt, and no delay
                self._count(failed.error)
                return False
            held = _Held(deque([delivered]), 0, None, 0.0)
            self._hold(held)
            try:
                await self._failed(held, failed.error)
            except BaseException:
                self._drop(delivered.channel)
                raise
            return False

    async def go_on(self) -> bool:
        """Make the attempts that are due. Returns whether a batch is done with them."""
        now = self._now()
        for channel in [channel for channel, held in self._held.items() if held.due <= now]:
            if await self._go_on(channel):
                return True
        return False

    def give_back(self) -> None:
        """Give back all that is held back."""
        for channel in list(self._held):
            self._drop(channel)

    # ---- attempts ---------------------------------------------------------------------------------------------------

    async def _begun(self, delivered: D) -> Attempts:
        """The attempts that earlier members have begun at what begins with this batch; only the first batch of an epoch
        can have any, and the first attempt at it is stored here."""
        if self._epochs.get(delivered.channel) == delivered.assignment_epoch:
            return Attempts()
        before, first = self._stored(delivered.channel), delivered.first
        if before in self._excused(delivered.channel):
            before = before._replace(begun=before.begun - 1)
        if before.id != first or not before.begun:
            before = Attempts()
            await self._begin(delivered, Attempts(first, 1, _alone(delivered)))
        self._epochs[delivered.channel] = delivered.assignment_epoch
        return before

    async def _go_on(self, channel: str) -> bool:
        """Process what is held back of the channel, for one turn. Returns whether all of it is done."""
        held = self._held[channel]
        held.turn_ends, held.goes_on = self._now() + TURN_S, True
        try:
            try:
                while held.goes_on:
                    await self._first_unit(held)
                    held.units.popleft()
                    held.made, held.error, held.waits = 0, None, 0
            except _HandlerRaised as failed:
                self._discarded(held.units[0])
                await self._failed(held, failed.error)
                return False
        except BaseException as error:
            self._drop(channel)
            if has_lost(error, channel):
                return False
            raise
        if held.units:
            held.due = self._now() + BETWEEN_TURNS_S
            return False
        del self._held[channel]
        self._member.resume(channel)
        return True

    async def _first_unit(self, held: _Held[D]) -> None:
        """Process the first unit of a held batch, or make dead letters of it."""
        unit = held.units[0]
        if is_acknowledged(self._member, unit):  # by its handler, which has failed behind its commit
            held.goes_on = len(held.units) > 1 and self._now() < held.turn_ends
            return
        if held.made >= self._policy.attempts or isinstance(held.error, self._policy.permanent):
            await self._give_up(held)
            return
        begins = Attempts(unit.first, held.made + 1, _alone(unit))
        if self._stored(unit.channel) != begins:
            await self._begin(unit, begins)
        if self._retried is not None:
            self._retried.inc()
        await self._attempt(unit, begins.begun, held)

    def _begin_next(self, held: _Held[D]) -> bytes:
        """The metadata with which the first unit is acknowledged: it begins the attempt at the next one, if that comes
        in this turn."""
        held.goes_on = len(held.units) > 1 and self._now() < held.turn_ends
        follows = Attempts(held.units[1].first, 1) if held.goes_on else Attempts()
        channel = held.units[0].channel
        self._excused(channel).add(follows)
        return self._metadata(channel, follows)

    async def _begin(self, unit: D, attempts: Attempts) -> None:
        """Store that an attempt begins."""
        self._excused(unit.channel).add(attempts)  # until it does: whether this was stored may not be known
        await self._store(unit, attempts)

    async def _attempt(self, unit: D, number: int, held: _Held[D] | None) -> None:
        """One attempt, at the first unit of `held` where that is given: its success begins what follows. Raises
        `_HandlerRaised` for the handler's errors, except for `Fenced`, and for outputs that no log takes."""
        excused = self._excused(unit.channel)
        try:
            if self._prepare is not None:
                await self._prepare(unit)
            excused.clear()
            try:
                async with ack_timer(self._policy.ack_timeout_s):
                    answer = self._handle(unit)
                    outputs = outputs_of(await answer) if isawaitable(answer) else ()
            except Exception as error:
                if isinstance(error, Fenced):
                    raise
                raise _HandlerRaised(error) from error
            check_awaitable(answer, self._handle)
            metadata = None if held is None else self._begin_next(held)
            try:
                await self._complete(unit, outputs, metadata)
            except (MessageTooLarge, InvalidRequest) as error:
                raise _HandlerRaised(error) from error
        except _HandlerRaised:
            raise
        except BaseException:  # a cancellation, or the log: that is not the entry's fault
            await self._excuse(unit, Attempts(unit.first, number, _alone(unit)))
            raise

    async def _excuse(self, unit: D, attempt: Attempts) -> None:
        """Take back that an attempt was begun: for this member, and durably where that can be."""
        self._excused(unit.channel).add(attempt)
        with suppress(TidewalError, TimeoutError, Left, LogAway):
            if self._stored(unit.channel) != attempt:
                return
            async with asyncio.timeout(UNCOUNT_S):
                await self._store(unit, attempt._replace(begun=attempt.begun - 1))

    async def _give_up(self, held: _Held[D]) -> None:
        unit, error = held.units[0], held.error
        reason = "crash" if error is None else "handler"
        message = "no process saw the end of the last attempt" if error is None else repr(error)
        _log.warning("group %s gives up %s: %s", self._member.group, _shown(unit), message)
        letters = [
            self._letters.letter(unit.channel, entry, reason, message, held.made)
            for entry in unit.handled
            if unit.channel != self._letters.channel  # a letter stays where it is
        ]
        metadata = self._begin_next(held)
        with of_the_log():
            if self._wal.capabilities.atomic_commits:
                await self._member.commit([unit], letters, metadata={unit.channel: metadata})
            else:
                await self._wal.append_many(letters)
                await self._member.acknowledge(unit, metadata=metadata)
        if self._metrics is not None:
            counter = self._metrics.counter("wal_group_dead_letter_total", group=self._member.group, reason=reason)
            counter.inc(len(unit.handled))

    # ---- holding back -----------------------------------------------------------------------------------------------

    def _hold(self, held: _Held[D]) -> None:
        self._held[held.units[0].channel] = held
        with suppress(Fenced):  # then the next attempt raises it
            self._member.pause(held.units[0])

    async def _failed(self, held: _Held[D], error: Exception) -> None:
        """Note a failed attempt at the first unit."""
        unit = held.units[0]
        _log.info("group %s: attempt %d at %s failed: %r", self._member.group, held.made + 1, _shown(unit), error)
        self._count(error)
        if self._policy.is_transient(error):
            held.waits += 1
            held.due = self._after(held.waits, error)
            await self._excuse(unit, Attempts(unit.first, held.made + 1, _alone(unit)))
        elif not _alone(unit):  # which of them failed is not known
            held.units.extendleft(reversed(held.units.popleft().parts()))
            held.made, held.error, held.waits = 0, None, 0
            held.due = self._after(1, error)
        else:
            held.made, held.error, held.waits = held.made + 1, error, 0
            over = held.made >= self._policy.attempts or isinstance(error, self._policy.permanent)
            held.due = self._now() if over else self._after(held.made, error)

    def _count(self, error: Exception) -> None:
        if self._metrics is not None and isinstance(error, AckTimeout):
            self._metrics.counter("wal_group_ack_timeout_total", group=self._member.group).inc()
        elif self._metrics is not None and isinstance(error, Nack):
            self._metrics.counter("wal_group_nack_total", group=self._member.group).inc()

    def _drop(self, channel: str) -> None:
        held = self._held.pop(channel, None)
        if held is not None:
            if held.error is not None:
                self._errors[channel] = held.units[0].first, held.error
            self._discarded(held.units[0])
            self._member.redeliver(held.units[0])

    def _discarded(self, unit: D) -> bool:
        return self._discard is None or self._discard(unit)

    def _excused(self, channel: str) -> set[Attempts]:
        return _excused.setdefault(self._member, {}).setdefault(channel, set())

    # ---- what is stored ---------------------------------------------------------------------------------------------

    def _stored(self, channel: str) -> Attempts:
        return Attempts.from_bytes(unwrap(Layer.ATTEMPTS, self._member.metadata(channel))[0])

    async def _store(self, unit: D, attempts: Attempts) -> None:
        with of_the_log():
            await self._member.annotate(unit, self._metadata(unit.channel, attempts))

    def _metadata(self, channel: str, attempts: Attempts) -> bytes:
        _, inside = unwrap(Layer.ATTEMPTS, self._member.metadata(channel))
        return wrap(Layer.ATTEMPTS, attempts.to_bytes(), inside)

    def _after(self, attempt: int, error: Exception) -> float:
        asked_s = error.delay_s if isinstance(error, Nack) else None
        return self._now() + (self._policy.pause_s(attempt, self._chance) if asked_s is None else asked_s)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _alone(unit: Batch) -> bool:
    return len(unit.parts()) == 1


def _shown(unit: Batch) -> str:
    return f"{unit.channel}, entry {unit.first.hex()}"
