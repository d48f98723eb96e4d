"""The owner of a channel as a process of its own, which a test stops past its lease and lets go on.

Arguments: URL of the log, channel, term, limit of its timestamps. It takes the channel, tells `fence ID`, and does what
its input says, a line each, telling `ok` when done:

    open          acknowledge appends from now on, and append without end: `acked BODY` each
    until S       the lease ends at S seconds of the machine's monotonic clock
    zombie N      write N more records past all checks, as if they had been on their way: `written ID` each
    end           stop; `lost BODY ERROR` for each append that was not acknowledged
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time

from tidewal.runtime.clock import HybridClock
from tidewal.runtime.errors import TidewalError
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.record import Record, RecordType, stamp
from tidewal.runtime.ownership import ChannelGrant, ChannelOwner

WINDOW = 8
TICK_EVERY = 20
FIRST_ZOMBIE = 1_000_000  # its number: above all that were given out, or a reader would drop it as a repetition


def tell(*words: object) -> None:
    """Write a line in one piece and at once."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Owner:
    def __init__(self, wal, channel: str, term: int, limit: int) -> None:
        self._wal, self._channel, self._term, self._limit = wal, channel, term, limit
        self._until_s = float("inf")
        self._writer = ChannelOwner(wal, HybridClock(), lease_holds=lambda: time.monotonic() < self._until_s)
        self._numbers, self._zombies = itertools.count(), itertools.count(FIRST_ZOMBIE)
        self._tasks: list[asyncio.Task[None]] = []

    async def take(self) -> None:
        fence = await self._writer.acquire(ChannelGrant(self._channel, self._term, 0, self._limit))
        tell("fence", fence.hex())

    async def open(self) -> None:
        self._writer.activate(self._channel, self._term)
        self._tasks = [asyncio.create_task(self._append_on()) for _ in range(WINDOW)]

    async def until(self, seconds: str) -> None:
        self._until_s = float(seconds)

    async def zombie(self, count: str) -> None:
        for cseq in itertools.islice(self._zombies, int(count)):
            record = Record(RecordType.ROWS, body=b"zombie:%d" % cseq)
            payload = stamp(record, self._limit, self._term, cseq)
            tell("written", (await self._wal.append(self._channel, payload, self._limit)).hex())

    async def end(self) -> None:
        self._until_s = 0.0
        await self._writer.close()
        await asyncio.gather(*self._tasks)
        await self._wal.close()

    async def _append_on(self) -> None:
        for number in self._numbers:
            body = f"old:{number}"
            try:
                await self._writer.append([(self._channel, Record(RecordType.ROWS, body=body.encode()))])
                tell("acked", body)
                if number % TICK_EVERY == 0:
                    await self._writer.tick_now()
            except TidewalError as error:
                tell("lost", body, type(error).__name__)
                return


async def main(url: str, channel: str, term: str, limit: str) -> None:
    owner = Owner(await open_wal(url, own=False), channel, int(term), int(limit))
    await owner.take()
    command = ""
    while command != "end":
        command, *arguments = (await asyncio.to_thread(sys.stdin.readline)).split() or ["end"]
        await getattr(owner, command)(*arguments)
        tell("ok")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
