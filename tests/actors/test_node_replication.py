"""The log of a node is replicated while it runs, and a node goes on with the replica, with all that it had."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest

from tests.actors.test_inputs_over_owners import GROUP, IN, OUT, commit, forget_to_store, numbers
from tests.actors.test_migrated_positions import ApartWal, FarApartWal
from tests.actors.test_node_migration import (
    Copy,
    DyingTables,
    FarWal,
    assert_goes_on,
    assert_whole,
    filled,
    keys,
    logs_of,
    tables_of,
)
from tests.actors.test_online_migration_transactions import FarPreparedWal, Parts, PreparedWal, types_in
from tests.dying_wal import DyingWal, Killed
from tests.turns import cases_in_turn, writes_in_turn
from tidewal.runtime.clock import SystemClock
from tidewal.runtime.errors import InvalidRequest, Moved, ReplicaReadOnly, Unavailable, Unsupported
from tidewal.runtime.log.migration_state import check_in_use
from tidewal.runtime.log.record import RecordType
from tidewal.runtime.log.replication_state import ReplicationPhase, replication_state
from tidewal.runtime.log.wal import ChannelPolicy, Wal
from tidewal.runtime.replication.promotion import promote, promote_alone
from tidewal.runtime.replication.replication_lag import ReplicationLag
from tidewal.runtime.replication.replicator import ReplicationTimes, Replicator
from tidewal.runtime.replication.salvage import unreplicated_entries
from tidewal.runtime.testing.clock import VirtualLoop
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

SOURCE, REPLICA = "memory://source", "memory://replica"
MEMORY_ONLY = pytest.mark.asyncio(loop_factories=["memory"])
TIMES = ReplicationTimes(look_s=0.05, save_s=0.2, halted_s=1.0)


class FarDyingWal(DyingWal, FarWal):
    """A log with higher ids, whose process dies."""


def replica_of(home):
    """The home that a node has when it goes on with a replica."""
    return beside(home, "replica", FarWal)


def beside(home, name: str, memory: type[MemoryWal]):
    """`home` with another log: in memory as `memory` shows it, or in a directory of that name."""
    other = copy(home)
    if home.virtual:
        other.log, other.memory = MemoryLog(), memory
    else:
        other.log_directory = home.directory / name
    return other


@asynccontextmanager
async def replicating(source: Wal, target: Wal, lag: ReplicationLag | None = None) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    clock = loop.clock if isinstance(loop, VirtualLoop) else SystemClock()
    running = asyncio.create_task(Replicator(source, target, SOURCE, times=TIMES, clock=clock, lag=lag).run())
    try:
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def promoted(home, other) -> None:
    """Promote the replica that `other` has of the log of `home`."""
    other.done = getattr(home, "done", [])
    async with logs_of(home, other) as (old, new):
        await promote(old, new, SOURCE, REPLICA, tables=tables_of(home))
        with pytest.raises(Moved, match="promoted"):
            await check_in_use(old, SOURCE)
        left = unreplicated_entries(old, await replication_state(old))
        assert [(name, entry.id) async for name, entry in left] == []
        await check_in_use(new, REPLICA)


async def replicated(home, other) -> None:
    """Let a replicator have a look at what nodes have left."""
    async with logs_of(home, other) as (old, new):
        async with replicating(old, new):
            await asyncio.sleep(1.0)
        with pytest.raises(ReplicaReadOnly):
            await check_in_use(new, REPLICA)


async def test_a_node_goes_on_with_a_replica(home) -> None:
    """What the replicator has missed, as the node has written it meanwhile, is brought over by the promotion."""
    await filled(home)
    other = replica_of(home)
    await replicated(home, other)
    async with home.client() as client:
        await client.insert("people", home.people(50))
        await client.delete("people", [50])
        await client.flush("people")
    await promoted(home, other)
    await assert_goes_on(other, delayed=home.virtual)


@MEMORY_ONLY
async def test_it_is_replicated_while_nodes_start_and_stop(home) -> None:
    """From before its first record on, through another term, a dropped collection and a topic that grows."""
    other = replica_of(home)
    async with logs_of(home, other) as (old, new), replicating(old, new):
        await filled(home)
        async with home.client() as client:
            await client.create_collection(home.POINTS)
            await client.drop_collection("points")
    await promoted(home, other)
    await assert_goes_on(other)


@MEMORY_ONLY
async def test_a_replica_of_nodes_is_not_promoted_without_its_source_or_tables(home) -> None:
    await filled(home)
    other = replica_of(home)
    await replicated(home, other)
    async with logs_of(home, other) as (old, new):
        with pytest.raises(Unsupported, match="--to"):
            await promote_alone(new)
        with pytest.raises(InvalidRequest, match="--tables"):
            await promote(old, new, SOURCE, REPLICA)
        await check_in_use(old, SOURCE)
    async with home.client() as client:  # the source was not fenced
        await client.insert("people", home.people(60))
        await client.delete("people", [60])
    await promoted(home, other)
    await assert_goes_on(other)


@MEMORY_ONLY
async def test_the_replica_keeps_what_the_source_keeps_and_lets_go_of_the_rest(home) -> None:
    """What is pending is removed by truncation alone, what is in no table yet is held: neither is known of a node."""
    async with home.people_client():
        pass
    other = replica_of(home)
    async with logs_of(home, other) as (old, new):
        ids: dict[str, list[bytes]] = {}
        for name, retention_s in (("pending", None), ("rows", 3600.0)):
            await old.create_channel(name, ChannelPolicy(retention_s=retention_s))
            ids[name] = [await old.append(name, b"%d" % number, number << 18) for number in range(1, 9)]
        async with replicating(old, new):
            await asyncio.sleep(1)
            await old.truncate("pending", ids["pending"][5])
            home.log.channels["rows"].remove_before(ids["rows"][3])
            await asyncio.sleep(1)
            replica = other.log.channels
            assert [bytes(each.payload) for each in replica["pending"].entries] == [b"6", b"7", b"8"]
            replica["rows"].remove_before(b"\xff")
            assert [bytes(each.payload) for each in replica["rows"].entries] == [b"4", b"5", b"6", b"7", b"8"]
            assert not home.log.channels["rows"].holds.keys() & {"tidewal-replication"}


class SharedWal(MemoryWal):
    """A log that several nodes share: one that has not left may be alive."""

    capabilities = replace(MemoryWal.capabilities, one_node=False)


@MEMORY_ONLY
async def test_a_source_whose_nodes_may_live_is_not_fenced(home) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(1))
        this = Copy(home, home.directory / "copy")  # as a kill leaves it
    old, new = SharedWal(this.log), FarWal(this.new)
    async with Replicator(old, new, SOURCE).claimed():
        pass
    with pytest.raises(Unavailable, match="nodes belong to the cluster of this log: node-"):
        await promote(old, new, SOURCE, REPLICA, tables=tables_of(this))
    await check_in_use(old, SOURCE)
    await promote(MemoryWal(this.log), new, SOURCE, REPLICA, tables=tables_of(this))  # the log of one node: it is gone
    this.log = this.new
    async with this.client() as client:
        assert await keys(client) == [1]


@MEMORY_ONLY
@pytest.mark.parametrize("decided", [True, False], ids=["decided", "undecided"])
async def test_what_a_killed_node_had_prepared_is_there_whole_or_not_at_all(
    home, monkeypatch: pytest.MonkeyPatch, decided: bool
) -> None:
    """A transaction over several pchannels, of which one has what was committed, or that nobody has decided."""
    home.memory = PreparedWal
    parts = Parts(home.log, decided=decided, patch=monkeypatch)
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE, shards=2)

        async def write() -> None:
            async with client.transaction() as t:
                await t.insert("people", home.people(*range(10)))

        writing = asyncio.create_task(write())
        async with asyncio.timeout(60):
            await parts.prepared.wait()
        this = Copy(home, home.directory / "copy")
        writing.cancel()
    assert sum(type is RecordType.PREPARE for _, type in types_in(this.log)) >= 2
    this.memory = FarPreparedWal
    old, new = PreparedWal(this.log), FarPreparedWal(this.new)
    async with Replicator(old, new, SOURCE).claimed():
        pass
    await promote(old, new, SOURCE, REPLICA, tables=tables_of(this))
    this.log = this.new
    async with this.client() as client:
        await client.insert("people", home.people(10))  # waits for nothing that was prepared
        assert await keys(client) == ([*range(11)] if decided else [10])


@MEMORY_ONLY
async def test_positions_that_transactions_have_moved_are_known_in_the_replica(
    home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is decided, and no group has stored yet."""
    home.memory = ApartWal
    other = replica_of(home)
    other.memory = FarApartWal
    async with home.client() as client:
        for topic in (IN, OUT):
            await client.create_topic(topic, 1)
        await client.send(IN, "0")
        async with await client.subscribe(IN, GROUP) as member:
            with monkeypatch.context() as dying:
                forget_to_store(dying)
                await commit(client, member, await anext(member))
                await client.send(IN, "1")
                await member.aclose()
    await replicated(home, other)
    await promoted(home, other)
    async with other.client() as client, await client.subscribe(IN, GROUP) as member:
        assert numbers(await anext(member)) == [1]


@pytest.mark.long
@MEMORY_ONLY
@pytest.mark.parametrize("behind", cases_in_turn((False, True)), ids=["before", "behind"])
async def test_a_promotion_that_is_killed_at_each_write_goes_on(home, tmp_path: Path, turn: int, behind: bool) -> None:
    """The source is in use until it is fenced."""
    await filled(home)
    step = 0
    for step, number in writes_in_turn(turn):
        this = Copy(home, tmp_path / f"{step}")
        left = [step]
        old, new = DyingWal(this.log, left, behind=behind), FarDyingWal(this.new, left, behind=behind)
        try:
            async with Replicator(old, new, SOURCE).claimed():
                pass
            await promote(old, new, SOURCE, REPLICA, tables=DyingTables(this, left, behind=behind))
            break
        except Killed:
            pass
        old, new = MemoryWal(this.log), FarWal(this.new)
        if (await replication_state(new)).phase is ReplicationPhase.NONE:
            async with Replicator(old, new, SOURCE).claimed():
                pass
        await promote(old, new, SOURCE, REPLICA, tables=tables_of(this))
        this.log = this.new
        await assert_whole(this, number)
    assert step > 60, step


class CutWal(MemoryWal):
    """A log that a node truncates while a replicator looks at where it begins."""

    cut: bytes | None = None

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        await super().hold(channel, holder, id)
        if channel == "pending" and self.cut is not None:
            cut, self.cut = self.cut, None
            await self.truncate(channel, cut)


@MEMORY_ONLY
async def test_what_is_pending_stays_in_the_replica_when_the_source_is_cut_meanwhile(home) -> None:
    async with home.people_client():
        pass
    home.memory, other = CutWal, replica_of(home)
    async with logs_of(home, other) as (old, new):
        await old.create_channel("pending", ChannelPolicy(retention_s=None))
        ids = [await old.append("pending", b"%d" % number, number << 18) for number in range(1, 9)]
        assert isinstance(old, CutWal)
        async with replicating(old, new):
            await asyncio.sleep(1)
            await old.truncate("pending", ids[2])
            old.cut = ids[5]
            await old.append("pending", b"9", 9 << 18)
            await asyncio.sleep(1)
            assert old.cut is None
            there = [bytes(each.payload) for each in other.log.channels["pending"].entries]
            assert there == [b"6", b"7", b"8", b"9"]
