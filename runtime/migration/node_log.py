"""The log of nodes in a migration: its states, which are written anew, and the tables that were filled from it.

What no node needs stays behind: the cuts, of which the first node draws one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..catalog.catalog import DROPPING, Catalog, Collection
from ..catalog.stored_ids import IdIn, with_ids
from ..cluster.decided_positions import cluster_with_ids
from ..cluster.state import ClusterState
from ..errors import CorruptLog, InvalidRequest, Unavailable, Unsupported
from ..log.names import Names
from ..log.record import RecordType, record_type
from ..log.wal import Wal
from ..replicated.fold import State
from ..streams.messages import Position
from .channel_copy import Check, stored_entries
from .compared_channel import ChannelProof, checksum_of
from .moved_state import MovedState, StateKind
from .node_tables import NodeTables, TablePositions, lost_position, table_positions

# How the names of the states of nodes end, with any prefix, and what their records are.
STATE_CHANNELS = {"-collection_schema": RecordType.CATALOG, "-cluster": RecordType.CLUSTER}

Places = Mapping[str, Mapping[bytes, bytes]]
"""Where ids of the old log are in the new one, by channel."""


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
    is copied. Collections that are being dropped have no tables here: no node reads them any more, they may be there in
    part, and what is left of them is removed once nodes go on."""

    def __init__(
        self,
        names: Names,
        catalog: MovedState[Catalog] | None,
        cluster: MovedState[ClusterState] | None,
        tables: TablePositions,
    ) -> None:
        self.states: Mapping[str, MovedState[Any]] = {
            name: state for name, state in ((names.catalog, catalog), (names.cluster, cluster)) if state is not None
        }
        self.left: frozenset[str] = frozenset({names.cuts})
        self._names, self._catalog, self._cluster = names, catalog, cluster
        self._collections = _live(catalog)
        self._tables = tables
        self._ids = _ids_of(self.states.values(), tables)

    @classmethod
    async def read_states(cls, old: Wal) -> NodeLog | None:
        """Read the states that nodes have in `old`, which may be in use, and leave the tables out; None where no node
        has used it. Raises `Unsupported` for several clusters on one log and states that cannot be read, and what
        `MovedState.read` does."""
        names = await node_names(old)
        if names is None:
            return None
        there = set(await old.channels())
        catalog, cluster = None, None
        if names.catalog in there:
            catalog = checked_state(await MovedState[Catalog].read(old, names.catalog, CATALOG_KIND))
        if names.cluster in there:
            cluster = checked_state(await MovedState[ClusterState].read(old, names.cluster, CLUSTER_KIND))
        return cls(names, catalog, cluster, {})

    @classmethod
    async def read(cls, old: Wal, tables: NodeTables | None, *, in_use: bool = False) -> NodeLog | None:
        """Read what nodes have left in `old`; None where no node has used it. Raises `Unavailable` where a node may
        run, unless the log is `in_use`, `InvalidRequest` where `tables` are missing, and what `read_states` and
        `table_positions` raise."""
        found = await cls.read_states(old)
        if found is None:
            return None
        names, catalog, cluster = found._names, found._catalog, found._cluster
        if cluster is not None and not old.capabilities.one_node and not in_use:
            found.check_left()
        live = _live(catalog)
        if live and tables is None:
            raise InvalidRequest(
                f"nodes have filled tables from this log ({', '.join(sorted(live))}): say where these are, with "
                "--tables, for they hold positions in it",
                argument="tables",
            )
        if tables is None or catalog is None:
            return found
        positions = await table_positions(old, names.insert_events, tables, catalog.state.collections, live)
        return cls(names, catalog, cluster, positions)

    @property
    def names(self) -> Names:
        """The names of the cluster's channels."""
        return self._names

    @property
    def cluster(self) -> ClusterState | None:
        """The members; None where there are none yet."""
        return None if self._cluster is None else self._cluster.state

    def check_left(self) -> None:
        """Raise `Unavailable` where the cluster has members: a node may use the log."""
        if self.cluster is not None and self.cluster.members:
            names = ", ".join(sorted(self.cluster.members))
            raise Unavailable(f"nodes belong to the cluster of this log: {names}, and have not left it")

    def ids(self, channel: str) -> Set[bytes]:
        """The ids of a channel that the states and the tables hold."""
        return self._ids.get(channel, frozenset())

    async def write_states(self, new: Wal, author: str, places: Places, check: Check) -> dict[str, ChannelProof]:
        """Write the states into their channels in `new`, as `MovedState.write` does."""
        id_in = id_in_new(places)
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


async def check_tables(tables: NodeTables | None, proof: NodeProof) -> None:
    """Look, while all can be taken back, whether the tables are as the proof has them. Raises `InvalidRequest` without
    `tables` where there are some, `CorruptLog` where one is not, and errors of their store."""
    for name, positions in proof.tables.items():
        if await _given(tables).positions(name) != {vchannel: each.before for vchannel, each in positions.items()}:
            raise CorruptLog(
                f"the table of {name} is not as it was when the log was copied: it is another one, or something has "
                "written to it. Give the same tables with --tables, or take the migration back with --cancel",
                table=name,
            )


async def settle_node(new: Wal, tables: NodeTables | None, proof: NodeProof, check: Check) -> None:
    """Hold in `new` what no table has, and let the tables go on there. To be called while neither log can be opened;
    may be repeated. Raises `InvalidRequest` without `tables` where there are some, and what these raise."""
    for channel, held in proof.holds.items():
        for holder, id in held.items():
            await check()
            await new.hold(channel, holder, id)
    for name, positions in proof.tables.items():
        if positions:
            await check()
            before = {vchannel: each.before for vchannel, each in positions.items()}
            await _given(tables).move(name, before, {vchannel: each.after for vchannel, each in positions.items()})


def _given(tables: NodeTables | None) -> NodeTables:
    if tables is None:
        raise InvalidRequest("say where the tables are that nodes have filled from the old log, with --tables")
    return tables


def nothing_copied(latest_old: bytes) -> ChannelProof:
    """The proof of a channel that stays behind."""
    return ChannelProof(0, 0, checksum_of(()), b"", b"", latest_old)


CATALOG_KIND: StateKind[Catalog] = StateKind(Catalog, RecordType.CATALOG, True, with_ids)
CLUSTER_KIND: StateKind[ClusterState] = StateKind(ClusterState, RecordType.CLUSTER, False, cluster_with_ids)


def _live(catalog: MovedState[Catalog] | None) -> Mapping[str, Collection]:
    collections = {} if catalog is None else catalog.state.collections
    return {name: collection for name, collection in collections.items() if collection.state != DROPPING}


def _ids_of(states: Iterable[MovedState[Any]], tables: TablePositions) -> Mapping[str, Set[bytes]]:
    ids: defaultdict[str, set[bytes]] = defaultdict(set)
    for state in states:
        for channel, held in state.ids().items():
            ids[channel] |= held
    for positions in tables.values():
        for at in positions.values():
            ids[at.channel].add(at.message_id)
    return ids


def id_in_new(places: Places) -> IdIn:
    """Ids of the new log; what retention has removed is before all that is there."""
    return lambda channel, id: places.get(channel, {}).get(id, b"")


def _found(channel: str, id: bytes, places: Places) -> bytes:
    found = places.get(channel, {}).get(id, b"")
    if not found:
        raise lost_position(channel, id)
    return found


# ---- what is there, and fits together ------------------------------------------------------------------------------


async def node_names(old: Wal) -> Names | None:
    """The names of the cluster that has used the log, None where none has. A program may have channels with such names:
    it is the first record that says so. Raises `Unsupported` where several clusters have."""
    prefixes = {
        channel.removesuffix(ending)
        for channel in await old.channels()
        for ending, type in STATE_CHANNELS.items()
        if channel.endswith(ending) and await begins_with(old, channel, type)
    }
    if len(prefixes) > 1:
        raise Unsupported(
            f"several clusters share this log, with the prefixes {', '.join(sorted(prefixes))}: such logs cannot be "
            "migrated or replicated yet; docs/how-to/move-to-brokers.md says how to move their rows",
            capability="migration",
        )
    return Names(prefixes.pop()) if prefixes else None


async def begins_with(wal: Wal, channel: str, type: RecordType) -> bool:
    """Whether the first entry of a channel is a record of that type."""
    async for entry in stored_entries(wal, await wal.describe(channel)):
        return record_type(entry.payload) is type
    return False


def checked_state(state: MovedState[State]) -> MovedState[State]:
    """`state`. Raises `Unsupported` where the channel has records, and no state is made of them."""
    if not state.begun and state.entries:
        raise Unsupported(
            f"{state.channel} is named like the state of nodes or of a named producer, and its records are none: "
            "rename or drop it",
            capability="migration",
        )
    return state
