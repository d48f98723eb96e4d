"""The journal's writer: one thread that turns whatever is pending into one frame, one write and one sync.

There is no timer: while a sync runs, the next commit gathers. The order after a commit is: entries become visible,
their submitters are told, the index is written. Any error of a write or sync poisons the journal for good
(`JournalFailed`, `DiskFull`); a sync is never tried again on the same pages. Only where nothing was written, because no
segment could be made ready, does the journal stay usable (`DiskPressure`).
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...runtime.clock import Clock
from ...runtime.disk import Disk, write_all
from ...runtime.errors import ChannelNotFound, DiskFull, DiskPressure, JournalFailed, TidewalError
from ...runtime.wal import Entry, OnAppended, Payload
from .frame import CONTROL, encode, frame_bytes
from .index import Index, Place, SegmentSummary
from .measures import Measures
from .recovery import Extents, Recovered
from .segments import HEADER_BYTES, Segment, Segments
from .wakeup import Hubs

COMMIT_BYTES = 8 * 1024 * 1024
PENDING_BYTES = 256 * 1024 * 1024

_log = logging.getLogger(__name__)

Groups = dict[int, list[Entry]]


@dataclass(slots=True)
class Write:
    """What one submit asks for. `table` and `bodies` go into the frame; `entries` and `loose` (of ephemeral channels)
    become visible with it. `early`: acknowledge before the sync."""

    done: OnAppended
    ids: list[bytes] = field(default_factory=list[bytes])
    table: list[int] = field(default_factory=list[int])
    bodies: list[Payload] = field(default_factory=list[Payload])
    body_bytes: int = 0
    entries: list[tuple[int, Entry]] = field(default_factory=list[tuple[int, Entry]])
    loose: list[tuple[int, Entry]] = field(default_factory=list[tuple[int, Entry]])
    early: bool = False
    control: bool = False
    creates: int | None = None


class Deliver(Protocol):
    """Make entries visible to readers: durable ones and those of ephemeral channels, by channel number."""

    def __call__(self, durable: Groups, loose: Groups) -> None: ...


class Journal:
    """`put` from any thread; the rest from the owner."""

    def __init__(
        self,
        disk: Disk,
        segments: Segments,
        index: Index,
        recovered: Recovered,
        *,
        clock: Clock,
        deliver: Deliver,
        hubs: Hubs,
        trim: Callable[[], None],
        need_spare: Callable[[], OSError | None],
        keep_ready: Callable[[], None],
        measures: Measures,
    ) -> None:
        self.failure: JournalFailed | None = None
        self.pending_bytes = 0
        self.table = recovered.table
        self.sealed = recovered.sealed
        self._disk, self._segments, self._index, self._clock = disk, segments, index, clock
        self._deliver, self._trim, self._need_spare, self._keep_ready = deliver, trim, need_spare, keep_ready
        self._measures, self._hubs = measures, hubs
        self._segment: Segment | None = recovered.current
        self._sequence = recovered.next_sequence
        self._extents, self._indexer = recovered.extents, recovered.indexer
        self._queue: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._pending_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="tidewal-journal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, write: Write) -> None:
        """Queue for the next commit."""
        with self._pending_lock:
            self.pending_bytes += write.body_bytes
        self._queue.put(write)

    def stop(self) -> None:
        """Commit what is queued, then end the thread. Blocks."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        carried: Write | None = None
        self._hubs.gather()
        while True:
            write = carried or self._queue.get()
            if write is None:
                break
            batch = [write]
            carried, last = self._drain(batch)
            self._commit_or_fail(batch)
            if last:
                break

    def _drain(self, batch: list[Write]) -> tuple[Write | None, bool]:
        """Add what else is pending, up to the cap; return what did not fit, and whether the end was queued."""
        size = batch[0].body_bytes
        take = self._queue.get_nowait
        try:
            while True:
                write = take()
                if write is None:
                    return None, True
                size += write.body_bytes
                if size > COMMIT_BYTES or len(batch) >= 4096 or size > self._segments.capacity // 2:
                    return write, False
                batch.append(write)
        except queue.Empty:
            return None, False

    def _commit_or_fail(self, batch: list[Write]) -> None:
        with self._pending_lock:
            for write in batch:
                self.pending_bytes -= write.body_bytes
        try:
            if self.failure is not None:
                _fail(batch, _again(self.failure))
            else:
                self._commit(batch)
        except DiskPressure as error:
            _fail(batch, error)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            kind = DiskFull if full else JournalFailed
            self._poison(batch, kind(f"the journal failed: {error}", outcome_unknown=True))
        except Exception as error:
            _log.exception("the journal's writer failed")
            failed = JournalFailed(f"the journal failed: {type(error).__name__}: {error}", outcome_unknown=True)
            self._poison(batch, failed)
        finally:
            self._hubs.flush()

    def _poison(self, batch: list[Write], failure: JournalFailed) -> None:
        _log.error("%s", failure.message)
        self.failure = failure
        self._measures.failed()
        _fail(batch, failure)

    def _commit(self, batch: list[Write]) -> None:
        batch = self._without_unknown_channels(batch)
        table, bodies, body_bytes = batch[0].table if batch else [], batch[0].bodies if batch else [], 0
        if len(batch) > 1:
            table = [number for write in batch for number in write.table]
            bodies = [body for write in batch for body in write.bodies]
        body_bytes = sum(write.body_bytes for write in batch)
        place: tuple[int, int] | None = None
        if table:
            segment = self._room(frame_bytes(len(table) // 4, body_bytes))
            place = segment.epoch, segment.end
            self._write(segment, table, bodies, body_bytes, batch)
        self._after(batch, place)

    def _write(
        self, segment: Segment, table: list[int], bodies: list[Payload], body_bytes: int, batch: Sequence[Write]
    ) -> None:
        started = time.perf_counter()
        buffers = encode(segment.epoch, segment.salt, self._sequence, table, bodies, body_bytes)
        write_all(self._disk, segment.file, buffers, segment.end)
        early = [write for write in batch if write.early]
        if early:
            for write in early:
                _settle(write, write.ids)
            self._hubs.flush()
        self._disk.sync(segment.file)
        size = frame_bytes(len(table) // 4, body_bytes)
        segment.end += size
        self._sequence += 1
        self._measures.committed(time.perf_counter() - started, body_bytes, size)

    def _after(self, batch: list[Write], place: tuple[int, int] | None) -> None:
        durable: Groups = {}
        loose: Groups = {}
        for write in batch:
            for number, entry in write.entries:
                durable.setdefault(number, []).append(entry)
            for number, entry in write.loose:
                loose.setdefault(number, []).append(entry)
            if write.control:
                self.table.apply(bytes(write.bodies[0]))
        places = self._advance(durable, place) if place is not None else []
        self._deliver(durable, loose)
        for write in batch:
            if not write.early:
                _settle(write, write.ids)
        self._hubs.flush()
        if places and self._segment is not None:
            self._index.add(places, (self._segment.epoch, self._segment.end))
        self._trim()

    def _advance(self, groups: Groups, place: tuple[int, int]) -> list[tuple[int, Place]]:
        """Update what the table and the segment's extents say; return what to index."""
        places: list[tuple[int, Place]] = []
        for number, entries in groups.items():
            state = self.table.by_number.get(number)
            earlier = state.max_timestamp if state is not None else 0
            last_id = int.from_bytes(entries[-1].id, "big")
            self.table.advance(number, last_id, max(entry.timestamp for entry in entries))
            self._extents.add(number, last_id, sum(len(entry.payload) for entry in entries))
            indexed = self._indexer.place(number, int.from_bytes(entries[0].id, "big"), *place, earlier)
            if indexed is not None:
                places.append((number, indexed))
        return places

    def _without_unknown_channels(self, batch: list[Write]) -> list[Write]:
        """Refuse writes to a channel whose creation failed before them."""
        known = self.table.by_number
        created = {write.creates for write in batch}
        good: list[Write] = []
        for write in batch:
            if write.control or all(number in known or number in created for number in write.table[::4]):
                good.append(write)
            else:
                _fail([write], ChannelNotFound("the channel could not be created, or was dropped"))
        return good

    # ---- segments ----------------------------------------------------------------------------------------------------

    def _room(self, size: int) -> Segment:
        if self._segment is None or self._segment.room < size:
            self._segment = self._roll()
        return self._segment

    def _roll(self) -> Segment:
        """Begin the next segment with a snapshot, durable before anything else is written there."""
        spare = self._segments.take_spare()
        if spare is None:
            error = self._need_spare()
            spare = self._segments.take_spare()
            if spare is None:
                raise DiskPressure(f"no segment could be made ready: {error}", limit="disk")
        wall_ms = self._clock.wall_ms()
        before = self._segment
        if before is not None:
            summary = SegmentSummary(wall_ms, self._sequence - 1, before.end, dict(self._extents.channels))
            self.sealed[before.epoch] = summary
        snapshot = self.table.snapshot(wall_ms)
        self._write(spare, [CONTROL, len(snapshot), 0, wall_ms], [snapshot], len(snapshot), ())
        if before is not None:
            self._index.seal(before.epoch, self.sealed[before.epoch])
        self._extents = Extents()
        self._keep_ready()
        return spare

    def mark_end(self) -> None:
        """Tell the index where the journal ends, so that the next opening can be sure of it. After `stop`."""
        if self._segment is not None and self.failure is None and self._segment.end > HEADER_BYTES:
            self._index.add([], (self._segment.epoch, self._segment.end))

    @property
    def extents(self) -> dict[int, tuple[int, int]]:
        """What the segment in use holds: channel number → (last id, bytes)."""
        return self._extents.channels


def control(record: bytes, wall_ms: int, done: OnAppended, *, creates: int | None = None) -> Write:
    """A write of one control record."""
    table = [CONTROL, len(record), 0, wall_ms]
    return Write(done, [], table, [record], len(record), control=True, creates=creates)


def _again(failure: JournalFailed) -> JournalFailed:
    """The error for a write that came after the failure: it was not written, and that is known."""
    return type(failure)(failure.message)


def _fail(batch: Sequence[Write], error: TidewalError) -> None:
    for write in batch:
        _settle(write, error)


def _settle(write: Write, result: list[bytes] | TidewalError) -> None:
    done, write.done = write.done, _settled
    try:
        done(result)
    except Exception:
        _log.exception("an append's callback failed")


def _settled(_: list[bytes] | TidewalError) -> None:
    """Stands where a callback was, so that none is called twice."""
