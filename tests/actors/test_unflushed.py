"""What is not in the tables yet stays counted when a channel gets another owner: else the limit would begin anew with
each move."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.actors.conftest import PEOPLE
from tests.actors.nodes import TAKEN_OVER_S, Nodes
from tidewal.actors.placement_client import PlacementClient
from tidewal.actors.streamingnode.unflushed import CARRIED_STEPS, Unflushed
from tidewal.runtime.catalog.flush_events import FlushEvent
from tidewal.runtime.cluster.roles import DATA_NODE, ROLE_NAMES
from tidewal.runtime.errors import BadRecord
from tidewal.runtime.log.names import pchannel_of
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryWal
from tidewal.runtime.testing.simulation.wal import SimulatedWal

MEMORY_ONLY = pytest.mark.asyncio(loop_factories=["memory"])
SHARD = "by-dev-rootcoord-dml_0_1v0"
OTHER = "by-dev-rootcoord-dml_0_2v0"
PCHANNEL = "by-dev-rootcoord-dml_0"
ALL_OPEN = {SHARD, OTHER}.__contains__


def flushed(unflushed: Unflushed, upto: int) -> None:
    unflushed.store(FlushEvent(1, "people", dict.fromkeys((SHARD, OTHER), upto), 1, 1, 1))


def next_owner(carried: bytes, *, flushed_to: int = 0) -> Unflushed:
    """An owner that has read in the flush events how far the tables are, and `carried` in the channel."""
    unflushed = Unflushed()
    flushed(unflushed, flushed_to)
    unflushed.take_over(PCHANNEL, carried)
    return unflushed


SIZES = st.lists(st.tuples(st.sampled_from([SHARD, OTHER]), st.integers(1, 100)), min_size=1, max_size=30)


@given(SIZES, st.integers(0, 30), st.integers(0, 30), st.integers(0, 31))
def test_no_byte_is_lost_or_counted_twice_on_the_way_to_the_next_owner(sizes, taken, checkpoint, stored):
    """Record by record, with ts 1, 2, …: the owner has counted `taken` of them as it stores its snapshot, the next one
    reads all from `checkpoint` on, and the tables have all up to `stored`."""
    before, after = Unflushed(), Unflushed()
    for ts, (vchannel, size) in enumerate(sizes[:taken], 1):
        before.add(vchannel, ts, size)
    carried = before.carried(PCHANNEL, ALL_OPEN)
    checkpoint = min(checkpoint, taken)  # it is never behind what was counted
    for ts, (vchannel, size) in enumerate(sizes[checkpoint:], checkpoint + 1):
        after.recover(vchannel, ts, size)
    after.take_over(PCHANNEL, carried)
    assert after.bytes([SHARD, OTHER]) == sum(size for _, size in sizes)
    flushed(after, stored)
    left = sum(size for ts, (_, size) in enumerate(sizes, 1) if ts > stored)
    joined = sum(size for _, size in sizes) / CARRIED_STEPS + 100  # counts until the last of what is joined is stored
    assert left <= after.bytes([SHARD, OTHER]) <= left + 2 * joined
    flushed(after, len(sizes))
    assert after.bytes([SHARD, OTHER]) == 0


@given(st.lists(st.integers(1, 100), min_size=1, max_size=50))
def test_what_is_carried_is_short_and_never_free_too_early(sizes):
    before = Unflushed()
    for ts, size in enumerate(sizes, 1):
        before.add(SHARD, ts, size)
    carried = before.carried(PCHANNEL, ALL_OPEN)
    assert len(carried) < 64 + 10 * CARRIED_STEPS
    for ts, gone in enumerate(accumulate(sizes), 1):
        assert next_owner(carried, flushed_to=ts).bytes([SHARD]) >= sum(sizes) - gone


def test_what_is_in_the_tables_by_then_and_dropped_collections_are_not_taken_over():
    before = Unflushed()
    before.add(SHARD, 5, 10)
    before.add(OTHER, 6, 20)
    assert next_owner(before.carried(PCHANNEL, {SHARD}.__contains__)).bytes([SHARD, OTHER]) == 10
    assert next_owner(before.carried(PCHANNEL, ALL_OPEN), flushed_to=5).bytes([SHARD, OTHER]) == 20
    assert next_owner(before.carried("another", ALL_OPEN)).bytes([SHARD, OTHER]) == 0


@pytest.mark.parametrize("carried", [b"", b"\x93", b"\x92\x01\x01", b"\x92\xa1x\x80"])
def test_counts_that_cannot_be_read_change_nothing(carried):
    unflushed = Unflushed()
    unflushed.add(SHARD, 5, 10)
    with pytest.raises(BadRecord):
        unflushed.take_over(PCHANNEL, carried)
    assert unflushed.bytes([SHARD]) == 10


@pytest.fixture
async def nodes(home, tmp_path) -> AsyncIterator[Nodes]:
    """Three nodes that store nothing in tables."""
    nodes = Nodes(tmp_path, random.Random(1), SimulatedWal)
    for name in "abc":
        await nodes.start(name, [role for role in ROLE_NAMES if role != DATA_NODE])
    yield nodes
    await nodes.stop()


def counted(nodes: Nodes, vchannels: tuple[str, ...]) -> int:
    """What the owners of a collection count as not in its table."""
    return sum(
        nodes.running[name].role("streamingnode")._unflushed.bytes(vchannels) for name in "abc" if name in nodes.running
    )


@MEMORY_ONLY
async def test_what_is_not_in_the_tables_stays_counted_over_moves_and_kills(nodes: Nodes) -> None:
    async with nodes.client() as client:
        vchannels = (await client.create_collection(PEOPLE, shards=1)).vchannels
        cluster, written = PlacementClient(client), 0

        async def write() -> None:
            nonlocal written
            before = counted(nodes, vchannels)
            await client.insert("people", [{"id": written + n, "name": "x" * 100, "height": 1.0} for n in range(50)])
            written += 50
            assert counted(nodes, vchannels) > before

        channel = pchannel_of(vchannels[0])
        for target in "abcab":
            await write()
            before = counted(nodes, vchannels)
            await cluster.move(channel, target)
            assert counted(nodes, vchannels) == before > 0
        await write()
        before = counted(nodes, vchannels)
        await nodes.kill(nodes.owners()[channel])
        await asyncio.sleep(TAKEN_OVER_S)
        await write()
        assert counted(nodes, vchannels) > before
        await nodes.start("d", [DATA_NODE])
        await client.flush("people", deadline_s=60)
        assert counted(nodes, vchannels) == 0


@MEMORY_ONLY
async def test_an_owner_that_gives_a_channel_up_counts_nothing_of_it_once_another_has_it(nodes: Nodes) -> None:
    async with nodes.client() as client:
        vchannels = (await client.create_collection(PEOPLE, shards=1)).vchannels
        channel = pchannel_of(vchannels[0])
        first = nodes.running[nodes.owners()[channel]]
        await PlacementClient(client).cordon(first.name)  # it does not get the channel again
        await client.insert("people", [{"id": n, "name": "x", "height": 1.0} for n in range(50)])
        before = counted(nodes, vchannels)
        wal = first.node.wal
        assert isinstance(wal, MemoryWal)
        wal.faults = FaultPlan(1, Rates(lost=1), channels=channel)
        await client.insert("people", [{"id": 50, "name": "x", "height": 1.0}])
        assert nodes.owners()[channel] != first.name
        assert first.role("streamingnode")._unflushed.bytes(vchannels) == 0
        assert counted(nodes, vchannels) > before > 0
