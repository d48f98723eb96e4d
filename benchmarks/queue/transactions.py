"""Transactions beside the same messages without: a client in the process of a node sends `BATCH` messages of 1 KiB to
a topic at once, `WINDOW` times side by side, by one `send` or by one `send` of a transaction of its own. On Kafka the
topic has one partition, since a transaction there is for one physical channel."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

import tidewal

from ..report import Figure, interleaved, ratio
from .bench import Bench

TOPIC = "messages"
BATCH = 100
WINDOW = 8
BODIES = [os.urandom(1024) for _ in range(BATCH)]

Send = Callable[[tidewal.Client], Awaitable[None]]


def measure(bench: Bench) -> list[Figure]:
    """On RocksMQ, over eight partitions, and on Kafka."""
    logs = {"rocksmq": (bench.folder(), "", 8), "kafka": (bench.folder(), bench.kafka(), 1)}
    return [_compared(name, *log, bench) for name, log in logs.items()]


def _compared(name: str, directory: Path, url: str, partitions: int, bench: Bench) -> Figure:
    async def opened(stack: AsyncExitStack) -> tidewal.Client:
        node = await stack.enter_async_context(tidewal.standalone(directory, wal=url))
        client = await stack.enter_async_context(node.client())
        await client.create_topic(TOPIC, partitions)
        return client

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = AsyncExitStack()
        client = runner.run(opened(stack))
        count = bench.sizes.messages
        candidates: dict[str, Callable[[], float]] = {
            "with": lambda: runner.run(_rate(client, count, _transacted)),
            "without": lambda: runner.run(_rate(client, count, _plain)),
        }
        measured = interleaved(candidates, bench.sizes.rounds)
        runner.run(stack.aclose())
    return ratio(f"queue.transactions.{name}", measured["with"], measured["without"], "ratio to the same without",
                 with_per_s=measured["with"].median, without_per_s=measured["without"].median)  # fmt: skip


async def _plain(client: tidewal.Client) -> None:
    await client.send(TOPIC, BODIES)


async def _transacted(client: tidewal.Client) -> None:
    async with client.transaction() as t:
        await t.send(TOPIC, BODIES)


async def _rate(client: tidewal.Client, count: int, send: Send) -> float:
    """Messages a second."""
    times = count // BATCH // WINDOW

    async def some() -> None:
        for _ in range(times):
            await send(client)

    began_s = time.perf_counter()
    await asyncio.gather(*(some() for _ in range(WINDOW)))
    return times * WINDOW * BATCH / (time.perf_counter() - began_s)
