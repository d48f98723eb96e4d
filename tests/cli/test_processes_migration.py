"""`tidewal migrate` of a log that several processes of one machine use, with real processes: all go over to the new
one, also where the process that has the directory is killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest

import tidewal
from tests.cli.test_online_migration import THINGS, clients_go_on, found
from tidewal.runtime.errors import Moved
from tidewal.runtime.log.opening import open_wal

Start = Callable[..., "subprocess.Popen[str]"]


def start_processes(start: Start, data: Path) -> tuple[subprocess.Popen[str], int]:
    """A node in two processes, and the id of that which has the log's directory."""
    node = start("run", "--data", data, "--processes", 2, "--json")
    assert node.stdout is not None
    return node, owner_in(node.stdout)


def owner_in(output: IO[str]) -> int:
    import json

    while not (line := output.readline()).startswith("{"):
        assert line, "the node has ended"
    return int(json.loads(line)["processes"]["owner"])


async def opened(url: str) -> None:
    await (await open_wal(url)).close()


@pytest.mark.long
def test_all_processes_and_their_clients_go_on_with_the_new_log(start: Start, tmp_path: Path) -> None:
    data, new = tmp_path / "data", f"rocksmq://{tmp_path / 'elsewhere'}"
    old = f"rocksmq://{data / 'log'}"
    node, _ = start_processes(start, data)
    migrate = partial(start, "migrate", old, "--to", new, "--tables", data / "tables")
    keys = asyncio.run(clients_go_on(data, migrate))
    assert node.poll() is None
    with pytest.raises(Moved):
        asyncio.run(opened(old))
    node.send_signal(signal.SIGTERM)
    assert node.wait(60) == 0
    assert asyncio.run(again(data, new)) == keys


async def again(data: Path, url: str) -> list[int]:
    async with tidewal.standalone(data, wal=url) as node, node.client() as client:
        return await found(client)
