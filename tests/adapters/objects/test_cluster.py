"""Nodes as processes on one log in a directory: one of them owns the log, all own channels, and any may be killed."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidewal
from tests.commands import Start, as_processes, said
from tidewal.actors.client import Client
from tidewal.runtime.errors import TidewalError
from tidewal.runtime.rows.schema import CollectionSchema, Field

SCHEMA = CollectionSchema("c", (Field("id", "int64"), Field("x", "int64")), "id")
WITHIN_S = 180
BATCH = 20
SETTINGS = {
    "TIDEWAL__CLUSTER__SECRET": "a secret",
    "TIDEWAL__CLUSTER__LEASEMS": "3000",
    "TIDEWAL__CLUSTER__RENEWMS": "500",
    "TIDEWAL__OBJECTS__LISTEN": "127.0.0.1:0",
    "TIDEWAL__OBJECTS__LEASES": "2",
    "TIDEWAL__ROOTCOORD__DMLCHANNELNUM": "4",
    "TIDEWAL__LOG__LEVEL": "warn",
}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start `tidewal` with some arguments as a process, which is gone after the test."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    with as_processes("-c", "from tidewal.cli.main import main; main()", cwd=tmp_path) as run:
        yield run


def node(start: Start, directory: Path, name: str) -> subprocess.Popen[str]:
    """A node with all roles that is ready."""
    options = ("--data", directory / name, "--tables", directory / "tables", "--name", name, "--json")
    process = start("run", "--wal", f"file://{directory}/log", *options)
    said(process)
    return process


async def channel_owners(start: Start, directory: Path) -> set[str]:
    """The names of the nodes that own channels."""
    process = start("inspect", "cluster", f"file://{directory}/log", "--json")
    output, _ = await asyncio.to_thread(process.communicate)
    pchannels: list[dict[str, Any]] = json.loads(output)["pchannels"]
    return {str(pchannel["node"]) for pchannel in pchannels}


async def upsert(client: Client, number: int) -> None:
    """Upsert a batch of rows, again and again until it is acknowledged."""
    rows = [{"id": BATCH * number + at, "x": number} for at in range(BATCH)]
    while True:
        try:
            await client.upsert("c", rows)
            return
        except TidewalError as error:
            if not error.retryable:
                raise
            await asyncio.sleep(0.1)


@pytest.mark.long  # leases of seconds end in it
async def test_two_nodes_share_a_log_and_the_other_goes_on_when_its_owner_is_killed(
    start: Start, tmp_path: Path
) -> None:
    first = node(start, tmp_path, "a")
    node(start, tmp_path, "b")
    url = f"file://{tmp_path}/log"
    async with asyncio.timeout(WITHIN_S), tidewal.connect(url) as client:
        await client.create_collection(SCHEMA, shards=4)
        number = 0
        while await channel_owners(start, tmp_path) != {"a", "b"}:
            await upsert(client, number)
            number += 1
        for at in range(number, number + 40):
            if at == number + 20:
                first.kill()
            await upsert(client, at)
        assert await channel_owners(start, tmp_path) == {"b"}
        assert await client.count("c", consistency="strong") == BATCH * (number + 40)
        await client.flush("c")
