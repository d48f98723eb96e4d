"""Delayed messages of a topic: all are due at one moment, and the rate counts from there until the last one is durable
in its partition, beside sending the same messages, `BATCH` a call and `WINDOW` calls in flight. `cpu_us` is what the
processor spends on a message in the node's process meanwhile: on a busy machine it says more than the rate.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import uvloop

import tidewal

from ..report import Figure, Rounds, figure, ratio
from .bench import Bench

TOPIC = "messages"
PARTITIONS = 4
BATCH, WINDOW = 500, 8
BODIES = [os.urandom(1024)] * BATCH
LEAD_S, LEAD_SHARE = 3.0, 4  # until the messages are due: so much, and so many times what sending them took
RELEASED = "streamingnode_delayed_released_total"
LOOK_S = 0.01

Send = Callable[[], Awaitable[object]]


def measure(bench: Bench) -> list[Figure]:
    """On RocksMQ and on Kafka."""
    logs = {"rocksmq": (bench.folder(), ""), "kafka": (bench.folder(), bench.kafka())}
    return [figure for name, log in logs.items() for figure in uvloop.run(_released(name, *log, bench))]


async def _released(name: str, directory: Path, url: str, bench: Bench) -> list[Figure]:
    async with tidewal.standalone(directory, wal=url) as node, node.client() as client:
        await client.create_topic(TOPIC, PARTITIONS)
        rounds = range(bench.sizes.rounds + 1)  # the first one warms up
        measured = [await _round(node, client, bench.sizes.messages) for _ in rounds]
    released, sent, cpu_us = (Rounds(values) for values in zip(*measured[1:], strict=True))
    return [
        figure(
            f"queue.delays.release.{name}", released.median, "messages/s", released.spread, {"cpu_us": cpu_us.median}
        ),
        ratio(f"queue.delays.beside_send.{name}", released, sent, "ratio to sending", sent_per_s=sent.median),
    ]


async def _round(node: tidewal.Standalone, client: tidewal.Client, count: int) -> tuple[float, float, float]:
    """Messages released a second, and sent a second, and the microseconds of the processor for one that is released."""
    began_s = time.perf_counter()
    await _in_turns(count, lambda: client.send(TOPIC, BODIES))
    sent_s = time.perf_counter() - began_s
    before = node.node.metrics.value(RELEASED, topic_name=TOPIC)
    due = datetime.now(UTC) + timedelta(seconds=LEAD_S + LEAD_SHARE * sent_s)
    await _in_turns(count, lambda: client.send(TOPIC, BODIES, deliver_at=due))
    left_s = (due - datetime.now(UTC)).total_seconds()
    if left_s < 0:
        raise SystemExit(f"sending {count} delayed messages took {-left_s:.1f} s too long: the machine is too busy")
    await asyncio.sleep(left_s)
    began_cpu_s = time.process_time()
    while node.node.metrics.value(RELEASED, topic_name=TOPIC) < before + count:  # noqa: ASYNC110 - a metric
        await asyncio.sleep(LOOK_S)
    released_s, cpu_s = (datetime.now(UTC) - due).total_seconds(), time.process_time() - began_cpu_s
    return count / released_s, count / sent_s, cpu_s / count * 1e6


async def _in_turns(count: int, send: Send) -> None:
    """Send that many messages, some calls at a time."""
    calls = iter(range(count // BATCH))

    async def sender() -> None:
        for _ in calls:
            await send()

    await asyncio.gather(*(sender() for _ in range(WINDOW)))
