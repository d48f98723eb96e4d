"""Dispatchers: each stream gets what a reader of its own would get, and each record is read once for all."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends import Observed
from tidewal.runtime.clock import SystemClock, compose, physical_ms
from tidewal.runtime.errors import Closed, OrderViolated, PositionLost
from tidewal.runtime.log.record import BatchPart, Record, RecordType, decode, encode
from tidewal.runtime.log.wal import Append, ChannelPolicy, Entry, From, FromTime, Start, Wal
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.streams import channel_reader
from tidewal.runtime.streams import dispatcher as module
from tidewal.runtime.streams.channel_reader import Granted
from tidewal.runtime.streams.dispatched_stream import DispatchedStream
from tidewal.runtime.streams.dispatcher import Dispatchers
from tidewal.runtime.streams.messages import MsgPack, Position
from tidewal.runtime.streams.pursuit import Pursuit
from tidewal.runtime.streams.stream_base import RECORD_OVERHEAD_BYTES, reading
from tidewal.runtime.streams.tt_stream import TtMsgStream
from tidewal.runtime.testing.clock import elapse, run_virtual
from tidewal.runtime.testing.memory import MemoryWal

CHANNELS = ("p0", "p1", "p2")
BODY_BYTES_MAX = 400
BATCH_PARTS = 3
LATE = "late"
Message = tuple[int, bytes]


class CountedWal(MemoryWal):
    """Counts readers, and gives batches of random sizes after random pauses."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.readers: dict[str, int] = {}
        self.most: int = 0

    async def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        self.readers[channel] = self.readers.get(channel, 0) + 1
        self.most = max(self.most, self.readers[channel])
        try:
            async with reading(super(), channel, start) as batches:
                async for batch in batches:
                    rest = batch
                    while rest:
                        size = self.rng.randint(1, 4)
                        yield rest[:size]
                        rest = rest[size:]
                        if self.rng.random() < 0.3:
                            await asyncio.sleep(self.rng.random() / 100)
        finally:
            self.readers[channel] -= 1


@dataclass
class Owner:
    """Writes one pchannel as owners, a superseded owner and a faulty network would."""

    name: str
    rng: random.Random
    vchannels: list[str]
    now: int = compose(1000, 0)
    term: int = 0
    cseq: int = 0
    known_term: int = 0  # to readers that have not caught up with the grants
    payloads: list[tuple[bytes, int]] = field(default_factory=list)
    fences: dict[int, bytes] = field(default_factory=dict)
    serial: int = 0
    late_serials: set[int] = field(default_factory=set)

    def step(self, count: int) -> list[Append]:
        begun = len(self.payloads)
        acts = [self.rows] * 5 + [self.batch, self.tick, self.again, self.junk, self.fence, self.zombie, self.half]
        if not self.term:
            self.fence()
        for _ in range(count):
            self.rng.choice([*acts, self.late])()
        return [Append(self.name, payload, ts) for payload, ts in self.payloads[begun:]]

    def put(self, type: RecordType, ts: int, **fields: object) -> None:
        self.cseq += 1
        self.serial += 1
        body = f"{self.name}-{self.serial}{LATE if self.serial in self.late_serials else ''}-".encode() + bytes(
            self.rng.randrange(BODY_BYTES_MAX - 20)
        )
        record = Record(type, ts=ts, term=self.term, cseq=self.cseq, body=body, **fields)
        self.payloads.append((encode(record), ts))

    def later(self) -> int:
        self.now += compose(0, self.rng.randint(1, 9)) + compose(self.rng.choice([0, 0, 20, 150]), 0)
        return self.now

    def rows(self) -> None:
        self.put(RecordType.ROWS, self.later(), vchannel=self.rng.choice(self.vchannels))

    def batch(self) -> None:
        ts, of = self.later(), self.rng.randint(2, BATCH_PARTS)
        for number in range(of):
            vchannel = self.rng.choice(self.vchannels)
            self.put(RecordType.ROWS, ts, part=BatchPart(ts, number, of), vchannel=vchannel)

    def half(self) -> None:
        ts = self.later()
        for number in range(2):
            self.put(RecordType.ROWS, ts, part=BatchPart(ts, number, 3), vchannel=self.rng.choice(self.vchannels))
        self.tick()

    def tick(self) -> None:
        self.put(RecordType.TIME_TICK, self.later())

    def again(self) -> None:
        self.payloads.append(self.rng.choice(self.payloads))

    def junk(self) -> None:
        self.payloads.append((self.rng.randbytes(20), self.now))

    def fence(self) -> None:
        self.term, self.cseq = self.term + 1, 0
        self.put(RecordType.FENCE, self.later())

    def zombie(self) -> None:
        if self.term > 1:
            vchannel = self.rng.choice(self.vchannels)
            record = Record(RecordType.ROWS, self.now + 1, self.term - 1, 900 + self.serial, vchannel=vchannel)
            self.payloads.append((encode(record), record.ts))

    def late(self) -> None:
        """Break guarantee 4. Whether a reader notices depends on where it begins."""
        self.late_serials.add(self.serial + 1)
        self.put(RecordType.ROWS, self.now - compose(3, 0), vchannel=self.rng.choice(self.vchannels))


class Catalog:
    """Grants that a reader knows only once it has caught up."""

    def __init__(self, owners: dict[str, Owner]) -> None:
        self._owners = owners

    def granted(self, pchannel: str) -> Granted:
        return Granted(self._owners[pchannel].known_term)

    async def catch_up(self) -> None:
        await asyncio.sleep(0.001)
        for owner in self._owners.values():
            owner.known_term = owner.term


def in_time(messages: Iterable[Record]) -> list[Message]:
    """Those that did not come late."""
    bodies = [(message.ts, bytes(message.body)) for message in messages]
    return [(ts, body) for ts, body in bodies if LATE.encode() not in body]


@dataclass
class Reader:
    """A collection's pipeline: one session of a stream after the other, each from where the one before ended."""

    vchannels: list[str]
    start: From | FromTime
    fences: dict[str, dict[int, bytes]]
    packs: list[MsgPack] = field(default_factory=list)
    stream: DispatchedStream | None = None
    task: asyncio.Task[None] | None = None
    goes: asyncio.Event = field(default_factory=asyncio.Event)
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    idle_time: int = 0  # the highest that the stream has said so far
    too_late: list[Message] = field(default_factory=list)  # messages at or before that

    @property
    def channels(self) -> list[str]:
        return sorted({vchannel.partition("v")[0] for vchannel in self.vchannels})

    @property
    def messages(self) -> list[Message]:
        return in_time(message for pack in self.packs for message in pack.messages)

    async def until(self, time: int) -> None:
        """Return once everything up to `time` was handed out."""
        while not self.packs or self.packs[-1].end_ts < time:
            self.progress.clear()
            await self.progress.wait()

    async def run(self) -> None:
        assert self.stream is not None
        await self.goes.wait()
        async for pack in self.stream:
            self.packs.append(pack)
            self.too_late += [message for message in in_time(pack.messages) if message[0] <= self.idle_time]
            self.progress.set()
            await self.goes.wait()


class World:
    """Some pchannels, and the readers of collections that share their dispatchers."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.wal = CountedWal(rng)
        vchannels = {name: [f"{name}v{number}" for number in range(4)] for name in CHANNELS}
        self.owners = {name: Owner(name, rng, vchannels[name]) for name in CHANNELS}
        self.limit = rng.choice([1, 1500, 6000, 10**6])
        self.dispatchers = Dispatchers(self.wal, self.limit, Metrics())
        self.readers: list[Reader] = []
        self.bad: list[bytes] = []

    def options(self) -> dict[str, object]:
        return {
            "grants": Catalog(self.owners),
            "on_late": lambda *_: None,
            "on_bad": lambda channel, entry, error: self.bad.append(entry.id),
        }

    async def append(self, count: int = 6) -> None:
        owner = self.rng.choice(list(self.owners.values()))
        term = owner.term
        entries = owner.step(count)
        ids = await self.wal.append_many(entries)
        for entry, id in zip(entries, ids, strict=True):
            self.note_fence(owner, entry.payload, id)
        if owner.term == term and self.rng.random() < 0.5:
            self.dispatchers.announce(owner.name, owner.term, owner.cseq, owner.now)

    def note_fence(self, owner: Owner, payload: bytes, id: bytes) -> None:
        if payload.startswith(b"TW"):
            record = decode(payload)
            if record.type is RecordType.FENCE:
                owner.fences.setdefault(record.term, id)

    async def open(self) -> None:
        names = self.rng.sample([v for owner in self.owners.values() for v in owner.vchannels], self.rng.randint(1, 4))
        time = self.rng.choice([owner.now for owner in self.owners.values()]) - compose(self.rng.choice([0, 50]), 0)
        start = self.rng.choice([From.EARLIEST, FromTime(time)])
        fences = {name: dict(owner.fences) for name, owner in self.owners.items()}
        reader = Reader(names, start, fences)
        if self.rng.random() < 0.8:
            reader.goes.set()
        self.readers.append(reader)
        self.begin(reader)

    def begin(self, reader: Reader) -> None:
        stream = DispatchedStream(self.wal, self.dispatchers, reader.vchannels, **self.options())
        stream.as_consumer(reader.channels, reader.start, fences=reader.fences)
        if reader.packs:
            ends = reader.packs[-1].end_positions.values()
            stream.seek([Position.from_bytes(position.to_bytes()) for position in ends if position.message_id])
        reader.stream, reader.task = stream, asyncio.create_task(reader.run())

    async def close(self, reader: Reader) -> None:
        assert reader.stream is not None
        assert reader.task is not None
        await reader.stream.close()
        reader.goes.set()
        await reader.task
        reader.stream = None

    async def act(self, action: str) -> None:
        reader = self.rng.choice(self.readers) if self.readers else None
        if action == "append":
            await self.append()
        elif action == "elapse":
            await elapse(self.rng.choice([0.001, 0.02, 0.2]))
        elif action == "open" or reader is None:
            await self.open()
        elif action == "stop":
            reader.goes.clear()
        elif action == "go":
            reader.goes.set()
        elif reader.stream is None:
            self.begin(reader)
        else:
            await self.close(reader)
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        self.check_budget()
        for each in self.readers:
            if each.stream is not None:
                each.idle_time = max(each.idle_time, each.stream.idle_time)

    def check_budget(self) -> None:
        """Beside the limit each target may hold one batch of the log, and what it needs to know the time."""
        targets = sum(len(reader.channels) for reader in self.readers if reader.stream is not None)
        one = BATCH_PARTS * (BODY_BYTES_MAX + RECORD_OVERHEAD_BYTES) + 2 * RECORD_OVERHEAD_BYTES
        assert self.dispatchers.budget.used <= self.limit + targets * (one + module.RECENT_BYTES)

    async def end(self) -> int:
        """Let all read to the end, which is the time returned."""
        time = max(owner.now for owner in self.owners.values()) + compose(200, 0)
        for owner in self.owners.values():
            if not owner.term:
                await self.wal.append_many(owner.step(1))
            owner.now = time
            owner.put(RecordType.TIME_TICK, time)
            payload, ts = owner.payloads[-1]
            await self.wal.append(owner.name, payload, ts)
        for reader in self.readers:
            reader.goes.set()
            if reader.stream is None:
                self.begin(reader)
            assert reader.stream is not None
            reader.stream.wait_for(time)
        async with asyncio.timeout(60):  # of virtual time
            for reader in self.readers:
                await reader.until(time)
        return time

    async def expected(self, reader: Reader, time: int) -> list[Message]:
        """What a reader of its own gets."""
        stream = TtMsgStream(self.wal, vchannels=reader.vchannels, **self.options())
        stream.as_consumer(reader.channels, reader.start, fences=reader.fences)
        messages: list[Message] = []
        async for pack in stream:
            messages += in_time(pack.messages)
            if pack.end_ts >= time:
                break
        await stream.close()
        return messages


ACTIONS = st.sampled_from(["append"] * 4 + ["elapse"] * 2 + ["open", "open", "stop", "go", "turn", "turn"])


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(ACTIONS, min_size=1, max_size=60), st.integers(0, 2**32))
def test_each_stream_gets_what_a_reader_of_its_own_would_get(actions, seed):
    with pytest.MonkeyPatch.context() as patched:
        rng = random.Random(seed)
        patched.setattr(module, "RECENT_BYTES", rng.choice([0, 0, 1000, 5000]))
        patched.setattr(module, "TURN_BYTES", rng.choice([1, 2000, 10**6]))
        run_virtual(check(rng, actions))


async def check(rng: random.Random, actions: list[str]) -> None:
    world = World(rng)
    for name in CHANNELS:
        await world.wal.create_channel(name, ChannelPolicy())
    for action in actions:
        await world.act(action)
    time = await world.end()
    assert world.wal.most <= 2
    for reader in world.readers:
        for before, after in itertools.pairwise(reader.packs):
            assert before.end_ts == after.begin_ts < after.end_ts
        for pack in reader.packs:
            assert all(pack.begin_ts < message.ts <= pack.end_ts for message in pack.messages)
        assert reader.messages == await world.expected(reader, time)
        assert reader.too_late == []
    for reader in world.readers:
        await world.close(reader)
    assert world.dispatchers.budget.used == 0
    assert not any(world.wal.readers.values())
    assert len(asyncio.all_tasks()) == 1
    await world.wal.close()


# ---- one behaviour at a time -----------------------------------------------------------------------------------------


@pytest.fixture
async def memory():
    """A log with one pchannel."""
    log = MemoryWal()
    await log.create_channel("p", ChannelPolicy())
    yield log
    await log.close()


def row(cseq: int, vchannel: str, body: bytes = b"", ts: int = 0) -> Record:
    return Record(RecordType.ROWS, ts or compose(1000 + cseq, 0), 1, cseq, vchannel=vchannel, body=body)


async def put(wal: Wal, *records: Record) -> list[bytes]:
    return await wal.append_many([Append("p", encode(record), record.ts) for record in records])


def opened(wal: Wal, dispatchers: Dispatchers, *vchannels: str, start: From | FromTime = From.EARLIEST, **options):
    stream = DispatchedStream(wal, dispatchers, vchannels, **options)
    stream.as_consumer(["p"], start)
    return stream


async def bodies_until(stream: TtMsgStream, time: int) -> list[bytes]:
    found: list[bytes] = []
    async with asyncio.timeout(20):
        while stream.end_ts < time:
            found += [bytes(message.body) for message in (await anext(stream)).messages]
    return found


async def test_a_record_is_decoded_once_for_all_collections(memory, monkeypatch):
    decoded: list[bytes] = []

    def counted(payload: bytes, id: bytes = b"") -> Record:
        decoded.append(id)
        return decode(payload, id)

    monkeypatch.setattr(channel_reader, "decode", counted)
    dispatchers = Dispatchers(memory, 10**6, Metrics())
    names = [f"p_{number}" for number in range(25)]
    streams = [opened(memory, dispatchers, name) for name in names for _ in ("datanode", "querynode")]
    records = [row(cseq, names[cseq % 25], b"%d" % cseq) for cseq in range(1, 501)]
    reading = [asyncio.create_task(bodies_until(stream, records[-26].ts)) for stream in streams]
    for at in range(0, 500, 50):
        await put(memory, *records[at : at + 50])
        await asyncio.sleep(0)
    got = await asyncio.gather(*reading)
    assert sum(map(len, got)) >= 2 * 475
    assert sorted(set(decoded)) == sorted(decoded)
    assert len(decoded) <= 500
    for stream in streams:
        await stream.close()


def test_a_stream_that_stands_still_holds_up_no_other_and_loses_nothing():
    run_virtual(check_standing_still())


async def check_standing_still() -> None:
    memory = MemoryWal()
    await memory.create_channel("p", ChannelPolicy())
    dispatchers = Dispatchers(memory, 8000, Metrics())
    stands, goes = opened(memory, dispatchers, "p_1"), opened(memory, dispatchers, "p_2")
    records = [row(cseq, f"p_{cseq % 2 + 1}", b"%d" % cseq) for cseq in range(1, 201)]
    await put(memory, records[1])
    assert await bodies_until(stands, records[1].ts) == [b"2"]
    await put(memory, *records[2:])
    assert await bodies_until(goes, records[-1].ts - 1) == [b"%d" % cseq for cseq in range(3, 201, 2)]
    assert dispatchers.budget.used <= 8000
    assert await bodies_until(stands, records[-1].ts) == [b"%d" % cseq for cseq in range(4, 201, 2)]
    await stands.close()
    await goes.close()
    assert dispatchers.budget.used == 0
    await memory.close()


def test_streams_that_wait_for_nothing_hear_of_the_time_by_turns():
    run_virtual(check_turns())


async def check_turns() -> None:
    memory = MemoryWal()
    await memory.create_channel("p", ChannelPolicy())
    await put(memory, row(1, "p_0"))
    dispatchers = Dispatchers(memory, 10**6, Metrics())
    streams = [opened(memory, dispatchers, f"p_{number}") for number in range(120)]
    heard: list[list[int]] = [[] for _ in streams]

    async def follow(number: int) -> None:
        async for pack in streams[number]:
            heard[number].append(physical_ms(pack.end_ts))

    following = [asyncio.create_task(follow(number)) for number in range(120)]
    await asyncio.sleep(1)
    steps = range(2_000, 122_000, 100)
    for ms in steps:
        if ms == 5_000:
            streams[7].wait_for(compose(5_500, 0))
            streams[7].wait_for(compose(5_300, 0))
        before = sum(map(len, heard))
        dispatchers.announce("p", 1, 1, compose(ms, 0))
        await asyncio.sleep(0.1)
        assert ms == steps[0] or sum(map(len, heard)) - before <= 4
        assert {stream.idle_time for stream in streams} == {compose(ms, 0)}
    assert {5_300, 5_500} <= set(heard[7])
    for times in heard:
        assert 4 <= len(times) <= 8
        assert all(after - before <= 30_000 for before, after in itertools.pairwise(times[1:]))
    for stream in streams:
        await stream.close()
    await asyncio.gather(*following)
    await memory.close()


async def test_a_stream_in_pursuit_ends_it_as_soon_as_the_channel_is_read_so_far(memory):
    class Wall(SystemClock):
        def wall_ms(self) -> int:
            return 100_000

    await put(memory, row(1, "p_1"))
    dispatchers = Dispatchers(memory, 10**6, Metrics())
    streams = [opened(memory, dispatchers, f"p_{number}", pursuit=Pursuit(Wall(), lag_s=10)) for number in range(2)]
    reading_on = asyncio.create_task(anext(streams[1]))
    for ms in (89_900, 90_100):  # it is not the turn of the stream
        await asyncio.sleep(0.01)
        assert not reading_on.done()
        dispatchers.announce("p", 1, 1, compose(ms, 0))
    async with asyncio.timeout(20):
        pack = await reading_on
    assert pack.end_ts == compose(90_100, 0)
    assert len(pack.messages) == 1
    for stream in streams:
        await stream.close()


async def test_a_message_that_waits_for_another_channel_hides_no_time_before_it(memory):
    dispatchers = Dispatchers(memory, 10**6, Metrics())
    stream = DispatchedStream(memory, dispatchers, ["p_0", "q_0"])
    stream.as_consumer(["p", "q"])
    for channel in "pq":
        await memory.create_channel(channel, ChannelPolicy())
        await memory.append(channel, encode(row(1, f"{channel}_0")), row(1, "").ts)
    await bodies_until(stream, row(1, "").ts)
    stands, later = compose(20_000, 0), compose(25_000, 0)
    for channel in "pq":
        dispatchers.announce(channel, 1, 1, stands)
    following = asyncio.create_task(bodies_until(stream, later))
    await asyncio.sleep(0)
    assert stream.idle_time == stands
    waiting = row(2, "p_0", b"waits", later)
    await put(memory, waiting)
    async with asyncio.timeout(20):
        while not any(record.body for record in stream._channels["p"].buffer):  # noqa: ASYNC110 -- of its own tasks
            await asyncio.sleep(0)
    assert stream.idle_time == stands
    dispatchers.announce("q", 1, 1, later)
    assert await following == [b"waits"]
    await stream.close()


async def test_streams_that_come_and_go_leave_nothing(memory):
    dispatchers = Dispatchers(memory, 10**6, Metrics())
    stays = opened(memory, dispatchers, "p_0")
    await put(memory, row(1, "p_0"))
    assert await bodies_until(stays, row(1, "").ts) == [b""]
    for number in range(1, 200):
        stream = opened(memory, dispatchers, f"p_{number}")
        await bodies_until(stream, row(1, "").ts)
        await stream.close()
    (scan,) = dispatchers.of("p").scans
    assert list(scan.members) == list(stays._targets)
    assert list(scan._by_vchannel) == ["p_0"]
    assert not dispatchers.of("p").eager
    await stays.close()
    assert not dispatchers.of("p").scans
    assert dispatchers.budget.used == 0


async def test_what_a_stream_gives_up_is_handed_out_and_read_no_more(memory):
    dispatchers = Dispatchers(memory, 10**6, Metrics())
    await memory.create_channel("idle", ChannelPolicy())
    stream = DispatchedStream(memory, dispatchers, ["p_1v0", "p_1v1", "idle_1v2"])
    stream.as_consumer(["p", "idle"])
    await put(memory, *(row(cseq, f"p_1v{cseq % 2}", b"%d" % cseq) for cseq in range(1, 5)))
    waiting = asyncio.create_task(bodies_until(stream, row(4, "").ts))
    async with asyncio.timeout(20):
        while stream.buffered_bytes < 4 * RECORD_OVERHEAD_BYTES:  # noqa: ASYNC110 -- of the stream's own tasks
            await asyncio.sleep(0)
    stream.give_up("idle_1v2")
    assert await waiting == [b"1", b"2", b"3", b"4"], "its time holds nothing back any more"
    assert not dispatchers.of("idle").scans
    stream.give_up("p_1v0")
    await put(memory, *(row(cseq, f"p_1v{cseq % 2}", b"%d" % cseq) for cseq in range(5, 9)))
    assert await bodies_until(stream, row(8, "").ts) == [b"5", b"7"]
    await stream.close()
    assert dispatchers.budget.used == 0


async def test_how_far_a_stream_is_can_be_asked_while_another_thread_moves_its_buffer(memory):
    stream = DispatchedStream(memory, Dispatchers(memory, 10**6, Metrics()), ["p_1v0"])
    stream.as_consumer(["p"])
    [target] = stream._targets

    class Moving:
        ts = 8

        @property
        def type(self) -> RecordType:
            target.buffer.append(self)  # as the loop's thread may, whenever it runs
            return RecordType.TIME_TICK

    target.buffer.append(Moving())
    assert target.idle_time == 7
    target.buffer.clear()
    assert target.idle_time == 0, "nothing of it was read"


async def test_only_who_needs_what_retention_removed_is_told(memory):
    dispatchers = Dispatchers(memory, 10**6, Metrics())
    records = [row(cseq, "p_1", b"%d" % cseq) for cseq in range(1, 11)]
    ids = await put(memory, *records)
    early, late = opened(memory, dispatchers, "p_1"), opened(memory, dispatchers, "p_1")
    early.seek([Position("p", ids[1], 1, 2, records[1].ts, "memory")])
    late.seek([Position("p", ids[7], 1, 8, records[7].ts, "memory")])
    await early.place()
    memory.log.channels["p"].remove_before(ids[5])
    failing, going = asyncio.create_task(anext(early)), asyncio.create_task(bodies_until(late, records[-1].ts))
    with pytest.raises(PositionLost):
        await failing
    assert await going == [b"9", b"10"]
    beyond = opened(memory, dispatchers, "p_1")
    beyond.seek([Position("p", (99).to_bytes(8), 1, 99, records[7].ts, "memory")])
    with pytest.raises(PositionLost):
        await anext(beyond)
    for stream in (early, late, beyond):
        await stream.close()


async def test_a_late_record_is_late_for_its_stream_alone(memory):
    dispatchers, late = Dispatchers(memory, 10**6, Metrics()), []
    strict, lax = (
        opened(memory, dispatchers, "p_1"),
        opened(memory, dispatchers, "p_1", on_late=lambda *of: late.append(of)),
    )
    other = opened(memory, dispatchers, "p_2")
    await put(memory, row(1, "p_2", b"other"), row(2, "p_1", ts=compose(999, 0)), row(3, "p_1", b"in time"))
    with pytest.raises(OrderViolated):
        await bodies_until(strict, row(3, "").ts)
    assert await bodies_until(lax, row(3, "").ts) == [b"in time"]
    assert await bodies_until(other, row(1, "").ts) == [b"other"]
    assert lax.late == len(late) == 1
    for stream in (strict, lax, other):
        await stream.close()


async def test_a_role_that_ends_leaves_its_dead_letters_and_grants_to_the_next(memory):
    class Ending(Catalog):
        async def catch_up(self) -> None:
            await gone.wait()
            raise Closed("the catalog was closed")

    gone = asyncio.Event()
    owner = Owner("p", random.Random(1), ["p_1"])
    dispatchers, bad = Dispatchers(memory, 10**6, Metrics()), []
    first = opened(memory, dispatchers, "p_1", grants=Ending({"p": owner}), on_bad=lambda *_: bad.append("first"))
    next_one = opened(memory, dispatchers, "p_1", grants=Catalog({"p": owner}), on_bad=lambda *_: bad.append("next"))
    tasks = [asyncio.create_task(bodies_until(stream, row(1, "").ts)) for stream in (first, next_one)]
    owner.term = 1
    await put(memory, row(1, "p_1", b"granted"))
    await memory.append("p", b"not a record")
    for _ in range(20):
        await asyncio.sleep(0)
    tasks[0].cancel()
    await first.close()
    gone.set()
    assert await tasks[1] == [b"granted"]
    await next_one.close()
    assert bad == ["next"]


async def test_streams_over_each_log_get_what_readers_of_their_own_would(backend):
    """Joins at the first entry, in the middle and at the end, one of them from a saved position."""
    wal = Observed(await backend.wal())
    await wal.create_channel("p", ChannelPolicy())
    dispatchers = Dispatchers(wal, 10**6, Metrics())
    records = [row(cseq, f"p_{cseq % 3}", b"%d" % cseq) for cseq in range(1, 31)]
    await put(wal, *records[:10])
    first = opened(wal, dispatchers, "p_1")
    found = await bodies_until(first, records[9].ts)
    saved = Position.from_bytes((await saved_after(first, wal, records)).to_bytes())
    middle = opened(wal, dispatchers, "p_0", "p_1", start=FromTime(records[4].ts))
    again = opened(wal, dispatchers, "p_1")
    await first.close()
    again.seek([saved])
    await put(wal, *records[20:])
    rest = await bodies_until(again, records[29].ts)
    assert found == [b"1", b"4", b"7", b"10"]
    assert [b"13", b"16", b"19", *rest] == [b"%d" % cseq for cseq in range(13, 31, 3)]
    assert await bodies_until(middle, records[29].ts) == [b"%d" % cseq for cseq in range(6, 31) if cseq % 3 < 2]
    for stream in (middle, again):
        await stream.close()
    await wal.close()


async def saved_after(stream: DispatchedStream, wal: Wal, records: list[Record]) -> Position:
    """Where `stream` stands after the records from the eleventh to the twentieth."""
    await put(wal, *records[10:20])
    stream.wait_for(records[19].ts)
    while stream.end_ts < records[19].ts:
        pack = await anext(stream)
    return pack.end_positions["p"]
