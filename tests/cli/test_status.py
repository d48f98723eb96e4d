"""`status`, of a log with a node on it and without one."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Command, Start, said
from tidewal.actors.standalone import standalone
from tidewal.cli.status import _print
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.wal import ChannelPolicy, From
from tidewal.runtime.rows.schema import CollectionSchema, Field

pytestmark = pytest.mark.slow

ROW = '{"id": 1}\n'


@pytest.fixture
def log(tmp_path: Path, start: Start) -> Iterator[Path]:
    """The directory of the log of a node that runs."""
    process = start("run", "--data", tmp_path / "data", "--json")
    assert process.stdout is not None
    process.stdout.readline()
    yield tmp_path / "data" / "log"
    process.terminate()
    assert process.wait(30) == 0


async def leave_a_group_behind(log: Path) -> None:
    async with await open_wal(f"rocksmq://{log}", own=False) as wal:
        await wal.create_channel("orders", ChannelPolicy())
        ids = [await wal.append("orders", b"%d" % number, 1 << 40) for number in range(5)]
        member = await wal.join("billing", ["orders"], start=From.EARLIEST)
        delivered = await anext(member)
        await member.acknowledge(delivered, ids[:2])
        await member.aclose()


def test_a_node_is_told_with_its_collections_and_groups(command: Command, log: Path, tmp_path: Path):
    command("create", log, "things", "--field", "id:int64", "--primary-key", "id")
    (tmp_path / "rows.jsonl").write_text(ROW)
    assert command("insert", log, "things", tmp_path / "rows.jsonl").status == 0
    assert command("query", log, "things").status == 0
    asyncio.run(leave_a_group_behind(log))
    ended = command("status", log, "--json")
    assert ended.status == 0, ended.err
    told = json.loads(ended.out)
    assert told["healthy"]
    assert told["roles"] == {
        "mixcoord": True,
        "streamingnode": True,
        "proxy": True,
        "datanode": True,
        "querynode": True,
    }
    (things,) = told["node"]["collections"]
    assert (things["name"], things["rows"], things["unreadable"]) == ("things", 1, "")
    assert things["memory_bytes"] > 0
    assert things["query_lag_s"] < 60
    limits = {each["key"]: each for each in told["node"]["limits"]}
    assert limits["streamingNode.maxInflightBytes"]["limit"] == 64 * 1024 * 1024
    assert limits["queryNode.memoryLimitBytes"]["used"] == things["memory_bytes"]
    (billing,) = told["groups"]
    assert (billing["group"], billing["channel"], billing["lag_entries"]) == ("billing", "orders", 3)
    assert billing["lag_s"] > 0
    assert told["sizes"][0].startswith("journal: ")
    assert told["dead_letters"] == 0
    shown = command("status", log).out
    assert ", healthy; time announced " in shown
    assert "limits   none is used to 80%" in shown
    assert "billing" in shown


def test_a_node_without_a_directory_is_found_in_the_default_one(command: Command, start: Start, tmp_path: Path):
    process = start("run", "--json")
    where = said(process)
    assert where["wal"] == f"rocksmq://{tmp_path}/tidewal-data/log"
    assert where["tables"] == f"{tmp_path}/tidewal-data/tables"
    assert command("status", tmp_path / "tidewal-data").status == 0
    process.terminate()
    assert process.wait(30) == 0


def test_a_collection_that_cannot_be_read_is_not_healthy(command: Command, start: Start, tmp_path: Path):
    async def fill() -> None:
        async with standalone(tmp_path) as node, node.client() as client:
            await client.create_collection(CollectionSchema("things", (Field("id", "int64"),), "id"))
            await client.insert("things", [{"id": 1}])
            await client.flush("things")

    asyncio.run(fill())
    (part,) = (tmp_path / "tables" / "things" / "log").glob("*.parquet")
    part.unlink()
    process = start("run", "--data", tmp_path, "--json")
    assert process.stdout is not None
    process.stdout.readline()
    while not json.loads((ended := command("status", tmp_path, "--json")).out)["node"]["collections"][0]["unreadable"]:
        assert process.poll() is None
    assert ended.status == 1
    shown = command("status", tmp_path)
    assert shown.status == 1
    assert "not healthy: tables of 1 collections cannot be read" in shown.out
    process.terminate()
    assert process.wait(30) == 0


def test_a_node_that_hangs_is_told_in_one_line(command: Command, start: Start, tmp_path: Path):
    process = start("run", "--data", tmp_path / "data", "--json")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    try:
        ended = command("status", tmp_path / "data")
        told = command("status", tmp_path / "data", "--json")
    finally:
        process.send_signal(signal.SIGCONT)
    assert (ended.status, ended.out) == (1, "")
    assert len(ended.err.splitlines()) == 1
    assert "does not answer: it hangs" in ended.err
    assert told.status == 1
    assert json.loads(told.out)["healthy"] is False
    process.terminate()
    assert process.wait(30) == 0


def test_a_log_without_a_node_is_not_healthy(command: Command, tmp_path: Path):
    async def make() -> None:
        async with await open_wal(f"rocksmq://{tmp_path}/log") as wal:
            await wal.create_channel("orders", ChannelPolicy())

    asyncio.run(make())
    ended = command("status", tmp_path / "log", "--json")
    assert ended.status == 1
    told = json.loads(ended.out)
    assert (told["healthy"], told["node"], told["roles"]) == (False, None, {})
    assert "start one with `tidewal run`" in command("status", tmp_path / "log").out


def test_limits_that_are_near_and_roles_that_are_silent_are_named(capsys: pytest.CaptureFixture[str]):
    things: dict[str, Any] = {"name": "things", "rows": 1, "memory_bytes": 90, "unreadable": "no file"}
    limits = [
        {"key": "queryNode.memoryLimitBytes", "collection": "things", "used": 90, "limit": 100},
        {"key": "streamingNode.maxInflightBytes", "collection": "", "used": 79, "limit": 100},
    ]
    slowed = {"limit": "a.limit", "value": 9, "low": 8, "high": 10, "factor": 0.5, "node": "", "collection": "things"}
    node = {"node": "a", "watermark_age_s": 7.5, "refused": "", "collections": [things], "limits": limits}
    node["throttled"] = [slowed]
    roles = {"proxy": True, "datanode": False}
    _print({"wal": "x", "healthy": False, "roles": roles, "node": node, "sizes": [], "groups": [], "dead_letters": 2})
    shown = capsys.readouterr().out
    assert "a, not healthy; no answer of: datanode; time announced 7.5 s ago" in shown
    assert "limit    queryNode.memoryLimitBytes things: 90% of 100 bytes" in shown
    assert "streamingNode.maxInflightBytes" not in shown
    assert "slowed   writes to things are slowed down to 0.5 of the full rate: 9 bytes are used of a.limit" in shown
    assert "2 dead letters: tidewal dlq list" in shown
    assert "tables   of things cannot be read: no file" in shown
    node["refused"] = "DiskPressure: too little space"
    roles["datanode"] = True
    _print({"wal": "x", "healthy": False, "roles": roles, "node": node, "sizes": [], "groups": [], "dead_letters": 0})
    shown = capsys.readouterr().out
    assert "a, not healthy: the log refuses appends; time announced" in shown
    assert "refused  DiskPressure: too little space" in shown
