"""A named producer: what it acknowledges is read once and in order, however its incarnations come and go."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.named_producers import CHANNELS, LEASE_S, CutOffWal, clock_of, everything, kill
from tidewal.runtime.clock import HybridClock
from tidewal.runtime.errors import (
    Closed,
    DeadlineExceeded,
    Fenced,
    InvalidRequest,
    OutcomeUnknown,
    TidewalError,
    Unavailable,
)
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.log.wal import Append, ChannelPolicy, OnAppended
from tidewal.runtime.ownership.producer import open_producer
from tidewal.runtime.streams.open_stream import open_stream
from tidewal.runtime.testing.clock import VirtualClock, elapse, run_virtual
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal


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
            announced = (await producer._owner.sync()).time
            await kill(producer)
            behind = VirtualClock(clock.wall_ms() - 3_600_000)
            behind.monotonic = clock.monotonic  # pyright: ignore[reportAttributeAccessIssue] -- one time for leases
            async with open_producer(MemoryWal(log), "shop", CHANNELS, clock=HybridClock(behind)) as new:
                second = await new.send([("orders-0", b"two")])
        assert first.ts < announced < second.ts

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


def test_errors_of_the_log_are_waited_out():
    """Appends that fail, that are there though an error came, and that never were: each batch is there once."""

    async def main(clock: VirtualClock) -> None:
        log = MemoryLog()
        plan = FaultPlan(7, Rates(fail=0.1, unknown=0.1, lost=0.1, delay=0.1), channels="orders")
        async with open_producer(MemoryWal(log, plan), "shop", CHANNELS, clock=clock_of(clock)) as producer:
            for number in range(60):
                await producer.send([(CHANNELS[number % 2], str(number).encode())], deadline_s=1000)
        assert [int(body) for _, body in await everything(log, 60)] == list(range(60))
        assert {fault.split(":")[1] for fault in plan.trace} == {"fail", "unknown", "lost", "delay"}

    clock = VirtualClock()
    run_virtual(main(clock), clock)


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
