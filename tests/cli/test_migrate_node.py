"""`tidewal migrate` of the log of a node that was killed, by processes that are killed, too: a node goes on behind."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import tidewal
from tests.actors.test_kill import assert_table_is, killed_run
from tidewal.runtime.errors import Moved

ACKNOWLEDGED = 100  # batches, before the node is killed
KILLS = 12
LATER_S = 0.05


async def rows(directory: Path, log: Path) -> set[int]:
    """The keys that a node has which goes on with that log, and stores."""
    async with tidewal.standalone(directory, wal=f"rocksmq://{log}") as node, node.client() as client:
        found = (await client.query("things", columns=["id"], consistency="strong")).table["id"].to_pylist()
        assert len(found) == len(set(found))
        await client.flush("things")
    return set(found)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.in_turn(0, 2)
def test_a_killed_node_goes_on_behind_migrations_that_are_killed(
    command: Callable[..., Any], start: Callable[..., Any], tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    data, old = tmp_path / "data", tmp_path / "data" / "log"
    expected: set[int] = set()
    for round in range(2):  # there, and on to a third log
        new = tmp_path / f"new{round}"
        arguments = ("migrate", f"rocksmq://{old}", "--to", f"rocksmq://{new}", "--tables", data / "tables")
        if not round:
            data.mkdir()
            tried, acknowledged = killed_run(data, 0, rng.randrange(2**31), ACKNOWLEDGED)
            expected = {key for first in acknowledged for key in range(first, first + tried[first])}
        for step in range(KILLS):
            process = start(*arguments)
            for _ in range(step):
                process.stdout.readline()
            with suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0, LATER_S))
            process.send_signal(signal.SIGKILL)
            process.wait()
        ended = command(*map(str, arguments))
        assert ended.status == 0, ended.err
        found = asyncio.run(rows(data, new))
        assert expected <= found, "an acknowledged batch was lost"
        assert not round or found == expected
        expected = found
        assert_table_is(data / "tables" / "things" / "log", expected)
        assert command("verify", "journal", f"rocksmq://{new}").status == 0
        with pytest.raises(Moved, match=str(new)):
            asyncio.run(rows(data, old))
        old = new
