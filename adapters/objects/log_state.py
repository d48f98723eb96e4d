"""What the log is after its blocks so far: a pure function of them, the same in every process that has read as far."""

from __future__ import annotations

import struct

from ...runtime.errors import CorruptLog
from ...runtime.groups.progress import Change
from .block import CONTROL, Block, BlockKind, SectionRow, decode_section
from .control import (
    ChannelCreated,
    ChannelDropped,
    Compacted,
    Control,
    GroupForgotten,
    GroupMoved,
    HoldMoved,
    Truncated,
    decode_control,
)
from .garbage import Garbage
from .log_objects import block_key
from .stored_channel import Piece, StoredChannel, StoredSection, encode_id


class LogState:
    """The channels of a log, by name and number, and where its next block comes: `number` in `epoch`, with entries from
    `seq` on. An epoch ends with the first fence or cap before which no block of it is missing: its number is in `ends`.
    A checkpoint holds all that, and the owner's list of `garbage`. `blocks` and `bytes` were applied since the newest
    checkpoint that the process has read or made."""

    def __init__(self) -> None:
        self.names: dict[str, StoredChannel] = {}
        self.epoch: int = 1
        self.number: int = 0
        self.seq: int = 1
        self.ends: dict[int, int] = {}
        self.highest: int = CONTROL  # the number of the channel that was created last
        self.garbage: Garbage = Garbage()
        self.blocks: int = 0
        self.bytes: int = 0
        self._numbers: dict[int, StoredChannel] = {}

    @property
    def place(self) -> tuple[int, int]:
        """The epoch and the number of the next block."""
        return self.epoch, self.number

    def blocks_since(self, place: tuple[int, int]) -> int:
        """How many blocks there are from a place on."""
        epoch, number = place
        return self.number - number + sum(self.ends[each] + 1 for each in range(epoch, self.epoch))

    def channels(self) -> list[StoredChannel]:
        """All channels, by number."""
        return [self._numbers[number] for number in sorted(self._numbers)]

    def channel(self, number: int) -> StoredChannel | None:
        """The channel with this number, None where there is none (any more)."""
        return self._numbers.get(number)

    def put(self, channel: StoredChannel) -> None:
        """Have this channel."""
        self.names[channel.name] = self._numbers[channel.number] = channel

    def become(self, later: LogState) -> None:
        """Be a later state at once. A channel that stays is the same object, since readers have it."""
        self.epoch, self.number, self.seq = later.epoch, later.number, later.seq
        self.ends, self.highest, self.garbage = later.ends, later.highest, later.garbage
        self.blocks, self.bytes = later.blocks, later.bytes
        earlier, self._numbers, self.names = self._numbers, {}, {}
        for channel in later.channels():
            known = earlier.pop(channel.number, channel)
            known.become(channel)
            self.put(known)
        for channel in earlier.values():
            channel.drop()

    def apply(self, block: Block) -> None:
        """Let the next block take effect. Raises `CorruptLog` for one that cannot follow."""
        header, key = block.header, block_key(self.epoch, self.number)
        if (header.epoch, header.number) != (self.epoch, self.number):
            raise CorruptLog(f"{key} is followed by block {header.number} of epoch {header.epoch}", path=key, offset=40)
        self.blocks, self.bytes = self.blocks + 1, self.bytes + len(block.data)
        if header.kind is not BlockKind.DATA:
            self.ends[self.epoch] = self.number
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
                pieces = (Piece(0, row.first_seq),)
                channel.add(StoredSection(key, header.epoch, header.stored_ms, row, pieces))
        self.number += 1
        self.seq += header.count

    def _apply_controls(self, block: Block, row: SectionRow, key: str) -> None:
        for at, entry in enumerate(decode_section(block.section(row), row)):
            try:
                self._apply_control(encode_id(block.header.epoch, row.first_seq + at), decode_control(entry.payload))
            except (ValueError, TypeError, IndexError, struct.error) as error:
                raise CorruptLog(f"{key} has a malformed control entry", path=key, offset=row.offset) from error

    def _apply_control(self, id: bytes, control: Control) -> None:
        match control:
            case ChannelCreated(name, policy):
                if name not in self.names:
                    self.highest += 1
                    self.put(StoredChannel(self.highest, name, policy, removed_to=id))
            case GroupForgotten(group):
                for channel in self.names.values():
                    channel.groups.pop(group, None)
            case Compacted(epoch, _, sections):
                if epoch == self.epoch:  # else another owner may have taken the run for garbage
                    for section in sections:
                        if section.row.channel in self._numbers:
                            self._numbers[section.row.channel].replace(section)
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
                channel.drop()
            case Truncated(_, id):
                channel.remove_before(id)
            case HoldMoved(_, holder, id):
                if id is None:
                    channel.holds.pop(holder, None)
                else:
                    channel.holds[holder] = id
            case GroupMoved(_, group, upto, ids, reset, metadata):
                channel.move_group(Change(group, channel.name, upto, ids, reset, metadata))
