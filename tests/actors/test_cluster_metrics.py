"""What coordinators show of the cluster: who belongs to it, who is silent, who owns channels, which have no owner."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.actors.conftest import PEOPLE
from tests.actors.nodes import LEASE_S, TAKEN_OVER_S, NodeProcess, Nodes
from tidewal.actors.mixcoord.cluster_metrics import EVERY_S
from tidewal.runtime.cluster.roles import DATA_NODE, ROLE_NAMES
from tidewal.runtime.cluster.version import THIS_VERSION
from tidewal.runtime.testing.simulation.wal import SimulatedWal

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_factories=["memory"])]

OWNED, WITHOUT_OWNER = "mixcoord_channel_num", "mixcoord_channel_without_owner_seconds"
SHOWN_S = 2 * EVERY_S


@pytest.fixture
async def nodes(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    """Nobody yet, on a log as brokers have it."""
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    yield nodes
    await nodes.stop()


async def two_nodes(nodes: Nodes, roles: Sequence[str] = ROLE_NAMES) -> NodeProcess:
    """Two nodes, of which the first one owns all channels of a collection; returns the second one."""
    await nodes.start("first")
    async with nodes.client() as client:
        await client.create_collection(PEOPLE)
    second = await nodes.start("second", roles)
    await asyncio.sleep(SHOWN_S)
    return second


def shown(node: NodeProcess, name: str) -> dict[str, float]:
    return {label: value for (label,), value in node.node.node.metrics.series(name).items()}


async def test_members_are_shown_by_role_and_channels_by_owner_on_each_coordinator(nodes: Nodes) -> None:
    second = await two_nodes(nodes)
    for node in (nodes.running["first"], second):
        assert shown(node, "mixcoord_member_num") == dict.fromkeys(ROLE_NAMES, 2)
        channels = second.role("mixcoord").catalog.catalog.channels
        assert sum(shown(node, OWNED).values()) == len(channels)
        assert set(shown(node, OWNED)) == {"first", "second"}
        assert shown(node, WITHOUT_OWNER) == dict.fromkeys(channels, 0.0)
        assert shown(node, "mixcoord_member_version_num") == {THIS_VERSION.number: 2}
        assert node.node.node.metrics.value("mixcoord_feature_level") == THIS_VERSION.levels.highest
    assert set(shown(second, "mixcoord_lease_age_seconds")) == {"first"}
    assert shown(second, "mixcoord_lease_age_seconds")["first"] < LEASE_S


async def test_a_member_that_is_killed_grows_silent_and_is_evicted(nodes: Nodes) -> None:
    second = await two_nodes(nodes)
    await nodes.kill("first")
    await asyncio.sleep(LEASE_S - SHOWN_S / 2)
    assert shown(second, "mixcoord_lease_age_seconds")["first"] > SHOWN_S / 2
    await asyncio.sleep(TAKEN_OVER_S + SHOWN_S)
    assert second.node.node.metrics.value("mixcoord_eviction_total") == 1
    assert shown(second, "mixcoord_member_num") == dict.fromkeys(ROLE_NAMES, 1)
    assert shown(second, "mixcoord_lease_age_seconds") == {}
    assert set(shown(second, OWNED)) == {"second"}


async def test_channels_that_nobody_can_own_are_shown_with_the_time_since_then(nodes: Nodes) -> None:
    second = await two_nodes(nodes, [role for role in ROLE_NAMES if role != "streamingnode"])
    await nodes.kill("first")
    await asyncio.sleep(TAKEN_OVER_S + 10)
    without_s = shown(second, WITHOUT_OWNER)
    assert without_s.keys() == second.role("mixcoord").catalog.catalog.channels.keys()
    assert all(10 - SHOWN_S < each < 10 + SHOWN_S for each in without_s.values())
    assert shown(second, OWNED) == {}
    await nodes.start("third")
    await asyncio.sleep(SHOWN_S)
    assert not any(shown(second, WITHOUT_OWNER).values())
    assert shown(second, OWNED) == {"third": len(without_s)}


async def test_a_role_that_no_member_offers_is_shown_as_none(nodes: Nodes) -> None:
    await nodes.start("first", [role for role in ROLE_NAMES if role != "querynode"])
    await asyncio.sleep(SHOWN_S)
    assert shown(nodes.running["first"], "mixcoord_member_num")["querynode"] == 0


async def test_a_datanode_shows_nothing_of_collections_that_another_one_has_by_now(nodes: Nodes) -> None:
    first = await nodes.start("first")
    async with nodes.client() as client:
        for number in range(6):
            await client.create_collection(replace(PEOPLE, name=f"people{number}"))
    second = await nodes.start("second", (DATA_NODE,))
    await asyncio.sleep(TAKEN_OVER_S)
    series = {
        "datanode_consume_tt_lag_ms": 12,
        "datanode_channel_checkpoint_unix_seconds": 12,
        "datanode_fg_buffer_size": 6,
    }
    for name, count in series.items():
        shares = [set(shown(node, name)) for node in (first, second)]
        assert all(shares), name
        assert not set.intersection(*shares), name
        assert len(set.union(*shares)) == count, name
