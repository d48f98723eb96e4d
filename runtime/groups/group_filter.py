"""The filter of a consumer group: it is stored with each of the group's positions, in the commit that moves it.

A member moves a position only under the filter that is stored there, so none passes over what another filter wants. The
filter is a layer of the position's metadata, inside that of `RecordMember`: msgpack [version, expression]. A position
that a member of records has moved without one is that of a group that reads everything; one that none of them has moved
takes the filter of the first.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple, cast

import msgpack

from ..arguments import checked
from ..errors import GroupFilterMismatch, GroupNotFound, InvalidFilter, InvalidRequest, Unavailable
from ..filters.subscription import filter_of
from ..log.record import DECODE_ERRORS
from ..log.wal import From, FromTime, GroupMember, Wal
from .metadata_layers import Layer, unwrap, wrap

MAX_GROUP_FILTER_BYTES = 512  # of the expression in UTF-8: it is a part of each position's metadata
ASSIGNED_WITHIN_S = 30.0
_LOOK_S = 0.02  # between two looks for what the coordinator has assigned


class GroupFilter(NamedTuple):
    """A group's filter in one channel: the expression, None for everything, and how often it was changed."""

    where: str | None = None
    version: int = 0

    def to_layer(self, inside: bytes) -> bytes:
        """Metadata with the filter around what is `inside`."""
        part = b"" if self == GroupFilter() else cast(bytes, msgpack.packb((self.version, self.where)))
        return wrap(Layer.FILTER, part, inside)


class RecordState(NamedTuple):
    """What the metadata of a position holds: the reading state of `RecordMember` (b"": none has moved it), the group's
    filter, what the caller has stored, and the token under which transactions may have moved the position further than
    it is stored (0: none; `cluster/decided_positions.py`)."""

    read: bytes
    filter: GroupFilter
    own: bytes
    token: int = 0

    @classmethod
    def of(cls, metadata: bytes) -> RecordState:
        """The parts of a position's metadata."""
        read, inside = unwrap(Layer.RECORDS, metadata)
        part, marked = unwrap(Layer.FILTER, inside)
        token, own = unwrap(Layer.TRANSACTIONS, marked)
        return cls(read, _filter_in(part), own, int.from_bytes(token, "big"))

    def to_metadata(self) -> bytes:
        """The metadata with these parts."""
        token = self.token.to_bytes((self.token.bit_length() + 7) // 8, "big")
        marked = wrap(Layer.TRANSACTIONS, token, self.own)
        return wrap(Layer.RECORDS, self.read, self.filter.to_layer(marked) if self.read else marked)


def _filter_in(part: bytes) -> GroupFilter:
    try:
        values = cast("list[object]", msgpack.unpackb(part)) if part else []
    except DECODE_ERRORS:
        values = []
    match values:
        case [int(version), str() | None as where]:
            return GroupFilter(where, version)
        case _:
            return GroupFilter()


def check_group_filter(where: str | None) -> None:
    """Raise `InvalidFilter` for an expression that is none, or too long to be a group's filter."""
    filter_of(where)
    size = len(where.encode()) if where is not None else 0
    if size > MAX_GROUP_FILTER_BYTES:
        raise InvalidFilter(
            f"the filter has {size} bytes: of a group it has at most MAX_GROUP_FILTER_BYTES, {MAX_GROUP_FILTER_BYTES}",
            position=MAX_GROUP_FILTER_BYTES,
        )


def mismatch(group: str, channel: str, found: GroupFilter, where: str | None) -> GroupFilterMismatch:
    """The error for a member with another filter than that of the group."""
    return GroupFilterMismatch(
        f"group {group} reads {channel} with the filter {_shown(found.where)} (version {found.version}), this member "
        f"has {_shown(where)}: it moves nothing. Join with the group's filter; or change that: let all members leave, "
        f"and say by change_group_filter from where the new one begins (start)",
        group=group,
        channel=channel,
        where=found.where,
        version=found.version,
    )


def _shown(where: str | None) -> str:
    return "none (everything)" if where is None else repr(where)


@checked
async def change_group_filter(wal: Wal, group: str, where: str | None, *, start: From | FromTime) -> None:
    """Make `where` (None: everything) the filter of a group, which begins anew with it at `start` in each channel where
    it has a position, of which the metadata is cleared. What lies before `start` counts as done: in a queue it is
    removed.

    The group has no members meanwhile: they leave before, and join with the new filter afterwards. It happens channel
    by channel: after an error or a crash some may have the new filter, some begin at `start` with that of the next
    member, and some have the old one; no member moves what has another filter than its own. Call it again then. Raises
    `InvalidRequest` while the group has members, `GroupNotFound`, `InvalidFilter`, and what `GroupMember.seek` raises.
    """
    check_group_filter(where)
    known = {info.name: info for info in await wal.groups()}
    if group not in known:
        raise GroupNotFound(f"there is no group {group!r} with a filter to change", group=group)
    if known[group].members:
        count = len(known[group].members)
        raise InvalidRequest(f"group {group} has {count} members: let them leave before its filter changes")
    channels = sorted(known[group].positions)
    member = await wal.join(group, channels)
    try:
        for channel in channels:
            await _change(member, channel, where, start)
    finally:
        await member.aclose()


async def _change(member: GroupMember, channel: str, where: str | None, start: From | FromTime) -> None:
    await until_assigned(member, channel)
    version = RecordState.of(member.metadata(channel)).filter.version + 1
    await member.seek(channel, start)
    await until_assigned(member, channel)
    read = cast(bytes, msgpack.packb((0, 0, 0)))
    await member.annotate(channel, RecordState(read, GroupFilter(where, version), b"").to_metadata())


async def until_assigned(member: GroupMember, channel: str) -> None:
    """Wait until `member` has the channel. Raises `Unavailable` after `ASSIGNED_WITHIN_S`."""
    try:
        async with asyncio.timeout(ASSIGNED_WITHIN_S):
            while channel not in member.channels:  # noqa: ASYNC110 -- the contract has no event for it
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        waited = f"within {ASSIGNED_WITHIN_S:g} s"
        raise Unavailable(f"{channel} was not assigned {waited}: another member has it") from None
