"""The groups of a replica: where each stands in it, and with what, from where it stands in the source."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from ..errors import ChannelNotFound, PositionLost
from ..log.replication_state import GroupPlace, GroupPlaces, ReplicatedChannel
from ..log.wal import From, FromId, GroupInfo, Wal
from ..migration.channel_copy import Check
from ..migration.group_positions import GroupPosition, metadata_in_place, store_positions
from ..waiting import side_by_side
from .channel_mirror import entries_behind, entry_at, place_behind


async def group_places(
    source: Wal, target: Wal, groups: list[GroupInfo], channels: Mapping[str, ReplicatedChannel], known: GroupPlaces
) -> GroupPlaces:
    """Where `groups` of the source stand in it and in the replica, which has `channels`; of channels that it does not
    have nothing is said. A group that is ahead of the replica stands at its end, with nothing stored. `known` is what
    was returned before: from there entries are counted on in both logs, and for a group that is new, or was moved back,
    from the end."""
    found: dict[str, dict[str, GroupPlace]] = {}
    for group in groups:
        places = found[group.name] = {}
        for channel, position in group.positions.items():
            place = channels.get(channel)
            if place is None:
                continue
            before = known.get(group.name, {}).get(channel)
            with suppress(ChannelNotFound):  # dropped meanwhile
                at = await _place(source, target, channel, place, before, position or b"")
                if at is not None and at.source == (position or b""):
                    of_entry = partial(_place_of_entry, source, target, channel, place, at)
                    at = at._replace(metadata=await metadata_in_place(group.metadata.get(channel, b""), of_entry))
                if at is not None:
                    places[channel] = at
    return found


async def _place_of_entry(
    source: Wal, target: Wal, channel: str, place: ReplicatedChannel, before: GroupPlace, id: bytes
) -> bytes:
    """Where the entry `id` of the source is in the replica, of which `place` says how far it has the channel; b"" where
    one of the logs does not have it, or it is not behind `before`, where a group stands in both."""
    if not before.source < id <= place.source or await entry_at(source, await source.describe(channel), id) is None:
        return b""
    at = await _place(source, target, channel, place, before, id)
    return b"" if at is None else at.target


async def _place(
    source: Wal,
    target: Wal,
    channel: str,
    place: ReplicatedChannel,
    before: GroupPlace | None,
    position: bytes,
) -> GroupPlace | None:
    """None where it cannot be said: the entry was removed from one of the logs. What is stored is not said."""
    if not position or not place.source:
        return GroupPlace(b"", b"")
    if position >= place.source:
        return GroupPlace(place.source, place.target)
    if before is not None and before.source == position:
        return before._replace(metadata=b"")
    if before is not None and b"" < before.source < position and before.target:  # before all: its first may be removed
        with suppress(PositionLost):  # a queue has removed what is done
            count = await _count(source, channel, before.source, position)
            there = await place_behind(target, channel, before.target, count)
            return None if there is None else GroupPlace(position, there)
    try:
        return GroupPlace(position, await _from_the_end(source, target, channel, place, position))
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

    async def move(of: tuple[str, str]) -> None:
        group, channel = of
        there = places[group][channel].target
        await check()
        await target.seek_group(group, channel, FromId(there) if there else From.EARLIEST)

    now = {(group, channel): each.target for group, channels in places.items() for channel, each in channels.items()}
    before = {(group, channel): each.target for group, channels in known.items() for channel, each in channels.items()}
    await side_by_side([key for key, there in now.items() if before.get(key) != there], move)


async def store_metadata(target: Wal, places: GroupPlaces) -> None:
    """Store what the groups have with their `places` in the replica, where they stand and which no program uses yet.
    May be repeated."""
    stored = {group.name: group.metadata for group in await target.groups()} if places else {}
    for group, channels in places.items():
        there = stored.get(group, {})
        positions = {
            name: GroupPosition(each.target, each.metadata)
            for name, each in channels.items()
            if each.metadata != there.get(name, b"")
        }
        await store_positions(target, group, positions)
