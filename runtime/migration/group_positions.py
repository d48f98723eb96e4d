"""The groups of a migration: where each stands in the new log, with the metadata that is stored beside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..errors import Unavailable
from ..groups.group_filter import until_assigned
from ..groups.metadata_layers import Layer, unwrap
from ..log.wal import From, FromId, GroupInfo, Wal
from .channel_copy import Check, unchecked

SESSION_S = 10.0  # of a migration's own member: where its process is killed, the group has it for so long


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


async def stored_metadata(wal: Wal, group: str, channels: Iterable[str]) -> Mapping[str, bytes]:
    """What is stored with the positions of a group without members, by channel. The attempts at an entry are left out:
    they name it by an id of this log, and begin anew in another one."""
    names = sorted(channels)
    if not names:
        return {}
    found: dict[str, bytes] = {}
    member = await wal.join(group, names, session_timeout_s=SESSION_S)
    try:
        for name in names:
            await until_assigned(member, name)
            _, found[name] = unwrap(Layer.ATTEMPTS, member.metadata(name))
    finally:
        await member.aclose()
    return found


async def store_positions(
    wal: Wal, group: str, positions: Mapping[str, GroupPosition], check: Check = unchecked
) -> None:
    """Make the group have these positions, by channel, and their metadata; `check` may refuse each step. May be
    repeated."""
    for channel, each in positions.items():
        await check()
        await wal.seek_group(group, channel, FromId(each.id) if each.id else From.EARLIEST)
    annotated = {channel: each.metadata for channel, each in positions.items() if each.metadata}
    if not annotated:
        return
    await check()  # not later: a member that stands still would keep the channels from the next run
    member = await wal.join(group, sorted(annotated), session_timeout_s=SESSION_S)
    try:
        for channel, metadata in annotated.items():
            await until_assigned(member, channel)
            await member.annotate(channel, metadata)
    finally:
        await member.aclose()
