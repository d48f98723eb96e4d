"""Frameworks for streams over Kafka on the same topic, where they are installed: Faust, FastStream and Quix Streams.

Each reads the topic's messages as bytes into a handler that counts them, which is the least it can do, and produces
them in the way that its guide shows. They are no dependencies: install those to compare with beside Tidewal
(`pip install faust-streaming 'faststream[kafka]' quixstreams`).
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from importlib.util import find_spec
from uuid import uuid4

from benchmarks.brokers.candidates import IN_FLIGHT, PAYLOAD, Work

FRAMEWORKS = {"faust": "faust-streaming", "faststream": "faststream[kafka]", "quixstreams": "quixstreams"}
LIKEST = {"faust": "append", "faststream": "append", "quixstreams": "append_many"}  # of our ways to produce
BATCH_BYTES, LINGER_MS = 256 * 1024, 5  # as the bare client has
MOST_RECORDS = 1000  # that a batching subscriber gets at once


def installed() -> Iterator[str]:
    """Which are there; says so of the others."""
    for name, package in FRAMEWORKS.items():
        if find_spec(name) is None:
            print(f"{name} is not installed (pip install '{package}'): nothing is said about it", flush=True)
        else:
            yield name


class Frameworks:
    """Ways to produce into and to consume a topic. Starting and stopping are not measured, joining a group is not."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap

    def ways(self, name: str) -> tuple[Work, Work]:
        """How a framework produces and consumes."""
        return {
            "faust": (self._faust_produce, self._faust_consume),
            "faststream": (self._faststream_produce, self._faststream_consume),
            "quixstreams": (self._quix_produce, self._quix_consume),
        }[name]

    # ---- Faust -------------------------------------------------------------------------------------------------------

    def _faust_app(self, directory: str):
        import faust

        return faust.App(
            f"bench-{uuid4().hex}",
            broker=f"kafka://{self._bootstrap}",
            value_serializer="raw",
            key_serializer="raw",
            datadir=directory,
            web_enabled=False,
            topic_disable_leader=True,
            consumer_auto_offset_reset="earliest",
            producer_max_batch_size=BATCH_BYTES,
            producer_linger=LINGER_MS / 1000,
            producer_acks=-1,
        )

    async def _faust_produce(self, topic: str, count: int) -> float:
        with tempfile.TemporaryDirectory() as directory:
            producer = self._faust_app(directory).producer
            await producer.start()

            async def send() -> None:
                await (await producer.send(topic, None, PAYLOAD, 0, None, None))

            elapsed_s = await _timed(send, count)
            await producer.stop()
            return elapsed_s

    async def _faust_consume(self, topic: str, count: int) -> float:
        with tempfile.TemporaryDirectory() as directory:
            app = self._faust_app(directory)
            progress = _Progress(count)

            @app.agent(app.topic(topic, value_type=bytes))
            async def counting(stream):
                async for _ in stream:
                    progress.one()

            await app.start()
            await progress.done.wait()
            await app.stop()
            return progress.elapsed_s

    # ---- FastStream --------------------------------------------------------------------------------------------------

    async def _faststream_produce(self, topic: str, count: int) -> float:
        from faststream.kafka import KafkaBroker

        broker = KafkaBroker(
            self._bootstrap, enable_idempotence=True, max_batch_size=BATCH_BYTES, linger_ms=LINGER_MS, logger=None
        )
        await broker.start()
        elapsed_s = await _timed(lambda: broker.publish(PAYLOAD, topic, partition=0), count)
        await broker.stop()
        return elapsed_s

    async def _faststream_consume(self, topic: str, count: int) -> float:
        from faststream.kafka import KafkaBroker

        broker = KafkaBroker(self._bootstrap, logger=None)
        progress = _Progress(count)

        @broker.subscriber(topic, auto_offset_reset="earliest", batch=True, max_records=MOST_RECORDS)
        async def counting(messages: list[bytes]) -> None:
            progress.some(len(messages))

        await broker.start()
        await progress.done.wait()
        await broker.stop()
        return progress.elapsed_s

    # ---- Quix Streams ------------------------------------------------------------------------------------------------

    async def _quix_produce(self, topic: str, count: int) -> float:
        return await asyncio.to_thread(self._quix_produce_blocking, topic, count)

    def _quix_produce_blocking(self, topic: str, count: int) -> float:
        app = self._quix_app(topic)
        with app.get_producer() as producer:
            producer.produce(topic=topic, value=PAYLOAD, partition=0)
            producer.flush()
            began_s = time.perf_counter()
            for _ in range(count):
                producer.produce(topic=topic, value=PAYLOAD, partition=0)
            producer.flush()
            return time.perf_counter() - began_s

    async def _quix_consume(self, topic: str, count: int) -> float:
        """In the main thread, since it handles signals; nothing else is on the loop."""
        app = self._quix_app(topic)
        progress = _Progress(count)

        frame = app.dataframe(app.topic(topic, value_deserializer="bytes", key_deserializer="bytes"))
        frame.update(lambda _: progress.one())
        app.run(count=count, collect=False)
        return progress.elapsed_s

    def _quix_app(self, topic: str):
        from quixstreams import Application

        return Application(
            broker_address=self._bootstrap,
            consumer_group=f"bench-{uuid4().hex}",
            auto_offset_reset="earliest",
            loglevel="ERROR",
            producer_extra_config={"linger.ms": LINGER_MS, "batch.size": BATCH_BYTES, "enable.idempotence": True},
        )


class _Progress:
    """Counts messages; the time runs from the first to the last."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.got = 0
        self.done = asyncio.Event()
        self._began_s = self.elapsed_s = 0.0

    def one(self) -> None:
        self.some(1)

    def some(self, messages: int) -> None:
        if not self.got:
            self._began_s = time.perf_counter()
        self.got += messages
        if self.got >= self._count and not self.elapsed_s:
            self.elapsed_s = time.perf_counter() - self._began_s
            self.done.set()


async def _timed(send: Callable[[], Awaitable[object]], count: int) -> float:
    """Seconds for `count` sends, `IN_FLIGHT` at once."""
    left = count

    async def one_after_another() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await send()

    await send()
    began_s = time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(IN_FLIGHT)))
    return time.perf_counter() - began_s
