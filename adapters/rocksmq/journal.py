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
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ...runtime.clock import Clock
from ...runtime.disk import Disk, write_all
from ...runtime.errors import ChannelNotFound, DiskFull, DiskPressure, JournalFailed, TidewalError
from ...runtime.wal import Entry, OnAppended, Payload
from .frame import CONTROL, ROW_BYTES, encode, frame_bytes, pack_row
from .index import Index, Place, SegmentSummary
from .live import Batch, make_batch
from .measures import Measures
from .recovery import Extents, Recovered
from .segments import HEADER_BYTES, Segment, Segments
from .wakeup import Hubs

COMMIT_BYTES = 8 * 1024 * 1024
COMMIT_WRITES = 4096
PENDING_BYTES = 256 * 1024 * 1024

_log = logging.getLogger(__name__)


class Write:
    """What one submit asks for.

    `rows` and `bodies` go into the frame; `entries` and `loose` (of ephemeral channels) become visible with it, by
    channel number; `records` of control take effect with it. `early`: acknowledge before the sync. `size` counts rows and bodies. Not a dataclass: its default
    factories cost more than all else that is done for a small append.
    """

    __slots__ = ("bodies", "creates", "done", "early", "entries", "ids", "loose", "records", "rows", "size")

    def __init__(self, done: OnAppended, size: int = 0) -> None:
        self.done = done
        self.size = size
        self.ids: list[bytes] = []
        self.rows: list[bytes] = []
        self.bodies: list[Payload] = []
        self.entries: list[tuple[int, Entry]] = []
        self.loose: list[tuple[int, Entry]] = []
        self.early = False
        self.records: list[bytes] = []
        self.creates = 0  # the number of the channel that a record creates

    def add_record(self, record: bytes, wall_ms: int) -> None:
        self.size += ROW_BYTES + len(record)
        self.rows.append(pack_row(CONTROL, len(record), 0, wall_ms))
        self.bodies.append(record)
        self.records.append(record)


Groups = dict[int, Batch]


class Deliver(Protocol):
    """Make batches visible to readers: durable ones and those of ephemeral channels, by channel number."""

    def __call__(self, durable: Groups, loose: Groups) -> None: ...


class Journal:
    """The writer and its queue."""

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
        self.table = recovered.table
        self.sealed = recovered.sealed
        self._disk, self._segments, self._index, self._clock = disk, segments, index, clock
        self._deliver, self._trim, self._need_spare, self._keep_ready = deliver, trim, need_spare, keep_ready
        self._measures, self._hubs = measures, hubs
        self._segment: Segment | None = recovered.current
        self._sequence = recovered.next_sequence
        self._extents, self._indexer = recovered.extents, recovered.indexer
        self._queue: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._put_bytes = self._taken_bytes = 0  # two, so that each has one thread that changes it
        self._thread = threading.Thread(target=self._run, name="tidewal-journal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def pending_bytes(self) -> int:
        """What is queued and not yet being written."""
        return self._put_bytes - self._taken_bytes

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    def put(self, write: Write) -> None:
        """Queue for the next commit. One thread at a time."""
        self._put_bytes += write.size
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
        size = batch[0].size
        limit = min(COMMIT_BYTES, self._segments.capacity // 2)
        take = self._queue.get_nowait
        try:
            while True:
                write = take()
                if write is None:
                    return None, True
                size += write.size
                if size > limit or len(batch) >= COMMIT_WRITES:
                    return write, False
                batch.append(write)
        except queue.Empty:
            return None, False

    def _commit_or_fail(self, batch: list[Write]) -> None:
        self._taken_bytes += sum([write.size for write in batch])
        try:
            if self.failure is not None:
                _settle(batch, _again(self.failure))
            else:
                self._commit(batch)
        except DiskPressure as error:
            _settle(batch, error)
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
        _settle(batch, failure)

    def _commit(self, batch: list[Write]) -> None:
        durable = _grouped(write.entries for write in batch)
        if not durable.keys() <= self.table.by_number.keys():
            batch = self._without_unknown_channels(batch)
            durable = _grouped(write.entries for write in batch)
        rows = [row for write in batch for row in write.rows]
        place: tuple[int, int] | None = None
        if rows:
            bodies = [body for write in batch for body in write.bodies]
            body_bytes = sum([write.size for write in batch]) - ROW_BYTES * len(rows)
            segment = self._room(frame_bytes(len(rows), body_bytes))
            place = segment.epoch, segment.end
            self._write(segment, rows, bodies, body_bytes, batch)
        self._after(batch, durable, place)

    def _write(
        self, segment: Segment, rows: list[bytes], bodies: list[Payload], body_bytes: int, batch: Sequence[Write]
    ) -> None:
        started = time.perf_counter()
        buffers = encode(segment.epoch, segment.salt, self._sequence, rows, bodies, body_bytes)
        write_all(self._disk, segment.file, buffers, segment.end)
        early = [write for write in batch if write.early]
        if early:
            _settle(early)
            self._hubs.flush()
        self._disk.sync(segment.file)
        size = frame_bytes(len(rows), body_bytes)
        segment.end += size
        self._sequence += 1
        self._measures.committed(time.perf_counter() - started, body_bytes, size)

    def _after(self, batch: list[Write], durable: Groups, place: tuple[int, int] | None) -> None:
        for write in batch:
            for record in write.records:
                self.table.apply(record)
        self._deliver(durable, _grouped(write.loose for write in batch))
        _settle(batch)
        self._hubs.flush()
        places = self._advance(durable, place) if place is not None else []
        if places and self._segment is not None:
            self._index.add(places, (self._segment.epoch, self._segment.end))
        self._trim()

    def _advance(self, durable: Groups, place: tuple[int, int]) -> list[tuple[int, Place]]:
        """Update what the table and the segment's extents say; return what to index."""
        places: list[tuple[int, Place]] = []
        for number, batch in durable.items():
            state = self.table.by_number.get(number)
            earlier = state.max_timestamp if state is not None else 0
            self.table.advance(number, batch.last_id, batch.max_timestamp)
            self._extents.add(number, batch.last_id, batch.payload_bytes)
            indexed = self._indexer.place(number, batch.first_id, *place, earlier)
            if indexed is not None:
                places.append((number, indexed))
        return places

    def _without_unknown_channels(self, batch: list[Write]) -> list[Write]:
        """Refuse writes to a channel whose creation failed before them."""
        known = self.table.by_number.keys() | {write.creates for write in batch}
        good: list[Write] = []
        for write in batch:
            if all(number in known for number, _ in write.entries):
                good.append(write)
            else:
                _settle([write], ChannelNotFound("the channel could not be created, or was dropped"))
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
        self._write(spare, [pack_row(CONTROL, len(snapshot), 0, wall_ms)], [snapshot], len(snapshot), ())
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


def control(record: bytes, wall_ms: int, done: OnAppended, *, creates: int = 0) -> Write:
    """A write of one control record."""
    write = Write(done)
    write.add_record(record, wall_ms)
    write.creates = creates
    return write


def _grouped(writes: Iterable[list[tuple[int, Entry]]]) -> Groups:
    """The entries of each channel as one batch."""
    groups: defaultdict[int, list[Entry]] = defaultdict(list)
    for entries in writes:
        for number, entry in entries:
            groups[number].append(entry)
    return {number: make_batch(entries) for number, entries in groups.items()}


def _again(failure: JournalFailed) -> JournalFailed:
    """The error for a write that came after the failure: it was not written, and that is known."""
    return type(failure)(failure.message)


def _settle(batch: Sequence[Write], error: TidewalError | None = None) -> None:
    """Tell all whom nobody has told yet."""
    for write in batch:
        done, write.done = write.done, _settled
        try:
            done(write.ids if error is None else error)
        except Exception:
            _log.exception("an append's callback failed")


def _settled(_: list[bytes] | TidewalError) -> None:
    """Stands where a callback was, so that none is called twice."""
