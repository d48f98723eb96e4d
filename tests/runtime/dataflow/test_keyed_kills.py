"""Kill -9 of processes that count words together over one RocksMQ: of members, and of the log's owner."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from tests.keyed_model import INPUTS, NAME, WORDS, check, count
from tidewal.adapters.rocksmq import open_wal
from tidewal.runtime.dataflow.keyed_processing import process_keyed
from tidewal.runtime.errors import TidewalError
from tidewal.runtime.log.wal import ChannelPolicy, From, Wal

ROOT = Path(__file__).parents[3]
CHILD = Path(__file__).with_name("counting_child.py")
KILLS = 8
PROCESSES = 3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Child:
    """One process that counts."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, url: str, seed: int) -> Child:
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                str(CHILD),
                url,
                str(seed),
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        )

    async def batches(self, number: int) -> None:
        """Wait until it has processed so many more."""
        assert self._process.stdout is not None
        for _ in range(number):
            assert await self._process.stdout.readline() == b"batch\n"

    async def kill(self) -> None:
        self._process.kill()
        assert self._process.stdout is not None
        await self._process.stdout.read()
        await self._process.wait()


async def write(wal: Wal, chance: random.Random) -> None:
    """Write words until cancelled. Whether one that failed is there does not matter: what is there counts."""
    while True:
        with suppress(TidewalError):
            await wal.append(chance.choice(INPUTS), chance.choice(WORDS).encode())
        await asyncio.sleep(0.002)


async def words_in(wal: Wal, channel: str) -> Counter[str]:
    latest, found = await wal.latest_id(channel), Counter[str]()
    async for entries in wal.read(channel, From.EARLIEST):
        found.update(bytes(entry.payload).decode() for entry in entries)
        if entries[-1].id == latest:
            return found
    raise AssertionError("the log was closed")


async def drain(wal: Wal) -> None:
    """Process what is left, here, up to the end of the channels."""
    stop, ends = asyncio.Event(), {channel: await wal.latest_id(channel) for channel in INPUTS}

    async def handle(delivered, state):
        outputs = count(delivered, state)
        if delivered.entries[-1].id == ends[delivered.channel]:
            del ends[delivered.channel]
        if not ends:
            stop.set()
        return outputs

    positions = {info.name: info.positions for info in await wal.groups()}["g"]
    for channel in INPUTS:
        if positions.get(channel) == ends[channel]:
            del ends[channel]
    if ends:
        member = await wal.join("g", ["words-*"], session_timeout_s=5.0)
        await process_keyed(wal, member, handle, NAME, stop=stop)
        await member.aclose()


@pytest.mark.parametrize("owner", ["the test", "the processes"])
async def test_each_word_is_counted_once_whichever_process_is_killed(tmp_path: Path, seed: int, owner: str):
    """`owner` is who owns the log: where one of the processes that are killed does, another takes over."""
    chance = random.Random(seed)
    url = f"rocksmq://{tmp_path / 'log'}"
    async with await open_wal(url) as wal:
        for channel in (*INPUTS, "out"):
            await wal.create_channel(channel, ChannelPolicy())
        if owner == "the test":
            await kill_again_and_again(wal, url, chance, [])
    if owner == "the processes":
        children = [await Child.start(url, 0)]
        wal = await open_wal(url, own=False)
        await kill_again_and_again(wal, url, chance, children)
    async with await open_wal(url) as wal:
        await drain(wal)
        written = {channel: await words_in(wal, channel) for channel in INPUTS}
        assert sum(map(len, written.values())) > 10
        await check(wal, written)


async def kill_again_and_again(wal: Wal, url: str, chance: random.Random, started: list[Child]) -> None:
    writing = asyncio.create_task(write(wal, chance))
    more = [await Child.start(url, chance.randrange(2**31)) for _ in range(PROCESSES - len(started))]
    children = [*started, *more]
    try:
        for _ in range(KILLS):
            at = chance.randrange(PROCESSES)
            await children[at].batches(chance.randrange(1, 30))
            await children[at].kill()
            children[at] = await Child.start(url, chance.randrange(2**31))
        for child in children:
            await child.batches(5)
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await wal.close()  # while there is still an owner to tell
        for child in children:
            await child.kill()
