"""`tidewal promote --force --to` behind nodes, and a replicator, that are killed in the midst of work: what these had
acknowledged up to the line goes on, once and in order, and the rest is salvaged when the source is back."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import tidewal
from tests.backends import log_url
from tests.cli.test_online_migration import THINGS, found
from tests.cli.test_replicate_node import begun
from tests.commands import said
from tests.turns import in_turn
from tidewal.cli.open_log import opened
from tidewal.runtime.config.loading import load_settings
from tidewal.runtime.errors import Moved
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.replication_state import replication_state

LINE_S = 90.0  # the longest time until there is a line, on machines that are busy
FLUSHED_EVERY = 40

Start = Callable[..., "subprocess.Popen[str]"]


@dataclass
class Acknowledged:
    """What nodes have acknowledged, with its time: rows, messages of one key, and what a group has done of these."""

    rows: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    sent: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    done: list[int] = field(default_factory=list[int])


async def _insert(client: tidewal.Client, into: Acknowledged) -> None:
    for key in range(10**6):
        into.rows.append(((await client.insert("things", [{"id": key}])).ts, key))
        if key % FLUSHED_EVERY == 0:
            await client.flush("things")


async def _send(client: tidewal.Client, into: Acknowledged) -> None:
    for number in range(10**6):
        into.sent.append(((await client.send("orders", f"{number}", key="k")).ts, number))


async def _take(client: tidewal.Client, into: Acknowledged) -> None:
    async with await client.subscribe("orders", "billing") as member:
        async for pack in member:
            await member.acknowledge(pack)
            into.done += [int(bytes(message.body)) for message in pack.messages]


async def line_time(replica: str) -> int:
    """The time of its line, 0 where it has none."""
    async with opened(replica) as wal:
        return (await replication_state(wal)).line.get("time", 0)


async def line_behind(replica: str, into: Acknowledged) -> None:
    """Wait until the replica's line has some of what was acknowledged."""
    async with asyncio.timeout(LINE_S):
        while await line_time(replica) <= max(into.rows[0][0], into.sent[0][0]):  # noqa: ASYNC110 -- of a process
            await asyncio.sleep(1)


async def written(url: str, replica: str, end: Callable[[], None]) -> Acknowledged:
    """Write to nodes until the replica has a line, and `end` has killed them some seconds later."""
    into = Acknowledged()
    async with tidewal.connect(url, deadline_s=60) as one, tidewal.connect(url, deadline_s=60) as other:
        await one.create_collection(THINGS)
        await one.create_topic("orders", 2)
        work = [
            asyncio.create_task(each(client, into)) for each, client in ((_insert, one), (_send, other), (_take, one))
        ]
        await asyncio.sleep(2)
        await line_behind(replica, into)
        await asyncio.sleep(2)
        assert not any(each.done() for each in work)
        await asyncio.to_thread(end)
        await asyncio.sleep(1)
        for each in work:
            each.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    return into


async def rest(client: tidewal.Client) -> list[int]:
    got: list[int] = []
    async with await client.subscribe("orders", "billing") as member:
        with suppress(TimeoutError):
            while True:
                pack = await asyncio.wait_for(anext(member), 5)
                got += [int(bytes(message.body)) for message in pack.messages]
                await member.acknowledge(pack)
    return got


async def gone_on(data: Path, url: str, time: int, before: Acknowledged) -> None:
    """What nodes have that go on with the new log."""
    async with tidewal.standalone(data, wal=url, settings=load_settings()) as node, node.client() as client:
        assert await found(client) == [key for ts, key in before.rows if ts <= time]
        got, sent = await rest(client), [number for ts, number in before.sent if ts <= time]
        assert got == sent[len(sent) - len(got) :]
        assert {*sent} <= {*before.done, *got}
        await client.insert("things", [{"id": 10**6}])
        await client.flush("things")


def nodes_of(start: Start, directory: Path, url: str, names: str) -> list[subprocess.Popen[str]]:
    nodes: list[subprocess.Popen[str]] = []
    for name in names:
        options = ("--data", directory / name, "--name", name, "--tables", directory / "tables")
        nodes.append(start("run", *options, "--wal", url, "--json"))
        said(nodes[-1])
    return nodes


def kill(processes: list[subprocess.Popen[str]]) -> None:
    for each in processes:
        each.kill()
        each.wait()


def forced(start: Start, directory: Path, source: str, replica: str, new: str, names: str) -> None:
    tables = directory / "tables"
    nodes = nodes_of(start, directory, source, names)
    replicator = begun(start, source, replica)
    before = asyncio.run(written(source, replica, lambda: kill([replicator, *nodes])))
    promote = ("promote", replica, "--force", "--to", new, "--tables", tables)
    killed = start(*promote)
    with suppress(subprocess.TimeoutExpired):
        killed.wait(3)
    kill([killed])
    ended = start(*promote, "--salvage", directory / "above.jsonl", "--json")
    output, _ = ended.communicate(timeout=300)
    assert ended.returncode == 0, output
    time = asyncio.run(line_time(replica))
    print(f"{sum(ts > time for ts, _ in before.rows)} of {len(before.rows)} rows lie above the line")
    asyncio.run(gone_on(directory, new, time, before))
    fenced = start("promote", replica, "--from", source, "--salvage", directory / "left.jsonl")
    output, _ = fenced.communicate(timeout=300)
    assert fenced.returncode == 0, output
    left = [json.loads(line) for line in (directory / "left.jsonl").read_text().splitlines()]
    above = {each["timestamp"] for each in left}
    assert {ts for ts, _ in (*before.rows, *before.sent) if ts > time} <= above
    assert not {ts for ts, _ in (*before.rows, *before.sent) if ts <= time} & above
    with pytest.raises(Moved):
        asyncio.run(_opened(source))


async def _opened(url: str) -> None:
    await (await open_wal(url)).close()


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWAL__CLUSTER__SECRET", "a secret of these tests alone")
    monkeypatch.setenv("TIDEWAL__OBJECTS__LISTEN", "127.0.0.1:0")
    monkeypatch.setenv("TIDEWAL__OBJECTS__LEASES", "4")
    monkeypatch.setenv("TIDEWAL__CLUSTER__LEASEMS", "4000")


@pytest.mark.long
@pytest.mark.in_turn(0, 3)
def test_a_log_in_object_storage(start: Start, tmp_path: Path) -> None:
    urls = [f"file://{tmp_path / name}" for name in ("source", "replica", "fresh")]
    forced(start, tmp_path, *urls, names="ab")


def on_brokers(
    start: Start, tmp_path: Path, turn: int, kind: str, brokers: Any, *choices: tuple[str, str, str]
) -> None:
    """The kinds of the source, of the replica and of the new log that are in turn; a directory has one node."""
    for place, kinds in in_turn(choices, turn):
        directory = tmp_path / place
        directory.mkdir()
        urls = [
            log_url(kind, brokers) if each == kind else f"rocksmq://{directory / f'log{n}'}"
            for n, each in enumerate(kinds)
        ]
        forced(start, directory, *urls, names="ab" if kinds[0] == kind else "a")


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.in_turn(1, 3)
def test_a_log_on_kafka(start: Start, tmp_path: Path, kafka: Any, turn: int) -> None:
    mixed = ("kafka", "rocksmq", "rocksmq"), ("rocksmq", "kafka", "kafka")
    on_brokers(start, tmp_path, turn, "kafka", kafka, ("kafka", "kafka", "kafka"), *mixed)


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.in_turn(2, 3)
def test_a_log_on_pulsar(start: Start, tmp_path: Path, pulsar: Any, turn: int) -> None:
    on_brokers(
        start, tmp_path, turn, "pulsar", pulsar, ("pulsar", "pulsar", "pulsar"), ("pulsar", "rocksmq", "rocksmq")
    )
