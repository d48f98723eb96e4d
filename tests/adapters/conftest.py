"""What tests of adapters share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.backends import SEGMENT_BYTES, Backend, fill_segment
from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.log.wal import Entry, Wal
from tidewal.runtime.testing.clock import VirtualClock
from tidewal.runtime.testing.conformance.helpers import payloads, submitted, take


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
