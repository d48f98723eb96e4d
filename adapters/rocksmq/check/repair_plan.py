"""What a repair is going to do, as a plan: `repair.py` makes it, `rebuild.py` carries it out."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..journal.channels import ChannelTable
from ..journal.segments import HEADER_BYTES
from .journal_survey import SegmentFile


@dataclass(slots=True)
class Damage:
    """One damaged range: bytes `offset` to `end` of a file are unreadable, `frames` frames are lost (None: unknown how
    many), and with them ranges of ids of `channels`, by number. For channels in `at_most` it is unknown whether any
    entry was there: the range is as large as there was room for."""

    path: str
    offset: int
    end: int
    what: str
    frames: int | None = None
    channels: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    at_most: set[int] = field(default_factory=set[int])


@dataclass(slots=True)
class Kept:
    """Good frames, copied as they are."""

    start: int
    end: int


@dataclass(slots=True)
class Filler:
    """`count` frames in place of lost ones. The first carries `table` as a snapshot, the last the `records`."""

    sequence: int
    count: int
    table: ChannelTable | None = None
    records: list[bytes] = field(default_factory=list[bytes])


@dataclass(slots=True, eq=False)
class NewSegment:
    """A segment to be written anew. `source` is the file that it comes from; None: it was missing, or nothing of it
    counts. `changed`: it differs from the file on the disk."""

    epoch: int
    path: str
    size: int
    source: SegmentFile | None = None
    pieces: list[Kept | Filler] = field(default_factory=list[Kept | Filler])
    changed: bool = False

    def keep(self, start: int, end: int) -> None:
        last = self.pieces[-1] if self.pieces else None
        if isinstance(last, Kept) and last.end == start:
            last.end = end
            return
        self.changed |= start != HEADER_BYTES
        self.pieces.append(Kept(start, end))

    def fill(self, filler: Filler) -> None:
        self.pieces.append(filler)
        self.changed = True


@dataclass(slots=True)
class RepairPlan:
    """What `repair` will do. `aside` are the files that are moved aside and not replaced."""

    damages: list[Damage] = field(default_factory=list[Damage])
    segments: list[NewSegment] = field(default_factory=list[NewSegment])
    aside: list[str] = field(default_factory=list[str])
    index_aside: bool = False
    table: ChannelTable = field(default_factory=ChannelTable)
    names: dict[int, str] = field(default_factory=dict[int, str])

    @property
    def needed(self) -> bool:
        return bool(self.damages) or self.index_aside

    @property
    def stops_readers(self) -> bool:
        """Whether readers end with `PositionLost` at ids that are lost, now or earlier, and not accepted."""
        earlier = (loss for state in self.table.by_number.values() for loss in state.losses)
        return bool(self.losses) or not all(loss.accepted for loss in earlier)

    @property
    def losses(self) -> dict[int, list[tuple[int, int]]]:
        """Channel number → ranges of ids that are lost."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        for damage in self.damages:
            for number, each in damage.channels.items():
                ranges.setdefault(number, []).append(each)
        return ranges
