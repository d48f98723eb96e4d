"""`tidewal run` on brokers: a node as one process, its client and those who look into the log as others."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidewal.actors.client import Client
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.redaction import shown_url
from tidewal.runtime.rows.schema import CollectionSchema, Field

pytestmark = [pytest.mark.broker, pytest.mark.slow]

SCHEMA = CollectionSchema("things", (Field("id", "int64"), Field("name", "varchar", nullable=True)), "id")


async def write_and_ask(url: str) -> None:
    """What an application does from a process of its own."""
    wal = await open_wal(url)
    async with Client(wal) as client:
        await client.create_collection(SCHEMA)
        await client.insert("things", [{"id": number, "name": f"thing {number}"} for number in range(8)])
        await client.delete("things", [3])
        assert await client.count("things", consistency="strong") == 7
        await client.cut("things")
        await client.flush("things")
    await wal.close()


def test_looking_makes_no_log_on_the_brokers(broker_url: str, command: Callable[..., Any]):
    for arguments in (("inspect",), ("tail",), ("groups", "list"), ("inspect",)):
        ended = command(*arguments, broker_url, *(["things"] if arguments == ("tail",) else []))
        assert ended.status == 2
        assert "there is no log to read" in ended.err


def test_a_node_a_client_and_the_tools_meet_on_the_brokers(
    broker_url: str, start: Callable[..., subprocess.Popen[str]], command: Callable[..., Any], tmp_path: Path
):
    data = tmp_path / "data"
    (tmp_path / "node.yaml").write_text(yaml.safe_dump({"wal": broker_url}))
    node = start("run", "--data", data, "--config", tmp_path / "node.yaml", "--json")
    assert node.stdout is not None
    # with stderr: topics that nobody leads yet are no event, a busy broker that has not answered for a while is one
    first = next(line for line in node.stdout if "tidewal.opening" not in line)
    assert json.loads(first) == {"wal": shown_url(broker_url), "tables": str(data / "tables")}
    asyncio.run(write_and_ask(broker_url))

    inspected = command("inspect", broker_url, "--json")
    assert inspected.status == 0, inspected.err
    told = json.loads(inspected.out)
    assert [each["name"] for each in told["collections"]] == ["things"]
    tailed = command("tail", broker_url, "things", "--no-follow", "--json", "--rows", 100)
    assert tailed.status == 0, tailed.err
    rows = [row for line in tailed.out.splitlines() for row in json.loads(line).get("rows", ())]
    assert {row["id"] for row in rows if row["_op"] == "insert"} == set(range(8))

    node.send_signal(signal.SIGTERM)
    rest = node.stdout.read()
    assert node.wait(30) == 0, rest
    assert "Traceback" not in rest
    assert not (data / "log").exists()
    refused = command("run", "--data", data, "--wal", f"rocksmq://{tmp_path}/log")
    assert refused.status == 2
    assert f"PositionMismatch: what is stored so far came from {broker_url.partition(':')[0]}" in refused.err
