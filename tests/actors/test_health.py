"""`/healthz` means progress, `status` says what is behind, and the log of the process what happened to the node."""

from __future__ import annotations

import logging

import pytest

from tidewal.actors.standalone import Standalone
from tidewal.runtime.cluster.roles import ROLE_NAMES
from tidewal.runtime.metrics.server import Health

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])


async def test_a_node_is_well_while_its_roles_run_and_time_goes_on(home) -> None:
    async with home.node() as node, node.client() as client:
        assert node.health().ok
        await client.create_collection(home.PEOPLE)
        await home.elapse(10)
        health = node.health()
        assert health.ok
        assert health.details["roles"] == dict.fromkeys(ROLE_NAMES, "running")
        assert health.details["watermark_age_s"] <= 1.0


async def test_a_node_that_is_starting_or_has_drained_is_not_well(home, monkeypatch) -> None:
    starting = []
    ready = Standalone._ready

    async def look(node: Standalone) -> bool:
        starting.append(node.health())
        return await ready(node)

    monkeypatch.setattr(Standalone, "_ready", look)
    async with home.node() as node:
        assert node.health().ok
    assert starting == [Health(False, {"error": "the node is starting"})]
    assert node.health() == Health(False, {"error": "the node is draining"})


async def test_a_node_whose_watermark_stands_still_is_not_well(home) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await home.elapse(1)
        node.system.heartbeat.stop()
        await home.elapse(4)
        assert node.health().ok
        await home.elapse(2)
        assert not node.health().ok
        assert node.health().details["watermark_age_s"] > 5


async def test_tables_are_behind_only_while_something_waits_for_them(home) -> None:
    async def lag_s() -> float:
        (people,) = (await client.status())["datanode"]["collections"]
        assert people["table_lag_s"] == pytest.approx(
            node.node.metrics.value("streamingnode_unflushed_age_seconds", collection_name="people"), abs=0.001
        )
        return people["table_lag_s"]

    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        for _ in range(2):
            assert await lag_s() == 0
            await client.insert("people", home.people(1))
            await home.elapse(2)
            assert await lag_s() == pytest.approx(2, abs=0.1)
            await client.flush("people")
            await home.elapse(60)


async def test_the_log_lines_of_a_nodes_life(home, caplog) -> None:
    caplog.set_level(logging.INFO, "tidewal")
    async with home.node(name="first") as node:
        assert f"{node.node.incarnation} leads the cluster" in caplog.text
        assert "node first is ready" in caplog.text
        assert "draining" not in caplog.text
    assert "node first is draining" in caplog.text
    assert "node first has drained in 0.0 s" in caplog.text
    async with home.node(name="second") as node:
        assert f"{node.node.incarnation} leads the cluster" in caplog.text
