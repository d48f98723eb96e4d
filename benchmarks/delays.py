"""What delayed messages cost: released together beside the same messages sent, and how late single ones come.

    python -m benchmarks.delays [--messages 30000] [--rounds 3] [--url kafka://…]

`release` counts from the moment at which all messages are due to the last one's timestamp in its channel; `send` the
same messages, 500 a batch and eight batches in flight. `late` is between the due time and the moment at which a
`MsgStream` has the message, for one message at a time; its spread is from the least to the 99th percentile.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import uvloop

import tidewal
from benchmarks.report import Rounds, figure, ratio

CHANNELS = [f"messages-{number}" for number in range(4)]
BATCH, IN_FLIGHT = 500, 8
BODY = os.urandom(1024)
SINGLE = 200

Batch = Sequence[tuple[str, bytes]]


def batches(count: int) -> list[Batch]:
    """The messages, over all channels."""
    pairs = [(CHANNELS[number % len(CHANNELS)], BODY) for number in range(count)]
    return [pairs[at : at + BATCH] for at in range(0, count, BATCH)]


async def release(producer: tidewal.Producer, wal: tidewal.Wal, count: int, lead_s: float) -> tuple[float, float]:
    """Messages released a second, and sent a second, in one round."""
    due = datetime.now(UTC) + timedelta(seconds=lead_s)
    await in_turns(batches(count), lambda batch: producer.schedule(batch, deliver_at=due))
    ends = asyncio.create_task(last_of(wal, count))
    left_s = (due - datetime.now(UTC)).total_seconds()
    if left_s < 0:
        raise SystemExit(f"scheduling {count} messages took more than {lead_s} s: give them more with --lead")
    released_s = (await ends - due).total_seconds()
    began_s = time.perf_counter()
    await in_turns(batches(count), producer.send)
    return count / released_s, count / (time.perf_counter() - began_s)


async def in_turns(work: Sequence[Batch], send: Callable[[Batch], Awaitable[object]]) -> None:
    """Send all batches, some at a time."""
    waiting = list(work)

    async def sender() -> None:
        while waiting:
            await send(waiting.pop())

    await asyncio.gather(*(sender() for _ in range(IN_FLIGHT)))


async def last_of(wal: tidewal.Wal, count: int) -> datetime:
    """The timestamp of the last one of the next `count` messages."""
    stream = tidewal.open_stream(wal, CHANNELS, start=tidewal.From.LATEST)
    try:
        while True:
            pack = await anext(stream)
            count -= len(pack.messages)
            if count <= 0:
                return pack.messages[-1].time
    finally:
        await stream.close()


async def lateness(producer: tidewal.Producer, wal: tidewal.Wal) -> list[float]:
    """How late each of some messages comes, ms."""
    stream = tidewal.MsgStream(wal, tidewal.HybridClock())
    stream.as_consumer(CHANNELS, tidewal.From.LATEST)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.5)
    late: list[float] = []
    for _ in range(SINGLE):
        due = datetime.now(UTC) + timedelta(milliseconds=random.uniform(20, 60))
        [id] = await producer.schedule([(random.choice(CHANNELS), BODY)], deliver_at=due)
        while all(each.tags.get("tidewal.offset") != id for each in (await reading).messages):
            reading = asyncio.ensure_future(anext(stream))
        late.append((datetime.now(UTC) - due).total_seconds() * 1000)
        reading = asyncio.ensure_future(anext(stream))
    reading.cancel()
    await stream.close()
    return late


async def measure(url: str, count: int, rounds: int, lead_s: float) -> None:
    """Print the figures of the log at `url`."""
    async with (
        await tidewal.open_wal(url) as wal,
        tidewal.open_producer(wal, "bench", CHANNELS, delays=True) as producer,
    ):
        measured = [await release(producer, wal, count, lead_s) for _ in range(rounds + 1)][1:]
        released, sent = (Rounds(values) for values in zip(*measured, strict=True))
        figure("delays.release", released.median, "messages/s", released.spread)
        ratio("delays.release.beside_send", released, sent, "ratio to sending", sent_per_s=sent.median)
        late = sorted(await lateness(producer, wal))
        p99 = late[int(len(late) * 0.99)]
        figure("delays.late", statistics.median(late), "ms", (late[0], p99), {"p99": p99, "least": late[0]})


def main() -> None:
    """Measure on an embedded log of its own, or at the URL."""
    parser = argparse.ArgumentParser(prog="benchmarks.delays", description=__doc__)
    parser.add_argument("--messages", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lead", type=float, default=10.0, help="seconds to schedule the messages of a round in")
    parser.add_argument("--url", help="of a log; by default an embedded one in a temporary directory")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TIDEWAL_BENCH_DIR")) as directory:
        url = chosen.url or f"rocksmq://{Path(directory) / 'log'}"
        uvloop.run(measure(url, chosen.messages, chosen.rounds, chosen.lead))


if __name__ == "__main__":
    main()
