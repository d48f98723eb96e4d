"""A reader of one channel: a thread that takes messages from the client library, and the iterator that it fills.

The library reconnects by itself, and then repeats messages: the ids tell which are new. Two things are checked here:
that no entry is missing between two ledgers (retention removed what a slow reader had not read), and that the channel
has no more entries when no message comes (otherwise the reader is opened anew).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ...runtime.errors import ChannelNotFound, Closed, TidewalError, Unavailable
from ...runtime.log.read_ahead import ReadAhead
from ...runtime.log.stalls import Waiting
from ...runtime.log.wal import Entry, Headers
from ...runtime.loop_bridge import LoopNotifier
from . import seek
from .client import NativeMessage, NativeTimeout, ends_batch, ignore, timestamp_of
from .failures import call_failure
from .foreign_topics import content_of
from .foreign_topics import timestamp_of as foreign_timestamp_of
from .ids import BEFORE_ALL, MessagePlace, encode, pack
from .topics import TopicContents

if TYPE_CHECKING:
    from .wal import Pulsar

log: logging.Logger = logging.getLogger("tidewal.pulsar")

READY_BYTES = 4 * 1024 * 1024  # decoded and waiting for the iterator; over it no more is taken from the library
BURST_BYTES = 4 * 1024 * 1024  # passed on together, and one message more
ENTRY_OVERHEAD_BYTES = 200
BURST_ENTRIES = 512  # passed on together while more messages are available
REST_OF_BATCH_MS = 100  # the batch is in the client library already
LOOK_AROUND_MS = 1000  # interval at which a waiting reader checks whether it is closed or disconnected
FIRST_SILENCE_LOOKS = 3  # after so many intervals without a message it asks the broker whether there is one
LONGEST_SILENCE_LOOKS = 30  # limit of that number, which doubles each time that there is none


make_entry: Callable[[tuple[bytes, int, bytes, bytes | None, Headers]], Entry] = cast(
    "Any", partial(tuple.__new__, Entry)
)


class ChannelFetcher:
    """Reads one channel's messages after `after`, on a thread of its own, until it is closed or fails."""

    def __init__(
        self, wal: Pulsar, channel: str, incarnation: str, after: MessagePlace, notifier: LoopNotifier
    ) -> None:
        """`incarnation` identifies the channel among those of its name; `notifier` is the one of the iterator's loop.
        Blocks while the reader is opened."""
        self._incarnation = incarnation
        self._wal = wal
        self._channel = channel
        self._notifier = notifier
        self._after: tuple[int, int, int] = after  # a `MessagePlace`, as a plain tuple for speed
        self._read_upto = after  # `after`, or the place before the ledger in use once all earlier ones are read
        self._native = wal.open_reader(channel, after)
        self._foreign = wal.is_foreign(channel)
        self._timestamp_of = foreign_timestamp_of if self._foreign else timestamp_of
        self._closed = False
        self._room = threading.Event()
        self._ready: ReadAhead[Sequence[Entry]] = ReadAhead(READY_BYTES, self._room.set)
        self._thread = threading.Thread(target=self._run, name=f"tidewal-pulsar-read-{channel}", daemon=True)
        self._thread.start()

    def take(self) -> Sequence[Entry] | None:
        """The entries of the next burst; None when none are ready. Raises what has ended the fetcher, once none is
        ready any more."""
        return self._ready.take()

    async def wait(self) -> None:
        """Return when `take` has entries, or the fetcher has ended."""
        await self._ready.wait(self._notifier)

    def end(self, error: TidewalError) -> None:
        """End with this error, which `take` raises; from any thread, without waiting."""
        if self._closed:
            return
        self._closed = True
        self._ready.end(error)
        self._native.close_async(ignore)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait until the thread has ended. Blocks."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._burst()
        except Exception as error:
            self.end(call_failure(error, f"reading {self._channel}", channel=self._channel))

    def _burst(self) -> None:
        """Pass on the messages that are available, but no part of a batch; wait for the first message where there is
        none."""
        burst: list[Entry] = []
        size = 0
        message: NativeMessage | None = None
        try:
            while len(burst) < BURST_ENTRIES and size < BURST_BYTES:
                message = self._first() if message is None else self._next(message)
                if message is None:
                    return
                entry = self._entry(message)
                if entry is not None:
                    burst.append(entry)
                    size += len(entry.payload) + ENTRY_OVERHEAD_BYTES
        finally:
            if burst:
                self._hand_over(burst, size)

    def _next(self, message: NativeMessage) -> NativeMessage | None:
        """The message after this one, if it is available, or about to be because it is in the same batch."""
        try:
            return self._native.read_next(0)
        except NativeTimeout:
            if ends_batch(message.message_id()):
                return None
        with contextlib.suppress(NativeTimeout):
            return self._native.read_next(REST_OF_BATCH_MS)
        return None

    def _hand_over(self, burst: list[Entry], size: int) -> None:
        self._ready.put(burst, size)
        while not self._ready.has_room():
            self._room.wait()
            self._room.clear()

    def _entry(self, message: NativeMessage) -> Entry | None:
        """The message as an entry; None when it was read before."""
        id = message.message_id()
        place = (id.ledger_id(), id.entry_id(), max(id.batch_index(), 0))
        after = self._after
        if place <= after:
            return None
        if place[0] != after[0] and after != BEFORE_ALL:
            self._check_nothing_between(MessagePlace(*place))
        self._after = place
        timestamp = self._timestamp_of(message)
        if self._foreign:
            return make_entry((pack(*place), timestamp, *content_of(message)))
        return make_entry((pack(*place), timestamp, message.data(), None, ()))

    def _check_nothing_between(self, place: MessagePlace) -> None:
        after = max(MessagePlace(*self._after), self._read_upto)
        if place.entry == 0 and after.ledger == place.ledger:
            return
        contents = self._contents()
        if place.entry != 0 or contents.has_between(after, place, time.time_ns() // 1_000_000):
            raise seek.lost(self._wal, self._channel, encode(after.stored), contents)

    def _contents(self) -> TopicContents:
        while True:
            try:
                return self._of_this_channel(self._wal.contents(self._channel))
            except Unavailable as error:
                if self._closed:
                    raise
                log.warning(
                    "reading %s waits for the broker: %s", self._channel, error, extra={"channel": self._channel}
                )

    def _of_this_channel(self, contents: TopicContents) -> TopicContents:
        """The same contents. Raises `ChannelNotFound` where they are those of a later channel of the name."""
        if contents.incarnation != self._incarnation:
            raise ChannelNotFound(f"channel {self._channel} was dropped, and created again", channel=self._channel)
        return contents

    def _first(self) -> NativeMessage | None:
        """The next message; None when the fetcher was closed meanwhile."""
        stalls = self._wal.stalls
        waiting: Waiting | None = None  # for an answer of the broker, or for the entries that it reports
        looks = 0
        silence_looks = FIRST_SILENCE_LOOKS
        missing = False
        try:
            while not self._closed:
                try:
                    return self._native.read_next(LOOK_AROUND_MS)
                except NativeTimeout:
                    looks += 1
                except Exception:
                    if self._closed:
                        return None
                    raise
                connected = self._native.is_connected()
                if looks < silence_looks and not missing and connected:
                    continue
                looks = 0
                silence_looks = min(2 * silence_looks, LONGEST_SILENCE_LOOKS)
                waiting = waiting or stalls.begin("read", self._channel)
                missed_before, answer = missing, self._missing_something()
                missing = bool(answer)
                if missing and missed_before:  # once may be a message that is about to arrive
                    missing = False
                    stalls.retry(waiting, "silent although there is more to read")
                    self._reopen()
                elif answer is False and connected:
                    stalls.end(waiting)
                    waiting = None
            return None
        finally:
            if waiting is not None:
                stalls.end(waiting)

    def _missing_something(self) -> bool | None:
        """Whether the broker has entries that this reader has not received; None when it does not answer. Raises
        `ChannelNotFound`."""
        try:
            contents = self._of_this_channel(self._wal.contents(self._channel))
        except Unavailable:
            return None  # the library reconnects when the broker is back
        if contents.last[:2] > self._after[:2]:
            return True
        self._read_upto = max(self._read_upto, contents.end)
        return False

    def _reopen(self) -> None:
        log.warning(
            "the reader of %s was silent although there is more to read: opened anew",
            self._channel,
            extra={"channel": self._channel},
        )
        self._native.close_async(ignore)
        try:
            self._native = self._wal.open_reader(self._channel, MessagePlace(*self._after))
        except Unavailable as error:
            log.warning("%s", error)
        if self._closed:
            self._native.close_async(ignore)


class Reader(AsyncIterator[Sequence[Entry]]):
    """`Wal.read`: an async iterator of batches. One task at a time may await it; `aclose` may come from any."""

    def __init__(
        self, begin_opening: Callable[[], Future[ChannelFetcher]], executor: Executor, on_dropped: Callable[[], None]
    ) -> None:
        """`begin_opening` is called when the iterator is first awaited, which fixes the start; `on_dropped` when the
        channel turns out to be dropped. The executor waits for the fetcher's thread."""
        self._on_dropped = on_dropped
        self._begin_opening = begin_opening
        self._executor = executor
        self._fetcher: ChannelFetcher | None = None
        self._opening: asyncio.Future[ChannelFetcher] | None = None
        self._closed = False

    async def __anext__(self) -> Sequence[Entry]:
        try:
            while not self._closed:
                fetcher = self._fetcher or await self._open()
                entries = fetcher.take()
                if entries:
                    return entries
                await fetcher.wait()
        except Closed:
            self._closed = True
        except ChannelNotFound:
            self._on_dropped()
            await self.aclose()
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the iteration, also for a task that is waiting in it, and wait until the fetcher's thread has ended."""
        self._closed = True
        fetcher = self._fetcher
        if fetcher is not None:
            fetcher.end(Closed("the reader is closed"))
            await asyncio.get_running_loop().run_in_executor(self._executor, fetcher.join)

    async def _open(self) -> ChannelFetcher:
        if self._opening is None:  # a task that was cancelled while it waited leaves its opening to the next
            self._opening = asyncio.wrap_future(self._begin_opening())
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    def _opened(self, opening: asyncio.Future[ChannelFetcher]) -> None:
        self._opening = None
        if opening.cancelled() or opening.exception() is not None:
            return
        self._fetcher = opening.result()
        if self._closed:
            self._fetcher.end(Closed("the reader is closed"))
