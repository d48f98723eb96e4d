"""Writes that a door holds while a channel of theirs is not open, in the order in which their clients sent them."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Set

from ...runtime.errors import DeadlineExceeded, Overloaded, TidewalError, Unavailable
from ...runtime.ownership import Appended
from ..local_owner import LocalOwner

ROOM_S = 0.05  # until an owner that had no room is asked again
OVERHEAD_BYTES = 4096  # counted for each held write beside its rows, so that their number is bounded, too

LIMIT = "streamingNode.maxInflightBytes"

Send = Callable[[], "asyncio.Future[Appended]"]
Line = tuple[str, str]  # a producer and a pchannel


class _HeldWrite:
    def __init__(self, producer: str, channels: Set[str], size: int, send: Send) -> None:
        self.channels = channels
        self.size = size + OVERHEAD_BYTES
        self.send = send
        self.lines: list[Line] = [(producer, channel) for channel in channels]
        self.waits_for: Set[str] = frozenset()  # the channels on whose account it is held
        self.appended: asyncio.Future[asyncio.Future[Appended]] = asyncio.get_running_loop().create_future()
        self.refusal: TidewalError | None = None  # of an owner that has no room


class HeldWrites:
    """The writes that wait at a door.

    A write waits while a channel of its batch is not open, and behind each earlier one of its producer that waits and
    has a channel in common with it: batches go whole, and of one producer in their order on each channel. Those of
    other producers pass. What waits on account of a channel is bounded by `limit_bytes`, channel by channel.

    A write whose turn has come keeps it until the owner has room for it: else a later and smaller one would pass it.
    """

    def __init__(self, owner: LocalOwner, limit_bytes: int) -> None:
        self._owner = owner
        self._limit_bytes = limit_bytes
        self._writes: dict[_HeldWrite, None] = {}  # in the order of arrival
        self._lines: dict[Line, deque[_HeldWrite]] = {}  # none is empty
        self._bytes = Counter[str]()  # by the channel on whose account they are held
        self._asking_again: asyncio.TimerHandle | None = None

    def must_wait(self, producer: str, channels: Set[str]) -> bool:
        """Whether a write of `producer` to `channels` must be held, and not sent at once."""
        if not self._owner.is_open(channels):
            return True
        return bool(self._lines) and any((producer, channel) in self._lines for channel in channels)

    async def hold(
        self, producer: str, channels: Set[str], size: int, send: Send, *, deadline_s: float
    ) -> asyncio.Future[Appended]:
        """Hold a write of `size` bytes until it is its turn, and `send` it then; returns the append under way. Raises
        `Overloaded` where too much waits for one of the channels, `DeadlineExceeded` where its turn has not come within
        `deadline_s`, and what `send` raises: in each case it is not written."""
        write = _HeldWrite(producer, channels, size, send)
        self._enter(write)
        try:
            async with asyncio.timeout(deadline_s):
                return await write.appended
        except TimeoutError:
            if not write.appended.cancelled():
                return write.appended.result()  # sent at the last moment
            refusal = write.refusal or f"not all of {', '.join(sorted(write.waits_for))} are open"
            raise DeadlineExceeded(
                f"the write was held for {deadline_s:g} s and then dropped, it is certainly not written: {refusal}",
                outcome_unknown=False,
            ) from None
        finally:
            if write in self._writes:
                self._send_in_turn(self._leave(write))

    async def run(self) -> None:
        """Send the writes whose channels are opened, from now on."""
        while True:
            self._send_in_turn(self._writes)
            await self._owner.changed()

    # ---- the lines --------------------------------------------------------------------------------------------------

    def _enter(self, write: _HeldWrite) -> None:
        """Let a write wait behind the others. It is held on account of the channels that are not open, and of those on
        whose account the ones before it are held: a dead channel does not use up the bounds of healthy ones."""
        closed = {channel for channel in write.channels if not self._owner.is_open((channel,))}
        before = [self._lines[line][-1].waits_for for line in write.lines if line in self._lines]
        write.waits_for = closed.union(*before) or write.channels
        for channel in write.waits_for:
            held = self._bytes[channel]
            if held and held + write.size > self._limit_bytes:
                raise Overloaded(
                    f"{held} bytes wait at this door until {channel} is open, the limit is {self._limit_bytes} "
                    f"({LIMIT}); retry",
                    limit=LIMIT,
                    channel=channel,
                )
        self._writes[write] = None
        for channel in write.waits_for:
            self._bytes[channel] += write.size
        for line in write.lines:
            self._lines.setdefault(line, deque()).append(write)

    def _leave(self, write: _HeldWrite) -> list[_HeldWrite]:
        """Take a write out of its lines; returns the writes that are the first of them now."""
        del self._writes[write]
        for channel in write.waits_for:
            self._bytes[channel] -= write.size
        first: list[_HeldWrite] = []
        for line in write.lines:
            self._lines[line].remove(write)
            if self._lines[line]:
                first.append(self._lines[line][0])
            else:
                del self._lines[line]
        return first

    def _send_in_turn(self, writes: Iterable[_HeldWrite]) -> None:
        """Send those of `writes` whose turn it is, and then the ones behind them."""
        todo = deque(writes)
        while todo:
            write = todo.popleft()
            if write in self._writes and self._is_turn(write) and self._send(write):
                todo.extend(self._leave(write))

    def _is_turn(self, write: _HeldWrite) -> bool:
        given_up = write.appended.done()  # its task has not run since, and takes it out then
        first = all(self._lines[line][0] is write for line in write.lines)
        return first and not given_up and self._owner.is_open(write.channels)

    def _send(self, write: _HeldWrite) -> bool:
        """Send a write. Returns whether that is done, so that others may follow: not where the owner has no room."""
        try:
            appended = write.send()
        except (Overloaded, Unavailable) as error:
            write.refusal = error
            if self._asking_again is None:
                self._asking_again = asyncio.get_running_loop().call_later(ROOM_S, self._ask_again)
            return False
        except Exception as error:
            write.appended.set_exception(error)
        else:
            write.appended.set_result(appended)
        return True

    def _ask_again(self) -> None:
        self._asking_again = None
        self._send_in_turn(self._writes)
