"""A channel of the log: where its entries are, and what is kept of them."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...runtime.errors import PositionLost
from ...runtime.groups.progress import Change, GroupProgress
from ...runtime.log.wal import ChannelPolicy, Delivery
from .block import SectionRow

_ID = struct.Struct(">QQ")


def encode_id(epoch: int, seq: int) -> bytes:
    """The id of the entry with this number, written in this epoch."""
    return _ID.pack(epoch, seq)


def id_before(id: bytes) -> bytes:
    """The greatest id below `id`."""
    return (int.from_bytes(id) - 1).to_bytes(len(id))


class Piece(NamedTuple):
    """Entries of a section whose numbers follow each other: from the entry at this place on, up to the next piece."""

    at: int
    first_seq: int


class StoredSection(NamedTuple):
    """Where some entries of a channel are, all of one epoch: the section that `row` describes, of the object under
    `key`. `stored_ms` is when the newest of them was stored, by the store's clock."""

    key: str
    epoch: int
    stored_ms: int
    row: SectionRow
    pieces: tuple[Piece, ...]

    @property
    def first_id(self) -> bytes:
        return encode_id(self.epoch, self.row.first_seq)

    @property
    def last_id(self) -> bytes:
        return self.id(self.row.entries - 1)

    def id(self, at: int) -> bytes:
        """The id of the entry at this place in the section."""
        piece = self.pieces[-1]
        if at < piece.at:
            piece = self.pieces[bisect_right(self.pieces, at, key=lambda piece: piece.at) - 1]
        return encode_id(self.epoch, piece.first_seq + at - piece.at)


@dataclass(slots=True, eq=False)
class StoredChannel:
    """A channel: where its entries are, and what is kept of them. All up to `removed_to` are removed; it begins as the
    id of the entry that created the channel."""

    number: int
    name: str
    policy: ChannelPolicy
    removed_to: bytes
    latest: bytes | None = None
    sections: list[StoredSection] = field(default_factory=list[StoredSection])
    holds: dict[str, bytes] = field(default_factory=dict[str, bytes])
    groups: dict[str, GroupProgress] = field(default_factory=dict[str, GroupProgress])
    dropped: bool = False

    @property
    def first_id(self) -> bytes | None:
        """The id of the first entry that there is."""
        following = next(self.behind(self.removed_to), None)
        return None if following is None else following[0].id(following[1])

    @property
    def end(self) -> bytes:
        """The id behind which the next entry comes."""
        return self.latest or self.removed_to

    def behind(self, id: bytes) -> Iterator[tuple[StoredSection, int]]:
        """The sections that have entries behind `id`, each with the place of the first such entry in it."""
        at = bisect_right(self.sections, id, key=lambda section: section.last_id)
        for section in self.sections[at:]:
            before = bisect_right(range(section.row.entries), id, key=section.id) if section.first_id <= id else 0
            yield section, before

    def has(self, id: bytes) -> bool:
        """Whether an entry with this id is there, or was before it was removed with all that lie before it."""
        at = bisect_right(self.sections, id, key=lambda section: section.first_id) - 1
        if at < 0:
            return False
        section = self.sections[at]
        inside = bisect_left(range(section.row.entries), id, key=section.id)
        return inside < section.row.entries and section.id(inside) == id

    def behind_of(self, id: bytes, *, inclusive: bool) -> bytes:
        """The id behind which a reader begins that starts at `id`. Raises `PositionLost`."""
        if not inclusive and id == self.removed_to:
            return id
        if id <= self.removed_to or not self.has(id):
            raise self.lost(id)
        return id_before(id) if inclusive else id

    def lost(self, id: bytes) -> PositionLost:
        """The error for an id at which the channel does not go on."""
        return PositionLost(
            f"channel {self.name} does not go on at {id.hex()}: it was removed, or never there",
            requested=id,
            first_available=self.first_id,
            channel=self.name,
        )

    def become(self, later: StoredChannel) -> None:
        """Take over what a checkpoint says of this channel."""
        self.removed_to, self.latest, self.sections = later.removed_to, later.latest, later.sections
        self.holds, self.groups = later.holds, later.groups

    def drop(self) -> None:
        """Have no entries any more, and end those that read it."""
        self.dropped, self.latest = True, None
        self.sections.clear()

    def add(self, section: StoredSection) -> None:
        self.sections.append(section)
        self.latest = section.last_id

    def replace(self, section: StoredSection) -> None:
        """Have this section in the place of those whose entries it has, as far as they are not removed. It is ignored
        where it has not all entries of them: they are somewhere else by now."""
        start = bisect_left(self.sections, section.first_id, key=lambda each: each.last_id)
        stop = bisect_right(self.sections, section.last_id, key=lambda each: each.first_id)
        if start < stop:
            first, last = self.sections[start], self.sections[stop - 1]
            if section.first_id <= first.first_id and last.last_id <= section.last_id:
                self.sections[start:stop] = [section]

    def remove_before(self, id: bytes) -> None:
        """Remove the entries before `id`, as far as no hold keeps them."""
        keep = min([id, *self.holds.values()])
        whole = bisect_left(self.sections, keep, key=lambda section: section.last_id)
        if whole:
            self.removed_to = max(self.removed_to, self.sections[whole - 1].last_id)
            del self.sections[:whole]
        if self.sections and self.sections[0].first_id < keep:
            section = self.sections[0]
            inside = bisect_left(range(section.row.entries), keep, key=section.id)
            self.removed_to = max(self.removed_to, section.id(inside - 1))

    def move_group(self, change: Change) -> None:
        """Let a step of a group take effect, and remove the entries that the policy removes with it."""
        self.groups.setdefault(change.group, GroupProgress()).apply(change)
        if self.policy.delivery is not Delivery.KEEP:
            acked_to = min(progress.acked_to for progress in self.groups.values())
            self.remove_before(acked_to + b"\0")  # the least id behind it
