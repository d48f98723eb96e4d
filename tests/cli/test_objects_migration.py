"""`tidewal migrate` of a log in an object store while its nodes run, with real processes over a directory."""

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
from tests.cli.test_online_migration import clients_go_on, found
from tests.cli.test_processes_migration import MOMENTS, killed_in_the_switch, migrated_past_a_kill, written_meanwhile
from tests.commands import said
from tests.turns import in_turn
from tidewal.runtime.config.loading import load_settings

Start = Callable[..., "subprocess.Popen[str]"]

pytestmark = [pytest.mark.long, pytest.mark.in_turn(2, 3), pytest.mark.usefixtures("linked")]


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of all processes by which they write through the one that owns the log, and wait for short leases."""
    monkeypatch.setenv("TIDEWAL__CLUSTER__SECRET", "a secret of these tests alone")
    monkeypatch.setenv("TIDEWAL__OBJECTS__LISTEN", "127.0.0.1:0")
    monkeypatch.setenv("TIDEWAL__OBJECTS__LEASES", "4")
    monkeypatch.setenv("TIDEWAL__CLUSTER__LEASEMS", "4000")


def logs_in(tmp_path: Path) -> tuple[str, str]:
    return f"file://{tmp_path / 'log'}", f"file://{tmp_path / 'elsewhere'}"


def start_nodes(start: Start, tmp_path: Path, url: str) -> list[subprocess.Popen[str]]:
    """Two nodes of one cluster, of which the first one owns the log."""
    nodes: list[subprocess.Popen[str]] = []
    for name in "ab":
        options = ("--data", tmp_path / name, "--name", name, "--tables", tmp_path / "tables")
        nodes.append(start("run", *options, "--wal", url, "--json"))
        said(nodes[-1])
    return nodes


def stop_nodes(*nodes: subprocess.Popen[str]) -> None:
    for node in nodes:
        node.send_signal(signal.SIGTERM)
    assert [node.wait(60) for node in nodes] == [0 for _ in nodes]


async def again(data: Path, url: str) -> list[int]:
    async with tidewal.standalone(data, wal=url, settings=load_settings()) as node, node.client() as client:
        return await found(client)


def test_nodes_and_clients_go_on_with_the_new_log(start: Start, tmp_path: Path) -> None:
    old, new = logs_in(tmp_path)
    nodes = start_nodes(start, tmp_path, old)
    migrate = partial(start, "migrate", old, "--to", new, "--tables", tmp_path / "tables")
    keys = asyncio.run(clients_go_on(old, migrate))
    assert not any(node.poll() for node in nodes)
    stop_nodes(*nodes)
    assert asyncio.run(again(tmp_path, new)) == keys


def test_a_kill_of_the_node_that_owns_the_log_loses_nothing(start: Start, tmp_path: Path, turn: int) -> None:
    for place, moment in in_turn(MOMENTS, turn):
        kill_the_owner(start, tmp_path / place, moment)


def kill_the_owner(start: Start, tmp_path: Path, moment: str) -> None:
    old, new = logs_in(tmp_path)
    owner, other = start_nodes(start, tmp_path, old)
    migrate = partial(start, "migrate", old, "--to", new, "--tables", tmp_path / "tables")
    rows = asyncio.run(written_meanwhile(old, lambda: print(migrated_past_a_kill(migrate, owner.pid, moment))))
    stop_nodes(other)
    assert asyncio.run(again(tmp_path, new)) == rows


def test_a_command_that_is_killed_in_the_switch_goes_on_or_is_taken_back(
    start: Start, tmp_path: Path, turn: int
) -> None:
    for place, back in in_turn((False, True), turn):
        kill_the_command(start, tmp_path / place, back=back)


def kill_the_command(start: Start, tmp_path: Path, *, back: bool) -> None:
    old, new = logs_in(tmp_path)
    owner, other = start_nodes(start, tmp_path, old)
    migrate = partial(start, "migrate", old, "--to", new)

    def move() -> None:
        killed_in_the_switch(migrate, tmp_path / "tables", back=back, meanwhile=lambda: os.kill(owner.pid, 9))

    rows = asyncio.run(written_meanwhile(old, move))
    stop_nodes(other)
    assert asyncio.run(again(tmp_path, old if back else new)) == rows
