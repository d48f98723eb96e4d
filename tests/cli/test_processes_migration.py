"""`tidewal migrate` of a log that several processes of one machine use, with real processes: all go over to the new
one, also where the process that has the directory is killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import tidewal
from tests.cli.test_online_migration import THINGS, clients_go_on, found
from tests.commands import said
from tests.turns import in_turn
from tidewal.runtime.errors import Moved
from tidewal.runtime.log.migration_state import MigrationPhase, MigrationState, change_migration_state
from tidewal.runtime.log.opening import open_wal

Start = Callable[..., "subprocess.Popen[str]"]

pytestmark = [pytest.mark.long, pytest.mark.in_turn(0, 3)]

ROWS = 100  # at the least, before and behind the migration


def start_processes(start: Start, data: Path) -> tuple[subprocess.Popen[str], int]:
    """A node in two processes, and the id of that which has the log's directory."""
    node = start("run", "--data", data, "--processes", 2, "--json")
    return node, int(said(node)["processes"]["owner"])


async def opened(url: str) -> None:
    await (await open_wal(url)).close()


def test_all_processes_and_their_clients_go_on_with_the_new_log(start: Start, tmp_path: Path) -> None:
    data, new = tmp_path / "data", f"rocksmq://{tmp_path / 'elsewhere'}"
    old = f"rocksmq://{data / 'log'}"
    node, _ = start_processes(start, data)
    migrate = partial(start, "migrate", old, "--to", new, "--tables", data / "tables")
    keys = asyncio.run(clients_go_on(data, migrate))
    assert node.poll() is None
    with pytest.raises(Moved):
        asyncio.run(opened(old))
    refused = start("migrate", old, "--to", new, "--cancel")
    assert refused.wait(60) != 0
    assert refused.stdout is not None
    assert "it is migrated already" in refused.stdout.read()
    node.send_signal(signal.SIGTERM)
    assert node.wait(60) == 0
    assert asyncio.run(again(data, new)) == keys


async def again(data: Path, url: str) -> list[int]:
    async with tidewal.standalone(data, wal=url) as node, node.client() as client:
        return await found(client)


async def written_meanwhile(data: Path | str, move: Callable[[], object]) -> list[int]:
    """Write rows before, while and after `move` is called. Returns the keys that were acknowledged: each is there then,
    once."""
    keys: list[int] = []
    ended = asyncio.Event()
    async with tidewal.connect(data, deadline_s=60) as client:
        await client.create_collection(THINGS)

        async def write() -> None:
            while not ended.is_set():
                await client.insert("things", [{"id": len(keys)}], deadline_s=300)
                keys.append(len(keys))

        async def until(number: int) -> None:
            while len(keys) < number:
                assert not writing.done(), writing.exception()
                await asyncio.sleep(0.05)

        writing = asyncio.create_task(write())
        await until(ROWS)
        await asyncio.to_thread(move)
        await until(len(keys) + ROWS)
        ended.set()
        await writing
        assert await found(client) == keys
        return keys


MOMENTS = ("copying", "nodes belong to the cluster", "is equal in both")  # in what the command says


def migrated_past_a_kill(migrate: Callable[[], subprocess.Popen[str]], owner: int, moment: str) -> str:
    """Migrate, kill the owner at that moment, and type the command again until it succeeds. Returns all it has said."""
    said, killed = "", False
    for _ in range(5):
        process = migrate()
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if moment in line and not killed:
                os.kill(owner, signal.SIGKILL)
                killed = True
        if process.wait(60) == 0:
            break
    else:
        raise AssertionError(said)
    if not killed:
        os.kill(owner, signal.SIGKILL)
    return said


def test_a_kill_of_the_process_that_has_the_directory_loses_nothing(start: Start, tmp_path: Path, turn: int) -> None:
    for place, moment in in_turn((*MOMENTS, "once it is over"), turn):
        kill_the_owner(start, tmp_path / place, moment)


def kill_the_owner(start: Start, tmp_path: Path, moment: str) -> None:
    data, new = tmp_path / "data", f"rocksmq://{tmp_path / 'elsewhere'}"
    old = f"rocksmq://{data / 'log'}"
    node, owner = start_processes(start, data)
    migrate = partial(start, "migrate", old, "--to", new, "--tables", data / "tables")

    rows = asyncio.run(written_meanwhile(data, lambda: print(migrated_past_a_kill(migrate, owner, moment))))
    with pytest.raises(Moved):
        asyncio.run(opened(old))
    node.send_signal(signal.SIGTERM)
    assert node.wait(60) == 0
    assert asyncio.run(again(data, new)) == rows


def killed_in_the_switch(
    migrate: Callable[..., subprocess.Popen[str]], tables: Path, *, back: bool, meanwhile: Callable[[], object]
) -> None:
    """Migrate, kill the command as it waits for nodes to leave, and type it again, or take it back."""
    process = migrate("--tables", tables)
    assert process.stdout is not None
    while "nodes belong to the cluster" not in process.stdout.readline():
        assert process.poll() is None
    process.kill()
    process.wait()
    meanwhile()
    ended = migrate("--cancel") if back else migrate("--tables", tables)
    assert ended.wait(150) == 0, ended.stdout and ended.stdout.read()


def test_a_command_that_is_killed_in_the_switch_goes_on_or_is_taken_back(
    start: Start, tmp_path: Path, turn: int
) -> None:
    for place, back in in_turn((False, True), turn):
        kill_the_command(start, tmp_path / place, back=back)


def kill_the_command(start: Start, tmp_path: Path, *, back: bool) -> None:
    """And with it the process that has the directory: another one takes that over, or it is started again."""
    data, new = tmp_path / "data", f"rocksmq://{tmp_path / 'elsewhere'}"
    old = f"rocksmq://{data / 'log'}"
    node, owner = start_processes(start, data)
    migrate = partial(start, "migrate", old, "--to", new)

    def move() -> None:
        killed_in_the_switch(migrate, data / "tables", back=back, meanwhile=lambda: os.kill(owner, signal.SIGKILL))

    rows = asyncio.run(written_meanwhile(data, move))
    node.send_signal(signal.SIGTERM)
    assert node.wait(60) == 0
    assert asyncio.run(again(data, old if back else new)) == rows


def test_a_node_that_was_killed_in_its_migration_waits_for_the_command(start: Start, tmp_path: Path) -> None:
    """It stopped its roles for that, and was killed then: nothing else goes on with it."""
    data, new = tmp_path / "data", f"rocksmq://{tmp_path / 'elsewhere'}"
    old = f"rocksmq://{data / 'log'}"

    async def left() -> None:
        async with tidewal.standalone(data) as node, node.client() as client:
            await client.create_collection(THINGS)
            await client.insert("things", [{"id": 1}])
        async with await open_wal(old) as wal:
            await change_migration_state(wal, MigrationState(MigrationPhase.MIGRATING, "1" * 32, new))

    async def waited_for() -> list[int]:
        async with tidewal.connect(new, deadline_s=60) as client:
            return await found(client)

    asyncio.run(left())
    node = start("run", "--data", data)
    assert node.stdout is not None
    while "the node starts when that has ended" not in node.stdout.readline():
        assert node.poll() is None
    ended = start("migrate", old, "--to", new, "--tables", data / "tables")
    assert ended.wait(60) == 0, ended.stdout and ended.stdout.read()
    assert asyncio.run(waited_for()) == [1]
    node.send_signal(signal.SIGTERM)
    assert node.wait(60) == 0
