"""What tests of adapters share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.backends import SEGMENT_BYTES, Backend, fill_segment
from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.errors import TidewalError
from tidewal.runtime.log.wal import Append, Entry, Start, Wal
from tidewal.runtime.testing.clock import VirtualClock


@pytest.fixture
async def wal(backend: Backend) -> Wal:
    return await backend.wal()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def open_rocksmq(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[RocksMQ]]]:
    """Open (again) the RocksMQ of this test; all are closed at its end."""
    opened: list[RocksMQ] = []

    async def open_store(**options: Any) -> RocksMQ:
        store = await RocksMQ.open(str(tmp_path / "log"), **{"segment_bytes": SEGMENT_BYTES, "serve": False} | options)
        opened.append(store)
        return store

    yield open_store
    for store in opened:
        await store.close()


async def take(wal: Wal, channel: str, start: Start, count: int) -> list[Entry]:
    """The first `count` entries from `start`."""
    entries: list[Entry] = []
    reader = wal.read(channel, start)
    try:
        async with asyncio.timeout(20):
            while len(entries) < count:
                entries += await anext(reader)
    finally:
        await reader.aclose()
    return entries[:count]


async def submitted(wal: Wal, entries: Sequence[Append]) -> list[bytes]:
    """What `submit` answers; its error is raised, whether it came at once or later."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[bytes] | TidewalError] = loop.create_future()
    wal.submit(entries, lambda result: loop.call_soon_threadsafe(answer.set_result, result))
    result = await answer
    if isinstance(result, TidewalError):
        raise result
    return result


def payloads(entries: list[Entry]) -> list[bytes]:
    return [bytes(entry.payload) for entry in entries]


async def drain(reader: AsyncIterator[Any], into: list[Entry]) -> None:
    """Read until the reader raises or ends."""
    async for batch in reader:
        into += batch


async def until(condition: Callable[[], object]) -> None:
    """Let other tasks and threads run until the condition holds."""
    while not condition():  # noqa: ASYNC110 -- what is waited for happens on threads that know no event
        await asyncio.sleep(0)


@pytest.fixture
def helpers() -> Helpers:
    return Helpers()


class Helpers:
    """Test files cannot import this one (pytest's importlib mode), so they get its functions from a fixture."""

    take = staticmethod(take)
    drain = staticmethod(drain)
    until = staticmethod(until)
    submitted = staticmethod(submitted)
    payloads = staticmethod(payloads)
    fill_segment = staticmethod(fill_segment)
