"""`tidewal replicate` and `promote` of a node's log, of nodes that run and of such as are killed."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import tidewal
from tests.actors.conftest import PEOPLE, people
from tests.actors.test_kill import assert_table_is, killed_run
from tests.backends import log_url
from tests.cli.test_migrate_node import ACKNOWLEDGED, rows
from tidewal.runtime.errors import Moved
from tidewal.runtime.log.opening import open_wal

KILLS = 8
LATER_S = 0.5
FLUSHED, NOT_FLUSHED, MESSAGES = range(100), range(100, 150), 20


async def written(data: Path, wal: str, run: Callable[[], Any]) -> None:
    """Rows and messages of a node, written while the process that `run` starts replicates its log."""
    async with tidewal.standalone(data, wal=wal) as node, node.client() as client:
        await client.create_collection(PEOPLE)
        await client.insert("people", people(*FLUSHED[:50]))
        process = await asyncio.to_thread(run)
        await client.create_topic("orders", 2)
        for number in range(MESSAGES):
            await client.send("orders", f"{number}", key=f"{number}")
        await client.insert("people", people(*FLUSHED[50:]))
        await client.flush("people")
        await client.insert("people", people(*NOT_FLUSHED))
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0


async def assert_all_is_there(data: Path, wal: str) -> None:
    async with tidewal.standalone(data, wal=wal) as node, node.client() as client:
        found = (await client.query("people", consistency="strong")).table["id"].to_pylist()
        assert sorted(found) == [*FLUSHED, *NOT_FLUSHED]
        got: list[str] = []
        async with asyncio.timeout(60), await client.subscribe("orders", "billing") as member:
            while len(got) < MESSAGES:
                pack = await anext(member)
                got += [bytes(each.body).decode() for each in pack.messages]
                await member.acknowledge(pack)
        assert sorted(got, key=int) == [f"{number}" for number in range(MESSAGES)]
        await client.insert("people", people(1_000))


async def opened(url: str) -> None:
    await (await open_wal(url)).close()


def begun(start: Callable[..., Any], source: str, replica: str) -> Any:
    process = start("replicate", "--from", source, "--to", replica)
    while not (line := process.stdout.readline()).startswith("replicating "):
        assert line.startswith("waiting for "), line  # brokers that are busy
    return process


@pytest.mark.slow
def test_the_log_of_a_running_node_is_replicated_and_promoted(
    command: Callable[..., Any], start: Callable[..., Any], tmp_path: Path
) -> None:
    data, source, replica = tmp_path / "data", f"rocksmq://{tmp_path}/source", f"rocksmq://{tmp_path}/replica"
    asyncio.run(written(data, source, lambda: begun(start, source, replica)))
    status = command("replicate", "--to", replica, "--status")
    assert status.out.splitlines()[0] == f"replica of {source}"
    assert "a log of nodes" in status.out
    assert json.loads(command("replicate", "--to", replica, "--status", "--json").out)["of_node"] is True
    refused = command("promote", replica, "--force")
    assert (refused.status, "--to" in refused.err) == (2, True)
    assert "--force" in command("promote", replica, "--from", source, "--to", f"rocksmq://{tmp_path}/new").err
    assert "the replica itself" in command("promote", replica, "--force", "--to", replica).err
    assert "give --from" in command("promote", replica, "--force", "--tables", str(data / "tables")).err
    assert "--tables" in command("promote", replica, "--from", source).err
    ended = command("promote", replica, "--from", source, "--tables", str(data / "tables"))
    assert ended.status == 0, ended.err
    with pytest.raises(Moved, match="replica"):
        asyncio.run(assert_all_is_there(data, source))
    asyncio.run(assert_all_is_there(data, replica))


def line_in(command: Callable[..., Any], replica: str) -> str | None:
    return json.loads(command("replicate", "--to", replica, "--status", "--json").out)["line"]


@pytest.mark.slow
def test_the_log_of_a_node_is_lost_and_its_replica_goes_to_a_new_one(
    command: Callable[..., Any], start: Callable[..., Any], tmp_path: Path
) -> None:
    """All is there: a line was drawn since the node has stopped."""
    data, source, replica, new = (tmp_path / name for name in ("data", "source", "replica", "new"))
    urls = f"rocksmq://{source}", f"rocksmq://{replica}", f"rocksmq://{new}"
    asyncio.run(written(data, urls[0], lambda: begun(start, *urls[:2])))
    before = line_in(command, urls[1])
    process = begun(start, *urls[:2])
    while line_in(command, urls[1]) in (None, before):
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    shutil.rmtree(source)
    force = ("promote", urls[1], "--force", "--to", urls[2])
    assert "--tables" in command(*force).err
    ended = command(*force, "--tables", str(data / "tables"), "--salvage", str(tmp_path / "above.jsonl"))
    assert ended.status == 0, ended.err
    assert f"{urls[2]} goes on" in ended.out
    assert (tmp_path / "above.jsonl").read_text() == ""
    with pytest.raises(Moved, match="new"):
        asyncio.run(opened(urls[1]))
    asyncio.run(assert_all_is_there(data, urls[2]))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.in_turn(1, 2)
def test_a_killed_node_goes_on_with_a_replica_of_replicators_that_are_killed(
    command: Callable[..., Any], start: Callable[..., Any], tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    data, old, new = tmp_path / "data", tmp_path / "data" / "log", tmp_path / "replica"
    data.mkdir()
    urls = f"rocksmq://{old}", f"rocksmq://{new}"
    expected: set[int] = set()
    for round in range(KILLS):  # of the node, and of a replicator of what it has left
        choices = rng.randrange(2**31), ACKNOWLEDGED // KILLS
        tried, acknowledged = killed_run(data, round * 1_000_000, *choices)
        expected |= {key for first in acknowledged for key in range(first, first + tried[first])}
        killed_later(begun(start, *urls), rng.uniform(0, LATER_S))
    promotion = ("promote", urls[1], "--from", urls[0], "--tables", str(data / "tables"))
    for _ in range(KILLS):
        killed_later(start(*promotion), rng.uniform(0, 4 * LATER_S))
    ended = command(*promotion)
    assert ended.status == 0, ended.err
    found = asyncio.run(rows(data, new))
    assert expected <= found, "an acknowledged batch was lost"
    assert_table_is(data / "tables" / "things" / "log", found)
    assert command("verify", "journal", urls[1]).status == 0
    with pytest.raises(Moved, match=str(new)):
        asyncio.run(rows(data, old))


def killed_later(process: subprocess.Popen[str], later_s: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(later_s)
    process.kill()
    process.wait()


@pytest.mark.broker
@pytest.mark.long
def test_a_log_on_kafka_is_replicated_into_a_directory(
    command: Callable[..., Any], start: Callable[..., Any], tmp_path: Path, kafka: Any
) -> None:
    data, source, replica = tmp_path / "data", log_url("kafka", kafka), f"rocksmq://{tmp_path}/replica"
    asyncio.run(written(data, source, lambda: begun(start, source, replica)))
    ended = command("promote", replica, "--from", source, "--tables", str(data / "tables"))
    assert ended.status == 0, ended.err
    with pytest.raises(Moved, match="replica"):
        asyncio.run(opened(source))
    asyncio.run(assert_all_is_there(data, replica))
