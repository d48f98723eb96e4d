"""A standalone node on RocksMQ that commits transactions, made to be killed: prints what was committed, a line each.

python transaction_child.py DIRECTORY FIRST_KEY SEED
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from itertools import count

from tidewal.actors.standalone import Standalone
from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.rows.schema import CollectionSchema, Field

FIELDS = Field("id", "int64"), Field("value", "int64")
COLLECTIONS = [CollectionSchema(name, FIELDS, "id") for name in ("things", "others")]
TOPIC = "events"
INPUT, MADE, GROUP = "inputs", "made", "makers"  # each input is made into one message, by transactions of a group


def tell(line: str) -> None:
    """Write the line in one piece and at once, whether or not Python buffers its output."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


async def main(directory: str, first: int, seed: int) -> None:
    wal = await RocksMQ.open(f"{directory}/log", segment_bytes=1024 * 1024, free_space_bytes=0, serve=False)
    keys, source = count(first), random.Random(seed)
    async with Standalone(wal, f"{directory}/tables") as node, node.client() as client:
        for schema in COLLECTIONS:
            await client.create_collection(schema)
        await client.create_topic(TOPIC, 2)
        for topic in (INPUT, MADE):
            await client.create_topic(topic, 1)

        async def write() -> None:
            while True:
                ids = [next(keys) for _ in range(source.randrange(1, 40))]
                tell(f"try {ids[0]} {len(ids)}")
                async with client.transaction() as t:
                    for schema in COLLECTIONS:
                        await t.insert(schema.name, [{"id": id, "value": ids[0]} for id in ids])
                    await t.send(TOPIC, [f"{ids[0]}" for _ in ids])
                tell(f"ack {ids[0]}")

        async def feed() -> None:
            while True:
                await client.send(INPUT, [str(next(keys)) for _ in range(source.randrange(1, 20))])

        async def make() -> None:
            async with await client.subscribe(INPUT, GROUP) as member:
                async for pack in member:
                    async with client.transaction() as t:
                        await t.send(MADE, [bytes(message.body) for message in pack.messages])
                        await t.acknowledge(member, pack)

        await asyncio.gather(*(write() for _ in range(4)), feed(), make())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
