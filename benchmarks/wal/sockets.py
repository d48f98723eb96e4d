"""The same appends from other processes, through the owner's socket, and in the owner's process."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import uvloop

from tidewal.adapters.rocksmq import open_wal

from ..report import interleaved, per_second, ratio
from .limits import KIB, Bench, produce

CASES = (
    ("1x1KiB", 1, 1, 1000),
    ("16x1KiB", 1, 16, 400),
    ("4x16x1KiB", 4, 16, 200),
)  # processes, in flight each, rounds
PROCESSES = 4
ROUNDS = 9


class Producer:
    """A process that has opened the URL of a directory which this process owns."""

    def __init__(self, url: str) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._ours, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_serve, args=(theirs, url), daemon=True)
        self._process.start()
        theirs.close()
        self._ours.recv()  # it is connected

    def begin(self, in_flight: int, rounds: int) -> None:
        self._ours.send((in_flight, rounds))

    def end(self) -> float:
        """Wait for what was begun; seconds that it took there."""
        return self._ours.recv()

    def close(self) -> None:
        self._ours.send(None)
        self._process.join()


def _serve(commands: Connection, url: str) -> None:
    async def run() -> None:
        wal = await open_wal(url, own=False)
        payload = os.urandom(KIB)
        commands.send("connected")
        while (command := commands.recv()) is not None:
            in_flight, rounds = command
            began_s = time.perf_counter()
            await produce(wal, in_flight, payload, rounds)
            commands.send(time.perf_counter() - began_s)
        await wal.close()

    uvloop.run(run())


def measure(bench: Bench) -> None:
    log, raw = bench.log, bench.raw
    payload = os.urandom(KIB)
    producers = [Producer(log.url) for _ in range(PROCESSES)]
    try:
        for name, processes, in_flight, rounds in CASES:
            together = payload * in_flight * processes
            count = processes * in_flight * rounds
            candidates = {
                "socket": lambda: count / _through(producers[:processes], in_flight, rounds),  # noqa: B023 -- called here
                "log": lambda: per_second(count, lambda: log.append(processes * in_flight, payload, rounds)),  # noqa: B023 -- called here
                "raw": lambda: per_second(count, lambda: [raw.append(together) for _ in range(rounds)]),  # noqa: B023 -- called here
            }
            measured = interleaved(candidates, rounds=ROUNDS)
            log.recycle()
            to_raw = measured["socket"].median / measured["raw"].median
            ratio(f"wal.socket.{name}", measured["socket"], measured["log"], "ratio to appends in the owner's process",
                  messages_per_s=measured["socket"].median, to_raw=to_raw)  # fmt: skip
    finally:
        for producer in producers:
            producer.close()


def _through(producers: Sequence[Producer], in_flight: int, rounds: int) -> float:
    for producer in producers:
        producer.begin(in_flight, rounds)
    return max(producer.end() for producer in producers)
