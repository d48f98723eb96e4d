"""Plan the repair of a damaged journal: what is unreadable, what that loses, and how the files are to be written anew.

Good frames stay as they are. The frames that are lost are replaced by empty ones, so that sequences and epochs have no
gaps; where a snapshot is lost, one is made from the rest of the journal. The ids that are lost follow from the ids
around the damage, or from the rows of the damaged frames where these fit in without a flaw; they are recorded at the
journal's end (`journal/losses.py`), so no reader passes them in silence. `rebuild.py` carries the plan out.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any, cast

import msgpack

from ....runtime.errors import CorruptLog
from ....runtime.log.wal import ChannelPolicy
from ..journal import channels as records
from ..journal.channels import ChannelTable, JournalledChannel
from ..journal.frame import CONTROL, ROW_BYTES, FrameFault, JournalFrame
from ..journal.losses import accept as accept_losses
from ..journal.losses import lost
from ..journal.segments import HEADER_BYTES, segment_name
from .index_check import IndexCheck
from .journal_survey import Gap, JournalSurvey, SegmentFile
from .repair_plan import Damage, Filler, Kept, NewSegment, RepairPlan
from .verify import is_snapshot, verify

CHANNEL_BITS = 32  # of a channel's number in a row
# How far the owner's incarnation number is moved on at most: each lost frame may have begun one.
MAX_LOST_INCARNATIONS = 1024


def plan(directory: str, survey: JournalSurvey, *, wall_ms: int, accept: bool = False) -> RepairPlan:
    """Read everything and say what there is to do; nothing is changed. With `accept`, readers may pass what is lost,
    now and in earlier repairs. `wall_ms` (milliseconds) is the time that the journal will give for the repair. Raises
    `CorruptLog` where not one frame is readable, `FormatTooNew`, and `OSError`."""
    index = os.path.join(directory, "index")
    found = RepairPlanner(survey, _durable_to(index), wall_ms).run(accept=accept)
    found.index_aside = os.path.isdir(index) and (bool(found.segments or found.aside) or not _index_agrees(directory))
    return found


def _index_agrees(directory: str) -> bool:
    return not any(report.findings for report in verify(directory, owned=False))


def _durable_to(index: str) -> tuple[int, int]:
    """The epoch and offset up to which the index knows the journal to be durable; 0, 0 where it cannot be read."""
    try:
        check = IndexCheck.open(index)
        if check is None:
            return 0, 0
        try:
            return check.durable_to()
        finally:
            check.close()
    except CorruptLog:
        return 0, 0


class RepairPlanner:
    """One pass over the journal; `run` once."""

    def __init__(self, survey: JournalSurvey, durable_to: tuple[int, int], wall_ms: int) -> None:
        self._survey, self._durable_to, self._wall_ms = survey, durable_to, wall_ms
        self._plan = RepairPlan()
        self._table = self._plan.table
        self._sequence: int | None = None
        self._last_ids: dict[int, int] = {}
        self._open: dict[int, tuple[Damage, int]] = {}  # channel → the damage that may have hit it, entries at most
        self._missing: list[NewSegment] = []  # before the next good frame
        self._pending: Damage | None = None  # at the end of the segment before, where frames may have been
        self._torn = False  # there are remains of a frame behind the last good frame of that segment
        self._filler: Filler | None = None  # the last one
        self._from_the_start = any(segment.epoch == 1 for segment in survey.segments)  # retention removed nothing
        self._head: Filler | None = None  # with a snapshot in place of the journal's first, until the next snapshot
        self._orphans: list[tuple[Filler, JournalledChannel]] = []  # channels that no record creates
        self._first_states: dict[int, JournalledChannel] = {}  # channels as the first record about them has them
        self._dropped: set[int] = set()
        self._guessed: set[int] = set()  # channels in `_open` for which the number of lost entries is only a bound

    def run(self, *, accept: bool) -> RepairPlan:
        segments, found = self._survey.segments, self._plan.segments
        for place, segment in enumerate(segments):
            if place:
                self._note_missing(segments[place - 1], segment)
            self._segment(segment, last=place == len(segments) - 1)
        held = [segment for segment in found if any(isinstance(piece, Kept) for piece in segment.pieces)]
        if not held:
            raise CorruptLog("not one frame of the journal can be read: there is nothing to repair", offset=0)
        self._end(held[-1], accept=accept)
        self._adopt_orphans()
        self._plan.segments = [segment for segment in found if segment.changed]
        return self._plan

    # ---- segments ----------------------------------------------------------------------------------------------------

    def _note_missing(self, before: SegmentFile, segment: SegmentFile) -> None:
        for epoch in range(before.epoch + 1, segment.epoch):
            path = os.path.join(os.path.dirname(before.path), segment_name(epoch))
            self._lose_segment(NewSegment(epoch, path, segment.size), "the segment is missing")

    def _lose_segment(self, new: NewSegment, what: str, *, held_frames: bool = True) -> None:
        damage = Damage(new.path, 0, new.size, what)
        self._plan.damages.append(damage)
        self._plan.segments.append(new)
        self._missing.append(new)
        if held_frames:
            self._open_all(damage)

    def _segment(self, segment: SegmentFile, *, last: bool) -> None:
        new = NewSegment(segment.epoch, segment.path, segment.size, segment)
        if segment.header is None:
            new.source = None
            held = not last or self._durable_to[0] >= segment.epoch or bool(self._survey.frame_offsets(segment))
            self._lose_segment(
                new, "the header is damaged and the salt is unknown: no frame can be checked", held_frames=held
            )
            return
        new.size = max(segment.size, segment.header.size)
        end = HEADER_BYTES
        for piece in self._survey.walk(segment, self._sequence):
            if isinstance(piece, Gap):
                self._gap(segment, piece)
                continue
            if end == HEADER_BYTES:
                self._begin(new, segment, piece)
            elif piece.offset != end:
                self._bridge(new, piece)
            self._frame(piece)
            new.keep(piece.offset, piece.end)
            end = piece.end
        if end > HEADER_BYTES:
            self._look_behind(segment, end)
        elif not last or self._durable_to[0] >= segment.epoch:
            new.source = None
            self._lose_segment(new, "no frame of it can be read")

    def _begin(self, new: NewSegment, segment: SegmentFile, frame: JournalFrame) -> None:
        if segment.header_damaged:
            self._plan.damages.append(
                Damage(segment.path, 0, HEADER_BYTES, "the header; the frames prove how it was", 0)
            )
            new.changed = True
        self._bridge(new, frame, snapshot=not is_snapshot(frame))
        self._plan.segments.append(new)

    def _gap(self, segment: SegmentFile, gap: Gap) -> None:
        if gap.end == HEADER_BYTES or gap.lost == 0:
            return  # frames before this segment, which its first frame shows to be missing; or no frames
        damage = Damage(segment.path, gap.offset, gap.end, "damaged frames", gap.lost)
        self._plan.damages.append(damage)
        self._read_damaged(segment, damage)

    def _look_behind(self, segment: SegmentFile, end: int) -> None:
        """There may have been more frames at the segment's end: the next good frame shows it, or the index."""
        epoch, offset = self._durable_to
        scanner = self._survey.scanner(segment, end)
        self._torn = scanner.at(end, self._sequence) is None and scanner.found is FrameFault.DAMAGE
        damage = Damage(segment.path, end, segment.size, "damaged frames at the end of the segment")
        if epoch == segment.epoch and offset > end:
            damage.end = offset
            self._plan.damages.append(damage)
            self._read_damaged(segment, damage)
        else:
            self._pending = damage

    def _bridge(self, new: NewSegment, frame: JournalFrame, *, snapshot: bool = False) -> None:
        """Fill the gap between the last good frame and this one, with `snapshot` the segment's first frame, too."""
        pending, self._pending = self._pending, None
        torn, self._torn = self._torn, False
        headless = False
        if self._sequence is None:
            if not self._from_the_start:
                self._give_up_missing()
                headless = snapshot
            gap = len(self._missing) + snapshot
        else:
            gap = frame.sequence - self._sequence
        if gap < len(self._missing) + snapshot:
            raise CorruptLog(f"{new.path} does not follow the segment before it", path=new.path, offset=frame.offset)
        places = [*self._missing, *([new] if snapshot or new.pieces else [])]
        if gap and torn:  # written anew, too: the remains of the frames would look like damage again
            next(each for each in reversed(self._plan.segments) if each not in self._missing).changed = True
        if gap and pending is not None and (torn or not places):
            pending.frames = gap if not places else None
            self._plan.damages.append(pending)
            self._lose_pending(pending)
            places = places or [self._plan.segments[-1]]
        if gap and not places:  # the damage at the end of the segment before is known from the index
            places = [self._plan.segments[-1]]
        sequence = frame.sequence - gap
        for place in places if gap else ():
            count = gap if place is places[-1] else 1
            begins = place in self._missing or (snapshot and place is new)
            self._filler = Filler(sequence, count, self._snapshot_table() if begins else None)
            place.fill(self._filler)
            sequence, gap = sequence + count, gap - count
            self._head = self._filler if headless else self._head
        self._missing.clear()

    def _give_up_missing(self) -> None:
        """Segments with nothing to read before the first good frame, or behind the last, are not replaced: the journal
        begins behind them, as if retention had gone on, or ends before them."""
        self._plan.aside += [segment.path for segment in self._missing if os.path.exists(segment.path)]
        self._missing.clear()

    def _snapshot_table(self) -> ChannelTable:
        """The table for a made-up snapshot. What lies before it counts as written now: retention goes by that time, and
        with an earlier one would remove it too soon."""
        table = copy.deepcopy(self._table)
        table.wall_ms = self._wall_ms
        return table

    def _lose_pending(self, damage: Damage) -> None:
        segment = next(each for each in self._survey.segments if each.path == damage.path)
        self._read_damaged(segment, damage, to_the_end=True)

    # ---- what is in the frames ---------------------------------------------------------------------------------------

    def _frame(self, frame: JournalFrame) -> None:
        self._sequence = frame.sequence + 1
        at = 0
        for number, length, id, timestamp in frame.raw_rows():
            if number == CONTROL:
                self._control(frame.bodies[at : at + length])
            else:
                self._entry(number, id)
                self._table.advance(number, id, timestamp)
            at += length

    def _control(self, body: memoryview) -> None:
        before = set(self._table.by_number)
        self._table.apply(body)
        kind, *arguments = cast("list[Any]", msgpack.unpackb(body))
        if kind == "create":
            self._drop_namesakes(arguments[0])
            self._first_states.setdefault(arguments[0], copy.deepcopy(self._table.by_number[arguments[0]]))
        elif kind == "drop":
            self._dropped.add(arguments[0])
            self._open.pop(arguments[0], None)
        elif kind == "snapshot":
            self._snapshot(before)

    def _drop_namesakes(self, created: int) -> None:
        """A name belongs to one channel: where another still has it, the record that dropped the other is lost."""
        name = self._table.by_number[created].name
        for number in [each for each, state in self._table.by_number.items() if state.name == name and each != created]:
            if self._filler is not None:
                self._filler.records.append(records.drop(number))
                self._table.apply(records.drop(number))
                self._dropped.add(number)
                self._open.pop(number, None)

    def _snapshot(self, before: set[int]) -> None:
        """A snapshot has replaced the table, with the last id of each channel; `before` are the channels until then."""
        if self._head is not None and (made_up := self._head.table) is not None:
            made_up.boot, made_up.floor = self._table.boot, self._table.floor
            for number in self._table.by_number.keys() - before:
                made_up.by_number[number] = copy.deepcopy(self._table.by_number[number])
        for number, state in self._table.by_number.items():
            self._first_states.setdefault(number, copy.deepcopy(state))
            known_before = bool(before) or self._from_the_start
            if number not in before and known_before and self._head is None and self._plan.damages:
                self._open[number] = self._plan.damages[-1], 0  # it was created where the damage is
                self._last_ids[number] = state.floor
            self._close(number, state.last_id + 1)
            self._last_ids[number] = max(self._last_ids.get(number, 0), state.last_id)
        for number in self._open.keys() - self._table.by_number.keys():
            del self._open[number]
        self._head = None

    def _entry(self, number: int, id: int) -> None:
        if number not in self._table.by_number and number not in self._dropped and self._filler is not None:
            floor = id - 1 if self._head is not None else min(self._table.floor, id - 1)
            state = JournalledChannel(number, _unnamed(number), ChannelPolicy(retention_s=None), floor, last_id=floor)
            self._orphans.append((self._head or self._filler, copy.deepcopy(state)))
            self._table.by_number[number] = state
            self._table.next_number = max(self._table.next_number, number + 1)
            self._last_ids[number] = floor
            self._open[number] = self._plan.damages[-1], 0
        self._close(number, id)
        self._last_ids[number] = id

    def _close(self, number: int, next_id: int) -> None:
        """The channel goes on with `next_id`: the ids between its last and that are lost."""
        opened = self._open.pop(number, None)
        self._guessed.discard(number)
        if opened is not None and next_id > (first := self._last(number) + 1):
            opened[0].channels[number] = first, next_id - 1

    def _last(self, number: int) -> int:
        state = self._table.by_number.get(number)
        return self._last_ids.get(number, state.floor if state is not None else 0)

    def _open_all(self, damage: Damage, rows: int = 0) -> None:
        """It is unknown which channels a damage hit: each may have lost as many entries as there was room for, or as
        there were `rows`, where that is known."""
        room = rows or max((damage.end - damage.offset) // ROW_BYTES, damage.frames or 1)
        for number, state in self._table.by_number.items():
            if not state.policy.ephemeral:
                first, bound = self._open.get(number, (damage, 0))
                self._open[number] = first, bound + room
                self._guessed.add(number)

    # ---- what is in damaged frames -----------------------------------------------------------------------------------

    def _read_damaged(self, segment: SegmentFile, damage: Damage, *, to_the_end: bool = False) -> None:
        """Believe the rows of damaged frames if all frames are there and each row can only be what it says.
        `to_the_end`: where the last frame ends is not known, but how many there are is."""
        last_ids: dict[int, int] = {}
        count, rows, reached, believed = 0, 0, damage.offset, True
        for frame in self._unverified_frames(segment, damage):
            count, rows, reached = count + 1, rows + len(frame.table) // ROW_BYTES, frame.end
            believed = believed and self._read_rows(frame, last_ids)
        whole = count > 0 and count == (damage.frames or count)
        if not (believed and whole and (to_the_end or reached == damage.end)):
            self._open_all(damage, rows if whole and reached == damage.end else 0)
            return
        damage.frames, damage.end = count, reached
        for number, last_id in last_ids.items():
            first, bound = self._open.get(number, (damage, 0))
            self._open[number] = first, max(bound, last_id - self._last(number))

    def _read_rows(self, frame: JournalFrame, last_ids: dict[int, int]) -> bool:
        """Note in `last_ids` how far each channel went in a damaged frame; False if any row cannot be believed."""
        at = 0
        for number, length, id, _ in frame.raw_rows():
            body, at = frame.bodies[at : at + length], at + length
            if number == CONTROL:
                if not _is_record(body):
                    return False
            elif not self._comes_next(number, id, last_ids) or any(
                self._comes_next(number ^ 1 << bit, id, last_ids) for bit in range(CHANNEL_BITS)
            ):
                return False
            else:
                last_ids[number] = id
        return True

    def _comes_next(self, number: int, id: int, last_ids: dict[int, int]) -> bool:
        """Whether the channel may go on with `id`: behind all ids that are known, and all that were lost before it."""
        if number not in self._table.by_number:
            return False
        if number in last_ids:
            return id == last_ids[number] + 1
        _, bound = self._open.get(number, (None, 0))
        return 0 < id - self._last(number) <= bound + 1

    def _unverified_frames(self, segment: SegmentFile, damage: Damage) -> Iterator[JournalFrame]:
        """Damaged frames one after another, as their headers describe them."""
        offset, left = damage.offset, damage.frames
        while offset < damage.end and left != 0:
            frame = self._survey.unverified(segment, offset)
            if frame is None or not len(frame.table):
                return
            yield frame
            offset, left = frame.end, None if left is None else left - 1

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _end(self, last: NewSegment, *, accept: bool) -> None:
        """Note at the journal's end what is lost; segment files behind it are moved aside."""
        epoch, _ = self._durable_to
        if epoch > max(segment.epoch for segment in self._plan.segments):
            path = os.path.join(os.path.dirname(last.path), segment_name(epoch))
            damage = Damage(path, 0, last.size, "the segment is missing; the index knows that it held frames")
            self._plan.damages.append(damage)
            self._open_all(damage)
        self._give_up_missing()
        for number, (damage, bound) in self._open.items():
            if bound:
                first = self._last(number) + 1
                damage.channels[number] = first, first + bound - 1
                if number in self._guessed:
                    damage.at_most.add(number)
        written: list[bytes] = []
        lost_frames = sum(MAX_LOST_INCARNATIONS if each.frames is None else each.frames for each in self._plan.damages)
        if lost_frames:
            written.append(records.boot(self._table.boot + min(lost_frames, MAX_LOST_INCARNATIONS)))
        if losses := self._plan.losses:
            written.append(lost(losses, self._wall_ms))
        earlier = [loss for state in self._table.by_number.values() for loss in state.losses]
        if accept and (losses or not all(loss.accepted for loss in earlier)):
            written.append(accept_losses())
        if written:
            assert self._sequence is not None
            last.fill(Filler(self._sequence, 1, None, written))

    def _adopt_orphans(self) -> None:
        """Create channels whose creation was lost, with name and policy where a later record has them."""
        for filler, found in self._orphans:
            state = copy.deepcopy(self._first_states.get(found.number, found))
            state.floor, state.last_id, state.max_timestamp, state.losses = found.floor, found.floor, 0, ()
            if filler.table is not None:
                filler.table.by_number[found.number] = state
                filler.table.next_number = max(filler.table.next_number, found.number + 1)
            else:
                filler.records.append(records.create(state))
        self._plan.names = {number: state.name for number, state in self._first_states.items()}
        self._plan.names |= {number: state.name for number, state in self._table.by_number.items()}


def _is_record(body: memoryview) -> bool:
    """Whether these bytes are a control record: in a damaged frame a row of channel 0 may be of any channel."""
    try:
        ChannelTable().apply(body)
    except Exception:  # for bytes that are no such record, msgpack and the table may raise anything
        return False
    return True


def _unnamed(number: int) -> str:
    """The name for a channel whose own name was lost."""
    return f"recovered-{number}"
