"""How far back in the log a DataNode begins, for collections that nobody writes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.actors.conftest import PEOPLE, people
from tests.actors.nodes import Nodes
from tidewal.runtime.clock import physical_ms
from tidewal.runtime.testing.simulation.wal import SimulatedWal

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]


async def test_an_idle_collection_is_stored_although_no_datanode_lives_for_long(
    home, tmp_path: Path, rng: random.Random
) -> None:
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    await nodes.start("rest", ("mixcoord", "streamingnode", "proxy", "querynode"))
    async with nodes.client() as client:
        await nodes.start("data", ("datanode",))
        for name in ("idle", "written"):
            await client.create_collection(replace(PEOPLE, name=name))
        await client.insert("idle", people(1))
        await client.flush("idle")
        for life in range(6):
            for number in range(10):
                await client.insert("written", people(100 * life + number))
                await home.elapse(10)
            pipelines = nodes.running["data"].role("datanode")._pipelines.values()
            [idle] = [each for each in pipelines if each.collection.name == "idle"]
            behind_ms = physical_ms(nodes.running["data"].node.node.clock.now()) - physical_ms(idle._stored)
            assert behind_ms < 200_000
            await nodes.kill("data")
            await nodes.start("data", ("datanode",))
    await nodes.stop()
