"""Steps that many tests of a log take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, cast

from ...errors import TidewalError
from ...log.wal import Append, ChannelPolicy, Entry, OnAppended, Start, Wal

PLAIN = ChannelPolicy()
WITHIN_S = 20.0  # how long a test waits for what must come: long, since machines may be slow


def reading(wal: Wal, channel: str, start: Start) -> AsyncGenerator[Sequence[Entry], None]:
    """`wal.read`, with the type that it has: it can be closed."""
    return cast("AsyncGenerator[Sequence[Entry], None]", wal.read(channel, start))


async def create(wal: Wal, *channels: str, policy: ChannelPolicy = PLAIN) -> None:
    """Create channels with one policy."""
    for channel in channels:
        await wal.create_channel(channel, policy)


async def fill(wal: Wal, channel: str, count: int, first: int = 0) -> list[bytes]:
    """Append the numbers from `first` on, each with ten times itself and one as its timestamp."""
    return await wal.append_many([Append(channel, str(i).encode(), i * 10 + 1) for i in range(first, first + count)])


async def take(wal: Wal, channel: str, start: Start, count: int) -> list[Entry]:
    """The first `count` entries from `start`."""
    entries: list[Entry] = []
    reader = reading(wal, channel, start)
    try:
        async with asyncio.timeout(WITHIN_S):
            while len(entries) < count:
                entries += await anext(reader)
    finally:
        await reader.aclose()
    return entries[:count]


def on_loop(done: OnAppended) -> OnAppended:
    """`done`, called on the loop that runs now: a log may answer on any thread."""
    loop = asyncio.get_running_loop()

    def answered(result: list[bytes] | TidewalError) -> None:
        loop.call_soon_threadsafe(done, result)

    return answered


async def submitted(wal: Wal, entries: Sequence[Append]) -> list[bytes]:
    """What `submit` answers; its error is raised, whether it came at once or later."""
    answer: asyncio.Future[list[bytes] | TidewalError] = asyncio.get_running_loop().create_future()
    wal.submit(entries, on_loop(answer.set_result))
    result = await answer
    if isinstance(result, TidewalError):
        raise result
    return result


def payloads(entries: Iterable[Entry]) -> list[bytes]:
    """The payloads of entries, in order."""
    return [bytes(entry.payload) for entry in entries]


async def idle(task: asyncio.Future[Any]) -> None:
    """Give the task every chance to finish, and make sure that it does not."""
    for _ in range(50):
        await asyncio.sleep(0)
    assert not task.done()
