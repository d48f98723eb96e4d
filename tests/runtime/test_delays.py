"""Delayed messages of a named producer: never early, in order, once, whatever becomes of who releases them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.named_producers import CHANNELS, CutOffWal, clock_of, kill
from tidewal.runtime.clock import HybridClock, add_ms, physical_ms, to_datetime
from tidewal.runtime.delays import releaser
from tidewal.runtime.delays.delayed import DelayedId, cancellation, delayed_record
from tidewal.runtime.errors import InvalidRequest, TidewalError
from tidewal.runtime.log.record import Record, RecordType, decode, stamp
from tidewal.runtime.log.wal import Append, ChannelPolicy, Entry, From, OnAppended, Start
from tidewal.runtime.ownership import channel_owner, producer_delays
from tidewal.runtime.ownership.producer import Producer, open_producer
from tidewal.runtime.streams.channel_reader import ChannelReader
from tidewal.runtime.streams.open_stream import open_stream
from tidewal.runtime.testing.clock import VirtualClock, elapse, run_virtual
from tidewal.runtime.testing.faults import Fault, FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal


async def delivered(wal: MemoryWal, count: int, channels: list[str] = CHANNELS) -> list[Record]:
    """The first `count` messages of the channels, in the order of time."""
    stream = open_stream(wal, channels)
    found: list[Record] = []
    try:
        async for pack in stream:
            found += [record for record in pack.messages if record.type is RecordType.ROWS]
            if len(found) >= count:
                return found
    finally:
        await stream.close()
    raise AssertionError("the log ended")


async def first(batches: AsyncIterator[Sequence[Entry]]) -> AsyncIterator[Sequence[Entry]]:
    """The first batch alone."""
    yield await anext(batches)


def test_messages_come_when_they_are_due_and_in_that_order():
    clock = VirtualClock()

    async def main() -> None:
        log = MemoryLog()
        wal = MemoryWal(log)
        async with open_producer(wal, "shop", CHANNELS, clock=clock_of(clock), delays=True) as producer:
            begun_ms = clock.wall_ms()
            for after_s in (300, 5, 60, 0.2, 5):
                await producer.schedule(
                    [("orders-0", b"%g" % after_s), ("orders-1", b"%g" % after_s)], deliver_after_s=after_s
                )
            found = await delivered(wal, 10)
            for name in CHANNELS:
                assert [bytes(each.body) for each in found[0:2]] == [b"0.2", b"0.2"], name
            assert [float(bytes(each.body)) for each in found] == sorted(float(bytes(each.body)) for each in found)
            for each in found:
                late_ms = physical_ms(each.ts) - begun_ms - 1000 * float(bytes(each.body))
                assert 0 <= late_ms <= 100, late_ms

    run_virtual(main(), clock)


def test_what_was_cancelled_in_time_does_not_come():
    clock = VirtualClock()

    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", CHANNELS, clock=clock_of(clock), delays=True) as producer:
            ids = await producer.schedule([("orders-0", b"%d" % each) for each in range(4)], deliver_after_s=5)
            assert await producer.cancel(ids[1])
            assert await producer.cancel(ids[1]), "the same answer each time"
            assert [bytes(each.body) for each in await delivered(wal, 3)] == [b"0", b"2", b"3"]
            assert not await producer.cancel(ids[2]), "it is there already"
            with pytest.raises(InvalidRequest, match="no id of a delayed message"):
                await producer.cancel(b"nothing")

    run_virtual(main(), clock)


def test_a_repeated_batch_has_the_ids_that_it_had():
    clock = VirtualClock()

    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        at = to_datetime(HybridClock(clock).now()) + timedelta(seconds=3)
        async with open_producer(wal, "shop", CHANNELS, clock=clock_of(clock), delays=True) as producer:
            first = await producer.schedule([("orders-0", b"one")], deliver_at=at, sequence=1)
            await asyncio.sleep(1)
            assert await producer.schedule([("orders-0", b"one")], deliver_at=at, sequence=1) == first
            with pytest.raises(InvalidRequest, match="is another one"):
                await producer.schedule([("orders-0", b"one")], deliver_at=at + timedelta(seconds=1), sequence=1)
            await producer.schedule([("orders-0", b"two")], deliver_at=at)
            found = await delivered(wal, 2)
        assert [bytes(each.body) for each in found] == [b"one", b"two"]
        assert found[0].tags["tidewal.offset"] == first[0]
        assert found[0].tags["tidewal.source"] == "producer-shop.delays"

    run_virtual(main(), clock)


def test_wrong_times_and_records_are_refused():
    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", CHANNELS) as producer:
            with pytest.raises(InvalidRequest, match="delays=True"):
                await producer.schedule([("orders-0", b"one")], deliver_after_s=1)
        async with open_producer(wal, "shop", CHANNELS, delays=True) as producer:
            now = to_datetime(HybridClock().now())
            tick = Record(RecordType.TIME_TICK)
            for records, times, message in (
                ([("orders-0", b"one")], {}, "either deliver_at or deliver_after_s"),
                ([("orders-0", b"one")], {"deliver_after_s": 1.0, "deliver_at": now}, "either deliver_at"),
                ([("orders-0", b"one")], {"deliver_at": now + timedelta(days=370)}, "366 days"),
                ([("orders-0", b"one")], {"deliver_at": now.replace(tzinfo=None)}, "no time zone"),
                ([("orders-0", b"one")], {"deliver_after_s": 1.0, "sequence": 1}, "needs deliver_at"),
                ([("orders-0", tick)], {"deliver_after_s": 1.0}, "cannot be delayed"),
                ([("invoices", b"one")], {"deliver_after_s": 1.0}, "not of this producer"),
            ):
                with pytest.raises(InvalidRequest, match=message):
                    await producer.schedule(records, **times)

    run_virtual(main())


def test_what_the_log_has_before_the_due_time_counts_however_late_it_is_read_or_answered():
    """A cancellation is there once it has a timestamp below the due time."""

    class LateWal(MemoryWal):
        async def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
            async for entries in super().read(channel, start):
                await asyncio.sleep(0.3 if channel.endswith(".delays") else 0.0)
                yield entries

    async def main(wal: MemoryWal) -> None:
        async with open_producer(wal, "shop", CHANNELS, clock=clock_of(clock), delays=True) as producer:
            for number in range(20):
                due_s = clock.monotonic() + 1
                [id] = await producer.schedule([("orders-0", b"%d" % number)], deliver_after_s=1)
                await asyncio.sleep(due_s - 0.02 - clock.monotonic())
                assert await producer.cancel(id)
            await producer.schedule([("orders-0", b"last")], deliver_after_s=1)
            assert [bytes(each.body) for each in await delivered(wal, 1)] == [b"last"]

    for wal in (
        LateWal(MemoryLog()),
        MemoryWal(MemoryLog(), FaultPlan(3, Rates(delay=0.5, delay_s_max=0.2), channels=".delays")),
    ):
        clock = VirtualClock()
        run_virtual(main(wal), clock)


def test_a_log_ahead_of_the_wall_clock_sends_nothing_early():
    clock = VirtualClock()

    async def main() -> None:
        ahead = clock_of(clock)
        ahead.observe(add_ms(ahead.now(), 8_000))
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", CHANNELS, clock=ahead, delays=True) as producer:
            begun_s = clock.monotonic()
            await producer.schedule([("orders-0", b"one")], deliver_after_s=2)
            await producer.schedule([("orders-0", b"two")], deliver_after_s=20)
            for after_s in (2, 20):
                await delivered(wal, 1 if after_s == 2 else 2)
                assert clock.monotonic() - begun_s >= after_s

    run_virtual(main(), clock)


def test_what_is_due_while_nobody_is_there_comes_when_the_producer_is_back():
    """Also where the name is opened without `delays`: they are acknowledged."""
    clock = VirtualClock()

    async def main() -> None:
        log = MemoryLog()
        async with open_producer(MemoryWal(log), "shop", CHANNELS, clock=clock_of(clock), delays=True) as producer:
            await producer.schedule([("orders-1", b"second")], deliver_after_s=20)
            await producer.schedule([("orders-1", b"first")], deliver_after_s=10)
        await asyncio.sleep(60)
        async with open_producer(MemoryWal(log), "shop", [], clock=clock_of(clock)) as producer:
            assert producer.channels == ("orders-0", "orders-1")
            found = await delivered(MemoryWal(log), 2)
        assert [bytes(each.body) for each in found] == [b"first", b"second"]

    run_virtual(main(), clock)


def test_what_its_channel_does_not_take_is_kept_as_a_dead_letter():
    clock = VirtualClock()

    async def main() -> None:
        log = MemoryLog()
        wal = MemoryWal(log)
        async with open_producer(wal, "shop", CHANNELS, clock=clock_of(clock), delays=True) as producer:
            await producer.schedule([("orders-0", b"gone"), ("orders-1", b"stays")], deliver_after_s=20)
        await wal.drop_channel("orders-0")
        async with open_producer(wal, "shop", ["orders-1"], clock=clock_of(clock), delays=True):
            assert [bytes(each.body) for each in await delivered(wal, 1, ["orders-1"])] == [b"stays"]
            [[letter]] = [entries async for entries in first(wal.read("producer-shop.dead_letters", From.EARLIEST))]
        record = decode(letter.payload)
        assert (record.tags["channel"], record.tags["reason"]) == ("orders-0", "due")
        assert bytes(decode(record.body).body) == b"gone"

    run_virtual(main(), clock)


def test_what_others_write_into_the_delay_channel_is_passed_over(caplog: pytest.LogCaptureFixture):
    clock = VirtualClock()

    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", CHANNELS, clock=clock_of(clock), delays=True) as producer:
            [id] = await producer.schedule([("orders-0", b"one")], deliver_after_s=5)
            now = HybridClock(clock).now()
            for foreign in (delayed_record("orders-0", Record(RecordType.ROWS), 0), cancellation(id)):
                await wal.append("producer-shop.delays", stamp(foreign, now, 0, 0))
            await wal.append("producer-shop.delays", b"rubbish")
            assert [bytes(each.body) for each in await delivered(wal, 1)] == [b"one"]

    run_virtual(main(), clock)
    assert "cannot be read" in caplog.text


def test_a_fault_in_releasing_ends_the_producer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """It does not go on as if nothing were due."""
    clock = VirtualClock()

    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", CHANNELS, clock=clock_of(clock), delays=True) as producer:
            monkeypatch.setattr(releaser, "RELEASED_AT_ONCE", None)
            await producer.schedule([("orders-0", b"one")], deliver_after_s=1)
            await asyncio.sleep(10)
            with pytest.raises(TidewalError, match="cannot be sent"):
                await producer.send([("orders-0", b"two")])
        monkeypatch.undo()
        async with open_producer(wal, "shop", CHANNELS, clock=clock_of(clock)):
            assert [bytes(each.body) for each in await delivered(wal, 1)] == [b"one"]

    run_virtual(main(), clock)
    assert "cannot release delayed messages" in caplog.text


def test_more_messages_than_memory_come_in_order(monkeypatch: pytest.MonkeyPatch):
    """What does not fit is read again when it is next; cancellations, too."""
    monkeypatch.setattr(producer_delays, "BUFFER_BYTES", 20 * 1024)
    clock, draw = VirtualClock(), random.Random(11)

    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", CHANNELS, clock=clock_of(clock), delays=True) as producer:
            at = to_datetime(clock_of(clock).now()) + timedelta(seconds=100)
            dues = draw.sample(range(300), 200)
            ids = {
                due: (await producer.schedule([("orders-0", b"%d" % due)], deliver_at=at + timedelta(seconds=due)))[0]
                for due in dues
            }
            gone = set(draw.sample(dues, 50))
            for due in gone:
                assert await producer.cancel(ids[due])
            assert producer.pending_delays <= 20
            found = await delivered(wal, 150)
            assert [int(bytes(each.body)) for each in found] == sorted(set(dues) - gone)
            await asyncio.sleep(20)
            assert producer.pending_delays == 0

    run_virtual(main(), clock)


def test_one_that_is_due_in_a_year_keeps_no_year(monkeypatch: pytest.MonkeyPatch):
    """The delay channel is let go of below what is pending, which is written again at its end."""
    monkeypatch.setattr(releaser, "REWRITE_BYTES", 200_000)
    clock = VirtualClock()

    async def main() -> None:
        log = MemoryLog()
        wal = MemoryWal(log)
        async with open_producer(wal, "shop", CHANNELS, clock=clock_of(clock), delays=True) as producer:
            [far] = await producer.schedule([("orders-1", b"far")], deliver_after_s=800)
            [never] = await producer.schedule([("orders-1", b"never")], deliver_after_s=700)
            assert await producer.cancel(never)
            for _ in range(60):
                await producer.schedule([("orders-0", bytes(10))] * 500, deliver_after_s=3)
                await asyncio.sleep(10)
            kept = log.channels["producer-shop.delays"].entries
            assert sum(len(entry.payload) for entry in kept) < 1_000_000
        async with open_producer(wal, "shop", CHANNELS, clock=clock_of(clock)):
            [found] = await delivered(wal, 1, ["orders-1"])
            assert found.tags["tidewal.offset"] == far

    run_virtual(main(), clock)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The cseqs of the records that releasers read of delay channels."""
    found: list[int] = []
    take = releaser.Releaser._take

    def noted(self: releaser.Releaser, records: Sequence[Record]) -> None:
        found.extend(record.cseq for record in records)
        take(self, records)

    monkeypatch.setattr(releaser.Releaser, "_take", noted)
    return found


def test_a_start_reads_what_is_due_first_and_not_all_that_is_pending(monkeypatch: pytest.MonkeyPatch, read: list[int]):
    """What was in memory is written again at the channel's end, and a start begins there; what is due behind that is
    read when it is next."""
    monkeypatch.setattr(producer_delays, "BUFFER_BYTES", 40 * 1024)
    clock, draw = VirtualClock(), random.Random(5)

    async def main() -> None:
        log = MemoryLog()
        at = to_datetime(clock_of(clock).now()) + timedelta(seconds=150)
        async with opened(log, clock) as producer:
            dues = draw.sample(range(400), 300)
            for number, due in enumerate(dues):
                [id] = await producer.schedule([("orders-0", b"%d" % due)], deliver_at=at + timedelta(seconds=due))
                if number % 5 == 0:
                    assert await producer.cancel(id)
                await asyncio.sleep(0.3)
            await asyncio.sleep(20)
        read.clear()
        async with opened(log, clock) as producer:
            await asyncio.sleep(5)
            assert producer.pending_delays > 10
            assert len(read) < 160, "of 360, and what was written again"
        async with opened(log, clock):
            left = sorted(due for number, due in enumerate(dues) if number % 5)
            found = await delivered(MemoryWal(log), len(left))
            assert [int(bytes(each.body)) for each in found] == left

    run_virtual(main(), clock)


def test_a_start_finds_what_is_left_where_the_first_that_a_head_left_out_is_gone(monkeypatch: pytest.MonkeyPatch):
    """A later pass has released it, and there was more room by then: so nothing was written again behind the head."""
    defaults: dict[str, object] = channel_owner.ChannelOwner.__init__.__wrapped__.__kwdefaults__  # type: ignore[attr-defined]
    monkeypatch.setitem(defaults, "snapshot_records", 12)
    monkeypatch.setattr(producer_delays, "BUFFER_BYTES", 40 * 1024)
    clock = VirtualClock()

    async def main() -> None:
        log = MemoryLog()
        at = to_datetime(clock_of(clock).now()) + timedelta(seconds=100)
        async with opened(log, clock) as producer:
            for number in range(45):
                due = at + timedelta(seconds=2 * number)
                await producer.schedule([("orders-0", b"%d" % number)], deliver_at=due)
                await asyncio.sleep(0.1)
            monkeypatch.setattr(producer_delays, "BUFFER_BYTES", 80 * 1024)
            await asyncio.sleep(160)
            assert producer._delays._releaser is not None
            head = producer._delays._releaser._head()
            assert head is not None
            assert head.left_out is not None
            first_id = (await MemoryWal(log).describe("producer-shop.delays")).first_id
            assert first_id is not None
            assert head.left_out.id < first_id < head.place.id
        async with opened(log, clock):
            found = await delivered(MemoryWal(log), 45)
            assert [int(bytes(each.body)) for each in found] == list(range(45))

    run_virtual(main(), clock)


@pytest.mark.parametrize("seed", range(3))
def test_what_a_start_reads_is_bounded_whenever_its_predecessor_is_killed(
    monkeypatch: pytest.MonkeyPatch, read: list[int], seed: int
):
    """It reads about twice what fits into memory, however fast messages come, and however many are pending."""
    memory = producer_delays.BUFFER_BYTES
    monkeypatch.setattr(producer_delays, "BUFFER_BYTES", 40 * 1024)
    clock, draw, sent = VirtualClock(), random.Random(seed), set[bytes]()
    starts: list[int] = []  # how many records each has read

    async def work(wal: CutOffWal, number: int) -> None:
        read.clear()
        async with open_producer(wal, "shop", CHANNELS, clock=clock_of(clock), delays=True) as producer:
            await asyncio.sleep(1)
            starts.append(len(read))
            at, calls = to_datetime(clock_of(clock).now()) + timedelta(seconds=200), iter(range(draw.randrange(99)))

            async def send() -> None:
                for call in calls:
                    bodies = [b"%d.%d.%d" % (number, call, each) for each in range(4)]
                    due = at + timedelta(seconds=draw.uniform(0, 50))
                    await producer.schedule([(draw.choice(CHANNELS), body) for body in bodies], deliver_at=due)
                    sent.update(bodies)

            await asyncio.gather(*(send() for _ in range(4)))
            wal.cut_off = True  # at once: nothing is written at an end
            await asyncio.sleep(500)

    async def main() -> None:
        log = MemoryLog()
        for number in range(8):
            wal = CutOffWal(log, FaultPlan(seed, Rates(delay=0.5), channels="delays"))
            process = asyncio.create_task(work(wal, number))
            await elapse(20)
            assert wal.cut_off
            process.cancel()
            await asyncio.wait({process}, timeout=0)
        assert max(starts) < 100 < len(sent) / 10
        monkeypatch.setattr(producer_delays, "BUFFER_BYTES", memory)
        async with opened(log, clock):
            found = await delivered(MemoryWal(log), len(sent))
            assert {bytes(each.body) for each in found} == sent

    run_virtual(main(), clock)


def opened(
    log: MemoryLog, clock: VirtualClock, channels: Sequence[str] = CHANNELS
) -> AbstractAsyncContextManager[Producer]:
    """The producer of these tests, in its next process."""
    return open_producer(MemoryWal(log), "shop", channels, clock=clock_of(clock), delays=True)


def test_the_rest_of_a_call_is_sent_whatever_of_it_was_dealt_with_before(monkeypatch: pytest.MonkeyPatch):
    """The delay channel is let go of below whole calls only: a reader drops what has lost its beginning."""
    defaults: dict[str, object] = channel_owner.ChannelOwner.__init__.__wrapped__.__kwdefaults__  # type: ignore[attr-defined]
    monkeypatch.setitem(defaults, "snapshot_records", 3)
    clock = VirtualClock()

    async def main() -> None:
        log = MemoryLog()
        async with opened(log, clock) as producer:
            first, _ = await producer.schedule([("orders-0", b"never"), ("orders-0", b"rest")], deliver_after_s=300)
            assert await producer.cancel(first)
            for _ in range(10):
                await producer.schedule([("orders-1", b"x")], deliver_after_s=1)
                await asyncio.sleep(10)
            described = await MemoryWal(log).describe("producer-shop.delays")
            assert described.first_id == int.to_bytes(2, 8, "big"), "the fence before the call is let go of"
        async with opened(log, clock):
            await asyncio.sleep(400)
        assert [bytes(each.body) for each in stored(log, "orders-0")] == [b"rest"]

    run_virtual(main(), clock)


def test_what_was_dealt_with_is_not_sent_again_where_its_channel_knows_nothing_of_it():
    """Retention has removed it, or the channel was dropped and made again; a dead letter stays one."""
    clock = VirtualClock()

    async def main() -> None:
        log = MemoryLog()
        wal = MemoryWal(log)
        async with opened(log, clock) as producer:
            await producer.schedule([("orders-0", b"one"), ("orders-1", b"two")], deliver_after_s=1)
            await asyncio.sleep(60)
            await producer.schedule([("orders-1", b"letter")], deliver_after_s=10)
        latest = await wal.latest_id("orders-0")
        assert latest is not None
        await wal.truncate("orders-0", latest)
        await wal.drop_channel("orders-1")
        for channels in (["orders-0"], ["orders-0"], CHANNELS):
            async with opened(log, clock, channels):
                await asyncio.sleep(60)
        assert not stored(log, "orders-0")
        assert not stored(log, "orders-1")
        assert len(log.channels["producer-shop.dead_letters"].entries) == 1

    run_virtual(main(), clock)


class StuckWal(CutOffWal):
    """A log as a process sees it in which what is appended to one channel does not arrive."""

    stuck = ""

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        self.cut_off = any(each.channel == self.stuck for each in entries)
        super().submit(entries, done)
        self.cut_off = False


def test_what_is_sent_comes_once_where_retention_goes_on_beside_a_channel_that_stands_still():
    clock = VirtualClock()

    async def main() -> None:
        log = MemoryLog()
        wal = StuckWal(log)
        producer = Producer(wal, "shop", CHANNELS, ChannelPolicy(), 10.0, clock_of(clock), delays=True)
        await producer.open()
        for number in range(4):
            await producer.schedule([(name, b"%d" % number) for name in CHANNELS], deliver_after_s=5)
        wal.stuck = "orders-1"
        await asyncio.sleep(25)
        assert [bytes(each.body) for each in stored(log, "orders-0")] == [b"0", b"1", b"2", b"3"]
        await producer.send([("orders-0", b"next")])
        latest = await wal.latest_id("orders-0")
        assert latest is not None
        await wal.truncate("orders-0", latest)  # with all that it knows of the delay channel
        await producer._delays.stop()
        await kill(producer)
        async with opened(log, clock):
            await asyncio.sleep(60)
        assert [bytes(each.body) for each in stored(log, "orders-0")] == [b"next"]
        assert [bytes(each.body) for each in stored(log, "orders-1")] == [b"0", b"1", b"2", b"3"]

    run_virtual(main(), clock)


def test_what_was_sent_comes_once_where_two_are_killed_and_retention_goes_on_between():
    """The first is killed before it has noted what is done, the second knows that from the channels alone."""
    clock = VirtualClock()

    async def main() -> None:
        log = MemoryLog()
        wal = MemoryWal(log)
        for number in range(2):
            producer = Producer(wal, "shop", CHANNELS, ChannelPolicy(), 10.0, clock_of(clock), delays=True)
            await producer.open()
            if number == 0:
                await producer.schedule([(name, b"once") for name in CHANNELS], deliver_after_s=1)
                await asyncio.sleep(3)
                assert [len(stored(log, name)) for name in CHANNELS] == [1, 1]
            else:
                await asyncio.sleep(30)
                latest = await wal.latest_id("orders-0")
                assert latest is not None
                await wal.truncate("orders-0", latest)
            await producer._delays.stop()
            await kill(producer)
        async with opened(log, clock):
            await asyncio.sleep(30)
        assert [len(stored(log, name)) for name in CHANNELS] == [0, 1]

    run_virtual(main(), clock)


def test_a_channel_that_stands_still_holds_up_no_other():
    clock = VirtualClock()

    async def main() -> None:
        log = MemoryLog()
        wal = StuckWal(log)
        async with open_producer(wal, "shop", CHANNELS, clock=clock_of(clock), delays=True) as producer:
            for after_s in (5, 6, 40, 70):
                await producer.schedule([(name, b"%d" % after_s) for name in CHANNELS], deliver_after_s=after_s)
            wal.stuck = "orders-1"
            for end_s, there in ((4, []), (8, [b"5"]), (20, [b"5", b"6"]), (60, [b"5", b"6", b"40"])):
                await asyncio.sleep(end_s - (physical_ms(clock_of(clock).now()) - begun_ms) / 1000)
                assert [bytes(each.body) for each in stored(log, "orders-0")] == there
            assert not stored(log, "orders-1")
            wal.stuck = ""
            wal.back()
            await asyncio.sleep(60)
        for name in CHANNELS:
            assert [bytes(each.body) for each in stored(log, name)] == [b"5", b"6", b"40", b"70"]
        async with opened(log, clock):
            await asyncio.sleep(60)
        assert [len(stored(log, name)) for name in CHANNELS] == [4, 4]

    begun_ms = clock.wall_ms()
    run_virtual(main(), clock)


def test_a_batch_may_be_repeated_when_it_is_due_already():
    clock = VirtualClock()

    async def main() -> None:
        log = MemoryLog()
        async with opened(log, clock) as producer:
            at = to_datetime(clock_of(clock).now()) + timedelta(seconds=2)
            first = await producer.schedule([("orders-0", b"one")], deliver_at=at, sequence=1)
            await asyncio.sleep(5)
            assert await producer.schedule([("orders-0", b"one")], deliver_at=at, sequence=1) == first

    run_virtual(main(), clock)


def test_a_record_that_was_read_is_scheduled_and_sent_as_a_new_one():
    """What its owner has stamped on it says nothing of the new one: parts, numbers, sources."""
    clock = VirtualClock()

    async def main() -> None:
        log = MemoryLog()
        async with opened(log, clock) as producer:
            await producer.send([("orders-0", b"a"), ("orders-0", Record(RecordType.ROWS, key=b"k", schema_version=7))])
            [_, read] = await delivered(MemoryWal(log), 2, ["orders-0"])
            await producer.schedule([("orders-1", read)], deliver_after_s=1)
            [sent] = await delivered(MemoryWal(log), 1, ["orders-1"])
            assert (sent.key, sent.schema_version, sent.producer, sent.part) == (b"k", 7, "", None)
            await producer.send([("orders-0", replace(sent, tags={**sent.tags, "tidewal.offset": b"\xff" * 20}))])
        async with opened(log, clock) as producer:
            await producer.schedule([("orders-0", b"next")], deliver_after_s=1)
            found = await delivered(MemoryWal(log), 4, ["orders-0"])
            assert bytes(found[-1].body) == b"next"

    run_virtual(main(), clock)


# ---- any schedule of crashes -----------------------------------------------------------------------------------------


class DelaysPlan(FaultPlan):
    """Faults of the appends to the messages' channels and to the delay channel."""

    def decide(self, channel: str, *, ephemeral: bool) -> Fault:
        watched = channel in CHANNELS or channel.endswith(".delays")
        return super().decide(channel, ephemeral=ephemeral) if watched else Fault.NONE


class WatchedWal(CutOffWal):
    """Notes what would be sent before it is due."""

    def __init__(self, log: MemoryLog, plan: FaultPlan, clock: VirtualClock) -> None:
        super().__init__(log, plan)
        self.clock = clock
        self.early: list[str] = []

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        for entry in entries:
            offset = decode(entry.payload).tags.get("tidewal.offset") if entry.channel in CHANNELS else None
            if isinstance(offset, bytes) and physical_ms(DelayedId.from_bytes(offset).due) > self.clock.wall_ms():
                self.early.append(f"{offset.hex()} at {self.clock.wall_ms()}")
        super().submit(entries, done)


class Scheduler:
    """A process that schedules and cancels, and that may be killed or cut off."""

    def __init__(self, log: MemoryLog, clock: VirtualClock, number: int, plan: FaultPlan) -> None:
        self.wal = WatchedWal(log, plan, clock)
        self.clock, self.number = HybridClock(clock), number
        self.asked: dict[bytes, set[str]] = {}  # what its process was told of each body
        self._random = random.Random(f"{plan.seed} {number}")
        self.task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        with suppress(TidewalError):  # the name was opened elsewhere
            async with open_producer(self.wal, "shop", CHANNELS, clock=self.clock, delays=True) as producer:
                for count in range(1000):
                    await self._schedule(producer, b"%d.%d" % (self.number, count))
                    await asyncio.sleep(self._random.uniform(0, 2))

    async def _schedule(self, producer: Producer, body: bytes) -> None:
        told = self.asked[body] = set()
        channel, after_s = self._random.choice(CHANNELS), self._random.choice([0.0, 0.01, 0.5, 3.0, 30.0])
        [id] = await producer.schedule([(channel, body)], deliver_after_s=after_s, deadline_s=1000)
        told.add("stored")
        if self._random.random() < 0.4:
            await asyncio.sleep(self._random.choice([0.0, after_s]))
            told.add("asked to cancel")
            told.add("cancelled" if await producer.cancel(id, deadline_s=1000) else "late")

    async def kill(self) -> None:
        self.wal.cut_off = True
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=0)


def check_delivered(found: Sequence[Record], asked: dict[bytes, set[str]]) -> None:
    """Each message that was stored is there once, unless it was cancelled in time."""
    times = Counter(bytes(each.body) for each in found)
    for body, told in asked.items():
        if "cancelled" in told:
            assert times[body] == 0, body
        elif "late" in told or told == {"stored"}:
            assert times[body] == 1, (body, told)
        else:  # its process was killed before it was told
            assert times[body] <= 1, (body, told)
    assert set(times) <= set(asked)


STEPS = st.lists(
    st.tuples(st.sampled_from(["open", "cut off", "back", "kill", "wait"]), st.integers(0, 3), st.floats(0.1, 15)),
    max_size=15,
)


@pytest.mark.parametrize("buffer_bytes", [producer_delays.BUFFER_BYTES, 3 * 1024])
@given(steps=STEPS, seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_none_is_early_lost_or_doubled_under_any_schedule(
    buffer_bytes: int, steps: list[tuple[str, int, float]], seed: int
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(producer_delays, "BUFFER_BYTES", buffer_bytes)
        patch.setattr(releaser, "TRUNCATE_S", 1.0 if buffer_bytes < 4096 else releaser.TRUNCATE_S)
        _check_any_schedule(steps, seed)


def _check_any_schedule(steps: list[tuple[str, int, float]], seed: int) -> None:
    async def main(clock: VirtualClock) -> None:
        log = MemoryLog()
        plan = DelaysPlan(seed, Rates(fail=0.02, unknown=0.02, lost=0.02, delay=0.05))
        everyone = [Scheduler(log, clock, 0, plan)]
        await elapse(1.0)
        for action, which, pause_s in steps:
            one = everyone[which % len(everyone)]
            if action == "open":
                everyone.append(Scheduler(log, clock, len(everyone), plan))
            elif action == "cut off":
                one.wal.cut_off = True
            elif action == "back":
                one.wal.back()
            elif action == "kill":
                await one.kill()
            await elapse(pause_s)
        for one in everyone:
            await one.kill()
            one.wal.faults = None
            one.wal.back()  # what it has sent arrives late
        await asyncio.gather(*(one.task for one in everyone), return_exceptions=True)
        async with open_producer(MemoryWal(log), "shop", CHANNELS, clock=clock_of(clock), delays=True) as last:
            await elapse(60)
            assert last.pending_delays == 0
        found = [record for channel in CHANNELS for record in stored(log, channel)]
        check_delivered(found, {body: told for one in everyone for body, told in one.asked.items()})
        assert not [early for one in everyone for early in one.wal.early]
        for channel in CHANNELS:
            offsets = [record.tags["tidewal.offset"] for record in stored(log, channel)]
            assert offsets == sorted(offsets), channel

    clock = VirtualClock()
    run_virtual(main(clock), clock)


def stored(log: MemoryLog, channel: str) -> list[Record]:
    """The messages of a channel that count, in its order."""
    return [
        each for each in ChannelReader(channel).accept(log.channels[channel].entries) if each.type is RecordType.ROWS
    ]
