"""`TtMsgStream`: several channels merged on a common watermark.

Each channel tells its time by stored ticks, by its owner's heartbeats and, since an owner stamps in log order, by its
records themselves. The stream's time is the least of them; a pack holds exactly what lies between two such times.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

from .channel_reader import ChannelReader, OnBadRecord
from .errors import Closed, InvalidRequest, MemoryLimitExceeded, PositionMismatch
from .messages import MsgPack, Position
from .record import Record, RecordType
from .wal import From, FromId, FromTime, Start, Wal

BUFFER_BYTES = 64 * 1024 * 1024
CHANNEL_BUFFER_BYTES_MIN = 256 * 1024
PROMISES_MAX = 64

_TIME_ONLY = frozenset({RecordType.TIME_TICK, RecordType.FENCE, RecordType.PRODUCERS})

OnLate = Callable[[str, Record], None]


class _Channel:
    """One channel of the stream: what was read and not yet handed out, and the time it has told."""

    def __init__(self, reader: ChannelReader, start: Start) -> None:
        self.name = reader.channel
        self.reader = reader
        self.start = start
        self.time = 0
        self.buffer: deque[Record] = deque()
        self.bytes = 0
        self.room = asyncio.Event()
        self.promises: deque[tuple[tuple[int, int], int]] = deque(maxlen=PROMISES_MAX)
        self.position = reader.position

    @property
    def consumed(self) -> tuple[int, int]:
        return self.reader.term, self.reader.cseq

    def promise(self, upto: tuple[int, int], time: int) -> None:
        """Apply `time` once everything up to `upto` has been read."""
        if upto <= self.consumed:
            self.time = max(self.time, time)
        elif len(self.promises) < PROMISES_MAX:
            self.promises.append((upto, time))

    def keep_promises(self) -> None:
        while self.promises and self.promises[0][0] <= self.consumed:
            self.time = max(self.time, self.promises.popleft()[1])

    def take(self, upto: int, *, ordered: bool) -> list[Record]:
        """Hand out what is at or before `upto`, and move the position to just before the first record held back."""
        taken: list[Record] = []
        if ordered:
            while self.buffer and self.buffer[0].ts <= upto:
                taken.append(self.buffer.popleft())
            last = taken[-1:]
        else:
            held = [record for record in self.buffer if record.ts > upto]
            taken = [record for record in self.buffer if record.ts <= upto]
            last = [record for record in taken if not held or record.id < held[0].id][-1:]
            self.buffer = deque(held)
        if not self.buffer:
            self.position = self.reader.position
        elif last:
            self.position = (last[0].id, last[0].term, last[0].cseq)
        self.bytes -= sum(len(record.body) for record in taken)
        self.room.set()
        return taken


class TtMsgStream:
    """An async iterator of `MsgPack`s with `begin_ts < ts <= end_ts`, strictly increasing `end_ts`, each message once.

    Choose where to start with `as_consumer` or `seek`, once, then iterate. A pack without messages only moves time.
    Memory is bounded by `buffer_bytes`: a channel that is ahead of the others is not read further until they follow.

    `ordered` says that the channels have owners that stamp in log order (guarantee 2). Channels written by others may
    hold records out of order between two ticks; then only ticks and announcements tell time, and what lies between two
    ticks must fit into the buffer (`MemoryLimitExceeded` otherwise).

    A record that arrives behind a time already told (its owner broke guarantee 4) is never put into a later pack:
    `on_late` gets it and `late` counts it.
    """

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
    ) -> None:
        """Messages of other vchannels than `vchannels` are dropped; None takes all."""
        self.group = group
        self.late = 0
        self._wal = wal
        self._vchannels = None if vchannels is None else frozenset(vchannels)
        self._buffer_bytes = buffer_bytes
        self._ordered = ordered
        self._on_bad = on_bad
        self._on_late = on_late
        self._channels: dict[str, _Channel] = {}
        self._begin = 0  # where this stream started: at or below it is history that a restart reads again
        self._end = 0
        self._progress = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None
        self._closed = False

    # ---- where to start ---------------------------------------------------------------------------------------------

    def as_consumer(
        self,
        channels: Sequence[str],
        start: From | FromTime = From.EARLIEST,
        *,
        fences: Mapping[str, Mapping[int, bytes]] | None = None,
    ) -> None:
        """Read `channels` from `start`; from a `FromTime(t)` the first pack begins behind t. `fences` are the known
        fences of each channel, from the catalog (see `ChannelReader`). The same channel twice is one channel."""
        self._check_fresh()
        if isinstance(start, FromTime):
            self._begin = self._end = start.timestamp
        for name in dict.fromkeys(channels):
            reader = ChannelReader(name, fences=(fences or {}).get(name), on_bad=self._on_bad)
            self._add(reader, start)

    def seek(self, positions: Iterable[Position], *, include_current: bool = False) -> None:
        """Go on from saved positions, which must be of one pack; with `include_current` the message at each position
        is delivered again. Raises `PositionMismatch` for another backend's position, `InvalidRequest` for an empty
        one; reading raises `PositionLost` when retention has removed it."""
        self._check_fresh()
        for position in positions:
            if position.wal != self._wal.name:
                raise PositionMismatch(
                    f"the position is of {position.wal}, this log is {self._wal.name}: start with as_consumer instead",
                    expected=self._wal.name,
                    found=position.wal,
                )
            if not position.message_id:
                raise InvalidRequest(f"an empty position of {position.channel}: start with as_consumer instead")
            cseq = position.cseq - 1 if include_current else position.cseq
            reader = ChannelReader(position.channel, after=(position.term, cseq), on_bad=self._on_bad)
            self._add(reader, FromId(position.message_id, inclusive=include_current))
            self._begin = max(self._begin, 0 if include_current else position.timestamp)
            self._channels[position.channel].position = (position.message_id, position.term, cseq)
        self._end = self._begin

    def _add(self, reader: ChannelReader, start: Start) -> None:
        self._channels.setdefault(reader.channel, _Channel(reader, start))

    def _check_fresh(self) -> None:
        if self._channels:
            raise InvalidRequest("the stream has its channels already: open another stream to read from elsewhere")

    # ---- reading ----------------------------------------------------------------------------------------------------

    @property
    def end_ts(self) -> int:
        """The end of the last pack: everything up to it was handed out."""
        return self._end

    @property
    def times(self) -> dict[str, int]:
        """The time each channel has told; the least one holds the stream back."""
        return {name: channel.time for name, channel in self._channels.items()}

    @property
    def buffered_bytes(self) -> int:
        """Bytes of bodies read and not yet handed out."""
        return sum(channel.bytes for channel in self._channels.values())

    def announce(self, channel: str, term: int, cseq: int, time: int) -> None:
        """What the channel's owner says: nothing at or before `time` follows behind (term, cseq)."""
        known = self._channels.get(channel)
        if known is not None:
            known.promise((term, cseq), time)
            self._progress.set()

    def __aiter__(self) -> AsyncIterator[MsgPack]:
        return self

    async def __anext__(self) -> MsgPack:
        if not self._channels:
            raise InvalidRequest("say where to start first: as_consumer or seek")
        if not self._tasks and not self._closed:
            self._tasks = [asyncio.create_task(self._pump(channel)) for channel in self._channels.values()]
        while not self._closed:
            if self._failure is not None:
                raise self._failure
            time = min(channel.time for channel in self._channels.values())
            if time > self._end:
                return self._pack(time)
            self._progress.clear()
            await self._progress.wait()
        raise StopAsyncIteration

    def _pack(self, time: int) -> MsgPack:
        begin, starts = self._end, self._positions()
        messages: list[Record] = []
        for channel in self._channels.values():
            messages += channel.take(time, ordered=self._ordered)
        if len(self._channels) > 1 or not self._ordered:
            messages.sort(key=_order)
        self._end = time
        return MsgPack(begin, time, messages, starts, self._positions())

    def _positions(self) -> dict[str, Position]:
        return {
            name: Position(name, *channel.position, self._end, self._wal.name, self.group)
            for name, channel in self._channels.items()
        }

    async def _pump(self, channel: _Channel) -> None:
        """Read one channel into its buffer, for ever, as far as there is room."""
        limit = max(CHANNEL_BUFFER_BYTES_MIN, self._buffer_bytes // len(self._channels))
        try:
            async for entries in self._wal.read(channel.name, channel.start):
                for record in channel.reader.accept(entries):
                    self._keep(channel, record)
                channel.keep_promises()
                self._progress.set()
                while channel.bytes > limit:
                    self._check_room(channel, limit)
                    channel.room.clear()
                    await channel.room.wait()
            raise Closed(f"the log was closed while {channel.name} was being read")
        except Exception as error:  # -- every failure of a pump must reach the reader, whatever it is
            self._failure = error
            self._progress.set()

    def _check_room(self, channel: _Channel, limit: int) -> None:
        if not self._ordered and channel.buffer[0].ts > channel.time:
            raise MemoryLimitExceeded(
                f"{channel.name} holds over {limit} bytes between two ticks; raise mq.pursuitBufferSize",
                limit="mq.pursuitBufferSize",
            )

    def _keep(self, channel: _Channel, record: Record) -> None:
        if record.type in _TIME_ONLY:
            channel.time = max(channel.time, record.ts)
            return
        if self._ordered:
            channel.time = max(channel.time, record.ts)
        if record.ts <= self._begin or (self._vchannels is not None and record.vchannel not in self._vchannels):
            return
        if record.ts <= self._end:
            self.late += 1
            if self._on_late is not None:
                self._on_late(channel.name, record)
            return
        channel.buffer.append(record)
        channel.bytes += len(record.body)

    async def close(self) -> None:
        """Stop reading; a waiting reader's iteration ends. A second call does nothing."""
        self._closed = True
        self._progress.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()


def _order(record: Record) -> tuple[int, str, int, int]:
    return record.ts, record.vchannel, record.term, record.cseq
