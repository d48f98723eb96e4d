"""The log of nodes in a migration: its states, which are written anew, and the tables that were filled from it.

What no node needs stays behind: the cuts, of which the first node draws one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from ..catalog.catalog import DROPPING, Catalog, Collection
from ..catalog.flush_events import FlushEvent
from ..catalog.stored_ids import IdIn, with_ids
from ..cluster.state import ClusterState
from ..errors import BadRecord, InvalidRequest, PositionLost, PositionMismatch, Unavailable, Unsupported
from ..log.names import Names, pchannel_of
from ..log.record import MAGIC, RecordType, decode
from ..log.wal import Wal
from ..replicated.fold import State
from ..streams.messages import Position
from .channel_copy import ChannelProof, Check, checksum_of, stored_entries
from .moved_state import MovedState, StateKind

NODE_CHANNELS = ("-collection_schema", "-cluster")  # how the names of the states of nodes end, with any prefix

Places = Mapping[str, Mapping[bytes, bytes]]
"""Where ids of the old log are in the new one, by channel."""


class NodeTables(Protocol):
    """The tables of the collections of a log (`actors/datanode/moved_tables.py`)."""

    async def positions(self) -> Mapping[str, Mapping[str, Position]]:
        """The positions that each table has, by collection and vchannel, empty where it has none: all tables that are
        there. Raises errors of their store."""
        ...

    async def move(self, collection: str, before: Mapping[str, Position], after: Mapping[str, Position]) -> None:
        """Let the table have the positions `after` in the place of those `before`, durably, with the same rows. May be
        repeated. Raises `CorruptLog` where it has others, and errors of their store."""
        ...


class MovedPosition(NamedTuple):
    """A position of a table, `before` in the old log and `after` in the new one."""

    before: Position
    after: Position


@dataclass(frozen=True, slots=True)
class NodeProof:
    """Where tables go on in the new log, by collection and vchannel, and what is to be held there from retention, by
    channel and holder."""

    tables: Mapping[str, Mapping[str, MovedPosition]]
    holds: Mapping[str, Mapping[str, bytes]]

    def to_wire(self) -> dict[str, Any]:
        """The wire form, for JSON."""
        tables = {
            name: {vchannel: [each.to_bytes().hex() for each in moved] for vchannel, moved in positions.items()}
            for name, positions in self.tables.items()
        }
        holds = {channel: {name: id.hex() for name, id in held.items()} for channel, held in self.holds.items()}
        return {"tables": tables, "holds": holds}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> NodeProof:
        """The proof of a wire form, empty for that of a log without a node. Raises `ValueError`, `LookupError`,
        `TypeError`, `AttributeError` or `BadRecord` for a malformed one."""
        tables = {
            name: {
                vchannel: MovedPosition(*(Position.from_bytes(bytes.fromhex(each)) for each in moved))
                for vchannel, moved in positions.items()
            }
            for name, positions in wire.get("tables", {}).items()
        }
        holds = {
            channel: {name: bytes.fromhex(id) for name, id in held.items()}
            for channel, held in wire.get("holds", {}).items()
        }
        return cls(tables, holds)


NO_NODE = NodeProof({}, {})


class NodeLog:
    """A log as nodes have left it. `states` are its replicated states by channel, `left` the channels of which nothing
    is copied."""

    def __init__(
        self,
        names: Names,
        catalog: MovedState[Catalog] | None,
        cluster: MovedState[ClusterState] | None,
        tables: Mapping[str, Mapping[str, Position]],
        wal: str,
    ) -> None:
        self.states: Mapping[str, MovedState[Any]] = {
            name: state for name, state in ((names.catalog, catalog), (names.cluster, cluster)) if state is not None
        }
        self.left: frozenset[str] = frozenset({names.cuts})
        self._collections = dict(catalog.state.collections) if catalog is not None else {}
        self._tables = tables
        self._wal = wal

    @classmethod
    async def read(cls, old: Wal, tables: NodeTables | None) -> NodeLog | None:
        """Read what nodes have left in `old`; None where no node has used it. Raises `Unavailable` where a node may
        run, `InvalidRequest` where `tables` are missing, or are not this log's, `PositionMismatch` where they are of
        another kind of log, `Unsupported` for several clusters on one log and states that cannot be read, and what
        `MovedState.read` and `NodeTables.positions` raise."""
        names = await _names(old)
        if names is None:
            return None
        there = set(await old.channels())
        catalog, cluster = None, None
        if names.catalog in there:
            catalog = _checked(await MovedState[Catalog].read(old, names.catalog, CATALOG_KIND))
        if names.cluster in there:
            cluster = _checked(await MovedState[ClusterState].read(old, names.cluster, CLUSTER_KIND))
        if cluster is not None and not old.capabilities.one_node:
            _check_no_members(cluster.state)
        collections = dict[str, Collection]() if catalog is None else catalog.state.collections
        if collections and tables is None:
            raise InvalidRequest(
                f"nodes have filled tables from this log ({', '.join(sorted(collections))}): say where these are, with "
                "--tables, for they hold positions in it",
                argument="tables",
            )
        positions = dict[str, Mapping[str, Position]]() if tables is None else await tables.positions()
        await _check_tables(old, names, collections, positions)
        return cls(names, catalog, cluster, positions, old.name)

    def ids(self, channel: str) -> set[bytes]:
        """The ids of a channel that the states and the tables hold."""
        held = (state.ids().get(channel, set[bytes]()) for state in self.states.values())
        stored = (
            position.message_id
            for positions in self._tables.values()
            for position in positions.values()
            if position.channel == channel
        )
        return set[bytes]().union(*held, stored)

    async def write_states(self, new: Wal, author: str, places: Places, check: Check) -> dict[str, ChannelProof]:
        """Write the states into their channels in `new`, as `MovedState.write` does."""
        id_in = _id_in(places)
        return {name: await state.write(new, author, id_in, check) for name, state in self.states.items()}

    def proof(self, places: Places, wal: str) -> NodeProof:
        """Where all goes on in the new log, of the backend `wal`. Raises `PositionLost` where rows that are not in a
        table were removed from the old one."""
        tables = {
            name: {vchannel: self._moved(at, places, wal) for vchannel, at in positions.items()}
            for name, positions in self._tables.items()
        }
        holds: dict[str, dict[str, bytes]] = {}
        for collection in self._collections.values():
            for channel, id in self._needed(collection, tables.get(collection.name, {}), places):
                of_channel = holds.setdefault(channel, {})
                of_channel[collection.holder] = min(id, of_channel.get(collection.holder, id))
        return NodeProof(tables, holds)

    def _moved(self, position: Position, places: Places, wal: str) -> MovedPosition:
        id = _found(position.channel, position.message_id, places)
        return MovedPosition(position, replace(position, message_id=id, wal=wal))

    def _needed(
        self, collection: Collection, positions: Mapping[str, MovedPosition], places: Places
    ) -> Iterable[tuple[str, bytes]]:
        """From where on the rows of a collection, by channel, are in the new log alone."""
        if positions:
            return [(each.after.channel, each.after.message_id) for each in positions.values()]
        if collection.beginning is None:
            return []
        return [(channel, _found(channel, id, places)) for channel, (_, _, id) in collection.beginning.ends.items()]


async def settle_node(new: Wal, tables: NodeTables | None, proof: NodeProof, check: Check) -> None:
    """Hold in `new` what no table has, and let the tables go on there. To be called while neither log can be opened;
    may be repeated. Raises `InvalidRequest` without `tables` where there are some, and what these raise."""
    if proof.tables and tables is None:
        raise InvalidRequest("say where the tables are that nodes have filled from the old log, with --tables")
    for channel, held in proof.holds.items():
        for holder, id in held.items():
            await check()
            await new.hold(channel, holder, id)
    for name, positions in proof.tables.items():
        if tables is not None and positions:
            await check()
            before = {vchannel: each.before for vchannel, each in positions.items()}
            await tables.move(name, before, {vchannel: each.after for vchannel, each in positions.items()})


def nothing_copied(latest_old: bytes) -> ChannelProof:
    """The proof of a channel that stays behind."""
    return ChannelProof(0, 0, checksum_of(()), b"", b"", latest_old)


CATALOG_KIND: StateKind[Catalog] = StateKind(Catalog, RecordType.CATALOG, True, with_ids)
CLUSTER_KIND: StateKind[ClusterState] = StateKind(ClusterState, RecordType.CLUSTER, False, lambda snapshot, _: snapshot)


def _id_in(places: Places) -> IdIn:
    """What retention has removed is before all that is there."""
    return lambda channel, id: places.get(channel, {}).get(id, b"")


def _found(channel: str, id: bytes, places: Places) -> bytes:
    found = places.get(channel, {}).get(id, b"")
    if not found:
        raise PositionLost(
            f"entries of {channel} at {id.hex()}, behind which rows may not be in the tables, were removed: the node "
            "cannot go on there either. Drop the collections on that channel first",
            channel=channel,
            requested=id,
        )
    return found


# ---- what is there, and fits together ------------------------------------------------------------------------------


async def _names(old: Wal) -> Names | None:
    """The names of the cluster that has used the log. A program may have channels with such names: beside the catalog
    that each node has, it is the first record that says so."""
    catalog, cluster = NODE_CHANNELS
    prefixes: set[str] = set()
    for channel in await old.channels():
        if channel.endswith(catalog):
            prefixes.add(channel.removesuffix(catalog))
        elif channel.endswith(cluster) and await _begins_with_record(old, channel):
            prefixes.add(channel.removesuffix(cluster))
    if len(prefixes) > 1:
        raise Unsupported(
            f"several clusters share this log, with the prefixes {', '.join(sorted(prefixes))}: such logs cannot be "
            "migrated yet; docs/how-to/move-to-brokers.md says how to move their rows",
            capability="migration",
        )
    return Names(prefixes.pop()) if prefixes else None


async def _begins_with_record(wal: Wal, channel: str) -> bool:
    async for entry in stored_entries(wal, await wal.describe(channel)):
        return bytes(entry.payload[: len(MAGIC)]) == MAGIC
    return False


def _checked(state: MovedState[State]) -> MovedState[State]:
    if not state.begun and state.entries:
        raise Unsupported(
            f"{state.channel} is named like the state of nodes, and its records are none: rename or drop it",
            capability="migration",
        )
    return state


def _check_no_members(cluster: ClusterState) -> None:
    if cluster.members:
        raise Unavailable(
            f"nodes belong to the cluster of this log: {', '.join(sorted(cluster.members))}. Stop them, each with time "
            "to leave; one that was killed leaves when it is started and stopped once more"
        )


async def _check_tables(
    old: Wal, names: Names, collections: Mapping[str, Collection], tables: Mapping[str, Mapping[str, Position]]
) -> None:
    """Raise `InvalidRequest` for tables that are not those of the collections, `PositionMismatch` for those of another
    kind of log."""
    stored = await _stored_times(old, names)
    for name, positions in tables.items():
        if name not in collections:
            raise InvalidRequest(f"there is a table of {name}, which this log does not have: move it away", table=name)
        strange = sorted(positions.keys() - set(collections[name].vchannels))
        if strange or any(at.channel != pchannel_of(vchannel) for vchannel, at in positions.items()):
            raise InvalidRequest(f"the table of {name} was filled from another log: {', '.join(strange)}", table=name)
        for found in {at.wal for at in positions.values()} - {old.name}:
            raise PositionMismatch(
                f"the table of {name} was filled from {found}, this log is {old.name}", expected=old.name, found=found
            )
    for name, collection in collections.items():
        time = min((at.timestamp for at in tables.get(name, {}).values()), default=0)
        if time < stored.get(collection.id, 0) and collection.state != DROPPING:  # then they may be gone already
            raise InvalidRequest(
                f"the table of {name} has less than nodes have stored: these are not the tables of this log's nodes",
                table=name,
            )


async def _stored_times(old: Wal, names: Names) -> dict[int, int]:
    """Up to which time nodes have said that each collection is in its table, by its id."""
    times: dict[int, int] = {}
    if names.insert_events not in await old.channels():
        return times
    async for entry in stored_entries(old, await old.describe(names.insert_events)):
        try:
            event = FlushEvent.from_record(decode(entry.payload))
        except BadRecord:
            continue
        times[event.collection_id] = max(times.get(event.collection_id, 0), *event.times.values())
    return times
