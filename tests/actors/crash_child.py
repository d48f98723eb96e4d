"""A standalone node on RocksMQ under load, made to be killed: prints what was acknowledged, a line each.

python crash_child.py DIRECTORY FIRST_KEY SEED
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from itertools import count

from tidewal.actors.standalone import Standalone
from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.rows.schema import CollectionSchema, Field

SCHEMA = CollectionSchema("things", (Field("id", "int64"), Field("value", "int64", nullable=True)), "id")


def tell(line: str) -> None:
    """Write the line in one piece and at once, whether or not Python buffers its output."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


async def main(directory: str, first: int, seed: int) -> None:
    wal = await RocksMQ.open(f"{directory}/log", segment_bytes=1024 * 1024, free_space_bytes=0, serve=False)
    settings = Settings.model_validate({"dataNode": {"flushIntervalS": 0.1, "flushBytes": 20_000}})
    keys, source = count(first), random.Random(seed)
    async with Standalone(wal, f"{directory}/tables", settings=settings) as node, node.client() as client:
        await client.create_collection(SCHEMA)

        async def write() -> None:
            while True:
                ids = [next(keys) for _ in range(source.randrange(1, 40))]
                tell(f"try {ids[0]} {len(ids)}")
                await client.insert("things", [{"id": id, "value": id} for id in ids])
                tell(f"ack {ids[0]}")

        await asyncio.gather(*(write() for _ in range(4)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
