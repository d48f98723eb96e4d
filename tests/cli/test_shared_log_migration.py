"""`tidewal migrate` of a log on brokers while its nodes run: they, and clients elsewhere, go on with the new one."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tidewal
from tests.backends import log_url
from tests.cli.test_online_migration import ROWS, THINGS, clients_go_on, found
from tests.turns import cases_in_turn
from tidewal.runtime.errors import Moved
from tidewal.runtime.log.opening import open_wal

pytestmark = [pytest.mark.broker, pytest.mark.long]


def start_nodes(
    start: Callable[..., subprocess.Popen[str]], directory: Path, url: str, names: str
) -> list[subprocess.Popen[str]]:
    """Nodes of one cluster, in processes of their own."""
    options = ("--wal", url, "--tables", directory / "tables")
    return [start("run", "--data", directory / name, "--name", name, *options) for name in names]


def stop_nodes(nodes: list[subprocess.Popen[str]]) -> None:
    for node in nodes:
        node.send_signal(signal.SIGTERM)
    assert [node.wait(60) for node in nodes] == [0 for _ in nodes]


async def found_at(url: str) -> list[int]:
    async with tidewal.connect(url, deadline_s=60) as client:
        return await found(client)


async def opened(url: str) -> None:
    await (await open_wal(url)).close()


@pytest.mark.parametrize("kind", cases_in_turn(("kafka", "rocksmq")))
def test_nodes_on_kafka_and_their_clients_go_over_to_another_log(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, kafka: Any, kind: str
) -> None:
    old = log_url("kafka", kafka)
    new = log_url("kafka", kafka) if kind == "kafka" else f"rocksmq://{tmp_path / 'elsewhere'}"
    nodes = start_nodes(start, tmp_path, old, "ab" if kind == "kafka" else "a")
    migrate = partial(start, "migrate", old, "--to", new, "--tables", tmp_path / "tables")
    keys = asyncio.run(clients_go_on(old, migrate))
    assert not any(node.poll() for node in nodes)
    stop_nodes(nodes)
    with pytest.raises(Moved):
        asyncio.run(opened(old))
    nodes = start_nodes(start, tmp_path, new, "c")
    assert asyncio.run(found_at(new)) == keys
    stop_nodes(nodes)


async def until_killed(old: str, migrate: Callable[[], subprocess.Popen[str]], end: Callable[[], None]) -> list[int]:
    """Write to nodes whose migration is killed as soon as it waits for them to leave, and `end` that. Returns the keys
    that were acknowledged."""
    keys: list[int] = []
    async with tidewal.connect(old, deadline_s=60) as client:
        await client.create_collection(THINGS)

        async def write() -> None:
            while True:
                await client.insert("things", [{"id": len(keys)}], deadline_s=300)
                keys.append(len(keys))

        writing = asyncio.create_task(write())
        process = migrate()
        assert process.stdout is not None
        while "nodes belong to the cluster" not in await asyncio.to_thread(process.stdout.readline):
            assert process.poll() is None
        process.kill()
        process.wait()
        await asyncio.to_thread(end)
        before = len(keys)
        while len(keys) < before + ROWS:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        assert set(keys) <= set(await found(client))
    return keys


@pytest.mark.parametrize("end", cases_in_turn(("goes on", "is taken back")))
def test_a_command_that_is_killed_in_the_switch_goes_on_or_is_taken_back(
    start: Callable[..., subprocess.Popen[str]], command: Callable[..., Any], tmp_path: Path, kafka: Any, end: str
) -> None:
    back = end == "is taken back"
    old, new = log_url("kafka", kafka), log_url("kafka", kafka)
    nodes = start_nodes(start, tmp_path, old, "ab")
    arguments = ("migrate", old, "--to", new, *(("--cancel",) if back else ("--tables", str(tmp_path / "tables"))))

    def end() -> None:
        status = start("migrate", old, "--status")
        assert status.stdout is not None
        assert "migrating, the other log is" in status.stdout.read()
        ended = start(*arguments)
        assert ended.wait(200) == 0, ended.stdout and ended.stdout.read()

    asyncio.run(until_killed(old, partial(start, *arguments[:4], "--tables", tmp_path / "tables"), end))
    assert not any(node.poll() for node in nodes)
    stop_nodes(nodes)
    assert command("migrate", old, "--status").out.startswith("open" if back else "migrated")
