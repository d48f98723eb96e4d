"""Kafka: Tidewal's adapter beside bare aiokafka on the same broker, one node, one partition, acks=all, idempotent.

The bare producer is set up for throughput (batches of 256 KiB, linger 5 ms), or fills its batches itself, which is the
fastest that aiokafka has. Tidewal's entries have timestamps of a hybrid clock, so most of them have a header.
"""

from __future__ import annotations

import asyncio
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import uuid4

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from benchmarks.report import Rounds, figure, interleaved
from tests.brokers.kafka import KafkaCluster
from tidewal.adapters.kafka import KafkaWal, open_wal
from tidewal.runtime.clock import HybridClock
from tidewal.runtime.wal import Append, ChannelPolicy, From

PAYLOAD = bytes(range(256)) * 4
IN_FLIGHT = 1000  # single appends under way
PACK, PACKS_IN_FLIGHT = 100, 20
BATCH_BYTES, LINGER_MS = 256 * 1024, 5

Work = Callable[[str, int], Awaitable[None]]


class Bench:
    """Candidates that share a broker; each produces into a topic of its own or reads the one that was filled."""

    def __init__(self, url: str, count: int) -> None:
        self._url, self._count = url, count
        self._bootstrap = url.removeprefix("kafka://")
        self._clock = HybridClock()
        self.cpu: dict[str, list[float]] = {}

    def run(self, rounds: int) -> None:
        produced = interleaved(
            {
                "send_and_wait": lambda: self._measure("send_and_wait", self._bare_send),
                "append": lambda: self._measure("append", self._append),
                "send_batch": lambda: self._measure("send_batch", self._bare_batches),
                "append_many": lambda: self._measure("append_many", self._append_many),
            },
            rounds,
        )
        self._tell("kafka.append", produced["append"], "send_and_wait", produced["send_and_wait"], "append")
        self._tell("kafka.produce", produced["append_many"], "send_batch", produced["send_batch"], "append_many")
        topic = asyncio.run(self._filled())
        consumed = interleaved(
            {
                "getmany": lambda: self._measure("getmany", self._bare_getmany, topic),
                "read": lambda: self._measure("read", self._read, topic),
            },
            rounds,
        )
        self._tell("kafka.consume", consumed["read"], "getmany", consumed["getmany"], "read")

    def _tell(self, name: str, ours: Rounds, bare_name: str, bare: Rounds, own_name: str) -> None:
        figure(
            name,
            ours.median,
            "messages/s",
            ours.spread,
            {
                f"aiokafka.{bare_name}": bare.median,
                "ratio": ours.median / bare.median,
                "cpu_us": min(self.cpu[own_name]),
                "bare_cpu_us": min(self.cpu[bare_name]),
            },
        )

    def _measure(self, name: str, work: Callable[[str, int], Awaitable[float]], topic: str = "") -> float:
        """Messages per second; connecting is not measured."""
        before = resource.getrusage(resource.RUSAGE_SELF)
        elapsed_s = asyncio.run(work(topic or uuid4().hex, self._count))
        after = resource.getrusage(resource.RUSAGE_SELF)
        spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self.cpu.setdefault(name, []).append(spent_s / self._count * 1e6)
        return self._count / elapsed_s

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

    async def _open(self, channel: str) -> KafkaWal:
        wal = await open_wal(f"{self._url}/bench")
        assert isinstance(wal, KafkaWal)
        await wal.create_channel(channel, ChannelPolicy())
        await wal.append(channel, PAYLOAD)
        return wal

    async def _filled(self) -> str:
        await self._append_many("filled", self._count)
        return "filled"

    async def _bare_getmany(self, channel: str, count: int) -> float:
        async with AIOKafkaConsumer(bootstrap_servers=self._bootstrap, auto_offset_reset="earliest") as consumer:
            (topic,) = [name for name in await consumer.topics() if name.startswith(f"bench.{channel}.")]
            consumer.assign([TopicPartition(topic, 0)])
            began_s = time.perf_counter()
            got = 0
            while got < count:
                for records in (await consumer.getmany(timeout_ms=1000)).values():
                    got += len(records)
            return time.perf_counter() - began_s

    async def _read(self, channel: str, count: int) -> float:
        wal = await open_wal(f"{self._url}/bench")
        reader = wal.read(channel, From.EARLIEST)
        began_s = time.perf_counter()
        got = 0
        while got < count:
            got += len(await anext(reader))
        elapsed_s = time.perf_counter() - began_s
        await wal.close()
        return elapsed_s


def main(count: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory, KafkaCluster(Path(directory)) as cluster:
        Bench(cluster.url, count).run(rounds)
