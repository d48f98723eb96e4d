"""A standalone node with writers, made to be killed: python kill_node.py URL TABLES FIRST_ID SEED

Three of its four channels are slow. It tells a line each: `ready`, `try FIRST COUNT` before a batch of so many rows
with ids from FIRST on is written, and `ack FIRST COUNT TS` when it was acknowledged. What it is told, a line each:

    flush    stores in the table what was acknowledged before, or by an earlier run: answers `flushed T`
    stop     ends the writers, lets a window of time pass, writes a last row, and answers as to `cut numbers`
    cut NAME answers `cut T`, a time that sees all that was acknowledged in this collection
    end      (or the end of input) ends
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parent))
from kill_facts import COPIES, LAST_ID, NUMBERS, SHARDS, TOPICS, WINDOW_S
from late_wal import LateWal

from tidewal.actors.client import Client
from tidewal.actors.standalone import Standalone
from tidewal.runtime.clock import physical_ms
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import Unavailable
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.wal import ChannelPolicy

WRITERS = 4
OUTAGE_S = 60.0  # how long a write may wait for its broker
Result = TypeVar("Result")
SETTINGS = Settings.model_validate({"rootCoord": {"dmlChannelNum": SHARDS}})


def tell(*words: object) -> None:
    """Write a line in one piece and at once."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def write(client: Client, ids: Any, rng: random.Random, stopping: asyncio.Event) -> int:
    """Until `stopping`; the last timestamp."""
    last = 0
    while not stopping.is_set():
        some = [next(ids) for _ in range(rng.randrange(1, 40))]
        tell("try", some[0], len(some))
        written = await insist(client.insert, NUMBERS.name, [{"id": id} for id in some], deadline_s=OUTAGE_S)
        tell("ack", some[0], len(some), written.ts)
        last = written.ts
        await asyncio.sleep(rng.expovariate(5))  # how busy the writers are: queries on a slow machine must follow
    return last


async def insist(call: Callable[..., Awaitable[Result]], *arguments: Any, **options: Any) -> Result:
    """Call, again and again while an outage lasts longer than a lease."""
    while True:
        try:
            return await call(*arguments, **options)
        except Unavailable:  # certainly not done
            await asyncio.sleep(0.1)


async def pass_window(client: Client, ts: int) -> None:
    """Wait until log time is in a later window. Behind a kill it stands still: the next owner's clock is ahead."""
    while physical_ms(await insist(client.cut, NUMBERS.name)) < physical_ms(ts) + WINDOW_S * 1000:  # noqa: ASYNC110 -- no event
        await asyncio.sleep(WINDOW_S / 10)


async def main(url: str, tables: str, first: int, seed: int) -> None:
    rng = random.Random(seed)
    wal = await open_wal(url, own=True)
    late = LateWal(wal, [f"dml_{shard}" for shard in range(1, SHARDS)], lambda: rng.expovariate(50))
    ids, stopping = count(first), asyncio.Event()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(wal.close)
        node = await stack.enter_async_context(Standalone(late, tables, settings=SETTINGS))
        client = await stack.enter_async_context(node.client())
        for schema in (NUMBERS, COPIES):
            await client.create_collection(schema, shards=SHARDS)
        for topic in TOPICS:
            await wal.create_channel(topic, ChannelPolicy())
        writers = [asyncio.create_task(write(client, ids, rng, stopping)) for _ in range(WRITERS)]
        tell("ready")
        while (line := await asyncio.to_thread(sys.stdin.readline)).strip() not in ("", "end"):
            command, *names = line.split()
            if command == "flush":
                tell("flushed", await client.flush(NUMBERS.name))
            elif command == "cut":
                tell("cut", await insist(client.cut, names[0]))
            else:
                stopping.set()
                await pass_window(client, max(await asyncio.gather(*writers)))
                await insist(client.insert, NUMBERS.name, [{"id": LAST_ID}])
                tell("cut", await insist(client.cut, NUMBERS.name))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
