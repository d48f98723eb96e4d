"""The replica of a node's log takes its place without the source: with all that its line has, and nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.actors.nodes import role_of
from tests.actors.test_node_migration import (
    Copy,
    DyingTables,
    assert_goes_on,
    filled,
    keys,
    logs_of,
    received,
    tables_of,
)
from tests.actors.test_node_replication import REPLICA, SOURCE, beside, replica_of, replicating
from tests.dying_wal import DyingWal, Killed
from tests.turns import writes_in_turn
from tidewal.actors.datanode import current_table
from tidewal.actors.datanode.current_table import CurrentTable
from tidewal.actors.datanode.log_table import LogTable
from tidewal.runtime.errors import InvalidRequest, Moved, Promoted, Unavailable, Unsupported
from tidewal.runtime.log.ledger_body import STAGED, ledger_channel
from tidewal.runtime.log.migration_state import check_in_use
from tidewal.runtime.log.names import DEFAULT_PREFIX
from tidewal.runtime.log.record import Record, RecordType, decode, encode, read_header
from tidewal.runtime.log.replication_state import ReplicationState, replication_state
from tidewal.runtime.log.wal import ChannelPolicy
from tidewal.runtime.migration.channel_copy import entry_at
from tidewal.runtime.migration.migration import cancel_migration
from tidewal.runtime.replication.forced_promotion import left_out, line_of, promote_at_line
from tidewal.runtime.replication.line_drawer import LineDrawer
from tidewal.runtime.replication.promotion import promote, promote_alone
from tidewal.runtime.replication.replicator import Replicator
from tidewal.runtime.replication.salvage import unreplicated_entries
from tidewal.runtime.streams.messages import Position
from tidewal.runtime.tables.table_store import CURRENT, LOG, open_tables
from tidewal.runtime.testing.memory import MemoryWal

NEW = "memory://new"
MEMORY_ONLY = pytest.mark.asyncio(loop_factories=["memory"])
DRAWN_S = 1.5  # until a line has been drawn
LINE_WITHIN_S = 60.0
RENEWED_S = 20.0  # until owners have renewed their leases, with their checkpoints


def new_of(home):
    """The home that a node has when it goes on with what was promoted."""
    return beside(home, "new", MemoryWal)


async def forced(home, other, dropped: frozenset[str] = frozenset()) -> tuple[object, ReplicationState]:
    """Promote the replica that `other` has without its source. Returns the new home, and what the replica says."""
    new = new_of(home)
    new.done = getattr(home, "done", [])
    async with logs_of(other, new) as (replica, log):
        tables = tables_of(home)
        state = await promote_at_line(replica, log, REPLICA, NEW, tables=tables, dropped=dropped, settle_s=0)
        with pytest.raises(Moved):
            await check_in_use(replica, REPLICA)
        await check_in_use(log, NEW)
    return new, state


async def test_a_node_goes_on_without_the_source(home) -> None:
    await filled(home)
    other = replica_of(home)
    await replicated(home, other)
    promoted, _ = await forced(home, other)
    await assert_goes_on(promoted, delayed=home.virtual)


async def replicated(home, other) -> None:
    """Let a replicator draw a line over what nodes have left."""
    async with logs_of(home, other) as (old, new), replicating(old, new):
        await asyncio.sleep(DRAWN_S)
        while not (await replication_state(new)).line:  # noqa: ASYNC110 -- a state has no event
            await asyncio.sleep(DRAWN_S)


async def test_tables_that_are_ahead_go_back(home) -> None:
    """Rows that were flushed, and joined and compacted, behind the line are in no table any more; the table goes on."""
    async with home.people_client() as client:
        await client.insert("people", home.people(*range(10)))
        await client.flush("people")
        await client.insert("people", home.people(*range(10, 20)))
    other = replica_of(home)
    await replicated(home, other)
    async with home.client() as client:
        await client.delete("people", [3])
        await client.insert("people", home.people(*range(20, 30)))
        await client.flush("people")
        await client.insert("people", home.people(30))
    compact(home)
    promoted, _ = await forced(home, other)
    for _ in range(2):
        async with promoted.client() as client:
            assert await keys(client) == [*range(20)]
    async with promoted.client() as client:
        await client.insert("people", home.people(40))
        await client.flush("people")
        assert await keys(client) == [*range(20), 40]
    compact(promoted)
    table = CurrentTable.open(open_tables(home.tables).table("people", CURRENT))
    assert table.rows == 21


@MEMORY_ONLY
async def test_a_table_goes_on_whose_position_lies_above_the_line_while_its_time_does_not(home) -> None:
    """An owner's fence, stamped later than the table's time, was read before the flush: nothing of the table's time can
    come behind it."""
    async with home.people_client() as client:
        await client.insert("people", home.people(*range(10)))
        await client.flush("people")
    other = replica_of(home)
    await replicated(home, other)
    async with home.client() as client:  # with owners of later terms
        await client.query("people", consistency="strong")
    tables = tables_of(home)
    before = await tables.positions("people")
    async with logs_of(home, other) as (old, replica):
        line = line_of(await replication_state(replica))
        assert all(at.timestamp <= line.time for at in before.values())
        after = {vchannel: await at_end(old, at) for vchannel, at in before.items()}
        assert all(at.message_id > line.ends_in_source[at.channel] for at in after.values())
    await tables.move("people", before, after)
    promoted, _ = await forced(home, other)
    async with promoted.client() as client:
        await client.insert("people", home.people(40))
        await client.flush("people")
        assert await keys(client) == [*range(10), 40]


async def at_end(log, at: Position) -> Position:
    """The position at the last record of its channel, with the same time."""
    last = await entry_at(log, await log.describe(at.channel), await log.latest_id(at.channel))
    _, _, term, cseq = read_header(last.payload)[:4]
    return replace(at, message_id=last.id, term=term, cseq=cseq)


def compact(home) -> None:
    """Bring the current rows to where the log's table is."""
    tables = open_tables(home.tables)
    log = LogTable.open(tables.table("people", LOG))
    current = CurrentTable.open(tables.table("people", CURRENT), log.user_schema, log.primary_key)
    current_table.compact(log, current, min(log.flushed(vchannel) for vchannel in log.positions()))


@MEMORY_ONLY
async def test_what_cannot_be_promoted_is_told_and_nothing_is_changed(home) -> None:
    await filled(home)
    other, new = replica_of(home), new_of(home)
    async with logs_of(home, other) as (old, replica), logs_of(other, new) as (_, log):
        async with Replicator(old, replica, SOURCE).claimed():
            pass
        with pytest.raises(Unsupported, match="--to"):
            await promote_alone(replica)
        with pytest.raises(Unavailable, match="no line yet"):
            await promote_at_line(replica, log, REPLICA, NEW, tables=tables_of(home))
        async with replicating(old, replica):
            await asyncio.sleep(DRAWN_S)
        with pytest.raises(InvalidRequest, match="--tables"):
            await promote_at_line(replica, log, REPLICA, NEW)
        assert not await log.channels()
        async with replicating(old, replica):  # it goes on
            await asyncio.sleep(DRAWN_S)
        assert not (await replication_state(replica)).claim


@MEMORY_ONLY
async def test_it_is_taken_back_and_begun_again(home) -> None:
    await filled(home)
    other, new = replica_of(home), new_of(home)
    new.done = home.done
    await replicated(home, other)
    async with logs_of(home, other) as (old, replica), logs_of(other, new) as (_, log):
        dying = DyingWal(new.log, [20], behind=True)
        with pytest.raises(Killed):
            await promote_at_line(replica, dying, REPLICA, NEW, tables=tables_of(home), settle_s=0)
        with pytest.raises(Promoted, match="cancel"):
            async with Replicator(old, replica, SOURCE).claimed():
                pass
        with pytest.raises(Unavailable):
            await check_in_use(log, NEW)
        await cancel_migration(replica, log, NEW, settle_s=0)
        await check_in_use(old, SOURCE)
        async with replicating(old, replica):
            await asyncio.sleep(DRAWN_S)
    promoted, _ = await forced(home, other)
    await assert_goes_on(promoted)
    async with logs_of(other, promoted) as (replica, log):
        state = await promote_at_line(replica, log, REPLICA, NEW)  # it is done
        with pytest.raises(InvalidRequest, match=NEW):
            await promote_at_line(replica, log, REPLICA, "memory://other")
    async with logs_of(home, other) as (old, replica):
        with pytest.raises(Promoted):
            await Replicator(old, replica, SOURCE).run()
    assert line_of(state).time


@MEMORY_ONLY
async def test_the_source_is_fenced_when_it_is_back_and_what_it_had_above_is_salvaged(home) -> None:
    await filled(home)
    other = replica_of(home)
    await replicated(home, other)
    async with home.client() as client:
        await client.insert("people", home.people(50))
        above = (await client.send("orders", "above", key="k")).ts
        await client.create_topic("above", 1)
        await client.send("above", "0")
    async with logs_of(home, other) as (old, replica):
        async with replicating(old, replica):  # it has some of that, and draws no line any more
            await asyncio.sleep(0.1)
        promoted, state = await forced(home, other)
        [later] = {name for name in await replica.channels() if "-topic_" in name} - set(promoted.log.channels)
        assert line_of(state).time < above
        here = [(name, entry.timestamp) async for name, entry in left_out(replica, state)]
        assert here
        assert all(time > line_of(state).time for _, time in here)
        await promote(old, replica, SOURCE, REPLICA)
        with pytest.raises(Moved) as moved:
            await check_in_use(old, SOURCE)
        assert moved.value.url == NEW
        found = [(name, entry) async for name, entry in unreplicated_entries(old, await replication_state(old))]
        rows = [entry for _, entry in found if decode(entry.payload).type is RecordType.ROWS]
        messages = [entry for _, entry in found if decode(entry.payload).type is RecordType.MESSAGE]
        assert (len(rows), len(messages)) == (1, 2)
        assert above in [entry.timestamp for entry in messages]
        assert later in {name for name, _ in found}
        await promote(old, replica, SOURCE, REPLICA)  # again


@MEMORY_ONLY
async def test_a_topic_that_is_dropped_stays_until_the_line_says_so(home) -> None:
    """A promotion would find its messages, as they were."""
    other = replica_of(home)
    async with logs_of(home, other) as (old, replica), home.people_client() as client:
        await client.create_topic("short", 1)
        await client.send("short", "0")
        async with replicating(old, replica):
            await asyncio.sleep(DRAWN_S)
            [name] = [name for name in await replica.channels() if "-topic_" in name]
            await client.drop_topic("short")
            await asyncio.sleep(0.1)
            assert name in await replica.channels()
            assert name in line_of(await replication_state(replica)).ends
            await asyncio.sleep(DRAWN_S)
            assert name not in await replica.channels()
            assert name not in line_of(await replication_state(replica)).ends


@MEMORY_ONLY
async def test_a_log_of_one_channel_has_a_line(home) -> None:
    other = replica_of(home)
    async with logs_of(home, other) as (old, replica), home.client() as client, replicating(old, replica):
        await client.create_topic("alone", 1)
        sent = await client.send("alone", "0")
        await asyncio.sleep(2 * DRAWN_S)
        assert line_of(await replication_state(replica)).time >= sent.ts


@MEMORY_ONLY
async def test_the_ledger_of_a_spark_query_keeps_no_line_back(home) -> None:
    """It is halted, as it has ids of the source. No node owns it, and the new log has none: the query begins anew."""
    await filled(home)
    other, ledger = replica_of(home), ledger_channel(DEFAULT_PREFIX, "0" * 32)
    program = ledger_channel(DEFAULT_PREFIX, "raw")  # a program's own, which is only named like one
    async with logs_of(home, other) as (old, _):
        await old.create_channel(program, ChannelPolicy())
        await old.append(program, b"kept")
        for channel in (ledger, ledger + STAGED):
            await old.create_channel(channel, ChannelPolicy())
            await old.append(channel, encode(Record(RecordType.LEDGER, ts=1)))
    async with asyncio.timeout(LINE_WITHIN_S):
        await replicated(home, other)
    promoted, state = await forced(home, other)
    assert all(state.line["ends"].get(channel) is None for channel in (ledger, ledger + STAGED))
    async with logs_of(home, promoted) as (old, log):
        assert not {ledger, ledger + STAGED} & {*await log.channels()}
        assert (await log.describe(program)).first_id is not None
        assert {channel async for channel, _ in unreplicated_entries(old, state)} >= {ledger, ledger + STAGED}
    await assert_goes_on(promoted, delayed=home.virtual)


@MEMORY_ONLY
async def test_an_idle_channel_keeps_no_line_back(home) -> None:
    """Its owner announces the time, while others are written; a node that is killed takes the line no further."""
    other = replica_of(home)
    async with logs_of(home, other) as (old, replica), home.people_client() as client:
        await client.create_topic("idle", 2)
        await client.send("idle", "0")
        async with replicating(old, replica):
            times: list[int] = []
            for number in range(5):
                written = (await client.insert("people", home.people(number))).ts
                await asyncio.sleep(DRAWN_S)
                times.append(line_of(await replication_state(replica)).time)
                assert times[-1] > written
            assert times == sorted({*times})


@MEMORY_ONLY
async def test_what_came_late_to_an_idle_channel_keeps_no_line_back(home) -> None:
    """The next replicator reads it as the last entry, and heartbeats name one of the present owner, before it."""
    other = replica_of(home)
    async with home.client() as client:
        await client.create_topic("idle", 1)
        await client.send("idle", "0")
    async with logs_of(home, other) as (old, replica), home.client() as client:  # the owner has another term now
        (idle,) = (name for name in await old.channels() if "topic" in name)
        await asyncio.sleep(DRAWN_S)
        async with replicating(old, replica):
            await old.append(idle, encode(Record(RecordType.MESSAGE, ts=1, term=1, cseq=1000)), timestamp=1)
            await asyncio.sleep(DRAWN_S)
        async with replicating(old, replica):
            before = (await client.create_topic("another", 1)).created_ts
            await asyncio.sleep(2 * DRAWN_S)
            assert line_of(await replication_state(replica)).time > before


@MEMORY_ONLY
async def test_a_snapshot_of_an_owner_above_the_line_counts_for_nothing(home, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog, which is read later, says to begin before it: without it the next owner would know of no message
    that it was released."""
    other, begin, time, draw = replica_of(home), LineDrawer.begin, LineDrawer._time, LineDrawer.draw
    released, begun, goes_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def begin_once(self: LineDrawer, *given: Any) -> None:
        if released.is_set() and not begun.is_set():
            await begin(self, *given)
            begun.set()

    async def draw_later(self: LineDrawer, *given: Any) -> Any:
        await self.look(*given)
        return await draw(self, *given) if goes_on.is_set() else None

    async def least(self: LineDrawer, *given: Any) -> int:
        await time(self, *given)
        return given[-1]

    for name, each in {"begin": begin_once, "draw": draw_later, "_time": least}.items():
        monkeypatch.setattr(LineDrawer, name, each)
    async with logs_of(home, other) as (old, replica), home.node() as node, replicating(old, replica):
        async with node.client() as client:
            await client.create_topic("later", 1)
            for number in range(3):
                await client.send("later", f"{number}", deliver_after_s=0.5)
            async with await client.subscribe("later", "readers") as reader:
                assert await received(reader, 3) == ["0", "1", "2"]
        await asyncio.sleep(DRAWN_S)  # until there is a tick behind them
        released.set()
        await begun.wait()
        await asyncio.sleep(DRAWN_S)  # until the replica has all that was there
        owner = role_of(node, "streamingnode")._owner
        (later,) = (own for name, own in owner._owned.items() if "topic" in name)
        await owner._snapshots.store_last(later, node.node.clock.now())
        await asyncio.sleep(RENEWED_S)
        goes_on.set()
        await asyncio.sleep(DRAWN_S)
    promoted, _ = await forced(home, other)
    async with promoted.client() as client, await client.subscribe("later", "others") as reader:
        await client.send("later", "last", deliver_after_s=1)
        assert await received(reader, 4) == ["0", "1", "2", "last"]


@pytest.mark.long
@MEMORY_ONLY
@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
async def test_a_promotion_that_is_killed_at_each_write_goes_on(home, tmp_path: Path, turn: int, behind: bool) -> None:
    await filled(home)
    other = replica_of(home)
    await replicated(home, other)
    async with home.client() as client:  # a table has to go back
        await client.insert("people", home.people(50))
        await client.flush("people")
    kills = 0
    for step, _ in writes_in_turn(turn):
        this, left = Copy(other, tmp_path / f"{step}"), [step]
        replica, new = this.log, this.new
        try:
            await promote_at_line(
                DyingWal(replica, left, behind=behind),
                DyingWal(new, left, behind=behind),
                REPLICA,
                NEW,
                tables=DyingTables(this, left, behind=behind),
                settle_s=0,
            )
            break
        except Killed:
            kills += 1
        await promote_at_line(MemoryWal(replica), MemoryWal(new), REPLICA, NEW, tables=tables_of(this), settle_s=0)
        this.log = new
        async with this.client() as client:
            assert len(await keys(client)) == 18
    assert kills > 20, kills


@MEMORY_ONLY
async def test_a_collection_that_was_dropped_behind_the_line_is_dropped_where_that_is_said(home) -> None:
    """Its table is gone, and so are the rows."""
    other = replica_of(home)
    async with home.people_client() as client:
        await client.insert("people", home.people(1))
        await client.create_collection(home.POINTS)
        await client.insert("points", [{"id": 1, "at": [0.0, 0.0, 0.0, 1.0]}])
        await client.flush("points")
    await replicated(home, other)
    async with home.client() as client:
        await client.drop_collection("points")
        await asyncio.sleep(30)
        assert not open_tables(home.tables).table("points", LOG).exists()
    with pytest.raises(InvalidRequest, match="--dropped points"):
        await forced(home, other)
    with pytest.raises(InvalidRequest, match="there is a table of people"):
        await forced(home, other, frozenset({"people"}))
    with pytest.raises(InvalidRequest, match="no collection lines"):
        await forced(home, other, frozenset({"lines"}))
    promoted, _ = await forced(home, other, frozenset({"points"}))
    async with promoted.client() as client:
        assert await keys(client) == [1]
        await client.create_collection(home.POINTS)
        assert len((await client.query("points", consistency="strong")).table) == 0
