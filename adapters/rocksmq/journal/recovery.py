"""Recovery: read what the journal holds, cut it off behind its last good frame, and bring the index up to date.

A commit is synced before the next one is written, so at most the last frame may be torn. Hence: a bad frame with a
good one behind it, or before something that the index knows to have been durable, is corruption and stops the opening
(`CorruptLog` with path and offset; nothing is changed). A bad frame with nothing behind it is cut off and reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ....runtime.disk import Disk, write_all
from ....runtime.errors import CorruptLog
from ..index.index import SPAN_BYTES, IndexEntry, SegmentSummary
from .beginning import check_beginning
from .channels import ChannelTable
from .frame import CONTROL, FrameFault, JournalFrame, Scanner
from .segments import HEADER_BYTES, Segment, Segments


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What opening found. `cut_path` and `cut_offset` say where a last, incomplete frame was cut off."""

    segments: int
    index_rebuilt: bool
    cut_path: str | None = None
    cut_offset: int | None = None


@dataclass(slots=True)
class Extents:
    """The extent of each channel in one segment, while it fills: channel number → (last id, bytes)."""

    channels: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])

    def add(self, channel: int, last_id: int, size: int) -> None:
        self.channels[channel] = last_id, size + self.channels.get(channel, (0, 0))[1]


class Indexer:
    """Decide which entries get an index entry: a channel's first after `SPAN_BYTES` of journal."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int]] = {}

    def entry_for(self, channel: int, id: int, epoch: int, offset: int, earlier_timestamp: int) -> IndexEntry | None:
        last_epoch, last_offset = self._last.get(channel, (-1, 0))
        if last_epoch == epoch and offset - last_offset < SPAN_BYTES:
            return None
        self._last[channel] = epoch, offset
        return IndexEntry(id, epoch, offset, earlier_timestamp)


@dataclass(slots=True)
class Recovered:
    """The journal as found: where to go on, and what is known about each segment."""

    current: Segment | None = None  # None: the directory is new
    next_sequence: int = 1
    table: ChannelTable = field(default_factory=ChannelTable)
    removed_to: dict[int, int] = field(default_factory=dict[int, int])  # highest id before the first segment
    sealed: dict[int, SegmentSummary] = field(default_factory=dict[int, SegmentSummary])
    extents: Extents = field(default_factory=Extents)  # of the current segment
    indexer: Indexer = field(default_factory=Indexer)
    report: RecoveryReport = field(default_factory=lambda: RecoveryReport(0, index_rebuilt=False))


class RecoveredIndex(Protocol):
    """What recovery asks the index, and gives it."""

    @property
    def rebuilt(self) -> bool: ...

    def summary(self, epoch: int) -> SegmentSummary | None: ...

    def durable_to(self) -> tuple[int, int]: ...

    def add(self, entries: list[tuple[int, IndexEntry]], durable_to: tuple[int, int]) -> None: ...

    def seal(self, epoch: int, summary: SegmentSummary) -> None: ...


class Recovery:
    """One pass over a directory; `run` or `read` once."""

    def __init__(self, disk: Disk, segments: Segments, index: RecoveredIndex) -> None:
        self._disk, self._segments, self._index = disk, segments, index
        self._state = Recovered()
        self._last_frame: JournalFrame | None = None

    def run(self) -> Recovered:
        """Read the journal, and make its last frame durable. Raises `CorruptLog`, `FormatTooNew` and `OSError`."""
        recovered = self.read()
        self._settle_last_frame()
        return recovered

    def read(self) -> Recovered:
        """The same without a write to the journal: what an opening would find. Raises the same."""
        state = self._state
        loaded = self._segments.load()
        cut: tuple[str, int] | None = None
        for place, segment in enumerate(loaded):
            following = loaded[place + 1 :]
            if not self._begins(segment, first=place == 0):
                cut = self._check_empty(segment, following) or cut
                self._segments.set_spare(segment)
                break
            if state.current is not None:
                self._seal(state.current)
            state.current = segment
            if place == 0:
                state.removed_to = {number: s.last_id for number, s in state.table.by_number.items()}
            if following and self._skip(segment):
                continue
            cut = self._scan(segment, following)
        self._check_durable(state.current)
        if loaded:
            check_beginning(loaded[0].path, state.removed_to, state.table)
        state.report = RecoveryReport(len(loaded), self._index.rebuilt, *(cut if cut is not None else (None, None)))
        return state

    def _begins(self, segment: Segment, *, first: bool) -> bool:
        """Whether the segment begins with the frame that must come next; its snapshot replaces the table."""
        scanner = self._scanner(segment, HEADER_BYTES)
        frame = scanner.next(None if first else self._state.next_sequence)
        if frame is None:
            return False
        state = self._state
        state.next_sequence = frame.sequence + 1
        at = 0
        for channel, length, _, _ in frame.raw_rows():
            if channel == CONTROL:
                state.table.apply(frame.bodies[at : at + length])
            at += length
        self._last_frame = frame
        return True

    def _check_empty(self, segment: Segment, following: list[Segment]) -> tuple[str, int] | None:
        """The segment holds no frame, as a spare; make sure that none is lost there."""
        scanner = self._scanner(segment, HEADER_BYTES)
        first = scanner.at(HEADER_BYTES, self._state.next_sequence)
        damaged = scanner.found is FrameFault.DAMAGE and first is None
        before = self._state.current
        lost = following or (before is not None and before.epoch in self._state.sealed)
        if lost or scanner.at(HEADER_BYTES) or scanner.later_frame(HEADER_BYTES, self._state.next_sequence):
            raise _corrupt(segment, HEADER_BYTES)
        if before is None and segment.epoch > 1:  # only a new directory may lack its first frame
            raise CorruptLog(
                f"no frame is left of the journal: the segments before {segment.path} are missing. Put them back, or"
                " restore the log from a backup; there is nothing to salvage",
                path=segment.path,
                offset=0,
            )
        return (segment.path, HEADER_BYTES) if damaged else None

    def _skip(self, segment: Segment) -> bool:
        """Take the summary of a full segment from the index, if it has one."""
        summary = self._index.summary(segment.epoch)
        if summary is None:
            return False
        self._state.sealed[segment.epoch] = summary
        self._state.next_sequence = summary.last_sequence + 1
        segment.end = summary.end
        return True

    def _scan(self, segment: Segment, following: list[Segment]) -> tuple[str, int] | None:
        state = self._state
        state.extents = Extents()
        state.next_sequence -= 1  # the first frame was read by _begins; its snapshot takes effect again, harmlessly
        scanner = self._scanner(segment, HEADER_BYTES)
        while (frame := scanner.next(state.next_sequence)) is not None:
            state.next_sequence += 1
            self._last_frame = frame
            self._apply(segment, frame)
        segment.end = scanner.offset
        found = scanner.found
        if scanner.later_frame(segment.end, state.next_sequence) is not None:
            raise _corrupt(segment, segment.end)
        if following:
            first = self._scanner(following[0], HEADER_BYTES).at(HEADER_BYTES)
            if first is not None and first.sequence != state.next_sequence:
                raise _corrupt(segment, segment.end)
        return (segment.path, segment.end) if found is FrameFault.DAMAGE else None

    def _apply(self, segment: Segment, frame: JournalFrame) -> None:
        """Count the frame's entries by channel and let its control records take effect, as `SegmentStats` does."""
        spans: dict[int, list[int]] = {}  # channel: first id, last id, highest timestamp, bytes
        at = 0
        for channel, length, id, timestamp in frame.raw_rows():
            span = spans.get(channel)
            if span is not None:
                span[1] = id
                if timestamp > span[2]:
                    span[2] = timestamp
                span[3] += length
            elif channel != CONTROL:
                spans[channel] = [id, id, timestamp, length]
            else:  # the record may create or drop channels: rows before it count before it
                self._enter(segment, frame, spans)
                spans.clear()
                self._state.table.apply(frame.bodies[at : at + length])
            at += length
        self._enter(segment, frame, spans)

    def _enter(self, segment: Segment, frame: JournalFrame, spans: dict[int, list[int]]) -> None:
        state = self._state
        entries: list[tuple[int, IndexEntry]] = []
        for channel, (first_id, last_id, highest, size) in spans.items():
            known = state.table.by_number.get(channel)
            earlier_timestamp = known.max_timestamp if known is not None else 0
            entry = state.indexer.entry_for(channel, first_id, segment.epoch, frame.offset, earlier_timestamp)
            if entry is not None:
                entries.append((channel, entry))
            state.table.advance(channel, last_id, highest)
            state.extents.add(channel, last_id, size)
        if entries:
            self._index.add(entries, (segment.epoch, frame.offset))

    def _seal(self, segment: Segment) -> None:
        """A later segment begins: this one takes no more frames."""
        state = self._state
        if segment.epoch not in state.sealed:
            summary = SegmentSummary(
                state.table.wall_ms, state.next_sequence - 2, segment.end, dict(state.extents.channels)
            )
            state.sealed[segment.epoch] = summary
            self._index.seal(segment.epoch, summary)

    def _check_durable(self, current: Segment | None) -> None:
        epoch, offset = self._index.durable_to()
        if current is not None and (epoch, offset) > (current.epoch, current.end):
            if epoch == current.epoch:
                raise _corrupt(current, current.end)
            raise CorruptLog(
                f"{current.path} ends the journal, but segment {epoch} was durable",
                path=current.path,
                offset=current.end,
            )

    def _settle_last_frame(self) -> None:
        """Write the last frame again and sync: its sync may have failed, and then only the page cache has it."""
        frame, current = self._last_frame, self._state.current
        if frame is not None and current is not None:
            content = self._disk.read(current.file, frame.size, frame.offset)
            write_all(self._disk, current.file, [content], frame.offset)
            self._disk.sync(current.file)

    def _scanner(self, segment: Segment, offset: int) -> Scanner:
        return Scanner(self._disk, segment.file, segment.epoch, segment.salt, offset, segment.size)


def _corrupt(segment: Segment, offset: int) -> CorruptLog:
    return CorruptLog(
        f"{segment.path} is damaged at offset {offset}: `tidewal verify journal` shows what is lost, `tidewal salvage` "
        "saves the rest",
        path=segment.path,
        offset=offset,
    )
