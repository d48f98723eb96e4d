"""Logs under test: the fixture `backend`, for tests in any folder, is each backend in turn.

Each opens the same log again and again: of the test's own directory, or under a name of its own on the run's brokers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from tests.stored import outside
from tidewal.adapters.kafka import KafkaWal
from tidewal.adapters.pulsar import Pulsar
from tidewal.adapters.rocksmq import RocksMQ, open_wal
from tidewal.runtime.log.opening import open_wal as open_any
from tidewal.runtime.log.wal import Append, ChannelPolicy, Entry, FromId, Payload, Start, Wal
from tidewal.runtime.testing.conformance import BackendUnderTest
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

SEGMENT_BYTES = 256 * 1024
SETTLED_WITHIN_S = 20.0


class Backend(BackendUnderTest):
    """What the conformance suite gets, and what other tests do with it."""

    async def remove_all(self, wal: Wal, channel: str) -> None:
        """Make retention remove every entry that `channel` has."""
        latest = await wal.latest_id(channel)
        assert latest is not None
        await self.remove_before(wal, channel, (int.from_bytes(latest) + 1).to_bytes(len(latest)))


async def fill_segment(wal: Wal) -> None:
    """Append until the segment in use is another one."""
    await wal.create_channel("filler", ChannelPolicy(retention_s=0))
    for _ in range(SEGMENT_BYTES // (32 * 1024) + 1):
        await wal.append("filler", bytes(32 * 1024))


def log_url(name: str, brokers: Any) -> str:
    """A log that nobody else uses, on the brokers that the fixture `kafka` or `pulsar` gives."""
    if name == "kafka":
        return f"{brokers.url}/{uuid4().hex}"
    return f"{brokers.url}/public/{uuid4().hex}?web_url={brokers.web_url}"


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
        found = memory_backend()
    elif name in ("kafka", "pulsar"):
        found = broker_backend(name, log_url(name, request.getfixturevalue(name)))
    else:
        found = Backend(name, RocksMQ.capabilities, owners.open, owners.remove_before, fill_segment)
    if name == "rocksmq-socket":
        found.url = f"rocksmq://{tmp_path / 'log'}"
        found.options = {"failover_s": 0}
    if found.url:
        found.missing_url = urlsplit(found.url)._replace(path=urlsplit(found.url).path + "0").geturl()
        found.outside = outside
    yield found
    await found.close()
    await owners.close()


def memory_backend() -> Backend:
    log = MemoryLog()

    async def open_memory() -> Wal:
        return MemoryWal(log)

    one_loop = {"test_submit_from_other_threads_calls_back_once_each": "the memory WAL belongs to one loop"}
    return Backend("memory", MemoryWal.capabilities, open_memory, skipped=one_loop)


def broker_backend(name: str, url: str) -> Backend:
    adapter = KafkaWal if name == "kafka" else Pulsar
    return Backend(name, adapter.capabilities, lambda: open_any(url), url=url)


class Observed:
    """A log whose readers can be waited for: `settled` returns once those of some channels have come back for more
    behind the last entry that was appended here."""

    def __init__(self, wal: Wal) -> None:
        self._wal = wal
        self._last: dict[str, bytes] = {}
        self._readers: set[_ObservedReader] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wal, name)

    async def reopen(self, backend: Backend) -> None:
        """Go on over the same log, opened anew."""
        await self._wal.close()
        self._wal = await backend.wal()

    async def append(self, channel: str, payload: Payload, timestamp: int = 0) -> bytes:
        return (await self.append_many([Append(channel, payload, timestamp)]))[0]

    async def append_many(self, entries: Sequence[Append]) -> list[bytes]:
        ids = await self._wal.append_many(entries)
        for entry, id in zip(entries, ids, strict=True):
            self._last[entry.channel] = max(id, self._last.get(entry.channel, b""))
        return ids

    def read(self, channel: str, start: Start) -> _ObservedReader:
        reader = _ObservedReader(channel, self._wal.read(channel, start), self._readers)
        if isinstance(start, FromId) and not start.inclusive:
            reader.at = start.id
        self._readers.add(reader)
        return reader

    async def settled(self, channels: Iterable[str]) -> None:
        names = set(channels)
        async with asyncio.timeout(SETTLED_WITHIN_S):
            while not self._are_settled(names):  # noqa: ASYNC110 -- entries come from threads that know no event
                await asyncio.sleep(0)
        for _ in range(12):  # what the readers' tasks have started goes on until it waits
            await asyncio.sleep(0)

    def _are_settled(self, names: set[str]) -> bool:
        reading = [reader for reader in self._readers if reader.channel in names]
        return names <= {reader.channel for reader in reading} and all(
            reader.waits and reader.at >= self._last.get(reader.channel, b"") for reader in reading
        )


class _ObservedReader:
    """What `Observed.read` returns. `at` is how far its user has come."""

    def __init__(self, channel: str, entries: AsyncIterator[Sequence[Entry]], known: set[_ObservedReader]) -> None:
        self.channel, self._entries, self._known = channel, entries, known
        self.at = self._handed = b""
        self.waits = False

    def __aiter__(self) -> _ObservedReader:
        return self

    async def __anext__(self) -> Sequence[Entry]:
        self.at, self.waits = max(self.at, self._handed), True
        try:
            entries = await anext(self._entries)
        finally:
            self.waits = False
        self._handed = entries[-1].id
        return entries

    async def aclose(self) -> None:
        self._known.discard(self)
        await self._entries.aclose()  # pyright: ignore[reportAttributeAccessIssue] -- see `Wal.read`
