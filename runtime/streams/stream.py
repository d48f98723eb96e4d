"""`MsgStream`: messages in the order of arrival, without a common time: for event and control channels, and for
producers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash
from prometheus_client import Counter

from ..arguments import check_values, checked
from ..clock import HybridClock
from ..errors import Closed, InvalidRequest
from ..log.record import Record, stamp
from ..log.wal import Append, From, Start, Wal
from ..ownership import ChannelOwner
from .channel_reader import ChannelReader, LeftOutRecord, OnBadRecord
from .messages import MsgPack, Position
from .plain_records import plain_append
from .stream_base import BUFFER_BYTES, BufferedChannel, StreamBase

Repack = Callable[[Sequence[Record], Sequence[str]], Sequence[tuple[str, Record]]]


def by_key(messages: Sequence[Record], channels: Sequence[str]) -> list[tuple[str, Record]]:
    """Route each message by the hash of its key modulo the number of channels: the default repack function. Raises
    `InvalidRequest` for a key that is no bytes."""
    try:
        return [(channels[xxhash.xxh3_64_intdigest(message.key) % len(channels)], message) for message in messages]
    except TypeError:
        for message in messages:
            check_values(Record, message)
        raise


class MsgStream(StreamBase[BufferedChannel]):
    """Produces to channels and consumes channels, each on its own; one stream may do both.

    A producer through a `ChannelOwner` appends to channels that this owns: stamped, numbered and ticked. Without
    one it appends to unowned channels (event and control channels): stamped by `clock`, with term 0, many producers at
    once. A consumer is an async iterator of `MsgPack`s with the messages that were there: no order between channels,
    the order of the log within each. On a log of topics that others made (`Capabilities.foreign_topics`) a message is
    an entry as it is there: key, headers, body, no stamp; a producer channel may be a topic, whose partition the key
    decides. Choose where to start with `as_consumer` or `seek`, or one after the other. Memory
    is bounded by `buffer_bytes`.
    """

    @checked
    def __init__(
        self,
        wal: Wal,
        clock: HybridClock,
        *,
        group: str = "",
        buffer_bytes: int = BUFFER_BYTES,
        on_bad: OnBadRecord | None = None,
        reset_to: From | None = None,
        resets: Counter | None = None,
        where: str | None = None,
    ) -> None:
        """Messages that do not pass the filter `where`, an expression over their tags and header fields, are left out,
        before they are sent where the log's owner can do that.

        `reset_to` says where a channel goes on whose next entries retention has removed; None: iterating raises
        `PositionLost`. `resets` counts that, and so do `counts`. `group` is noted in positions; `on_bad` gets entries
        that cannot be read. Raises `InvalidFilter`."""
        super().__init__(wal, group, buffer_bytes, on_bad, reset_to, resets, where=where)
        self._clock = clock
        self._owner: ChannelOwner | None = None
        self._targets: tuple[str, ...] = ()
        self._repack: Repack = by_key

    # ---- producing --------------------------------------------------------------------------------------------------

    @checked
    def as_producer(
        self, channels: Sequence[str], *, owner: ChannelOwner | None = None, repack: Repack | None = None
    ) -> None:
        """Produce to `channels`, through `owner` where that is given. `repack` says which message goes to which
        channel, and may change messages; its result is used unchanged."""
        self._targets = tuple(dict.fromkeys(channels))
        self._owner = owner
        self._repack = repack or by_key

    @checked
    async def produce(self, messages: Sequence[Record]) -> dict[str, list[bytes]]:
        """Append messages in one commit; when it returns they are as durable as their channels promise. Returns the ids
        per channel, in order (none where a `ChannelOwner` learned later that it happened). Without messages nothing
        happens. Raises `InvalidRequest` without producer channels or for a message to a channel that is not one of
        them, having sent nothing, and what the log raises."""
        targets = self._check_producer()
        routed: Sequence[tuple[str, Record]] = self._repack(messages, targets) if messages else ()
        foreign = {channel for channel, _ in routed} - set(targets)
        if foreign:
            raise InvalidRequest(f"the repack function chose {sorted(foreign)[0]}, which is not a producer channel")
        return await self._append(routed)

    @checked
    async def broadcast(self, message: Record) -> dict[str, list[bytes]]:
        """Append `message` to every producer channel, in one commit. Returns and raises as `produce` does."""
        return await self._append([(channel, message) for channel in self._check_producer()])

    def _check_producer(self) -> tuple[str, ...]:
        if self._closed:
            raise Closed("the stream is closed")
        if not self._targets:
            raise InvalidRequest("the stream has no producer channels: as_producer first")
        return self._targets

    async def _append(self, routed: Sequence[tuple[str, Record]]) -> dict[str, list[bytes]]:
        if not routed:
            return {}
        if self._owner is not None:
            appended = await self._owner.append(routed)
            return _by_channel(routed, appended.ids)
        entries: list[Append] = []
        if self._wal.capabilities.foreign_topics:
            entries += [plain_append(channel, message, self._clock) for channel, message in routed]
        else:
            for channel, message in routed:
                ts = self._clock.now()
                entries.append(Append(channel, stamp(message, ts, 0, 0), ts))
        return _by_channel(routed, await self._wal.append_many(entries))

    # ---- consuming --------------------------------------------------------------------------------------------------

    async def __anext__(self) -> MsgPack:
        self._start_reading()
        while not self._closed:
            if any(channel.buffer for channel in self._channels.values()):
                return self._pack()
            if self._failure is not None:
                raise self._failure
            self._progress.clear()
            await self._progress.wait()
        raise StopAsyncIteration

    def _pack(self) -> MsgPack:
        messages: list[Record] = []
        starts: dict[str, Position] = {}
        ends: dict[str, Position] = {}
        known = next(channel.buffer[0].ts for channel in self._channels.values() if channel.buffer)
        for name in sorted(self._channels):
            channel = self._channels[name]
            taken = list(channel.buffer)
            starts[name] = self._position(channel, taken[0].ts if taken else known)
            channel.buffer.clear()
            channel.handed_out(taken, None)
            ends[name] = self._position(channel, taken[-1].ts if taken else known)
            messages += taken
        return MsgPack(messages[0].ts, messages[-1].ts, messages, starts, ends)

    def _position(self, channel: BufferedChannel, ts: int) -> Position:
        return Position(channel.name, *channel.position, ts, self._wal.name, self.group)

    def _new_channel(self, reader: ChannelReader, start: Start) -> BufferedChannel:
        return BufferedChannel(reader, start)

    def _keep(self, channel: BufferedChannel, record: Record) -> None:
        if record.id <= channel.skipped or isinstance(record, LeftOutRecord):
            channel.skip(record)
        else:
            channel.keep(record)

    # ---- positions --------------------------------------------------------------------------------------------------

    @checked
    async def latest_id(self, channel: str) -> bytes | None:
        """The id of the last acknowledged entry of `channel`, None when there was none ever."""
        return await self._wal.latest_id(channel)

    @checked
    def position_of(self, channel: str, message: Record) -> Position:
        """The position of `message` in `channel`, to seek behind it, or with `include_current` to it, also within a
        batch, where the rest of it follows. Raises `InvalidRequest` for a message that was not read from a log, and for
        one of a batch that no owner has numbered: only numbers distinguish the rest of a batch from a batch that was
        never whole."""
        if not message.id:
            raise InvalidRequest("the message was not read from a log, so it has no position")
        if message.part is not None and message.part.of > 1 and message.term == 0:
            raise InvalidRequest(
                "the message is a part of a batch in a channel without an owner, where a batch can only be read whole: "
                "take the position of a message that is in no batch, or the end positions of a pack"
            )
        return Position(channel, message.id, message.term, message.cseq, message.ts, self._wal.name, self.group)


def _by_channel(routed: Sequence[tuple[str, Record]], ids: Sequence[bytes]) -> dict[str, list[bytes]]:
    result: dict[str, list[bytes]] = {channel: [] for channel, _ in routed}
    for (channel, _), id in zip(routed, ids, strict=False):
        result[channel].append(id)
    return result
