"""A process that works through channel `in` for group `g`, and that one entry ends as SIGKILL does.

Arguments: the log's URL, the semantics, and the number of attempts. It ends with 0 once it has handled nothing for a
second.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

import tidewal
from tidewal.runtime.log.wal import Append, Delivered

IDLE_S = 1.0


async def handle(delivered: Delivered) -> Sequence[Append]:
    for entry in delivered.entries:
        if bytes(entry.payload) == b"poison":
            os.kill(os.getpid(), signal.SIGKILL)
    return [Append("out", bytes(entry.payload)) for entry in delivered.entries]


async def main(url: str, semantics: str, attempts: int) -> None:
    log = await tidewal.open_wal(url)
    member = await log.join("g", ["in"])
    retry = tidewal.RetryPolicy(attempts=attempts, first_pause_s=0.001)
    end = await log.latest_id("in")
    while (await log.groups())[0].positions.get("in") != end:
        await tidewal.process(log, member, handle, tidewal.Semantics(semantics), retry=retry, timeout_s=IDLE_S)
    await member.aclose()
    await log.close()


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
