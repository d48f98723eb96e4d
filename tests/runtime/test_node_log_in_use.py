"""A log that nodes use while it is prepared: what does not fit is refused before, and the rest is as of the switch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import pytest

from tests.runtime.test_node_log import (
    CATALOG,
    CLUSTER,
    CUTS,
    EVENTS,
    MEMBER,
    NEW,
    OLD,
    STORED,
    FarWal,
    Nodes,
    Tables,
    far,
)
from tests.runtime.test_node_log import STORED_AT as AT
from tidewal.runtime.errors import CorruptLog, InvalidRequest, PositionLost
from tidewal.runtime.log.migration_state import MigrationPhase, check_in_use, migration_state
from tidewal.runtime.log.record import RecordType
from tidewal.runtime.log.wal import Entry, From, Start
from tidewal.runtime.migration.migration import cancel_migration, migrate
from tidewal.runtime.migration.moved_state import MovedState
from tidewal.runtime.migration.node_log import CATALOG_KIND
from tidewal.runtime.migration.preparation import begin_switch, end_switch, prepare
from tidewal.runtime.streams.messages import Position
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal


class BusyTables(Tables):
    """Tables of nodes that are at work: `meanwhile` is called each time that it is asked which there are, of which
    `asked` counts how often."""

    def __init__(self, *, meanwhile: Callable[[int], Any], **positions: Mapping[str, Position]) -> None:
        super().__init__(**positions)
        self._meanwhile = meanwhile
        self.asked = 0

    async def collections(self) -> Set[str]:
        self.asked += 1
        await self._meanwhile(self.asked)
        return self.by_name.keys()


@pytest.fixture
async def nodes() -> Nodes:
    return await Nodes.create()


async def prepared_and_switched(nodes: Nodes, new: MemoryWal, tables: Tables, behind: Callable[[], Any]) -> None:
    """Prepare, let nodes go on (`behind`), and do the rest."""
    compared = await prepare(nodes.wal, new, OLD, NEW, tables=tables)
    await behind()
    await begin_switch(nodes.wal, new)
    await migrate(nodes.wal, new, OLD, NEW, tables=tables, compared=compared)


async def test_tables_go_on_while_the_log_is_prepared_and_are_looked_at_before_and_at_the_switch(nodes: Nodes) -> None:
    async def meanwhile(asked: int) -> None:
        if asked == 1:
            await nodes.wal.append("p0", b"more", 30)

    async def behind() -> None:
        assert tables.asked == 1
        tables.by_name["a"] = {name: nodes.at(name, time=STORED + 1, at=AT + 2) for name in ("p0_1v0", "p1_1v1")}
        await nodes.flushed(1, STORED + 1)
        await nodes.collection(3, "c", "p0_3v0")
        tables.by_name["c"] = {}

    tables = BusyTables(meanwhile=meanwhile, **nodes.tables().by_name)
    new = FarWal(MemoryLog())
    await prepared_and_switched(nodes, new, tables, behind)
    assert {name: at.message_id for name, at in tables.by_name["a"].items()} == {
        "p0_1v0": far(AT + 2),
        "p1_1v1": far(AT + 2),
    }
    assert new.log.channels["p0"].holds["datanode-1"] == far(AT + 2)
    assert "datanode-3" in new.log.channels["p0"].holds


@pytest.mark.parametrize("comes", [True, False], ids=["comes", "goes"])
async def test_collections_that_come_and_go_just_then_are_no_hindrance(nodes: Nodes, comes: bool) -> None:
    async def meanwhile(asked: int) -> None:
        if asked == 1 and comes:
            await nodes.collection(3, "c", "p0_3v0")
            tables.by_name["c"] = {}
        elif asked == 1:
            await nodes.catalog("drop", id=1)
            del tables.by_name["a"]

    tables = BusyTables(meanwhile=meanwhile, **nodes.tables().by_name)
    await prepare(nodes.wal, FarWal(MemoryLog()), OLD, NEW, tables=tables)
    assert tables.asked == 2


class CompactedWal(MemoryWal):
    """A log of which a snapshot takes the place of the catalog's first entries as it is read, the `left`th time."""

    left = 0

    async def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        if channel == CATALOG:
            self.left -= 1
            if not self.left:
                raise PositionLost(
                    "a snapshot has taken their place", channel=channel, requested=b"", first_available=None
                )
        async for entries in super().read(channel, start):
            yield entries


async def test_a_state_that_is_compacted_while_it_is_read_is_read_again(nodes: Nodes) -> None:
    read = 0
    while True:
        read += 1
        old = CompactedWal(nodes.wal.log)
        old.left, new = read, FarWal(MemoryLog())
        await prepare(old, new, OLD, NEW, tables=nodes.tables())
        await cancel_migration(nodes.wal, new, NEW)
        if old.left > 0:
            break
    assert read > 4, read


async def test_what_does_not_fit_is_refused_before_anything_is_copied(nodes: Nodes) -> None:
    strange = nodes.tables()
    strange.by_name["other"] = {}
    foreign = nodes.tables()
    foreign.by_name["a"] = {**foreign.by_name["a"], "p0_1v0": replace(nodes.at("p0"), message_id=b"\0" * 7 + b"\xff")}
    await nodes.wal.truncate("p1", nodes.ids["p1"][AT + 2])
    gone = nodes.tables()
    refused = (None, InvalidRequest), (strange, InvalidRequest), (foreign, InvalidRequest), (gone, PositionLost)
    for tables, error in refused:
        new = MemoryWal(MemoryLog())
        with pytest.raises(error, match=r"--tables|does not have|another log|rows may not be"):
            await prepare(nodes.wal, new, OLD, NEW, tables=tables)
        assert not new.log.channels
        assert (await migration_state(nodes.wal)).phase is MigrationPhase.OPEN


async def test_states_and_groups_over_them_are_those_of_the_switch(nodes: Nodes) -> None:
    """Also a checkpoint that no entry has: its channel was dropped and made again."""
    above = (500).to_bytes(8, "big")

    async def behind() -> None:
        for channel in (CATALOG, CUTS, EVENTS):
            await nodes.wal.seek_group("watchers", channel, From.LATEST)
        await nodes.catalog("grant", node="m", channels={"p0": (1, 0), "p1": (1, 0)}, limit=100)
        fences = {"p0": (1, nodes.ids["p0"][0]), "p1": (1, nodes.ids["p1"][0])}
        await nodes.append(CATALOG, RecordType.CATALOG, {"kind": "fenced", "node": "m", "channels": fences}, None)
        at = {"p0": (1, 200, above), "p1": (1, 200, nodes.ids["p1"][2])}
        await nodes.append(CATALOG, RecordType.CATALOG, {"kind": "renewed", "node": "m", "channels": at}, None)
        await nodes.cluster("register", **MEMBER, replaces="")

    new = FarWal(MemoryLog())
    await prepared_and_switched(nodes, new, nodes.tables(), behind)
    channels = (await MovedState.read(new, CATALOG, CATALOG_KIND)).state.channels
    assert [channels[name].checkpoint for name in ("p0", "p1")] == [b"", far(2)]
    assert channels["p0"].fences == {1: far(0)}
    events, before_all = (await new.describe(EVENTS)).latest_id, (0).to_bytes(8, "big")
    assert (await new.groups())[0].positions == {CATALOG: before_all, CUTS: before_all, EVENTS: events}
    assert CLUSTER in await new.channels()


class ChangingWal(FarWal):
    """A log of which the groups' positions are stored while somebody writes to a table."""

    def __init__(self, log: MemoryLog, change: Callable[[], None]) -> None:
        super().__init__(log)
        self._change = change

    async def seek_group(self, group: str, channel: str, start: Any) -> None:
        await super().seek_group(group, channel, start)
        self._change()


async def test_tables_that_change_in_the_switch_are_found_while_it_can_be_taken_back(nodes: Nodes) -> None:
    def change() -> None:
        tables.by_name["a"] = {**tables.by_name["a"], "p0_1v0": nodes.at("p0", time=STORED + 1, at=AT + 1)}

    async def behind() -> None:
        await nodes.wal.seek_group("watchers", "p0", From.LATEST)

    tables, new = nodes.tables(), ChangingWal(MemoryLog(), change)
    with pytest.raises(CorruptLog, match="--tables"):
        await prepared_and_switched(nodes, new, tables, behind)
    assert not await end_switch(nodes.wal, new)
    await cancel_migration(nodes.wal, new, NEW)
    await check_in_use(nodes.wal, OLD)
    assert tables.moves == 0
