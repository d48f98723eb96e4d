"""The merged stream against a model that knows the truth: each message once, in its interval."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field, replace

import pytest

from tests.backends import Backend, Observed, fill_segment
from tidewal.runtime.clock import MAX_TIMESTAMP
from tidewal.runtime.errors import (
    Closed,
    InvalidRequest,
    MemoryLimitExceeded,
    OrderViolated,
    PositionLost,
    PositionMismatch,
)
from tidewal.runtime.log.record import BatchPart, Record, RecordType, encode
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, FromTime, Wal
from tidewal.runtime.streams.channel_reader import Granted
from tidewal.runtime.streams.channel_time import ANNOUNCED_MAX
from tidewal.runtime.streams.messages import MsgPack, Position
from tidewal.runtime.streams.stream_base import CHANNEL_BUFFER_BYTES_MIN
from tidewal.runtime.streams.tt_stream import TtMsgStream
from tidewal.runtime.testing.memory import MemoryWal

ROUNDS = {"memory": 12}  # the other backends have 2

Key = tuple[int, str, bytes]


@dataclass
class Step:
    """One entry of a channel's log, and the truth about it."""

    payload: bytes
    counts: list[Key]  # the messages that count once it was read
    time: int  # the time of the channel by then
    at: tuple[int, int]  # how far its owner has come


@dataclass
class Script:
    """Writes one channel's log: what owners, a superseded owner and a faulty network would leave there."""

    name: str
    rng: random.Random
    ordered: bool
    steps: list[Step] = field(default_factory=list)
    now: int = 0
    known_time: int = 0
    term: int = 0
    cseq: int = 0
    serial: int = 0

    def write(self) -> list[Step]:
        self.fence()
        acts = [
            self.row,
            self.row,
            self.batch,
            self.tick,
            self.duplicate,
            self.junk,
            self.fence,
            self.zombie,
            self.half,
        ]
        for _ in range(60):
            self.rng.choice(acts)()
        self.tick(self.now + 50)
        return self.steps

    def add(self, type: RecordType, ts: int, **fields: object) -> Record:
        self.cseq += 1
        self.serial += 1
        body = f"{self.name}{self.serial}".encode()
        record = Record(type, ts=ts, term=self.term, cseq=self.cseq, body=body, **fields)
        return self.put(record)

    def put(self, record: Record, counts: list[Record] | None = None) -> Record:
        keys = [(each.ts, self.name, bytes(each.body)) for each in counts or []]
        self.steps.append(Step(encode(record), keys, self.known_time, (self.term, self.cseq)))
        return record

    def stamp(self) -> int:
        if self.ordered:
            self.now += self.rng.randint(1, 5)
            self.known_time = self.now
            return self.now
        ts = self.known_time + self.rng.randint(1, 20)
        self.now = max(self.now, ts)
        return ts

    def row(self) -> None:
        record = self.add(RecordType.ROWS, self.stamp())
        self.steps[-1] = Step(
            encode(record), [(record.ts, self.name, bytes(record.body))], self.known_time, self.steps[-1].at
        )

    def batch(self) -> None:
        known_time = self.known_time
        ts, of = self.stamp(), self.rng.randint(2, 3)
        after, self.known_time = self.known_time, known_time
        records = [self.add(RecordType.ROWS, ts, part=BatchPart(ts, number, of)) for number in range(of)]
        self.known_time = after
        keys = [(record.ts, self.name, bytes(record.body)) for record in records]
        self.steps[-1] = Step(encode(records[-1]), keys, self.known_time, self.steps[-1].at)

    def half(self) -> None:
        known_time = self.known_time
        ts = self.stamp()
        self.known_time = known_time
        for number in range(2):
            self.add(RecordType.ROWS, ts, part=BatchPart(ts, number, 3))
        self.tick()

    def tick(self, time: int = 0) -> None:
        time = max(time, self.known_time + self.rng.randint(0, 15))
        self.known_time, self.now = time, max(self.now, time)
        self.add(RecordType.TIME_TICK, time)

    def duplicate(self) -> None:
        step = self.rng.choice(self.steps)
        self.steps.append(Step(step.payload, [], self.known_time, (self.term, self.cseq)))

    def junk(self) -> None:
        self.steps.append(Step(self.rng.randbytes(20), [], self.known_time, (self.term, self.cseq)))

    def fence(self) -> None:
        self.term, self.cseq = self.term + 1, 0
        self.now += 1
        self.known_time = self.now
        self.add(RecordType.FENCE, self.now)

    def zombie(self) -> None:
        if self.term > 1:
            self.put(
                Record(RecordType.ROWS, ts=self.now + 1, term=self.term - 1, cseq=900 + self.serial, body=b"zombie")
            )


def keys_of(packs: list[MsgPack], names: dict[bytes, str]) -> list[Key]:
    return [(m.ts, names[bytes(m.body)], bytes(m.body)) for pack in packs for m in pack.messages]


def check_packs(packs: list[MsgPack]) -> None:
    for pack in packs:
        assert pack.begin_ts < pack.end_ts
        assert all(pack.begin_ts < message.ts <= pack.end_ts for message in pack.messages)
        for name, position in pack.end_positions.items():
            assert (position.channel, position.timestamp, position.group) == (name, pack.end_ts, "g")
    for before, after in itertools.pairwise(packs):
        assert after.begin_ts == before.end_ts
        assert after.start_positions == before.end_positions


async def turns() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


class Follower:
    """A stream and the packs it has given."""

    def __init__(self, wal: Observed, **options: object) -> None:
        self.wal = wal
        self.stream = TtMsgStream(wal, group="g", **options)
        self.packs: list[MsgPack] = []
        self.task: asyncio.Task[None] | None = None

    async def settle(self) -> None:
        """Wait until the stream has read all entries, and has given their packs."""
        await self.wal.settled(self.stream.times)

    @property
    def times(self) -> list[int]:
        """Of the messages in the packs."""
        return [message.ts for pack in self.packs for message in pack.messages]

    def start(self) -> Follower:
        self.task = asyncio.create_task(self._run())
        return self

    async def _run(self) -> None:
        async for pack in self.stream:
            self.packs.append(pack)

    async def stop(self) -> list[MsgPack]:
        await self.stream.close()
        assert self.task is not None
        await self.task
        return self.packs


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [True, False])
async def test_each_message_once_in_its_interval_over_closes_and_seeks(backend, seed, ordered):
    for round in range(ROUNDS.get(backend.name, 2)):
        await check_round(backend, random.Random(seed + round), ordered, f"{round}")


async def check_round(backend: Backend, rng: random.Random, ordered: bool, prefix: str) -> None:
    scripts = {
        name: Script(name, rng, ordered).write() for name in (f"{prefix}{c}" for c in "abc"[: rng.randint(1, 3)])
    }
    names = {key[2]: name for name, steps in scripts.items() for step in steps for key in step.counts}
    wal = Observed(await backend.wal())
    for name in scripts:
        await wal.create_channel(name, ChannelPolicy())
    follower = Follower(wal, ordered=ordered)
    follower.stream.as_consumer([*scripts, *scripts])
    follower.start()
    at = dict.fromkeys(scripts, 0)
    known_time = dict.fromkeys(scripts, 0)
    packs: list[MsgPack] = []
    while any(at[name] < len(scripts[name]) for name in scripts):
        name = rng.choice([name for name in scripts if at[name] < len(scripts[name])])
        steps = scripts[name][at[name] : at[name] + rng.randint(1, 5)]
        at[name] += len(steps)
        beats_first = rng.random() < 0.5 and not steps[-1].payload.startswith(b"\x00")
        if beats_first:  # a heartbeat may overtake the records it speaks of
            follower.stream.announce(name, *steps[-1].at, steps[-1].time)
        await wal.append_many([Append(name, step.payload) for step in steps])
        known_time[name] = steps[-1].time
        await follower.settle()
        assert all(pack.end_ts <= min(known_time.values()) for pack in follower.packs)
        if follower.packs and rng.random() < 0.3:
            packs += await follower.stop()
            if rng.random() < 0.2:
                await wal.reopen(backend)
            follower = Follower(wal, ordered=ordered)
            saved = [Position.from_bytes(p.to_bytes()) for p in packs[-1].end_positions.values()]
            follower.stream.seek(saved)
            follower.start()
    await follower.settle()
    packs += await follower.stop()
    check_packs(packs)
    expected = sorted((key for steps in scripts.values() for step in steps for key in step.counts), key=lambda k: k[:2])
    end = min(known_time.values())
    assert packs[-1].end_ts == end
    assert keys_of(packs, names) == [key for key in expected if key[0] <= end]
    for pack in rng.sample(packs[1:], min(8, len(packs) - 1)):  # and exactly from any pack onward
        again = Follower(wal, ordered=ordered)
        again.stream.seek(pack.start_positions.values())
        again.start()
        await again.settle()
        onward = await again.stop()
        assert keys_of(onward, names) == [key for key in expected if pack.begin_ts < key[0] <= end]
    await wal.close()


# ---- one behaviour at a time -----------------------------------------------------------------------------------------


@pytest.fixture
async def wal(backend):
    """Each log in turn."""
    log = Observed(await backend.wal())
    for name in ("c1", "c2"):
        await log.create_channel(name, ChannelPolicy())
    return log


@pytest.fixture
async def memory():
    """For what is about the stream's own memory, tasks and checks."""
    log = MemoryWal()
    for name in ("c1", "c2"):
        await log.create_channel(name, ChannelPolicy())
    yield log
    await log.close()


def rows(ts: int, cseq: int, body: bytes = b"", vchannel: str = "", term: int = 1) -> Record:
    return Record(RecordType.ROWS, ts=ts, term=term, cseq=cseq, body=body, vchannel=vchannel)


def tick(ts: int, cseq: int) -> Record:
    return Record(RecordType.TIME_TICK, ts=ts, term=1, cseq=cseq)


async def put(wal: Wal | Observed, channel: str, *records: Record) -> list[bytes]:
    return await wal.append_many([Append(channel, encode(record), record.ts) for record in records])


def following(wal: Observed, *channels: str, start: From | FromTime = From.EARLIEST, **options: object) -> Follower:
    follower = Follower(wal, **options)
    follower.stream.as_consumer(channels, start)
    return follower.start()


async def test_a_lagging_channel_holds_the_stream_back_and_is_named(wal):
    follower = following(wal, "c1", "c2")
    await put(wal, "c1", tick(10, 1), tick(20, 2), tick(30, 3))
    await put(wal, "c2", tick(10, 1))
    await follower.settle()
    assert [pack.end_ts for pack in follower.packs] == [10]
    assert min(follower.stream.times, key=follower.stream.times.__getitem__) == "c2"
    await put(wal, "c2", tick(30, 2))
    await follower.settle()
    assert [(pack.end_ts, len(pack)) for pack in follower.packs] == [(10, 0), (30, 0)]
    await follower.stop()


async def test_a_heartbeat_moves_an_idle_channel_once_its_records_are_read(wal):
    follower = following(wal, "c1")
    follower.stream.announce("c1", 1, 2, 50)
    follower.stream.announce("unknown", 1, 1, 99)
    await put(wal, "c1", rows(5, 1))
    await follower.settle()
    assert follower.packs[-1].end_ts == 5
    await put(wal, "c1", rows(7, 2))
    await follower.settle()
    assert follower.packs[-1].end_ts == 50
    for time in range(60, 60 + 500):  # many heartbeats for a record that is not there yet do not accumulate
        follower.stream.announce("c1", 1, 3, time)
    for cseq in range(4, 500):
        follower.stream.announce("c1", 1, cseq, 600 + cseq)
    assert len(follower.stream._channels["c1"].announced) <= ANNOUNCED_MAX
    await put(wal, "c1", rows(600, 3))
    await follower.settle()
    assert follower.packs[-1].end_ts == 600
    await put(wal, "c1", *(rows(597 + cseq, cseq) for cseq in range(4, 500)))
    await follower.settle()
    assert follower.packs[-1].end_ts == 1099
    await follower.stop()


class SlowCatalog:
    """Grants times up to 20, and all when it has been read to its end, which waits until it may."""

    def __init__(self) -> None:
        self._limit = 20
        self.asked, self.may = asyncio.Event(), asyncio.Event()

    def granted(self, pchannel: str) -> Granted:
        return Granted(1, self._limit)

    async def catch_up(self) -> None:
        self.asked.set()
        await self.may.wait()
        self._limit = MAX_TIMESTAMP


async def test_a_heartbeat_while_grants_are_read_does_not_overtake_what_was_read_before(memory):
    """The record at 30 needs a grant that the reader does not know yet; the one at 10 was read with it."""
    catalog = SlowCatalog()
    follower = following(memory, "c1", grants=catalog)
    await put(memory, "c1", rows(10, 1), rows(30, 2))
    await catalog.asked.wait()
    follower.stream.announce("c1", 1, 1, 15)
    await turns()
    assert follower.times == [10]
    assert follower.packs[-1].end_ts == 15
    assert follower.packs[-1].end_positions["c1"].cseq == 1
    catalog.may.set()
    await turns()
    assert follower.times == [10, 30]
    await follower.stop()


@pytest.mark.parametrize("start", [From.LATEST, FromTime(100)])
async def test_heartbeats_of_an_idle_channel_reach_a_reader_that_starts_at_its_end(wal, start):
    await put(wal, "c1", rows(5, 1), rows(6, 2))
    follower = following(wal, "c1", start=start)
    await follower.settle()
    follower.stream.announce("c1", 1, 2, 200)
    await follower.settle()
    assert (follower.packs[-1].end_ts, sum(map(len, follower.packs))) == (200, 0)
    saved = follower.packs[-1].end_positions.values()
    await follower.stop()
    again = TtMsgStream(wal)
    again.seek(saved)
    again.announce("c1", 1, 2, 250)
    saved = (await anext(again)).end_positions.values()
    await again.close()
    await put(wal, "c1", rows(300, 3))
    again = TtMsgStream(wal)
    again.seek(saved)
    assert [message.ts for message in (await anext(again)).messages] == [300]
    await again.close()


async def test_from_a_time_on_only_what_lies_behind_it_is_delivered(wal):
    await put(wal, "c1", *(rows(ts, ts) for ts in range(1, 11)))
    follower = following(wal, "c1", start=FromTime(5))
    await follower.settle()
    packs = await follower.stop()
    assert packs[0].begin_ts == 5
    assert [message.ts for pack in packs for message in pack.messages] == [6, 7, 8, 9, 10]


async def test_a_record_appended_while_a_start_at_a_time_is_looked_up_is_delivered(memory, monkeypatch):
    """Nothing at or behind the time is there yet when the start is looked up: what comes next is no history."""
    await put(memory, "c1", rows(5, 1))
    id_at = memory.id_at

    async def id_at_and_append(channel: str, timestamp: int) -> bytes | None:
        found = await id_at(channel, timestamp)
        if found is None:
            await put(memory, channel, rows(120, 2))
        return found

    monkeypatch.setattr(memory, "id_at", id_at_and_append)
    follower = following(memory, "c1", start=FromTime(100))
    await turns()
    assert follower.times == [120]
    await follower.stop()


async def test_what_retention_removes_behind_a_fixed_start_is_reported(memory):
    ids = await put(memory, "c1", *(rows(ts, ts) for ts in range(1, 11)))
    stream = TtMsgStream(memory)
    stream.as_consumer(["c1"], FromTime(5))
    await stream.place()
    await memory.truncate("c1", ids[7])
    with pytest.raises(PositionLost):
        await anext(stream)
    await stream.close()


async def test_positions_before_anything_was_taken_can_be_sought(wal):
    await put(wal, "c1", rows(50, 7), rows(60, 8))
    await put(wal, "c2", rows(20, 3), rows(30, 4))
    follower = following(wal, "c1", "c2", start=FromTime(10))
    await follower.settle()
    packs = await follower.stop()
    assert packs[-1].end_positions["c1"].message_id
    again = Follower(wal)
    again.stream.seek(packs[-1].end_positions.values())
    await put(wal, "c2", rows(70, 5))
    await again.start().settle()
    assert again.times == [50, 60]
    await again.stop()


async def test_with_include_current_the_message_at_the_position_comes_again(wal):
    await put(wal, "c1", *(rows(ts, ts) for ts in range(1, 5)))
    follower = following(wal, "c1")
    await follower.settle()
    last = (await follower.stop())[-1].end_positions.values()
    again = TtMsgStream(wal)
    again.seek(last, include_current=True)
    assert [message.ts for message in (await anext(again)).messages] == [4]
    await again.close()


async def test_a_vchannel_sees_its_own_messages_and_the_time_of_all(wal):
    await put(wal, "c1", rows(1, 1, vchannel="v0"), rows(2, 2, vchannel="v1"), rows(3, 3, vchannel="v1"))
    follower = following(wal, "c1", vchannels=["v0"])
    await follower.settle()
    packs = await follower.stop()
    assert [message.ts for pack in packs for message in pack.messages] == [1]
    assert packs[-1].end_ts == 3


async def test_a_late_record_is_never_put_into_a_later_pack(wal):
    handed: list[tuple[str, int]] = []
    follower = following(wal, "c1", ordered=False, on_late=lambda channel, record: handed.append((channel, record.ts)))
    await put(wal, "c1", tick(10, 1))
    await follower.settle()
    await put(wal, "c1", rows(7, 2), rows(12, 3), tick(20, 4))
    await follower.settle()
    packs = await follower.stop()
    check_packs(packs)
    assert [message.ts for pack in packs for message in pack.messages] == [12]
    assert (handed, follower.stream.late) == ([("c1", 7)], 1)


async def test_a_record_behind_a_later_one_is_late_in_an_ordered_channel(wal):
    handed: list[int] = []
    follower = following(wal, "c1", "c2", on_late=lambda _, record: handed.append(record.ts))
    await put(wal, "c1", rows(25, 1), rows(20, 2), rows(26, 3))
    await put(wal, "c2", tick(22, 1))
    await follower.settle()
    await put(wal, "c2", tick(30, 2))
    await follower.settle()
    packs = await follower.stop()
    check_packs(packs)
    assert handed == [20]


async def test_without_a_handler_a_late_record_fails_the_stream(wal):
    stream = TtMsgStream(wal, ordered=False)
    stream.as_consumer(["c1"])
    await put(wal, "c1", tick(10, 1))
    await anext(stream)
    await put(wal, "c1", rows(7, 2))
    with pytest.raises(OrderViolated):
        await anext(stream)
    await stream.close()


async def test_a_channel_that_is_ahead_is_not_read_beyond_its_buffer(memory):
    body = bytes(64 * 1024)
    count = 40 * CHANNEL_BUFFER_BYTES_MIN // len(body)
    follower = following(memory, "c1", "c2", buffer_bytes=2 * CHANNEL_BUFFER_BYTES_MIN)
    for number in range(1, count + 1):
        await put(memory, "c1", rows(number, number, body))
        await turns()
    # one batch of entries may still enter the full buffer, no more
    assert follower.stream.buffered_bytes <= CHANNEL_BUFFER_BYTES_MIN + 2 * len(body)
    assert follower.packs == []
    await put(memory, "c2", tick(count, 1))
    for _ in range(count):
        await turns()
    packs = await follower.stop()
    assert [message.ts for pack in packs for message in pack.messages] == list(range(1, count + 1))


@pytest.mark.slow
async def test_empty_records_are_bounded_too(memory):
    stream = TtMsgStream(memory, buffer_bytes=1)
    stream.as_consumer(["c1", "c2"])
    await put(memory, "c1", *(rows(number, number) for number in range(1, 5_000)))
    waiting = asyncio.ensure_future(anext(stream))
    for _ in range(50):
        await turns()
    assert stream.buffered_bytes < 2 * CHANNEL_BUFFER_BYTES_MIN
    await stream.close()
    with pytest.raises(StopAsyncIteration):
        await waiting


async def test_too_much_between_two_ticks_of_an_unordered_channel_is_an_error(memory):
    stream = TtMsgStream(memory, ordered=False, buffer_bytes=1)
    stream.as_consumer(["c1"])
    await put(memory, "c1", *(rows(number, number, bytes(100_000)) for number in range(1, 5)))
    with pytest.raises(MemoryLimitExceeded):
        await anext(stream)
    await stream.close()


async def test_wrong_starts_are_refused(memory):
    good = Position("c1", bytes(7) + b"\x01", 1, 1, 5, "memory")
    with pytest.raises(InvalidRequest, match="as_consumer"):
        TtMsgStream(memory).seek([Position("c1", b"", 0, 0, 0, "memory")])
    with pytest.raises(PositionMismatch):
        TtMsgStream(memory).seek([Position("c1", b"1", 1, 1, 5, "kafka")])
    with pytest.raises(InvalidRequest):
        TtMsgStream(memory).seek([good, good])
    with pytest.raises(InvalidRequest):
        TtMsgStream(memory).seek([])
    with pytest.raises(InvalidRequest):
        await anext(TtMsgStream(memory))
    stream = TtMsgStream(memory)
    stream.as_consumer(["c1"])
    with pytest.raises(InvalidRequest, match="not read"):
        stream.seek([replace(good, channel="c2")])
    stream.seek([good])
    with pytest.raises(InvalidRequest):
        stream.seek([good])
    with pytest.raises(InvalidRequest):
        stream.as_consumer(["c2"])


async def test_a_position_that_retention_removed_is_an_error(backend, wal):
    first = (await put(wal, "c1", rows(1, 1)))[0]
    await fill_segment(wal)  # so that it can be removed where whole segments are
    kept = await put(wal, "c1", *(rows(ts, ts) for ts in range(2, 5)))
    await backend.remove_before(wal, "c1", kept[0])
    again = TtMsgStream(wal)
    again.seek([Position("c1", first, 1, 1, 1, wal.name)])
    with pytest.raises(PositionLost) as caught:
        await anext(again)
    assert caught.value.first_available == kept[0]
    await again.close()


async def test_close_ends_the_iteration_and_the_end_of_the_log_is_an_error(memory):
    follower = following(memory, "c1")
    await turns()
    assert await follower.stop() == []
    await follower.stream.close()
    other = TtMsgStream(memory)
    other.as_consumer(["c1"])
    waiting = asyncio.ensure_future(anext(other))
    await turns()
    await memory.close()
    with pytest.raises(Closed):
        await waiting
    await other.close()
    assert len(asyncio.all_tasks()) == 1


# ---- going on from saved positions -----------------------------------------------------------------------------------


def free(ts: int, body: bytes = b"") -> Record:
    """A row of a channel without an owner."""
    return Record(RecordType.ROWS, ts=ts, body=body)


def free_tick(ts: int) -> Record:
    return Record(RecordType.TIME_TICK, ts=ts)


async def resumed(wal: Observed, pack: MsgPack, **options: object) -> Follower:
    follower = Follower(wal, **options)
    follower.stream.seek(Position.from_bytes(each.to_bytes()) for each in pack.end_positions.values())
    return follower.start()


async def test_a_channel_without_an_owner_is_resumed_though_its_first_record_is_held_back(wal):
    follower = following(wal, "c1", ordered=False)
    await put(wal, "c1", free(30), free(5), free_tick(10))
    await follower.settle()
    (pack,) = await follower.stop()
    assert [message.ts for message in pack.messages] == [5]
    follower = await resumed(wal, pack, ordered=False)
    await put(wal, "c1", free(20), free_tick(40))
    await follower.settle()
    assert follower.times == [20, 30]
    await follower.stop()


async def test_a_channel_that_was_empty_is_resumed_from_its_first_entry(wal):
    follower = following(wal, "c1", "c2", ordered=False)
    follower.stream.announce("c2", 0, 0, 10)
    await put(wal, "c1", free(5), free_tick(10))
    await follower.settle()
    (pack,) = await follower.stop()
    assert pack.end_positions["c2"].message_id == b""
    await put(wal, "c2", free(15), free_tick(20))
    await put(wal, "c1", free_tick(20))
    follower = await resumed(wal, pack, ordered=False)
    await follower.settle()
    assert follower.times == [15]
    await follower.stop()


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("handled", [True, False])
async def test_a_late_record_right_behind_a_saved_position_is_reported(wal, ordered, handled):
    late: list[int] = []
    options = {"ordered": ordered, "on_late": (lambda _, record: late.append(record.ts)) if handled else None}
    follower = following(wal, "c1", **options)
    records = (rows(5, 1), tick(10, 2), rows(7, 3), rows(15, 4), tick(20, 5))
    if not ordered:
        records = (free(5), free_tick(10), free(7), free(15), free_tick(20))
    await put(wal, "c1", *records[:2])
    await follower.settle()
    pack = (await follower.stop())[-1]
    assert pack.end_ts == 10
    await put(wal, "c1", *records[2:])
    follower = await resumed(wal, pack, **options)
    if handled:
        await follower.settle()
        assert (late, follower.times, follower.stream.late) == ([7], [15], 1)
        await follower.stop()
    else:
        with pytest.raises(OrderViolated):
            await follower.task
        await follower.stream.close()
