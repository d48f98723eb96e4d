"""Which thread commits, and when: what is pending becomes a frame as soon as the frame before it is durable.

There is no timer: while a sync runs, the next commit gathers. One loop or thread at a time has the turn to commit. A
commit of a size that does not hold up a loop is written by the event loop that has something to append, and the kernel
syncs it meanwhile (`runtime/aio_fsync.py`). The writer thread does the rest: large commits, new segments, appends from
threads, disks whose sync blocks. When a loop's sync runs and other loops or threads want to go on, the writer thread
waits for its end as well as that loop, and the first of the two goes on: a loop that is blocked, or closed, does not
hold up the others.

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

from ....runtime.clock import Clock
from ....runtime.disk import Disk, Syncer
from ....runtime.errors import DiskFull, DiskPressure, JournalFailed
from ....runtime.loop_bridge import EventSignal, LoopNotifier, LoopNotifiers
from ..index.index import SegmentSummary
from ..metrics import RocksMQMetrics
from .channels import ChannelTable
from .commits import Commits, WrittenCommit
from .pending import PendingWrite, PendingWrites

COMMIT_BYTES = 8 * 1024 * 1024
COMMIT_WRITES = 4096
LOOP_COMMIT_BYTES = 2 * 1024 * 1024  # what a loop may write: some tenths of a millisecond
LOOP_WRITE_S = 0.01  # a write that takes longer shows that the disk holds up the loop that writes ...
LOOP_PAUSE_S = 1.0  # ... so loops leave it to the writer thread for so long
PENDING_BYTES = 256 * 1024 * 1024

_log = logging.getLogger(__name__)


class _Thread:
    """Stands for the writer thread where it has the turn."""


WRITER: Final = _Thread()


class _SyncingCommit:
    """A commit that a loop has written, while it is synced."""

    __slots__ = ("shared", "syncer", "written")

    def __init__(self, written: WrittenCommit, syncer: Syncer | None, *, shared: bool) -> None:
        self.shared = shared  # not only the loop waits for it: the writer thread goes on if the loop does not
        self.written, self.syncer = written, syncer  # None: the sync was not begun, and is left to the writer thread


class Journal:
    """What is pending, and the turn to commit it. Thread-safe."""

    def __init__(
        self,
        disk: Disk,
        commits: Commits,
        *,
        capacity: int,
        clock: Clock,
        lock: threading.Lock,
        notifiers: LoopNotifiers,
        metrics: RocksMQMetrics,
    ) -> None:
        """`capacity` is the size that a frame may have, in bytes. A caller that adds to `pending` holds `lock`, and
        calls `schedule` or `wake` afterwards."""
        self.failure: JournalFailed | None = None
        self.pending: PendingWrites = PendingWrites()
        self._disk, self._commits, self._clock, self._lock, self._notifiers = disk, commits, clock, lock, notifiers
        self._metrics = metrics
        self._limit = min(COMMIT_BYTES, capacity // 2)
        self._loop_limit = min(LOOP_COMMIT_BYTES, capacity // 2)
        self._loops_from = 0.0  # when loops may write, by `time.perf_counter`
        self._turn: LoopNotifier | _Thread | None = WRITER  # which loop or thread has it; changes under the lock
        self._syncing: _SyncingCommit | None = None
        self._last_checked: _SyncingCommit | None = None
        self.last_waiters: int = (
            1  # how many waited for the last commit of a loop: once so many wait, others will hardly come
        )
        self._awaited = False  # the thread waits until the loop with the turn has begun a sync or released the turn
        self._stopping = False
        self._syncers: dict[LoopNotifier, Syncer | None] = {}
        self._signal = EventSignal()
        self._thread = threading.Thread(target=self._run, name="tidewal-journal", daemon=True)

    def start(self) -> None:
        """Start the writer thread."""
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
        return self._commits.stats.extents.channels

    def wall_ms(self) -> int:
        """The wall clock, in milliseconds."""
        return self._clock.wall_ms()

    def put(self, write: PendingWrite) -> None:
        """Queue for the next commit. Under the lock."""
        self.pending.add(write)
        self.wake()

    def schedule(self, notifier: LoopNotifier, *, at_once: bool = False) -> None:
        """Have what is pending committed, by the running loop, whose notifier it is, if that is possible. Not under the
        lock. With `at_once` perhaps before this returns, so callbacks of appends may be called with a failure then: the
        caller must hold no lock that they may take."""
        turn = self._turn
        if turn is None:
            if at_once and len(self.pending.waiting) >= self.last_waiters:
                self._begin(notifier)
            elif not notifier.deferring:  # what other tasks append in this turn of the loop goes into the same commit
                notifier.defer(partial(self._begin, notifier))
        elif turn is not notifier and turn is not WRITER:
            self._signal.set()

    def wake(self) -> None:
        """Have what is pending committed, by the writer thread or the loop that has the turn."""
        if self._turn is not WRITER:
            self._signal.set()

    def check_stalled(self) -> None:
        """Let the writer thread go on where a loop has not completed its sync since the last call: readers wait for it,
        too."""
        syncing = self._syncing
        if syncing is not None and syncing is self._last_checked:
            syncing.shared = True
            self._signal.set()
        self._last_checked = syncing

    def stop(self) -> None:
        """Commit what is queued, then end the writer thread. Blocks."""
        self._stopping = True
        self._signal.set()
        if self._thread.is_alive():
            self._thread.join()
        self._signal.close()
        self._syncers.clear()

    def mark_end(self) -> None:
        """Store in the index where the journal ends, so that the next opening can be sure of it. After `stop`."""
        if self.failure is None:
            self._commits.mark_end()

    # ---- on a loop ---------------------------------------------------------------------------------------------------

    def _begin(self, notifier: LoopNotifier) -> None:
        """Take the turn and commit what is pending; leave it to the writer thread where a loop should not."""
        syncer = self._syncer_of(notifier)
        with self._lock:
            commit = self.pending
            if self._turn is notifier or (self._turn is None and not commit.waiting):
                return
            suits = self._turn is None and syncer is not None and self._suits_loop(commit)
            if suits:
                self.pending, self._turn = PendingWrites(), notifier
                self.last_waiters = len(commit.waiting)
        if suits and syncer is not None:
            self._begin_commit(notifier, commit, syncer)
        else:
            self.wake()

    def _suits_loop(self, commit: PendingWrites) -> bool:
        return (
            commit.size <= self._loop_limit
            and len(commit.waiting) <= COMMIT_WRITES
            and not commit.written
            and self.failure is None
            and self._commits.has_room(commit)
            and time.perf_counter() >= self._loops_from
        )

    def _begin_commit(self, notifier: LoopNotifier, commit: PendingWrites, syncer: Syncer) -> None:
        """Write the commit and begin its sync."""
        try:
            written = self._commits.write(commit)
        except Exception as error:
            self._fail(commit, error)
            written = None
        if written is None:
            self._pass_on(notifier)
            return
        took_s = time.perf_counter() - written.started
        if took_s > LOOP_WRITE_S:
            self._loops_from = time.perf_counter() + LOOP_PAUSE_S
        shared = commit.shared or commit.notifier is not notifier
        syncing = self._syncing = _SyncingCommit(
            written, syncer, shared=shared
        )  # first: the writer thread may be woken at once
        if not syncer.start(written.segment.file):
            with self._lock:
                self._syncers[notifier] = None
                syncing.syncer, self._turn = None, WRITER
            self._signal.set()
        elif self._awaited or shared:
            self._signal.set()

    def _end_commit(self, notifier: LoopNotifier, syncer: Syncer) -> None:
        """A sync has ended. Unless the writer thread was quicker, complete its commit."""
        if self._finish(syncer):
            self._pass_on(notifier)

    def _pass_on(self, notifier: LoopNotifier) -> None:
        """Release the turn after a commit."""
        with self._lock:
            self._turn = None
            more = self.pending.waiting
        if self._awaited:
            self._signal.set()
        elif more and not notifier.deferring:
            notifier.defer(partial(self._begin, notifier))

    def _syncer_of(self, notifier: LoopNotifier) -> Syncer | None:
        """The syncer of the notifier's loop; None where that loop must not write."""
        if notifier in self._syncers:
            return self._syncers[notifier]
        syncer = self._disk.syncer()
        if syncer is not None:
            notifier.watch(syncer.file, partial(self._end_commit, notifier, syncer))
        with self._lock:  # other loops do the same
            kept = {other: kept for other, kept in self._syncers.items() if not other.loop.is_closed()}
            self._syncers = kept | {notifier: syncer}
        return syncer

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._notifiers.gather()
        while self._step():
            self._notifiers.flush()

    def _step(self) -> bool:
        """Do what comes next, or wait for it; False at the end."""
        with self._lock:
            mine = self._turn is None or self._turn is WRITER
            syncing, commit = self._syncing, None
            wanted = self._stopping or bool(self.pending.waiting) or (syncing is not None and syncing.shared)
            self._awaited = wanted and not mine
            if mine and syncing is None:
                commit = self._next()
                self._turn = WRITER if commit is not None or self._stopping else None
        if mine and syncing is not None:
            self._sync(syncing.written)
        elif commit is not None:
            self._commit(commit)
        elif mine and self._stopping:
            return False
        elif syncing is not None and syncing.syncer is not None and wanted:
            self._take_over(syncing.syncer)
        else:
            self._signal.wait()
        return True

    def _next(self) -> PendingWrites | None:
        """What is pending, up to the cap. Under the lock."""
        pending = self.pending
        if not pending.waiting:
            return None
        if pending.size > self._limit or len(pending.waiting) > COMMIT_WRITES:
            return pending.take(COMMIT_WRITES, self._limit)
        self.pending = PendingWrites()
        return pending

    def _commit(self, commit: PendingWrites) -> None:
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
                self._notifiers.flush()
        except Exception as error:
            self._fail(commit, error)
            return
        self._sync(written)

    def _sync(self, written: WrittenCommit) -> None:
        try:
            self._syncing = None
            self._commits.sync(written)
            self._complete(written)
        except Exception as error:
            self._fail(written.commit, error)

    def _take_over(self, syncer: Syncer) -> None:
        """Wait for the end of a loop's sync; unless the loop is quicker, and signals, complete it in its place."""
        poll = select.poll()
        poll.register(syncer.file, select.POLLIN)
        poll.register(self._signal.file, select.POLLIN)
        if any(file == self._signal.file for file, _ in poll.poll()):
            self._signal.wait()
        if self._finish(syncer):
            with self._lock:
                self._turn = WRITER

    # ---- either ------------------------------------------------------------------------------------------------------

    def _finish(self, syncer: Syncer) -> bool:
        """Complete the commit that is being synced if its sync has ended; False when another thread does, or did."""
        try:
            if not syncer.finish():
                return False
            error = None
        except OSError as failed:
            error = failed
        syncing = self._syncing  # only now: it belongs to the sync that has just ended
        assert syncing is not None
        self._syncing = None
        try:
            if error is not None:
                raise error
            self._complete(syncing.written)
        except Exception as failure:
            self._fail(syncing.written.commit, failure)
        return True

    def _complete(self, written: WrittenCommit) -> None:
        self._commits.complete(written)
        if threading.current_thread() is self._thread:
            self._notifiers.flush()  # before the index: what waits for the commit does not wait for that
        self._commits.keep_up(written)

    def _fail(self, commit: PendingWrites, error: Exception) -> None:
        """Fail all appends of the commit; the journal has failed, unless nothing was written."""
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
        self._metrics.failed.set(1)
        commit.fail(self.failure)


def _again(failure: JournalFailed) -> JournalFailed:
    """The error for a write that came after the failure: its outcome is known, it was not written."""
    return type(failure)(failure.message)
