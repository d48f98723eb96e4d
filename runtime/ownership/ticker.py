"""Announce time: ticks in the log for channels that had records, one heartbeat for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from threading import RLock

from ..errors import TidewalError, Unavailable
from ..log.heartbeats import Announcement, heartbeat
from ..log.record import Record, RecordType, stamp
from ..log.wal import Append, ControlAppend, Wal
from .observer import ChannelOwnerObserver
from .owned_channel import OwnedChannel, Promising

_TICK = Record(RecordType.TIME_TICK)


class _Waiter:
    """A call that waits for ticks in some channels."""

    def __init__(self, future: asyncio.Future[None]) -> None:
        self.future = future
        self.awaited = 0  # channels
        self.error: TidewalError | None = None


class Ticker:
    """Stores ticks and announces times, in each channel as far as `promising` says. All methods hold the channel
    owner's lock. A channel whose tick the log does not answer keeps no other from its own."""

    def __init__(
        self,
        wal: Wal,
        lock: RLock,
        promising: Promising,
        heartbeat_channel: str,
        observer: ChannelOwnerObserver,
    ) -> None:
        self._wal = wal
        self._lock = lock
        self._promising = promising
        self._heartbeat_channel = heartbeat_channel
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[str, list[_Waiter]] = {}  # of the next tick, by channel

    def tick_now(self, channels: Iterable[str] | None = None, *, everywhere: bool = False) -> asyncio.Future[None]:
        """Store a tick in each of `channels` that needs one, or in each of them, and then announce all times. The
        future ends when that covers all acknowledged before this call; it raises what storing raised."""
        waiter = _Waiter(self._loop.create_future())
        with self._lock:
            try:
                promising = self._named(channels)
            except TidewalError as error:
                waiter.error = error
                promising = []
            due = [(own, time) for own, time in promising if everywhere or own.acked_ts > own.ticked]
            waiter.awaited = len(due)
            for own, _ in due:
                self._waiters.setdefault(own.channel, []).append(waiter)
            self._tick(due)
            if not due:
                self._end([waiter])
        return waiter.future

    def _named(self, channels: Iterable[str] | None) -> list[tuple[OwnedChannel, int]]:
        promising = self._promising()
        if channels is None:
            return promising
        times = {own.channel: (own, time) for own, time in promising}
        if absent := set(channels) - times.keys():
            raise Unavailable(f"nothing may be promised for {', '.join(sorted(absent))} now; retry")
        return [times[channel] for channel in dict.fromkeys(channels)]

    def tick_all(self) -> None:
        """Store ticks where they are due, and announce the times of all channels to their readers."""
        with self._lock:
            try:
                promising = self._promising()
            except TidewalError as error:  # the next turn tries again; until then readers see the lag
                self._observer.silent(error)
                return
            # not again at one time, as while a transaction is prepared behind which there is a fence
            self._tick([(own, time) for own, time in promising if own.ticked < min(own.acked_ts, time)])
            self._announce(promising)

    def _tick(self, due: list[tuple[OwnedChannel, int]]) -> None:
        """Store ticks in the channels that have none in flight."""
        due = [(own, time) for own, time in due if not own.ticking]
        if not due:
            return
        try:
            self._submit(due)
        except TidewalError as error:
            if len(due) == 1:
                self._observer.silent(error)
                self._arrived(self._waiters.pop(due[0][0].channel, []), error)
            else:
                for each in due:  # one of them may be at fault
                    self._tick([each])

    def _submit(self, due: list[tuple[OwnedChannel, int]]) -> None:
        numbered = [(own, time, own.next()) for own, time in due]
        entries = [ControlAppend(own.channel, stamp(_TICK, time, own.term, cseq), time) for own, time, cseq in numbered]
        waiters = [self._waiters.pop(own.channel, []) for own, _ in due]
        for own, _ in due:
            own.ticking = True
        try:
            self._wal.submit(entries, partial(self._ticked, numbered, waiters))
        except BaseException:
            for (own, _), each in zip(due, waiters, strict=True):
                own.ticking = False
                own.take_back()
                self._waiters[own.channel] = each
            raise

    def _ticked(
        self,
        numbered: list[tuple[OwnedChannel, int, int]],
        waiters: list[list[_Waiter]],
        result: list[bytes] | TidewalError,
    ) -> None:
        """The WAL's result, on any thread."""
        with self._lock:
            error = result if isinstance(result, TidewalError) else None
            for place, (own, time, cseq) in enumerate(numbered):
                own.ticking = False
                if not isinstance(result, TidewalError):
                    own.ticked = max(own.ticked, time)
                    own.ack_control(cseq, result[place])
            self._observer.ticked(len(numbered), error)
            if any(waiters):  # who waits for ticks wants all readers to get so far, those of idle channels, too
                self._announce_now()
            for each in waiters:
                self._arrived(each, error)
            self._tick_awaited([own.channel for own, _, _ in numbered if own.channel in self._waiters])

    def _tick_awaited(self, channels: list[str]) -> None:
        """Store the next ticks that are waited for in `channels`, but for those that have stalled meanwhile: the
        first tick behind their next fence announces the time as well."""
        if not channels:
            return
        error: TidewalError | None = None
        try:
            self._tick([(own, time) for own, time in self._promising() if own.channel in channels])
        except TidewalError as past_lease:
            error = past_lease
        for channel in channels:
            self._arrived(self._waiters.pop(channel, []), error)

    def _arrived(self, waiters: list[_Waiter], error: TidewalError | None) -> None:
        for waiter in waiters:
            waiter.awaited -= 1
            waiter.error = waiter.error or error
        self._end([waiter for waiter in waiters if not waiter.awaited])

    def _end(self, waiters: list[_Waiter]) -> None:
        def end() -> None:
            for waiter in waiters:
                if waiter.future.done():
                    continue
                if waiter.error is None:
                    waiter.future.set_result(None)
                else:
                    waiter.future.set_exception(waiter.error)

        if waiters:
            self._loop.call_soon_threadsafe(end)

    def _announce_now(self) -> None:
        try:
            self._announce(self._promising())
        except TidewalError as error:
            self._observer.silent(error)

    def _announce(self, promising: list[tuple[OwnedChannel, int]]) -> None:
        """Announce the times to the readers of the channels, without storing anything."""
        if not self._heartbeat_channel or not promising:
            return
        announcements = [Announcement(own.channel, own.term, own.acked.cseq, time) for own, time in promising]
        latest = max(time for _, time in promising)
        try:
            payload = stamp(heartbeat(announcements), latest, 0, 0)
            self._wal.submit([Append(self._heartbeat_channel, payload, latest)], _ignore)
            self._observer.announced({own.channel: time for own, time in promising})
        except TidewalError as error:
            self._observer.silent(error)


def _ignore(_: list[bytes] | TidewalError) -> None:
    """A heartbeat that is lost is followed by another."""
