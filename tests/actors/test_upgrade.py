"""Whole nodes of two versions in one cluster, under writers and readers."""

from __future__ import annotations

import asyncio

import msgpack
import pytest

from tests.actors.conftest import error_of
from tests.actors.nodes import Nodes, Traffic
from tests.actors.test_nodes import three  # noqa: F401 -- a fixture
from tests.cluster.versions import NEW, NEWEST
from tidewal.runtime.cluster.version import THIS_VERSION, TidewalVersion
from tidewal.runtime.errors import FormatTooNew, FormatTooOld, InvalidRequest
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.testing.memory import MemoryWal

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]

RAISED_S = 10.0  # a lease that the leader has led, at the most after another one died


async def replace(nodes: Nodes, name: str, version: TidewalVersion) -> None:
    """Stop a node, and start it with another version."""
    await nodes.end(name)
    nodes.versions[name] = version
    await nodes.start(name)


async def refusal_of(nodes: Nodes, version: TidewalVersion) -> BaseException | None:
    """The error with which a node of this version does not start."""
    nodes.versions["d"] = version
    refused = await nodes.start("d", wait=False)
    await refused.ended.wait()
    del nodes.running["d"]
    assert refused.started is None
    return refused.error


def levels(nodes: Nodes) -> set[int]:
    """Those of the cluster, as each node has read it, and of the catalog."""
    catalogs = {each.role("mixcoord").catalog.fold.level for each in nodes.running.values()}
    return catalogs | {each.node.node.cluster.level for each in nodes.running.values()}


async def until_level(nodes: Nodes, level: int) -> None:
    async with asyncio.timeout(RAISED_S):
        while levels(nodes) != {level}:  # noqa: ASYNC110 -- the states are those of several processes
            await asyncio.sleep(0.1)


async def write_what_nobody_knows(nodes: Nodes) -> None:
    """Into each channel of the log, but replies: garbage, and what a later version might write."""
    wal = MemoryWal(nodes.log)
    later = bytearray(encode(Record(RecordType.ROWS, ts=1)))
    later[2] += 1  # the version of records
    kinds = [{"v": level, "kind": kind} for level in (1, 2, 3) for kind in ("label", "greet", "unheard of")]
    bodies = [msgpack.packb({"label": "early", "greeting": "early", **kind}) for kind in kinds]
    for channel in [name for name in nodes.log.channels if "-replies-" not in name]:
        for payload in (b"garbage", bytes(later)):
            await wal.append(channel, payload)
        for number, body in enumerate(bodies):
            for type in (RecordType.CATALOG, RecordType.CLUSTER, RecordType.REQUEST, RecordType.FLUSHED):
                await wal.append(channel, encode(Record(type, ts=1, producer="later", pseq=number, body=body)))


async def test_a_cluster_is_upgraded_node_by_node_under_traffic(three: Nodes) -> None:  # noqa: F811
    traffic = Traffic(three)
    async with traffic.running():
        for name in "abc":
            assert levels(three) == {2}
            await write_what_nobody_knows(three)
            await asyncio.sleep(2)
            assert all(each.error is None for each in three.running.values())
            restarts = [status.restarts for each in three.running.values() for status in each.node.system.status()]
            assert set(restarts) == {0}
            await replace(three, name, NEW)
            early = await error_of(three.running[name].node.node.cluster.log.propose({"kind": "greet"}))
            assert isinstance(early, InvalidRequest), early
        await until_level(three, 3)
        catalog = three.running[three.leader()].role("mixcoord").catalog
        await catalog.append({"kind": "label", "label": "blue"})
        await three.running["a"].node.node.cluster.log.propose({"kind": "greet", "greeting": "hello"})
        await asyncio.sleep(1)
        for each in three.running.values():
            assert each.node.node.cluster.state.greetings == ["hello"]
            assert each.role("querynode").catalog.catalog.labels == ["blue"]
    await traffic.check()


async def test_a_node_that_does_not_know_the_level_says_so_and_does_not_join(three: Nodes) -> None:  # noqa: F811
    error = await refusal_of(three, NEWEST)
    assert isinstance(error, FormatTooOld)
    assert "has feature level 2, and this Tidewal knows 3 to 4" in error.message
    for name in "abc":
        await replace(three, name, NEW)
    await until_level(three, 3)
    error = await refusal_of(three, THIS_VERSION)
    assert isinstance(error, FormatTooNew)
    assert "has feature level 3, and this Tidewal knows 1 to 2: upgrade it" in error.message
    for name in "ab":
        await replace(three, name, NEWEST)
        assert levels(three) == {3}
    members = three.running["a"].node.node.cluster.state.members.values()
    assert {(each.version, each.levels) for each in members} == {(each.number, each.levels) for each in (NEW, NEWEST)}


@pytest.mark.long
async def test_while_the_level_is_held_a_node_goes_back_to_the_version_before(three: Nodes) -> None:  # noqa: F811
    cluster = three.running["a"].node.node.cluster
    await cluster.log.propose({"kind": "hold", "held": True})
    traffic = Traffic(three)
    async with traffic.running():
        for version in (NEW, THIS_VERSION):
            for name in "abc":
                await replace(three, name, version)
            await asyncio.sleep(RAISED_S)
            assert levels(three) == {2}
    await traffic.check()


async def test_a_later_client_may_send_fields_and_call_methods_that_a_node_does_not_know(three: Nodes) -> None:  # noqa: F811
    async with three.client() as client:
        await client._rpc.call("mixcoord", "balance", {"on": False, "later": {"a": 1}})
        unknown = await error_of(client._rpc.call("mixcoord", "later", {}))
        assert isinstance(unknown, InvalidRequest)
        assert "has no method 'later'" in unknown.message
    assert all(each.error is None for each in three.running.values())
