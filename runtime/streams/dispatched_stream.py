"""`DispatchedStream`: what a `TtMsgStream` gives, of channels that the dispatchers of the node read."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import cast

from ..clock import add_ms
from ..errors import OrderViolated
from ..log.names import pchannel_of
from ..log.record import Record
from ..log.wal import FromId, Start, Wal
from .channel_reader import ChannelReader, Grants, OnBadRecord
from .dispatcher import Dispatchers, Target
from .messages import MsgPack
from .pursuit import Pursuit
from .stream_base import reading
from .tt_stream import OnLate, TtChannel, TtMsgStream


class DispatchedStream(TtMsgStream):
    """The messages of some vchannels, as a `TtMsgStream` over their pchannels with `ordered` gives them: same packs
    up to where they are divided, same positions up to records of other vchannels, same errors. All records have an
    owner.

    Where the stream waits for nothing (it holds no message back, and `wait_for` nothing later than its last pack), it
    hands out a pack for the time alone only each `IDLE_STEP_MS * IDLE_TURNS`; `idle_time` says how far the channels
    are. What it has not handed out counts in the node's budget, and a stream that lets it stand holds up the others for
    `PATIENCE_S` at most.
    """

    def __init__(
        self,
        wal: Wal,
        dispatchers: Dispatchers,
        vchannels: Iterable[str],
        *,
        group: str = "",
        on_bad: OnBadRecord | None = None,
        on_late: OnLate | None = None,
        grants: Grants | None = None,
        pursuit: Pursuit | None = None,
    ) -> None:
        """The parameters are those of `TtMsgStream`. `on_bad` and `grants` of one of the streams that read a channel
        are used for all of them."""
        self.vchannels: frozenset[str] = frozenset(vchannels)
        self.turn: int = next(dispatchers.turns)
        self._dispatchers = dispatchers
        self._wanted: list[int] = []  # a heap of times, some of which the last pack may cover
        self._awaited = False  # the reader has done with the last pack, and asks for the next
        super().__init__(
            wal,
            group=group,
            vchannels=self.vchannels,
            buffer_bytes=dispatchers.budget.limit_bytes,
            on_bad=on_bad,
            on_late=on_late,
            grants=grants,
            pursuit=pursuit,
        )

    def wait_for(self, time: int) -> None:
        """Hand out a pack as soon as one covers `time`."""
        if time > self._end:
            heapq.heappush(self._wanted, time)
            self._progress.set()

    def wait_at_most(self, ms: int) -> None:
        """Hand out a pack by the time that lies `ms` behind the last one, 1 at least, if none is waited for that comes
        earlier."""
        time = add_ms(self._end, ms)
        if self._next_wanted() is None or self._wanted[0] > time:
            self.wait_for(time)

    def _next_wanted(self) -> int | None:
        """The earliest time that is waited for, behind the last pack."""
        while self._wanted and self._wanted[0] <= self._end:
            heapq.heappop(self._wanted)
        return self._wanted[0] if self._wanted else None

    def announce(self, channel: str, term: int, cseq: int, time: int) -> None:
        """Apply an announcement that was made for this stream. Others are not woken for it: what they would do first,
        the question that waits for this one would wait for."""
        if channel in self._channels:
            self._dispatchers.of(channel).announce(term, cseq, time, wake=False)
            if self._next_wanted() is not None:
                self._progress.set()

    @property
    def idle_time(self) -> int:
        """Where the reader has done with all packs so far and waits for the next: up to when it has everything that the
        channels hold. Else 0. Callable from any thread."""
        if not self._awaited:
            return 0
        return min(target.idle_time for target in self._targets)

    async def __anext__(self) -> MsgPack:
        self._awaited = True
        try:
            return await super().__anext__()
        finally:
            self._awaited = False

    def give_up(self, vchannel: str) -> None:
        """Hand out no more records of a vchannel but those that are buffered, and read its pchannel no more where the
        stream has no other one there. It must keep one."""
        for target in self._targets:
            if target.scan is not None:
                target.scan.forget(target, vchannel)
        self._vchannels = self.vchannels = self.vchannels - {vchannel}
        channel = pchannel_of(vchannel)
        if channel not in map(pchannel_of, self.vchannels):
            target = self._channels.pop(channel)
            assert isinstance(target, Target)
            target.dispatcher.leave(target)
            self._progress.set()  # it may have held the others back

    def _new_channel(self, reader: ChannelReader, start: Start) -> TtChannel:
        return Target(reader, start, self, self._dispatchers.of(reader.channel))

    @property
    def _targets(self) -> Iterable[Target]:
        return cast("Iterable[Target]", list(self._channels.values()))

    async def _read_channel(self, channel: TtChannel) -> None:
        """Let the dispatcher of a channel read it for this stream, too."""
        assert isinstance(channel, Target)
        try:
            channel.start = await self._placed(channel)
            if isinstance(channel.start, FromId):
                await self._check_end(channel.name, channel.start)
            channel.placed()
            if not channel.closed:
                channel.dispatcher.join(channel)
        except Exception as error:  # -- as in the base: the iteration raises it, whatever it is
            self.fail(error)

    async def _check_end(self, channel: str, start: FromId) -> None:
        """Raise `PositionLost` for a start behind the end of the channel, which another reader would only wait for."""
        latest = await self._wal.latest_id(channel)
        if latest is None or start.id > latest:
            async with reading(self._wal, channel, start) as batches:
                await anext(batches)

    def _least_time(self) -> int:
        """The time of the channel that holds the stream back, from the dispatchers; where the stream waits for more,
        they are to wake it then."""
        for target in self._targets:
            if target.scan is not None:
                target.scan.tell(target)
        needed = [first.ts for target in self._targets if (first := target.first_message) is not None]
        if (wanted := self._next_wanted()) is not None:
            needed.append(wanted)
        if needed:
            self._wake_at(min(needed))
        return super()._least_time()

    def _wake_at(self, time: int) -> None:
        """Let the dispatchers wake the stream where the channels that are behind `time` get there."""
        for target in self._targets:
            if target.time < time:
                target.dispatcher.eager[target] = time

    def _pursues(self, pursuit: Pursuit, time: int, waited_s: float) -> bool:
        full = any(target.aside or not target.has_room for target in self._targets)
        pursues = not full and super()._pursues(pursuit, time, waited_s)
        if pursues:
            self._wake_at(pursuit.goal)
        return pursues

    # ---- called by targets and dispatchers --------------------------------------------------------------------------

    def take_record(self, target: Target, record: Record) -> None:
        try:
            self._keep(target, record)
        except OrderViolated as error:  # there is no handler of late records: the fault is this stream's alone
            self.fail(error)

    def wake(self) -> None:
        self._progress.set()

    def fail(self, error: Exception) -> None:
        self._failure = error
        self._progress.set()

    async def close(self) -> None:
        await super().close()
        for target in self._targets:
            target.dispatcher.leave(target)
        for target in self._targets:
            await target.dispatcher.ended()
