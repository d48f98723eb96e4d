"""Where a position of the old log is in the log that it was migrated to."""

from __future__ import annotations

from dataclasses import replace

from ..errors import InvalidRequest, PositionLost, PositionMismatch
from ..log.migration_state import MigrationPhase, mark_of, migration_state
from ..log.wal import Wal
from ..streams.messages import Position
from .channel_copy import is_lost, stored_batches, stored_entries
from .compared_channel import ChannelProof
from .migration import MigrationProof


async def translate_position(old: Wal, new: Wal, position: Position) -> Position:
    """The position behind the same entry in `new` as `position` is in `old`, which was migrated to it. Both may be
    opened for reading only. The entry is found by its place: the entries of the channel are counted in both logs, from
    the last that the proof of the migration names, so retention may have removed some from either since.

    Raises `PositionMismatch` for a position of another backend than that of `old`; `InvalidRequest` where `old` was not
    migrated to `new`, or the position is behind what was migrated; `PositionLost` where its entry is in one of the logs
    no more."""
    if position.wal != old.name:
        raise PositionMismatch(
            f"the position is of {position.wal}, the first log is {old.name}: it is of another log",
            expected=old.name,
            found=position.wal,
        )
    state = await migration_state(old)
    if state.phase is not MigrationPhase.MIGRATED or mark_of(state.id) not in await new.channels():
        raise InvalidRequest("the first log was not migrated to the second, and only such positions are translated")
    channel, id = position.channel, position.message_id
    proof = MigrationProof.from_wire(state.proof).channels.get(channel)
    if proof is None or id > proof.latest_old:
        raise InvalidRequest(f"position {id.hex()} of {channel} was not in the log when that was migrated")
    behind = await _entries_behind(old, channel, proof, id)
    if behind is None or (behind == proof.entries and await is_lost(old, await old.describe(channel), id)):
        raise _lost(channel, id, "old")
    if behind == proof.entries:
        return replace(position, message_id=b"", wal=new.name)
    info = replace(await new.describe(channel), latest_id=proof.last_new)
    before = -behind - 1
    async for entries in stored_batches(new, info):
        before += len(entries)
    async for entries in stored_batches(new, info):
        if 0 <= before < len(entries):
            return replace(position, message_id=entries[before].id, wal=new.name)
        before -= len(entries)
    raise _lost(channel, id, "new")


async def _entries_behind(old: Wal, channel: str, proof: ChannelProof, id: bytes) -> int | None:
    """How many of the migrated entries lie behind `id`; None where some of them may have been removed."""
    info = replace(await old.describe(channel), latest_id=proof.last_old)
    there = behind = 0
    async for entry in stored_entries(old, info):
        there += 1
        behind += entry.id > id
    return behind if behind < there or there == proof.entries or id >= proof.last_old else None


def _lost(channel: str, id: bytes, log: str) -> PositionLost:
    return PositionLost(
        f"the entry at position {id.hex()} of {channel} was removed from the {log} log", channel=channel, requested=id
    )
