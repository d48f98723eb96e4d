"""Salvage a damaged log: copy every frame that can be read into a new directory, and note there what cannot.

The damaged directory is only read. Segments are copied one to one, frame by frame, so entries keep their ids and
control records their places; where a segment's snapshot is lost, the copy begins with one made from what was read
before it. Which ids are lost follows from the ids around the damage: a channel that goes on behind it with a later id
has lost those between. Where a channel does not go on, and no later snapshot says how far it went, it is unknown
whether anything of it is lost. All this is in the snapshot that ends the copy, so no reader passes a lost id in silence
(`journal/losses.py`) and no id is assigned again.
"""

from __future__ import annotations

import errno
import os
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, cast

import msgpack

from ....runtime.disk import Disk
from ....runtime.errors import (
    ConfigError,
    CorruptLog,
    DirectoryInUse,
    DirectoryUnwritable,
    DiskFull,
    JournalFailed,
    TidewalError,
)
from ....runtime.log.wal import ChannelPolicy
from ..journal import channels as records
from ..journal.beginning import lacking_beginning
from ..journal.channels import ChannelTable, JournalledChannel
from ..journal.dedup_table import is_result
from ..journal.frame import CONTROL, FrameFault, JournalFrame
from ..journal.losses import Loss
from ..journal.segments import HEADER_BYTES
from ..owner.directory import locked, read_format
from .index_check import IndexCheck
from .journal_copy import JournalCopy
from .journal_survey import Gap, JournalSurvey, ReadOnlyDisk, SegmentFile, apply_records
from .verify import is_snapshot

# What a journal may have lost behind its last good snapshot, at most. In 2³² rows are 96 GiB, in 2²⁰ records of created
# channels some 100 MiB; each incarnation of the owner has a frame of its own.
LOST_IDS = 1 << 32  # of one channel
LOST_CHANNELS = 1 << 20
LOST_INCARNATIONS = 1024


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes `offset` to `end` of a file cannot be read as what they were. `frames` are lost with them, None where it is
    not known how many."""

    path: str
    offset: int
    end: int
    what: str
    frames: int | None = None


@dataclass(slots=True)
class SalvageReport:
    """What a salvage found: the damage, how much is whole, and the channels as they are in the copy, with what they
    have lost, now or earlier. `unnamed` are names given to channels whose own names are lost. `copied_bytes` is the
    size of the copy; 0 where none was made."""

    damages: list[Damage] = field(default_factory=list[Damage])
    frames: int = 0
    entries: int = 0
    table: ChannelTable = field(default_factory=ChannelTable)
    unnamed: list[str] = field(default_factory=list[str])
    copied_bytes: int = 0


def salvage(
    directory: str, new: str | None, *, wall_ms: int, accept: bool = False, disk: Disk | None = None
) -> SalvageReport:
    """Copy what can be read of the log in `directory` into the directory `new`, which must not exist or be empty; with
    None only report. In the copy, readers may pass what is lost, now and earlier, if `accept` is true. `wall_ms`
    (milliseconds) is the present time.

    A copy that did not end is refused by every opening (`IncompleteLog`). Raises `DirectoryInUse` where a process owns
    the log, `ConfigError` for directories that do not suit, `CorruptLog` where not one frame can be read,
    `FormatTooNew`, `IncompleteLog`, `DiskFull`, `DirectoryUnwritable` and `JournalFailed`."""
    if new is not None:
        _check_new(directory, new)
    with locked(directory) as unowned:
        if not unowned:
            raise DirectoryInUse(f"{directory} is in use or cannot be locked: stop its owner first", path=directory)
        with closing(JournalSurvey(ReadOnlyDisk(), os.path.join(directory, "journal"))) as survey:
            _check_readable(survey, directory)
            found = Salvage(survey, directory, wall_ms)
            if new is None:
                return found.run(None, accept=accept)
            with closing(JournalCopy(disk or Disk(), new, survey.segments[0].epoch)) as copy:
                try:
                    report = found.run(copy, accept=accept)
                    copy.complete()
                except OSError as error:
                    raise _failed(new, error) from error
                report.copied_bytes = copy.size
                return report


def _check_new(directory: str, new: str) -> None:
    inside = os.path.realpath(new).startswith(os.path.join(os.path.realpath(directory), ""))
    if inside or os.path.realpath(new) == os.path.realpath(directory):
        raise ConfigError(f"{new} lies in the damaged log, which must stay as it is: name another directory", key="new")
    if os.path.exists(new) and not (os.path.isdir(new) and not os.listdir(new)):
        raise ConfigError(f"{new} is not an empty directory: name one that is empty or does not exist", key="new")


def _check_readable(survey: JournalSurvey, directory: str) -> None:
    pieces = (piece for segment in survey.segments if segment.header for piece in survey.walk(segment, None))
    if not any(isinstance(piece, JournalFrame) for piece in pieces):
        raise CorruptLog(
            f"not one frame of {directory} can be read: there is nothing to salvage. Restore the log from a backup, or"
            " begin a new one and insert the rows of the tables again",
            offset=0,
        )


def _failed(new: str, error: OSError) -> TidewalError:
    again = f"remove {new} and salvage again"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"no space for the copy: free some, {again}", path=new)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DirectoryUnwritable(f"{new} cannot be written: {error.strerror}; {again}", path=new)
    return JournalFailed(f"writing the copy failed: {error}; {again}", path=new)


class Salvage:
    """One pass over a journal; `run` once."""

    def __init__(self, survey: JournalSurvey, directory: str, wall_ms: int) -> None:
        self._survey, self._directory, self._wall_ms = survey, directory, wall_ms
        self._report = SalvageReport()
        self._table = self._report.table
        self._copy: JournalCopy | None = None
        self._sequence: int | None = None  # of the next frame
        self._end: tuple[SegmentFile, int] | None = None  # the last segment with frames, and where these end
        self._frames_lost = False  # frames are gone before the next one, or may be
        self._unsettled = False  # the same, and no snapshot has told since what they held
        self._suspects: set[int] = set()  # channels that may have had entries in lost frames, until they go on
        self._dropped: set[int] = set()
        self._losses: dict[int, list[Loss]] = {}
        self._named: dict[int, JournalledChannel] | None = None  # channels as any snapshot has them, once needed

    def run(self, copy: JournalCopy | None, *, accept: bool) -> SalvageReport:
        """Read the journal, write `copy` if given. Raises `FormatTooNew`, and `OSError` from the copy."""
        self._copy = copy
        segments = self._survey.segments
        self._check_format()
        self._check_beginning()
        durable_to = self._durable_to()
        for place, segment in enumerate(segments):
            if place and segment.epoch != segments[place - 1].epoch + 1:
                self._lose(Damage(segment.path, 0, 0, f"segments from {segments[place - 1].epoch + 1} on are missing"))
            self._segment(segment, begun=place < len(segments) - 1 or durable_to[0] >= segment.epoch)
        self._check_end(durable_to)
        self._finish(accept=accept)
        return self._report

    # ---- files -------------------------------------------------------------------------------------------------------

    def _check_format(self) -> None:
        if not read_format(self._directory):
            path = os.path.join(self._directory, "FORMAT")
            self._note(Damage(path, 0, 0, "missing or damaged; each segment names its format, too", 0))

    def _check_beginning(self) -> None:
        first = self._survey.segments[0]
        frame = self._survey.first_frame(first)
        if frame is None:
            return
        before = ChannelTable()
        apply_records(before, frame)
        removed_to = {number: state.last_id for number, state in before.by_number.items()}
        if lacking_beginning(removed_to, self._survey.channels()):
            self._lose(Damage(first.path, 0, 0, "segments before it are missing"))

    def _durable_to(self) -> tuple[int, int]:
        """The epoch and offset up to which the index knows the journal to be durable; 0, 0 where it cannot be read."""
        path = os.path.join(self._directory, "index")
        try:
            check = IndexCheck.open(path)
            if check is None:
                return 0, 0
            try:
                return check.durable_to()
            finally:
                check.close()
        except CorruptLog as error:
            self._note(Damage(path, 0, 0, f"{error.message}; it might tell of frames lost at the journal's end", 0))
            return 0, 0

    def _segment(self, segment: SegmentFile, *, begun: bool) -> None:
        """Copy a segment. `begun`: it is known that frames were written there."""
        found = False
        if segment.header_damaged:
            what = "the header" if segment.header is None else "the header; the frames prove how it was"
            self._note(Damage(segment.path, 0, HEADER_BYTES, what, 0))
        for piece in self._survey.walk(segment, self._sequence) if segment.header is not None else ():
            if isinstance(piece, Gap):
                self._gap(segment, piece)
                continue
            if not found:
                self._begin_segment(piece)
            self._frame(piece)
            self._end, found = (segment, piece.end), True
        if not found and (begun or (segment.header is None and self._survey.frame_offsets(segment))):
            self._lose(Damage(segment.path, HEADER_BYTES, segment.size, "no frame of it can be read"))

    def _gap(self, segment: SegmentFile, gap: Gap) -> None:
        if gap.lost == 0:
            return
        if gap.end == HEADER_BYTES and self._end is not None:
            before, end = self._end
            self._lose(Damage(before.path, end, before.size, "frames are missing behind this", gap.lost))
        else:
            self._lose(Damage(segment.path, gap.offset, gap.end, "damaged frames", gap.lost))

    def _check_end(self, durable_to: tuple[int, int]) -> None:
        """There may have been frames behind the last good one: the index knows it."""
        assert self._end is not None
        segment, end = self._end
        if durable_to > (segment.epoch, end):
            self._lose(Damage(segment.path, end, segment.size, "the index knows of frames behind this"))
            return
        scanner = self._survey.scanner(segment, end)
        if scanner.next(self._sequence) is None and scanner.found is FrameFault.DAMAGE:
            self._note(Damage(segment.path, end, segment.size, "an unfinished frame, not known to be durable", 0))

    def _note(self, damage: Damage) -> None:
        self._report.damages.append(damage)

    def _lose(self, damage: Damage) -> None:
        """Frames are lost: every channel may have had entries there."""
        self._note(damage)
        self._frames_lost = self._unsettled = True
        self._suspects = {number for number, state in self._table.by_number.items() if not state.policy.ephemeral}

    # ---- frames ------------------------------------------------------------------------------------------------------

    def _begin_segment(self, frame: JournalFrame) -> None:
        """Begin a segment of the copy; `frame` is its first. Where the snapshot is lost that must be there, or all that
        came before it, a snapshot of what is known comes first. What lies before that one counts as written now:
        retention goes by its time, and would remove it too soon by an earlier one."""
        if self._copy is None:
            return
        self._copy.begin_segment()
        if not is_snapshot(frame) or (self._frames_lost and self._sequence is None):
            self._copy.add_records([self._snapshot_now()])

    def _snapshot_now(self) -> bytes:
        return self._table.snapshot(max(self._wall_ms, self._table.wall_ms))

    def _frame(self, frame: JournalFrame) -> None:
        self._sequence = frame.sequence + 1
        self._report.frames += 1
        before: list[bytes] = []  # control records to go with the frame
        at = 0
        for number, length, id, timestamp in frame.raw_rows():
            if number == CONTROL:
                self._record(frame.bodies[at : at + length], before)
            else:
                self._entry(number, id, before)
                self._table.advance(number, id, timestamp)
            at += length
        if self._copy is not None:
            self._copy.add(frame, before)

    def _entry(self, number: int, id: int, before: list[bytes]) -> None:
        self._report.entries += 1
        if self._unsettled and number not in self._table.by_number and number not in self._dropped:
            self._create(number, id, before)
        if number in self._suspects:
            self._suspects.discard(number)
            self._note_loss(number, self._table.by_number[number].last_id + 1, id - 1)

    def _record(self, body: memoryview, before: list[bytes]) -> None:
        if is_result(body):
            self._table.apply(body)
            return
        kind, *arguments = cast("list[Any]", msgpack.unpackb(body))
        if kind == "snapshot":
            self._snapshot(body)
            return
        if kind == "create":
            number, name, *_ = arguments
            self._drop_namesakes(number, name, before)
        elif kind == "drop":
            self._dropped.add(arguments[0])
            self._suspects.discard(arguments[0])
        self._table.apply(body)

    def _snapshot(self, body: memoryview) -> None:
        """A snapshot replaces the table: it says how far each channel went before it, and which there are."""
        last_ids = {number: state.last_id for number, state in self._table.by_number.items()}
        self._table.apply(body)
        for number, state in self._table.by_number.items() if self._unsettled else ():
            if number in self._suspects or number not in last_ids:
                self._note_loss(number, last_ids.get(number, state.floor) + 1, state.last_id)
        self._suspects.clear()
        self._unsettled = False

    def _create(self, number: int, id: int, before: list[bytes]) -> None:
        """Create a channel whose creation is lost, in front of its entry with that id: as a later snapshot has it, else
        by a name of its own."""
        known = self._as_any_snapshot_has_it(number)
        if known is None:
            known = JournalledChannel(
                number, f"recovered-{number}", ChannelPolicy(retention_s=None), min(self._table.floor, id - 1)
            )
            self._report.unnamed.append(known.name)
        self._drop_namesakes(number, known.name, before)
        before.append(records.create(known))
        self._table.apply(before[-1])
        self._suspects.add(number)

    def _as_any_snapshot_has_it(self, number: int) -> JournalledChannel | None:
        if self._named is None:
            self._named = {}
            for segment in self._survey.segments:
                frame = self._survey.first_frame(segment)
                if frame is not None and is_snapshot(frame):
                    table = ChannelTable()
                    apply_records(table, frame)
                    self._named |= table.by_number
        return self._named.get(number)

    def _drop_namesakes(self, created: int, name: str, before: list[bytes]) -> None:
        """A name belongs to one channel: where another still has it, the record that dropped the other is lost."""
        for number in [each for each, state in self._table.by_number.items() if state.name == name and each != created]:
            before.append(records.drop(number))
            self._table.apply(before[-1])
            self._dropped.add(number)
            self._suspects.discard(number)

    # ---- what is lost ------------------------------------------------------------------------------------------------

    def _note_loss(self, number: int, first: int, last: int, *, unknown: bool = False) -> None:
        if first <= last and not self._table.by_number[number].policy.ephemeral:
            self._losses.setdefault(number, []).append(Loss(first, last, self._wall_ms, unknown))

    def _finish(self, *, accept: bool) -> None:
        """End the copy with a snapshot that says what is lost. Ids, channel numbers and incarnations go on above all
        that may have been lost, so none is assigned again."""
        table = self._table
        for number in self._suspects:
            last = table.by_number[number].last_id
            self._note_loss(number, last + 1, last + LOST_IDS, unknown=True)
        for number, state in table.by_number.items():
            known = {*state.losses, *self._losses.get(number, ())}
            state.losses = tuple(sorted(loss._replace(accepted=loss.accepted or accept) for loss in known))
            state.last_id = max([state.last_id, *(loss.last for loss in known)])
        if self._frames_lost:
            table.boot += LOST_INCARNATIONS
        if self._unsettled:
            table.next_number += LOST_CHANNELS
            table.floor = max([table.floor, *(state.last_id for state in table.by_number.values())]) + LOST_IDS
        if self._copy is not None:
            self._copy.begin_segment()
            self._copy.add_records([self._snapshot_now()])
