"""Announce time: ticks in the log for channels that had records, one heartbeat for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from threading import RLock

from ..errors import TidewalError
from ..log.heartbeats import Announcement, heartbeat
from ..log.record import Record, RecordType, stamp
from ..log.wal import Append, ControlAppend, Wal
from .observer import ChannelOwnerObserver
from .owned_channel import OwnedChannel, SyncPoint

_TICK = Record(RecordType.TIME_TICK)


class Ticker:
    """Stores ticks and announces times, each as far as `sync_point` promises. All methods hold the channel owner's
    lock."""

    def __init__(
        self,
        wal: Wal,
        lock: RLock,
        owned: Mapping[str, OwnedChannel],
        sync_point: Callable[[], SyncPoint],
        heartbeat_channel: str,
        observer: ChannelOwnerObserver,
    ) -> None:
        self._wal = wal
        self._lock = lock
        self._owned = owned
        self._sync_point = sync_point
        self._heartbeat_channel = heartbeat_channel
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._running = False
        self._everywhere = False  # the next tick is stored in every channel
        self._waiters: list[asyncio.Future[None]] = []

    def tick_now(self, *, everywhere: bool = False) -> asyncio.Future[None]:
        """Store a tick in every channel that needs one, or in every one. The future ends when that covers all
        acknowledged before this call; it raises what storing raised."""
        future: asyncio.Future[None] = self._loop.create_future()
        with self._lock:
            self._waiters.append(future)
            self._everywhere = self._everywhere or everywhere
            self.tick()
        return future

    def tick(self) -> None:
        """Store ticks where they are due, unless some are in flight."""
        with self._lock:
            if self._running:
                return
            waiters, self._waiters = self._waiters, []
            try:
                self._submit(self._sync_point().time, waiters)
            except TidewalError as error:
                self._end(waiters, error)

    def _submit(self, time: int, waiters: list[asyncio.Future[None]]) -> None:
        everywhere, self._everywhere = self._everywhere, False
        due = [own for own in self._owned.values() if own.open and (everywhere or own.acked_ts > own.ticked)]
        if not due:
            self._end(waiters, None)
            return
        numbered = [(own, own.next()) for own in due]
        entries = [ControlAppend(own.channel, stamp(_TICK, time, own.term, cseq), time) for own, cseq in numbered]
        self._running = True
        try:
            self._wal.submit(entries, partial(self._ticked, time, numbered, waiters))
        except BaseException:
            self._running = False
            for own in due:
                own.take_back()
            raise

    def _ticked(
        self,
        time: int,
        numbered: list[tuple[OwnedChannel, int]],
        waiters: list[asyncio.Future[None]],
        result: list[bytes] | TidewalError,
    ) -> None:
        """The WAL's result, on any thread."""
        with self._lock:
            self._running = False
            error = result if isinstance(result, TidewalError) else None
            if not isinstance(result, TidewalError):
                for (own, cseq), id in zip(numbered, result, strict=True):
                    own.ticked = max(own.ticked, time)
                    own.ack_control(cseq, id)
                self.announce()
            self._observer.ticked(len(numbered), error)
            self._end(waiters, error)
            if self._waiters:
                self.tick()

    def _end(self, waiters: list[asyncio.Future[None]], error: TidewalError | None) -> None:
        def end() -> None:
            for waiter in waiters:
                if waiter.done():
                    continue
                if error is None:
                    waiter.set_result(None)
                else:
                    waiter.set_exception(error)

        if waiters:
            self._loop.call_soon_threadsafe(end)

    def announce(self) -> None:
        """Announce the time to the readers of all channels, without storing anything."""
        with self._lock:
            try:
                point = self._sync_point()
                if not self._heartbeat_channel or not point.channels:
                    return
                announcements = [
                    Announcement(name, at.term, at.cseq, point.time) for name, at in point.channels.items()
                ]
                payload = stamp(heartbeat(announcements), point.time, 0, 0)
                self._wal.submit([Append(self._heartbeat_channel, payload, point.time)], _ignore)
                self._observer.announced(point)
            except TidewalError as error:  # the next turn tries again; until then readers see the lag
                self._observer.silent(error)


def _ignore(_: list[bytes] | TidewalError) -> None:
    """A heartbeat that is lost is followed by another."""
