"""A subscription with a filter beside one that reads all.

One message in a hundred passes. The reader is in another process than the owner of the RocksMQ, on the same machine,
and reads through the owner's socket with a `MsgStream`: all messages, or those that pass, up to the last one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import uvloop

import tidewal
from tidewal.adapters.rocksmq import open_wal

from ..report import Figure, interleaved, ratio
from .bench import Bench

KIB = 1024
PASSING = 100  # one in so many
BATCH = 500
CHANNEL = "messages"
WHERE = 'tag == "wanted" and priority > 3'


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


def _compared(count: int, rounds: int, url: str) -> Figure:
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
    beside = {f"{name}_us_a_message": each.median for name, each in measured.items()}
    return ratio("queue.filter.1in100", measured["filtered"], measured["all"], "ratio to reading all", **beside)


def measure(bench: Bench) -> list[Figure]:
    """Serve the log on a thread of its own, as a node does, while this one measures."""
    count = bench.sizes.messages // PASSING * PASSING
    filled, measured = threading.Event(), threading.Event()
    url = f"rocksmq://{bench.folder() / 'log'}"

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
        return [_compared(count, bench.sizes.rounds, url)]
    finally:
        measured.set()
        owner.join()
