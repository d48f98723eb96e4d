"""A standalone node: python -m tests.torture.node URL TABLES"""

from __future__ import annotations

import asyncio
import logging
import sys

from tidewal.actors.standalone import Standalone
from tidewal.cli.kills.checked_client import NUMBERS, THINGS
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.log.wal import ChannelPolicy

from .inside import CHANNELS, COPIES, GROWING, LATER, TOPIC, SteppedClock, obey, open_log, tell

SETTINGS = Settings.model_validate(
    {"rootCoord": {"dmlChannelNum": 2}, "dataNode": {"flushIntervalS": 2, "compactionIntervalS": 15}}
)


async def main(url: str, tables: str) -> None:
    stopping = obey(asyncio.get_running_loop())
    wal = await open_log(url, own=True)
    try:
        async with Standalone(wal, tables, settings=SETTINGS, clock=SteppedClock()) as node, node.client() as client:
            await wal.create_channel(COPIES, ChannelPolicy())
            for schema in (NUMBERS, THINGS):
                await client.create_collection(schema, shards=2)
            await client.create_topic(TOPIC, CHANNELS)
            there = {each.name for each in await client.list_topics()}
            for topic, partitions in ((LATER, CHANNELS), (GROWING, 1)):
                if topic not in there:  # else with any number of them
                    await client.create_topic(topic, partitions)
            tell("ready")
            stopped, failed = asyncio.create_task(stopping.wait()), asyncio.create_task(node.failed())
            await asyncio.wait([stopped, failed], return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise failed.result()
            failed.cancel()
    finally:
        await wal.close()
    tell("ended")


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(main(*sys.argv[1:]))
