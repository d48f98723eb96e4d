"""`/healthz` means progress."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])


async def test_a_node_is_well_while_its_roles_run_and_time_goes_on(home) -> None:
    async with home.node() as node, node.client() as client:
        assert node.health().ok
        await client.create_collection(home.PEOPLE)
        await home.elapse(10)
        health = node.health()
        assert health.ok
        assert health.details["roles"] == dict.fromkeys(["mixcoord", "proxy", "datanode", "querynode"], "running")
        assert health.details["watermark_age_s"] <= 1.0


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
