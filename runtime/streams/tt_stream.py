"""`TtMsgStream`: several channels merged on a common watermark.

The time of each channel comes from stored ticks, from its owner's heartbeats and, since an owner stamps in log order,
from its records themselves. The stream's time is the least of them; a pack holds exactly the messages between two such
times.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from prometheus_client import Counter

from ..arguments import checked
from ..errors import MemoryLimitExceeded, OrderViolated, WatermarkStalled
from ..log.checks import check_framed
from ..log.record import TIME_TYPES, TIMELESS_TYPES, Record, RecordType
from ..log.wal import From, FromTime, Start, Wal
from .channel_reader import ChannelReader, Grants, LeftOutRecord, OnBadRecord
from .channel_time import ChannelTime
from .messages import MsgPack, Position
from .pursuit import Pursuit
from .stream_base import BUFFER_BYTES, RECORD_OVERHEAD_BYTES, BufferedChannel, StreamBase

STALLED_S = 3.0  # an owner announces five times a second

OnLate = Callable[[str, Record], None]


class TtChannel(BufferedChannel, ChannelTime):
    """A channel with its time."""

    buffer: deque[Record]
    bytes: int

    def __init__(self, reader: ChannelReader, start: Start) -> None:
        BufferedChannel.__init__(self, reader, start)
        ChannelTime.__init__(self)

    @property
    def read(self) -> tuple[int, int]:
        """The (term, cseq) up to which everything was read."""
        return self.reader.term, self.reader.cseq

    def mark(self, record: Record, *, moves_time: bool) -> None:
        """Keep the place of `record`, which is no message, when it moves the time: then no position passes it until a
        pack covers that time, for a stream that goes on from there must read the time again."""
        if moves_time and self.buffer and self.buffer[-1].type is RecordType.TIME_TICK:
            older = self.buffer.pop()
            self.bytes -= RECORD_OVERHEAD_BYTES
            self.skip(older)
        if moves_time:
            self.keep(Record(RecordType.TIME_TICK, record.ts, record.term, record.cseq, id=record.id))
        else:
            self.skip(record)

    def take(self, upto: int, *, ordered: bool) -> list[Record]:
        """Hand out the messages at or before `upto`, in the order of the log."""
        taken: list[Record] = []
        if ordered:
            while self.buffer and self.buffer[0].ts <= upto:
                taken.append(self.buffer.popleft())
            self.handed_out(taken, taken[-1] if taken else None)
        else:
            taken = [record for record in self.buffer if record.ts <= upto]
            self.buffer = deque(record for record in self.buffer if record.ts > upto)
            self.handed_out(taken, None)
            if self.buffer:
                self.position_before(self.buffer[0])
        return [record for record in taken if record.type is not RecordType.TIME_TICK]


class TtMsgStream(StreamBase[TtChannel]):
    """An async iterator of `MsgPack`s with `begin_ts < ts <= end_ts`, strictly increasing `end_ts`, each message once.

    Choose where to start with `as_consumer` or `seek`, or one after the other, then iterate. A pack without messages
    only moves time. Messages of one timestamp come channel by channel (by name), each channel's in the order of its
    log. Memory is bounded by `buffer_bytes`: a channel that is ahead of the others is not read further until they
    follow.

    `ordered` says that the channels have owners that stamp in log order (guarantee 2). Channels without such owners may
    hold records out of order between two ticks; then only ticks and announcements move time, and the records between
    two ticks must fit into the buffer (`MemoryLimitExceeded` otherwise).

    A record that arrives behind a time already announced (its owner broke guarantee 4) is never put into a later pack:
    `late` counts it and `on_late` gets it; without a handler the stream fails with `OrderViolated`. A stream that goes
    on from saved positions finds those behind them, too, and again. Only in a channel without an owner, one that came
    right behind a record held back at the position cannot be distinguished from records that were handed out.
    """

    @checked
    def __init__(
        self,
        wal: Wal,
        *,
        group: str = "",
        vchannels: Iterable[str] | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        ordered: bool = True,
        on_bad: OnBadRecord | None = None,
        on_late: OnLate | None = None,
        grants: Grants | None = None,
        reset_to: From | None = None,
        resets: Counter | None = None,
        stalled_after_s: float | None = None,
        pursuit: Pursuit | None = None,
        where: str | None = None,
    ) -> None:
        """Messages of other vchannels than `vchannels` are dropped; None takes all. So are those that do not pass the
        filter `where`, an expression over their tags and header fields: time goes on over them.

        With `grants`, a node's catalog,
        records that were not granted are bad records (see `channel_reader`). `group` is noted in positions; `on_bad`
        gets entries that cannot be read.

        `reset_to` says where a channel goes on whose next entries retention has removed; None: iterating raises
        `PositionLost`. `resets` counts that, and so do `counts`. With `stalled_after_s` (for example `STALLED_S`)
        iterating raises `WatermarkStalled`, with the channel that holds the stream back, once it has waited so many
        seconds for a time that does not move; the stream may be iterated again. Without it iterating waits. `pursuit`
        joins small packs while the stream is far behind. Raises `InvalidFilter`."""
        check_framed(wal, "a time-ticked stream")
        super().__init__(wal, group, buffer_bytes, on_bad, reset_to, resets, grants, where)
        self._stalled_after_s = stalled_after_s
        self._pursuit = pursuit
        self._drops: list[int] = []  # when collections were dropped, of the buffered records
        self._vchannels = None if vchannels is None else frozenset(vchannels)
        self._ordered = ordered
        self._on_late = on_late
        self._begin = 0  # where this stream started: at or below it is history that a restart reads again
        self._end = 0
        self._ends: dict[str, Position] = {}  # where the last pack ended

    @checked
    def as_consumer(
        self,
        channels: Sequence[str],
        start: From | FromTime = From.EARLIEST,
        *,
        fences: Mapping[str, Mapping[int, bytes]] | None = None,
    ) -> None:
        """Read `channels` from `start`; from a `FromTime(t)` the first pack begins behind t. `fences` are the known
        fences of each channel, from the catalog (see `ChannelReader`). The same channel twice is one channel."""
        super().as_consumer(channels, start, fences=fences)
        if isinstance(start, FromTime):
            self._begin = self._end = start.timestamp

    @checked
    def seek(self, positions: Iterable[Position], *, include_current: bool = False) -> None:
        """Go on from saved positions, which must be of one pack; with `include_current` the message at each position is
        delivered again. Raises as `StreamBase.seek` does."""
        positions = list(positions)
        super().seek(positions, include_current=include_current)
        if not include_current:
            self._begin = self._end = max(position.timestamp for position in positions)
            self._ends = self._positions()

    def _new_channel(self, reader: ChannelReader, start: Start) -> TtChannel:
        return TtChannel(reader, start)

    # ---- reading ----------------------------------------------------------------------------------------------------

    @property
    def late(self) -> int:
        """Records that came behind a time already announced."""
        return sum(counts.late for counts in self.counts.values())

    @property
    def end_ts(self) -> int:
        """The end of the last pack: everything up to it was handed out."""
        return self._end

    @property
    def times(self) -> dict[str, int]:
        """The time of each channel; the least one holds the stream back."""
        return {name: channel.time for name, channel in self._channels.items()}

    @checked
    def announce(self, channel: str, term: int, cseq: int, time: int) -> None:
        """Apply an announcement of the channel's owner: nothing at or before `time` follows behind (term, cseq)."""
        known = self._channels.get(channel)
        if known is not None:
            known.apply_when_read((term, cseq), time, known.read)
            self._progress.set()

    async def __anext__(self) -> MsgPack:
        self._start_reading()
        now = asyncio.get_running_loop().time
        began, pursuing_from = now(), None
        while not self._closed:
            if self._failure is not None:
                raise self._failure
            time = self._least_time()
            limit_s = None if self._stalled_after_s is None else began + self._stalled_after_s
            if time > self._end:
                pursuing_from = now() if pursuing_from is None else pursuing_from
                if self._pursuit is None or not self._pursues(self._pursuit, time, now() - pursuing_from):
                    return self._pack(time)
                limit_s = pursuing_from + self._pursuit.buffer_time_s
            self._progress.clear()
            try:
                async with asyncio.timeout_at(limit_s):
                    await self._progress.wait()
            except TimeoutError:
                if time > self._end:
                    return self._pack(time)
                raise self._stalled(time, now() - began) from None
        raise StopAsyncIteration

    def _least_time(self) -> int:
        """The time of the channel that holds the stream back."""
        return min(channel.time for channel in self._channels.values())

    def _pursues(self, pursuit: Pursuit, time: int, waited_s: float) -> bool:
        """Whether to read on before a pack is handed out: not past the end of a collection, for which readers wait,
        nor when a channel is not read further because its buffer is full."""
        full = any(channel.bytes > self._channel_limit for channel in self._channels.values())
        dropped = any(ts <= time for ts in self._drops)
        return not full and not dropped and pursuit.goes_on(time, self.buffered_bytes, waited_s)

    def _stalled(self, time: int, waited_s: float) -> WatermarkStalled:
        behind = min(self._channels.values(), key=lambda channel: channel.time).name
        return WatermarkStalled(
            f"the time of {behind} stands at {time} since {waited_s:.1f} s, and holds the stream back",
            channel=behind,
            time=time,
            waited_s=waited_s,
        )

    def _pack(self, time: int) -> MsgPack:
        begin, starts = self._end, self._ends or self._positions()
        messages: list[Record] = []
        for name in sorted(self._channels):
            messages += self._channels[name].take(time, ordered=self._ordered)
        if len(self._channels) > 1 or not self._ordered:
            messages.sort(key=attrgetter("ts"))  # stable: messages of one timestamp stay in the order of their log
        self._end = time
        self._drops = [ts for ts in self._drops if ts > time]
        self._ends = self._positions()
        return MsgPack(begin, time, messages, starts, self._ends)

    def _positions(self) -> dict[str, Position]:
        return {
            name: Position(name, *channel.position, self._end, self._wal.name, self.group)
            for name, channel in self._channels.items()
        }

    def _keep(self, channel: TtChannel, record: Record) -> None:
        known_time = channel.time
        if (self._ordered or record.type in TIME_TYPES) and record.type not in TIMELESS_TYPES:
            channel.time = max(known_time, record.ts)
        if record.id <= channel.skipped or (record.ts <= self._begin and self._is_history(channel, record, known_time)):
            channel.skip(record)
        elif record.type in TIME_TYPES or self._is_left_out(record):
            channel.mark(record, moves_time=channel.time > max(known_time, self._end))
        elif record.ts <= self._end or (self._ordered and record.ts < known_time):
            self._late(channel, record)
        else:
            if record.type is RecordType.DROP_COLLECTION:
                self._drops.append(record.ts)
            channel.keep(record)

    def _is_left_out(self, record: Record) -> bool:
        other = self._vchannels is not None and record.vchannel not in self._vchannels
        return other or isinstance(record, LeftOutRecord)

    def _is_history(self, channel: TtChannel, record: Record, known_time: int) -> bool:
        """Whether a record at or before the start is not wanted, or was handed out before. Behind a saved position that
        is possible only in a channel without an owner, behind a record that was held back, until the time is read
        again. Any other record there came late."""
        return not channel.resumed or (not self._ordered and bool(channel.buffer) and record.ts > known_time)

    def _late(self, channel: TtChannel, record: Record) -> None:
        channel.reader.counts.late += 1
        channel.skip(record)
        if self._on_late is None:
            raise OrderViolated(
                f"a record of {channel.name} at {record.ts} came behind the time {self._end}, already announced",
                channel=channel.name,
                ts=record.ts,
            )
        self._on_late(channel.name, record)

    def _batch_kept(self, channel: TtChannel) -> None:
        channel.apply_announced(channel.read)

    def _check_room(self, channel: TtChannel, limit: int) -> None:
        if not self._ordered and all(record.ts > channel.time for record in channel.buffer):
            raise MemoryLimitExceeded(
                f"{channel.name} holds over {limit} bytes between two ticks; raise the stream's buffer_bytes",
                limit="buffer_bytes",
            )
