"""One process of the crash suite for groups: members of one group copy exactly once what `crash_client.py` appends.

The arguments are the same. A line `commit COUNT` of output says how many entries were copied in one commit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from crash_client import CHANNELS, SEGMENT_BYTES, Producer

from tidewal.adapters.rocksmq import open_wal
from tidewal.runtime.errors import Fenced, Unavailable
from tidewal.runtime.log.wal import Append, ChannelPolicy, Wal

SESSION_TIMEOUT_S = 5.0


async def copy(wal: Wal, stop: asyncio.Event) -> None:
    """Copy each entry of channel c to out-c, as a member of the group, until the test stops it."""
    while not stop.is_set():
        member = await wal.join("copiers", CHANNELS, session_timeout_s=SESSION_TIMEOUT_S)
        try:
            async for delivered in member:
                outputs = [Append(f"out-{delivered.channel}", bytes(entry.payload)) for entry in delivered.entries]
                try:
                    await member.commit([delivered], outputs)
                except Fenced:
                    continue  # another member has the channel, and gets the entries again
                os.write(1, f"commit {len(outputs)}\n".encode())
                if stop.is_set():
                    break
        except Unavailable:
            continue  # it may have happened or not: a member that joins again learns it from the position
        finally:
            await member.aclose()


def report(copying: asyncio.Task[None]) -> None:
    """Say at once why copying ended, so that the suite does not wait for commits that will not come."""
    if not copying.cancelled() and (error := copying.exception()):
        os.write(1, f"error {type(error).__name__} {error}\n".encode())


async def main(directory: str, name: str, seed: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    wal = await open_wal(f"rocksmq://{directory}", segment_bytes=SEGMENT_BYTES)
    for channel in CHANNELS:
        await wal.create_channel(channel, ChannelPolicy(retention_s=None))
        await wal.create_channel(f"out-{channel}", ChannelPolicy(retention_s=None))
    copying = asyncio.create_task(copy(wal, stop))
    copying.add_done_callback(report)
    await Producer(wal, name, seed).run(stop)
    copying.cancel()
    await asyncio.wait([copying])
    await wal.close()


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
