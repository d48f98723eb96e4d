"""Nodes with addresses, as a person runs and watches them."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from pathlib import Path

import pytest

from tests.commands import Command, Start, said
from tidewal import connect
from tidewal.cli.process_metrics import free_port
from tidewal.runtime.rows.schema import CollectionSchema, Field

pytestmark = pytest.mark.slow

ROWS = [{"id": n} for n in range(20)]


def test_a_node_says_its_address(command: Command, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TIDEWAL__CLUSTER__SECRET", "a long secret")
    node = start("run", "--data", tmp_path / "data", "--json", "--listen", "127.0.0.1:0", "--name", "n1")
    where = said(node)
    assert re.fullmatch(r"127\.0\.0\.1:\d{2,5}", where["address"])
    log = tmp_path / "data" / "log"
    assert f"node     n1 at {where['address']}, healthy" in command("status", log).out
    [member] = json.loads(command("inspect", "cluster", log, "--json").out)["members"]
    assert member["address"] == where["address"]
    node.terminate()
    assert node.wait(30) == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--listen", "127.0.0.1:0"), "an address needs a secret"),
        (("--listen", "nowhere"), "'nowhere' is no address"),
    ],
)
def test_an_address_that_cannot_be_is_refused(command: Command, tmp_path: Path, options, why: str):
    ended = command("run", "--data", tmp_path / "data", *options)
    assert ended.status == 2
    assert why in ended.err


def test_processes_need_a_port_each(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TIDEWAL__CLUSTER__SECRET", "a long secret")
    ended = command("run", "--data", tmp_path / "data", "--processes", "2", "--listen", "127.0.0.1:7400")
    assert ended.status == 2
    assert "listen on port 0" in ended.err


def test_the_processes_of_a_node_ask_each_other_directly(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TIDEWAL__CLUSTER__SECRET", "a long secret")
    options = ("--processes", "4", "--listen", "127.0.0.1:0", "--metrics-port", free_port(), "--json")
    node = start("run", "--data", tmp_path / "data", *options)
    where = said(node)
    asyncio.run(write_and_count(tmp_path / "data"))
    with urllib.request.urlopen(where["metrics"], timeout=20) as page:
        asked = re.findall(r'direct_request_total\{.*route="direct"\} ([0-9.]+)', page.read().decode())
    assert sum(map(float, asked)) > len(ROWS)
    node.terminate()
    assert node.wait(60) == 0


async def write_and_count(data: Path) -> None:
    async with connect(data) as client:
        await client.create_collection(CollectionSchema("things", (Field("id", "int64"),), "id"))
        for number, row in enumerate(ROWS):
            await client.insert("things", [row])
            assert await client.count("things", consistency="strong") == number + 1
