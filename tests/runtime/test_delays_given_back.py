"""Delayed messages that one channel does not take for long, beside others, and what is written again meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.named_producers import CHANNELS, CutOffWal, clock_of
from tidewal.runtime.delays import releaser
from tidewal.runtime.errors import Overloaded
from tidewal.runtime.log.record import RecordType, decode, record_type
from tidewal.runtime.log.wal import Append, OnAppended
from tidewal.runtime.ownership.producer import open_producer
from tidewal.runtime.testing.clock import VirtualClock, run_virtual
from tidewal.runtime.testing.faults import Fault, FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

LETTERS = "producer-shop.dead_letters"


class PartlyStuckWal(CutOffWal):
    """A log in which what is appended to the `stuck` channels does not arrive, and pages are refused for a moment."""

    def __init__(self, log: MemoryLog, *stuck: str) -> None:
        super().__init__(log)
        self.stuck, self.takes_pages = stuck, True

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        if not self.takes_pages and any(record_type(each.payload) is RecordType.DELAYED_PAGE for each in entries):
            raise Overloaded("no pages now", limit="test")
        self.cut_off = any(each.channel in self.stuck for each in entries)
        super().submit(entries, done)
        self.cut_off = False


class SlowLetters(FaultPlan):
    """Each dead letter takes up to 0.1 s."""

    def decide(self, channel: str, *, ephemeral: bool) -> Fault:
        return Fault.DELAY if channel == LETTERS else Fault.NONE


def bodies(log: MemoryLog, channel: str) -> list[bytes]:
    found = [decode(entry.payload) for entry in log.channels[channel].entries]
    return [bytes(each.body) for each in found if each.type is RecordType.ROWS]


def letters(log: MemoryLog) -> list[bytes]:
    return [bytes(decode(decode(entry.payload).body).body) for entry in log.channels[LETTERS].entries]


@pytest.mark.parametrize("stuck", [False, True])
def test_what_is_refused_is_kept_once_however_long_that_takes(stuck: bool):
    """It takes longer than others wait for: what was kept by then is not given back, and nor is what is under way."""
    clock, sent = VirtualClock(), [b"%d" % number for number in range(400)]

    async def main() -> None:
        log = MemoryLog()
        async with open_producer(MemoryWal(log), "shop", CHANNELS, clock=clock_of(clock), delays=True) as producer:
            await producer.schedule([("orders-0", body) for body in sent], deliver_after_s=20)
            await producer.schedule([("orders-1", b"other")], deliver_after_s=60)
        await MemoryWal(log).drop_channel("orders-0")
        wal = PartlyStuckWal(log, *([LETTERS] if stuck else []))
        wal.faults = SlowLetters(0, Rates(delay_s_max=0.1))
        async with open_producer(wal, "shop", ["orders-1"], clock=clock_of(clock), delays=True) as producer:
            await asyncio.sleep(100)
            assert bodies(log, "orders-1") == [b"other"]
            wal.stuck = ()
            wal.back()
            await asyncio.sleep(100)
            assert producer.pending_delays == 0
        assert letters(log) == sent

    run_virtual(main(), clock)


def test_a_page_from_before_a_cancellation_brings_nothing_back(monkeypatch: pytest.MonkeyPatch):
    """It is written, and read, when the message would have been due, while an earlier one is not released."""
    monkeypatch.setattr(releaser, "REWRITE_BYTES", 20_000)
    clock = VirtualClock()

    async def main() -> None:
        log = MemoryLog()
        wal = PartlyStuckWal(log)
        wal.takes_pages = False
        async with open_producer(wal, "shop", CHANNELS, clock=clock_of(clock), delays=True) as producer:
            await producer.schedule([("orders-0", b"first")], deliver_after_s=5)
            [gone] = await producer.schedule([("orders-1", b"gone")], deliver_after_s=20)
            await producer.schedule([("orders-1", b"%d" % number) for number in range(40)], deliver_after_s=100)
            wal.stuck = ("orders-0",)
            await asyncio.sleep(10)
            assert await producer.cancel(gone)
            await asyncio.sleep(25)
            wal.takes_pages = True
            await asyncio.sleep(20)
            kinds = [record_type(entry.payload) for entry in log.channels["producer-shop.delays"].entries]
            assert RecordType.DELAYED_PAGE in kinds
            assert not bodies(log, "orders-0")
            wal.stuck = ()
            wal.back()
            await asyncio.sleep(100)
        assert bodies(log, "orders-0") == [b"first"]
        assert bodies(log, "orders-1") == [b"%d" % number for number in range(40)]

    run_virtual(main(), clock)
