"""The tables that nodes have filled from a log that is to be migrated: whether they are its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Protocol

from ..catalog.catalog import Collection
from ..catalog.flush_events import FlushEvent
from ..errors import BadRecord, InvalidRequest, PositionLost, PositionMismatch
from ..log.names import pchannel_of
from ..log.record import decode
from ..log.wal import FromId, Wal
from ..streams.messages import Position
from ..streams.stream_base import reading
from .channel_copy import stored_entries

TablePositions = Mapping[str, Mapping[str, Position]]
"""The positions of each table, by collection and vchannel; empty where a table has none."""


class NodeTables(Protocol):
    """The tables of the collections of a log (`actors/datanode/moved_tables.py`)."""

    @property
    def latest(self) -> int:
        """No position has a later time, whatever nodes have stored."""
        ...

    async def collections(self) -> Set[str]:
        """The names of all collections that have a table. Raises `InvalidRequest` where no node has made a store of
        tables there, and errors of the store."""
        ...

    async def positions(self, collection: str) -> Mapping[str, Position]:
        """The positions that the table has, by vchannel, empty where it has none. Raises `CorruptLog` for a table that
        is absent or damaged, and errors of the store."""
        ...

    async def move(self, collection: str, before: Mapping[str, Position], after: Mapping[str, Position]) -> None:
        """Let the table have the positions `after` in the place of those `before`, durably, with the same rows, but
        those above a timestamp that falls. May be repeated. Raises `CorruptLog` where it has other positions, and
        errors of their store."""
        ...


async def table_positions(
    old: Wal, events: str, tables: NodeTables, known: Iterable[str], live: Mapping[str, Collection]
) -> TablePositions:
    """The positions of the tables of the collections `live` of the log `old`, which has flush events in the channel
    `events`. `known` are the names of all that it has.

    Raises `InvalidRequest` for tables that are not this log's, `PositionMismatch` for those of another kind of log,
    `PositionLost` where entries at a position were removed, and what `tables` raise."""
    there = await tables.collections()
    for name in sorted(there - set(known)):
        raise InvalidRequest(f"there is a table of {name}, which this log does not have: move it away", table=name)
    stored = await _stored_times(old, events)
    positions: dict[str, Mapping[str, Position]] = {}
    for name, collection in live.items():
        found: Mapping[str, Position] = await tables.positions(name) if name in there else {}
        await _check_own(old, collection, found, min(stored.get(collection.id, 0), tables.latest))
        if name in there:
            positions[name] = found
    return positions


def lost_position(channel: str, id: bytes) -> PositionLost:
    """The error for rows that may be in no table, and are in the old log no more."""
    return PositionLost(
        f"entries of {channel} at {id.hex()}, behind which rows may not be in the tables, were removed: the node "
        "cannot go on there either. Drop the collections on that channel first",
        channel=channel,
        requested=id,
    )


async def _check_own(old: Wal, collection: Collection, positions: Mapping[str, Position], stored: int) -> None:
    """Raise unless these are the positions of the table that the collection has filled up to the time `stored`, at
    least."""
    name, time = collection.name, min((at.timestamp for at in positions.values()), default=0)
    if positions.keys() - set(collection.vchannels) or 0 < time < collection.created_ts:
        raise _foreign(name)
    for found in {at.wal for at in positions.values()} - {old.name}:
        raise PositionMismatch(
            f"the table of {name} was filled from {found}, this log is {old.name}", expected=old.name, found=found
        )
    if time < stored:
        raise InvalidRequest(
            f"the table of {name} has less than nodes have stored: these are not the tables of this log's nodes",
            table=name,
        )
    for vchannel, at in positions.items():
        if at.channel != pchannel_of(vchannel) or not await _has(old, at.channel, at.message_id):
            raise _foreign(name)


def _foreign(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"the table of {name} was filled from another log: give those of this log's nodes", table=name
    )


async def _has(old: Wal, channel: str, id: bytes) -> bool:
    """Whether there is an entry of this id: a table goes on at one. Raises `PositionLost` for one that was removed."""
    info = await old.describe(channel)
    if info.first_id is None or id < info.first_id:
        raise lost_position(channel, id)
    if info.latest_id is None or id > info.latest_id:
        return False
    try:
        async with reading(old, channel, FromId(id, inclusive=True)) as batches:
            return (await anext(aiter(batches)))[0].id == id
    except PositionLost:  # there never was one of this id
        return False


async def _stored_times(old: Wal, events: str) -> dict[int, int]:
    """Up to which time nodes have said that each collection is in its table, by its id."""
    times: dict[int, int] = {}
    if events not in await old.channels():
        return times
    async for entry in stored_entries(old, await old.describe(events)):
        try:
            event = FlushEvent.from_record(decode(entry.payload))
        except BadRecord:
            continue
        times[event.collection_id] = max([times.get(event.collection_id, 0), *event.times.values()])
    return times
