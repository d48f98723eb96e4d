"""An owner that was stopped past its lease and goes on is heard by no reader, wherever that starts (guarantee 3)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.backends import Backend
from tests.brokers.producers import everything
from tidewal.runtime.catalog.catalog_log import CatalogLog
from tidewal.runtime.clock import HybridClock, add_ms
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.record import Record, RecordType, decode
from tidewal.runtime.log.wal import ChannelPolicy, From, FromTime, Wal
from tidewal.runtime.ownership import ChannelGrant, ChannelOwner
from tidewal.runtime.streams.messages import MsgPack, Position
from tidewal.runtime.streams.tt_stream import TtMsgStream

pytestmark = pytest.mark.slow

CHANNEL = "a"
NAMES = Names("t")
PROCESS = Path(__file__).with_name("owner_process.py")
LIMIT_MS = 20_000
LEASE_S = 0.5
WITHIN_S = 40.0
MARK = b"new:mark:"


class OldOwner:
    """The process that owns the channel first. `acked` is what it told to be acknowledged."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.acked: set[bytes] = set()
        self.zombies: set[bytes] = set()  # ids
        self.fence = b""
        self._done = asyncio.Queue[str]()
        self._moved = asyncio.Event()
        self.listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            word, *more = line.decode().split()
            if word == "acked":
                self.acked.add(more[0].encode())
            elif word == "written":
                self.zombies.add(bytes.fromhex(more[0]))
            elif word == "fence":
                self.fence = bytes.fromhex(more[0])
            elif word == "ok":
                self._done.put_nowait(word)
            self._moved.set()

    async def until(self, condition) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not condition():
                assert not self.listening.done(), "the owner has ended"
                self._moved.clear()
                await self._moved.wait()

    async def do(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        async with asyncio.timeout(WITHIN_S):
            await self._done.get()


@pytest.fixture
async def start_owner(backend: Backend) -> AsyncIterator:
    started: list[OldOwner] = []

    async def start(limit: int) -> OldOwner:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(PROCESS),
            *(backend.url, CHANNEL, "1", str(limit)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        started.append(OldOwner(process))
        await started[-1].until(lambda: started[-1].fence)
        return started[-1]

    yield start
    for owner in started:
        if owner.process.returncode is None:
            owner.process.kill()
        await owner.process.wait()
        await owner.listening


class NewOwner:
    """The next owner, in the test's process: what it appends ends with a mark that readers wait for."""

    def __init__(self, wal: Wal) -> None:
        self.clock = HybridClock()
        self.writer = ChannelOwner(wal, self.clock)
        self.marks = 0

    async def append(self, count: int = 20) -> Record:
        """Append so many records, a mark, and a tick. Returns the mark's name and time."""
        for number in range(count):
            body = b"new:%d:%d" % (self.marks, number)
            await self.writer.append([(CHANNEL, Record(RecordType.ROWS, body=body))])
        body = MARK + b"%d" % self.marks
        self.marks += 1
        appended = await self.writer.append([(CHANNEL, Record(RecordType.ROWS, body=body))])
        await self.writer.tick_now()
        return Record(RecordType.ROWS, ts=appended.ts, body=body, id=appended.ids[0])


@dataclass
class Reader:
    """A stream, and the messages it has given; `upto` reads on to a mark."""

    stream: TtMsgStream
    messages: list[Record]
    positions: list[Position]

    async def some(self) -> None:
        """Read until there is a message."""
        async with asyncio.timeout(WITHIN_S):
            while not self.messages:
                self._take(await anext(self.stream))

    async def upto(self, mark: Record) -> list[bytes]:
        """Read until the mark, and return the bodies of all messages."""
        async with asyncio.timeout(WITHIN_S):
            while bytes(mark.body) not in self.bodies:
                self._take(await anext(self.stream))
        return self.bodies

    def _take(self, pack: MsgPack) -> None:
        self.messages += pack.messages
        self.positions = list(pack.end_positions.values())

    def saved(self) -> tuple[list[Position], int]:
        """Where it is, and how many messages lie before that."""
        return self.positions, len(self.messages)

    @property
    def bodies(self) -> list[bytes]:
        return [bytes(message.body) for message in self.messages]

    @property
    def fenced(self) -> int:
        return self.stream.counts[CHANNEL].fenced


class Readers:
    """Opens streams, each with what the catalog says of the channel's fences."""

    def __init__(self, wal: Wal) -> None:
        self._wal = wal
        self._opened: list[TtMsgStream] = []

    async def start(self, start: From | FromTime) -> Reader:
        catalog = CatalogLog(self._wal, NAMES, HybridClock())
        await catalog.open()
        reader = self._reader()
        reader.stream.as_consumer([CHANNEL], start, fences=catalog.catalog.fences([CHANNEL]))
        await catalog.close()
        return reader

    def at(self, *positions: Position) -> Reader:
        reader = self._reader()
        reader.stream.seek([Position.from_bytes(position.to_bytes()) for position in positions])
        return reader

    def _reader(self) -> Reader:
        self._opened.append(TtMsgStream(self._wal, group="g"))
        return Reader(self._opened[-1], [], [])

    async def close(self) -> None:
        for stream in self._opened:
            await stream.close()


class Scene:
    """The channel's two owners, the catalog, and readers that began while each of them wrote."""

    def __init__(self, backend: Backend, wal: Wal) -> None:
        self.backend, self.wal = backend, wal
        self.readers = Readers(wal)
        self.new = NewOwner(wal)
        self.limit = add_ms(self.new.clock.now(), LIMIT_MS)
        self.fence = b""
        self._coordinator = CatalogLog(wal, NAMES, HybridClock())

    async def open(self) -> None:
        await self.wal.create_channel(CHANNEL, ChannelPolicy())
        await self._coordinator.open()
        await self._coordinator.claim("coordinator")

    async def close(self) -> None:
        await self.readers.close()
        await self._coordinator.close()

    async def _grant(self, owner: str, term: int, limit: int) -> None:
        await self._coordinator.append(
            {"kind": "grant", "node": owner, "channels": {CHANNEL: (term, term - 1)}, "limit": limit}
        )

    async def _fenced(self, fence: bytes) -> None:
        term = self._coordinator.catalog.channels[CHANNEL].term
        await self._coordinator.append({"kind": "fenced", "channels": {CHANNEL: (term, fence)}})

    async def old_works_and_is_stopped(self, start_owner) -> None:
        """Its lease is over when this returns."""
        await self._grant("old", 1, self.limit)
        self.old: OldOwner = await start_owner(self.limit)
        await self._fenced(self.old.fence)
        self.before = await self.readers.start(From.EARLIEST)
        await self.old.do("open")
        await self.old.until(lambda: len(self.old.acked) >= 100)
        await self.before.some()
        self.saved_before = self.before.saved()
        ends_s = time.monotonic() + LEASE_S
        await self.old.do(f"until {ends_s}")
        os.kill(self.old.process.pid, signal.SIGSTOP)
        await asyncio.wait([self.old.listening], timeout=ends_s - time.monotonic())

    async def new_takes_over(self) -> None:
        await self._grant("new", 2, add_ms(self.limit, LIMIT_MS))
        state = self._coordinator.catalog.channels[CHANNEL]
        grant = ChannelGrant(CHANNEL, 2, state.previous_limit, state.limit, fences=state.fences)
        self.fence = await self.new.writer.acquire(grant)
        await self._fenced(self.fence)
        self.new.writer.activate(CHANNEL, 2)
        self.first = await self.new.append()
        behind = await self.readers.start(From.EARLIEST)
        await behind.upto(self.first)
        self.saved_behind = behind.saved()

    async def old_goes_on(self, helpers) -> None:
        """And the new one between; a reader at the end begins behind what the old one has written."""
        os.kill(self.old.process.pid, signal.SIGCONT)
        await self.old.do("zombie 20")
        self.second = await self.new.append()
        await self.old.do("zombie 5")
        self.latest = await self.readers.start(From.LATEST)
        self.reading_latest = asyncio.create_task(self.latest.some())
        async with asyncio.timeout(WITHIN_S):
            await helpers.until(lambda: self.latest.stream.counts[CHANNEL].records)
        await self.old.do("zombie 5")
        self.third = await self.new.append()
        await self.old.do("end")

    async def look(self) -> None:
        """What is in the log, and what of it counts."""
        entries = [(entry.id, decode(entry.payload)) for entry in await everything(self.wal, CHANNEL)]
        rows = [(id, record) for id, record in entries if record.type is RecordType.ROWS]
        self.landed = {id for id, record in rows if record.term == 1 and id > self.fence}
        self._counting = [(id, record) for id, record in rows if record.term == 2 or id < self.fence]
        (self.fence_ts,) = [record.ts for id, record in entries if id == self.fence]

    def expected(self, *, after: bytes = b"", behind_ts: int = 0) -> list[bytes]:
        """The bodies that a reader must see which starts behind an id, or behind a time."""
        return [bytes(record.body) for id, record in self._counting if id > after and record.ts > behind_ts]


@pytest.fixture
async def scene(backend, start_owner, helpers):
    """Played to its end."""
    if not backend.url:
        pytest.skip(f"no other process can open {backend.name}")
    scene = Scene(backend, await backend.wal())
    await scene.open()
    await scene.old_works_and_is_stopped(start_owner)
    await scene.new_takes_over()
    await scene.old_goes_on(helpers)
    await scene.look()
    yield scene
    await scene.close()


async def test_what_a_stopped_owner_writes_past_its_lease_is_seen_from_nowhere(scene):
    readers, third, expected = scene.readers, scene.third, scene.expected
    assert scene.old.zombies <= scene.landed, "nothing was written that should not be seen"
    assert not any(body.startswith(b"zombie") for body in expected())
    assert scene.old.acked <= set(expected()), "something acknowledged is not seen"
    # one that began before the fence and goes on, and one from a position that was saved then
    assert await scene.before.upto(third) == expected()
    assert scene.before.fenced >= len(scene.landed)
    at, seen = scene.saved_before
    assert await readers.at(*at).upto(third) == expected()[seen:]
    # at the fence, and behind it
    at_fence = Position(CHANNEL, scene.fence, 2, 1, scene.fence_ts, scene.wal.name, "g")
    assert await readers.at(at_fence).upto(third) == expected(after=scene.fence)
    at, _ = scene.saved_behind
    assert await readers.at(*at).upto(third) == expected(after=scene.first.id)
    # without a position: from the first, from the end, from a time
    assert await (await readers.start(From.EARLIEST)).upto(third) == expected()
    await scene.reading_latest
    assert await scene.latest.upto(third) == expected(after=scene.second.id)
    for ts in (scene.limit - 1, scene.limit, scene.first.ts - 1, scene.first.ts, scene.second.ts):
        assert await (await readers.start(FromTime(ts))).upto(third) == expected(behind_ts=ts)
    # from the first there is, which is what the old owner wrote
    await scene.backend.remove_before(scene.wal, CHANNEL, min(scene.old.zombies))
    first_id = (await scene.wal.describe(CHANNEL)).first_id
    assert await (await readers.start(From.EARLIEST)).upto(third) == expected(after=first_id)
