"""The groups of a replica: where each stands in it, from where it stands in the source."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ..errors import ChannelNotFound, PositionLost
from ..log.replication_state import GroupPlaces, ReplicatedChannel
from ..log.wal import From, FromId, GroupInfo, Wal
from ..migration.channel_copy import Check
from .channel_mirror import entries_behind, entry_at, place_behind


async def group_places(
    source: Wal, target: Wal, groups: list[GroupInfo], channels: Mapping[str, ReplicatedChannel], known: GroupPlaces
) -> GroupPlaces:
    """Where `groups` of the source stand in it and in the replica, which has `channels`; of channels that it does not
    have nothing is said. A group that is ahead of the replica stands at its end. `known` is what was returned before:
    from there entries are counted on in both logs, and for a group that is new, or was moved back, from the end."""
    found: dict[str, dict[str, tuple[bytes, bytes]]] = {}
    for group in groups:
        places = found[group.name] = {}
        for channel, position in group.positions.items():
            place = channels.get(channel)
            if place is None:
                continue
            before = known.get(group.name, {}).get(channel)
            with suppress(ChannelNotFound):  # dropped meanwhile
                at = await _place(source, target, channel, place, before, position or b"")
                if at is not None:
                    places[channel] = at
    return found


async def place_of_entry(
    source: Wal, target: Wal, channel: str, place: ReplicatedChannel, before: tuple[bytes, bytes], id: bytes
) -> bytes:
    """Where the entry `id` of the source is in the replica, of which `place` says how far it has the channel; b"" where
    one of the logs does not have it, or it is not behind `before`, where a group stands in both."""
    if id <= before[0] or await entry_at(source, await source.describe(channel), id) is None:
        return b""
    at = await _place(source, target, channel, place, before, id)
    return b"" if at is None else at[1]


async def _place(
    source: Wal,
    target: Wal,
    channel: str,
    place: ReplicatedChannel,
    before: tuple[bytes, bytes] | None,
    position: bytes,
) -> tuple[bytes, bytes] | None:
    """None where it cannot be said: the entry was removed from one of the logs."""
    if not position or not place.source:
        return b"", b""
    if position >= place.source:
        return place.source, place.target
    if before is not None and before[0] == position:
        return before
    if before is not None and b"" < before[0] < position and before[1]:  # before all: its first may be removed
        with suppress(PositionLost):  # a queue has removed what is done
            count = await _count(source, channel, before[0], position)
            there = await place_behind(target, channel, before[1], count)
            return None if there is None else (position, there)
    try:
        return position, await _from_the_end(source, target, channel, place, position)
    except PositionLost:
        return None


async def _count(source: Wal, channel: str, position: bytes, upto: bytes) -> int:
    """How many entries lie behind `position` and not behind `upto`."""
    count = 0
    async for entry in entries_behind(source, await source.describe(channel), position):
        if entry.id > upto:
            break
        count += 1
    return count


async def _from_the_end(source: Wal, target: Wal, channel: str, place: ReplicatedChannel, position: bytes) -> bytes:
    """Where `position` is: as many entries lie behind it, up to `place`, in both logs."""
    behind = await _count(source, channel, position, place.source)
    info, upto = await target.describe(channel), 0
    async for entry in entries_behind(target, info, b""):
        if entry.id > place.target:
            break
        upto += 1
    before = upto - behind
    if before <= 0:
        return b""
    async for entry in entries_behind(target, info, b""):  # `PositionLost` where the first one is removed meanwhile
        before -= 1
        if not before:
            return entry.id
    return b""


async def store_places(target: Wal, places: GroupPlaces, known: GroupPlaces, check: Check) -> None:
    """Drop groups that the source has no more, which may have a queue that another one has now, and move the replica's
    groups to `places`, where they are others than `known`; `check` may refuse each step. May be repeated: the replica
    itself says what groups it has."""
    for group in {each.name for each in await target.groups()} - places.keys():
        await check()
        await target.drop_group(group)
    for group, channels in places.items():
        for channel, (_, there) in channels.items():
            before = known.get(group, {}).get(channel)
            if before is None or before[1] != there:
                await check()
                await target.seek_group(group, channel, FromId(there) if there else From.EARLIEST)
