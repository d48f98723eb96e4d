"""One process of the crash suite: appends without end, and writes to its output what was acknowledged.

Arguments: directory, name, seed. Each line of output is one append: seconds when it was submitted and when it was
acknowledged (the machine's monotonic clock), and for each of its entries `channel:count:id`. Ends in peace on SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time

from tidewal.adapters.rocksmq import open_wal
from tidewal.runtime.log.wal import Append, ChannelPolicy, Wal

CHANNELS = ("c0", "c1", "c2")
SEGMENT_BYTES = 1024 * 1024
WINDOW = 8


class Producer:
    """Numbers its entries from 1 in each channel."""

    def __init__(self, wal: Wal, name: str, seed: int) -> None:
        self._wal, self._name, self._random = wal, name, random.Random(seed)
        self._counts = dict.fromkeys(CHANNELS, 0)
        self._room = asyncio.Semaphore(WINDOW)
        self._in_flight: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._room.acquire()
            entries = [self._entry() for _ in range(self._random.choice((1, 1, 1, 4)))]
            task = asyncio.create_task(self._append(entries))
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)
        await asyncio.gather(*self._in_flight)

    def _entry(self) -> tuple[Append, int]:
        channel = self._random.choice(CHANNELS)
        count = self._counts[channel] = self._counts[channel] + 1
        filler = "x" * self._random.choice((10, 10, 10, 3000))
        return Append(channel, f"{self._name} {count} {filler}".encode()), count

    async def _append(self, entries: list[tuple[Append, int]]) -> None:
        submitted = time.monotonic()
        try:
            if len(entries) == 1:
                ids = [await self._wal.append(entries[0][0].channel, entries[0][0].payload)]
            else:
                ids = await self._wal.append_many([entry for entry, _ in entries])
        except Exception as error:
            os.write(1, f"error {type(error).__name__} {error}\n".encode())
            return
        words = [f"{entry.channel}:{count}:{id.hex()}" for (entry, count), id in zip(entries, ids, strict=True)]
        os.write(1, f"{submitted:.4f} {time.monotonic():.4f} {' '.join(words)}\n".encode())
        self._room.release()


async def main(directory: str, name: str, seed: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    wal = await open_wal(f"rocksmq://{directory}", segment_bytes=SEGMENT_BYTES)
    for channel in CHANNELS:
        await wal.create_channel(channel, ChannelPolicy(retention_s=None))
    await Producer(wal, name, seed).run(stop)
    await wal.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
