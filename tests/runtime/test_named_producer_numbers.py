"""The numbers of a named producer's batches: each is decided, and `last_sequence` says of none that it is in the log
that is not, however many calls send at once, and whatever becomes of them."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.named_producers import CHANNELS, LEASE_S, CutOffWal, clock_of, everything, kill
from tidewal.runtime.errors import (
    Closed,
    DeadlineExceeded,
    InvalidRequest,
    MessageTooLarge,
    OutcomeUnknown,
    Unavailable,
)
from tidewal.runtime.log.record import Record, RecordType, decode
from tidewal.runtime.log.wal import Append, ChannelPolicy, OnAppended
from tidewal.runtime.ownership.producer import Producer, open_producer
from tidewal.runtime.ownership.producers import REMEMBERED_PER_PRODUCER
from tidewal.runtime.ownership.sequence_window import WINDOW
from tidewal.runtime.streams.open_stream import open_stream
from tidewal.runtime.testing.clock import VirtualClock, elapse, run_virtual
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

SEEDS = int(os.environ.get("TIDEWAL_TEST_PRODUCERS", "8"))  # of each kind; one takes 2 s of CPU
TOO_LARGE = b"x" * 6_000_000


def records_of(log: MemoryLog, channels: Sequence[str] = CHANNELS) -> list[Record]:
    """All that was ever written, whether readers see it or not."""
    return [decode(entry.payload) for channel in channels for entry in log.channels[channel].entries]


def given_up(log: MemoryLog, channels: Sequence[str] = CHANNELS) -> set[int]:
    """The numbers that were given up, by what the log has: what comes late, under a lower term, does not count."""
    found: set[int] = set()
    for channel in channels:
        term = 0
        for record in records_of(log, [channel]):
            term = max(term, record.term)
            if record.type is RecordType.PRODUCERS and record.producer and record.term == term:
                found.add(record.pseq)
    return found


@pytest.mark.parametrize("numbered", [False, True])
def test_many_calls_at_once_over_errors_are_all_in_the_log_and_so_says_last_sequence(numbered):
    """A batch that fails, and is tried again later, is not overtaken by more than the log remembers."""

    async def main(seed: int) -> None:
        log = MemoryLog()
        wal = MemoryWal(log)
        count = 4 * REMEMBERED_PER_PRODUCER
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            wal.faults = FaultPlan(seed, Rates(fail=0.01), channels="orders")
            await asyncio.gather(
                *(
                    producer.send([("orders-0", b"%d" % n)], sequence=n if numbered else None, deadline_s=600)
                    for n in range(1, count + 1)
                )
            )
            assert producer.last_sequence == count
            wal.faults = FaultPlan()
        found = [each for each in records_of(log, ["orders-0"]) if each.type is RecordType.ROWS]
        assert sorted(each.pseq for each in found) == list(range(1, count + 1))
        assert not numbered or all(int(bytes(each.body)) == each.pseq for each in found)
        assert not given_up(log, ["orders-0"])
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            assert producer.last_sequence == count

    for seed in range(3):
        run_virtual(main(seed))


def test_a_number_whose_batch_was_refused_holds_last_sequence_back_until_it_is_sent():
    """A source may send it again, smaller; what is far above it is refused."""

    async def main() -> None:
        log = MemoryLog()
        wal = MemoryWal(log)
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            await producer.send([("orders-0", b"1")], sequence=1)
            with pytest.raises(MessageTooLarge):
                await producer.send([("orders-0", TOO_LARGE)], sequence=2)
            for number in range(3, WINDOW + 2):
                await producer.send([("orders-0", b"%d" % number)], sequence=number)
            for _ in range(2):
                assert producer.last_sequence == 1
                with pytest.raises(InvalidRequest, match="batch 2 is not in the log: send that one first") as raised:
                    await producer.send([("orders-0", b"%d" % (WINDOW + 2))], sequence=WINDOW + 2)
                assert raised.value.fields["missing"] == 2
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            assert producer.last_sequence == 1
            assert (await producer.send([("orders-0", b"3")], sequence=3)).repeated
            assert not (await producer.send([("orders-0", b"2")], sequence=2)).repeated
            assert producer.last_sequence == WINDOW + 1
            await producer.send([("orders-0", b"%d" % (WINDOW + 2))], sequence=WINDOW + 2)
        found = await everything(log, WINDOW + 2, ["orders-0"])
        assert sorted(int(body) for _, body in found) == list(range(1, WINDOW + 3))

    run_virtual(main())


def test_without_numbers_a_batch_that_was_refused_is_given_up_and_no_other_gets_its_number(caplog):
    async def main() -> None:
        log = MemoryLog()
        wal = MemoryWal(log)
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            await producer.send([("orders-0", b"0")])
            with pytest.raises(MessageTooLarge):
                await producer.send([("orders-0", TOO_LARGE)])
            for number in range(1, WINDOW):
                await producer.send([("orders-0", b"%d" % number)])
            assert (producer.last_sequence, given_up(log, ["orders-0"])) == (1, set())
            await producer.send([("orders-0", b"%d" % WINDOW)])
            assert (producer.last_sequence, given_up(log, ["orders-0"])) == (WINDOW + 2, {2})
        assert "gives up batch 2" in caplog.text
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            assert producer.last_sequence == WINDOW + 2
            for body in (b"0", b"small"):
                with pytest.raises(InvalidRequest, match="batch 2 of shop was given up") as raised:
                    await producer.send([("orders-0", body)], sequence=2)
                assert raised.value.fields["given_up"]
            for number in range(WINDOW + 1, 3 * REMEMBERED_PER_PRODUCER):
                await producer.send([("orders-0", b"%d" % number)])
            with pytest.raises(OutcomeUnknown):
                await producer.send([("orders-0", b"small")], sequence=2)
        found = await everything(log, 3 * REMEMBERED_PER_PRODUCER, ["orders-0"])
        assert [int(body) for _, body in found] == list(range(3 * REMEMBERED_PER_PRODUCER))

    caplog.set_level(logging.WARNING, "tidewal.producer")
    run_virtual(main())


def test_what_waits_for_its_number_is_sent_in_order():
    async def main(numbered: bool) -> None:
        log = MemoryLog()
        wal = CutOffWal(log)
        count = 3 * WINDOW
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            wal.cut_off = True
            sending = asyncio.gather(
                *(
                    producer.send([("orders-0", b"%d" % n)], sequence=n if numbered else None)
                    for n in range(1, count + 1)
                )
            )
            await elapse(1.0)
            assert producer._window.last == (count if numbered else WINDOW)
            wal.back()
            await sending
        assert [int(body) for _, body in await everything(log, count, ["orders-0"])] == list(range(1, count + 1))

    for numbered in (False, True):
        run_virtual(main(numbered))


def test_a_batch_whose_deadline_passes_before_it_was_sent_has_no_number():
    async def main() -> None:
        log = MemoryLog()
        wal = CutOffWal(log)
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            wal.cut_off = True
            first = [asyncio.create_task(producer.send([("orders-0", b"%d" % n)])) for n in range(WINDOW)]
            await elapse(0.1)
            with pytest.raises(DeadlineExceeded, match="was not sent within 1 s") as raised:
                await producer.send([("orders-0", b"late")], deadline_s=1)
            assert raised.value.fields == {"sequence": None}
            wal.back()
            await asyncio.gather(*first)
            await producer.send([("orders-0", b"late")], sequence=None)
            assert producer.last_sequence == WINDOW + 1
        assert [body for _, body in await everything(log, WINDOW + 1, ["orders-0"])][-1] == b"late"

    run_virtual(main())


def test_a_source_waits_for_a_number_that_is_under_way_and_sends_one_again_meanwhile():
    """Number 1 is behind the others in no queue, whichever call sends it."""

    async def main() -> None:
        log = MemoryLog()
        wal = CutOffWal(log)
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            wal.faults = FaultPlan(1, Rates(fail=1.0), channels="orders")
            with pytest.raises(DeadlineExceeded):
                await producer.send([("orders-0", b"1")], sequence=1, deadline_s=1)
            failing = asyncio.create_task(producer.send([("orders-0", b"1")], sequence=1, deadline_s=1))
            await asyncio.sleep(0)
            wal.faults = FaultPlan()
            rest = [
                asyncio.create_task(producer.send([("orders-0", b"%d" % n)], sequence=n)) for n in range(2, 2 * WINDOW)
            ]
            again = asyncio.create_task(producer.send([("orders-0", b"%d" % (WINDOW + 1))], sequence=WINDOW + 1))
            await elapse(0.01)
            failing.cancel()  # while it pauses
            await elapse(1.0)
            assert not again.done()
            assert producer.last_sequence == 0
            await producer.send([("orders-0", b"1")], sequence=1)
            await asyncio.gather(*rest, again)
            assert producer.last_sequence == 2 * WINDOW - 1
        found = await everything(log, 2 * WINDOW - 1, ["orders-0"])
        assert sorted(int(body) for _, body in found) == list(range(1, 2 * WINDOW))

    run_virtual(main())


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.06, 0.3, 1.0])
def test_calls_that_are_cancelled_hold_nothing_up(after_s):
    """Those that wait, that were admitted just now, that give a number up, and that the log has."""

    async def main() -> None:
        log = MemoryLog()
        wal = MemoryWal(log)
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            wal.faults = FaultPlan(3, Rates(fail=0.3, delay=0.3), channels="orders")
            draw = random.Random(1)
            acked: list[int] = []
            for _ in range(3):
                calls = {
                    n: asyncio.create_task(producer.send([("orders-0", b"%d" % n)], deadline_s=600))
                    for n in range(len(acked), len(acked) + 3 * WINDOW)
                }
                await elapse(after_s)
                for call in draw.sample(list(calls.values()), 2 * WINDOW):
                    call.cancel()
                results = await asyncio.gather(*calls.values(), return_exceptions=True)
                acked += [n for n, result in zip(calls, results, strict=True) if not isinstance(result, BaseException)]
            wal.faults = FaultPlan()
            for n in range(2 * WINDOW):
                await producer.send([("orders-0", b"end %d" % n)])
            numbers = Counter(each.pseq for each in records_of(log, ["orders-0"]) if each.producer)
            assert numbers == Counter(range(1, producer.last_sequence + 1))

    run_virtual(main())


def test_a_producer_that_closes_ends_what_waits_and_was_not_sent():
    async def main() -> None:
        log = MemoryLog()
        wal = CutOffWal(log)
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            wal.cut_off = True
            calls = [asyncio.create_task(producer.send([("orders-0", b"%d" % n)])) for n in range(WINDOW + 5)]
            await elapse(0.1)
            closing = asyncio.create_task(producer.aclose())
            await elapse(0.1)
            for call in calls[WINDOW:]:
                with pytest.raises(Closed) as raised:
                    await call
                assert not raised.value.outcome_unknown
            wal.back()
            await asyncio.gather(*calls[:WINDOW])
            await closing
        assert len(await everything(log, WINDOW, ["orders-0"])) == WINDOW

    run_virtual(main())


def test_an_error_of_a_number_that_is_given_up_is_not_the_batchs_that_waits_for_it():
    """Else a caller would send its batch again under that number."""

    async def main() -> None:
        log = MemoryLog()
        wal = CutOffWal(log)
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            with pytest.raises(MessageTooLarge):
                await producer.send([("orders-0", TOO_LARGE)])
            for n in range(WINDOW - 1):
                await producer.send([("orders-0", b"%d" % n)])
            wal.faults = FaultPlan(1, Rates(unknown=1.0), channels="orders")
            waiting = asyncio.create_task(producer.send([("orders-0", b"waits")]))
            await elapse(0.01)
            await producer.aclose()
            with pytest.raises(Closed) as raised:
                await waiting
            assert raised.value.fields == {}

    run_virtual(main())


# ---- logs without atomic batches ------------------------------------------------------------------------------------


class PartWal(CutOffWal):
    """Writes the first part of a batch alone, `in_part` times, and cannot tell."""

    in_part = 0

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        if self.in_part and len({entry.channel for entry in entries}) > 1:
            self.in_part -= 1
            error = Unavailable("half of it", outcome_unknown=True)
            super().submit(entries[:1], lambda _: done(error))
        else:
            super().submit(entries, done)


def test_a_batch_that_only_some_channels_have_is_brought_to_the_others():
    async def main() -> None:
        log = MemoryLog()
        wal = PartWal(log)
        async with open_producer(wal, "shop", CHANNELS) as producer:
            wal.in_part = 1
            await producer.send([("orders-0", b"one"), ("orders-1", b"two")])
            assert producer.last_sequence == 1
        assert sorted(body for _, body in await everything(log, 2)) == [b"one", b"two"]

    run_virtual(main())


def test_a_batch_that_only_some_channels_have_can_be_given_up():
    """The process that sent it was killed, and the next one leaves the numbers to the producer."""

    async def main(clock: VirtualClock) -> None:
        log = MemoryLog()
        killed = Producer(wal := PartWal(log), "shop", CHANNELS, ChannelPolicy(), LEASE_S, clock_of(clock))
        await killed.open()
        wal.in_part = 1
        sending = asyncio.create_task(killed.send([("orders-0", b"half"), ("orders-1", b"other half")]))
        await asyncio.sleep(0)
        wal.cut_off = True
        await kill(killed)
        sending.cancel()
        async with open_producer(MemoryWal(log), "shop", CHANNELS, clock=clock_of(clock)) as producer:
            for n in range(2 * WINDOW):
                await producer.send([("orders-1", b"%d" % n)])
            assert producer.last_sequence == 2 * WINDOW + 1
        assert given_up(log) == {1}
        async with open_producer(MemoryWal(log), "shop", CHANNELS, clock=clock_of(clock)) as producer:
            assert producer.last_sequence == 2 * WINDOW + 1

    clock = VirtualClock()
    run_virtual(main(clock), clock)


# ---- schedules ------------------------------------------------------------------------------------------------------


async def read_to(log: MemoryLog, ts: int) -> list[Record]:
    """What a stream hands out up to a timestamp."""
    stream = open_stream(MemoryWal(log), CHANNELS, stalled_after_s=60.0)
    found: list[Record] = []
    async for pack in stream:
        found += pack.messages
        if pack.end_ts >= ts:
            break
    await stream.close()
    return [record for record in found if record.ts <= ts]


class Runs:
    """Processes of one name, one after another, each with many calls at once: some end with an error, some are
    cancelled, some processes are killed while they send. `acked` are the bodies that were acknowledged."""

    def __init__(self, seed: int, clock: VirtualClock, *, numbered: bool) -> None:
        self.log = MemoryLog()
        self.acked: set[bytes] = set()
        self._clock = clock
        self._random = random.Random(seed)
        self._numbered = numbered
        self._rates = Rates(fail=0.03, unknown=0.004, lost=0.004, delay=0.05)
        self._count = 0
        self._killed = CutOffWal(
            self.log
        )  # the one before: what it sent last comes before the next one opens, or behind

    async def run(self) -> None:
        """One process, which ends in order, or is killed."""
        wal = CutOffWal(self.log)
        if self._random.random() < 0.5:
            self._killed.back()
        producer = Producer(wal, "shop", CHANNELS, ChannelPolicy(), LEASE_S, clock_of(self._clock))
        await producer.open()
        last = producer.last_sequence
        await self._check(producer, last)
        wal.faults = FaultPlan(self._random.getrandbits(32), self._rates, channels="orders")
        calls = [asyncio.create_task(self._send(producer, number)) for number in range(last + 1, last + 400)]
        await elapse(self._random.choice([0.03, 0.1, 0.5, 40.0]))
        self._killed.back()
        for call in self._random.sample(calls, 10):
            call.cancel()
        if self._random.random() < 0.5:
            await asyncio.wait(calls)
            await producer.aclose()
            return
        wal.cut_off = True
        await kill(producer)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        self._killed = wal

    async def end(self) -> None:
        """A process without errors, after which all is in the log."""
        async with open_producer(MemoryWal(self.log), "shop", CHANNELS, clock=clock_of(self._clock)) as producer:
            self._killed.back()
            await self._check(producer, producer.last_sequence)
            for number in range(producer.last_sequence + 1, producer._window.last + WINDOW):
                await self._send(producer, number, orderly=True)
            await self._check(producer, producer.last_sequence)
            assert producer.last_sequence == producer._window.last

    async def _send(self, producer: Producer, number: int, *, orderly: bool = False) -> None:
        self._count += 1
        body = b"%d" % (number if self._numbered else self._count)
        refused = not orderly and not self._numbered and self._random.random() < 0.02
        deadline_s = 600 if orderly else self._random.choice([0.05, 1.0, 600.0, 600.0])
        channel = CHANNELS[number % 2] if self._numbered else self._random.choice(CHANNELS)
        sequence = number if self._numbered else None
        try:
            await producer.send([(channel, TOO_LARGE if refused else body)], sequence=sequence, deadline_s=deadline_s)
            self.acked.add(body)
        except (DeadlineExceeded, MessageTooLarge):
            assert not orderly

    async def _check(self, producer: Producer, last: int) -> None:
        """All up to `last` is in the log once, or was given up, and all that was acknowledged is read once."""
        found = await read_to(self.log, (await producer._owner.sync()).time)
        numbers, bodies = Counter(each.pseq for each in found), Counter(bytes(each.body) for each in found)
        assert max(numbers.values(), default=1) == max(bodies.values(), default=1) == 1, "read twice"
        assert self.acked <= bodies.keys(), "acknowledged, and not read"
        away = given_up(self.log)
        assert not away & numbers.keys(), "read, though it was given up"
        assert set(range(1, last + 1)) <= numbers.keys() | away, "not in the log, though last_sequence says so"
        if self._numbered:
            assert not away, "a source sends its own numbers again"
            assert all(bytes(each.body) == b"%d" % each.pseq for each in found)


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, SEEDS))])
def test_last_sequence_is_true_and_what_is_acknowledged_is_read_once_over_many_processes(seed, numbered):
    async def main(clock: VirtualClock) -> None:
        runs = Runs(seed, clock, numbered=numbered)
        for _ in range(5):
            await runs.run()
        await runs.end()

    clock = VirtualClock()
    run_virtual(main(clock), clock)
