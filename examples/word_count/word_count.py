"""Counts words exactly once, however many workers count and whichever of them are killed.

    python word_count.py write LOG < lines    # each line into one of four channels, by its hash
    python word_count.py count LOG            # a worker, until Ctrl-C; start as many as you like
    python word_count.py show LOG             # the counts so far

LOG is the URL of a log: rocksmq://./log (a directory), kafka://localhost:9092, …
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from zlib import crc32

import tidewal
from tidewal.runtime import Delivered

LINES = [f"lines-{number}" for number in range(4)]
COUNTS = "counts"


async def open_log(url: str) -> tidewal.Wal:
    """The log at `url`, with the channels of this program. The first process of a machine owns an embedded log, the
    others use it through that one."""
    log = await tidewal.open_wal(url)
    for channel in (*LINES, COUNTS):
        await log.create_channel(channel, tidewal.ChannelPolicy())
    return log


async def write(log: tidewal.Wal, lines: Iterable[str]) -> int:
    """Append the lines; they are durable when it returns their number."""
    appends = [tidewal.Append(LINES[crc32(line.encode()) % len(LINES)], line.encode()) for line in lines]
    await log.append_many(appends)
    return len(appends)


async def count(log: tidewal.Wal) -> None:
    """Count as a member of the group: of each batch of lines, how often each word came goes into `counts`, in one
    commit with the position behind the batch. So a batch is counted once, or not at all yet."""

    async def words_of(delivered: Delivered) -> list[tidewal.Append]:
        words = Counter(word for entry in delivered.entries for word in bytes(entry.payload).decode().split())
        return [tidewal.Append(COUNTS, json.dumps(words).encode())]

    member = await log.join("word-count", LINES)
    try:
        await tidewal.process(log, member, words_of, tidewal.Semantics.EXACTLY_ONCE)
    finally:
        await member.aclose()


async def totals(log: tidewal.Wal) -> Counter[str]:
    """The sum of all counts that are committed."""
    counted = Counter[str]()
    last = await log.latest_id(COUNTS)
    if last is None:
        return counted
    async for entries in log.read(COUNTS, tidewal.From.EARLIEST):
        for entry in entries:
            counted.update(json.loads(bytes(entry.payload)))
            if entry.id == last:
                return counted
    return counted


async def run(command: str, url: str) -> None:
    async with await open_log(url) as log:
        if command == "write":
            print(await write(log, (line.rstrip("\n") for line in sys.stdin)), "lines")
        elif command == "count":
            print("counting", flush=True)
            await count(log)
        else:
            for word, times in (await totals(log)).most_common():
                print(times, word)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("write", "count", "show"))
    parser.add_argument("log")
    given = parser.parse_args()
    try:
        asyncio.run(run(given.command, given.log))
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # `| head` has seen enough; what is left in the buffer has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except tidewal.TidewalError as error:
        sys.exit(f"{type(error).__name__}: {error}")
