"""`tidewal run` on a log of brokers where a node runs already, as in a rolling upgrade: the new one has it, the old one
ends, and clients that write meanwhile notice a pause."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands import tracebacks
from tidewal.actors.client import Client
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.rows.schema import CollectionSchema, Field

pytestmark = [pytest.mark.broker, pytest.mark.slow]

THINGS = CollectionSchema("things", (Field("id", "int64"),), "id")
BOUND_S = 60.0


class Writers:
    """Tasks that insert row after row. Whoever waits for them fails with them."""

    def __init__(self, client: Client, rng: random.Random, tasks: asyncio.TaskGroup) -> None:
        self.written = 0
        self._tried = 0
        self._stopping = False
        self._client, self._rng = client, rng
        for _ in range(3):
            tasks.create_task(self._write())

    async def _write(self) -> None:
        while not self._stopping:
            self._tried += 1
            await self._client.insert("things", [{"id": self._tried}], deadline_s=BOUND_S)
            self.written += 1
            await asyncio.sleep(self._rng.expovariate(200))  # how busy the writers are

    async def more(self, count: int) -> None:
        """Wait until so many more are acknowledged."""
        wanted = self.written + count
        async with asyncio.timeout(BOUND_S):
            while self.written < wanted:  # noqa: ASYNC110 -- the tasks tell it in no other way
                await asyncio.sleep(0.01)

    def stop(self) -> None:
        self._stopping = True


async def ready(node: subprocess.Popen[str]) -> None:
    def started() -> bool:
        assert node.stdout is not None
        return any(line.startswith("{") for line in node.stdout)

    assert await asyncio.wait_for(asyncio.to_thread(started), BOUND_S)


async def assert_superseded(node: subprocess.Popen[str]) -> None:
    out, _ = await asyncio.to_thread(node.communicate, timeout=BOUND_S)
    assert node.returncode == 2, out
    assert "Fenced: " in out
    assert "has taken the log over" in out
    assert not tracebacks(out), out[out.index("Traceback") :][:2000]


@pytest.mark.long
async def test_the_newest_node_has_the_log_and_nothing_is_lost_or_doubled(
    broker_url: str, start: Callable[..., Any], tmp_path: Path, rng: random.Random
) -> None:
    def run(name: str) -> subprocess.Popen[str]:
        return start("run", "--data", tmp_path / name, "--wal", broker_url, "--json")

    first = run("first")
    await ready(first)
    wal = await open_wal(broker_url)
    async with Client(wal) as client:
        await client.create_collection(THINGS, shards=2)
        async with asyncio.TaskGroup() as tasks:
            writers = Writers(client, rng, tasks)
            await writers.more(100)
            second = run("second")
            await ready(second)
            await assert_superseded(first)
            await writers.more(100)
            second.send_signal(signal.SIGSTOP)
            third = run("third")
            await ready(third)
            await writers.more(100)
            second.send_signal(signal.SIGCONT)
            await assert_superseded(second)
            await writers.more(100)
            writers.stop()
        assert await client.count("things", consistency="strong") == writers.written
        await client.flush("things")
        assert (await client.compact("things"))["rows"] == writers.written
    await wal.close()
    third.send_signal(signal.SIGTERM)
    out, _ = await asyncio.to_thread(third.communicate, timeout=BOUND_S)
    assert third.returncode == 0, out
    assert not tracebacks(out)
