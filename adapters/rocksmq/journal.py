"""The journal's writer: one thread that turns whatever is pending into one frame, one write and one sync.

There is no timer: while a sync runs, the next commit gathers. The order after a commit is: entries become visible,
their submitters are told, the index is written. Any error of a write or sync poisons the journal for good
(`JournalFailed`, `DiskFull`); a sync is never tried again on the same pages. Only where nothing was written, because no
segment could be made ready, does the journal stay usable (`DiskPressure`).
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from ...runtime.clock import Clock
from ...runtime.disk import Disk, write_all
from ...runtime.errors import ChannelNotFound, DiskFull, DiskPressure, JournalFailed, Overloaded
from ...runtime.wakeup import Bell, Hubs
from ...runtime.wal import Entry, Payload
from .channels import encode_id
from .frame import CONTROL, ROW_BYTES, encode, frame_bytes, pack_row
from .index import Index, SegmentSummary
from .live import TailBudget, make_entry
from .measures import Measures
from .pending import Pending, Row, Write
from .pending import control as control
from .recovery import Recovered
from .segments import HEADER_BYTES, Segment, Segments
from .tally import Tally

COMMIT_BYTES = 8 * 1024 * 1024
COMMIT_WRITES = 4096
PENDING_BYTES = 256 * 1024 * 1024

# The rows of one frame, a sequence for each field.
Columns: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[Payload]]

_log = logging.getLogger(__name__)


class Deliver(Protocol):
    """Make entries visible to readers, by channel number; `size` is that of their bodies."""

    def __call__(self, numbers: Sequence[int], ids: Sequence[int], entries: Sequence[Entry], size: int) -> None: ...


class Journal:
    """The writer and what waits for it."""

    def __init__(
        self,
        disk: Disk,
        segments: Segments,
        index: Index,
        recovered: Recovered,
        *,
        clock: Clock,
        lock: threading.Lock,
        deliver: Deliver,
        hubs: Hubs,
        budget: TailBudget,
        need_spare: Callable[[], OSError | None],
        keep_ready: Callable[[], None],
        measures: Measures,
    ) -> None:
        """Whoever calls `put` or `put_one` holds `lock`."""
        self.failure: JournalFailed | None = None
        self.table = recovered.table
        self.sealed = recovered.sealed
        self.pending = Pending()
        self._disk, self._segments, self._index, self._clock, self._lock = disk, segments, index, clock, lock
        self._deliver, self._budget, self._need_spare, self._keep_ready = deliver, budget, need_spare, keep_ready
        self._measures, self._hubs = measures, hubs
        self._segment: Segment | None = recovered.current
        self._sequence = recovered.next_sequence
        self._tally = Tally(self.table, index, recovered.extents)
        self.idle = self._stopping = False
        self._bell = Bell()
        self._thread = threading.Thread(target=self._run, name="tidewal-journal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def extents(self) -> dict[int, tuple[int, int]]:
        """What the segment in use holds, but for the frames not counted yet: channel number → (last id, bytes)."""
        return self._tally.extents.channels

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    def put(self, write: Write) -> None:
        """Queue for the next commit."""
        self.pending.add(write)
        self.wake()

    def wake(self) -> None:
        """Let the writer look at what is pending, if it waits."""
        if self.idle:
            self._bell.ring()

    def stop(self) -> None:
        """Commit what is queued, then end the thread. Blocks."""
        self._stopping = True
        self._bell.ring()
        if self._thread.is_alive():
            self._thread.join()
        self._bell.close()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._hubs.gather()
        while (commit := self._take()) is not None:
            self._commit_or_fail(commit)

    def _take(self) -> Pending | None:
        """What is pending, up to the cap, once there is something; None at the end."""
        while True:
            with self._lock:
                pending = self.pending
                self.idle = not pending.waiting
                if pending.waiting:
                    limit = min(COMMIT_BYTES, self._segments.capacity // 2)
                    if pending.size > limit or len(pending.waiting) > COMMIT_WRITES:
                        return pending.take(COMMIT_WRITES, limit)
                    self.pending = Pending()
                    return pending
            if self._stopping:
                return None
            self._bell.wait()

    def _commit_or_fail(self, commit: Pending) -> None:
        try:
            if self.failure is not None:
                commit.fail(_again(self.failure))
            elif commit.rows:
                self._commit(commit)
            else:
                commit.tell([])
        except (DiskPressure, Overloaded) as error:
            commit.fail(error)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            kind = DiskFull if full else JournalFailed
            self._poison(commit, kind(f"the journal failed: {error}", outcome_unknown=True))
        except Exception as error:
            _log.exception("the journal's writer failed")
            failed = JournalFailed(f"the journal failed: {type(error).__name__}: {error}", outcome_unknown=True)
            self._poison(commit, failed)
        finally:
            self._hubs.flush()

    def _poison(self, commit: Pending, failure: JournalFailed) -> None:
        _log.error("%s", failure.message)
        self.failure = failure
        self._measures.failed()
        commit.fail(failure)

    def _commit(self, commit: Pending) -> None:
        rows = commit.rows
        numbers, ids, timestamps, bodies = columns = _columns(rows)
        unknown = set(numbers).difference(self.table.by_number)
        if len(unknown) > (CONTROL in unknown):
            created = {id for number, id, _, _ in rows if number == CONTROL}
            if not unknown <= created | {CONTROL}:
                self._refuse(commit, unknown)
                return
        body_bytes = commit.size - ROW_BYTES * len(rows)
        segment = self._room(frame_bytes(len(rows), body_bytes))
        offset, started = segment.end, time.perf_counter()
        self._write(segment, columns, body_bytes, commit.written)
        elapsed_s = time.perf_counter() - started
        self._tally.note(offset, rows)
        if commit.urgent:
            self._tally.count(segment)
        keys = list(map(encode_id, ids))
        self._deliver(numbers, ids, list(map(make_entry, zip(keys, timestamps, bodies, strict=True))), body_bytes)
        commit.tell(keys)
        self._hubs.flush()
        self._measures.committed(elapsed_s, body_bytes, segment.end - offset)
        if self._budget.full:  # what memory forgets must be in the index
            self._tally.index(segment)
            self._budget.trim()
        elif self._tally.due(segment):
            self._tally.index(segment)

    def _write(
        self, segment: Segment, columns: Columns, body_bytes: int, written: Sequence[Callable[[], None]]
    ) -> None:
        numbers, ids, timestamps, bodies = columns
        table = list(map(pack_row, numbers, map(len, bodies), ids, timestamps))
        buffers = encode(segment.epoch, segment.salt, self._sequence, table, bodies, body_bytes)
        write_all(self._disk, segment.file, buffers, segment.end)
        if written:
            for call in written:
                call()
            self._hubs.flush()
        self._disk.sync(segment.file)
        segment.end += frame_bytes(len(numbers), body_bytes)
        self._sequence += 1

    def _refuse(self, commit: Pending, unknown: set[int]) -> None:
        """Refuse writes to channels whose creation failed before them; commit the others."""
        unknown.difference_update(id for number, id, _, _ in commit.rows if number == CONTROL)
        good, refused = commit.divide(lambda row: row[0] == CONTROL or row[0] not in unknown)
        commit.waiting = []
        refused.fail(ChannelNotFound("the channel could not be created, or was dropped"))
        self._commit_or_fail(good)

    # ---- segments ----------------------------------------------------------------------------------------------------

    def _room(self, size: int) -> Segment:
        if self._segment is None or self._segment.room < size:
            self._segment = self._roll(size)
        return self._segment

    def _roll(self, size: int) -> Segment:
        """Begin the next segment with a snapshot, durable before anything else is written there."""
        before, wall_ms = self._segment, self._clock.wall_ms()
        if before is not None:
            self._tally.index(before)
        snapshot = self.table.snapshot(wall_ms)
        if frame_bytes(1, len(snapshot)) + size > self._segments.capacity * 8 // 7:
            raise Overloaded("what is known of channels, groups and clients fills a segment", limit="channels")
        spare = self._take_spare()
        self._write(spare, ([CONTROL], [0], [wall_ms], [snapshot]), len(snapshot), ())
        if before is not None:
            summary = SegmentSummary(wall_ms, self._sequence - 2, before.end, self._tally.extents.channels)
            self._index.seal(before.epoch, summary)
            self.sealed[before.epoch] = summary  # from now on retention may take it
        self._tally.begin_segment()
        self._keep_ready()
        return spare

    def _take_spare(self) -> Segment:
        spare = self._segments.take_spare()
        if spare is not None:
            return spare
        error = self._need_spare()
        spare = self._segments.take_spare()
        if spare is None:
            raise DiskPressure(f"no segment could be made ready: {error}", limit="disk")
        return spare

    def mark_end(self) -> None:
        """Tell the index where the journal ends, so that the next opening can be sure of it. After `stop`."""
        if self._segment is not None and self.failure is None and self._segment.end > HEADER_BYTES:
            self._tally.index(self._segment)


def _again(failure: JournalFailed) -> JournalFailed:
    """The error for a write that came after the failure: it was not written, and that is known."""
    return type(failure)(failure.message)


def _columns(rows: Sequence[Row]) -> Columns:
    numbers, ids, timestamps, bodies = zip(*rows, strict=True)
    return numbers, ids, timestamps, bodies
