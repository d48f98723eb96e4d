"""Compare what a checkpoint says of the log with what its blocks have come to."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ....runtime.groups.progress import GroupProgress
from ..log_state import LogState
from ..stored_channel import StoredChannel, StoredSection


def state_differences(found: LogState, replayed: LogState) -> Iterator[str]:
    """In what the state of a checkpoint differs from that of the blocks before its place."""
    if found.seq != replayed.seq:
        yield f"the next entry is number {found.seq}, by the blocks {replayed.seq}"
    if found.ends != replayed.ends:
        yield "the ends of epochs are others than in the blocks"
    if found.highest != replayed.highest:
        yield f"channel {found.highest} was created last, by the blocks {replayed.highest}"
    for number in sorted({channel.number for state in (found, replayed) for channel in state.channels()}):
        one, other = found.channel(number), replayed.channel(number)
        if one is None or other is None:
            yield f"channel {number} is {'missing' if one is None else 'there, and by the blocks it is not'}"
        else:
            yield from (f"channel {one.name}: {part}" for part in _channel_differences(one, other))


def _channel_differences(found: StoredChannel, replayed: StoredChannel) -> Iterator[str]:
    if (found.name, found.policy) != (replayed.name, replayed.policy):
        yield "its name or policy is another than in the blocks"
    if found.removed_to != replayed.removed_to:
        yield f"entries are removed up to {found.removed_to.hex()}, by the blocks up to {replayed.removed_to.hex()}"
    if found.holds != replayed.holds:
        yield "its holds are others than in the blocks"
    if _positions(found.groups) != _positions(replayed.groups):
        yield "the positions of its groups are others than in the blocks"
    if (found.latest, found.sections) != (replayed.latest, replayed.sections):
        yield "its entries are others, or lie elsewhere, than by the blocks"


def _positions(groups: dict[str, GroupProgress]) -> dict[str, tuple[bytes, set[bytes], bytes]]:
    return {group: (each.acked_to, each.acked, each.metadata) for group, each in groups.items()}


def order_faults(channel: StoredChannel) -> Iterator[str]:
    """Where the ids of a channel do not ascend."""
    for section in channel.sections:
        if not piece_ids_ascend(section):
            yield f"channel {channel.name}: the ids from {section.first_id.hex()} on do not ascend"
    for before, section in pairwise(channel.sections):
        if section.first_id <= before.last_id:
            yield f"channel {channel.name}: id {section.first_id.hex()} is not above the one before"
    if channel.sections and channel.end < channel.sections[-1].last_id:
        yield f"channel {channel.name}: it has entries behind its last one, {channel.end.hex()}"


def piece_ids_ascend(section: StoredSection) -> bool:
    """Whether the pieces of a section lie in it, in order, with ids that ascend."""
    return section.pieces[-1].at < section.row.entries and all(
        piece.at > before.at and piece.first_seq >= before.first_seq + piece.at - before.at
        for before, piece in pairwise(section.pieces)
    )
