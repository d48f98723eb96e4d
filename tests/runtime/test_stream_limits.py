"""Streams on virtual time: a time that stands still, positions that retention has removed, and pursuit."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.runtime.clock import HybridClock, compose
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import PositionLost, WatermarkStalled
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.log.wal import Append, ChannelPolicy, Entry, From, Start
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.streams.channel_reader import Granted
from tidewal.runtime.streams.factory import Factory
from tidewal.runtime.streams.pursuit import Pursuit
from tidewal.runtime.streams.stream_base import CHANNEL_BUFFER_BYTES_MIN, ENTRIES_PER_TURN, reading
from tidewal.runtime.streams.tt_stream import STALLED_S, TtMsgStream
from tidewal.runtime.testing.clock import EPOCH_MS, VirtualClock, elapse, run_virtual
from tidewal.runtime.testing.memory import MemoryWal

LAG_MS = 10_000
CHANNELS = ["c1", "c2"]


async def log_with(*channels: str) -> MemoryWal:
    wal = MemoryWal()
    for channel in channels:
        await wal.create_channel(channel, ChannelPolicy())
    return wal


async def put(wal: MemoryWal, channel: str, *records: Record) -> list[bytes]:
    return await wal.append_many([Append(channel, encode(record), record.ts) for record in records])


def row(ts: int, body: bytes = b"", type: RecordType = RecordType.ROWS) -> Record:
    return Record(type, ts=ts, body=body)


def tick(ts: int) -> Record:
    return Record(RecordType.TIME_TICK, ts=ts)


# ---- a time that stands still ----------------------------------------------------------------------------------------


def test_a_channel_that_holds_the_stream_back_is_named_in_time_and_nothing_is_lost():
    clock = VirtualClock()

    async def main():
        wal = await log_with(*CHANNELS)
        stream = TtMsgStream(wal, stalled_after_s=STALLED_S)
        stream.as_consumer(CHANNELS)
        await put(wal, "c1", row(5), tick(10))
        await put(wal, "c2", tick(3))
        assert (await anext(stream)).end_ts == 3
        for _ in range(2):
            before = clock.monotonic()
            with pytest.raises(WatermarkStalled) as stalled:
                await anext(stream)
            assert clock.monotonic() - before == pytest.approx(STALLED_S)
            assert (stalled.value.channel, stalled.value.time) == ("c2", 3)
            await put(wal, "c1", tick(20))  # it goes on, and is not what the stream waits for
        waiting = asyncio.ensure_future(anext(stream))
        await elapse(STALLED_S - 1)
        await put(wal, "c2", tick(10))
        pack = await waiting
        assert (pack.end_ts, [message.ts for message in pack.messages]) == (10, [5])
        await stream.close()

    run_virtual(main(), clock)


def test_without_the_limit_a_stream_waits_for_a_silent_channel():
    async def main():
        wal = await log_with(*CHANNELS)
        stream = TtMsgStream(wal)
        stream.as_consumer(CHANNELS)
        await put(wal, "c1", tick(10))
        waiting = asyncio.ensure_future(anext(stream))
        await elapse(1000 * STALLED_S)
        assert not waiting.done()
        await put(wal, "c2", tick(10))
        assert (await waiting).end_ts == 10
        await stream.close()

    run_virtual(main())


# ---- positions that are gone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ticked", [True, False])
@pytest.mark.parametrize(("reset_to", "bodies"), [(None, None), (From.EARLIEST, b"5678"), (From.LATEST, b"8")])
async def test_where_a_stream_goes_on_that_retention_has_cut_off(ticked, reset_to, bodies):
    wal, metrics = await log_with("c1"), Metrics()
    factory = Factory(wal, HybridClock(), metrics=metrics)
    kind = factory.tt_stream if ticked else factory.stream
    first = kind()
    first.as_consumer(["c1"])
    await put(wal, "c1", row(1, b"1"))
    pack = await anext(first)
    await first.close()
    ids = await put(wal, "c1", *(row(n, str(n).encode()) for n in range(2, 8)))
    await wal.truncate("c1", ids[3])
    stream = kind(reset_to=reset_to)
    stream.seek(pack.end_positions.values())
    if bodies is None:
        with pytest.raises(PositionLost):
            await anext(stream)
        assert stream.counts["c1"].lost == metrics.value("wal_scan_reset_total") == 0
    else:
        found = b""
        waiting = asyncio.ensure_future(anext(stream))
        while stream.counts["c1"].records == 0:  # noqa: ASYNC110 -- what it starts with is read
            await asyncio.sleep(0)
        await put(wal, "c1", row(8, b"8"))
        while not found.endswith(b"8"):
            found += b"".join(bytes(message.body) for message in (await waiting).messages)
            waiting = asyncio.ensure_future(anext(stream))
        waiting.cancel()
        assert found == bodies
        assert stream.counts["c1"].lost == metrics.value("wal_scan_reset_total") == 1
    await stream.close()
    await wal.close()


class LostGrants:
    """A catalog that retention has overtaken: nothing is granted as far as it was read, and it cannot be read on."""

    def granted(self, pchannel: str) -> Granted:
        return Granted(0)

    async def catch_up(self) -> None:
        raise PositionLost("the catalog is gone", requested=b"", first_available=b"\0" * 8, channel="catalog")


@pytest.mark.parametrize("reset_to", [None, From.EARLIEST, From.LATEST])
async def test_a_catalog_that_retention_has_overtaken_is_not_taken_for_a_loss_in_the_channel(reset_to):
    wal, metrics = await log_with("c1"), Metrics()
    stream = Factory(wal, HybridClock(), metrics=metrics, grants=LostGrants()).tt_stream(reset_to=reset_to)
    stream.as_consumer(["c1"])
    await put(wal, "c1", Record(RecordType.ROWS, ts=1, term=1, cseq=1))
    with pytest.raises(PositionLost, match="the catalog is gone"):
        await asyncio.wait_for(anext(stream), 60)
    assert stream.counts["c1"].lost == metrics.value("wal_scan_reset_total") == 0
    await stream.close()
    await wal.close()


# ---- pursuit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("time_ms", "size", "waited_s", "goes_on"),
    [
        (0, 10, 0, True),
        (1, 10, 0, True),
        (EPOCH_MS, 10, 0, False),
        (EPOCH_MS - LAG_MS, 10, 0, False),
        (EPOCH_MS - LAG_MS - 1, 10, 0, True),
        (1, 2048, 0, False),
        (1, 10, 61, False),
    ],
)
def test_when_pursuit_goes_on(time_ms, size, waited_s, goes_on):
    assert Pursuit(VirtualClock(), buffer_bytes=1024).goes_on(compose(time_ms), size, waited_s) is goes_on


async def packs_of(wal, pursuit, scripts, chance, **options):
    """The packs of a stream beside which the scripts are written."""
    stream = TtMsgStream(wal, pursuit=pursuit, **options)
    stream.as_consumer(sorted(scripts))

    async def follow():
        return [pack async for pack in stream]

    following = asyncio.create_task(follow())
    at = dict.fromkeys(scripts, 0)
    while any(at[name] < len(script) for name, script in scripts.items()):
        name = chance.choice([name for name in scripts if at[name] < len(scripts[name])])
        step = chance.randint(1, 4)
        await put(wal, name, *scripts[name][at[name] : at[name] + step])
        at[name] += step
        if chance.random() < 0.3:
            await elapse(chance.random())
    await elapse(200)
    await stream.close()
    return await following


def script(chance: random.Random, name: str, end_ms: int) -> list[Record]:
    ms, records = EPOCH_MS - 60_000, []
    while ms < end_ms:
        ms += chance.randint(1, 2000)
        body = f"{name}{len(records)}".encode() + bytes(chance.choice([0, 100, 400]))
        records.append(chance.choice([tick(compose(ms)), row(compose(ms), body), row(compose(ms), body)]))
    return [*records, tick(compose(end_ms + 2000))]


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), size=st.integers(0, 20_000))
def test_pursuit_joins_packs_and_changes_nothing_in_them(seed, size):
    def run(pursued):
        async def main():
            chance = random.Random(seed)
            wal = await log_with(*CHANNELS)
            scripts = {name: script(chance, name, EPOCH_MS) for name in CHANNELS}
            pursuit = Pursuit(clock, buffer_bytes=size, buffer_time_s=5.0) if pursued else None
            return await packs_of(wal, pursuit, scripts, chance)

        clock = VirtualClock()
        return run_virtual(main(), clock)

    plain, joined = run(False), run(True)
    assert len(joined) <= len(plain)
    assert joined[-1].end_ts == plain[-1].end_ts
    assert {pack.end_ts for pack in joined} <= {pack.end_ts for pack in plain}
    delivered = [[(m.ts, bytes(m.body)) for pack in packs for m in pack.messages] for packs in (plain, joined)]
    assert delivered[0] == delivered[1]
    for before, after in itertools.pairwise(joined):
        assert (after.begin_ts, after.start_positions) == (before.end_ts, before.end_positions)
        assert all(after.begin_ts < message.ts <= after.end_ts for message in after.messages)


def joined_ends(records, **options):
    """Where the packs of a stream end that reads these records one by one, all at one time; and when it was done."""
    clock = VirtualClock()

    async def main():
        wal = await log_with("c1")
        stream = TtMsgStream(wal, pursuit=Pursuit(clock, buffer_bytes=options.pop("size", 2**30)), **options)
        stream.as_consumer(["c1"])
        waiting = asyncio.ensure_future(anext(stream))
        ends = []
        for record in records:
            await put(wal, "c1", record)
            for _ in range(20):
                await asyncio.sleep(0)
            if waiting.done():
                ends.append(waiting.result().end_ts)
                waiting = asyncio.ensure_future(anext(stream))
        begun = clock.monotonic()
        if ends[-1:] != [records[-1].ts]:
            ends.append((await waiting).end_ts)
        waited_s = clock.monotonic() - begun
        await stream.close()
        return ends, waited_s

    return run_virtual(main(), clock)


def test_a_pack_ends_where_the_stream_has_caught_up():
    ends, waited_s = joined_ends([tick(compose(EPOCH_MS - ms)) for ms in (90_000, 60_000, 30_000, 9_000, 8_000)])
    assert ends == [compose(EPOCH_MS - 9_000), compose(EPOCH_MS - 8_000)]
    assert waited_s == 0


def test_the_end_of_a_collection_is_handed_out_at_once():
    drop = row(compose(50), type=RecordType.DROP_COLLECTION)
    ends, _ = joined_ends([row(compose(10)), tick(compose(20)), drop, row(compose(60)), tick(compose(100))])
    assert ends == [compose(50), compose(100)]


def test_a_pack_waits_no_longer_than_it_may_and_a_full_buffer_ends_it():
    ends, waited_s = joined_ends([row(compose(10)), row(compose(20))])
    assert ends == [compose(20)]
    assert waited_s == pytest.approx(60.0)
    body = bytes(CHANNEL_BUFFER_BYTES_MIN)
    ends, waited_s = joined_ends([row(compose(10)), row(compose(20), body)], buffer_bytes=1)
    assert (ends, waited_s) == ([compose(20)], 0)


def test_the_settings_turn_pursuit_on():
    clock = HybridClock(VirtualClock())
    mq = {"enablePursuitMode": True, "pursuitLag": 3, "pursuitBufferSize": 4, "pursuitBufferTime": 5}
    pursued = Factory(MemoryWal(), clock, Settings.model_validate({"mq": mq})).tt_stream()
    assert pursued._pursuit == Pursuit(clock.clock, 3.0, 4, 5.0)
    assert Factory(MemoryWal(), clock).tt_stream()._pursuit is None


# ---- turns -----------------------------------------------------------------------------------------------------------


async def test_other_tasks_run_while_a_channel_is_caught_up_with():
    entries = [Entry(number.to_bytes(8, "big"), b"", 0) for number in range(2 * ENTRIES_PER_TURN + 1)]
    turns: list[str] = []

    class OneBatch(MemoryWal):
        async def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
            yield entries

    async def other():
        while True:
            turns.append("other")
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    read: list[Entry] = []
    async with reading(OneBatch(), "a", From.EARLIEST) as batches:
        async for batch in batches:
            turns.append("read")
            read += batch
    beside.cancel()
    assert read == entries
    assert [kind for kind, _ in itertools.groupby(turns)] == ["read", "other", "read", "other", "read", "other"]
