"""A process that counts words as members of the group, made to be killed: a line of output for each batch.

python counting_child.py URL SEED
"""

from __future__ import annotations

import asyncio
import os
import random
import sys

from tests.keyed_model import NAME, count
from tidewal.runtime.dataflow import changelog
from tidewal.runtime.dataflow.keyed_processing import process_keyed
from tidewal.runtime.errors import Fenced, TidewalError
from tidewal.runtime.log.opening import open_wal

changelog.SWEEP_FROM_BYTES, changelog.SWEEP_BYTES = 4000, 200  # so that sweeps are under way when the process dies


async def handle(delivered, state):
    outputs = count(delivered, state)
    os.write(1, b"batch\n")
    return outputs


async def main(url: str, seed: int) -> None:
    chance = random.Random(seed)
    async with await open_wal(url) as wal:
        while True:
            try:
                member = await wal.join("g", ["words-*"], session_timeout_s=5.0)
                interval_s = chance.choice([0.0, 0.02, 0.1])
                try:
                    await process_keyed(wal, member, handle, NAME, commit_interval_s=interval_s)
                finally:
                    await member.aclose()
            except TidewalError as error:  # the owner of the log was killed, or another member has the channel
                if not (error.retryable or isinstance(error, Fenced)) or "does not have commit" in error.message:
                    os.write(1, f"{error!r}\n".encode())
                await asyncio.sleep(0.05)


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
