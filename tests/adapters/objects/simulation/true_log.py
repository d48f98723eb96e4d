"""What a log holds in truth: by all objects that were ever created, whatever was deleted since, and by the rules of
docs/object-log-format.md, which are written here a second time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.adapters.objects.simulated_store import Objects
from tidewal.adapters.objects.block import CONTROL, BlockKind, decode_block, decode_section
from tidewal.adapters.objects.control import ChannelCreated, ChannelDropped, HoldMoved, Truncated, decode_control
from tidewal.adapters.objects.log_objects import block_key
from tidewal.adapters.objects.stored_channel import encode_id


class ArchivedObjects(Objects):
    """Objects of which each is kept as it was created first, also once it is deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.archive: dict[str, bytes] = {}

    def create(self, key: str, body: bytes) -> bool:
        created = super().create(key, body)
        if created:
            self.archive.setdefault(key, body)
        return created


@dataclass
class TrueChannel:
    """A channel with all entries that it ever had: ids and payloads. Those up to `removed_to` are removed."""

    number: int
    name: str
    removed_to: bytes
    entries: list[tuple[bytes, bytes]] = field(default_factory=list)
    holds: dict[str, bytes] = field(default_factory=dict)
    dropped: bool = False

    def remove_before(self, id: bytes) -> None:
        keep = min([id, *self.holds.values()])
        self.removed_to = max([self.removed_to, *(each for each, _ in self.entries if each < keep)])

    @property
    def left(self) -> list[tuple[bytes, bytes]]:
        """The entries that are not removed."""
        return [] if self.dropped else [entry for entry in self.entries if entry[0] > self.removed_to]


class TrueLog:
    """The log of all blocks that count. `at` says where an entry is: its channel, and its place there."""

    def __init__(self, archive: Mapping[str, bytes]) -> None:
        self.channels: dict[int, TrueChannel] = {}
        self.names: dict[str, TrueChannel] = {}
        self.at: dict[bytes, tuple[TrueChannel, int]] = {}
        self.places: dict[str, list[bytes]] = {}  # where each payload is
        self.epoch, self.number = 1, 0
        while (body := archive.get(key := block_key(self.epoch, self.number))) is not None:
            self._apply(body, key)

    def _apply(self, body: bytes, key: str) -> None:
        block = decode_block(body, key)
        if block.header.kind is not BlockKind.DATA:
            self.epoch, self.number = self.epoch + 1, 0
            return
        self.number += 1
        for row in sorted(block.table, key=lambda row: row.channel != CONTROL):  # control entries come first
            for at, entry in enumerate(decode_section(block.section(row), row)):
                id, payload = encode_id(block.header.epoch, row.first_seq + at), bytes(entry.payload)
                if row.channel == CONTROL:
                    self._control(id, payload)
                else:
                    self._add(row.channel, id, payload)

    def _add(self, number: int, id: bytes, payload: bytes) -> None:
        self.places.setdefault(payload.decode(), []).append(id)
        channel = self.channels[number]
        if not channel.dropped:
            self.at[id] = channel, len(channel.entries)
            channel.entries.append((id, payload))

    def _control(self, id: bytes, payload: bytes) -> None:
        match decode_control(payload):
            case ChannelCreated(name, _) if name not in self.names:
                channel = TrueChannel(len(self.channels) + 1, name, id)
                self.channels[channel.number] = self.names[name] = channel
            case ChannelDropped(number) if not self.channels[number].dropped:
                self.channels[number].dropped = True
                del self.names[self.channels[number].name]
            case Truncated(number, before):
                self.channels[number].remove_before(before)
            case HoldMoved(number, holder, None):
                self.channels[number].holds.pop(holder, None)
            case HoldMoved(number, holder, before):
                self.channels[number].holds[holder] = before
