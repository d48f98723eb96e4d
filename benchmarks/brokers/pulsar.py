"""Pulsar: Tidewal's adapter beside the bare client on the same broker, one topic, deduplication on, no fsync.

Bare are both clients of the library: `pulsar.asyncio`, one task for each message under way, and the synchronous one,
with callbacks and a thread that reads, which moves several times as many. Tidewal's entries have timestamps of a hybrid
clock, so each message has a property.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pulsar
from pulsar.asyncio import Client as AsyncClient

from benchmarks.brokers import strong_read
from benchmarks.brokers.candidates import IN_FLIGHT, PAYLOAD, Candidates
from benchmarks.report import interleaved
from tests.brokers.pulsar import PulsarStandalone
from tidewal.adapters.pulsar import open_wal

NAMESPACE = "public/bench"  # of the log; the bare client's topics make themselves elsewhere
BATCHING: dict[str, Any] = {"batching_enabled": True, "max_pending_messages": 0}


class Bench(Candidates):
    def __init__(self, broker: PulsarStandalone, count: int) -> None:
        super().__init__(lambda: open_wal(f"{broker.url}/{NAMESPACE}", web_url=broker.web_url), count)
        self._broker = broker

    def run(self, rounds: int) -> None:
        produced = interleaved(
            {
                "asyncio.send": lambda: self.measure("asyncio.send", self._bare_asyncio),
                "append": lambda: self.measure("append", self.append),
                "send_async": lambda: self.measure("send_async", self._bare_callbacks),
                "append_many": lambda: self.measure("append_many", self.append_many),
            },
            rounds,
        )
        self.tell("pulsar.append", produced, "append", "asyncio.send", "pulsar")
        self.tell("pulsar.produce", produced, "append_many", "send_async", "pulsar")
        self.fill("filled")
        consumed = interleaved(
            {
                "asyncio.read_next": lambda: self.measure("asyncio.read_next", self._bare_asyncio_reader, "filled"),
                "read_next": lambda: self.measure("read_next", self._bare_reader, "filled"),
                "batch_receive": lambda: self.measure("batch_receive", self._bare_batches, "filled"),
                "read": lambda: self.measure("read", self.read, "filled"),
            },
            rounds,
        )
        for bare in ("asyncio.read_next", "read_next", "batch_receive"):
            self.tell("pulsar.consume", consumed, "read", bare, "pulsar")

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

    async def _bare_asyncio_reader(self, topic: str, count: int) -> float:
        client = AsyncClient(self._broker.url, logger=_quiet())
        reader = await client.create_reader(_channel(topic), pulsar.MessageId.wrap(pulsar.MessageId.earliest))
        began_s = time.perf_counter()
        for _ in range(count):
            (await reader.read_next()).data()
        elapsed_s = time.perf_counter() - began_s
        await client.close()
        return elapsed_s

    async def _bare_reader(self, topic: str, count: int) -> float:
        client = pulsar.Client(self._broker.url, logger=_quiet())
        reader = client.create_reader(_channel(topic), pulsar.MessageId.earliest)
        began_s = time.perf_counter()
        for _ in range(count):
            reader.read_next().data()
        elapsed_s = time.perf_counter() - began_s
        client.close()
        return elapsed_s

    async def _bare_batches(self, topic: str, count: int) -> float:
        client = pulsar.Client(self._broker.url, logger=_quiet())
        consumer = client.subscribe(
            _channel(topic),
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


def _address(topic: str) -> str:
    return f"persistent://public/default/{topic}"


def _channel(topic: str) -> str:
    return f"persistent://{NAMESPACE}/{topic}"


def _quiet() -> pulsar.FileLogger:
    return pulsar.FileLogger(pulsar.LoggerLevel.Warn, os.devnull)


def main(count: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory, PulsarStandalone(Path(directory)) as broker:
        strong_read.main("pulsar", f"{broker.url}/public/strong?web_url={broker.web_url}")
        Bench(broker, count).run(rounds)
