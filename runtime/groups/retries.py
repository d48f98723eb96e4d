"""Try again what a handler of a consumer group could not process, and make a dead letter of it in the end.

Attempts are counted with the group's position, so that a handler which ends its process reaches the limit, too: before
the first batch of an assignment epoch, and before each attempt after a failed one, the member stores the id of the
first entry and the number of the attempt. From the second attempt on the entries of a batch are processed one by one,
each acknowledged by itself, so that its good ones are not lost with a bad one. Meanwhile the channel is paused, and
nothing passes the batch; the other channels go on.

Of a member with a retry topic, an entry that has failed alone is put there in the place of that, as a message that is
due later, and the channel goes on. The decision is stored with the position before the copy is sent, with the copy's
id: whichever member gets the entry next calls no handler, but sends the copy again under that id, which owners take
once. So an entry is never both processed and tried again. Each decision has an id that no other one has, so that none
rests on members' clocks, nor on what positions say that were moved back.
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
from ..errors import AckTimeout, Fenced, InvalidRequest, MessageTooLarge, OutcomeUnknown, TidewalError
from ..log.record import DECODE_ERRORS
from ..log.wal import Append, Wal
from ..metrics.metrics import Metrics
from .ack_timer import ack_timer
from .error_text import error_text
from .group_letters import GroupLetters
from .metadata_layers import Layer, unwrap, wrap
from .nack import Nack
from .record_member import RecordMember
from .retry_policy import GROUP_DEAD_LETTERS, RetryPolicy
from .retry_topic import WithRetryTopic, retry_topic_of
from .work import (
    Batch,
    D,
    Left,
    LogAway,
    Member,
    check_awaitable,
    check_no_ack_timeout,
    ends_once_closed,
    has_lost,
    is_acknowledged,
    of_the_log,
    outputs_of,
)

TURN_S = 1.0  # for how long the units of a batch that is held back are processed before other channels have their turn
BETWEEN_TURNS_S = 0.001
COPY_S = 0.5  # for how long all channels wait until a copy is in the retry topic; behind that its own does
COPY_AGAIN_S = 0.25  # between two looks whether it is
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
    """How many attempts were begun at what begins with the entry `id`; `alone`: that was no more than one unit. With a
    `copy_id` these are over, and the entry goes to the retry topic as that copy."""

    id: bytes = b""
    begun: int = 0
    alone: bool = True
    copy_id: bytes = b""

    def to_bytes(self) -> bytes:
        """The wire form; b"" for none."""
        if not self.begun and not self.copy_id:
            return b""
        return cast(bytes, msgpack.packb(self if self.copy_id else self[:3]))

    @classmethod
    def from_bytes(cls, data: bytes) -> Attempts:
        """What `to_bytes` wrote; none for anything else."""
        with suppress(*DECODE_ERRORS):
            id, begun, alone, *more = cast("list[object]", msgpack.unpackb(data))
            copy_id = more[0] if more else b""
            if isinstance(id, bytes) and type(begun) is int and type(alone) is bool and isinstance(copy_id, bytes):
                return cls(id, begun, alone, copy_id)
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
    copy_id: bytes = b""  # as which the first unit goes to the retry topic; b"": it does not
    delay_s: float = 0.0  # ... to be due after so long
    refused: bool = False  # the retry topic does not take the first unit
    sending: asyncio.Task[None] | None = None  # the copy of the first unit
    began: float = 0.0  # when that was begun to be sent

    def begin_unit(self, made: int) -> None:
        """Another unit is the first one, at which so many attempts were made before it was delivered."""
        self.made, self.error, self.waits = made, None, 0
        self.copy_id, self.refused = b"", False

    def give_up_sending(self) -> None:
        """The copy is sent again, by the member that has the channel next."""
        if self.sending is not None:
            self.sending.cancel()


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
        check_no_ack_timeout(member)
        self._wal, self._member, self._handle, self._complete = wal, member, handle, complete
        self._prepare, self._discard = prepare, discard
        self._policy, self._metrics = policy, metrics
        self._retry_topic = retry_topic_of(member)
        if self._retry_topic is not None and discard is not None:
            raise InvalidRequest(
                "state by key is with a partition, and a retry topic has others: subscribe without one"
            )
        own = member.dead_letters if isinstance(member, RecordMember) else GROUP_DEAD_LETTERS
        self._letters = GroupLetters(wal, member.group, policy.dead_letters or own, clock)
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
        if over := self._held.pop(delivered.channel, None):  # of an assignment epoch that is over
            over.give_up_sending()
        id, error = self._errors.pop(delivered.channel, (b"", None))
        error = error if id == delivered.first else None
        before = await self._begun(delivered)
        made = self._made(delivered)
        if before.begun or before.copy_id:
            parts = deque(delivered.parts())
            made = before.begun if before.alone else self._made(parts[0])  # which of several failed is not known
            held = _Held(parts, made, error if made or before.copy_id else None, self._now())
            held.copy_id, held.delay_s = before.copy_id, self._pause_s(max(1, made), error)
            self._hold(held)
            return await self._go_on(delivered.channel)
        try:
            await self._attempt(delivered, made + 1, None)
            return True
        except _HandlerRaised as failed:
            if not self._discarded(delivered):  # it goes back with what was before it: no attempt, and no delay
                self._count(failed.error)
                return False
            held = _Held(deque([delivered]), made, None, 0.0)
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
        before, first = self._stored(delivered.channel), delivered.first
        if before.copy_id and before.id == first and self._retry_topic is not None:
            return before  # its copy may be on its way
        if self._epochs.get(delivered.channel) == delivered.assignment_epoch:
            return Attempts()
        if before in self._excused(delivered.channel):
            before = before._replace(begun=before.begun - 1)
        if before.id != first or not before.begun:
            before = Attempts()
            await self._begin(delivered, Attempts(first, self._made(delivered) + 1, _alone(delivered)))
        self._epochs[delivered.channel] = delivered.assignment_epoch
        return before

    async def _go_on(self, channel: str) -> bool:
        """Process what is held back of the channel, for one turn. Returns whether all of it is done."""
        held = self._held[channel]
        held.turn_ends, held.goes_on = self._now() + TURN_S, True
        try:
            try:
                while held.goes_on:
                    if not await self._first_unit(held):
                        return False
                    held.units.popleft()
                    held.begin_unit(self._made(held.units[0]) if held.units else 0)
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

    async def _first_unit(self, held: _Held[D]) -> bool:
        """Process the first unit of a held batch, put it into the retry topic, or make dead letters of it. Returns
        whether it is done."""
        unit = held.units[0]
        if is_acknowledged(self._member, unit):  # by its handler, which has failed behind its commit
            held.goes_on = len(held.units) > 1 and self._now() < held.turn_ends
            return True
        if held.copy_id and self._retry_topic is not None:
            return await self._put_aside(held, self._retry_topic)
        over = held.made >= self._policy.attempts and held.made > self._made(
            unit
        )  # at least one since it was delivered
        if over or isinstance(held.error, self._policy.permanent):
            await self._give_up(held)
            return True
        begins = Attempts(unit.first, held.made + 1, _alone(unit))
        if self._stored(unit.channel) != begins:
            await self._begin(unit, begins)
        if self._retried is not None:
            self._retried.inc()
        await self._attempt(unit, begins.begun, held)
        return True

    def _begin_next(self, held: _Held[D]) -> bytes:
        """The metadata with which the first unit is acknowledged: it begins the attempt at the next one, if that comes
        in this turn."""
        held.goes_on = len(held.units) > 1 and self._now() < held.turn_ends
        follows = Attempts(held.units[1].first, self._made(held.units[1]) + 1) if held.goes_on else Attempts()
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
        message = "no process saw the end of the last attempt" if error is None else error_text(error)
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

    async def _put_aside(self, held: _Held[D], topic: WithRetryTopic[D]) -> bool:
        """Put the first unit into the retry topic and acknowledge it. Returns whether that is done: a unit that the
        topic does not take stays in its place."""
        unit = held.units[0]
        decided = Attempts(unit.first, held.made, True, held.copy_id)
        if self._stored(unit.channel) != decided:
            await self._store(unit, decided)
        try:
            with ends_once_closed():
                if not await self._sent(held, topic):
                    return False
        except (MessageTooLarge, InvalidRequest) as error:
            _log.warning("group %s tries %s again in its place: %s", self._member.group, _shown(unit), error)
            held.copy_id, held.refused, held.due = b"", True, self._now() + held.delay_s
            await self._store(unit, Attempts(unit.first, held.made))
            return False
        except OutcomeUnknown:  # it is never written; where the channel is another member's by now, to store this fails
            held.copy_id, held.due = topic.next_copy_id(unit), self._now()
            return False
        except TidewalError as error:
            if error.retryable or error.fields.get("outcome_unknown"):  # it is sent again as the same copy
                raise LogAway(error, held.began) from error
            raise
        metadata = self._begin_next(held)
        with of_the_log():
            await self._member.acknowledge(unit, metadata=metadata)
        if self._metrics is not None:
            self._metrics.counter("wal_group_retry_topic_total", group=self._member.group).inc(len(unit.handled))
        return True

    async def _sent(self, held: _Held[D], topic: WithRetryTopic[D]) -> bool:
        """Send the copy of the first unit. Returns whether it is there: where its owner, or the log, does not answer,
        the channel waits for it, and the others go on."""
        if held.sending is None:
            unit, error = held.units[0], held.error
            reason = "the member that had the error is gone" if error is None else error_text(error)
            copy = topic.send_to_retry_topic(
                unit,
                failed=held.made - self._made(unit),
                reason=reason,
                delay_s=held.delay_s,
                copy_id=held.copy_id,
            )
            held.sending, held.began = asyncio.ensure_future(copy), self._now()
            held.sending.add_done_callback(_look_at)
            await asyncio.wait([held.sending], timeout=COPY_S)
        if not held.sending.done():
            held.due = self._now() + COPY_AGAIN_S
            return False
        sent, held.sending = held.sending, None
        await sent
        return True

    # ---- holding back -----------------------------------------------------------------------------------------------

    def _hold(self, held: _Held[D]) -> None:
        self._held[held.units[0].channel] = held
        with suppress(Fenced), ends_once_closed():  # then the next attempt raises it
            self._member.pause(held.units[0])

    async def _failed(self, held: _Held[D], error: Exception) -> None:
        """Note a failed attempt at the first unit."""
        unit, made = held.units[0], held.made
        text = error_text(error)
        _log.info("group %s: attempt %d at %s failed: %s", self._member.group, made + 1, _shown(unit), text)
        self._count(error)
        transient, alone = self._policy.is_transient(error), _alone(unit)
        given_back = self._retry_topic is not None and isinstance(error, Nack)
        if not alone and (given_back or not transient):  # which of them failed is not known
            held.units.extendleft(reversed(held.units.popleft().parts()))
            held.begin_unit(self._made(held.units[0]))
            held.due = self._after(1, error) if self._retry_topic is None else self._now()
        elif transient:
            held.waits += 1
            held.due = self._after(held.waits, error)
            if given_back:
                held.error = error
                self._decide_aside(held, error, held.waits)
        else:
            held.made, held.error, held.waits = made + 1, error, 0
            over = held.made >= self._policy.attempts or isinstance(error, self._policy.permanent)
            held.due = self._now() if over else self._after(held.made, error)
            if not over:
                self._decide_aside(held, error, held.made)
        if transient:
            await self._excuse(unit, Attempts(unit.first, made + 1, alone))

    def _decide_aside(self, held: _Held[D], error: Exception, attempt: int) -> None:
        """Let the first unit go to the retry topic, if there is one that takes it."""
        if self._retry_topic is not None and not held.refused:
            held.copy_id = self._retry_topic.next_copy_id(held.units[0])
            held.delay_s, held.due = self._pause_s(attempt, error), self._now()

    def _made(self, unit: D) -> int:
        """How many attempts were made at the unit before it came from the retry topic. Those of several units differ:
        attempts at them together count from 0, and for none of them."""
        return self._retry_topic.attempts_of(unit) if self._retry_topic is not None and _alone(unit) else 0

    def _count(self, error: Exception) -> None:
        if self._metrics is not None and isinstance(error, AckTimeout):
            self._metrics.counter("wal_group_ack_timeout_total", group=self._member.group).inc()
        elif self._metrics is not None and isinstance(error, Nack):
            self._metrics.counter("wal_group_nack_total", group=self._member.group).inc()

    def _drop(self, channel: str) -> None:
        held = self._held.pop(channel, None)
        if held is not None:
            held.give_up_sending()
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
        return self._now() + self._pause_s(attempt, error)

    def _pause_s(self, attempt: int, error: Exception | None) -> float:
        asked_s = error.delay_s if isinstance(error, Nack) else None
        return self._policy.pause_s(attempt, self._chance) if asked_s is None else asked_s

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _look_at(sent: asyncio.Task[None]) -> None:
    """What was given up is not said to have failed unseen."""
    if not sent.cancelled():
        sent.exception()


def _alone(unit: Batch) -> bool:
    return len(unit.parts()) == 1


def _shown(unit: Batch) -> str:
    return f"{unit.channel}, entry {unit.first.hex()}"
