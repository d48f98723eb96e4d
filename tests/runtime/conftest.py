"""A small world for the tests of channel owners and streams: one log, its owners, and its readers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from tidewal.runtime.clock import HybridClock, add_ms
from tidewal.runtime.errors import TidewalError
from tidewal.runtime.log.heartbeats import announcements
from tidewal.runtime.log.record import Record, RecordType, decode
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, OnAppended
from tidewal.runtime.ownership import ChannelGrant, ChannelOwner
from tidewal.runtime.streams.messages import MsgPack
from tidewal.runtime.streams.stream_base import reading
from tidewal.runtime.streams.tt_stream import TtMsgStream
from tidewal.runtime.testing.clock import VirtualClock
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

BEATS = "heartbeats"
LEASE_MS = 10_000


class HoldingWal(MemoryWal):
    """A memory WAL whose answers and writes can be held back, in order."""

    def __init__(self, log: MemoryLog | None = None) -> None:
        super().__init__(log)
        self.holding = False
        self.holding_answers = False
        self.held: list[Callable[[], None]] = []

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        if self.holding_answers:
            super().submit(entries, lambda result: self.held.append(lambda: done(result)))
        elif not self.holding:
            super().submit(entries, done)
            return
        taken = list(entries)
        self.held.append(lambda: super(HoldingWal, self).submit(taken, done))

    def let_go(self) -> None:
        self.holding = False
        held, self.held = self.held, []
        for submit in held:
            submit()


@dataclass
class OwnerNode:
    """A node with a channel owner, as a StreamingNode is."""

    wal: MemoryWal
    clock: HybridClock
    channel_owner: ChannelOwner
    limit: int = 0

    async def own(self, *channels: str, term: int = 1, previous_limit: int = 0, **grant: object) -> dict[str, bytes]:
        self.limit = add_ms(max(self.clock.now(), previous_limit), LEASE_MS)
        grants = [ChannelGrant(channel, term, previous_limit, self.limit, **grant) for channel in channels]
        fences = await self.channel_owner.acquire_all(grants)
        for channel in channels:
            self.channel_owner.activate(channel, term)
        return fences


@dataclass
class FollowedStream:
    """A stream that is read as packs come, with the heartbeats passed on to it."""

    stream: TtMsgStream
    wal: MemoryWal
    packs: list[MsgPack] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def _read(self) -> None:
        async for pack in self.stream:
            self.packs.append(pack)

    async def _listen(self) -> None:
        async with reading(self.wal, BEATS, From.EARLIEST) as batches:
            async for entries in batches:
                for entry in entries:
                    for announcement in announcements(decode(entry.payload)):
                        self.stream.announce(*announcement)

    async def stop(self) -> list[MsgPack]:
        await self.stream.close()
        self.tasks[1].cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return self.packs

    @property
    def messages(self) -> list[Record]:
        return [message for pack in self.packs for message in pack.messages]


class World:
    """Makes owners and followed streams over one log."""

    def __init__(self) -> None:
        self.source = VirtualClock()
        self.log = MemoryLog()

    async def channels(self, *names: str) -> None:
        wal = MemoryWal(self.log)
        await wal.create_channel(BEATS, ChannelPolicy(ephemeral=True))
        for name in names:
            await wal.create_channel(name, ChannelPolicy())

    def owner(self, wal: MemoryWal | None = None, **options: object) -> OwnerNode:
        wal = wal or MemoryWal(self.log)
        clock = HybridClock(self.source)
        return OwnerNode(wal, clock, ChannelOwner(wal, clock, heartbeat_channel=BEATS, **options))

    def follow(self, *channels: str, start: From = From.EARLIEST, **options: object) -> FollowedStream:
        wal = MemoryWal(self.log)
        stream = TtMsgStream(wal, group="g", **options)
        stream.as_consumer(channels, start)
        followed = FollowedStream(stream, wal)
        followed.tasks = [asyncio.ensure_future(followed._read()), asyncio.ensure_future(followed._listen())]
        return followed

    def records(self, channel: str) -> list[Record]:
        return [decode(entry.payload, entry.id) for entry in self.log.channels[channel].entries]

    @staticmethod
    async def settle() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    @staticmethod
    def rows(body: bytes = b"", vchannel: str = "") -> Record:
        return Record(RecordType.ROWS, vchannel=vchannel, body=body)

    @staticmethod
    async def outcome(future: asyncio.Future[object]) -> object:
        try:
            return await future
        except TidewalError as error:
            return error


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture(scope="session")
def make_world() -> type[World]:
    return World


@pytest.fixture
def holding_wal() -> type[HoldingWal]:
    return HoldingWal


@pytest.fixture
def source() -> MemoryWal:
    """A log to replicate."""
    return MemoryWal(MemoryLog())


@pytest.fixture
def target() -> MemoryWal:
    """One to be its replica."""
    return MemoryWal(MemoryLog())
