"""A commit: one frame, one write, one sync, and what follows from it.

The order behind the sync is: entries become visible, their appends are acknowledged, the index is written. Only the
thread or loop that has the turn (`journal.py`) calls this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ....runtime.clock import Clock
from ....runtime.disk import Disk, write_all
from ....runtime.errors import ChannelNotFound, DiskPressure
from ..index.index import Index, SegmentSummary
from ..metrics import RocksMQMetrics
from ..owner.channel_cache import TailBudget
from .channels import ChannelTable, encode_id
from .frame import ALIGNMENT, CONTROL, ROW_BYTES, encode, frame_bytes, pack_row
from .pending import Columns, PendingWrites, Row
from .recovery import Recovered
from .segment_stats import SegmentStats
from .segments import HEADER_BYTES, Segment, Segments

ONLY_CONTROL = {CONTROL}


class WrittenCommit:
    """A commit whose frame is in the file and waits for the sync."""

    __slots__ = ("body_bytes", "columns", "commit", "segment", "started")

    def __init__(
        self, commit: PendingWrites, segment: Segment, columns: Columns, body_bytes: int, started: float
    ) -> None:
        self.commit: PendingWrites = commit
        self.segment: Segment = segment
        self.columns: Columns = columns
        self.body_bytes: int = body_bytes
        self.started: float = started  # when the write began, by `time.perf_counter`


class Commits:
    """Writes what is pending into segments. Everything but `has_room` may raise `OSError`."""

    def __init__(
        self,
        disk: Disk,
        segments: Segments,
        index: Index,
        recovered: Recovered,
        *,
        clock: Clock,
        deliver: Callable[[Sequence[int], Sequence[Row], int], None],
        budget: TailBudget,
        need_spare: Callable[[bool], OSError | None],
        keep_ready: Callable[[], None],
        metrics: RocksMQMetrics,
    ) -> None:
        """`deliver` makes entries visible to readers: it is called with the channels' numbers, their rows, and the
        bytes of all bodies."""
        self.table: ChannelTable = recovered.table
        self.sealed: dict[int, SegmentSummary] = recovered.sealed
        self.stats: SegmentStats = SegmentStats(self.table, index, recovered.extents)
        self._disk, self._segments, self._index, self._clock = disk, segments, index, clock
        self._deliver, self._budget, self._metrics = deliver, budget, metrics
        self._need_spare, self._keep_ready = need_spare, keep_ready
        self._segment: Segment | None = recovered.current
        self._sequence = recovered.next_sequence

    def has_room(self, commit: PendingWrites) -> bool:
        """Whether the commit fits into the segment in use."""
        segment = self._segment
        return segment is not None and segment.room >= frame_bytes(0, commit.size) + ALIGNMENT

    def write(self, commit: PendingWrites) -> WrittenCommit | None:
        """Write the commit's frame; None where nothing was left to write. Rows of unknown channels are refused here.
        Raises `DiskPressure` when nothing was written."""
        short = self._segments.short
        if short is not None:
            self._refuse_data(commit, DiskPressure(f"what is left is for control records: {short}", limit="disk"))
        rows = commit.rows
        if not rows:
            commit.acknowledge([])
            return None
        columns = _columns(rows)
        unknown = set(columns[0]).difference(self.table.by_number)
        if unknown and unknown != ONLY_CONTROL and self._refuse(commit, unknown):
            return self.write(commit)
        body_bytes = commit.size - ROW_BYTES * len(rows)
        try:
            segment = self._room(frame_bytes(len(rows), body_bytes), commit)
        except DiskPressure as error:
            if not self._refuse_data(commit, error):
                raise
            return self.write(commit)
        started = time.perf_counter()
        self._write_frame(segment, columns, body_bytes)
        return WrittenCommit(commit, segment, columns, body_bytes, started)

    def sync(self, written: WrittenCommit) -> None:
        """Make the frame durable. Blocks."""
        self._disk.sync(written.segment.file)

    def complete(self, written: WrittenCommit) -> None:
        """Do what follows from the sync, but for the index: deliver, and acknowledge."""
        commit, segment, body_bytes = written.commit, written.segment, written.body_bytes
        numbers, ids, _, _ = written.columns
        elapsed_s = time.perf_counter() - written.started
        size = frame_bytes(len(numbers), body_bytes)
        self.stats.note(segment.end, written.columns, body_bytes)
        self._advance(segment, size)
        if commit.urgent:
            self.stats.count(segment)
        self._deliver(numbers, commit.rows, body_bytes)
        commit.acknowledge(list(map(encode_id, ids)))
        self._metrics.committed(elapsed_s, body_bytes, size)

    def keep_up(self, written: WrittenCommit) -> None:
        """Count and write the index where it is time to: after `complete`, when the appends are acknowledged."""
        segment = written.segment
        if self._budget.full:  # what memory forgets must be in the index
            self.stats.index(segment)
            self._budget.trim()
        elif self.stats.due(segment):
            self.stats.index(segment)
        elif self.stats.behind:
            self.stats.count(segment)

    def _refuse(self, commit: PendingWrites, unknown: set[int]) -> bool:
        """Refuse writes to channels whose creation failed before them; whether there were any."""
        unknown -= {id for number, id, _, _ in commit.rows if number == CONTROL} | ONLY_CONTROL  # created here
        if unknown:
            refused = commit.split_bad(lambda row: row[0] in unknown)
            refused.fail(ChannelNotFound("the channel could not be created, or was dropped"))
        return bool(unknown)

    def _refuse_data(self, commit: PendingWrites, error: DiskPressure) -> bool:
        """Refuse the writes that are no control writes; whether there were writes of both kinds."""
        refused = commit.split_data()
        both = bool(refused.waiting and commit.waiting)
        refused.fail(error)
        return both

    def _write_frame(self, segment: Segment, columns: Columns, body_bytes: int) -> None:
        numbers, ids, timestamps, bodies = columns
        table = list(map(pack_row, numbers, map(len, bodies), ids, timestamps))
        buffers = encode(segment.epoch, segment.salt, self._sequence, table, bodies, body_bytes)
        write_all(self._disk, segment.file, buffers, segment.end)

    def _advance(self, segment: Segment, size: int) -> None:
        segment.end += size
        self._sequence += 1

    # ---- segments ----------------------------------------------------------------------------------------------------

    def _room(self, size: int, commit: PendingWrites) -> Segment:
        if self._segment is None or self._segment.room < size:
            self._segment = self._roll(size, commit)
        return self._segment

    def _roll(self, size: int, commit: PendingWrites) -> Segment:
        """Begin the next segment with a snapshot, durable before anything else is written there. The segment is larger
        than usual where the snapshot needs it, with as much room for other frames as the snapshot takes itself."""
        before = self._segment
        wall_ms = max(self._clock.wall_ms(), self.table.wall_ms)  # the log's time never goes back
        if before is not None:
            self.stats.index(before)
        snapshot = self.table.snapshot(wall_ms)
        snapshot_bytes = frame_bytes(1, len(snapshot))
        needed = HEADER_BYTES + snapshot_bytes + size
        spare = self._take_spare(needed, max(needed, HEADER_BYTES + 2 * snapshot_bytes), control=commit.control)
        self._write_frame(spare, ([CONTROL], [0], [wall_ms], [snapshot]), len(snapshot))
        self._disk.sync(spare.file)
        self._advance(spare, snapshot_bytes)
        self.table.wall_ms = wall_ms
        if before is not None:
            channels, sealed_at = self.stats.extents.channels, self._clock.monotonic()
            summary = SegmentSummary(wall_ms, self._sequence - 2, before.end, channels, sealed_at)
            self._index.seal(before.epoch, summary)
            self.sealed[before.epoch] = summary  # from now on retention may remove it
        self.stats.begin_segment()
        self._keep_ready()
        return spare

    def _take_spare(self, needed: int, wished: int, *, control: bool) -> Segment:
        """A spare of the size that is wished or, where there is no space for that, of the size that is needed."""
        spare = self._segments.take_spare(wished)
        if spare is not None:
            return spare
        error = self._need_spare(control)
        spare = self._segments.take_spare(wished) or self._segments.take_spare(needed)
        if spare is None:
            raise DiskPressure(f"no segment could be made ready: {error}", limit="disk")
        return spare

    def mark_end(self) -> None:
        """Store in the index where the journal ends, so that the next opening can be sure of it."""
        if self._segment is not None and self._segment.end > HEADER_BYTES:
            self.stats.index(self._segment)


def _columns(rows: Sequence[Row]) -> Columns:
    numbers, ids, timestamps, bodies = zip(*rows, strict=True)
    return numbers, ids, timestamps, bodies
