"""Who commits, and when: what is pending becomes a frame as soon as the one before it is durable.

There is no timer: while a sync runs, the next commit gathers. One party at a time has the turn to commit. A commit of a
size that does not hold up a loop is written by the event loop that has something to append, and the kernel syncs it
meanwhile (`runtime/kernel_sync.py`). Everything else is the writer thread's: large commits, new segments,
appends from threads, disks that can only sync while one waits. When a loop's sync runs and others want to go on, the
thread waits for its end as well as that loop, and whoever is first goes on: a loop that is blocked, or gone, holds
nobody up.

Any error of a write or sync poisons the journal for good (`JournalFailed`, `DiskFull`); a sync is never tried again on
the same pages. Only where nothing was written, because no segment could be made ready, does the journal stay usable
(`DiskPressure`).
"""

from __future__ import annotations

import errno
import logging
import select
import threading
import time
from functools import partial
from typing import Final

from ...runtime.clock import Clock
from ...runtime.disk import Disk, Syncer
from ...runtime.errors import DiskFull, DiskPressure, JournalFailed
from ...runtime.wakeup import Bell, Hub, Hubs
from .channels import ChannelTable
from .commits import Commits, Written
from .index import SegmentSummary
from .measures import Measures
from .pending import Pending, Write

COMMIT_BYTES = 8 * 1024 * 1024
COMMIT_WRITES = 4096
LOOP_COMMIT_BYTES = 2 * 1024 * 1024  # what a loop may write: some tenths of a millisecond
LOOP_WRITE_S = 0.01  # a write that takes longer tells that the disk holds up whoever writes ...
LOOP_PAUSE_S = 1.0  # ... so loops leave it to the thread for so long
PENDING_BYTES = 256 * 1024 * 1024

_log = logging.getLogger(__name__)


class _Thread:
    """Has the turn when the writer thread has it."""


WRITER: Final = _Thread()


class _Flight:
    """A commit that a loop has written, while it is synced."""

    __slots__ = ("shared", "syncer", "written")

    def __init__(self, written: Written, syncer: Syncer | None, *, shared: bool) -> None:
        self.shared = shared  # others wait for it than the loop: the thread goes on if that does not
        self.written, self.syncer = written, syncer  # None: the sync was not begun, and is left to the thread


class Journal:
    """What is pending, and who commits it. Thread-safe."""

    def __init__(
        self,
        disk: Disk,
        commits: Commits,
        *,
        capacity: int,
        clock: Clock,
        lock: threading.Lock,
        hubs: Hubs,
        measures: Measures,
    ) -> None:
        """`capacity` is what a frame may have. Whoever adds to `pending` holds `lock`, and calls `notice` or `wake`."""
        self.failure: JournalFailed | None = None
        self.pending = Pending()
        self._disk, self._commits, self._clock, self._lock, self._hubs = disk, commits, clock, lock, hubs
        self._measures = measures
        self._limit = min(COMMIT_BYTES, capacity // 2)
        self._loop_limit = min(LOOP_COMMIT_BYTES, capacity // 2)
        self._loops_from = 0.0  # when loops may write, by `time.perf_counter`
        self._turn: Hub | _Thread | None = WRITER  # whose it is; changes under the lock
        self._flight: _Flight | None = None
        self._looked_after: _Flight | None = None
        self.company = 1  # how many waited for the last commit of a loop: once so many wait, others will hardly come
        self._awaited = False  # the thread wants to know when a loop with the turn has come to a sync, or let it go
        self._stopping = False
        self._syncers: dict[Hub, Syncer | None] = {}
        self._bell = Bell()
        self._thread = threading.Thread(target=self._run, name="tidewal-journal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def table(self) -> ChannelTable:
        return self._commits.table

    @property
    def sealed(self) -> dict[int, SegmentSummary]:
        return self._commits.sealed

    @property
    def extents(self) -> dict[int, tuple[int, int]]:
        """What the segment in use holds, but for the frames not counted yet: channel number → (last id, bytes)."""
        return self._commits.tally.extents.channels

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    def put(self, write: Write) -> None:
        """Queue for the next commit. Under the lock."""
        self.pending.add(write)
        self.wake()

    def notice(self, hub: Hub, *, at_once: bool = False) -> None:
        """See to it that what is pending is committed, by the running loop if that is possible. Not under the lock.
        With `at_once` perhaps before this returns: not for who holds locks that a callback of an append may want, which
        is told of a failure then."""
        turn = self._turn
        if turn is None:
            if at_once and len(self.pending.waiting) >= self.company:
                self._begin(hub)
            elif not hub.deferring:  # what other tasks append in this turn of the loop goes into the same commit
                hub.defer(partial(self._begin, hub))
        elif turn is not hub and turn is not WRITER:
            self._bell.ring()

    def wake(self) -> None:
        """See to it that what is pending is committed, by the thread or whoever has the turn."""
        if self._turn is not WRITER:
            self._bell.ring()

    def look_after(self) -> None:
        """Let the thread go on where a loop has not come back to its sync since the last time: readers wait, too."""
        flight = self._flight
        if flight is not None and flight is self._looked_after:
            flight.shared = True
            self._bell.ring()
        self._looked_after = flight

    def stop(self) -> None:
        """Commit what is queued, then end the thread. Blocks."""
        self._stopping = True
        self._bell.ring()
        if self._thread.is_alive():
            self._thread.join()
        self._bell.close()
        self._syncers.clear()

    def mark_end(self) -> None:
        """Tell the index where the journal ends, so that the next opening can be sure of it. After `stop`."""
        if self.failure is None:
            self._commits.mark_end()

    # ---- on a loop ---------------------------------------------------------------------------------------------------

    def _begin(self, hub: Hub) -> None:
        """Take the turn and commit what is pending; leave it to the thread where a loop should not."""
        syncer = self._syncer_of(hub)
        with self._lock:
            commit = self.pending
            if self._turn is hub or (self._turn is None and not commit.waiting):
                return
            flies = self._turn is None and syncer is not None and self._suits_loop(commit)
            if flies:
                self.pending, self._turn = Pending(), hub
                self.company = len(commit.waiting)
        if flies and syncer is not None:
            self._fly(hub, commit, syncer)
        else:
            self.wake()

    def _suits_loop(self, commit: Pending) -> bool:
        return (
            commit.size <= self._loop_limit
            and len(commit.waiting) <= COMMIT_WRITES
            and not commit.written
            and self.failure is None
            and self._commits.has_room(commit)
            and time.perf_counter() >= self._loops_from
        )

    def _fly(self, hub: Hub, commit: Pending, syncer: Syncer) -> None:
        """Write the commit and begin its sync."""
        try:
            written = self._commits.write(commit)
        except Exception as error:
            self._fail(commit, error)
            written = None
        if written is None:
            self._pass_on(hub)
            return
        took_s = time.perf_counter() - written.started
        if took_s > LOOP_WRITE_S:
            self._loops_from = time.perf_counter() + LOOP_PAUSE_S
        shared = commit.shared or commit.hub is not hub
        flight = self._flight = _Flight(written, syncer, shared=shared)  # first: the thread may be told at once
        if not syncer.start(written.segment.file):
            with self._lock:
                self._syncers[hub] = None
                flight.syncer, self._turn = None, WRITER
            self._bell.ring()
        elif self._awaited or shared:
            self._bell.ring()

    def _land(self, hub: Hub, syncer: Syncer) -> None:
        """A sync has ended. Unless the thread was quicker, tell those who wait for it."""
        if self._finish(syncer):
            self._pass_on(hub)

    def _pass_on(self, hub: Hub) -> None:
        """Let go of the turn after a commit."""
        with self._lock:
            self._turn = None
            more = self.pending.waiting
        if self._awaited:
            self._bell.ring()
        elif more and not hub.deferring:
            hub.defer(partial(self._begin, hub))

    def _syncer_of(self, hub: Hub) -> Syncer | None:
        """Where the hub's loop has its syncs; None where it must not write."""
        if hub in self._syncers:
            return self._syncers[hub]
        syncer = self._disk.syncer()
        if syncer is not None:
            hub.watch(syncer.file, partial(self._land, hub, syncer))
        with self._lock:  # other loops do the same
            kept = {other: kept for other, kept in self._syncers.items() if not other.loop.is_closed()}
            self._syncers = kept | {hub: syncer}
        return syncer

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._hubs.gather()
        while self._step():
            self._hubs.flush()

    def _step(self) -> bool:
        """Do what is next, or wait for it; False at the end."""
        with self._lock:
            mine = self._turn is None or self._turn is WRITER
            flight, commit = self._flight, None
            wanted = self._stopping or bool(self.pending.waiting) or (flight is not None and flight.shared)
            self._awaited = wanted and not mine
            if mine and flight is None:
                commit = self._next()
                self._turn = WRITER if commit is not None or self._stopping else None
        if mine and flight is not None:
            self._sync(flight.written)
        elif commit is not None:
            self._commit(commit)
        elif mine and self._stopping:
            return False
        elif flight is not None and flight.syncer is not None and wanted:
            self._take_over(flight.syncer)
        else:
            self._bell.wait()
        return True

    def _next(self) -> Pending | None:
        """What is pending, up to the cap. Under the lock."""
        pending = self.pending
        if not pending.waiting:
            return None
        if pending.size > self._limit or len(pending.waiting) > COMMIT_WRITES:
            return pending.take(COMMIT_WRITES, self._limit)
        self.pending = Pending()
        return pending

    def _commit(self, commit: Pending) -> None:
        try:
            if self.failure is not None:
                commit.fail(_again(self.failure))
                return
            written = self._commits.write(commit)
            if written is None:
                return
            if commit.written:
                for call in commit.written:
                    call()
                self._hubs.flush()
        except Exception as error:
            self._fail(commit, error)
            return
        self._sync(written)

    def _sync(self, written: Written) -> None:
        try:
            self._flight = None
            self._commits.sync(written)
            self._complete(written)
        except Exception as error:
            self._fail(written.commit, error)

    def _take_over(self, syncer: Syncer) -> None:
        """Wait for the end of a loop's sync; unless the loop is quicker, and rings, go on in its place."""
        poll = select.poll()
        poll.register(syncer.file, select.POLLIN)
        poll.register(self._bell.file, select.POLLIN)
        if any(file == self._bell.file for file, _ in poll.poll()):
            self._bell.wait()
        if self._finish(syncer):
            with self._lock:
                self._turn = WRITER

    # ---- either ------------------------------------------------------------------------------------------------------

    def _finish(self, syncer: Syncer) -> bool:
        """Complete the commit in flight if its sync has ended; False when another thread does, or did."""
        try:
            if not syncer.finish():
                return False
            error = None
        except OSError as failed:
            error = failed
        flight = self._flight  # only now: it is that of the sync whose end we were told
        assert flight is not None
        self._flight = None
        try:
            if error is not None:
                raise error
            self._complete(flight.written)
        except Exception as failure:
            self._fail(flight.written.commit, failure)
        return True

    def _complete(self, written: Written) -> None:
        self._commits.complete(written)
        if threading.current_thread() is self._thread:
            self._hubs.flush()  # before the index: nobody who waits for the commit waits for that
        self._commits.keep_up(written)

    def _fail(self, commit: Pending, error: Exception) -> None:
        """Give everybody who waits for the commit the error; the journal has failed, unless nothing was written."""
        if isinstance(error, DiskPressure):
            commit.fail(error)
            return
        kind = JournalFailed
        if not isinstance(error, OSError):
            _log.error("the journal's writer failed", exc_info=error)
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            kind = DiskFull
        what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        self.failure = kind(f"the journal failed: {what}", outcome_unknown=True)
        _log.error("%s", self.failure.message)
        self._measures.failed()
        commit.fail(self.failure)


def _again(failure: JournalFailed) -> JournalFailed:
    """The error for a write that came after the failure: it was not written, and that is known."""
    return type(failure)(failure.message)
