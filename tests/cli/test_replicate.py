"""`tidewal replicate` and `tidewal promote` between directories: what they say, and replicators that are killed."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tidewal.cli import replicate
from tidewal.cli.owned_log import owned_log
from tidewal.runtime.errors import Moved, ReplicaReadOnly
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.replication_state import ReplicationPhase, replication_state
from tidewal.runtime.log.wal import Append, ChannelPolicy, FromId, Wal
from tidewal.runtime.migration.channel_copy import stored_entries

CHANNELS = ("invoices", "orders")
BATCH = 200
LATER_S = 0.1


async def write(directory: Path, batches: range) -> None:
    """Append to each channel, and acknowledge the half of it."""
    async with await open_wal(f"rocksmq://{directory}") as wal:
        for name in CHANNELS:
            await wal.create_channel(name, ChannelPolicy(retention_s=None))
            for batch in batches:
                numbers = range(batch * BATCH + 1, (batch + 1) * BATCH + 1)
                ids = await wal.append_many([Append(name, b"%d" % n, n) for n in numbers])
                await wal.seek_group("workers", name, FromId(ids[BATCH // 2]))


def content(directory: Path) -> dict[str, Any]:
    async def read() -> dict[str, Any]:
        found: dict[str, Any] = {}
        async with await open_wal(f"rocksmq://{directory}") as wal:
            for name in CHANNELS:
                entries = [entry async for entry in stored_entries(wal, await wal.describe(name))]
                found[name] = [(entry.timestamp, bytes(entry.payload)) for entry in entries]
                position = next(group.positions[name] for group in await wal.groups()) or b""
                found[f"left of {name}"] = sum(entry.id > position for entry in entries)
        return found

    return asyncio.run(read())


@pytest.fixture
def logs(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "source", tmp_path / "replica"


def begun(start: Callable[..., Any], source: Path, replica: Path) -> Any:
    process = start("replicate", "--from", f"rocksmq://{source}", "--to", f"rocksmq://{replica}")
    assert process.stdout.readline().startswith("replicating rocksmq://")
    return process


def claimed(command: Callable[..., Any], start: Callable[..., Any], source: Path, replica: Path) -> Any:
    """A replicator that has claimed its replica."""
    process = begun(start, source, replica)
    while not command("replicate", "--to", f"rocksmq://{replica}", "--status").out.startswith("replica of"):
        assert process.poll() is None
    return process


@pytest.mark.slow
def test_a_replica_takes_the_place_of_its_source(
    command: Callable[..., Any], start: Callable[..., Any], logs: tuple[Path, Path]
) -> None:
    source, replica = logs
    asyncio.run(write(source, range(2)))
    process = claimed(command, start, source, replica)
    asyncio.run(write(source, range(2, 4)))  # through the replicator, which has the source open
    with pytest.raises(ReplicaReadOnly):
        content(replica)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0, out
    assert "stopped: " in out
    status = json.loads(command("replicate", "--to", f"rocksmq://{replica}", "--status", "--json").out)
    assert (status["phase"], status["other"]) == ("replica", f"rocksmq://{source}")
    assert "give --from" in command("promote", f"rocksmq://{replica}").err
    ended = command("promote", f"rocksmq://{replica}", "--from", f"rocksmq://{source}")
    assert ended.status == 0, ended.err
    assert ended.out.startswith(f"promoted of rocksmq://{source}\n")
    found = content(replica)
    assert [n for n, _ in found["orders"]] == list(range(1, 4 * BATCH + 1))
    assert found["left of orders"] == BATCH // 2 - 1
    with pytest.raises(Moved):
        content(source)


def test_one_log_is_not_source_and_replica(command: Callable[..., Any], logs: tuple[Path, Path]) -> None:
    url = f"rocksmq://{logs[0]}"
    for arguments in (("replicate", "--from", url, "--to", url), ("promote", url, "--from", url)):
        assert "are two logs" in command(*arguments).err


async def test_a_replica_says_what_it_is_before_programs_reach_it(
    logs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[ReplicationPhase] = []

    @asynccontextmanager
    async def recorded(url: str, *, serve: bool = False, **options: bool) -> AsyncGenerator[Wal]:
        async with owned_log(url, serve=serve, **options) as wal:
            if serve:
                served.append((await replication_state(wal)).phase)
            yield wal

    monkeypatch.setattr(replicate, "owned_log", recorded)
    source, replica = (f"rocksmq://{directory}" for directory in logs)
    async with await open_wal(source) as wal:
        for _ in range(2):
            async with replicate.opened_replica(wal, source, replica):
                pass
    assert served == [ReplicationPhase.REPLICA] * 2


@pytest.mark.slow
def test_what_was_left_behind_is_salvaged(
    command: Callable[..., Any], start: Callable[..., Any], logs: tuple[Path, Path], tmp_path: Path
) -> None:
    source, replica = logs
    asyncio.run(write(source, range(1)))
    process = claimed(command, start, source, replica)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    asyncio.run(write(source, range(1, 3)))
    assert command("promote", f"rocksmq://{replica}", "--force").status == 0
    refused = command("replicate", "--from", f"rocksmq://{source}", "--to", f"rocksmq://{replica}")
    assert (refused.status, "was promoted" in refused.err) == (2, True)
    file = tmp_path / "left.jsonl"
    both = ("promote", f"rocksmq://{replica}", "--from", f"rocksmq://{source}")
    ended = command(*both, "--salvage", str(file))
    assert ended.status == 0, ended.err
    left = [json.loads(line) for line in file.read_text().splitlines()]
    there = {name: len(content(replica)[name]) for name in CHANNELS}
    for name in CHANNELS:
        timestamps = [each["timestamp"] for each in left if each["channel"] == name]
        assert timestamps == list(range(there[name] + 1, 3 * BATCH + 1))


@pytest.mark.slow
@pytest.mark.long
def test_replicators_that_are_killed_lose_and_double_nothing(
    command: Callable[..., Any], start: Callable[..., Any], logs: tuple[Path, Path]
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    source, replica = logs
    asyncio.run(write(source, range(1)))
    for batch in range(1, 9):
        process = begun(start, source, replica)
        if batch % 2:  # while it is at work
            asyncio.run(write(source, range(batch, batch + 1)))
        time.sleep(rng.uniform(0, LATER_S))  # the moment of the kill
        process.kill()
        process.wait()
        if not batch % 2:
            asyncio.run(write(source, range(batch, batch + 1)))
    ended = command("promote", f"rocksmq://{replica}", "--from", f"rocksmq://{source}")
    assert ended.status == 0, ended.err
    found = content(replica)
    for name in CHANNELS:
        assert [n for n, _ in found[name]] == list(range(1, 9 * BATCH + 1))
        assert found[f"left of {name}"] == BATCH // 2 - 1
