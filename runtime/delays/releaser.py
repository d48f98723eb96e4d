"""What releases delayed messages: part of the process that owns the delay channel.

It reads the delay channel as any reader does, asks the owner for a time up to which nothing follows there, and appends
what is due by then, by the log's time and by the wall clock, in the order of ids. Toward each channel it is a source
whose offsets are these ids (`ReleaseTargets`): so whatever happens to it, each message is there once, and in order, and
the channel itself says how far it has come. What retention removes of a channel, or who drops it, takes that
along: so it also notes now and then, in the delay channel and as the same source, up to which id all is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from ..clock import HybridClock
from ..errors import (
    BadRecord,
    ChannelNotFound,
    MessageTooLarge,
    OutcomeUnknown,
    TidewalError,
    TopicEpochEnded,
    Unavailable,
)
from ..log.record import Record
from ..log.wal import Entry, From, FromId, Start, Wal
from ..ownership.channel_owner import ChannelOwner
from ..streams.channel_reader import ChannelReader
from ..streams.stream_base import reading
from ..waiting import begun, ended
from .buffer import DelayBuffer
from .delayed import DelayedMessage
from .head import DelayHead
from .pending import OVERHEAD_BYTES, DelayedPlace, Pending, Stored, page_of, read_stored
from .targets import ReleaseTargets, note_offset

READ_PER_TURN: Final = 2_048  # entries, 30 ms: with 512 a fifth of what was sent at full speed was not read
RELEASED_AT_ONCE: Final = 2_000  # messages
RELEASED_BYTES: Final = 4 * 1024 * 1024  # about: below what every log takes at once
PAGE_BYTES: Final = 1024 * 1024  # about: of a page; where a channel takes less of a record, it gets halves of it
LOOK_S: Final = 1.0  # how long a set wall clock may go unnoticed
LEAST_S: Final = 0.005  # between two looks, where log time is behind the wall clock
FIRST_PAUSE_S: Final = 0.05
LAST_PAUSE_S: Final = 1.0
HELD_UP_S: Final = 10.0  # that one channel may hold up the others, before they go on without it
TRUNCATE_S: Final = 10.0  # between two notes of what is done, and looks at what the delay channel needs no more
REWRITE_BYTES: Final = 64 * 1024 * 1024  # read since what is pending was written again; where that is more, as much
PAGES_AT_ONCE: Final = 4  # in flight, so that what comes meanwhile is not much
HEAD: Final = ".head"  # with it a releaser is the source of its `DelayHead`s

Refused = Callable[[DelayedMessage, str], Awaitable[None]]
"""Keeps a message that its channel does not take, with the reason; returns once it is durable."""

Released = Callable[[Sequence[DelayedMessage]], object]
"""Is told of messages, in order, once they are durable in their channel."""

Result = TypeVar("Result")

_log = logging.getLogger("tidewal.delays")


@dataclass(slots=True)
class DelayCounts:
    """What a releaser has done since it was started."""

    released: int = 0
    refused: int = 0


class Releaser:
    """Releases what is due in the delay channel `channel`, which `owner` owns, as the source `source`, into `targets`.
    `refused` gets what its channel does not take. `buffer_bytes` says how much memory it may take now. `run` it in one
    task."""

    def __init__(
        self,
        wal: Wal,
        owner: ChannelOwner,
        channel: str,
        source: str,
        clock: HybridClock,
        refused: Refused,
        targets: ReleaseTargets,
        *,
        buffer_bytes: Callable[[], int],
        released: Released = lambda messages: None,
    ) -> None:
        self.counts: DelayCounts = DelayCounts()
        self._wal, self._owner, self._channel, self._source = wal, owner, channel, source
        self._clock, self._refused, self._released = clock, refused, released
        self._targets, self._buffer_bytes = targets, buffer_bytes
        self._truncated_s = clock.clock.monotonic()
        self._head_place: DelayedPlace | None = None  # of the last head that is noted, or may come to be
        self._buffer = DelayBuffer(buffer_bytes(), owner.source_offset(source, channel))
        self._refusals: dict[bytes, asyncio.Task[None]] = {}  # under way, by id of the message
        self._last_page = b""  # the id of the last page that was written here
        self._exhausted = False  # the last pass
        self._start_pass()  # so that there is one

    def _start_pass(self) -> None:
        """Begin at the head, or, where that is used up or there is none, at the first that is pending."""
        head, exhausted, first = self._head(), self._exhausted, self._buffer.first_place
        self._exhausted = False
        limit, done = self._buffer_bytes(), self._buffer.done
        if head is not None and not exhausted:
            first = head.place
            self._buffer = DelayBuffer(limit, done, head.horizon or None, head.left_out)
        else:
            self._buffer = DelayBuffer(limit, done)
        self._start: Start = FromId(first.id, inclusive=True) if first is not None else From.EARLIEST
        after = (first.term, first.cseq - 1) if first is not None else (0, 0)
        self._reader = ChannelReader(self._channel, on_bad=self._bad, after=after)
        self._place = DelayedPlace(b"", 0, 0)
        self._read_bytes = 0  # since what is pending was written again
        self._moved = asyncio.Event()  # more was read; for the looks
        self._read_more = asyncio.Event()  # the same, for the rewriting

    def _head(self) -> DelayHead | None:
        return DelayHead.from_bytes(self._owner.source_offset(self._source + HEAD, self._channel))

    @property
    def pending(self) -> int:
        """How many messages are known to be pending; those beyond the buffer are not counted."""
        return len(self._buffer)

    async def run(self) -> None:
        """Release until cancelled. Errors that may pass are waited out; raises any other one."""
        try:
            while True:
                await self._patiently(self._run_pass)
        finally:
            await ended(*self._refusals.values())
            self._refusals.clear()

    async def _patiently(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """The result of `call`, which is called again after errors that may pass."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return await call()
            except TidewalError as error:
                if not (error.retryable or isinstance(error, OutcomeUnknown)):
                    raise
                _log.info("delayed messages of %s wait: %s", self._channel, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _run_pass(self) -> None:
        """Read the delay channel, and release, until the buffer is exhausted."""
        self._start_pass()
        read = asyncio.create_task(self._read(), name=f"read {self._channel}")
        rewrite = asyncio.create_task(self._rewrite(), name=f"rewrite {self._channel}")
        try:
            while not self._exhausted:
                for task in (read, rewrite):
                    if task.done():
                        task.result()
                        return
                time = await self._read_to_now(read)
                self._buffer.fit(self._buffer_bytes())
                await self._release_due(time)
                self._exhausted = self._buffer.exhausted
                await self._tidy()
                if not self._buffer and self._buffer.horizon is None:
                    await self._targets.nothing_pending(time)
                await self._until_due()
        finally:
            await ended(read, rewrite)

    # ---- reading ----------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        async with reading(self._wal, self._channel, await self._start_there(), turn=READ_PER_TURN) as batches:
            async for entries in batches:
                self._take(self._reader.accept(entries))
                self._read_bytes += sum([len(entry.payload) + OVERHEAD_BYTES for entry in entries])
                self._moved.set()
                self._read_more.set()

    async def _start_there(self) -> Start:
        """The start of the pass, or where that was let go of the first there is: of what a head has left out a later
        pass may have released the first, and nothing noted another head since."""
        start = self._start
        if not isinstance(start, FromId):
            return start
        first_id = (await self._wal.describe(self._channel)).first_id
        return start if first_id is not None and first_id <= start.id else From.EARLIEST

    def _take(self, records: Sequence[Record]) -> None:
        released: dict[str, bytes] = {}  # up to which id, by channel
        for record in records:
            # from its middle a batch cannot be read again by a process that begins there
            if record.part is None or record.part.number == 0:
                self._place = DelayedPlace(record.id, record.term, record.cseq)
            for stored in self._stored_in(record):
                id, channel, _ = stored
                upto = released.get(channel)
                if upto is None:
                    upto = released[channel] = self._targets.reached(channel)
                if id > upto:
                    self._buffer.add(stored, self._place)

    def _stored_in(self, record: Record) -> Sequence[Stored]:
        """What the record says, where its owner has written it."""
        try:
            return read_stored(record) if record.term else ()
        except BadRecord as error:
            _log.error("a record of %s cannot be read: %s", self._channel, error)
            return ()

    def _bad(self, channel: str, entry: Entry, error: BadRecord) -> None:
        _log.error("an entry of %s cannot be read: %s", channel, error)

    async def _read_to_now(self, read: asyncio.Task[None]) -> int:
        """A time up to which all that the delay channel will ever have was read."""
        synced = await self._patiently(lambda: self._owner.sync([self._channel]))
        id = synced.channels[self._channel].id
        while self._reader.position[0] < id and not read.done():
            self._moved.clear()
            moved = asyncio.ensure_future(self._moved.wait())
            await asyncio.wait({moved, read}, return_when=asyncio.FIRST_COMPLETED)
            moved.cancel()
        if read.done():
            read.result()
            raise Unavailable(f"{self._channel} is read no further; retry")
        return synced.time

    async def _until_due(self) -> None:
        """Wait until the next message is due, or another one was read."""
        if self._exhausted:
            return
        due_ms = self._buffer.next_due_ms
        wait_s = LOOK_S if due_ms is None else (due_ms - self._clock.clock.wall_ms()) / 1000
        self._moved.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(LOOK_S, max(LEAST_S, wait_s))):
                await self._moved.wait()

    # ---- releasing --------------------------------------------------------------------------------------------------

    async def _release_due(self, upto: int) -> None:
        """Append what is due, channel by channel side by side, in the order of ids within each."""
        messages: list[DelayedMessage] | None = None
        while messages is None or messages:
            wall_ms = self._clock.clock.wall_ms()
            messages = left = self._buffer.hand_out(upto, wall_ms, RELEASED_AT_ONCE, RELEASED_BYTES)
            waiting: list[DelayedMessage] = []
            while left and not waiting:  # what a channel does not take any more goes to another
                left, waiting = await self._release_all(left)
            self._buffer.finish({each.id for each in (*left, *waiting)})
            if waiting:
                return  # what is due by then may be for other channels

    async def _release_all(
        self, messages: Sequence[DelayedMessage]
    ) -> tuple[list[DelayedMessage], list[DelayedMessage]]:
        """Append messages to the channels that take them now. Returns, in order, those that are for others by then; and
        those of channels that take them no sooner than in `HELD_UP_S`, and may have some of them."""
        await self._patiently(self._targets.settle)
        divided = self._targets.divided(messages)
        releases = {asyncio.create_task(self._release(target, batch)): batch for target, batch in divided.items()}
        pending: set[asyncio.Task[None]] = set()
        try:
            if releases:
                _, pending = await asyncio.wait(releases, timeout=HELD_UP_S)
        finally:
            await ended(*releases)
        if pending:
            await self._patiently(self._targets.note_reached)  # retention goes on while one holds up the others
        for each in releases.keys() - pending:
            each.result()
        left = [message for each, batch in releases.items() if each not in pending for message in batch]
        return sorted(left, key=_id), [message for each in pending for message in releases[each]]

    async def _release(self, target: str, left: list[DelayedMessage]) -> None:
        """Append messages to a channel, and take out of `left` what is dealt with, also where this is cancelled: one by
        one that may take long. Returns with those left that the channel may not have, and does not take any more."""
        try:
            await self._patiently(lambda: self._targets.append(target, left))
        except TopicEpochEnded:
            return
        except (MessageTooLarge, ChannelNotFound) as error:
            if len(left) == 1:
                await self._refuse(left[0], str(error))
                left.clear()
            while left:
                await self._release(target, one := left[:1])
                if one:
                    return
                del left[0]
        else:
            self.counts.released += len(left)
            self._released(tuple(left))
            left.clear()

    async def _refuse(self, message: DelayedMessage, reason: str) -> None:
        """Keep a message that its channel does not take. Where this is cancelled that goes on, and the next call waits
        for it: it would be kept twice."""
        if message.id not in self._refusals:
            refused = self._patiently(lambda: self._refused(message, reason))
            self._refusals[message.id] = asyncio.create_task(refused, name=f"refuse a message of {self._channel}")
        refusal = self._refusals[message.id]
        try:
            await asyncio.shield(refusal)
        finally:
            if refusal.done():
                del self._refusals[message.id]
        self.counts.refused += 1

    # ---- what is needed no more -------------------------------------------------------------------------------------

    async def _tidy(self) -> None:
        """Note what is done, and let go of what the delay channel has below everything that is pending."""
        now_s = self._clock.clock.monotonic()
        if now_s - self._truncated_s < TRUNCATE_S and not self._exhausted:  # the next pass may read for long
            return
        self._truncated_s = now_s
        await self._note(self._source, self._buffer.done)
        await self._patiently(self._targets.note_reached)  # of which only the targets know, from before a start
        first, head = self._buffer.first_place, self._head()
        needed = first.id if first is not None else self._reader.position[0]
        known = self._owner.checkpoints()[self._channel]  # from here on a next owner must read
        starts = [place.id for place in (head and head.place, self._head_place) if place is not None]
        if needed and known:
            await self._wal.truncate(self._channel, min(needed, known, *starts))

    async def _note(self, source: str, offset: bytes) -> None:
        """Store in the delay channel how far a source has come."""
        await self._patiently(lambda: note_offset(self._owner, source, self._channel, offset))

    # What is pending and in memory is written again at the channel's end, under the same ids, once enough was read
    # since it was last. So a message that is due in a year keeps no year of the channel, unless it is one of those that
    # do not fit into memory; and a start need not read these before they are next. It is a task of its own: it waits
    # neither for a look, nor for what is not released, nor until a pass has read all that comes.

    async def _rewrite(self) -> None:
        """Write what is pending again, each time that enough was read."""
        while True:
            await self._read_more.wait()
            self._read_more.clear()
            head, enough = self._head(), max(min(REWRITE_BYTES, self._buffer_bytes()), self._buffer.bytes)
            # a start behind the cancellation of a message would find a page from before that, which was not read yet
            is_further = self._place.id > self._last_page and (head is None or self._place > head.place)
            if self._read_bytes >= enough and is_further:
                await self._write_again()

    async def _write_again(self) -> None:
        """Write all that is pending and in memory again, and note that a start may begin where this began."""
        place, read_bytes, written_bytes = self._place, self._read_bytes, 0
        batches = self._buffer.batches(RELEASED_AT_ONCE, PAGE_BYTES)

        async def copy() -> None:
            nonlocal written_bytes
            while batches:
                written_bytes += await self._append_page(batches.pop())

        try:
            async with begun(*(copy() for _ in range(PAGES_AT_ONCE))) as copies:
                await asyncio.gather(*copies)
        except MessageTooLarge:  # one that fills a record does not fit into a page: then all stay where they are
            pass
        else:
            head = DelayHead(place, self._buffer.horizon or b"", self._buffer.left_out)
            self._head_place = place  # also where the pass ends before that is answered
            await self._note(self._source + HEAD, head.to_bytes())
        self._read_bytes -= read_bytes + written_bytes  # its own pages will be read, too

    async def _append_page(self, batch: Sequence[Pending]) -> int:
        """Append a batch as a page, or as several where the channel takes less; returns about how many bytes these are
        to read. Raises `MessageTooLarge` where it does not take one with a single message."""
        page = page_of(batch)
        try:
            appended = await self._patiently(lambda: self._owner.append([(self._channel, page)]))
            self._last_page = max([self._last_page, *appended.ids])
        except MessageTooLarge:
            if len(batch) == 1:
                raise
            half = len(batch) // 2
            return await self._append_page(batch[:half]) + await self._append_page(batch[half:])
        return len(page.body) + OVERHEAD_BYTES


def _id(message: DelayedMessage) -> bytes:
    return message.id
