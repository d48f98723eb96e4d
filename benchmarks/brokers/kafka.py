"""Kafka: Tidewal's adapter beside bare aiokafka on the same broker, one node, one partition, acks=all, idempotent.

The bare producer is set up for throughput (batches of 256 KiB, linger 5 ms), or fills its batches itself, which is the
fastest that aiokafka has. Tidewal's entries have timestamps of a hybrid clock, so most of them have a header.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from benchmarks.brokers import strong_read
from benchmarks.brokers.candidates import IN_FLIGHT, PAYLOAD, Candidates
from benchmarks.brokers.frameworks import LIKEST, Frameworks, installed
from benchmarks.report import interleaved
from tests.brokers.kafka import KafkaCluster
from tidewal.adapters.kafka import open_wal

BATCH_BYTES, LINGER_MS = 256 * 1024, 5
FRAMEWORK_ROUNDS = 3


class Bench(Candidates):
    def __init__(self, url: str, count: int) -> None:
        super().__init__(lambda: open_wal(f"{url}/bench"), count)
        self._bootstrap = url.removeprefix("kafka://")

    def run(self, rounds: int) -> None:
        produced = interleaved(
            {
                "send_and_wait": lambda: self.measure("send_and_wait", self._bare_send),
                "append": lambda: self.measure("append", self.append),
                "send_batch": lambda: self.measure("send_batch", self._bare_batches),
                "append_many": lambda: self.measure("append_many", self.append_many),
            },
            rounds,
        )
        self.tell("kafka.append", produced, "append", "send_and_wait", "aiokafka")
        self.tell("kafka.produce", produced, "append_many", "send_batch", "aiokafka")
        self.fill("filled")
        consumed = interleaved(
            {
                "getmany": lambda: self.measure("getmany", self._bare_getmany, "filled"),
                "read": lambda: self.measure("read", self.read, "filled"),
            },
            rounds,
        )
        self.tell("kafka.consume", consumed, "read", "getmany", "aiokafka")
        self.fill("plain", plain=True)
        for name in installed():
            self._beside(name, min(rounds, FRAMEWORK_ROUNDS))

    def _beside(self, framework: str, rounds: int) -> None:
        """The same beside a framework, on messages without headers: FastStream takes no headers of bytes."""
        produce, consume = Frameworks(self._bootstrap).ways(framework)
        (topic,) = asyncio.run(self._topics("plain"))
        ours = {"append": self.append, "append_many": self.append_many}[LIKEST[framework]]
        produced = interleaved(
            {
                framework: lambda: self.measure(f"{framework}.produce", produce),
                LIKEST[framework]: lambda: self.measure(LIKEST[framework], ours),
            },
            rounds,
        )
        consumed = interleaved(
            {
                framework: lambda: self.measure(f"{framework}.consume", consume, topic),
                "read": lambda: self.measure("read", self.read, "plain"),
            },
            rounds,
        )
        name = {"append": "kafka.append", "append_many": "kafka.produce"}[LIKEST[framework]]
        self.tell(name, produced, LIKEST[framework], framework, "framework", f"{framework}.produce")
        self.tell("kafka.consume", consumed, "read", framework, "framework", f"{framework}.consume")

    async def _bare_send(self, topic: str, count: int) -> float:
        async with self._producer(LINGER_MS) as producer:
            await producer.send_and_wait(topic, PAYLOAD, partition=0)
            began_s = time.perf_counter()
            left = count

            async def one_after_another() -> None:
                nonlocal left
                while left > 0:
                    left -= 1
                    await producer.send_and_wait(topic, PAYLOAD, partition=0)

            await asyncio.gather(*(one_after_another() for _ in range(IN_FLIGHT)))
            return time.perf_counter() - began_s

    async def _bare_batches(self, topic: str, count: int) -> float:
        async with self._producer(0) as producer:
            await producer.send_and_wait(topic, PAYLOAD, partition=0)
            began_s = time.perf_counter()
            waiting: list[asyncio.Future[object]] = []
            sent = 0
            while sent < count:
                batch = producer.create_batch()
                while sent < count and batch.append(timestamp=None, key=None, value=PAYLOAD):
                    sent += 1
                batch.close()
                waiting.append(await producer.send_batch(batch, topic, partition=0))
            await asyncio.gather(*waiting)
            return time.perf_counter() - began_s

    def _producer(self, linger_ms: int) -> AIOKafkaProducer:
        return AIOKafkaProducer(
            bootstrap_servers=self._bootstrap,
            enable_idempotence=True,
            max_batch_size=BATCH_BYTES,
            linger_ms=linger_ms,
        )

    async def _bare_getmany(self, channel: str, count: int) -> float:
        async with AIOKafkaConsumer(bootstrap_servers=self._bootstrap, auto_offset_reset="earliest") as consumer:
            (topic,) = await self._topics(channel)
            consumer.assign([TopicPartition(topic, 0)])
            began_s = time.perf_counter()
            got = 0
            while got < count:
                for records in (await consumer.getmany(timeout_ms=1000)).values():
                    got += len(records)
            return time.perf_counter() - began_s

    async def _topics(self, channel: str) -> list[str]:
        """The topics of a channel."""
        async with AIOKafkaConsumer(bootstrap_servers=self._bootstrap) as consumer:
            return [name for name in await consumer.topics() if name.startswith(f"bench.{channel}.")]


def main(count: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory, KafkaCluster(Path(directory)) as cluster:
        strong_read.main("kafka", f"{cluster.url}/strong")
        Bench(cluster.url, count).run(rounds)
