"""The log of a node is migrated, and a node goes on with the new one: rows, messages, groups, delays and producers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tidewal
from tests.actors.conftest import Home
from tests.backends import log_url
from tests.dying_wal import DyingWal, Killed
from tests.turns import cases_in_turn, writes_in_turn
from tidewal.actors.datanode.log_table import LogTable
from tidewal.actors.datanode.moved_tables import MovedTables
from tidewal.actors.node import in_thread
from tidewal.actors.topics.messages import pack_messages
from tidewal.runtime.catalog import catalog_log
from tidewal.runtime.delays import releaser
from tidewal.runtime.errors import CorruptLog, PositionMismatch, TidewalError, Unavailable
from tidewal.runtime.log.migration_state import MIGRATION_CHANNEL, MigrationPhase, is_migration_channel, migration_state
from tidewal.runtime.log.record import Record, RecordType, decode, encode
from tidewal.runtime.log.wal import Append, ChannelPolicy, OnAppended, Wal
from tidewal.runtime.migration.channel_copy import stored_entries
from tidewal.runtime.migration.migration import cancel_migration, migrate
from tidewal.runtime.migration.moved_state import MovedState
from tidewal.runtime.migration.node_log import CATALOG_KIND
from tidewal.runtime.ownership import channel_owner
from tidewal.runtime.ownership.batch import recorded_source
from tidewal.runtime.ownership.producers import ProducerTable
from tidewal.runtime.ownership.snapshots import Snapshots
from tidewal.runtime.replicated.replica import SnapshotPacing
from tidewal.runtime.streams.messages import Position
from tidewal.runtime.tables.table_store import LOG, open_tables
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

OLD, NEW = "memory://old", "memory://new"
MEMORY_ONLY = pytest.mark.asyncio(loop_factories=["memory"])
LATER_S = 240.0
SENT = 12


class FarWal(MemoryWal):
    """A log whose ids are far above those of others: one of these that is not translated lies before all."""

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        for entry in entries:
            channel = self.log.channels.get(entry.channel)
            if channel is not None and channel.end == 1:
                channel.first = 1_000
        super().submit(entries, done)


class DyingTables(MovedTables):
    """Tables whose migration dies as `left` counts down, before or behind a step."""

    def __init__(self, home, left: list[int], *, behind: bool) -> None:
        super().__init__(open_tables(home.tables), home.in_place)
        self._left, self._behind = left, behind

    async def move(self, collection: str, before: Mapping[str, Position], after: Mapping[str, Position]) -> None:
        self._left[0] -= 1
        if self._left[0] == 0 and not self._behind:
            raise Killed
        await super().move(collection, before, after)
        if self._left[0] == 0:
            raise Killed


def tables_of(home) -> MovedTables:
    return MovedTables(open_tables(home.tables), home.in_place if home.virtual else in_thread)


@asynccontextmanager
async def logs_of(old_home, new_home) -> AsyncIterator[tuple[Wal, Wal]]:
    """The logs of two homes."""
    old, new = await old_home.wal(), await new_home.wal()
    try:
        yield old, new
    finally:
        await old.close()
        await new.close()


async def moved(home, number: int = 1) -> None:
    """Migrate the log of `home` to a new one, which it has then."""
    before = copy(home)
    if home.virtual:
        home.log, home.memory = MemoryLog(), FarWal if number % 2 else MemoryWal
    else:
        home.log_directory = home.directory / f"log{number}"
    async with logs_of(before, home) as (old, new):
        await migrate(old, new, OLD, NEW, tables=tables_of(home), settle_s=0)


async def received(member: tidewal.TopicMember, count: int) -> list[str]:
    """The next messages, acknowledged."""
    got: list[str] = []
    async with asyncio.timeout(60):
        while len(got) < count:
            pack = await anext(member)
            got += [bytes(each.body).decode() for each in pack.messages]
            await member.acknowledge(pack)
    return got


async def keys(client: tidewal.Client) -> list[int]:
    result = await client.query("people", consistency="strong")
    return sorted(result.table["id"].to_pylist())


async def numbered(client: Any, number: int) -> None:
    """Send the message of that number of one producer, which may be there."""
    topic = await client.describe_topic("once")
    params = {"topic": topic.name, "id": topic.id, "epoch": topic.epoch}
    body = pack_messages([(0, b"k", {}, b"%d" % number)])
    await client._writes.send_for("shop", number, "send", params, body, 30.0)


async def filled(home) -> None:
    """Rows that are in a table and such as are not, a topic of two epochs whose group has done a part, and messages
    that are due later."""
    async with home.people_client() as client:
        await client.insert("people", home.people(*range(10)))
        await client.flush("people")
        await client.insert("people", home.people(*range(10, 20)))
        await client.delete("people", [3, 13])
        await client.create_topic("orders", 2)
        await client.send("orders", [tidewal.Message(f"{number}", key=f"{number}") for number in range(SENT)])
        async with await client.subscribe("orders", "billing") as member:
            first = await received(member, 1)
        await client.alter_topic("orders", 3)
        await client.send("orders", "behind", key="k")
        await client.create_topic("once", 1)
        await numbered(client, 1)
        await numbered(client, 2)
        await client.create_topic("later", 1)
        sent = await client.send("later", "far", key="k", deliver_after_s=LATER_S)
        await client.send("later", "near", key="k", deliver_after_s=LATER_S / 2)
        gone = await client.send("later", "gone", key="k", deliver_after_s=LATER_S)
        assert await client.cancel("later", gone.ids[0])
        home.done, home.far = first, sent.ids[0]


async def assert_goes_on(home, *, delayed: bool = True) -> None:
    """A node has all that `filled` has brought about, and takes more."""
    async with home.client() as client:
        assert await keys(client) == [each for each in range(20) if each not in (3, 13)]
        await client.insert("people", home.people(100))
        await client.flush("people")
        assert (await keys(client))[-1] == 100
        async with await client.subscribe("orders", "billing") as member:
            rest = {str(number) for number in range(SENT)}.difference(home.done)
            got = await received(member, len(rest) + 1)
            assert sorted(got) == sorted([*rest, "behind"])
            assert got[-1] == "behind"
        await client.send("orders", "more", key="k")
        async with await client.subscribe("orders", "billing") as member:
            assert await received(member, 1) == ["more"]
        for number in (1, 2, 3):
            await numbered(client, number)
        async with await client.subscribe("once", "billing") as member:
            assert await received(member, 3) == ["1", "2", "3"]
        if delayed:
            async with await client.subscribe("later", "billing") as member:
                await asyncio.sleep(LATER_S)
                assert await received(member, 2) == ["near", "far"]
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(member), 10)


async def test_a_node_goes_on_with_all_that_it_had(home) -> None:
    await filled(home)
    await moved(home)
    await assert_goes_on(home, delayed=home.virtual)


@MEMORY_ONLY
async def test_a_log_goes_there_and_back_between_starts_of_nodes(home) -> None:
    await filled(home)
    await moved(home, 1)
    async with home.client() as client:
        assert len(await keys(client)) == 18
    await moved(home, 2)
    await moved(home, 3)
    await assert_goes_on(home)


async def numbers_of(home, channel: str) -> Mapping[str, bytes]:
    """How far sources have come in a channel, as the last record of each says."""
    wal = await home.wal()
    found: dict[str, bytes] = {}
    async for entry in stored_entries(wal, await wal.describe(channel)):
        record = decode(entry.payload)
        if record.type is RecordType.PRODUCERS:
            found |= ProducerTable.from_bytes(record.body)._offsets
        found |= dict([source]) if (source := recorded_source(record)) else {}
    await wal.close()
    return found


@MEMORY_ONLY
async def test_a_releaser_begins_at_no_place_of_the_old_log(home, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is pending was written again, and the front is not read any more, in the old log."""
    monkeypatch.setattr(releaser, "REWRITE_BYTES", 10_000)
    async with home.client() as client:
        await client.create_topic("later", 1)
        for number in range(30):
            await client.send("later", f"{number}", key="k", deliver_after_s=LATER_S + number)
            await asyncio.sleep(5)
    channel = next(name for name in home.log.channels if "-delays_" in name)
    before = await numbers_of(home, channel)
    assert any(source.endswith(releaser.HEAD) for source in before), before
    await moved(home)
    after = await numbers_of(home, channel)
    assert after == {source: offset for source, offset in before.items() if not source.endswith(releaser.HEAD)}
    async with home.client() as client, await client.subscribe("later", "g") as member:
        await asyncio.sleep(LATER_S + 60)
        assert await received(member, 30) == [f"{number}" for number in range(30)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(member), 10)


@pytest.mark.long
@MEMORY_ONLY
@pytest.mark.parametrize("behind", cases_in_turn((False, True)), ids=["before", "behind"])
async def test_a_migration_that_is_killed_at_each_write_goes_on_or_is_taken_back(
    home, tmp_path: Path, turn: int, behind: bool
) -> None:
    await filled(home)
    step = 0
    for step, number in writes_in_turn(turn):
        this = Copy(home, tmp_path / f"{step}")
        left = [step]
        old, new = DyingWal(this.log, left, behind=behind), DyingWal(this.new, left, behind=behind)
        try:
            await migrate(old, new, OLD, NEW, tables=DyingTables(this, left, behind=behind))
            break
        except Killed:
            pass
        phase = (await migration_state(MemoryWal(this.log))).phase
        finished = any(map(is_migration_channel, this.new.channels.keys() - {MIGRATION_CHANNEL}))
        if number % 3 == 0 and phase is not MigrationPhase.OPEN and not finished:
            before = this.positions()
            await cancel_migration(MemoryWal(this.log), MemoryWal(this.new), NEW)
            assert this.positions() == before
        else:
            await migrate(MemoryWal(this.log), MemoryWal(this.new), OLD, NEW, tables=tables_of(this))
            this.log = this.new
        await assert_whole(this, number)
    assert step > 80, step


async def assert_whole(this: Copy, number: int) -> None:
    """All rows are in the log of `this`; in one of ten copies all the rest is, too."""
    if number % 10 == 0:
        await assert_goes_on(this)
    else:
        async with this.client() as client:
            assert len(await keys(client)) == 18


class Copy(Home):
    """A copy of the log of a home, and of its tables."""

    def __init__(self, home, directory: Path) -> None:
        super().__init__(directory)
        self.log, self.new = MemoryLog(), MemoryLog()
        for name, channel in home.log.channels.items():
            copied = replace(channel, entries=list(channel.entries), waiters=[], holds=dict(channel.holds))
            self.log.channels[name] = replace(copied, groups=deepcopy(channel.groups))
        self.done: list[str] = getattr(home, "done", [])
        shutil.copytree(home.tables, self.tables)

    def positions(self) -> Any:
        return LogTable.open(open_tables(self.tables).table("people", LOG)).positions()


@MEMORY_ONLY
async def test_what_no_table_has_is_held_before_a_node_is_there(home) -> None:
    await filled(home)
    await moved(home)
    channels = home.log.channels
    positions = LogTable.open(open_tables(home.tables).table("people", LOG)).positions()
    assert {at.channel: at.message_id for at in positions.values()} == {
        name: channel.holds["datanode-1"] for name, channel in channels.items() if channel.holds
    }
    for at in positions.values():
        channels[at.channel].remove_before(b"\xff")
        assert channels[at.channel].entries[0].id == at.message_id


@MEMORY_ONLY
async def test_a_collection_without_a_flush_goes_along(home) -> None:
    async with home.people_client() as client:
        await client.insert("people", home.people(*range(5)))
    shutil.rmtree(home.tables / "people", ignore_errors=True)
    await moved(home)
    async with home.client() as client:
        assert await keys(client) == [*range(5)]


@MEMORY_ONLY
async def test_a_catalog_that_is_a_snapshot_goes_along(home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_log, "CATALOG_PACING", SnapshotPacing(records=1, factor=0.0))
    await filled(home)
    assert home.log.channels["by-dev-collection_schema"].first > 1
    await moved(home)
    await moved(home, 2)
    await assert_goes_on(home)


@MEMORY_ONLY
async def test_a_node_that_was_killed_is_no_hindrance_and_one_that_may_live_is(home) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(1))
        this = Copy(home, home.directory / "copy")  # as the kill leaves it
    shared = replace(MemoryWal.capabilities, one_node=False)

    class SharedWal(MemoryWal):
        capabilities = shared

    with pytest.raises(Unavailable, match="nodes belong to the cluster of this log: node-"):
        await migrate(SharedWal(this.log), MemoryWal(this.new), OLD, NEW, tables=tables_of(this))
    await migrate(MemoryWal(this.log), MemoryWal(this.new), OLD, NEW, tables=tables_of(this))
    this.log = this.new
    async with this.client() as client:
        assert await keys(client) == [1]


@MEMORY_ONLY
async def test_what_does_not_fit_together_is_refused_and_changes_nothing(home, tmp_path: Path) -> None:
    await filled(home)

    async def refusal(tables: MovedTables | None) -> TidewalError:
        new = MemoryLog()
        error = await home.error_of(migrate(MemoryWal(home.log), MemoryWal(new), OLD, NEW, tables=tables))
        assert not new.channels
        assert (await migration_state(MemoryWal(home.log))).phase is MigrationPhase.OPEN
        return error

    assert "say where these are, with --tables" in str(await refusal(None))
    elsewhere = MovedTables(open_tables(tmp_path / "elsewhere"), home.in_place)
    assert "no node has tables in" in str(await refusal(elsewhere))
    (tmp_path / "elsewhere").mkdir()
    assert "has less than nodes have stored" in str(await refusal(elsewhere))
    shutil.copytree(home.tables / "people", home.tables / "others")
    assert "a table of others, which this log does not have" in str(await refusal(tables_of(home)))
    shutil.rmtree(home.tables / "others")
    wal = MemoryWal(home.log)
    await wal.create_channel("other-collection_schema", ChannelPolicy())
    await wal.append("other-collection_schema", encode(Record(RecordType.CATALOG)))
    assert "several clusters share this log" in str(await refusal(tables_of(home)))
    await wal.drop_channel("other-collection_schema")
    table = LogTable.open(open_tables(home.tables).table("people", LOG))
    foreign = {name: replace(at, wal="kafka") for name, at in table.positions().items()}
    table.move(table.positions(), foreign)
    assert isinstance(await refusal(tables_of(home)), PositionMismatch)
    with pytest.raises(CorruptLog, match="has changed since its log was migrated"):
        table.move(dict.fromkeys(foreign, next(iter(foreign.values()))), {})


async def what_ids_name(home) -> dict[Any, Any]:
    """What lies at each id that the catalog holds: type, term and number of the record."""
    wal = await home.wal()
    catalog = (await MovedState.read(wal, "by-dev-collection_schema", CATALOG_KIND)).state
    found: dict[Any, Any] = {}

    async def note(what: str, key: object, channel: str, id: bytes) -> None:
        async for entry in stored_entries(wal, await wal.describe(channel)):
            if entry.id == id:
                record = decode(entry.payload)
                found[what, channel, key] = record.type, record.term, record.cseq
                return
        found[what, channel, key] = None

    for name, channel in catalog.channels.items():
        await note("checkpoint", "", name, channel.checkpoint)
        for term, id in channel.fences.items():
            await note("fence", term, name, id)
    for collection in catalog.collections.values():
        assert collection.beginning is not None
        for name, (_, _, id) in collection.beginning.ends.items():
            await note("beginning", collection.name, name, id)
    for topic in catalog.topics:
        for name, end in topic.ends.items():
            await note("end", topic.name, name, end.id)
    await wal.close()
    return found


@MEMORY_ONLY
@pytest.mark.parametrize("far", [False, True], ids=["to higher ids", "to lower ids"])
async def test_each_id_of_the_catalog_names_the_same_record(home, monkeypatch: pytest.MonkeyPatch, far: bool) -> None:
    def often(wal: Wal, lock: Any, promising: Any, records: int, size: int, *rest: Any) -> Snapshots:
        return Snapshots(wal, lock, promising, 1, size, *rest)

    monkeypatch.setattr(channel_owner, "Snapshots", often)
    home.memory = FarWal if far else MemoryWal
    await filled(home)
    async with home.client() as client:  # a second term, whose checkpoints are in the catalog with the next renewal
        await client.insert("people", home.people(1))
        await asyncio.sleep(10)
    before = await what_ids_name(home)
    assert {what for what, _, _ in before} == {"checkpoint", "fence", "beginning", "end"}
    assert {record[0] for (what, _, _), record in before.items() if what == "fence"} == {RecordType.FENCE}
    assert any(record for (what, _, _), record in before.items() if what == "checkpoint")
    await moved(home, 2 if far else 1)
    assert await what_ids_name(home) == before
    await assert_goes_on(home)


@pytest.mark.broker
@pytest.mark.long
@pytest.mark.parametrize("broker", cases_in_turn(("kafka", "pulsar")))
@pytest.mark.asyncio(loop_factories=["rocksmq"])
async def test_a_log_goes_to_brokers_and_back(
    home, tmp_path: Path, broker: str, request: pytest.FixtureRequest
) -> None:
    await filled(home)
    on_broker = Home(home.directory, log_url(broker, request.getfixturevalue(broker)))
    async with logs_of(home, on_broker) as (old, new):
        await migrate(old, new, OLD, NEW, tables=tables_of(home), settle_s=0)
    async with on_broker.client() as client:
        assert len(await keys(client)) == 18
    home.log_directory = tmp_path / "back"
    async with logs_of(on_broker, home) as (old, new):
        await migrate(old, new, OLD, NEW, tables=tables_of(home), settle_s=0)
    await assert_goes_on(home, delayed=False)
