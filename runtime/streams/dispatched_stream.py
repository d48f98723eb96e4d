"""`DispatchedStream`: what a `TtMsgStream` gives, of channels that the dispatchers of the node read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from ..errors import OrderViolated
from ..log.names import pchannel_of
from ..log.record import Record
from ..log.wal import FromId, Start, Wal
from .channel_reader import ChannelReader, Grants, OnBadRecord
from .dispatcher import Dispatchers, Target
from .pursuit import Pursuit
from .stream_base import reading
from .tt_stream import OnLate, TtChannel, TtMsgStream


class DispatchedStream(TtMsgStream):
    """The messages of some vchannels, as a `TtMsgStream` over their pchannels with `ordered` gives them: same packs
    up to where they are divided, same positions up to records of other vchannels, same errors. All records have an
    owner.

    Where the stream waits for nothing (it holds no message back, and `wait_for` nothing later than its last pack), it
    hears of the channels' time once a second only. What it has not handed out counts in the node's budget, and a stream
    that lets it stand holds up the others for `PATIENCE_S` at most.
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
        self._wanted = 0
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
        if time > self._wanted:
            self._wanted = time
            self._progress.set()

    def announce(self, channel: str, term: int, cseq: int, time: int) -> None:
        """Apply an announcement that was made for this stream, which is to hand out a pack that covers it. Others are
        not woken for it: what they would do first, the question that waits for this one would wait for."""
        if channel in self._channels:
            self._dispatchers.of(channel).announce(term, cseq, time, wake=False)
            self._wanted = max(self._wanted, time)
            self._progress.set()

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
        return cast("Iterable[Target]", self._channels.values())

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
        needed = [record.ts for target in self._targets for record in target.first_message()]
        if self._wanted > self._end:
            needed.append(self._wanted)
        for target in self._targets if needed else ():
            if target.time < min(needed):
                target.dispatcher.eager[target] = min(needed)
        return super()._least_time()

    def _pursues(self, pursuit: Pursuit, time: int, waited_s: float) -> bool:
        full = any(target.aside or not target.has_room for target in self._targets)
        return not full and super()._pursues(pursuit, time, waited_s)

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
