"""What attacks on channels that move between nodes have found."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.actors.conftest import PEOPLE, error_of
from tests.actors.nodes import Nodes
from tests.actors.test_nodes import three  # noqa: F401 -- a fixture
from tidewal.actors.placement_client import PlacementClient
from tidewal.actors.streamingnode.granted_channels import GrantedChannels
from tidewal.runtime.errors import Unavailable

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]


async def test_what_is_unflushed_is_counted_by_a_node_that_gets_a_channel_back_at_once(
    three: Nodes,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    propose = GrantedChannels.propose

    async def learn_late(self: GrantedChannels, kind: str, channels: dict[str, Any]) -> None:
        await propose(self, kind, channels)
        if kind == "released":
            await asyncio.sleep(1)

    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=1)
        [channel] = {name for name in three.owners() if name.endswith("dml_0")}
        monkeypatch.setattr(GrantedChannels, "propose", learn_late)
        first = three.owners()[channel]
        other = min(set("abc") - {first})
        for node in (other, first):
            await PlacementClient(client).move(channel, node)
        await client.insert("people", [{"id": n, "name": "x", "height": 1.0} for n in range(10)])
        unflushed = three.running[first].role("streamingnode")._unflushed
        written = {name: shard.bytes for name, shard in unflushed._shards.items()}
        assert sum(written.values()) > 0
        await asyncio.sleep(2)
        assert {name: shard.bytes for name, shard in unflushed._shards.items()} == written


async def test_a_node_that_has_lost_a_channel_announces_no_collection_there_later(three: Nodes) -> None:  # noqa: F811
    """The channel may come back after the collection was dropped: its vchannels would take rows again."""
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=1)
        collection = await client.describe_collection("people")
        [channel] = {name for name in three.owners() if name.endswith("dml_0")}
        three.stall([channel])
        dropping = asyncio.ensure_future(client.drop_collection("people"))
        await asyncio.sleep(1)
        params = {"what": "drop", "channels": [channel], "collection": collection}
        for name in set("abc") - {three.owners()[channel]}:
            node = three.running[name].role("streamingnode")
            asked = node._announce_collection(SimpleNamespace(params=params))
            assert isinstance(await error_of(asyncio.wait_for(asked, 5)), Unavailable)
        three.go_on([channel])
        await dropping


async def test_a_move_back_to_a_node_that_gives_the_channel_up_is_not_said_to_be_done(three: Nodes) -> None:  # noqa: F811
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=1)
        cluster = PlacementClient(client)
        [channel] = {name for name in three.owners() if name.endswith("dml_0")}
        first = three.owners()[channel]
        other = min(set("abc") - {first})
        three.stall([channel])
        written = asyncio.ensure_future(client.insert("people", [{"id": 1, "name": "x", "height": 1.0}], deadline_s=60))
        await asyncio.sleep(0.5)
        moved = asyncio.ensure_future(cluster.move(channel, other))
        await asyncio.sleep(0.5)
        assert f"is moving to {other}" in str(await error_of(cluster.move(channel, first)))
        three.go_on([channel])
        await moved
        await written
        assert three.owners()[channel] == other
