"""What the log is after its blocks so far: a pure function of them, the same in every process that has read as far."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...runtime.errors import CorruptLog, PositionLost
from ...runtime.groups.progress import Change, GroupProgress
from ...runtime.log.wal import ChannelPolicy, Delivery
from .block import CONTROL, Block, BlockKind, SectionRow, decode_section
from .control import (
    ChannelCreated,
    ChannelDropped,
    Control,
    GroupForgotten,
    GroupMoved,
    HoldMoved,
    Truncated,
    decode_control,
)
from .log_objects import block_key

_ID = struct.Struct(">QQ")


def encode_id(epoch: int, seq: int) -> bytes:
    """The id of the entry with this number, written in this epoch."""
    return _ID.pack(epoch, seq)


class StoredSection(NamedTuple):
    """Where the entries of a channel in one block are."""

    first_id: bytes
    last_id: bytes
    epoch: int
    number: int
    row: SectionRow

    def id(self, at: int) -> bytes:
        """The id of the entry at this place in the section."""
        return encode_id(self.epoch, self.row.first_seq + at)


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
        if at < 0 or len(id) != _ID.size:
            return False
        section, (epoch, seq) = self.sections[at], _ID.unpack(id)
        return epoch == section.epoch and seq < section.row.first_seq + section.row.entries

    def behind_of(self, id: bytes, *, inclusive: bool) -> bytes:
        """The id behind which a reader begins that starts at `id`. Raises `PositionLost`."""
        if not inclusive and id == self.removed_to:
            return id
        if id <= self.removed_to or not self.has(id):
            raise self.lost(id)
        epoch, seq = _ID.unpack(id)
        return encode_id(epoch, seq - 1) if inclusive else id

    def lost(self, id: bytes) -> PositionLost:
        """The error for an id at which the channel does not go on."""
        return PositionLost(
            f"channel {self.name} does not go on at {id.hex()}: it was removed, or never there",
            requested=id,
            first_available=self.first_id,
            channel=self.name,
        )

    def add(self, section: StoredSection) -> None:
        self.sections.append(section)
        self.latest = section.last_id

    def remove_before(self, id: bytes) -> None:
        """Remove the entries before `id`, as far as no hold keeps them."""
        keep = min([id, *self.holds.values()])
        whole = bisect_right(self.sections, keep, key=lambda section: section.last_id + b"\0")
        if whole:
            self.removed_to = max(self.removed_to, self.sections[whole - 1].last_id)
            del self.sections[:whole]
        if self.sections and self.sections[0].first_id < keep:
            section = self.sections[0]
            inside = bisect_right(range(section.row.entries), keep, key=lambda at: section.id(at) + b"\0")
            self.removed_to = max(self.removed_to, section.id(inside - 1))

    def move_group(self, change: Change) -> None:
        """Let a step of a group take effect, and remove the entries that the policy removes with it."""
        self.groups.setdefault(change.group, GroupProgress()).apply(change)
        if self.policy.delivery is not Delivery.KEEP:
            acked_to = min(progress.acked_to for progress in self.groups.values())
            self.remove_before(acked_to + b"\0")  # the least id behind it


class LogState:
    """The channels of a log, by name and number, and where its next block comes: `number` in `epoch`, with entries from
    `seq` on. An epoch ends with the first fence or cap behind which no block of it is missing."""

    def __init__(self) -> None:
        self.names: dict[str, StoredChannel] = {}
        self.epoch: int = 1
        self.number: int = 0
        self.seq: int = 1
        self._numbers: dict[int, StoredChannel] = {}
        self._highest = CONTROL  # the number of the channel that was created last

    def apply(self, block: Block) -> None:
        """Let the next block take effect. Raises `CorruptLog` for one that cannot follow."""
        header, key = block.header, block_key(self.epoch, self.number)
        if (header.epoch, header.number) != (self.epoch, self.number):
            raise CorruptLog(f"{key} is followed by block {header.number} of epoch {header.epoch}", path=key, offset=40)
        if header.kind is not BlockKind.DATA:
            self.epoch, self.number = self.epoch + 1, 0
            return
        if header.first_seq != self.seq:
            raise CorruptLog(f"{key} counts from {header.first_seq}, not from {self.seq}", path=key, offset=56)
        for row in block.table:
            if row.channel == CONTROL:
                self._apply_controls(block, row, key)
        for row in block.table:
            channel = self._numbers.get(row.channel)
            if channel is not None:
                first, last = row.first_seq, row.first_seq + row.entries - 1
                ids = encode_id(header.epoch, first), encode_id(header.epoch, last)
                channel.add(StoredSection(*ids, header.epoch, header.number, row))
        self.number += 1
        self.seq += header.count

    def _apply_controls(self, block: Block, row: SectionRow, key: str) -> None:
        for at, entry in enumerate(decode_section(block.section(row), row)):
            try:
                self._apply_control(encode_id(block.header.epoch, row.first_seq + at), decode_control(entry.payload))
            except (ValueError, TypeError) as error:
                raise CorruptLog(f"{key} has a malformed control entry", path=key, offset=row.offset) from error

    def _apply_control(self, id: bytes, control: Control) -> None:
        match control:
            case ChannelCreated(name, policy):
                if name not in self.names:
                    self._highest += 1
                    channel = StoredChannel(self._highest, name, policy, removed_to=id)
                    self.names[name] = self._numbers[channel.number] = channel
            case GroupForgotten(group):
                for channel in self.names.values():
                    channel.groups.pop(group, None)
            case _:
                channel = self._numbers.get(control.number)
                if channel is not None:  # else it was dropped meanwhile
                    self._change_channel(channel, control)

    def _change_channel(
        self, channel: StoredChannel, control: ChannelDropped | Truncated | HoldMoved | GroupMoved
    ) -> None:
        match control:
            case ChannelDropped(number):
                del self._numbers[number], self.names[channel.name]
                channel.dropped = True
            case Truncated(_, id):
                channel.remove_before(id)
            case HoldMoved(_, holder, id):
                if id is None:
                    channel.holds.pop(holder, None)
                else:
                    channel.holds[holder] = id
            case GroupMoved(_, group, upto, ids, reset, metadata):
                channel.move_group(Change(group, channel.name, upto, ids, reset, metadata))
