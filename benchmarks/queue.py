"""What the parts of a queue cost: a subscription with a filter beside one that reads all, and transactions beside the
same messages without.

    python -m benchmarks.queue [--messages 50000] [--rounds 5]

One message in a hundred passes. The reader is in another process than the owner of the RocksMQ, on the same machine,
and reads through the owner's socket with a `MsgStream`: all messages, or those that pass, up to the last one.

A client in the process of a node on RocksMQ sends `BATCH_MESSAGES` messages of 1 KiB to a topic at once, `WINDOW` times
side by side: by one `send`, or by one `send` of a transaction of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

import tidewal
from benchmarks.report import interleaved, ratio
from tidewal.adapters.rocksmq import open_wal

KIB = 1024
PASSING = 100  # one in so many
BATCH = 500
CHANNEL = "messages"
WHERE = 'tag == "wanted" and priority > 3'
BATCH_MESSAGES = 100
WINDOW = 8


async def fill(wal: tidewal.Wal, count: int) -> None:
    """Append `count` messages of 1 KiB, of which the last one passes."""
    await wal.create_channel(CHANNEL, tidewal.ChannelPolicy())
    stream = tidewal.MsgStream(wal, tidewal.HybridClock())
    stream.as_producer([CHANNEL])
    body = os.urandom(KIB)
    for begin in range(0, count, BATCH):
        numbers = range(begin + 1, min(begin + BATCH, count) + 1)
        await stream.produce([message(number, body) for number in numbers])
    await stream.close()


def message(number: int, body: bytes) -> tidewal.Record:
    """The message of that number, from 1; those that `PASSING` divides pass."""
    tag = "wanted" if number % PASSING == 0 else f"other-{number % 17}"
    return tidewal.Record(tidewal.RecordType.ROWS, key=b"%d" % number, tags={"tag": tag, "priority": 5}, body=body)


def serve(commands: Connection, url: str) -> None:
    """The reader's process: for each command, a filter and how many messages to wait for, how long reading took."""

    async def read(wal: tidewal.Wal, where: str | None, count: int) -> float:
        began_s = time.perf_counter()
        stream = tidewal.MsgStream(wal, tidewal.HybridClock(), where=where)
        stream.as_consumer([CHANNEL])
        while count > 0:
            count -= len(await anext(stream))
        took_s = time.perf_counter() - began_s
        await stream.close()
        return took_s

    async def run() -> None:
        wal = await open_wal(url, own=False)
        commands.send("connected")
        while (command := commands.recv()) is not None:
            commands.send(await read(wal, *command))
        await wal.close()

    uvloop.run(run())


def measure(count: int, rounds: int, url: str) -> None:
    """Read in turns, and print what a filter costs beside reading all."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    reader = spawning.Process(target=serve, args=(theirs, url), daemon=True)
    reader.start()
    theirs.close()
    ours.recv()

    def candidate(where: str | None, wanted: int) -> Callable[[], float]:
        def work() -> float:
            ours.send((where, wanted))
            return ours.recv() / count * 1e6

        return work

    candidates = {"filtered": candidate(WHERE, count // PASSING), "all": candidate(None, count)}
    measured = interleaved(candidates, rounds)
    ours.send(None)
    reader.join()
    ratio("queue.filter.1in100", measured["filtered"], measured["all"], "ratio to reading all",
          filtered_us_a_message=measured["filtered"].median, all_us_a_message=measured["all"].median)  # fmt: skip


def transactions(directory: Path, count: int, rounds: int) -> None:
    """Send to a topic in turns with and without transactions, and print what these cost."""
    bodies = [os.urandom(KIB) for _ in range(BATCH_MESSAGES)]

    async def plain(client: tidewal.Client) -> None:
        await client.send(CHANNEL, bodies)

    async def transacted(client: tidewal.Client) -> None:
        async with client.transaction() as t:
            await t.send(CHANNEL, bodies)

    async def rate(client: tidewal.Client, send: Callable[[tidewal.Client], Awaitable[None]]) -> float:
        async def some() -> None:
            for _ in range(count // BATCH_MESSAGES // WINDOW):
                await send(client)

        began_s = time.perf_counter()
        await asyncio.gather(*(some() for _ in range(WINDOW)))
        return count / (time.perf_counter() - began_s)

    async def opened(stack: AsyncExitStack) -> tidewal.Client:
        node = await stack.enter_async_context(tidewal.standalone(directory))
        client = await stack.enter_async_context(node.client())
        await client.create_topic(CHANNEL, 8)
        return client

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = AsyncExitStack()
        client = runner.run(opened(stack))
        candidates: dict[str, Callable[[], float]] = {
            "with": lambda: runner.run(rate(client, transacted)),
            "without": lambda: runner.run(rate(client, plain)),
        }
        measured = interleaved(candidates, rounds)
        runner.run(stack.aclose())
    ratio("queue.transactions.100", measured["with"], measured["without"], "ratio to the same messages without",
          with_per_s=measured["with"].median, without_per_s=measured["without"].median)  # fmt: skip


def filters(count: int, rounds: int) -> None:
    """Serve the log on a thread of its own, as a node does, while this one measures."""
    filled, measured = threading.Event(), threading.Event()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TIDEWAL_BENCH_DIR")) as directory:
        url = f"rocksmq://{Path(directory) / 'log'}"

        async def own() -> None:
            try:
                async with await open_wal(url, own=True) as wal:
                    await fill(wal, count)
                    filled.set()
                    await asyncio.to_thread(measured.wait)
            finally:
                filled.set()

        owner = threading.Thread(target=lambda: uvloop.run(own()))
        owner.start()
        filled.wait()
        try:
            measure(count, rounds, url)
        finally:
            measured.set()
            owner.join()


def main() -> None:
    """Measure the one, then the other."""
    parser = argparse.ArgumentParser(prog="benchmarks.queue", description=__doc__)
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    count = chosen.messages // PASSING * PASSING
    filters(count, chosen.rounds)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TIDEWAL_BENCH_DIR")) as directory:
        transactions(Path(directory), count, chosen.rounds)


if __name__ == "__main__":
    main()
