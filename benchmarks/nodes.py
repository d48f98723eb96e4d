"""Two nodes on one Kafka broker: for how long a write waits when channels move, and when a node ends or is killed.

    python -m benchmarks.nodes [--times 20] [--lease-ms 3000]

A client writes row after row into one collection with one shard. `nodes.move.wait_ms` is its longest write around a
planned move of that channel (`tidewal move`), beside how long the move itself took; `nodes.ended.wait_ms` the longest
around the clean end of the node that has the channel, and `nodes.killed.wait_ms` around a SIGKILL of it, beside what is
expected: 1.1 leases. `nodes.restarted.wait_ms` is the longest around a SIGKILL of a node that is started under its name
at once, beside how long its start took.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path

from benchmarks.proxy import narrow_batches, narrow_schema
from benchmarks.report import figure
from tests.brokers.kafka import KafkaCluster
from tidewal import connect
from tidewal.actors.client import Client
from tidewal.actors.placement_client import PlacementClient

QUIET_S = 1.0  # around each event


class Nodes:
    """The processes of the nodes, by name."""

    def __init__(self, url: str, tables: Path, lease_ms: int) -> None:
        self.running: dict[str, asyncio.subprocess.Process] = {}
        self._command = [sys.executable, "-m", "tidewal", "run", "--wal", url, "--data", str(tables), "--json"]
        self._command += ["--log-level", "error"]
        self._environment = {
            **os.environ,
            "TIDEWAL__CLUSTER__LEASEMS": str(lease_ms),
            "TIDEWAL__CLUSTER__RENEWMS": str(lease_ms // 3),
        }
        self._numbers = itertools.count(1)

    async def start(self, name: str = "", *options: str) -> None:
        """Start a node, with a new name if none is given, and wait until it is ready."""
        name = name or f"n{next(self._numbers)}"
        command = [*self._command, "--name", name, *options]
        node = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, env=self._environment)
        self.running[name] = node
        assert node.stdout is not None
        assert await node.stdout.readline(), f"{name} has ended"

    async def stop(self, name: str, how: signal.Signals) -> None:
        """End a node, and wait until it is gone."""
        node = self.running.pop(name)
        node.send_signal(how)
        await node.wait()


class Longest:
    """Repeats a call for as long as it runs, and knows the longest."""

    def __init__(self, call: Callable[[], Awaitable[object]]) -> None:
        self.ms = 0.0
        self._call = call

    async def run(self) -> None:
        while True:
            began = time.perf_counter()
            await self._call()
            self.ms = max(self.ms, (time.perf_counter() - began) * 1000)


@contextlib.asynccontextmanager
async def watched(writer: Longest, waits: list[float]) -> AsyncGenerator[None]:
    """Note the longest wait from here to a while after the end of the block."""
    await asyncio.sleep(QUIET_S)
    writer.ms = 0.0
    yield
    await asyncio.sleep(QUIET_S)
    waits.append(writer.ms)


async def measure(nodes: Nodes, client: Client, times: int, lease_ms: int) -> None:
    cluster = PlacementClient(client)
    await cluster.balance(on=False)
    await client.create_collection(narrow_schema(), shards=1)
    [channel] = [vchannel.rpartition("_")[0] for vchannel in (await client.describe_collection("narrow")).vchannels]
    row = narrow_batches()[0].slice(0, 1)
    writer = Longest(lambda: client.apply("narrow", row, deadline_s=60))
    writing = asyncio.create_task(writer.run())
    took: list[float] = []
    moved: list[float] = []
    for _ in range(times):
        async with watched(writer, moved):
            began = time.perf_counter()
            await cluster.move(channel, await other(cluster, nodes))
            took.append((time.perf_counter() - began) * 1000)
    tell("nodes.move.wait_ms", moved, {"move_p50_ms": statistics.median(took), "move_worst_ms": max(took)})
    for name, how in (("nodes.ended.wait_ms", signal.SIGTERM), ("nodes.killed.wait_ms", signal.SIGKILL)):
        waits: list[float] = []
        for _ in range(max(1, times // 4)):
            async with watched(writer, waits):
                await nodes.stop(await owner(cluster), how)
                await asyncio.sleep(2 * lease_ms / 1000)
            await nodes.start()
            await asyncio.sleep(lease_ms / 1000)
        tell(name, waits, {"1.1_leases_ms": 1.1 * lease_ms})
    restarted: list[float] = []
    took = []
    for _ in range(max(1, times // 4)):
        async with watched(writer, restarted):
            name = await owner(cluster)
            await nodes.stop(name, signal.SIGKILL)
            began = time.perf_counter()
            await nodes.start(name)
            took.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(lease_ms / 1000)
    tell("nodes.restarted.wait_ms", restarted, {"start_p50_ms": statistics.median(took), "start_worst_ms": max(took)})
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)


async def owner(cluster: PlacementClient) -> str:
    """The node that has the channel."""
    return next(name for name, count in (await cluster.placement())["nodes"].items() if count)


async def other(cluster: PlacementClient, nodes: Nodes) -> str:
    """One that does not have it."""
    present = await owner(cluster)
    return next(name for name in nodes.running if name != present)


def tell(name: str, waits: Sequence[float], beside: dict[str, float]) -> None:
    beside = {"worst_ms": max(waits), "times": len(waits), **beside}
    figure(name, statistics.median(waits), "ms", spread=(min(waits), max(waits)), beside=beside)


async def main(times: int, lease_ms: int) -> None:
    with tempfile.TemporaryDirectory() as scratch, KafkaCluster(Path(scratch)) as kafka:
        nodes = Nodes(f"{kafka.url}/nodes", Path(scratch) / "data", lease_ms)
        try:
            await nodes.start()
            await nodes.start()
            async with connect(f"{kafka.url}/nodes") as client:
                await measure(nodes, client, times, lease_ms)
        finally:
            for name in list(nodes.running):
                await nodes.stop(name, signal.SIGTERM)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="how many moves; a quarter as many ends and kills")
    parser.add_argument("--lease-ms", type=int, default=3000)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.times, arguments.lease_ms))
