"""What fails in one pchannel stays there: the others are written and read meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from tests.actors.nodes import role_of
from tidewal.actors.client import Client
from tidewal.runtime.errors import Unavailable
from tidewal.runtime.log.names import pchannel_of
from tidewal.runtime.rows.schema import CollectionSchema
from tidewal.runtime.testing.faults import FaultPlan, Rates

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])

POINT = {"id": 1, "at": [0.0] * 4}


@pytest.mark.parametrize("rates", [Rates(unknown=1.0), Rates(lost=1.0)], ids=["written", "lost"])
async def test_a_channel_that_the_log_does_not_answer_for_holds_up_no_other(home, rates) -> None:
    home.faults = plan = FaultPlan(1, channels="dml_0")
    async with home.node() as node, node.client() as client:
        people = await client.create_collection(home.PEOPLE, shards=1)
        points = await client.create_collection(home.POINTS, shards=1)
        [broken], [healthy] = ({pchannel_of(name) for name in each.vchannels} for each in (people, points))
        assert "dml_0" in broken
        channels = role_of(node, "streamingnode").catalog.catalog.channels
        before = channels[broken].term, channels[healthy].term
        plan.rates = rates
        writing = asyncio.create_task(client.insert("people", home.people(1)))
        for number in range(50):
            written = await asyncio.wait_for(client.insert("points", [{**POINT, "id": number}]), 0.2)
            assert await asyncio.wait_for(client.count("points", consistency="strong"), 0.5) == number + 1
            await asyncio.wait_for(client.cut("points"), 0.5)
            await home.elapse(0.5)
        assert await asyncio.wait_for(client.flush("points"), 5) > written.ts
        assert not writing.done()
        plan.rates = Rates()
        assert (await asyncio.wait_for(writing, 10)).rows == 1
        assert await client.count("people", consistency="strong") == 1
        assert channels[healthy].term == before[1]
        assert channels[broken].term > before[0] + 5, "it was tried again and again"
        assert node.node.clock.ahead_ms < 100, "terms that failed carry no clock ahead"


async def test_questions_of_other_processes_wait_for_no_channel_but_their_own(home) -> None:
    home.faults = plan = FaultPlan(1, channels="dml_0")
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE, shards=1)
        points = await client.create_collection(home.POINTS, shards=1)
        await client.insert("points", [POINT])
        plan.rates = Rates(lost=1.0)
        writing = asyncio.create_task(client.insert("people", home.people(1)))
        await home.elapse(1)
        wal = await home.wal()
        async with Client(wal, prefix="by-dev", name="another") as other:
            channels, to = [pchannel_of(name) for name in points.vchannels], {"to": node.node.incarnation}
            synced = await other._rpc.call("streamingnode", "sync", {"channels": channels, **to}, deadline_s=1)
            assert synced.values["channels"].keys() == set(channels)
            asked = {"id": points.id, "channels": channels, **to}
            await other._rpc.call("streamingnode", "flush", asked, deadline_s=5)
            with pytest.raises(Unavailable):
                await other._rpc.call("streamingnode", "sync", {"channels": ["unknown"], **to}, deadline_s=1)
        await wal.close()
        assert not writing.done()
        plan.rates = Rates()
        await asyncio.wait_for(writing, 10)


async def test_a_collection_is_made_and_dropped_while_another_channel_is_away(home) -> None:
    home.faults = plan = FaultPlan(1, channels="dml_0")
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE, shards=1)
        plan.rates = Rates(lost=1.0)
        writing = asyncio.create_task(client.insert("people", home.people(1)))
        await home.elapse(1)
        await asyncio.wait_for(client.create_collection(home.POINTS, shards=1), 1)
        await client.insert("points", [POINT])
        await asyncio.wait_for(client.drop_collection("points"), 5)
        assert not writing.done()
        plan.rates = Rates()
        await asyncio.wait_for(writing, 10)


async def test_a_drop_that_waits_for_its_channel_holds_up_no_other_collection(home) -> None:
    home.faults = plan = FaultPlan(1, channels="dml_0")
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE, shards=1)
        plan.rates = Rates(lost=1.0)
        dropping = asyncio.create_task(client.drop_collection("people", deadline_s=600))
        await home.elapse(1)
        await asyncio.wait_for(client.create_collection(home.POINTS, shards=1), 1)
        await client.insert("points", [POINT])
        await asyncio.wait_for(client.drop_collection("points"), 5)
        assert not dropping.done()
        plan.rates = Rates()
        await asyncio.wait_for(client.create_collection(home.PEOPLE, shards=1), 60)  # behind the drop of that name
        await asyncio.gather(dropping, return_exceptions=True)
        assert await client.list_collections() == ["people"]


async def test_collections_that_are_made_at_once_have_ids_of_their_own(home) -> None:
    async with home.node() as node, node.client() as client:
        schemas = [CollectionSchema(f"c{number}", home.PEOPLE.fields, home.PEOPLE.primary_key) for number in range(9)]
        made = await asyncio.gather(*(client.create_collection(schema) for schema in schemas))
        assert len({collection.id for collection in made}) == 9


async def test_a_node_that_lacks_a_channel_says_so_in_its_lag(home) -> None:
    home.faults = plan = FaultPlan(1, channels="dml_0")
    async with home.node() as node, node.client() as client:
        people = await client.create_collection(home.PEOPLE, shards=1)
        await client.create_collection(home.POINTS, shards=1)
        await home.elapse(1)
        plan.rates = Rates(lost=1.0)
        writing = asyncio.create_task(client.insert("people", home.people(1)))
        await home.elapse(10)
        [broken] = {pchannel_of(name) for name in people.vchannels}
        assert node.node.metrics.value("proxy_tt_lag_ms", channel_name=broken) > 8_000
        assert not node.health().ok
        plan.rates = Rates()
        await writing
        await home.elapse(1)
        assert node.health().ok


async def test_a_channel_that_is_away_for_hours_is_back_when_the_log_answers(home) -> None:
    home.faults = plan = FaultPlan(1, channels="dml_0")
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE, shards=1)
        [broken] = {pchannel_of(name) for name in (await client.describe_collection("people")).vchannels}
        plan.rates = Rates(lost=1.0)
        writing = asyncio.create_task(client.insert("people", home.people(1)))
        await home.elapse(1)
        role_of(node, "streamingnode")._grants._failures[broken] = 5_000  # one each 3 s
        await home.elapse(10)
        plan.rates = Rates()
        assert (await asyncio.wait_for(writing, 10)).rows == 1
        assert {status.name: status.restarts for status in node.system.status()}["streamingnode"] == 0


async def test_what_changes_before_a_wait_has_begun_ends_it(home) -> None:
    """As when a channel is released while the leader's tasks that wait for changes are not running yet."""
    async with home.node() as node:
        catalog, local = role_of(node, "mixcoord").catalog, node.node.local_owner
        waits = catalog.changed(), local.changed()
        await catalog.append({"kind": "grant", "node": "another", "channels": {"x": (1, 0)}, "limit": 1})
        local.open({"x": 1})
        for wait in waits:
            await asyncio.wait_for(wait, 0.1)
