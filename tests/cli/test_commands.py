"""`run`, `tail` and `inspect` on a real log, with and without a process that has it open."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.commands import said
from tidewal.actors.standalone import standalone
from tidewal.adapters.rocksmq import RocksMQ
from tidewal.adapters.rocksmq.client.owner_connection import OwnerConnection
from tidewal.runtime.rows.schema import CollectionSchema, Field

pytestmark = pytest.mark.slow

SCHEMA = CollectionSchema("things", (Field("id", "int64"), Field("name", "varchar", nullable=True)), "id")


async def fill(directory: Path) -> None:
    async with standalone(directory) as node, node.client() as client:
        await client.create_collection(SCHEMA)
        await client.insert("things", [{"id": number, "name": f"thing {number}"} for number in range(8)])
        await client.delete("things", [3])
        await client.cut("things")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory in which a node has been."""
    asyncio.run(fill(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def running(data: Path, start: Callable[..., subprocess.Popen[str]]) -> dict[str, Any]:
    """A node as a process of its own on that directory, and where it listens."""
    process = start("run", "--data", data, "--json")
    where = said(process)
    return where | {"process": process}


def url(data: Path) -> str:
    return f"rocksmq://{data}/log"


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def check_records(records: list[dict[str, Any]]) -> None:
    rows = [row for record in records for row in record.get("rows", ())]
    assert {row["id"] for row in rows if row["_op"] == "insert"} == set(range(8))
    assert [row["id"] for row in rows if row["_op"] == "delete"] == [3]
    assert {record["type"] for record in records} >= {"FENCE", "CREATE_COLLECTION", "ROWS"}
    for channel in {record["channel"] for record in records}:
        ids = [record["id"] for record in records if record["channel"] == channel]
        assert ids == sorted(ids)


def test_tail_of_a_collection_without_an_owner(command: Callable[..., Any], data: Path):
    ended = command("tail", url(data), "things", "--no-follow", "--json", "--rows", 100)
    assert ended.status == 0, ended.err
    check_records(json_lines(ended.out))


def test_tail_through_the_owner(command: Callable[..., Any], running: dict[str, Any]):
    ended = command("tail", running["wal"], "things", "--no-follow", "--json", "--rows", 100)
    assert ended.status == 0, ended.err
    check_records(json_lines(ended.out))


def test_tail_for_people(command: Callable[..., Any], data: Path):
    ended = command("tail", url(data), "things", "--no-follow", "--rows", 1)
    assert '{"id": 3, "name": null, "_op": "delete"}' in ended.out
    assert " more\n" in ended.out
    assert "Z  by-dev-rootcoord-dml_" in ended.out


def test_tail_of_the_catalog_ends_at_its_limit(command: Callable[..., Any], data: Path):
    ended = command("tail", url(data), "by-dev-collection_schema", "--json", "--limit", 2)
    assert ended.status == 0
    first, _ = json_lines(ended.out)
    assert first["kind"] == "leader"


def test_tail_follows_until_it_is_interrupted(start: Callable[..., subprocess.Popen[str]], running: dict[str, Any]):
    process = start("tail", running["wal"], "by-dev-cuts", "--json")
    assert process.stdout is not None
    assert said(process)["type"] == "CUT"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert "Traceback" not in process.stdout.read()


async def cut(directory: Path) -> None:
    """Run a node once more, which stores a cut."""
    async with standalone(directory) as node, node.client() as client:
        await client.cut("things")


def tail_of_cuts(start: Callable[..., subprocess.Popen[str]], command: Callable[..., Any], data: Path) -> Any:
    """A process that has printed all cuts, and waits for more."""
    stored = json_lines(command("tail", url(data), "by-dev-cuts", "--no-follow", "--json").out)
    process = start("tail", url(data), "by-dev-cuts", "--json")
    assert process.stdout is not None
    assert [said(process) for _ in stored] == stored
    return process


def test_a_command_that_owns_the_log_makes_way_for_a_node(
    start: Callable[..., subprocess.Popen[str]], command: Callable[..., Any], data: Path
):
    process = tail_of_cuts(start, command, data)
    assert (data / "log" / "LOCK").read_text().strip() == str(process.pid)
    for _ in range(2):
        asyncio.run(cut(data))
        assert said(process)["type"] == "CUT"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130


def test_a_command_does_not_take_the_place_of_a_node(
    start: Callable[..., subprocess.Popen[str]], command: Callable[..., Any], running: dict[str, Any], data: Path
):
    process = tail_of_cuts(start, command, data)
    life = asyncio.run(life_of(data))
    running["process"].kill()
    running["process"].wait()

    async def successor() -> tuple[int, str]:
        """The incarnation of the next node, and the line printed while it runs: the command owns nothing itself."""
        async with standalone(data) as node, node.client() as client:
            await client.cut("things")
            line = await asyncio.to_thread(process.stdout.readline)
            assert isinstance(node.node.wal, RocksMQ)
            return node.node.wal.boot, line

    boot, line = asyncio.run(successor())
    assert boot == life + 1
    assert json.loads(line)["type"] == "CUT"


async def life_of(data: Path) -> int:
    link = await OwnerConnection.open(str(data / "log"), bytes(16), on_lost=print)
    await link.close()
    return link.boot


def test_an_unknown_channel_is_answered_with_what_there_is(command: Callable[..., Any], data: Path):
    ended = command("tail", url(data), "nothings", "--no-follow")
    assert ended.status == 2
    assert "things" in ended.err
    assert ended.err.count("\n") == 1


def check_inspection(told: dict[str, Any]) -> None:
    channels = {channel["name"]: channel for channel in told["channels"]}
    catalog = channels["by-dev-collection_schema"]
    assert catalog["retention_s"] is None
    assert catalog["entries"] > 3
    assert catalog["bytes"] > 0
    assert catalog["first_id"] < catalog["latest_id"]
    assert channels["by-dev-requests-proxy"]["ephemeral"]
    (things,) = told["collections"]
    assert (things["name"], things["state"], things["primary_key"]) == ("things", "ready", "id")
    assert things["fields"] == {"id": "int64", "name": "varchar"}
    assert {lease["channel"] for lease in told["leases"]} >= {name.rpartition("_")[0] for name in things["vchannels"]}
    assert told["leader"]["term"] >= 1
    (cut,) = told["cuts"]
    assert cut["stored"] >= 1
    assert cut["newest"] > 0


def test_inspect_without_an_owner(command: Callable[..., Any], data: Path):
    ended = command("inspect", url(data), "--json")
    assert ended.status == 0, ended.err
    check_inspection(json.loads(ended.out))
    shown = command("inspect", url(data), "--no-count").out
    assert re.search(r"things +1 +ready +2 +id ", shown)
    assert re.search(r"dml_0 +released +1 +20", shown)


def test_inspect_through_the_owner(command: Callable[..., Any], running: dict[str, Any]):
    check_inspection(json.loads(command("inspect", running["wal"], "--json").out))


def test_a_path_is_taken_where_a_url_is(command: Callable[..., Any], data: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(data)
    assert json.loads(command("inspect", "log", "--no-count", "--json").out)["wal"] == url(data)
    assert command("tail", data / "log", "things", "--no-follow", "--json").status == 0
    assert command("groups", "list", "./log", "--json").out == "[]\n"
    ended = command("inspect", data)
    assert ended.status == 0, ended.err


@pytest.mark.parametrize("arguments", [("tail", "things"), ("inspect",)])
def test_looking_makes_no_log(command: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...]):
    name, *rest = arguments
    ended = command(name, url(tmp_path), *rest)
    assert ended.status == 2
    assert "there is no log" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_run_drains_and_lets_go_of_the_directory(running: dict[str, Any], data: Path):
    process = running["process"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert "Traceback" not in process.stdout.read()
    assert not (data / "log" / "socket").exists()


def test_a_second_node_on_the_directory_is_refused(command: Callable[..., Any], running: dict[str, Any], data: Path):
    ended = command("run", "--data", data)
    assert ended.status == 2
    assert "in use by process" in ended.err
    assert running["process"].poll() is None


def test_metrics_are_where_run_says(start: Callable[..., subprocess.Popen[str]], tmp_path: Path, free_port: int):
    process = start("run", "--data", tmp_path / "new", "--metrics-port", free_port, "--json")
    where = said(process)
    assert where["tables"] == str(tmp_path / "new" / "tables")
    with urlopen(where["metrics"], timeout=60) as answer:
        assert b"tidewal_" in answer.read()


def test_run_warns_where_the_tables_of_its_log_are_not_its_own(start: Callable[..., Any], tmp_path: Path):
    (tmp_path / "data" / "tables").mkdir(parents=True)
    process = start("run", "--wal", f"rocksmq://{tmp_path}/data/log")
    assert f"{tmp_path}/data has tables beside this log" in process.stdout.readline()


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
