"""The reader of one channel: from the shared tail while it keeps up, from the journal's files while it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from ....runtime.errors import ChannelNotFound, Closed, InvalidRequest, PositionLost
from ....runtime.log.wal import Entry, From, FromId, FromTime, Start
from ..index.history import Cursor, SegmentGone
from ..index.lookup import first_at
from ..journal.channels import decode_id, encode_id
from ..journal.losses import before_loss
from .channel_cache import LiveChannel

if TYPE_CHECKING:
    from .store import RocksMQ

FIRST_PIECE_BYTES = 256 * 1024  # read at once from the files; twice as much each time, as long as it goes on
PIECE_BYTES = 4 * 1024 * 1024
PIECE_ENTRIES = 512  # pieces with so many entries do not grow: handing them over costs little beside making them


class Reader(AsyncIterator[Sequence[Entry]]):
    """`Wal.read`: an async iterator of batches. One task at a time may await it; `aclose` may come from any."""

    def __init__(self, store: RocksMQ, channel: str, start: Start | int) -> None:
        """`start` as a number is the id to go on with, `next_id` of an earlier reader."""
        self._store = store
        self._name = channel
        self._start = start
        self._channel: LiveChannel | None = None
        self.next_id: int = 0  # what comes next; 0 until something was read or waited for
        self._cursor: Cursor | None = None
        self._piece_bytes = FIRST_PIECE_BYTES
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    async def __anext__(self) -> Sequence[Entry]:
        while True:
            if self._closed or self._store.closed:
                raise StopAsyncIteration
            try:
                entries = await self.poll()
            except Closed:
                continue
            if entries:
                return entries
            await self.wait()

    async def aclose(self) -> None:
        """End the iteration, also for a task that is waiting in it."""
        self._closed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def poll(self) -> Sequence[Entry]:
        """The next entries, none at the end of the channel; never waits for appends. Raises `ChannelNotFound`,
        `PositionLost`, `CorruptLog` and `Closed`."""
        channel = self._channel or await self._open()
        while not channel.dropped:
            wanted = self.next_id
            entries = channel.tail.take(wanted)
            if entries is None:
                entries = await self._from_history(channel)
            if channel.losses:
                entries = before_loss(channel.losses, self._name, wanted, self.next_id, entries)
            if entries:
                self.next_id = decode_id(entries[-1].id) + 1
                return entries
            if self.next_id > channel.visible_to:
                return ()
        raise ChannelNotFound(f"channel {self._name} was dropped", channel=self._name)

    async def wait(self) -> None:
        """Return when there may be more to poll, the channel was dropped, or the log or this reader was closed."""
        channel, notifier = self._channel, self._store.notifier()
        if channel is None:
            return
        waiter = self._waiter = notifier.loop.create_future()
        entry = (notifier, waiter)
        channel.waiters.add(entry)
        try:
            # Look again now that appends wake this reader: what became visible before did not.
            if not (channel.visible_to >= self.next_id or channel.dropped or self._store.closed or self._closed):
                await waiter
        finally:
            self._waiter = None
            channel.waiters.discard(entry)

    async def _open(self) -> LiveChannel:
        channel = self._store.find(self._name)
        match self._start:
            case From.EARLIEST:
                self.next_id = channel.first_visible
            case From.LATEST:
                self.next_id = channel.visible_to + 1
            case FromId(id, inclusive):
                self.next_id = first_wanted(channel, id, inclusive=inclusive)
            case FromTime(timestamp):
                end = channel.visible_to + 1
                found = await self._store.blocking(lambda: first_at(channel, self._store.history, timestamp))
                self.next_id = end if found is None else found
            case int(next_id):
                self.next_id = next_id
        self._channel = channel
        return channel

    async def _from_history(self, channel: LiveChannel) -> Sequence[Entry]:
        if channel.policy.ephemeral:
            self.next_id = channel.tail.forgotten_to + 1
            return ()
        if self.next_id <= channel.removed_to:
            raise lost(channel, encode_id(self.next_id))
        next_id, cursor, upto_id = self.next_id, self._cursor, channel.tail.forgotten_to
        piece_bytes = self._piece_bytes
        try:
            entries, self._cursor = await self._store.blocking(
                lambda: self._store.history.read(channel.number, next_id, upto_id, cursor, piece_bytes)
            )
        except SegmentGone:
            self._cursor = None
            return ()
        if next_id <= channel.removed_to and not (entries and decode_id(entries[0].id) == next_id):
            raise lost(channel, encode_id(next_id))  # retention was quicker
        if len(entries) < PIECE_ENTRIES:
            self._piece_bytes = min(2 * piece_bytes, PIECE_BYTES)
        if not entries:
            self.next_id = upto_id + 1  # the journal has none of these ids: there are gaps where an incarnation ended
        return entries


def first_wanted(channel: LiveChannel, id: bytes, *, inclusive: bool) -> int:
    """The first id to deliver for a start at `id`. Raises `PositionLost`."""
    try:
        number = decode_id(id)
    except InvalidRequest:
        raise lost(channel, id) from None
    wanted = number if inclusive else number + 1
    if channel.policy.ephemeral:
        return min(max(wanted, channel.tail.forgotten_to + 1), channel.visible_to + 1)
    if wanted <= channel.removed_to or wanted > channel.visible_to + 1:
        raise lost(channel, id)
    return wanted


def lost(channel: LiveChannel, requested: bytes) -> PositionLost:
    """The error for a position that the channel does not have any more, or never had."""
    first = encode_id(max(channel.first_id, channel.removed_to + 1))
    return PositionLost(
        f"position {requested.hex()} is not in channel {channel.name}, whose first is {first.hex()}",
        requested=requested,
        first_available=first,
        channel=channel.name,
    )
