"""Scrub a journal: read every frame of every segment and report what there is and what is wrong, changing nothing.

Checked are headers, checksums, sequences without gaps, row tables against bodies, ids that only grow in each channel,
control records that can be read, and, where no process owns the directory, that the index finds what the journal holds.
Memory is bounded by the number of channels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ....runtime.disk import Disk
from ....runtime.errors import CorruptLog
from ..journal.channels import ChannelTable
from ..journal.frame import CONTROL, FrameFault, JournalFrame
from ..journal.segments import HEADER_BYTES
from .findings import SegmentReport
from .index_check import IndexCheck
from .journal_survey import Gap, JournalSurvey, ReadOnlyDisk, SegmentFile


def verify(directory: str, *, owned: bool, disk: Disk | None = None) -> Iterator[SegmentReport]:
    """One report per segment, oldest first; each is final when the next one comes. With `owned` an owner may be writing
    meanwhile, and its index is left alone. An index that cannot be read is a finding like others, and the journal is
    read to its end. Raises `FormatTooNew`, `OSError`."""
    survey = JournalSurvey(disk or ReadOnlyDisk(), os.path.join(directory, "journal"))
    index, unreadable = None, None
    try:
        if not owned:
            try:
                index = IndexCheck.open(os.path.join(directory, "index"))
            except CorruptLog as error:
                unreadable = error.message
        yield from Scrub(survey, index, owned=owned, unreadable=unreadable).run()
    finally:
        if index is not None:
            index.close()
        survey.close()


class Scrub:
    """One pass over all segments."""

    def __init__(
        self, survey: JournalSurvey, index: IndexCheck | None, *, owned: bool, unreadable: str | None = None
    ) -> None:
        """`unreadable`: why the index on the disk cannot be asked."""
        self._survey, self._index, self._owned = survey, index, owned
        self._table = ChannelTable()
        self._sequence: int | None = None
        self._last_ids: dict[int, int] = {}
        self._intact = True
        self._unreadable = unreadable
        self._before: SegmentReport | None = None

    def run(self) -> Iterator[SegmentReport]:
        segments = self._survey.segments
        for path in self._survey.vanished:
            yield SegmentReport(0, path, "gone")
        for place, segment in enumerate(segments):
            report = SegmentReport(segment.epoch, segment.path)
            before = self._before
            if before is not None and segment.epoch != before.epoch + 1:
                report.found(0, f"segments {before.epoch + 1} to {segment.epoch - 1} are missing before it")
            self._segment(report, segment, segments[place + 1] if place + 1 < len(segments) else None)
            if report.frames == 0 and report.state == "ok":
                if place == len(segments) - 1:
                    report.state = "spare"
                else:
                    report.found(HEADER_BYTES, "no frame, though segments follow")
            if before is not None:
                self._settle(before, report)
                yield before
            self._before = report
            if self._owned and report.state == "in use":
                break
        if self._before is not None:
            self._settle(self._before, None)
            yield self._before

    def _segment(self, report: SegmentReport, segment: SegmentFile, following: SegmentFile | None) -> None:
        if segment.header_damaged:
            report.found(0, "the header is damaged")
        if segment.header is None:
            report.found(HEADER_BYTES, "the salt is unknown: its frames cannot be checked", end=segment.size)
            return
        if segment.size < segment.header.size:
            report.found(segment.size, "the file is cut short", end=segment.header.size)
        for piece in self._survey.walk(segment, self._sequence):
            if isinstance(piece, Gap):
                self._gap(report, piece)
            else:
                self._frame(report, piece)
        self._tail(report, segment, following)
        refused, self._survey.reader.refused = self._survey.reader.refused, None
        if refused is not None:
            report.found(HEADER_BYTES, f"the device cannot read all of it: {refused}")
        if self._owned and report.state == "damaged" and self._recycled(segment):
            report.state, report.findings, report.more_findings = "gone", [], 0

    def _gap(self, report: SegmentReport, gap: Gap) -> None:
        before = self._before
        if gap.end == HEADER_BYTES and before is not None and before.epoch == report.epoch - 1:
            before.found(before.end, "frames are missing at its end", lost_frames=gap.lost)
            return
        what = "damaged frames" if gap.end > gap.offset else "frames are missing"
        if gap.offset == HEADER_BYTES and gap.lost is None:
            what = "a damaged frame, where a snapshot of all channels must be"
        report.found(gap.offset, what, end=gap.end, lost_frames=gap.lost)

    def _frame(self, report: SegmentReport, frame: JournalFrame) -> None:
        report.frames += 1
        report.end = frame.end
        self._sequence = frame.sequence + 1
        if report.frames == 1 and not report.findings and not is_snapshot(frame):
            report.found(frame.offset, "the first frame holds no snapshot of all channels")
        at = 0
        firsts: dict[int, int] = {}
        for channel, length, id, _ in frame.raw_rows():
            if channel == CONTROL:
                self._control(report, frame, frame.bodies[at : at + length])
            else:
                if id <= self._last_ids.get(channel, -1):
                    report.found(frame.offset, f"channel {channel}: id {id:016x} is not above the one before")
                self._last_ids[channel] = id
                firsts.setdefault(channel, id)
                report.entries += 1
                report.channels[channel] = id, length + report.channels.get(channel, (0, 0))[1]
            at += length
        if at != len(frame.bodies):
            report.found(frame.offset, f"its rows are of {at} bytes, its bodies have {len(frame.bodies)}")
        if self._index is not None and report.state == "ok":  # behind damage a difference is not the index's fault
            self._ask(report, ((frame.offset, what) for what in self._index.frame(report.epoch, frame.offset, firsts)))

    def _control(self, report: SegmentReport, frame: JournalFrame, body: memoryview) -> None:
        try:
            self._table.apply(body)
        except Exception as error:  # for bytes that are no such record, msgpack and the table may raise anything
            report.found(frame.offset, f"a control record cannot be read: {type(error).__name__}: {error}")

    def _tail(self, report: SegmentReport, segment: SegmentFile, following: SegmentFile | None) -> None:
        """Behind the last good frame: the journal's end, or damage. A frame that is torn at the very end will be cut
        off by the next opening; it was never acknowledged as durable, unless the index knows that it was."""
        begins = following is not None and self._begins(following)
        if self._owned and not begins:
            if report.frames and report.state == "ok":
                report.state = "in use"
            return
        scanner = self._survey.scanner(segment, report.end)
        while (frame := scanner.next(self._sequence)) is not None:  # the owner wrote it after the first look
            self._frame(report, frame)
        if scanner.found is FrameFault.DAMAGE and begins:
            report.found(report.end, "a damaged frame, and no good one behind it in this segment")
        elif scanner.found is FrameFault.DAMAGE and report.state == "ok":
            report.state = "torn"

    def _begins(self, segment: SegmentFile) -> bool:
        return self._survey.first_frame(segment) is not None

    def _recycled(self, segment: SegmentFile) -> bool:
        try:
            return os.stat(segment.path).st_ino != os.fstat(segment.file).st_ino
        except FileNotFoundError:
            return True

    def _settle(self, report: SegmentReport, following: SegmentReport | None) -> None:
        """Add the findings that only the index and the next segment show."""
        if self._unreadable is not None:
            report.found(report.end, f"{self._unreadable}; nothing is lost with it: the log works without it")
            self._unreadable = None
        if self._index is None:
            return
        final = following is None or following.frames == 0
        self._intact &= report.state == "ok"
        self._ask(report, self._index.segment(report, self._sequence, final=final, intact=self._intact))

    def _ask(self, report: SegmentReport, answers: Iterator[tuple[int, str]]) -> None:
        """Note what is wrong by the index; an index that cannot be read is asked no more."""
        try:
            for offset, what in answers:
                report.found(offset, what)
        except CorruptLog as error:
            self._unreadable = error.message
            if self._index is not None:
                self._index.close()
            self._index = None


def is_snapshot(frame: JournalFrame) -> bool:
    """Whether the frame begins with a snapshot of all channels, as each segment's first must."""
    number, *_ = next(frame.raw_rows(), (None,))
    return number == CONTROL and b"snapshot" in bytes(frame.bodies[:16])
