"""The groups of a migration: where each stands in the new log, with the metadata that is stored beside."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, TypeAlias

from ..errors import TidewalError, Unavailable
from ..groups.group_consumer import FIRST_PAUSE_S, LAST_PAUSE_S
from ..groups.group_filter import RecordState, until_assigned
from ..groups.metadata_layers import Layer, unwrap, wrap
from ..groups.retries import Attempts
from ..log.wal import From, FromId, GroupInfo, Wal
from .channel_copy import Check, unchecked

SESSION_S = 10.0  # of a migration's own member: where its process is killed, the group has it for so long
JOIN_S = 30.0  # for which failures of that member are waited out

_log = logging.getLogger("tidewal.migration")

Place: TypeAlias = Callable[[bytes], Awaitable[bytes]]
"""Returns the id in the new log of the entry with an id in the old one; b"" where that log has no such entry."""


class GroupPosition(NamedTuple):
    """Up to which `id` of the new log a group has done all in a channel (b"": nothing), its `metadata` there, and
    where that is in the `old` log."""

    id: bytes
    metadata: bytes
    old: bytes = b""


async def idle_groups(wal: Wal) -> list[GroupInfo]:
    """The groups of a log. Raises `Unavailable` where one has members."""
    return await groups_of(wal, in_use=False)


async def groups_of(wal: Wal, *, in_use: bool) -> list[GroupInfo]:
    """The groups of a log. Raises `Unavailable` where one has members, unless the log is in use."""
    if not wal.capabilities.groups:
        return []
    groups = await wal.groups()
    for group in groups:
        if group.members and not in_use:
            raise Unavailable(f"group {group.name} has members: stop the programs that use the log, and go on")
    return groups


async def metadata_in_place(metadata: bytes, place: Place) -> bytes:
    """What is stored with a position, as another log is to have it: attempts were begun at an entry, which may be on
    its way to the retry topic, and is named by its id. Attempts at an entry that is not there are over."""
    state = RecordState.of(metadata)
    part, inside = unwrap(Layer.ATTEMPTS, state.own)
    if not part:
        return metadata
    attempts = Attempts.from_bytes(part)
    id = await place(attempts.id) if attempts.id else b""
    moved = attempts._replace(id=id) if id else Attempts()
    return state._replace(own=wrap(Layer.ATTEMPTS, moved.to_bytes(), inside)).to_metadata()


async def store_positions(
    wal: Wal, group: str, positions: Mapping[str, GroupPosition], check: Check = unchecked
) -> None:
    """Make the group have these positions, by channel, and their metadata; `check` may refuse each step. May be
    repeated. What fails for a moment when the group is joined is done again, for up to `JOIN_S` seconds."""
    for channel, each in positions.items():
        await check()
        await wal.seek_group(group, channel, FromId(each.id) if each.id else From.EARLIEST)
    annotated = {channel: each.metadata for channel, each in positions.items() if each.metadata}
    now = asyncio.get_running_loop().time
    until_s, pause_s = now() + JOIN_S, FIRST_PAUSE_S
    while annotated:
        await check()  # not later: a member that stands still would keep the channels from the next run
        try:
            await _annotate(wal, group, annotated)
            return
        except TidewalError as error:
            if not error.retryable or now() >= until_s:
                raise
            _log.info("group %s is joined again, for its positions: %s", group, error)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)


async def _annotate(wal: Wal, group: str, annotated: Mapping[str, bytes]) -> None:
    """Store these metadata, by channel, as the only member of a group."""
    member = await wal.join(group, sorted(annotated), session_timeout_s=SESSION_S)
    try:
        for channel, metadata in annotated.items():
            await until_assigned(member, channel)
            await member.annotate(channel, metadata)
    finally:
        await member.aclose()
