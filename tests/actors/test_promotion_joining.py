"""A node that joins the cluster of a log of brokers while a replica of it is promoted writes nothing that is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.actors.conftest import PEOPLE, in_place, people
from tests.actors.shared_logs import NEW, OLD, CommandOpener, SharedNodes
from tidewal.actors.cluster_member import ClusterMember
from tidewal.actors.datanode.moved_tables import MovedTables
from tidewal.runtime.clock import HybridClock, SystemClock
from tidewal.runtime.cluster.cluster_log import ClusterLog
from tidewal.runtime.cluster.state import NodeMember
from tidewal.runtime.errors import Moved
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.replication_state import ReplicationPhase, replication_state
from tidewal.runtime.migration.node_log import NodeLog
from tidewal.runtime.replication import promotion
from tidewal.runtime.replication.promotion import promote
from tidewal.runtime.replication.replicator import Replicator
from tidewal.runtime.tables.table_store import open_tables
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])


@pytest.fixture
async def nodes(home: Any, tmp_path: Path, rng: random.Random) -> AsyncIterator[SharedNodes]:
    nodes = SharedNodes(tmp_path, rng)
    yield nodes
    await nodes.stop()


class LateNode:
    """A node that has opened the log, and becomes a member once `go` is set."""

    def __init__(self, nodes: SharedNodes, monkeypatch: pytest.MonkeyPatch) -> None:
        self._nodes = nodes
        self.opened, self.go, self.joined = asyncio.Event(), asyncio.Event(), asyncio.Event()
        opening = ClusterMember.open

        async def open_late(member: ClusterMember, *args: Any, **options: Any) -> None:
            if member.incarnation.startswith("late"):
                self.opened.set()
                await self.go.wait()
            await opening(member, *args, **options)
            if member.incarnation.startswith("late"):
                self.joined.set()

        monkeypatch.setattr(ClusterMember, "open", open_late)

    async def start(self) -> Any:
        """A log with a row, whose node has left, and this one, which opens it."""
        await self._nodes.start("a")
        async with self._nodes.client() as client:
            await client.create_collection(PEOPLE)
            await client.insert("people", people(1))
        await self._nodes.end("a")
        late = await self._nodes.start("late", wait=False)
        await asyncio.wait_for(self.opened.wait(), 60)
        return late


async def promoted(nodes: SharedNodes) -> None:
    opener = CommandOpener(nodes)
    old, new = await opener.open_alone(OLD), await opener.open_alone(NEW)
    clock = nodes.loop.clock
    if (await replication_state(new)).phase is ReplicationPhase.NONE:
        async with Replicator(old, new, OLD, clock=clock).claimed():
            pass
    await promote(old, new, OLD, NEW, tables=nodes.tables_of_nodes(), clock=clock)
    assert (await replication_state(new)).phase is ReplicationPhase.PROMOTED


async def test_a_node_that_joins_behind_the_promotion_ends_with_moved(
    nodes: SharedNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log was in use when the node opened it: what it took would be in no log that is in use."""
    this = LateNode(nodes, monkeypatch)
    late = await this.start()
    await promoted(nodes)
    this.go.set()
    await asyncio.wait_for(late.ended.wait(), 60)
    assert isinstance(late.error, Moved), late.error
    assert late.error.url == NEW


async def test_a_node_that_joins_before_the_fence_and_is_killed_is_evicted(
    nodes: SharedNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else can evict it: no node opens the source any more, nor the replica yet."""
    this = LateNode(nodes, monkeypatch)
    await this.start()
    check = promotion.check_node

    async def check_and_let_in(*args: Any) -> None:
        await check(*args)
        this.go.set()
        await asyncio.wait_for(this.joined.wait(), 60)
        await nodes.kill("late")

    monkeypatch.setattr(promotion, "check_node", check_and_let_in)
    await promoted(nodes)
    found = await NodeLog.read_states(await nodes.opener.open_alone(NEW))
    assert found is not None
    assert found.cluster is not None
    assert not found.cluster.members
    assert any(each.startswith("late") for each in found.cluster.gone)


async def test_the_log_of_a_node_that_ended_as_it_began_is_promoted(home: Any) -> None:
    """It has become a member, and had made none of its channels."""
    clock = HybridClock(SystemClock())
    old, new = MemoryWal(MemoryLog()), MemoryWal(MemoryLog())
    log = ClusterLog(old, Names("by-dev"), clock, "test")
    await log.open()
    await log.propose(
        {"kind": "register", **NodeMember("a", "a", ("proxy",), 1_000, number=1).to_wire(), "replaces": ""}
    )
    await log.close()
    async with Replicator(old, new, OLD).claimed():
        pass
    await promote(old, new, OLD, NEW, tables=MovedTables(open_tables(home.tables), in_place))
    found = await NodeLog.read_states(new)
    assert found is not None
    assert found.cluster is not None
    assert "a" in found.cluster.members
