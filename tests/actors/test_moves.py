"""Channels move from node to node under writers, readers and operators."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.actors.conftest import PEOPLE, error_of
from tests.actors.nodes import Nodes, Traffic
from tests.actors.test_nodes import three  # noqa: F401 -- a fixture
from tidewal.actors.placement_client import PlacementClient
from tidewal.runtime.errors import InvalidRequest

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]

MOVED_S = 0.3
SETTLED_S = 5.0  # a lease, and until all have reported


async def until(happened: Callable[[], bool], bound_s: float = 10) -> None:
    """Wait for what the nodes do by themselves."""
    async with asyncio.timeout(bound_s):
        while not happened():  # noqa: ASYNC110 -- the catalogs are those of other processes
            await asyncio.sleep(0.1)


async def test_channels_move_under_traffic_and_nothing_is_lost_or_doubled(three: Nodes) -> None:  # noqa: F811
    traffic = Traffic(three)
    async with traffic.running(), three.client() as client:
        cluster = PlacementClient(client)
        channels = sorted(three.owners())
        await asyncio.sleep(1)
        for _ in range(12):
            channel, node = three.rng.choice(channels), three.rng.choice("abc")
            traffic.longest_s = 0.0
            moved = await cluster.move(channel, node)
            assert moved == {"channel": channel, "node": node}
            assert three.owners()[channel] == node
            await asyncio.sleep(0.5)
            assert traffic.longest_s < MOVED_S
    await traffic.check()


async def test_a_batch_of_two_channels_is_written_once_whatever_moves_and_dies(three: Nodes) -> None:  # noqa: F811
    """Its parts have one owner, then two: each channel knows for itself that it has the batch."""
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=3)
        cluster = PlacementClient(client)
        channels = sorted(three.owners())
        written = 0

        async def write() -> None:
            nonlocal written
            for number in range(40):
                rows = [{"id": 100 * number + n, "name": "x", "height": 1.0} for n in range(30)]
                await client.insert("people", rows, deadline_s=60)
                written += len(rows)

        async def move() -> None:
            for node in "abacbc":
                for channel in channels:
                    if node in three.running:
                        await cluster.move(channel, node)
                if node == "c":
                    await three.kill(three.owners()[channels[0]])
                    await asyncio.sleep(6)

        await asyncio.gather(write(), move())
        assert await client.count("people", consistency="strong") == written
        stats = await client.stats("people", consistency="strong")
        assert stats.versions["insert"] == written


@pytest.mark.long
async def test_a_node_that_joins_gets_its_part(three: Nodes) -> None:  # noqa: F811
    traffic = Traffic(three)
    async with traffic.running():
        async with three.client() as client:
            for number in range(8):
                await client.create_collection(replace(PEOPLE, name=f"people{number}"), shards=2)
        await asyncio.sleep(SETTLED_S)
        await three.start("d")
        await until(lambda: "d" in three.owners().values(), 20)
        await asyncio.sleep(10)
        counts = Counter(three.owners().values())
        assert max(counts.values()) - min(counts.values()) <= 2, counts
    await traffic.check()


@pytest.mark.long
async def test_a_node_is_drained_and_gets_nothing_until_it_is_uncordoned(three: Nodes) -> None:  # noqa: F811
    traffic = Traffic(three)
    async with traffic.running(), three.client() as client:
        cluster = PlacementClient(client)
        name = three.owners()[sorted(three.owners())[0]]
        assert await cluster.drain(name) == name
        assert name not in three.owners().values()
        await three.end(name)
        await three.start(name)
        await client.create_collection(replace(PEOPLE, name="later"), shards=6)
        await asyncio.sleep(SETTLED_S)
        assert name not in three.owners().values()
        assert (await cluster.placement())["wishes"]["nodes"] == {name: "drained"}
        await cluster.uncordon(name)
        await until(lambda: name in three.owners().values(), 20)
    await traffic.check()


async def test_a_pin_holds_and_another_node_has_the_channel_while_that_one_is_away(three: Nodes) -> None:  # noqa: F811
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=3)
        cluster = PlacementClient(client)
        channel = min(three.owners())
        for node in "ab":
            await cluster.pin(channel, node)
            await until(lambda node=node: three.owners()[channel] == node)
        error = await error_of(cluster.move(channel, "c"))
        assert isinstance(error, InvalidRequest)
        assert "is pinned to b" in str(error)
        await three.kill("b")
        await client.insert("people", [{"id": n, "name": "x", "height": 1.0} for n in range(50)], deadline_s=30)
        assert three.owners()[channel] != "b"
        await three.start("b")
        await until(lambda: three.owners()[channel] == "b")


async def test_what_cannot_be_is_refused_with_what_to_do(three: Nodes) -> None:  # noqa: F811
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=3)
        cluster, channel = PlacementClient(client), min(three.owners())
        for asked, said in (
            (cluster.move(channel, "aa"), "the cluster has no member 'aa' that offers streamingnode"),
            (cluster.move("nothing", "a"), "the cluster has no pchannel 'nothing'"),
            (cluster.drain("zz"), "no member 'zz'"),
            (cluster.uncordon("zz"), "no member 'zz'"),
            (cluster.pin("nothing", "a"), "no pchannel"),
        ):
            error = await error_of(asked)
            assert isinstance(error, InvalidRequest)
            assert said in str(error)
        await cluster.cordon("a")
        assert "a is cordoned" in str(await error_of(cluster.move(channel, "a")))
        await cluster.drain("b")
        assert "no other node could own" in str(await error_of(cluster.drain("c")))


async def test_members_report_what_is_written_and_their_clocks(three: Nodes) -> None:  # noqa: F811
    traffic = Traffic(three)
    late = await three.start("d", ahead_ms=-600_000)
    async with traffic.running():
        await asyncio.sleep(SETTLED_S)
        members = {each.name: each.report for each in late.node.node.cluster.state.members.values()}
    rates = {channel for report in members.values() for channel, rate in report["rates"].items() if rate > 0}
    assert rates <= set(three.owners())
    assert len(rates) >= 3
    apart_ms = members["a"]["clock_ms"] - members["d"]["clock_ms"]
    assert abs(apart_ms - 600_000) < 1500  # each has renewed within a second
