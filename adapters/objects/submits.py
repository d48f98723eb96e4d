"""What was submitted to the log, and how it becomes a block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...runtime.errors import TidewalError
from ...runtime.log.admission import PendingBytes
from ...runtime.log.checks import check_size, not_found
from ...runtime.log.wal import Append, OnAppended
from .block import CONTROL, Block, BlockHeader, StoredEntry, encode_block
from .control import Control, encode_control
from .log_state import LogState
from .stored_channel import StoredChannel, encode_id


@dataclass(slots=True, eq=False)
class QueuedSubmit:
    """Entries and control entries that go into one block together. `done` gets the ids of the entries, or an error, at
    `deadline` (of the loop's time) at the latest. Until its fate is certain it counts as pending. One that belongs
    `here` is written by this process, or not at all, and `done` hears of it once its fate is certain: groups decide
    nothing else meanwhile. `ephemeral` are the places and channels of entries that do not go into the block: they get
    their ids once it is durable."""

    entries: Sequence[Append]
    controls: Sequence[Control]
    size: int
    done: OnAppended
    deadline: float
    pending: PendingBytes
    here: bool = False
    ids: list[bytes] = field(default_factory=list[bytes])
    ephemeral: list[tuple[int, StoredChannel]] = field(default_factory=list[tuple[int, StoredChannel]])
    answered: bool = False
    settled: bool = False

    def settle(self, result: list[bytes] | TidewalError) -> None:
        """Note that the fate is certain, and answer unless that was done."""
        answered, self.answered, self.settled = self.answered, True, True
        self.pending.release(self.size, lambda: None if answered else self.done(result))

    @property
    def expires(self) -> bool:
        """Whether it may be answered before its fate is certain."""
        return not (self.answered or self.here)

    def give_up(self, error: TidewalError) -> None:
        """Answer before the fate is certain, where that may be."""
        if self.expires:
            self.answered = True
            self.done(error)


def channels_of(state: LogState, entries: Iterable[Append]) -> list[StoredChannel]:
    """The channel of each entry. Raises `ChannelNotFound` and `MessageTooLarge`."""
    channels: list[StoredChannel] = []
    for entry in entries:
        channel = state.names.get(entry.channel)
        if channel is None:
            raise not_found(entry.channel)
        check_size(entry.channel, len(entry.payload), channel.policy.max_message_bytes)
        channels.append(channel)
    return channels


def make_block(header: BlockHeader, submits: Sequence[tuple[QueuedSubmit, Sequence[StoredChannel]]]) -> Block:
    """The block that holds these submits, in order, each with the channels of its entries. Their `ids` are set, but for
    those of ephemeral channels."""
    sections: dict[int, list[StoredEntry]] = {CONTROL: []}
    places: list[list[tuple[int, int] | None]] = []
    for submit, channels in submits:
        sections[CONTROL] += (StoredEntry(0, encode_control(control)) for control in submit.controls)
        of_submit: list[tuple[int, int] | None] = []
        for at, (entry, channel) in enumerate(zip(submit.entries, channels, strict=True)):
            if channel.policy.ephemeral:
                submit.ephemeral.append((at, channel))
                of_submit.append(None)
                continue
            section = sections.setdefault(channel.number, [])
            of_submit.append((channel.number, len(section)))
            section.append(StoredEntry(entry.timestamp, bytes(entry.payload)))
        places.append(of_submit)
    block = encode_block(header, sections)
    first = {row.channel: row.first_seq for row in block.table}
    for (submit, _), of_submit in zip(submits, places, strict=True):
        submit.ids = [
            b"" if place is None else encode_id(header.epoch, first[place[0]] + place[1]) for place in of_submit
        ]
    return block
