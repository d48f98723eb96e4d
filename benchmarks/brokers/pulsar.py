"""Pulsar: Tidewal's adapter beside the bare client on the same broker, one topic, deduplication on, no fsync.

Bare are both clients of the library: `pulsar.asyncio`, one task for each message under way, and the synchronous one,
with callbacks and a thread that reads, which moves several times as many. Tidewal's entries have timestamps of a hybrid
clock, so each message has a property.
"""

from __future__ import annotations

import asyncio
import os
import resource
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import uuid4

import pulsar
from pulsar.asyncio import Client as AsyncClient

from benchmarks.report import Rounds, figure, interleaved
from tests.brokers.pulsar import PulsarStandalone
from tidewal.adapters.pulsar import Pulsar, open_wal
from tidewal.runtime.clock import HybridClock
from tidewal.runtime.wal import Append, ChannelPolicy, From

PAYLOAD = bytes(range(256)) * 4
IN_FLIGHT = 1000  # single appends under way
PACK, PACKS_IN_FLIGHT = 100, 20
BATCHING = {"batching_enabled": True, "max_pending_messages": 0}

Work = Callable[[str, int], Awaitable[float]]


class Bench:
    """Candidates that share a broker; each produces into a topic of its own or reads the one that was filled."""

    def __init__(self, broker: PulsarStandalone, count: int) -> None:
        self._broker, self._count = broker, count
        self._clock = HybridClock()
        self.cpu: dict[str, list[float]] = {}

    def run(self, rounds: int) -> None:
        produced = interleaved(
            {
                "asyncio.send": lambda: self._measure("asyncio.send", self._bare_asyncio),
                "append": lambda: self._measure("append", self._append),
                "send_async": lambda: self._measure("send_async", self._bare_callbacks),
                "append_many": lambda: self._measure("append_many", self._append_many),
            },
            rounds,
        )
        self._tell("pulsar.append", produced, "append", "asyncio.send")
        self._tell("pulsar.produce", produced, "append_many", "send_async")
        asyncio.run(self._append_many("filled", self._count))
        consumed = interleaved(
            {
                "asyncio.read_next": lambda: self._measure("asyncio.read_next", self._bare_asyncio_reader, "filled"),
                "read_next": lambda: self._measure("read_next", self._bare_reader, "filled"),
                "batch_receive": lambda: self._measure("batch_receive", self._bare_batches, "filled"),
                "read": lambda: self._measure("read", self._read, "filled"),
            },
            rounds,
        )
        for bare in ("asyncio.read_next", "read_next", "batch_receive"):
            self._tell("pulsar.consume", consumed, "read", bare)

    def _tell(self, name: str, rounds: dict[str, Rounds], ours: str, bare: str) -> None:
        figure(
            name,
            rounds[ours].median,
            "messages/s",
            rounds[ours].spread,
            {
                f"pulsar.{bare}": rounds[bare].median,
                "ratio": rounds[ours].median / rounds[bare].median,
                "cpu_us": min(self.cpu[ours]),
                "bare_cpu_us": min(self.cpu[bare]),
            },
        )

    def _measure(self, name: str, work: Work, topic: str = "") -> float:
        """Messages per second; connecting is not measured."""
        before = resource.getrusage(resource.RUSAGE_SELF)
        elapsed_s = asyncio.run(work(topic or uuid4().hex, self._count))
        after = resource.getrusage(resource.RUSAGE_SELF)
        spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self.cpu.setdefault(name, []).append(spent_s / self._count * 1e6)
        return self._count / elapsed_s

    async def _bare_asyncio(self, topic: str, count: int) -> float:
        client = AsyncClient(self._broker.url, logger=_quiet())
        producer = await client.create_producer(_address(topic), max_pending_messages=2 * IN_FLIGHT)
        began_s = time.perf_counter()
        left = count

        async def one_after_another() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await producer.send(PAYLOAD)

        await asyncio.gather(*(one_after_another() for _ in range(IN_FLIGHT)))
        elapsed_s = time.perf_counter() - began_s
        await client.close()
        return elapsed_s

    async def _bare_callbacks(self, topic: str, count: int) -> float:
        client = pulsar.Client(self._broker.url, logger=_quiet())
        producer = client.create_producer(_address(topic), **BATCHING)
        answered = 0
        all_answered = threading.Event()

        def answer(_: object, __: object) -> None:
            nonlocal answered
            answered += 1
            if answered == count:
                all_answered.set()

        began_s = time.perf_counter()
        for _ in range(count):
            producer.send_async(PAYLOAD, answer)
        all_answered.wait()
        elapsed_s = time.perf_counter() - began_s
        client.close()
        return elapsed_s

    async def _append(self, channel: str, count: int) -> float:
        wal = await self._open(channel)
        left = count

        async def one_after_another() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await wal.append(channel, PAYLOAD, self._clock.now())

        began_s = time.perf_counter()
        await asyncio.gather(*(one_after_another() for _ in range(IN_FLIGHT)))
        elapsed_s = time.perf_counter() - began_s
        await wal.close()
        return elapsed_s

    async def _append_many(self, channel: str, count: int) -> float:
        wal = await self._open(channel)
        left = count

        async def one_after_another() -> None:
            nonlocal left
            while left > 0:
                left -= PACK
                stamp = self._clock.now()
                await wal.append_many([Append(channel, PAYLOAD, stamp + place) for place in range(PACK)])

        began_s = time.perf_counter()
        await asyncio.gather(*(one_after_another() for _ in range(PACKS_IN_FLIGHT)))
        elapsed_s = time.perf_counter() - began_s
        await wal.close()
        return elapsed_s

    async def _open(self, channel: str) -> Pulsar:
        wal = await open_wal(self._broker.url, web_url=self._broker.web_url)
        await wal.create_channel(channel, ChannelPolicy())
        await wal.append(channel, PAYLOAD)
        return wal

    async def _bare_asyncio_reader(self, topic: str, count: int) -> float:
        client = AsyncClient(self._broker.url, logger=_quiet())
        reader = await client.create_reader(_address(topic), pulsar.MessageId.wrap(pulsar.MessageId.earliest))
        began_s = time.perf_counter()
        for _ in range(count):
            (await reader.read_next()).data()
        elapsed_s = time.perf_counter() - began_s
        await client.close()
        return elapsed_s

    async def _bare_reader(self, topic: str, count: int) -> float:
        client = pulsar.Client(self._broker.url, logger=_quiet())
        reader = client.create_reader(_address(topic), pulsar.MessageId.earliest)
        began_s = time.perf_counter()
        for _ in range(count):
            reader.read_next().data()
        elapsed_s = time.perf_counter() - began_s
        client.close()
        return elapsed_s

    async def _bare_batches(self, topic: str, count: int) -> float:
        client = pulsar.Client(self._broker.url, logger=_quiet())
        consumer = client.subscribe(
            _address(topic),
            "bench",
            initial_position=pulsar.InitialPosition.Earliest,
            batch_receive_policy=pulsar.ConsumerBatchReceivePolicy(1000, -1, 100),
        )
        began_s = time.perf_counter()
        got = 0
        while got < count:
            got += len([message.data() for message in consumer.batch_receive()])
        elapsed_s = time.perf_counter() - began_s
        consumer.unsubscribe()
        client.close()
        return elapsed_s

    async def _read(self, channel: str, count: int) -> float:
        wal = await open_wal(self._broker.url, web_url=self._broker.web_url)
        reader = wal.read(channel, From.EARLIEST)
        began_s = time.perf_counter()
        got = 0
        while got < count:
            got += len(await anext(reader))
        elapsed_s = time.perf_counter() - began_s
        await wal.close()
        return elapsed_s


def _address(topic: str) -> str:
    return f"persistent://public/default/{topic}"


def _quiet() -> pulsar.FileLogger:
    return pulsar.FileLogger(pulsar.LoggerLevel.Warn, os.devnull)


def main(count: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory, PulsarStandalone(Path(directory)) as broker:
        Bench(broker, count).run(rounds)
