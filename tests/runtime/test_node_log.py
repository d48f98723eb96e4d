"""What nodes have left in a log goes along, its tables go on in the new one, and what does not fit is refused first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any

import pytest

from tests.dying_wal import Killed
from tidewal.runtime.catalog.flush_events import FlushEvent
from tidewal.runtime.clock import MAX_TIMESTAMP
from tidewal.runtime.errors import CorruptLog, InvalidRequest, PositionLost, PositionMismatch, Unavailable
from tidewal.runtime.log.migration_state import MigrationPhase, migration_state
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, Wal
from tidewal.runtime.migration.migration import MigrationProof, cancel_migration, migrate
from tidewal.runtime.migration.moved_state import MovedState
from tidewal.runtime.migration.node_log import CATALOG_KIND, NodeLog, settle_node
from tidewal.runtime.replicated.records import Claim, encode_event
from tidewal.runtime.rows.schema import CollectionSchema, Field
from tidewal.runtime.streams.messages import Position
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

OLD, NEW = "memory://old", "memory://new"
CATALOG, CLUSTER, CUTS, EVENTS = "c-collection_schema", "c-cluster", "c-cuts", "c-insert_events"
CREATED, STORED, STORED_AT, BEGUN_AT = 5, 20, 6, 3
ROWS = 10
MEMBER = {"incarnation": "n-1", "name": "n", "roles": [], "lease_ms": 9, "level": 1, "address": "", "number": 1}


class Tables:
    """Tables in memory. Those that are `damaged` cannot be opened; `dying`: the process dies behind the next commit."""

    def __init__(self, **positions: Mapping[str, Position]) -> None:
        self.by_name = dict(positions)
        self.damaged: set[str] = set()
        self.moves = 0
        self.dying = False
        self.latest = MAX_TIMESTAMP

    async def collections(self) -> Set[str]:
        return self.by_name.keys()

    async def positions(self, collection: str) -> Mapping[str, Position]:
        if collection in self.damaged or collection not in self.by_name:
            raise CorruptLog(f"there is no table of {collection}")
        return self.by_name[collection]

    async def move(self, collection: str, before: Mapping[str, Position], after: Mapping[str, Position]) -> None:
        if self.by_name[collection] not in (before, after):
            raise CorruptLog("other positions")
        self.by_name[collection], self.moves = after, self.moves + 1
        if self.dying:
            raise Killed


class Nodes:
    """A log as nodes may have left it, with two pchannels."""

    def __init__(self) -> None:
        self.wal = MemoryWal(MemoryLog())
        self.ids: dict[str, list[bytes]] = {}
        self._claim = Claim()
        self._number = 1

    @classmethod
    async def create(cls) -> Nodes:
        """With a collection `a` of two shards that is stored in part, and one, `b`, that is not."""
        nodes = cls()
        for name in (CATALOG, CLUSTER, CUTS, EVENTS, "p0", "p1"):
            await nodes.wal.create_channel(name, ChannelPolicy(retention_s=None))
        for channel in ("p0", "p1"):
            entries = [Append(channel, b"%d" % number, number + 1) for number in range(ROWS)]
            nodes.ids[channel] = await nodes.wal.append_many(entries)
        await nodes.wal.append(CUTS, encode(Record(RecordType.CUT)))
        await nodes.cluster("begin")
        event = {"kind": "leader", "node": "m", "previous": b""}
        nodes._claim = Claim(await nodes.append(CATALOG, RecordType.CATALOG, event, Claim(b"", 1)), 1, "m")
        await nodes.collection(1, "a", "p0_1v0", "p1_1v1")
        await nodes.collection(2, "b", "p0_2v0")
        await nodes.flushed(1, STORED)
        return nodes

    async def append(self, channel: str, type: RecordType, event: Mapping[str, Any], claim: Claim | None) -> bytes:
        record = encode_event(type, event, "m", self._number, claim)
        self._number += 1
        return await self.wal.append(channel, encode(record))

    async def catalog(self, kind: str, **fields: Any) -> None:
        await self.append(CATALOG, RecordType.CATALOG, {**fields, "kind": kind}, self._claim)

    async def cluster(self, kind: str, **fields: Any) -> None:
        await self.append(CLUSTER, RecordType.CLUSTER, {**fields, "kind": kind}, None)

    async def collection(self, id: int, name: str, *vchannels: str) -> None:
        schema = CollectionSchema(name, (Field("id", "int64"),), "id")
        wire = {"id": id, "schema": schema.to_wire(), "vchannels": vchannels, "created_ts": CREATED}
        await self.catalog("create", collection={**wire, "state": "creating", "beginning": None})
        channels = [vchannel[:2] for vchannel in vchannels]
        ends = {channel: (1, 1, self.ids[channel][BEGUN_AT]) for channel in channels}
        await self.catalog("ready", id=id, beginning=(CREATED, ends))

    async def flushed(self, id: int, time: int, **times: int) -> None:
        event = FlushEvent(id, "a", times or {"p0_1v0": time, "p1_1v1": time}, 1, 0, 0)
        await self.wal.append(EVENTS, encode(event.to_record(time)))

    def at(self, vchannel: str, time: int = STORED, at: int = STORED_AT) -> Position:
        return Position(vchannel[:2], self.ids[vchannel[:2]][at], 1, 7, time, "memory")

    def tables(self) -> Tables:
        return Tables(a={"p0_1v0": self.at("p0_1v0"), "p1_1v1": self.at("p1_1v1", at=STORED_AT + 1)})


@pytest.fixture
async def nodes() -> Nodes:
    return await Nodes.create()


class FarWal(MemoryWal):
    """A log whose ids are other ones."""

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        new = channel not in self.log.channels
        await super().create_channel(channel, policy)
        if new and channel in ("p0", "p1"):
            self.log.channels[channel].first = 1_000


def far(at: int) -> bytes:
    return (1_000 + at).to_bytes(8, "big")


async def moved(nodes: Nodes, tables: Tables | None, new: Wal | None = None) -> MemoryWal:
    new = FarWal(MemoryLog()) if new is None else new
    await migrate(nodes.wal, new, OLD, NEW, tables=tables)
    assert isinstance(new, MemoryWal)
    return new


async def refusal(nodes: Nodes, tables: Tables | None) -> Exception:
    """The error with which a migration is refused, before anything has changed."""
    new = MemoryWal(MemoryLog())
    with pytest.raises((InvalidRequest, PositionLost, PositionMismatch, Unavailable)) as error:
        await migrate(nodes.wal, new, OLD, NEW, tables=tables)
    assert not new.log.channels
    assert (await migration_state(nodes.wal)).phase is MigrationPhase.OPEN
    return error.value


async def test_tables_go_on_in_the_new_log_which_holds_what_they_lack(nodes: Nodes) -> None:
    tables = nodes.tables()
    before = tables.by_name["a"]
    new = await moved(nodes, tables)
    assert tables.by_name["a"] == {
        name: replace(each, message_id=far(STORED_AT + (name == "p1_1v1"))) for name, each in before.items()
    }
    holds = {name: channel.holds for name, channel in new.log.channels.items() if channel.holds}
    assert holds == {
        "p0": {"datanode-1": far(STORED_AT), "datanode-2": far(BEGUN_AT)},
        "p1": {"datanode-1": far(STORED_AT + 1)},
    }
    assert (await new.describe(CUTS)).first_id is None
    catalog = (await MovedState.read(new, CATALOG, CATALOG_KIND)).state
    beginnings = {name: each.beginning for name, each in catalog.collections.items()}
    assert beginnings["b"] == (CREATED, {"p0": (1, 1, far(BEGUN_AT))})
    state = await migration_state(nodes.wal)
    proof = MigrationProof.from_wire(state.proof)
    assert MigrationProof.from_wire(proof.to_wire()) == proof
    assert proof.node.holds == holds
    assert proof.node.tables["a"]["p0_1v0"] == (before["p0_1v0"], tables.by_name["a"]["p0_1v0"])


async def test_of_two_shards_on_one_channel_the_lower_position_is_held(nodes: Nodes) -> None:
    await nodes.collection(3, "two", "p0_3v0", "p0_3v1")
    tables = nodes.tables()
    tables.by_name["two"] = {"p0_3v0": nodes.at("p0", at=4), "p0_3v1": nodes.at("p0", at=8)}
    new = await moved(nodes, tables)
    assert new.log.channels["p0"].holds["datanode-3"] == far(4)


async def test_a_table_without_positions_stays_and_the_collection_is_held_from_its_beginning(nodes: Nodes) -> None:
    tables = nodes.tables()
    tables.by_name["b"] = {}
    new = await moved(nodes, tables)
    assert (tables.by_name["b"], tables.moves) == ({}, 1)
    assert new.log.channels["p0"].holds["datanode-2"] == far(BEGUN_AT)


async def test_a_collection_that_is_half_created_is_not_held(nodes: Nodes) -> None:
    schema = CollectionSchema("half", (Field("id", "int64"),), "id")
    wire = {"id": 3, "schema": schema.to_wire(), "vchannels": ["p0_3v0"], "created_ts": CREATED}
    await nodes.catalog("create", collection={**wire, "state": "creating", "beginning": None})
    new = await moved(nodes, nodes.tables())
    assert "datanode-3" not in new.log.channels["p0"].holds


@pytest.mark.parametrize("left", ["whole", "in part", "nothing"])
async def test_what_is_being_dropped_may_be_gone_in_part(nodes: Nodes, left: str) -> None:
    """Its hold is released, so retention may take its rows, and then its table is removed."""
    await nodes.catalog("drop", id=1)
    await nodes.wal.truncate("p0", nodes.ids["p0"][STORED_AT + 1])
    await nodes.catalog("drop", id=2)
    tables = nodes.tables() if left != "nothing" else Tables()
    tables.damaged = {"a"} if left == "in part" else set()
    new = await moved(nodes, tables)
    assert not new.log.channels["p0"].holds
    assert tables.moves == 0
    assert (await MovedState.read(new, CATALOG, CATALOG_KIND)).state.collections["a"].state == "dropping"


async def test_where_all_is_being_dropped_no_tables_are_asked_for(nodes: Nodes) -> None:
    for id in (1, 2):
        await nodes.catalog("drop", id=id)
    await moved(nodes, None)


async def test_a_group_over_a_state_of_nodes_begins_anew_there(nodes: Nodes) -> None:
    for channel in (CATALOG, CUTS, EVENTS):
        await nodes.wal.seek_group("watchers", channel, From.LATEST)
    new = await moved(nodes, nodes.tables())
    events = (await new.describe(EVENTS)).latest_id
    before_all = (0).to_bytes(8, "big")
    assert (await new.groups())[0].positions == {CATALOG: before_all, CUTS: before_all, EVENTS: events}


async def test_an_id_that_no_entry_has_is_before_all(nodes: Nodes) -> None:
    """The checkpoint of a channel that was dropped and made again: it must be read whole."""
    above = (500).to_bytes(8, "big")
    await nodes.catalog("grant", node="m", channels={"p0": (1, 0), "p1": (1, 0)}, limit=100)
    fences = {"p0": (1, nodes.ids["p0"][0]), "p1": (1, nodes.ids["p1"][0])}
    await nodes.append(CATALOG, RecordType.CATALOG, {"kind": "fenced", "node": "m", "channels": fences}, None)
    checkpoints = {"p0": (1, 200, above), "p1": (1, 200, nodes.ids["p1"][2])}
    await nodes.append(CATALOG, RecordType.CATALOG, {"kind": "renewed", "node": "m", "channels": checkpoints}, None)
    new = await moved(nodes, nodes.tables())
    channels = (await MovedState.read(new, CATALOG, CATALOG_KIND)).state.channels
    assert [channels[name].checkpoint for name in ("p0", "p1")] == [b"", far(2)]
    assert channels["p0"].fences == {1: far(0)}


Change = Callable[[Nodes, Tables], Any]


async def strange_shard(nodes: Nodes, tables: Tables) -> None:
    tables.by_name["a"] = {**tables.by_name["a"], "p0_9v0": nodes.at("p0")}


async def other_channel(nodes: Nodes, tables: Tables) -> None:
    tables.by_name["a"] = {**tables.by_name["a"], "p0_1v0": nodes.at("p1")}


async def no_such_entry(nodes: Nodes, tables: Tables) -> None:
    behind = replace(nodes.at("p0"), message_id=(500).to_bytes(8, "big"))
    tables.by_name["a"] = {**tables.by_name["a"], "p0_1v0": behind}


async def between_entries(nodes: Nodes, tables: Tables) -> None:
    between = replace(nodes.at("p0"), message_id=nodes.ids["p0"][STORED_AT] + b"x")
    tables.by_name["a"] = {**tables.by_name["a"], "p0_1v0": between}


async def before_it_was_created(nodes: Nodes, tables: Tables) -> None:
    tables.by_name["b"] = {"p0_2v0": nodes.at("p0", time=CREATED - 1)}


@pytest.mark.parametrize(
    "change", [strange_shard, other_channel, no_such_entry, between_entries, before_it_was_created]
)
async def test_a_table_of_another_log_is_refused(nodes: Nodes, change: Change) -> None:
    tables = nodes.tables()
    await change(nodes, tables)
    assert "was filled from another log" in str(await refusal(nodes, tables))


async def test_what_does_not_fit_is_refused(nodes: Nodes) -> None:
    assert "a, b" in str(await refusal(nodes, None))
    assert "has less than nodes have stored" in str(await refusal(nodes, Tables()))
    assert "has less than nodes" in str(await refusal(nodes, Tables(a={"p0_1v0": nodes.at("p0", STORED - 1)})))
    tables = nodes.tables()
    tables.by_name["other"] = {}
    assert "a table of other, which this log does not have" in str(await refusal(nodes, tables))
    foreign = {name: replace(at, wal="kafka") for name, at in nodes.tables().by_name["a"].items()}
    assert isinstance(await refusal(nodes, Tables(a=foreign)), PositionMismatch)
    await nodes.wal.truncate("p1", nodes.ids["p1"][STORED_AT + 2])
    assert "rows may not be in the tables" in str(await refusal(nodes, nodes.tables()))
    await nodes.cluster("register", **MEMBER, replaces="")
    nodes.wal.capabilities = replace(MemoryWal.capabilities, one_node=False)
    assert "nodes belong to the cluster of this log: n-1" in str(await refusal(nodes, nodes.tables()))
    await nodes.cluster("leave", incarnation="n-1")
    assert "rows may not be in the tables" in str(await refusal(nodes, nodes.tables()))


async def test_the_last_flush_event_of_a_collection_counts(nodes: Nodes) -> None:
    await nodes.flushed(1, STORED - 5)
    await nodes.flushed(2, 0, p0_2v0=CREATED + 1)
    await nodes.wal.append(EVENTS, b"no event")
    assert "the table of b has less" in str(await refusal(nodes, nodes.tables()))
    tables = nodes.tables()
    tables.by_name["b"] = {"p0_2v0": nodes.at("p0", time=CREATED + 1)}
    tables.by_name["a"] = {name: replace(at, timestamp=STORED - 1) for name, at in tables.by_name["a"].items()}
    assert "the table of a has less" in str(await refusal(nodes, tables))


class DyingBeforeTheMark(FarWal):
    """Its process dies when it is to get its mark."""

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        if channel.startswith("tidewal-migrated-"):
            raise Killed
        await super().create_channel(channel, policy)


async def test_tables_that_changed_are_found_while_all_can_be_taken_back(nodes: Nodes) -> None:
    """Also those of a run that goes on with others than the one before it was given."""
    tables, log = nodes.tables(), MemoryLog()
    with pytest.raises(Killed):
        await moved(nodes, tables, DyingBeforeTheMark(log))
    assert (await migration_state(nodes.wal)).phase is MigrationPhase.MIGRATED
    changed, new = nodes.tables(), FarWal(log)
    changed.by_name["a"] = {**changed.by_name["a"], "p0_1v0": nodes.at("p0", time=STORED + 1, at=STORED_AT + 1)}
    for given, error in ((None, InvalidRequest), (Tables(), CorruptLog), (changed, CorruptLog)):
        with pytest.raises(error, match=r"--tables|no table"):
            await migrate(nodes.wal, new, OLD, NEW, tables=given)
    await cancel_migration(nodes.wal, new, NEW)
    assert not log.channels
    assert tables.moves == changed.moves == 0


async def test_a_run_that_was_killed_behind_a_commit_is_gone_on_with(nodes: Nodes) -> None:
    tables, new = nodes.tables(), FarWal(MemoryLog())
    tables.dying = True
    with pytest.raises(Killed):
        await moved(nodes, tables, new)
    tables.dying = False
    with pytest.raises(InvalidRequest, match="may be in use"):
        await cancel_migration(nodes.wal, new, NEW)
    with pytest.raises(InvalidRequest, match="with --tables"):
        await migrate(nodes.wal, new, OLD, NEW)
    await moved(nodes, tables, new)
    assert tables.by_name["a"]["p0_1v0"].message_id == far(STORED_AT)


async def test_each_write_of_a_run_is_checked(nodes: Nodes) -> None:
    tables = nodes.tables()
    proof = MigrationProof.from_wire((await migrate(nodes.wal, FarWal(MemoryLog()), OLD, NEW, tables=tables)).to_wire())
    checked: list[int] = []

    async def check() -> None:
        checked.append(sum(len(each.holds) for each in new.log.channels.values()) + tables.moves)

    tables, new = nodes.tables(), FarWal(MemoryLog())
    for channel in ("p0", "p1"):
        await new.create_channel(channel, ChannelPolicy(retention_s=None))
    await settle_node(new, tables, proof.node, check)
    assert checked == [0, 1, 2, 3]
    assert tables.moves == 1


@pytest.mark.parametrize("missing", [[CLUSTER], [CUTS, EVENTS]])
async def test_a_node_that_was_killed_early_has_not_all_channels(nodes: Nodes, missing: list[str]) -> None:
    for channel in missing:
        await nodes.wal.drop_channel(channel)
    new = await moved(nodes, nodes.tables())
    assert not set(missing) & set(await new.channels())


async def test_a_catalog_that_has_not_begun_goes_along(nodes: Nodes) -> None:
    await nodes.wal.drop_channel(CATALOG)
    await moved(nodes, Tables())
    await nodes.wal.drop_channel("tidewal-migration")
    await nodes.wal.create_channel(CATALOG, ChannelPolicy())
    new = await moved(nodes, Tables())
    assert (await new.describe(CATALOG)).first_id is None


async def test_ids_are_those_of_states_and_tables(nodes: Nodes) -> None:
    node = await NodeLog.read(nodes.wal, nodes.tables())
    assert node is not None
    ids = nodes.ids
    assert node.ids("p0") == {ids["p0"][BEGUN_AT], ids["p0"][STORED_AT]}
    assert node.ids("p1") == {ids["p1"][BEGUN_AT], ids["p1"][STORED_AT + 1]}
    assert node.ids(EVENTS) == set()
    assert node.states.keys() == {CATALOG, CLUSTER}
    assert node.left == {CUTS}


async def test_a_beginning_that_was_removed_is_refused(nodes: Nodes) -> None:
    await nodes.wal.truncate("p0", nodes.ids["p0"][BEGUN_AT + 1])
    new = MemoryWal(MemoryLog())
    with pytest.raises(PositionLost, match="Drop the collections"):
        await migrate(nodes.wal, new, OLD, NEW, tables=nodes.tables())
