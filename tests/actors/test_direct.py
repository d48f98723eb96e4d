"""Nodes that have addresses ask each other over connections, which break: nothing is doubled, and order is kept."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.actors.conftest import PEOPLE
from tests.actors.nodes import TAKEN_OVER_S, Nodes, Traffic
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.direct.connection import PING_S, SILENT_PINGS
from tidewal.runtime.testing.simulation.wal import SimulatedWal

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]

DIRECT = Settings.model_validate({"cluster": {"secret": "a long secret", "listen": "127.0.0.1:0"}})


@pytest.fixture
async def three(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    """Three nodes with all roles and an address."""
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    for name in "abc":
        nodes.settings[name] = DIRECT
        await nodes.start(name)
    yield nodes
    await nodes.stop()


def by_route(nodes: Nodes, route: str) -> float:
    return sum(each.node.node.metrics.value("direct_request_total", route=route) for each in nodes.running.values())


async def test_what_doors_ask_owners_goes_by_connections(three: Nodes) -> None:
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=3)
        await client.insert("people", [{"id": 0, "name": "x", "height": 1.0}])
        await asyncio.sleep(1)
        log = by_route(three, "log")
        for n in range(1, 50):
            await client.insert("people", [{"id": n, "name": "x", "height": 1.0}])
            assert await client.count("people", consistency="strong") == n + 1
        assert by_route(three, "direct") >= 98
        assert by_route(three, "log") - log < 5
    members = three.running["a"].node.node.cluster.state.members.values()
    assert len({member.address for member in members} - {""}) == 3


@pytest.mark.long
async def test_writes_keep_their_order_and_happen_once_while_connections_break_between_any_two_messages(
    three: Nodes,
) -> None:
    breaking = random.Random(three.rng.random())
    traffic = Traffic(three)
    async with traffic.running():
        await asyncio.sleep(1)
        three.network.breaks = lambda: breaking.random() < 0.01
        await asyncio.sleep(30)
        await three.kill("b")
        await asyncio.sleep(TAKEN_OVER_S + 5)
        three.network.breaks = lambda: False
        await asyncio.sleep(1)
    assert three.network.broken > 20
    assert min(by_route(three, "direct"), by_route(three, "log")) > 100
    assert traffic.questions > 20
    await traffic.check()


async def test_an_owner_that_hangs_is_given_up_and_its_channels_are_taken_over(three: Nodes) -> None:
    traffic = Traffic(three)
    async with traffic.running():
        await asyncio.sleep(2)
        hung = three.running.pop("b")
        hung.process.pause()
        await asyncio.sleep(max(TAKEN_OVER_S, (SILENT_PINGS + 2) * PING_S) + 2)
        three.settings["d"] = DIRECT
        await three.start("d")
        hung.process.resume()
        await asyncio.wait_for(hung.ended.wait(), 30)
    assert traffic.longest_s < 2 * TAKEN_OVER_S
    await traffic.check()


async def test_an_address_that_leads_nowhere_costs_nothing_but_the_log(three: Nodes) -> None:
    for address in list(three.network.listeners):
        del three.network.listeners[address]
    three.network.break_all()
    traffic = Traffic(three)
    async with traffic.running():
        await asyncio.sleep(10)
        reported = three.running["a"].node.node.cluster.state.members.values()
        assert any("nothing listens on" in str(member.report.get("unreachable")) for member in reported)
    assert traffic.longest_s < 1
    await traffic.check()


async def test_nodes_with_and_without_addresses_are_one_cluster(home, tmp_path: Path, rng: random.Random) -> None:
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    nodes.settings["a"] = DIRECT
    nodes.settings["b"] = Settings.model_validate({"cluster": {"secret": "a long secret"}})
    for name in "ab":
        await nodes.start(name)
    traffic = Traffic(nodes)
    async with traffic.running():
        await asyncio.sleep(10)
    await traffic.check()
    await nodes.stop()
