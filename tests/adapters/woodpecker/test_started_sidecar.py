"""A sidecar that Tidewal starts, and a node on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from tests.brokers.processes import BrokerFailed
from tests.brokers.woodpecker import Etcd, Sidecar
from tests.brokers.woodpecker_fixtures import require_program
from tidewal.actors.standalone import Standalone
from tidewal.adapters.woodpecker import open_wal
from tidewal.adapters.woodpecker.settings import WoodpeckerSettings, WoodpeckerStorageSettings
from tidewal.runtime.errors import ConfigError, Unavailable
from tidewal.runtime.log.wal import ChannelPolicy
from tidewal.runtime.rows.schema import CollectionSchema, Field

pytestmark = pytest.mark.broker

SCHEMA = CollectionSchema("c", (Field("id", "int64"), Field("x", "int64")), "id")


def settings_of(binary: str | Path, endpoint: str, directory: Path) -> WoodpeckerSettings:
    """Settings for local storage and a program, in `directory`."""
    config = directory / "woodpecker.yaml"
    config.write_text(json.dumps({"etcd": {"endpoints": [endpoint]}}))
    sidecar = {"directory": str(directory / "log"), "binary": str(binary), "config": str(config)}
    storage = {"type": "local", "root_path": str(directory / "segments")}
    return WoodpeckerSettings.model_validate(
        {"meta": {"prefix": uuid4().hex}, "storage": storage, "sidecar": sidecar}, by_name=True
    )


@pytest.fixture
def settings(etcd: Etcd, tmp_path: Path) -> WoodpeckerSettings:
    return settings_of(require_program("sidecar"), etcd.endpoint, tmp_path)


async def test_a_node_writes_reads_and_comes_back(settings: WoodpeckerSettings, tmp_path: Path) -> None:
    for life in range(2):
        async with (
            asyncio.timeout(120),
            await open_wal(settings.url(), settings=settings) as wal,
            Standalone(wal, tmp_path / "tables") as node,
            node.client("test") as client,
        ):
            if not life:
                await client.create_collection(SCHEMA)
            await client.apply("c", [{"id": 100 * life + place, "x": life, "_op": "insert"} for place in range(100)])
            found = (await client.query("c", "x >= 0", consistency="strong")).table
            assert found.num_rows == 100 * (life + 1)


async def test_it_ends_with_the_log_and_others_start_it_anew(settings: WoodpeckerSettings) -> None:
    async with await open_wal(settings.url(), settings=settings) as starter:
        await starter.create_channel("a", ChannelPolicy())
        other = await open_wal(settings.url(), settings=settings)
        id = await other.append("a", b"x")
    async with other:
        assert await other.latest_id("a") == id
    with pytest.raises(Unavailable, match=r"woodpecker\.sidecar\.binary"):
        await open_wal(settings.url(), settings=settings, read_only=True)


async def test_what_keeps_it_from_starting_is_told(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "none", "127.0.0.1:1", tmp_path)
    with pytest.raises(ConfigError, match="cannot be started"):
        await open_wal(settings.url(), settings=settings)
    program = tmp_path / "failing"
    program.write_text("#!/bin/sh\necho no etcd here\nexit 1\n")
    program.chmod(0o755)
    settings = settings_of(program, "127.0.0.1:1", tmp_path)
    with pytest.raises(Unavailable, match="no etcd here"):
        await open_wal(settings.url(), settings=settings, failover_s=1.0)


async def test_a_cluster_of_log_stores_is_refused(
    settings: WoodpeckerSettings, new_sidecar: Callable[..., Sidecar]
) -> None:
    service = WoodpeckerStorageSettings(type="service")
    with pytest.raises(ConfigError, match="not served by the sidecar: set minio"):
        await open_wal(settings.url(), settings=settings.model_copy(update={"storage": service}))
    sidecar = new_sidecar(settings={"woodpecker": {"storage": {"type": "service"}}})
    with pytest.raises(BrokerFailed, match="not served: set minio"):
        sidecar.start()
