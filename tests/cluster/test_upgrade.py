"""Nodes of two versions in one cluster: schedule 20, as far as it concerns versions, and random ones."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.cluster.versions import NEW, NEWEST, OLD
from tidewal.runtime.errors import InvalidRequest
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.replicated.records import encode_event
from tidewal.runtime.testing import ClusterPlan, SimulatedCluster, check_cluster, run_virtual
from tidewal.runtime.testing.memory import MemoryWal
from tidewal.runtime.testing.simulation.driver import FaultDriver
from tidewal.runtime.testing.simulation.node import SimulatedNode

STATES = {Names().catalog: RecordType.CATALOG, Names().cluster: RecordType.CLUSTER}
RAISED_S = 8.0  # a leader is known by then, and has led for a lease


class UnrulyVersion:
    """Writes what a later version might, without asking which level the cluster has, and garbage: into each channel."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster, self._wal = cluster, MemoryWal(cluster.log)
        self._rng = random.Random(cluster.rng.random())
        self._number = 0

    async def write(self) -> None:
        for channel in (*STATES, *self._cluster.channels):
            await self._wal.append(channel, self._rng.randbytes(self._rng.randrange(60)))
            for kind in ("label", "mark", "greet", "unheard of"):
                for level in (1, 2, 3, 4):
                    await self._wal.append(channel, encode(self._record(STATES.get(channel), kind, level)))

    def _record(self, type: RecordType | None, kind: str, level: int) -> Record:
        """A record that stands on the last claim, and whose author has written none after it."""
        self._number += 1
        leader = self._cluster.leader()
        claim = leader.catalog.fold.claim if leader is not None and kind != "mark" else None
        event = {"kind": kind, "label": "early", "greeting": "early", "v": level}
        claim = claim if type is RecordType.CATALOG else None
        return encode_event(type or RecordType.GROUP, event, "unruly", self._number, claim)


async def roll(cluster: SimulatedCluster, name: str, version=NEW) -> SimulatedNode:
    """Stop a node in good order, and start it with another version."""
    cluster.leave(name)
    while not cluster.node(name).process.dead:  # noqa: ASYNC110 -- leaving has no event
        await asyncio.sleep(0.1)
    node = cluster.start_node(name, version=version)
    await cluster.until_owned(cluster.lease_s + 2)
    return node


def levels(cluster: SimulatedCluster) -> set[int]:
    return {level for node in cluster.nodes for level in (node.cluster.fold.level, node.catalog.fold.level)}


async def until_level(cluster: SimulatedCluster, level: int) -> None:
    async with asyncio.timeout(RAISED_S):
        while levels(cluster) != {level}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def skipped(cluster: SimulatedCluster) -> list[int]:
    return [log.skipped for node in cluster.nodes for log in (node.catalog, node.cluster)]


async def until_refused(cluster: SimulatedCluster, why: str) -> None:
    """Wait until a node has not started, and was started again with the newer version."""
    async with asyncio.timeout(RAISED_S):
        while not any(why in event.note for event in cluster.history.of("fault")):
            known = cluster.nodes[0].cluster.cluster
            assert all(member.min_level <= known.level <= member.level for member in known.members.values())
            await asyncio.sleep(0.01)
    await asyncio.sleep(1)
    assert cluster.node("n2").version is NEW


def run_upgrade(seed: int, schedule) -> None:
    async def main() -> None:
        cluster = SimulatedCluster(seed, ClusterPlan(versions=(OLD, NEW), balance=False))
        try:
            await cluster.start()
            await schedule(cluster)
            await cluster.until_owned(cluster.lease_s + 2)
            await cluster.finish(2 * cluster.lease_s + 2)
            await asyncio.sleep(1)
            check_cluster(cluster)
        finally:
            await cluster.stop()

    run_virtual(main())


def test_20_a_cluster_is_upgraded_node_by_node_while_an_unruly_version_writes_into_each_channel(seed: int) -> None:
    async def schedule(cluster: SimulatedCluster) -> None:
        unruly = UnrulyVersion(cluster)
        lives = {node.incarnation for node in cluster.nodes}
        for name in cluster.names:
            before = skipped(cluster)
            await unruly.write()
            await asyncio.sleep(1)
            assert all(now > then for now, then in zip(skipped(cluster), before, strict=True))
            assert {node.incarnation for node in cluster.nodes} == lives, "it ended none of them"
            assert levels(cluster) == {2}, "an old member is left"
            await roll(cluster, name)
            lives = {node.incarnation for node in cluster.nodes}
            with pytest.raises(InvalidRequest, match="level 3"):
                await cluster.node(name).cluster.propose({"kind": "greet", "greeting": "too early"})
        await until_level(cluster, 3)
        await unruly.write()
        node = cluster.node("n0")
        await node.cluster.propose({"kind": "greet", "greeting": "hello"})
        await node.catalog.propose_own({"kind": "mark", "label": "by a node"})
        assert node.cluster.cluster.greetings[-1] == "hello"
        assert node.catalog.catalog.labels[-1] == "by a node"

    run_upgrade(seed, schedule)


def test_a_cluster_whose_level_is_held_is_downgraded_again_and_rises_once_it_is_held_no_more(seed: int) -> None:
    async def schedule(cluster: SimulatedCluster) -> None:
        await until_level(cluster, 2)
        cluster.hold_level("n0", held=True)
        await asyncio.sleep(0.5)
        for version in (NEW, OLD, NEW):
            for name in cluster.names:
                await roll(cluster, name, version)
            await asyncio.sleep(RAISED_S)
            assert levels(cluster) == {2}
        cluster.hold_level("n1", held=False)
        await until_level(cluster, 3)

    run_upgrade(seed, schedule)


def test_a_node_that_is_too_old_or_too_new_does_not_join(seed: int) -> None:
    async def schedule(cluster: SimulatedCluster) -> None:
        await until_level(cluster, 2)
        cluster.kill("n2")
        cluster.start_node("n2", version=NEWEST)
        await until_refused(cluster, "has feature level 2, and this Tidewal knows 3 to 4")
        for name in ("n0", "n1"):
            await roll(cluster, name)
        await until_level(cluster, 3)
        cluster.kill("n2")
        cluster.start_node("n2", version=OLD)
        await until_refused(cluster, "has feature level 3, and this Tidewal knows 1 to 2: upgrade it")

    run_upgrade(seed, schedule)


@pytest.mark.parametrize("round", range(4))
def test_versions_that_change_under_faults_never_differ_in_what_counts(seed: int, round: int) -> None:
    async def main() -> set[int]:
        cluster = SimulatedCluster(seed + round, ClusterPlan(versions=(OLD, NEW)))
        unruly = UnrulyVersion(cluster)
        reached = {1}
        try:
            await cluster.start()
            driving = asyncio.create_task(FaultDriver(cluster).run(40))
            while not driving.done():
                await unruly.write()
                reached |= levels(cluster)
                await asyncio.sleep(1)
            await driving
            await cluster.until_owned(cluster.lease_s + 2)
            await cluster.finish(2 * cluster.lease_s + 2)
            await asyncio.sleep(1)
            check_cluster(cluster)
        finally:
            await cluster.stop()
        return reached

    assert run_virtual(main()) <= {1, 2, 3}
