"""Nodes with roles of their own on one Kafka broker: what is noticed of a killed QueryNode and of a killed coordinator,
and how soon a node that joins answers.

    python -m benchmarks.failover [--times 20] [--lease-ms 3000] [--collections 300]

Two nodes own channels and store rows, two answer questions about a collection with two replicas, and two coordinate.
One client writes row after row, one asks for a strong count again and again, and one creates and drops a collection.
`failover.querynode.slowest_ms` is the slowest question around a SIGKILL of the QueryNode that had the next answer to
give; no question may fail. `failover.coordinator.ddl_ms` is the longest wait for a collection around a SIGKILL of the
leader, beside the longest write and the slowest question. Each is started again, under its name. `failover.join_ms` is
how long after its start a fourth node with all roles is ready, in a cluster of three with many collections.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from pathlib import Path

from benchmarks.nodes import QUIET_S, Longest, Nodes, tell
from benchmarks.proxy import narrow_batches, narrow_schema
from tests.brokers.kafka import KafkaCluster
from tidewal import connect
from tidewal.runtime.rows.schema import CollectionSchema

DEADLINE_S = 60.0
AT_ONCE = 8  # collections that are created side by side
JOINS = 3


@contextlib.asynccontextmanager
async def running(*calls: Longest) -> AsyncGenerator[None]:
    """Let the calls be repeated; the first that fails ends this."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each.run()) for each in calls]
        yield
        for task in tasks:
            task.cancel()


async def around(kill: Callable[[], Awaitable[None]], rest_s: float, *calls: Longest) -> list[float]:
    """The longest of each of the calls from before `kill` to `rest_s` behind it, in ms."""
    await asyncio.sleep(QUIET_S)
    for each in calls:
        each.ms = 0.0
    await kill()
    await asyncio.sleep(rest_s)
    return [each.ms for each in calls]


async def leader_of(url: str) -> str:
    """The name of the node that coordinates."""
    command = [sys.executable, "-m", "tidewal", "inspect", "cluster", url, "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    return str(json.loads(out)["leader"]["node"])


async def kills(nodes: Nodes, url: str, times: int, lease_ms: int) -> None:
    for name, roles in {"s": "proxy,streamingnode,datanode", "q": "querynode", "c": "mixcoord"}.items():
        for number in (1, 2):
            await nodes.start(f"{name}{number}", "--roles", roles)
    async with connect(url) as writer, connect(url) as reader, connect(url) as definer:
        await writer.create_collection(narrow_schema(), shards=2, deadline_s=DEADLINE_S)
        await writer.load_collection("narrow", replicas=2)
        row, numbers = narrow_batches()[0].slice(0, 1), itertools.count()

        async def define() -> None:
            name = f"defined_{next(numbers)}"
            schema = narrow_schema()
            await definer.create_collection(CollectionSchema(name, schema.fields, schema.primary_key), shards=1)
            await definer.drop_collection(name, deadline_s=DEADLINE_S)

        writes = Longest(lambda: writer.apply("narrow", row, deadline_s=DEADLINE_S))
        reads = Longest(lambda: reader.count("narrow", consistency="strong", deadline_s=DEADLINE_S))
        definitions = Longest(define)
        rest_s = 2 * lease_ms / 1000 + QUIET_S
        async with running(writes, reads, definitions):
            slowest: list[float] = []
            for name in itertools.islice(itertools.cycle(["q1", "q2"]), times):
                slowest += await around(partial(nodes.stop, name, signal.SIGKILL), QUIET_S + 1, reads)
                await nodes.start(name, "--roles", "querynode")
                await writer.load_collection("narrow")
                await asyncio.sleep(lease_ms / 1000)
            tell("failover.querynode.slowest_ms", slowest, {"goal_ms": 1000})
            found: list[list[float]] = []
            for _ in range(times):
                leader = await leader_of(url)
                found.append(
                    await around(partial(nodes.stop, leader, signal.SIGKILL), rest_s, definitions, writes, reads)
                )
                await nodes.start(leader, "--roles", "mixcoord")
            ddl, written, read = zip(*found, strict=True)
            beside = {"goal_ms": 1.1 * lease_ms + 1000, "longest_write_ms": max(written), "slowest_read_ms": max(read)}
            tell("failover.coordinator.ddl_ms", ddl, beside)


async def joins(nodes: Nodes, url: str, collections: int) -> None:
    for number in (1, 2, 3):
        await nodes.start(f"n{number}")
    async with connect(url) as client:
        fields, key = narrow_schema().fields, narrow_schema().primary_key
        row, names = narrow_batches()[0].slice(0, 1), iter([f"c{number}" for number in range(collections)])

        async def create() -> None:
            for name in names:
                await client.create_collection(CollectionSchema(name, fields, key), shards=2, deadline_s=DEADLINE_S)
                await client.apply(name, row, deadline_s=DEADLINE_S)

        await asyncio.gather(*(create() for _ in range(AT_ONCE)))
    times: list[float] = []
    for number in range(JOINS):
        began = time.perf_counter()
        await nodes.start(f"joining{number}")
        times.append((time.perf_counter() - began) * 1000)
        await nodes.stop(f"joining{number}", signal.SIGTERM)
    tell("failover.join_ms", times, {"goal_ms": 10_000, "collections": collections})


async def cluster(name: str, lease_ms: int, work: Callable[[Nodes, str], Awaitable[None]]) -> None:
    """Run `work` with nodes on a broker of their own."""
    with tempfile.TemporaryDirectory() as scratch, KafkaCluster(Path(scratch)) as kafka:
        url = f"{kafka.url}/{name}"
        nodes = Nodes(url, Path(scratch) / "data", lease_ms)
        try:
            await work(nodes, url)
        finally:
            for each in list(nodes.running):
                await nodes.stop(each, signal.SIGTERM)


async def main(times: int, lease_ms: int, collections: int) -> None:
    await cluster("kills", lease_ms, lambda nodes, url: kills(nodes, url, times, lease_ms))
    await cluster("joins", lease_ms, lambda nodes, url: joins(nodes, url, collections))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="how many kills of each kind")
    parser.add_argument("--lease-ms", type=int, default=3000)
    parser.add_argument("--collections", type=int, default=300)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.times, arguments.lease_ms, arguments.collections))
