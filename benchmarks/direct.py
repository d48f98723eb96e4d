"""Strong reads and writes of a cluster on one Kafka broker, whose nodes ask each other directly or through the log.

    python -m benchmarks.direct [--reads 200] [--rounds 5] [--tls]

Two clusters of two nodes each run side by side: `owner` has MixCoord and the StreamingNode, `door` the other roles.
Those of one have addresses. A client of each, in turn, inserts one row (`direct.insert.p50_ms`) and reads one with
strong consistency (`direct.strong_read.p50_ms`). A client uses the log in both, so two of the four hops stay there;
`direct.strong_read.waited.p50_ms` is what the QueryNode needs to become fresh, for which it asks the owner. The value
is that of direct connections; the same through the log, and the median ratio of the rounds, are beside it. With `--tls`
the connections are encrypted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import uvloop

from benchmarks.proxy import narrow_batches, narrow_schema
from benchmarks.report import figure
from tests.brokers.certificates import Authority
from tests.brokers.kafka import KafkaCluster
from tidewal import connect
from tidewal.actors.client import Client

NODES = {"owner": "mixcoord,streamingnode", "door": "proxy,datanode,querynode"}
WARM_UP = 50


@contextlib.asynccontextmanager
async def cluster(url: str, data: Path, settings: dict[str, str]) -> AsyncGenerator[Client]:
    """A client of a cluster of two nodes with these settings."""
    running: list[asyncio.subprocess.Process] = []
    command = [sys.executable, "-m", "tidewal", "run", "--wal", url, "--data", str(data), "--json"]
    try:
        for name, roles in NODES.items():
            node = await asyncio.create_subprocess_exec(
                *(*command, "--log-level", "error", "--name", name, "--roles", roles),
                stdout=subprocess.PIPE,
                env={**os.environ, **settings},
            )
            running.append(node)
            assert node.stdout is not None
            assert await node.stdout.readline(), f"{name} has ended"
        async with connect(url) as client:
            yield client
    finally:
        for node in reversed(running):
            node.send_signal(signal.SIGTERM)
            await node.wait()


async def measure(clients: dict[str, Client], reads: int, rounds: int) -> None:
    row = narrow_batches()[0].slice(0, 1)

    async def once(client: Client) -> dict[str, float]:
        began = time.perf_counter()
        await client.apply("narrow", row, deadline_s=60)
        written = time.perf_counter()
        read = await client.get("narrow", ["none"], consistency="strong", deadline_s=60)
        ended = time.perf_counter()
        took = {"insert": (written - began) * 1000, "strong_read": (ended - written) * 1000}
        return {**took, "strong_read.waited": read.waited_ms}

    for client in clients.values():
        await client.create_collection(narrow_schema(), shards=1)
        for _ in range(WARM_UP):
            await once(client)
    p50: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
    for _ in range(rounds):
        found: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
        for _ in range(reads):
            for name, client in clients.items():
                found[name].append(await once(client))
        for name, each in found.items():
            p50[name].append({what: statistics.median(one[what] for one in each) for what in each[0]})
    for what in p50["direct"][0]:
        direct, log = ([each[what] for each in p50[name]] for name in ("direct", "log"))
        ratios = [ours / theirs for ours, theirs in zip(direct, log, strict=True)]
        beside = {"log_ms": statistics.median(log), "ratio": statistics.median(ratios), "worst_ratio": max(ratios)}
        value, spread = statistics.median(direct), (min(direct), max(direct))
        figure(f"direct.{what}.p50_ms", value, "ms", spread=spread, beside=beside)


def addresses(scratch: Path, *, tls: bool) -> dict[str, str]:
    """The settings of nodes with addresses."""
    found = {"SECRET": "of a benchmark", "LISTEN": "127.0.0.1:0"}
    if tls:
        authority = Authority(scratch / "authority")
        certificate, key = authority.issue("node")
        found |= {"SSL__TLSCERT": certificate, "SSL__TLSKEY": key, "SSL__TLSCACERT": authority.certificate}
    return {f"TIDEWAL__CLUSTER__{name}": str(value) for name, value in found.items()}


async def main(reads: int, rounds: int, *, tls: bool) -> None:
    with tempfile.TemporaryDirectory() as scratch, KafkaCluster(Path(scratch)) as kafka:
        async with contextlib.AsyncExitStack() as stack:
            given = {"direct": addresses(Path(scratch), tls=tls), "log": dict[str, str]()}
            clients: dict[str, Client] = {}
            for name, settings in given.items():
                url = f"{kafka.url}/{name}"
                clients[name] = await stack.enter_async_context(cluster(url, Path(scratch) / name, settings))
            await measure(clients, reads, rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reads", type=int, default=200, help="of each cluster and round, each behind an insert")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tls", action="store_true")
    arguments = parser.parse_args()
    uvloop.run(main(arguments.reads, arguments.rounds, tls=arguments.tls))
