"""A named producer: what it acknowledges is read once and in order, however its incarnations come and go."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewal.runtime.clock import HybridClock, add_ms
from tidewal.runtime.errors import (
    BadRecord,
    ChannelNotFound,
    Closed,
    DeadlineExceeded,
    Fenced,
    FormatTooNew,
    InvalidRequest,
    OutcomeUnknown,
    PreconditionFailed,
    TidewalError,
    Unavailable,
)
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.log.wal import Append, ChannelPolicy, OnAppended
from tidewal.runtime.ownership import ChannelGrant, ChannelOwner
from tidewal.runtime.ownership.producer import Producer, open_producer
from tidewal.runtime.ownership.producer_channels import GIVE_UP, TAKE, ProducerChannels
from tidewal.runtime.streams.open_stream import open_stream
from tidewal.runtime.testing.clock import VirtualClock, elapse, run_virtual
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal
from tidewal.runtime.testing.memory_channel import sequence_id

CHANNELS = ["orders-0", "orders-1"]
LEASE_S = 10.0


class CutOffWal(MemoryWal):
    """The log as a process sees it that can be cut off: what it sends, and what it is answered, arrives later."""

    def __init__(self, log: MemoryLog, faults: FaultPlan | None = None) -> None:
        super().__init__(log, faults)
        self.cut_off = False
        self._held: list[Callable[[], None]] = []

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        if self.cut_off:
            self._held.append(lambda: self._arrive(entries, done))
        else:
            super().submit(entries, lambda result: self._answer(done, result))

    def _arrive(self, entries: Sequence[Append], done: OnAppended) -> None:
        try:
            super().submit(entries, done)
        except TidewalError as error:
            done(error)

    def _answer(self, done: OnAppended, result: list[bytes] | TidewalError) -> None:
        if self.cut_off:
            self._held.append(lambda: done(result))
        else:
            done(result)

    def back(self) -> None:
        """Let all that was held back arrive, in order."""
        self.cut_off = False
        held, self._held = self._held, []
        for arrives in held:
            arrives()


def clock_of(clock: VirtualClock) -> HybridClock:
    return HybridClock(clock)


async def kill(producer: Producer) -> None:
    """What is left of a producer whose process is killed: nothing of it runs any more."""
    producer._heartbeat.stop()
    assert producer._renewing is not None
    producer._renewing.cancel()
    await asyncio.gather(producer._renewing, return_exceptions=True)
    await producer._state.close()


async def everything(log: MemoryLog, count: int, channels: Sequence[str] = CHANNELS) -> list[tuple[int, bytes]]:
    """The (timestamp, body) of the first `count` records, as a stream hands them out."""
    wal = MemoryWal(log)
    stream = open_stream(wal, channels, stalled_after_s=60.0)
    found: list[tuple[int, bytes]] = []
    while len(found) < count:
        found += [(record.ts, bytes(record.body)) for record in (await anext(stream)).messages]
    await stream.close()
    return found


def test_the_program_that_runs_twice_loses_nothing():
    async def main() -> None:
        log = MemoryLog()
        for run in range(3):
            wal = MemoryWal(log)
            async with open_producer(wal, "shop", CHANNELS) as producer:
                for number in range(3):
                    await producer.send([(CHANNELS[number % 2], f"{run}.{number}".encode())])
            await wal.close()
        found = await everything(log, 9)
        assert [body.decode() for _, body in found] == [f"{run}.{number}" for run in range(3) for number in range(3)]
        assert [ts for ts, _ in found] == sorted({ts for ts, _ in found})

    clock = VirtualClock()
    run_virtual(main(), clock)
    assert clock.monotonic() < LEASE_S, "a producer that was closed leaves no lease to wait for"


def test_all_that_a_closed_producer_wrote_is_read_without_it():
    """An idle channel does not hold the others back for ever: the last tick is in each of them."""

    async def main() -> None:
        log = MemoryLog()
        async with open_producer(MemoryWal(log), "shop", CHANNELS) as producer:
            await producer.send([("orders-0", b"one")])
        assert [body for _, body in await everything(log, 1)] == [b"one"]

    run_virtual(main())


def test_a_number_that_the_log_has_is_answered_and_not_written():
    async def main() -> None:
        log = MemoryLog()
        wal = MemoryWal(log)
        async with open_producer(wal, "shop", CHANNELS) as producer:
            first = await producer.send([("orders-0", b"one"), ("orders-1", b"two")])
            assert (first.repeated, producer.last_sequence) == (False, 1)
        async with open_producer(wal, "shop", CHANNELS) as producer:
            assert producer.last_sequence == 1
            again = await producer.send([("orders-0", b"one"), ("orders-1", b"two")], sequence=1)
            assert (again.repeated, again.ts) == (True, first.ts)
            with pytest.raises(InvalidRequest, match="is another one"):
                await producer.send([("orders-0", b"other")], sequence=1)
            with pytest.raises(InvalidRequest, match="the next one is 2"):
                await producer.send([("orders-0", b"far")], sequence=7)
            await producer.send([("orders-0", b"three")], sequence=2)
        assert [body for _, body in await everything(log, 3)] == [b"one", b"two", b"three"]

    run_virtual(main())


def test_numbers_are_known_after_retention_has_removed_the_records():
    async def main() -> None:
        log = MemoryLog()
        wal = MemoryWal(log)
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            for _ in range(3):
                await producer.send([("orders-0", b"gone")])
        latest = await wal.latest_id("orders-0")
        assert latest is not None
        await wal.truncate("orders-0", (int.from_bytes(latest) + 1).to_bytes(len(latest)))
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            assert producer.last_sequence == 3
            with pytest.raises(OutcomeUnknown):
                await producer.send([("orders-0", b"gone")], sequence=2)
            await producer.send([("orders-0", b"new")], sequence=4)
        assert [body for _, body in await everything(log, 1, ["orders-0"])] == [b"new"]

    run_virtual(main())


def test_two_batches_under_one_number_at_one_time_are_not_taken_for_one():
    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            wal.faults = FaultPlan(1, Rates(delay=1.0), channels="orders")
            one, same, other = await asyncio.gather(
                *(producer.send([("orders-0", body)], sequence=1) for body in (b"one", b"one", b"other")),
                return_exceptions=True,
            )
            assert not isinstance(one, BaseException)
            assert not isinstance(same, BaseException)
            assert one.ts == same.ts
            assert isinstance(other, InvalidRequest), "it is not in the log, and must not be acknowledged"

    run_virtual(main())


def test_a_name_keeps_the_channels_that_it_had():
    """What it wrote there counts when its batches are numbered, so it must be read there."""

    async def main() -> None:
        log = MemoryLog()
        wal = MemoryWal(log)
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            await producer.send([("orders-0", b"one")])
        async with open_producer(wal, "shop", ["orders-1"]) as producer:
            assert set(producer.channels) == set(CHANNELS)
            assert producer.last_sequence == 1
            await producer.send([("orders-1", b"two")])
        assert [body for _, body in await everything(log, 2)] == [b"one", b"two"]

    run_virtual(main())


def test_a_channel_that_was_dropped_does_not_keep_the_name_from_being_opened():
    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", CHANNELS) as producer:
            await producer.send([("orders-0", b"one"), ("orders-1", b"two")])
        await wal.drop_channel("orders-0")
        async with open_producer(wal, "shop", ["orders-1"]) as producer:
            assert (producer.channels, producer.last_sequence) == (("orders-1",), 1)
            await producer.send([("orders-1", b"three")])
        async with open_producer(wal, "shop", CHANNELS) as producer:
            await producer.send([("orders-0", b"four")])
        assert [body for _, body in await everything(wal.log, 3)] == [b"two", b"three", b"four"]

    run_virtual(main())


def test_a_channel_that_was_dropped_and_made_again_is_owned_again():
    """What is known of the one before, from where it must be read, is nothing to the new one."""

    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", CHANNELS) as producer:
            producer._owner._snapshots._every_records = 3
            for _ in range(2):
                for _ in range(20):
                    await producer.send([("orders-0", b"gone")])
                producer._owner.tick_all()
        assert producer._state.fold.state.channels["orders-0"].checkpoint
        await wal.drop_channel("orders-0")
        async with open_producer(wal, "shop", CHANNELS) as producer:
            assert producer.last_sequence == 40
            await producer.send([("orders-0", b"new")])
        assert [body for _, body in await everything(wal.log, 1)] == [b"new"]

    run_virtual(main())


def test_what_a_closed_producer_does_not_know_it_does_not_call_unsent():
    async def main() -> None:
        log = MemoryLog()
        wal = MemoryWal(log)
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            wal.faults = FaultPlan(1, Rates(unknown=1.0), channels="orders")
            sending = asyncio.create_task(producer.send([("orders-0", b"one")]))
            await elapse(0.01)
            await producer.aclose()
            with pytest.raises(Closed, match="sequence=1") as raised:
                await sending
            assert raised.value.fields["outcome_unknown"]
        async with open_producer(MemoryWal(log), "shop", ["orders-0"]) as producer:
            again = await producer.send([("orders-0", b"one")], sequence=1)
            assert again.repeated
        assert [body for _, body in await everything(log, 1, ["orders-0"])] == [b"one"]

    run_virtual(main())


def test_who_is_overtaken_while_it_opens_is_told_so():
    class HeldUpWal(CutOffWal):
        def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
            self.cut_off = entries[0].channel == "orders-0"
            super().submit(entries, done)

    async def main(clock: VirtualClock) -> None:
        log = MemoryLog()
        wal = HeldUpWal(log)
        overtaken = open_producer(wal, "shop", ["orders-0"], clock=clock_of(clock))
        opening = asyncio.create_task(overtaken.__aenter__())
        await elapse(1.0)
        async with open_producer(MemoryWal(log), "shop", ["orders-0"], clock=clock_of(clock)) as producer:
            wal.back()
            with pytest.raises(Fenced):
                await opening
            await producer.send([("orders-0", b"one")])
        assert [body for _, body in await everything(log, 1, ["orders-0"])] == [b"one"]

    clock = VirtualClock()
    run_virtual(main(clock), clock)


def test_the_newest_takes_over_and_the_older_is_told():
    async def main(clock: VirtualClock) -> None:
        log = MemoryLog()
        async with open_producer(MemoryWal(log), "shop", CHANNELS, clock=clock_of(clock)) as old:
            await old.send([("orders-0", b"old")])
            opened_s = clock.monotonic()
            async with open_producer(MemoryWal(log), "shop", CHANNELS, clock=clock_of(clock)) as new:
                assert clock.monotonic() - opened_s >= LEASE_S, "the older one may acknowledge until its lease is over"
                await new.send([("orders-0", b"new")])
                with pytest.raises(Fenced, match="opened elsewhere"):
                    await old.send([("orders-0", b"late")])
                await new.send([("orders-1", b"newer")])
        assert [body for _, body in await everything(log, 3)] == [b"old", b"new", b"newer"]

    clock = VirtualClock()
    run_virtual(main(clock), clock)


def test_what_is_written_behind_the_fence_of_the_next_is_never_acknowledged():
    """A process that is cut off while it sends, and comes back when another one has its channels."""

    async def main(clock: VirtualClock) -> None:
        log = MemoryLog()
        wal = CutOffWal(log)
        async with open_producer(wal, "shop", CHANNELS, clock=clock_of(clock)) as old:
            await old.send([("orders-0", b"old")])
            wal.cut_off = True
            late = asyncio.create_task(old.send([("orders-0", b"late")], deadline_s=100))
            async with open_producer(MemoryWal(log), "shop", CHANNELS, clock=clock_of(clock)) as new:
                await new.send([("orders-0", b"new")])
                wal.back()
                with pytest.raises(Fenced) as raised:
                    await late
                assert raised.value.fields["outcome_unknown"]
                await new.send([("orders-1", b"newer")])
        found = await everything(log, 3)
        assert [body for _, body in found] == [b"old", b"new", b"newer"]

    clock = VirtualClock()
    run_virtual(main(clock), clock)


def test_no_time_that_was_announced_is_stamped_again():
    """The successor's wall clock is an hour behind: it goes on above the limit of the one before."""

    async def main(clock: VirtualClock) -> None:
        log = MemoryLog()
        async with open_producer(MemoryWal(log), "shop", CHANNELS, clock=clock_of(clock)) as producer:
            first = await producer.send([("orders-0", b"one")])
            await elapse(5.0)
            announced = producer._owner.sync_point().time
            await kill(producer)
            behind = VirtualClock(clock.wall_ms() - 3_600_000)
            behind.monotonic = clock.monotonic  # pyright: ignore[reportAttributeAccessIssue] -- one time for leases
            async with open_producer(MemoryWal(log), "shop", CHANNELS, clock=HybridClock(behind)) as new:
                second = await new.send([("orders-0", b"two")])
        assert first.ts < announced < second.ts

    clock = VirtualClock()
    run_virtual(main(clock), clock)


def test_a_channel_of_another_name_is_refused():
    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            await producer.send([("orders-0", b"one")])
            for _ in range(3):  # an attempt is no claim that the next one could go beyond
                with pytest.raises(InvalidRequest, match="orders-0 belongs to the producer 'shop'"):
                    async with open_producer(wal, "other", ["orders-0", "orders-1"]):
                        pass
            await producer.send([("orders-0", b"two")])
        assert [body for _, body in await everything(wal.log, 2, ["orders-0"])] == [b"one", b"two"]
        async with open_producer(wal, "other", ["orders-1"]) as other:
            assert other.channels == ("orders-1",)
            with pytest.raises(InvalidRequest, match="orders-1 belongs to the producer 'other'"):
                async with open_producer(wal, "shop", CHANNELS):
                    pass
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            assert producer.channels == ("orders-0",)

    run_virtual(main())


def test_who_was_killed_before_it_knew_its_fence_owns_its_channel():
    async def main(clock: VirtualClock) -> None:
        log = MemoryLog()
        producer = Producer(MemoryWal(log), "shop", ["orders-0"], ChannelPolicy(), LEASE_S, clock_of(clock))
        propose = producer._state.propose

        async def refused(event: dict[str, object]) -> None:
            if event["kind"] == "fences":
                raise Unavailable("not now")
            await propose(event)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(producer._state, "propose", refused)
            with pytest.raises(Unavailable):
                await producer.open()
        await producer._state.close()
        async with open_producer(MemoryWal(log), "shop", ["orders-0"], clock=clock_of(clock)) as again:
            await again.send([("orders-0", b"one")])
        assert [body for _, body in await everything(log, 1, ["orders-0"])] == [b"one"]

    clock = VirtualClock()
    run_virtual(main(clock), clock)


def test_a_new_term_that_the_log_does_not_store_at_once_is_stored_later():
    """An append of unknown outcome makes the producer own its channels anew, and that fails half-way."""

    async def main(clock: VirtualClock, fails: str) -> None:
        log = MemoryLog()
        wal = CutOffWal(log)
        async with open_producer(wal, "shop", CHANNELS, clock=clock_of(clock)) as producer:
            propose, kinds = producer._state.propose, list[str]()

            async def once_refused(event: dict[str, object]) -> None:
                kinds.append(str(event["kind"]))
                if kinds.count(fails) == 1 and kinds[-1] == fails:
                    raise Unavailable("not now")
                await propose(event)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(producer._state, "propose", once_refused)
                wal.faults = FaultPlan(1, Rates(unknown=1.0), channels="orders")
                sending = asyncio.create_task(producer.send([("orders-0", b"one")], deadline_s=20))
                await elapse(0.01)
                wal.faults = FaultPlan()
                await sending
                await producer.send([("orders-1", b"two")], deadline_s=5)
                await elapse(LEASE_S)
                assert len(kinds) < 20, "it renews without a pause"
        assert [body for _, body in await everything(log, 2)] == [b"one", b"two"]

    for fails in ("grant", "fences"):
        clock = VirtualClock()
        run_virtual(main(clock, fails), clock)


def test_a_channel_that_was_owned_by_hand_is_refused():
    async def main() -> None:
        wal, clock = MemoryWal(MemoryLog()), HybridClock()
        await wal.create_channel("orders-0", ChannelPolicy())
        owner = ChannelOwner(wal, clock)
        await owner.acquire([ChannelGrant("orders-0", 3, 0, add_ms(clock.now(), 60_000))])
        with pytest.raises(InvalidRequest, match="by a ChannelOwner"):
            async with open_producer(wal, "shop", ["orders-0"]):
                pass

    run_virtual(main())


def test_errors_of_the_log_are_waited_out():
    """Appends that fail, that are there though an error came, and that never were: each batch is there once."""

    async def main() -> None:
        log = MemoryLog()
        plan = FaultPlan(7, Rates(fail=0.1, unknown=0.1, lost=0.1, delay=0.1), channels="orders")
        async with open_producer(MemoryWal(log, plan), "shop", CHANNELS) as producer:
            for number in range(60):
                await producer.send([(CHANNELS[number % 2], str(number).encode())], deadline_s=1000)
        assert [int(body) for _, body in await everything(log, 60)] == list(range(60))
        assert {fault.split(":")[1] for fault in plan.trace} == {"fail", "unknown", "lost", "delay"}

    run_virtual(main())


def test_a_batch_whose_deadline_passes_can_be_sent_again():
    async def main(clock: VirtualClock) -> None:
        log = MemoryLog()
        wal = CutOffWal(log)
        async with open_producer(wal, "shop", CHANNELS, clock=clock_of(clock)) as producer:
            wal.cut_off = True
            with pytest.raises(DeadlineExceeded, match="sequence=1") as raised:
                await producer.send([("orders-0", b"one")], deadline_s=1)
            wal.back()
            assert raised.value.fields["sequence"] == 1
            again = await producer.send([("orders-0", b"one")], sequence=1)
            assert again.repeated or again.ts
        assert [body for _, body in await everything(log, 1)] == [b"one"]
        with pytest.raises(Closed):
            await producer.send([("orders-0", b"two")])

    clock = VirtualClock()
    run_virtual(main(clock), clock)


def test_a_record_of_another_program_in_the_state_does_no_harm():
    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            await producer.send([("orders-0", b"one")])
        await wal.append("producer-shop", b"rubbish")
        await wal.append("producer-shop", encode(Record(RecordType.PRODUCER, body=b"\xc1")))
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            assert producer.last_sequence == 1

    run_virtual(main())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("shop", "orders"), "list"),
        (("shop", []), "has no channel yet"),
        (("", ["orders"]), "needs a name"),
    ],
)
def test_wrong_arguments(arguments, message):
    async def main() -> None:
        with pytest.raises(InvalidRequest, match=message):
            async with open_producer(MemoryWal(MemoryLog()), *arguments):
                pass

    run_virtual(main())


# ---- whose a channel is ---------------------------------------------------------------------------------------------


async def empty(wal: MemoryWal, channel: str) -> None:
    """Remove all entries of a channel, as retention does where nothing is written."""
    latest = await wal.latest_id(channel)
    assert latest is not None
    await wal.truncate(channel, sequence_id(int.from_bytes(latest) + 1))
    assert (await wal.describe(channel)).first_id is None


async def drop_and_give_up(wal: MemoryWal, name: str, channel: str) -> None:
    await wal.drop_channel(channel)
    async with open_producer(wal, name, []) as producer:
        assert channel not in producer.channels


def test_a_channel_that_retention_has_emptied_is_still_its_producers():
    """Nothing in it says whose it is."""

    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            await producer.send([("orders-0", b"one")])
            await elapse(60.0)
            await empty(wal, "orders-0")
            with pytest.raises(InvalidRequest, match="belongs to the producer 'shop'") as raised:
                async with open_producer(wal, "other", ["orders-0"]):
                    pass
            assert (raised.value.fields["channel"], raised.value.fields["owner"]) == ("orders-0", "shop")
            await producer.send([("orders-0", b"two")])
        assert [body for _, body in await everything(wal.log, 1, ["orders-0"])] == [b"two"]

    run_virtual(main())


def test_a_channel_that_was_dropped_is_still_its_producers():
    """An incarnation that runs goes on under its terms, which would hide what another name writes under its own."""

    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            await wal.drop_channel("orders-0")
            with pytest.raises(InvalidRequest, match=r"open_producer\(wal, 'shop', \[\]\)"):
                async with open_producer(wal, "other", ["orders-0"]):
                    pass
            assert "orders-0" not in await wal.channels(), "a producer that is refused makes nothing"
            with pytest.raises(
                ChannelNotFound, match="orders-0 of the producer shop was dropped: open the producer again"
            ):
                await producer.send([("orders-0", b"lost")])
            await wal.create_channel("orders-0", ChannelPolicy())
            with pytest.raises(InvalidRequest, match="belongs to the producer 'shop'"):
                async with open_producer(wal, "other", ["orders-0"]):
                    pass
            await producer.send([("orders-0", b"one")])
        assert [body for _, body in await everything(wal.log, 1, ["orders-0"])] == [b"one"]

    run_virtual(main())


def test_a_producer_whose_channel_is_dropped_while_an_outcome_is_unknown_says_so():
    """It cannot own the channel anew, and ends."""

    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", CHANNELS) as producer:
            wal.faults = FaultPlan(1, Rates(unknown=1.0), channels="orders")
            sending = asyncio.create_task(producer.send([("orders-0", b"one")]))
            await asyncio.sleep(0)
            await wal.drop_channel("orders-0")
            wal.faults = FaultPlan()
            with pytest.raises(ChannelNotFound, match="orders-0 of the producer shop was dropped") as raised:
                await sending
            assert raised.value.fields["outcome_unknown"]
            with pytest.raises(ChannelNotFound, match="orders-0 of the producer shop was dropped"):
                await producer.send([("orders-1", b"two")])
        async with open_producer(wal, "shop", CHANNELS) as producer:
            await producer.send([("orders-0", b"three")])
        assert [body for _, body in await everything(wal.log, 1)] == [b"three"]

    run_virtual(main())


def test_a_channel_that_was_given_up_goes_on_above_all_earlier_terms():
    """A reader drops what comes under a lower term than it knows."""

    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        for _ in range(5):
            async with open_producer(wal, "shop", CHANNELS) as producer:
                await producer.send([("orders-0", b"gone"), ("orders-1", b"kept")])
        term = producer._state.fold.state.channels["orders-0"].term
        await drop_and_give_up(wal, "shop", "orders-0")
        async with open_producer(wal, "other", ["orders-0"]) as other:
            assert other._state.fold.state.channels["orders-0"].term > term
            await other.send([("orders-0", b"others")])
            async with open_producer(wal, "shop", []) as producer:
                assert (producer.channels, producer.last_sequence) == (("orders-1",), 5)
            with pytest.raises(InvalidRequest, match="belongs to the producer 'other'"):
                async with open_producer(wal, "shop", CHANNELS):
                    pass
            await other.send([("orders-0", b"others too")])
        assert [body for _, body in await everything(wal.log, 2, ["orders-0"])] == [b"others", b"others too"]
        await drop_and_give_up(wal, "other", "orders-0")
        async with open_producer(wal, "shop", CHANNELS) as producer:
            await producer.send([("orders-0", b"back")])
        assert [body for _, body in await everything(wal.log, 1, ["orders-0"])] == [b"back"]

    run_virtual(main())


def test_of_names_that_open_at_once_one_has_the_channel():
    async def main(clock: VirtualClock, seed: int) -> None:
        log = MemoryLog()
        opened: list[Producer] = []

        async def run(name: str) -> None:
            plan = FaultPlan(seed, Rates(delay=0.5), channels="")
            async with open_producer(MemoryWal(log, plan), name, ["orders-0"], clock=clock_of(clock)) as producer:
                opened.append(producer)
                await producer.send([("orders-0", name.encode())])
                await asyncio.sleep(5.0)

        results = await asyncio.gather(*(run(name) for name in "abc"), return_exceptions=True)
        assert len(opened) == 1
        assert [type(each) for each in results if each is not None] == [InvalidRequest, InvalidRequest]
        assert [body for _, body in await everything(log, 1, ["orders-0"])] == [opened[0].name.encode()]

    for seed in range(10):
        clock = VirtualClock()
        run_virtual(main(clock, seed), clock)


def test_a_producer_that_is_refused_leaves_the_one_that_is_open_alone():
    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "other", ["orders-1"]), open_producer(wal, "shop", ["orders-0"]) as producer:
            with pytest.raises(InvalidRequest, match="orders-1 belongs to the producer 'other'"):
                async with open_producer(wal, "shop", CHANNELS):
                    pass
            await elapse(LEASE_S)
            await producer.send([("orders-0", b"one")])

    run_virtual(main())


def test_an_incarnation_that_was_replaced_gives_nothing_up():
    """It saw that the channel was gone before the next one made it again."""

    async def main() -> None:
        state = ProducerChannels()
        state.apply({"kind": TAKE, "name": "shop", "incarnation": 1, "channels": ["orders-0"]})
        state.apply({"kind": TAKE, "name": "shop", "incarnation": 2, "channels": ["orders-0"]})
        with pytest.raises(PreconditionFailed):
            state.apply({"kind": GIVE_UP, "name": "shop", "incarnation": 1, "channels": {"orders-0": 7}})
        with pytest.raises(PreconditionFailed):
            state.apply({"kind": TAKE, "name": "other", "incarnation": 9, "channels": ["orders-1", "orders-0"]})
        assert (state.of("shop"), state.of("other")) == (["orders-0"], [])
        state.apply({"kind": GIVE_UP, "name": "shop", "incarnation": 2, "channels": {"orders-0": 7}})
        restored = ProducerChannels()
        restored.restore(msgpack.unpackb(msgpack.packb(state.snapshot())))
        assert (restored.find("orders-0"), restored.of("shop")) == (state.find("orders-0"), [])
        assert restored.find("orders-0").term == 7
        for event in (
            {"kind": "other"},
            {"kind": TAKE},
            {"kind": TAKE, "name": "a", "incarnation": "x", "channels": []},
        ):
            with pytest.raises((BadRecord, FormatTooNew)):
                restored.apply(event)
        with pytest.raises(BadRecord):
            restored.restore([1])

    run_virtual(main())


@pytest.mark.parametrize("steps", range(1, 20))
def test_a_process_that_is_killed_while_it_opens_keeps_no_name_from_its_channels(steps):
    """After any number of steps of the event loop: the name opens again, and what it gives up another name may have."""

    async def main(clock: VirtualClock) -> None:
        log = MemoryLog()
        killed = Producer(CutOffWal(log), "shop", ["orders-0"], ChannelPolicy(), LEASE_S, clock_of(clock))
        opening = asyncio.create_task(killed.open())
        for _ in range(steps):
            await asyncio.sleep(0)
        assert isinstance(killed._wal, CutOffWal)
        killed._wal.cut_off = True
        opening.cancel()
        await asyncio.wait({opening})
        killed._heartbeat.stop()
        if killed._renewing is not None:
            killed._renewing.cancel()
        await killed._state.close()

        wal = MemoryWal(log)
        async with open_producer(wal, "shop", ["orders-0"], clock=clock_of(clock)) as producer:
            await producer.send([("orders-0", b"one")])
        assert [body for _, body in await everything(log, 1, ["orders-0"])] == [b"one"]
        await drop_and_give_up(wal, "shop", "orders-0")
        async with open_producer(wal, "other", ["orders-0"], clock=clock_of(clock)) as other:
            await other.send([("orders-0", b"two")])
        assert [body for _, body in await everything(log, 1, ["orders-0"])] == [b"two"]

    clock = VirtualClock()
    run_virtual(main(clock), clock)


# ---- schedules -------------------------------------------------------------------------------------------------------


class Incarnation:
    """A process with the producer. `acked` are the bodies that it was told to be durable, with their timestamps."""

    def __init__(self, log: MemoryLog, clock: VirtualClock, number: int, plan: FaultPlan) -> None:
        self.wal = CutOffWal(log, plan)
        self.clock = HybridClock(clock)
        self.number = number
        self.acked: list[tuple[int, bytes]] = []
        self.task = asyncio.create_task(self._work())
        self._random = random.Random(number)

    async def _work(self) -> None:
        with suppress(TidewalError):  # the name was opened elsewhere
            async with open_producer(self.wal, "shop", CHANNELS, clock=self.clock) as producer:
                for count in range(1000):
                    body = f"{self.number}.{count}".encode()
                    appended = await producer.send([(self._random.choice(CHANNELS), body)], deadline_s=1000)
                    self.acked.append((appended.ts, body))
                    await asyncio.sleep(self._random.uniform(0, 2))

    async def kill(self) -> None:
        """It vanishes; what it has sent may still arrive."""
        self.wal.cut_off = True
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=0)


async def read_live(log: MemoryLog, end: asyncio.Event) -> list[tuple[int, bytes]]:
    """What a stream hands out while producers come and go; it fails where a record comes behind a time announced."""
    wal = MemoryWal(log)
    for channel in CHANNELS:
        await wal.create_channel(channel, ChannelPolicy())
    stream = open_stream(wal, CHANNELS)
    found: list[tuple[int, bytes]] = []
    ended = asyncio.create_task(end.wait())
    while not end.is_set():
        pack = asyncio.ensure_future(anext(stream))
        await asyncio.wait({pack, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not pack.done():
            pack.cancel()
            break
        found += [(record.ts, bytes(record.body)) for record in pack.result().messages]
    await stream.close()
    return found


STEPS = st.lists(
    st.tuples(st.sampled_from(["open", "cut off", "back", "kill", "wait"]), st.integers(0, 3), st.floats(0.1, 15)),
    max_size=25,
)


@given(steps=STEPS, seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_what_is_acknowledged_is_read_once_in_order_under_any_schedule(steps, seed):
    async def main(clock: VirtualClock) -> None:
        log = MemoryLog()
        live = asyncio.create_task(read_live(log, end := asyncio.Event()))
        plan = FaultPlan(seed, Rates(fail=0.02, unknown=0.02, lost=0.02, delay=0.05), channels="orders")
        running = [Incarnation(log, clock, 0, plan)]
        everyone = list(running)
        await elapse(1.0)
        for action, which, pause_s in steps:
            one = running[which % len(running)]
            if action == "open":
                running.append(Incarnation(log, clock, len(everyone), plan))
                everyone.append(running[-1])
            elif action == "cut off":
                one.wal.cut_off = True
            elif action == "back":
                one.wal.back()
            elif action == "kill" and len(running) > 1:
                running.remove(one)
                await one.kill()
            await elapse(pause_s)
        for one in everyone:  # what was on its way arrives
            one.wal.back()
        last = Incarnation(log, clock, len(everyone), FaultPlan())
        everyone.append(last)
        while not last.acked:
            await elapse(1.0)
        acked = {body: ts for one in everyone for ts, body in one.acked}
        found: list[tuple[int, bytes]] = []
        stream = open_stream(MemoryWal(log), CHANNELS, stalled_after_s=100.0)
        async for pack in stream:
            found += [(record.ts, bytes(record.body)) for record in pack.messages]
            if pack.end_ts >= max(acked.values()):
                break
        await stream.close()
        end.set()
        assert (await live)[: len(found)] == found[: len(await live)], "read otherwise while it was written"
        for one in everyone:
            one.wal.back()
            one.task.cancel()
        await asyncio.gather(*(one.task for one in everyone), return_exceptions=True)
        bodies = [body for _, body in found]
        assert len(set(bodies)) == len(bodies), "read twice"
        assert {body: ts for ts, body in found}.items() >= acked.items(), "acknowledged, and not read"
        assert [ts for ts, _ in found] == sorted(ts for ts, _ in found)
        for number in range(len(everyone)):
            own = [int(body.split(b".")[1]) for body in bodies if body.startswith(b"%d." % number)]
            assert own == sorted(own), "read in another order than sent"

    clock = VirtualClock()
    run_virtual(main(clock), clock)
