"""The writes at a door, in the order in which their clients sent them: those that wait, and those sent to their owners
and not answered yet."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from ...runtime.errors import (
    DeadlineExceeded,
    Overloaded,
    TidewalError,
    Unavailable,
    of_unknown_outcome,
)
from ...runtime.ownership import Appended
from ..write_requests import SendAgain, is_never_written

ROOM_S = 0.05  # until an owner that had no room is asked again
OVERHEAD_BYTES = 4096  # counted for each write that waits beside its rows, so that their number is bounded, too

LIMIT = "streamingNode.maxInflightBytes"

Send = Callable[[], "asyncio.Future[Appended]"]
LineKey = tuple[str, str]  # a producer and a pchannel


class ChannelTerms(Protocol):
    """What a door must know of the owners of pchannels."""

    def terms(self, channels: Iterable[str]) -> Hashable | None:
        """None where not all of `channels` are open now; otherwise a value that is another one once one of them has got
        another owner or another term, and once its owner gives writes back (`SendAgain`): it changes no later than the
        first of their futures ends, for what was sent behind them may be given back, too."""
        ...

    def changed(self) -> Coroutine[Any, Any, object]:
        """Wait until channels are opened or closed after this call."""
        ...


class _Write:
    """A write at a door: it waits, or is with its owner (`sent`)."""

    __slots__ = (
        "alone",
        "channels",
        "deadline",
        "deadline_s",
        "may_be_written",
        "number",
        "places",
        "refusal",
        "send",
        "sent",
        "size",
        "turn",
        "waits_for",
    )

    def __init__(
        self, number: int, channels: Set[str], size: int, send: Send, deadline_s: float, *, alone: bool
    ) -> None:
        self.number = number  # by arrival
        self.alone = alone
        self.channels = channels
        self.size = size + OVERHEAD_BYTES
        self.send = send
        self.deadline_s = deadline_s
        self.deadline = asyncio.get_running_loop().time() + deadline_s
        self.places: list[_Place] = []
        self.sent: asyncio.Future[Appended] | None = None  # while it is with its owner
        self.turn: asyncio.Future[None] | None = None  # while it waits
        self.waits_for: Set[str] = frozenset()  # the channels on whose account it waits
        self.refusal: TidewalError | None = None  # of an owner that has not taken it, or has ended
        self.may_be_written = False  # by an owner that ended before it knew


class _Place:
    """The place of a write in one of its lines."""

    __slots__ = ("after", "before", "line", "terms", "write")

    def __init__(self, line: _Line, write: _Write) -> None:
        self.line = line
        self.write = write
        self.before: _Place | None = None
        self.after: _Place | None = None
        self.terms: Hashable | None = None  # of the channel, under which it was sent; None where it waits

    def in_the_way(self) -> _Write | None:
        """The nearest write in front that later ones may not pass."""
        if self.line.next is self:
            return None
        place = self.before
        while place is not None and place is not self.line.next and place.terms is not None:
            place = place.before
        return None if place is None else place.write


class _Line:
    """The writes of one producer for one channel, in the order of arrival. All before `next` were sent under `terms`,
    the last ones of the channel that were looked at; `next` itself was not."""

    __slots__ = ("channels", "first", "key", "last", "next", "terms")

    def __init__(self, key: LineKey) -> None:
        self.key = key
        self.channels = key[1:]
        self.first: _Place | None = None
        self.last: _Place | None = None
        self.next: _Place | None = None
        self.terms: Hashable | None = None

    def join(self, write: _Write) -> _Place:
        """Let a write stand at the end."""
        place = _Place(self, write)
        place.before, self.last = self.last, place
        if place.before is None:
            self.first = place
        else:
            place.before.after = place
        if self.next is None:
            self.next = place
        return place

    def leave(self, place: _Place) -> None:
        """Take a write out."""
        if place.before is None:
            self.first = place.after
        else:
            place.before.after = place.after
        if place.after is None:
            self.last = place.before
        else:
            place.after.before = place.before
        if self.next is place:
            self._look_from(place.after)

    def begin(self, terms: Hashable) -> None:
        """The channel has another owner or term: what was sent before may be lost, and holds back what is behind it."""
        self.terms = terms
        self._look_from(self.first)

    def send(self, place: _Place) -> None:
        """The next write is sent; behind one that is sent alone none is."""
        if not place.write.alone:
            place.terms = self.terms
            self._look_from(place.after)

    def take_back(self, place: _Place) -> None:
        """A write that was sent is to be sent again."""
        place.terms = None
        if self.next is None or self.next.write.number > place.write.number:
            self.next = place

    def _look_from(self, place: _Place | None) -> None:
        while place is not None and place.terms == self.terms:
            place = place.after
        self.next = place


class WriteLines:
    """The lines in which writes stand at a door, one for each producer and pchannel.

    A write is in its lines from its arrival until its outcome is known. It is sent once all its channels are open, and
    every earlier one in each of its lines was sent to the present owner of that channel, under its present term: so
    batches go whole, those of one producer in their order on each channel, and several may be under way. One that was
    sent to an earlier owner and has no outcome yet may be lost with that one, and holds back those behind it until it
    is known, or sent again. Writes of other producers pass.

    What waits on account of a channel is bounded by `limit_bytes`, channel by channel. A write that has waited keeps
    its turn until the owner has room for it: else a later and smaller one would pass it. One that an owner gives back
    waits at its old place, and is never refused for room.

    `while_waiting` is entered for as long as a write waits, but not while it is with its owner.
    """

    def __init__(
        self,
        owners: ChannelTerms,
        limit_bytes: int,
        *,
        while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._owners = owners
        self._limit_bytes = limit_bytes
        self._while_waiting = while_waiting
        self._arrived = 0
        self._lines: dict[LineKey, _Line] = {}  # none is empty
        self._waiting: dict[_Write, None] = {}
        self._bytes = Counter[str]()  # of those that wait, by the channel on whose account they do
        self._asking_again: asyncio.TimerHandle | None = None

    async def write(
        self,
        producer: str,
        channels: Set[str],
        size: int,
        send: Send,
        *,
        deadline_s: float,
        alone: bool = False,
    ) -> Appended:
        """`send` a write of `size` bytes once it is its turn, and again where its owner gives it back; returns its
        outcome. `send` is called with all `channels` open, and again only for the same batch under the same number.
        Behind one that is sent `alone`, no other is sent before its outcome is known.

        Raises `Overloaded` where too much waits for one of the channels, and `DeadlineExceeded` where its turn has not
        come within `deadline_s` seconds: a write that is with its owner is not ended by that. Raises what `send`
        raises, but not `Unavailable`, and `Overloaded` for want of room only where the write had not waited before; and
        what the owner answers.
        Not written, but where the error has the field `outcome_unknown`."""
        self._arrived += 1
        write = _Write(self._arrived, channels, size, send, deadline_s, alone=alone)
        self._enter(write, producer)
        try:
            if not (self._is_turn(write) and self._is_sent(write)):
                self._check_room(write)
                self._wait(write)
            while True:
                sent = write.sent or await self._await_turn(write)
                try:
                    return await sent
                except TidewalError as error:
                    if not (_is_given_back(error) or _keeps_its_place(write, error)):
                        raise
                    self._take_back(write, error)
        except TidewalError as error:
            if write.may_be_written and not is_never_written(error):
                raise of_unknown_outcome(error) from None
            raise
        finally:
            self._leave(write)

    async def run(self) -> None:
        """Send the writes whose channels are opened, from now on."""
        while True:
            self._send_in_turn(self._waiting)
            await self._owners.changed()

    # ---- the lines --------------------------------------------------------------------------------------------------

    def _enter(self, write: _Write, producer: str) -> None:
        for channel in write.channels:
            line = self._lines.get((producer, channel))
            if line is None:
                line = self._lines[producer, channel] = _Line((producer, channel))
            write.places.append(line.join(write))

    def _leave(self, write: _Write) -> None:
        """Take a write out of its lines, and let the next ones go."""
        if write in self._waiting:
            self._end_wait(write)
        if write.sent is not None:
            write.sent.cancel()  # it is done, unless the caller was cancelled
        for place in write.places:
            place.line.leave(place)
            if place.line.first is None:
                del self._lines[place.line.key]
        if self._waiting:
            self._send_in_turn(_behind(write))

    def _is_turn(self, write: _Write) -> bool:
        for place in write.places:
            line = place.line
            terms = self._owners.terms(line.channels)
            if terms is None:
                return False
            if terms != line.terms:
                line.begin(terms)
            if line.next is not place:
                return False
        return True

    def _send(self, write: _Write) -> None:
        """Send a write whose turn it is. Raises what its `send` raises."""
        write.sent = write.send()
        for place in write.places:
            place.line.send(place)

    def _is_sent(self, write: _Write) -> bool:
        """Send a write whose turn it is; returns whether its owner takes it: not where it may promise nothing now."""
        try:
            self._send(write)
        except Unavailable as error:
            write.refusal = error
            self._ask_later()
        return write.sent is not None

    def _take_back(self, write: _Write, error: TidewalError) -> None:
        """The owner gives a write back: let it wait at its place. Raises where it is too late for that."""
        again = write.refusal is not None
        write.sent, write.refusal = None, error
        write.may_be_written = write.may_be_written or _may_be_written(error)
        if asyncio.get_running_loop().time() >= write.deadline:
            raise self._late(write) from None
        for place in write.places:
            place.line.take_back(place)
        self._wait(write)
        if again:
            self._ask_later()
        else:
            self._send_in_turn([write])

    # ---- those that wait --------------------------------------------------------------------------------------------

    def _wait(self, write: _Write) -> None:
        """Let a write wait for its turn."""
        write.turn = asyncio.get_running_loop().create_future()
        write.waits_for = self._account(write)
        for channel in write.waits_for:
            self._bytes[channel] += write.size
        self._waiting[write] = None

    def _end_wait(self, write: _Write) -> None:
        del self._waiting[write]
        for channel in write.waits_for:
            self._bytes[channel] -= write.size

    def _account(self, write: _Write) -> Set[str]:
        """The channels on whose account a write waits: those of it that are not open, and those that those in front of
        it wait for. So a dead channel does not use up the bounds of healthy ones."""
        channels = self._closed(write)
        for place in write.places:
            in_front = place.in_the_way()
            if in_front is None:
                continue
            if in_front in self._waiting:
                channels |= in_front.waits_for
            else:  # with an earlier owner, which has yet to say what became of it
                channels |= self._closed(in_front) or set(place.line.channels)
        return channels or write.channels

    def _closed(self, write: _Write) -> set[str]:
        return {channel for channel in write.channels if self._owners.terms((channel,)) is None}

    def _check_room(self, write: _Write) -> None:
        for channel in self._account(write):
            held = self._bytes[channel]
            if held and held + write.size > self._limit_bytes:
                raise Overloaded(
                    f"{held} bytes wait at this door until {channel} is open, the limit is {self._limit_bytes} "
                    f"({LIMIT}); retry",
                    limit=LIMIT,
                    channel=channel,
                )

    async def _await_turn(self, write: _Write) -> asyncio.Future[Appended]:
        """Wait until a write is sent; returns the append under way."""
        assert write.turn is not None
        try:
            with self._while_waiting():
                async with asyncio.timeout_at(write.deadline):
                    await write.turn
        except TimeoutError:
            if write.turn.cancelled():
                raise self._late(write) from None
            write.turn.result()  # its turn came at the last moment
        assert write.sent is not None
        return write.sent

    def _late(self, write: _Write) -> DeadlineExceeded:
        became = "it may have been written" if write.may_be_written else "it is certainly not written"
        why = write.refusal or f"not all of {', '.join(sorted(write.waits_for))} are open"
        return DeadlineExceeded(
            f"the write was held for {write.deadline_s:g} s and then dropped, {became}: {why}",
            outcome_unknown=write.may_be_written,
        )

    # ---- whose turn it is -------------------------------------------------------------------------------------------

    def _send_in_turn(self, writes: Iterable[_Write]) -> None:
        """Send those of `writes` whose turn it is, and then the ones behind them."""
        todo = deque(writes)
        while todo:
            write = todo.popleft()
            if write in self._waiting and self._answer_turn(write):
                todo.extend(_behind(write))

    def _answer_turn(self, write: _Write) -> bool:
        """Send a write that waits, where it is its turn; returns whether it was sent."""
        turn = write.turn
        if turn is None or turn.done() or not self._is_turn(write):
            return False  # given up, where it is done: its task has not run since, and takes it out then
        try:
            self._send(write)
        except Exception as error:
            if isinstance(error, Overloaded | Unavailable) and (_keeps_its_place(write, error) or not _may_last(error)):
                write.refusal = error
                self._ask_later()
                return False
            turn.set_exception(error)  # its task takes it out of its lines
            self._end_wait(write)
            return False
        turn.set_result(None)
        self._end_wait(write)
        return True

    def _ask_later(self) -> None:
        if self._asking_again is None:
            self._asking_again = asyncio.get_running_loop().call_later(ROOM_S, self._ask_again)

    def _ask_again(self) -> None:
        self._asking_again = None
        self._send_in_turn(self._waiting)


def _may_last(error: TidewalError) -> bool:
    """Whether rows are refused until less is used of a limit with a mark. Deletes, which may bring that about, pass,
    and are not to wait behind rows; for all else an owner has room soon, or may promise again."""
    return isinstance(error, Overloaded) and "mark" in error.fields


def _is_given_back(error: TidewalError) -> bool:
    """Whether an owner has not taken a write, or has ended before it knew the outcome. One that the log has refused for
    certain is not sent again: later ones of its client may be in the log by now, and it would come behind them. Where
    another owner has its part, it is, and the owner that would have to write it behind later ones refuses it."""
    if isinstance(error, Unavailable):
        return bool(error.fields.get("outcome_unknown"))
    return isinstance(error, SendAgain | DeadlineExceeded)


def _keeps_its_place(write: _Write, error: TidewalError) -> bool:
    """Whether a write that is refused for now is repeated by its client, as its outcome is unknown: that must not come
    behind later ones."""
    return write.may_be_written and isinstance(error, Overloaded)


def _may_be_written(error: TidewalError) -> bool:
    return bool(error.fields.get("outcome_unknown", isinstance(error, DeadlineExceeded)))


def _behind(write: _Write) -> list[_Write]:
    """The writes whose turn it may be, now that this one was sent or has left its lines."""
    return [place.line.next.write for place in write.places if place.line.next is not None]
