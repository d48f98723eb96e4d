"""Backends under test: each opens the same log again and again, in the directory of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tidewal.adapters.kafka import KafkaWal
from tidewal.adapters.memory import MemoryWal
from tidewal.adapters.pulsar import Pulsar
from tidewal.adapters.rocksmq import RocksMQ, open_wal
from tidewal.runtime.errors import TidewalError
from tidewal.runtime.factory import open_wal as open_any
from tidewal.runtime.testing.clock import VirtualClock
from tidewal.runtime.testing.memory import MemoryLog
from tidewal.runtime.wal import Append, Capabilities, ChannelPolicy, Entry, Start, Wal

SEGMENT_BYTES = 256 * 1024
PLAIN = ChannelPolicy()


@dataclass
class Backend:
    """How to open one log, what it can do, and how to make its retention act."""

    name: str
    capabilities: Capabilities
    open: Callable[[], Awaitable[Wal]]
    remove_before: Callable[[Wal, str, bytes], Awaitable[None]]
    opened: list[Wal] = field(default_factory=list)

    def needs(self, capability: str) -> None:
        """Skip the test where the backend declares that it lacks this."""
        if not getattr(self.capabilities, capability):
            pytest.skip(f"{self.name} lacks the capability {capability}")

    async def wal(self) -> Wal:
        wal = await self.open()
        self.opened.append(wal)
        return wal


async def fill_segment(wal: Wal) -> None:
    """Append until the segment in use is another one."""
    await wal.create_channel("filler", ChannelPolicy(retention_s=0))
    for _ in range(SEGMENT_BYTES // (32 * 1024) + 1):
        await wal.append("filler", bytes(32 * 1024))


async def _truncate_only(wal: Wal, channel: str, id: bytes) -> None:
    await wal.truncate(channel, id)


class Owners:
    """A RocksMQ directory whose owner lives in the test's process: each opening opens it anew."""

    def __init__(self, directory: str, *, shared: bool) -> None:
        self._directory, self._shared = directory, shared
        self._owner: RocksMQ | None = None

    async def open(self) -> Wal:
        """The owner; or with `shared` what another process would get, over the socket."""
        await self.close()
        self._owner = await RocksMQ.open(self._directory, segment_bytes=SEGMENT_BYTES, serve=self._shared)
        return await open_wal(f"rocksmq://{self._directory}", own=False) if self._shared else self._owner

    async def close(self) -> None:
        if self._owner is not None:
            await self._owner.close()

    async def remove_before(self, wal: Wal, channel: str, id: bytes) -> None:
        assert self._owner is not None
        await wal.truncate(channel, id)
        await fill_segment(wal)
        self._owner.retain_now()


@pytest.fixture(
    params=[
        "memory",
        "rocksmq",
        "rocksmq-socket",
        pytest.param("kafka", marks=pytest.mark.broker),
        pytest.param("pulsar", marks=pytest.mark.broker),
    ]
)
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    name: str = request.param
    owners = Owners(str(tmp_path / "log"), shared=name == "rocksmq-socket")
    if name == "memory":
        log = MemoryLog()

        async def open_memory() -> Wal:
            return MemoryWal(log)

        found = Backend(name, MemoryWal.capabilities, open_memory, _truncate_only)
    elif name == "kafka":
        url = f"{request.getfixturevalue('kafka').url}/{uuid4().hex}"
        found = Backend(name, KafkaWal.capabilities, lambda: open_any(url), _truncate_only)
    elif name == "pulsar":
        broker = request.getfixturevalue("pulsar")
        url = f"{broker.url}/public/{uuid4().hex}?web_url={broker.web_url}"
        found = Backend(name, Pulsar.capabilities, lambda: open_any(url), _truncate_only)
    else:
        found = Backend(name, RocksMQ.capabilities, owners.open, owners.remove_before)
    yield found
    for wal in found.opened:
        await wal.close()
    await owners.close()


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
