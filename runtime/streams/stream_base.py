"""The base of the plain and the time-ticked stream: where to start, one task per channel that reads it into a bounded
buffer, and positions from which another stream goes on.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from prometheus_client import Counter

from ..arguments import checked
from ..errors import Closed, InvalidRequest, PositionLost, PositionMismatch
from ..filters.subscription import filter_of
from ..log.record import Record
from ..log.wal import Entry, From, FromId, FromTime, Start, Wal
from ..waiting import ended
from .channel_reader import ChannelReader, Grants, OnBadRecord, ReadCounts
from .messages import MsgPack, Position
from .plain_records import PlainReader

if TYPE_CHECKING:
    from ..filters.record_filter import RecordFilter

BUFFER_BYTES = 64 * 1024 * 1024
CHANNEL_BUFFER_BYTES_MIN = 256 * 1024
ENTRIES_PER_TURN = 512  # of one channel: 5 ms where each is small
RECORD_OVERHEAD_BYTES = 512  # what a buffered record costs beside its body, so that empty ones are bounded too
_log = logging.getLogger(__name__)


@asynccontextmanager
async def reading(
    wal: Wal, channel: str, start: Start, where: RecordFilter | None = None, turn: int = ENTRIES_PER_TURN
) -> AsyncGenerator[AsyncIterator[Sequence[Entry]]]:
    """`wal.read(channel, start)`, or with `where` `wal.read_where`, closed at the end of the block, whether it ends or
    raises. Between each `turn` entries other tasks run, such as those that renew leases."""
    batches = wal.read(channel, start) if where is None else wal.read_where(channel, start, where)
    entries = cast("AsyncGenerator[Sequence[Entry], None]", batches)
    turns = _turns(entries, turn)
    try:
        yield turns
    finally:
        await turns.aclose()
        await entries.aclose()


async def _turns(batches: AsyncIterator[Sequence[Entry]], turn: int) -> AsyncGenerator[Sequence[Entry], None]:
    async for entries in batches:
        if len(entries) <= turn:
            yield entries
            continue
        for at in range(0, len(entries), turn):
            yield entries[at : at + turn]
            await asyncio.sleep(0)


class BufferedChannel:
    """One channel of a stream: the records that were read and not yet handed out. `position` lies just before the first
    record in the buffer."""

    def __init__(self, reader: ChannelReader, start: Start) -> None:
        self.name: str = reader.channel
        self.reader: ChannelReader = reader
        self.start: Start = start
        self.skipped: bytes = b""  # entries up to this id only say how far the channel had come
        self.resumed: bool = False  # goes on from a saved position
        self.buffer: deque[Record] = deque()
        self.bytes: int = 0
        self.room: asyncio.Event | None = None  # set as records leave the buffer, where a reader waits for that
        self.position: tuple[bytes, int, int] = reader.position

    def keep(self, record: Record) -> None:
        """Buffer `record` until it is handed out."""
        if not self.buffer and not self.position[0]:
            self.position_before(record)  # nothing known lies before it
        self.buffer.append(record)
        self.bytes += len(record.body) + RECORD_OVERHEAD_BYTES

    def position_before(self, record: Record) -> None:
        """Set the position just before `record`, the first that is not processed, whatever lies before it."""
        self.position = (record.id, record.term, record.cseq - 1)

    def skip(self, record: Record) -> None:
        """Move the position past `record`, which is not to be handed out."""
        if not self.buffer:
            self.position = (record.id, record.term, record.cseq)

    def handed_out(self, records: Sequence[Record], last: Record | None) -> None:
        """Move the position past `records`, which left the buffer; `last` of them is the one before the first that is
        still in it."""
        if not self.buffer:
            self.position = self.reader.position
        elif last is not None:
            self.position = (last.id, last.term, last.cseq)
        self.bytes -= sum(len(record.body) + RECORD_OVERHEAD_BYTES for record in records)
        if self.room is not None:
            self.room.set()


Channel = TypeVar("Channel", bound=BufferedChannel)


class StreamBase(AsyncIterator[MsgPack], Generic[Channel]):
    """Reads channels into buffers of `buffer_bytes` together. A channel whose buffer is full is not read further."""

    def __init__(
        self,
        wal: Wal,
        group: str,
        buffer_bytes: int,
        on_bad: OnBadRecord | None,
        reset_to: From | None,
        resets: Counter | None,
        grants: Grants | None = None,
        where: str | None = None,
    ) -> None:
        self.group = group
        self._grants = grants
        self._where = filter_of(where)
        self._wal = wal
        self._buffer_bytes = buffer_bytes
        self._on_bad = on_bad
        self._reset_to = reset_to
        self._resets = resets
        self._channels: dict[str, Channel] = {}
        self._progress = asyncio.Event()
        self._reading = False
        self._tasks: set[asyncio.Task[None]] = set()  # under way
        self._failure: BaseException | None = None
        self._closed = False
        self._sought = False

    # ---- where to start ---------------------------------------------------------------------------------------------

    @checked
    def as_consumer(
        self,
        channels: Sequence[str],
        start: From | FromTime = From.EARLIEST,
        *,
        fences: Mapping[str, Mapping[int, bytes]] | None = None,
    ) -> None:
        """Read `channels` from `start`. `fences` are the known fences of each channel, from the catalog (see
        `ChannelReader`). The same channel twice is one channel. Raises `InvalidRequest` without channels, and when the
        stream has its channels already."""
        if self._channels:
            raise InvalidRequest("the stream has its channels already: open another stream to read from elsewhere")
        if not channels:
            raise InvalidRequest("name at least one channel to read")
        for name in dict.fromkeys(channels):
            reader = self._new_reader(name, fences=(fences or {}).get(name))
            self._channels[name] = self._new_channel(reader, start)

    @checked
    def seek(self, positions: Iterable[Position], *, include_current: bool = False) -> None:
        """Go on from saved positions; with `include_current` the message at each position is delivered again. Alone it
        says which channels are read; after `as_consumer` it moves some of those, and the others start as given
        there. A position of a pack whose channel was empty goes on at the first entry there is. Raises
        `PositionMismatch` for another backend's position, `InvalidRequest` for an empty position, a channel that is
        not read, or a second `seek`; reading raises `PositionLost` when retention has removed it."""
        if self._sought or self._reading:
            raise InvalidRequest("the stream has its positions already: open another stream to read from elsewhere")
        channels: dict[str, Channel] = {}
        for position in positions:
            self._check_position(position)
            if position.channel in channels or (self._channels and position.channel not in self._channels):
                raise InvalidRequest(f"{position.channel} is not read by this stream, or has two positions")
            channels[position.channel] = self._channel_at(position, include_current)
        if not channels:
            raise InvalidRequest("give at least one position to go on from")
        self._channels.update(channels)
        self._sought = True

    def _channel_at(self, position: Position, include_current: bool) -> Channel:
        before_entry = include_current or position.cseq < 0  # without an owner's numbers: the entry is not processed
        cseq = max(0, position.cseq - include_current)
        after = (position.term, cseq)
        reader = self._new_reader(position.channel, after=after)
        if position.message_id:
            # With an owner's numbers the reader itself knows what it has read, and a position may lie before its entry.
            start: Start = FromId(position.message_id, inclusive=before_entry or position.term > 0)
            reader.position = (position.message_id, position.term, -1 if before_entry and not position.term else cseq)
        else:
            start = From.EARLIEST
        channel = self._new_channel(reader, start)
        channel.resumed = not include_current
        return channel

    def _new_reader(
        self, channel: str, *, fences: Mapping[int, bytes] | None = None, after: tuple[int, int] = (0, 0)
    ) -> ChannelReader:
        kind = PlainReader if self._wal.capabilities.foreign_topics else ChannelReader
        return kind(channel, fences=fences, after=after, on_bad=self._on_bad, grants=self._grants, where=self._where)

    def _check_position(self, position: Position) -> None:
        if position.wal != self._wal.name:
            raise PositionMismatch(
                f"the position is of {position.wal}, this log is {self._wal.name}: start with as_consumer instead",
                expected=self._wal.name,
                found=position.wal,
            )
        if not position.message_id and not position.timestamp:
            raise InvalidRequest(f"an empty position of {position.channel}: start with as_consumer instead")

    async def place(self) -> None:
        """Fix where each channel starts, which iterating does otherwise: no entry from there on is missed in silence,
        for reading raises `PositionLost` for one that retention removes before it is read. A start at a time says
        nothing about entries that retention has removed before."""
        for channel in self._channels.values():
            channel.start = await self._placed(channel)

    # ---- reading ----------------------------------------------------------------------------------------------------

    @property
    def buffered_bytes(self) -> int:
        """Bytes read and not yet handed out. From any thread."""
        return sum(channel.bytes for channel in list(self._channels.values()))

    @property
    def counts(self) -> dict[str, ReadCounts]:
        """Per channel, how much was read, and how much of it was dropped."""
        return {name: channel.reader.counts for name, channel in self._channels.items()}

    @abstractmethod
    def _new_channel(self, reader: ChannelReader, start: Start) -> Channel: ...

    @abstractmethod
    def _keep(self, channel: Channel, record: Record) -> None:
        """Buffer a record that was read, or skip it."""

    def _batch_kept(self, channel: Channel) -> None:
        """Called when all records of a batch were kept."""

    def _check_room(self, channel: Channel, limit: int) -> None:
        """Called when the channel's buffer is full; raises when waiting cannot help."""

    def _start_reading(self) -> None:
        if not self._channels:
            raise InvalidRequest("say where to start first: as_consumer or seek")
        if not self._reading and not self._closed:
            self._reading = True
            for channel in self._channels.values():
                self._run_task(self._read_channel(channel), name=f"read {channel.name}")

    def _run_task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` as a task, until it or the stream ends."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def _channel_limit(self) -> int:
        """Bytes of one channel's buffer over which it is not read further."""
        return max(CHANNEL_BUFFER_BYTES_MIN, self._buffer_bytes // len(self._channels))

    async def _read_channel(self, channel: Channel) -> None:
        """Read one channel into its buffer, for ever, as far as there is room."""
        try:
            while True:
                try:
                    await self._read(channel)
                except PositionLost as error:
                    if error.fields.get("channel") != channel.name:  # of the catalog's channel, read for its grants
                        raise
                    channel.start = self._after_loss(channel, error)
        except Exception as error:  # -- every failure of the task must reach the iteration, whatever it is
            self._failure = error
            self._progress.set()

    async def _read(self, channel: Channel) -> None:
        limit = self._channel_limit
        channel.room = room = asyncio.Event()
        start = await self._placed(channel)
        async with reading(self._wal, channel.name, start, self._where) as batches:
            async for entries in batches:
                records, doubtful = channel.reader.accept_granted(entries)
                for record in records:
                    self._keep(channel, record)
                if doubtful:
                    await channel.reader.learn_grants()
                    for record in channel.reader.accept(doubtful):
                        self._keep(channel, record)
                if not channel.buffer:
                    channel.position = channel.reader.position
                self._batch_kept(channel)
                self._progress.set()
                while channel.bytes > limit:
                    self._check_room(channel, limit)
                    room.clear()
                    await room.wait()
        raise Closed(f"the log was closed while {channel.name} was being read")

    def _after_loss(self, channel: Channel, error: PositionLost) -> Start:
        """Where to go on when retention has removed what was to be read next. Raises `error` without `reset_to`."""
        if self._reset_to is None:
            raise error
        _log.warning(
            "what was to be read next of %s is gone; going on at %s",
            channel.name,
            self._reset_to.value,
            extra={"channel": channel.name},
        )
        channel.reader.counts.lost += 1
        if self._resets is not None:
            self._resets.inc()
        behind = error.fields.get("first_available")
        if self._reset_to is From.EARLIEST and isinstance(behind, bytes):
            return FromId(behind, inclusive=True)  # the channel may have entries before the lost ones
        return self._reset_to

    async def _placed(self, channel: Channel) -> Start:
        """The start of the channel as an id or the first entry. A start at the channel's end begins with the last
        entry, which only says how far the channel has come: without it no heartbeat of an idle owner could be
        applied."""
        start = channel.start
        if isinstance(start, FromId) or start is From.EARLIEST:
            return start
        known = await self._wal.describe(channel.name)  # first: entries appended from now on must not be skipped
        if isinstance(start, FromTime):
            first = await self._wal.id_at(channel.name, start.timestamp)
            if first is not None:
                return FromId(first, inclusive=True)
        if known.first_id is None or known.latest_id is None:
            return From.EARLIEST
        channel.skipped = known.latest_id
        return FromId(known.latest_id, inclusive=True)

    async def close(self) -> None:
        """Stop reading; a waiting reader's iteration ends. A second call does nothing."""
        self._closed = True
        self._progress.set()
        await ended(*self._tasks)
