"""The verbs of the command line on Kafka and Pulsar: each as its own process would be, against a node of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import tidewal
from tests.commands import Command, Ended, Start, said
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.wal import Append

pytestmark = [pytest.mark.broker, pytest.mark.slow]

PLACES = [
    {"id": number, "name": f"place {number}", "at": [float(number), 1.0], "seen": "2026-01-02T03:04:05+00:00"}
    for number in range(1, 21)
]


def lines(ended: Ended) -> list[dict[str, Any]]:
    assert ended.status == 0, ended.err
    return [json.loads(line) for line in ended.out.splitlines()]


async def put_bytes(url: str, channel: str, payload: bytes) -> None:
    """What a program that knows nothing of records writes."""
    async with await open_wal(url) as wal:
        await wal.append_many([Append(channel, payload)])


async def ask(url: str) -> tuple[int, int]:
    """What `tidewal.connect` shows: how many rows there are, before and after one more is written."""
    async with tidewal.connect(url) as client:
        before = await client.count("places", consistency="strong")
        await client.insert("places", [PLACES[0] | {"id": 100, "seen": None}])
        return before, await client.count("places", consistency="strong")


def test_the_verbs_work_on_the_brokers(broker_url: str, command: Command, start: Start, tmp_path: Path):
    node = start("run", "--data", tmp_path / "data", "--wal", broker_url, "--json")
    assert said(node)["tables"] == str(tmp_path / "data" / "tables")

    check_collections(broker_url, command, tmp_path)
    assert asyncio.run(ask(broker_url)) == (20, 21)
    with tidewal.connect_sync(broker_url) as client:
        assert client.count("places", consistency="strong") == 21
    check_messages(broker_url, command)
    check_looking(broker_url, command)

    node.terminate()
    rest = node.stdout.read()
    assert node.wait(60) == 0, rest
    assert "Traceback" not in rest
    after = command("query", broker_url, "places", "--count")
    assert after.status == 2
    assert re.search(r"^tidewal: Unavailable: no node .*\n\Z", after.err, re.MULTILINE)


def check_collections(url: str, command: Command, folder: Path) -> None:
    fields = ("id:int64", "name:varchar", "at:float_vector:2", "seen:timestamp?")
    options = [each for field in fields for each in ("--field", field)]
    for _ in range(2):  # the second time it is there
        (made,) = lines(command("create", url, "places", *options, "--primary-key", "id", "--json"))
        assert (made["collection"], made["shards"], made["primary_key"]) == ("places", 2, "id")

    file = folder / "places.jsonl"
    file.write_text("".join(json.dumps(each) + os.linesep for each in PLACES))
    (written,) = lines(command("insert", url, "places", file, "--json"))
    assert written["rows"] == len(PLACES)

    assert lines(command("query", url, "places", "--count", "--json")) == [{"count": 20}]
    found = lines(command("query", url, "places", "id > 17", "--columns", "id,name", "--order-by", "-id", "--json"))
    assert found == [{"id": number, "name": f"place {number}"} for number in (20, 19, 18)]
    near = lines(command("search", url, "places", "at", "[3, 1]", "--metric", "l2", "--top-k", 2, "--json"))
    assert near[0]["id"] == 3
    (compacted,) = lines(command("compact", url, "places", "--json"))
    assert compacted["rows"] == 20
    assert "placse" in command("query", url, "placse").err


def check_messages(url: str, command: Command) -> None:
    refused = command("send", url, "doors", "opened")
    assert (refused.status, "ChannelNotFound" in refused.err) == (2, True)
    sent = command("send", url, "doors", "opened", "closed", "--key", "front", "--tag", "floor=1", "--create", "--json")
    assert lines(sent)[0]["messages"] == 2
    told = lines(command("tail", url, "doors", "--no-follow", "--json"))
    assert [(each["value"], each["key"], each["tags"]) for each in told] == [
        ("opened", "front", {"floor": "1"}),
        ("closed", "front", {"floor": "1"}),
    ]
    rows = [
        row for each in lines(command("tail", url, "places", "--no-follow", "--json")) for row in each.get("rows", ())
    ]
    assert rows
    refused = command("send", url, "by-dev-rootcoord-dml_0", "opened")
    assert (refused.status, "belongs to the nodes" in refused.err) == (2, True)


def check_looking(url: str, command: Command) -> None:
    assert lines(command("dlq", "list", url, "--json")) == []
    asyncio.run(put_bytes(url, "by-dev-rootcoord-dml_0", b"no record"))
    letters = kept(url, command)
    assert {each["channel"] for each in letters} == {"by-dev-rootcoord-dml_0"}
    shown = lines(command("dlq", "show", url, letters[0]["id"], "--json"))
    assert "no record" in json.dumps(shown)

    ended = command("status", url, "--json")
    status = json.loads(ended.out)
    assert (ended.status, status["healthy"], set(status["roles"].values())) == (0, True, {True}), ended.err
    assert [(each["name"], each["rows"]) for each in status["node"]["collections"]] == [("places", 21)]
    assert status["dead_letters"] >= 1
    assert "healthy" in command("status", url).out


def kept(url: str, command: Command) -> list[dict[str, Any]]:
    """The dead letters, once a reader has come by the bad entry."""
    for _ in range(60):
        if found := lines(command("dlq", "list", url, "--json")):
            return found
    raise AssertionError("no reader has kept the bad entry")
