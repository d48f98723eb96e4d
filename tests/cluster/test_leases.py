"""The lease of a node, and when others may take it for over: by records alone, and each by its own clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from tidewal.runtime.clock import HybridClock
from tidewal.runtime.cluster.cluster_log import ClusterLog
from tidewal.runtime.cluster.detector import SilenceDetector
from tidewal.runtime.cluster.membership import NodeMembership
from tidewal.runtime.cluster.state import NodeMember
from tidewal.runtime.errors import Fenced, PreconditionFailed, TidewalError, Unavailable
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.wal import Append, OnAppended
from tidewal.runtime.testing.clock import VirtualClock, run_virtual
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal
from tidewal.runtime.testing.simulation.process import NodeClock


class StallingWal(MemoryWal):
    """While `stalled`, appends wait until `go_on`; `unknown` of them land, and say that their outcome is unknown. While
    `mute`, who asks for the end of a channel waits."""

    stalled = mute = False
    unknown = 0

    def __init__(self, log: MemoryLog) -> None:
        super().__init__(log)
        self.held: list[Callable[[], None]] = []

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        if self.stalled:
            self.held.append(partial(super().submit, list(entries), done))
        elif self.unknown:
            self.unknown -= 1
            super().submit(entries, lambda _: done(Unavailable("no answer", outcome_unknown=True)))
        else:
            super().submit(entries, done)

    async def latest_id(self, channel: str) -> bytes | None:
        while self.mute:  # noqa: ASYNC110 -- a simulated network has no event
            await asyncio.sleep(0.1)
        return await super().latest_id(channel)

    def go_on(self) -> None:
        self.stalled = False
        held, self.held = self.held, []
        for append in held:
            append()


@dataclass
class Process:
    wal: StallingWal
    clock: NodeClock
    log: ClusterLog
    membership: NodeMembership
    detector: SilenceDetector

    async def evict(self, other: Process) -> None:
        await self.log.propose({"kind": "evict", "incarnation": other.membership.member.incarnation})

    def silent(self, other: Process) -> bool:
        return other.membership.member.incarnation in self.detector.silent()

    def over(self, other: Process) -> bool:
        return self.detector.is_over(other.membership.member.incarnation)


@asynccontextmanager
async def process(log: MemoryLog, name: str, *, lease_s: float = 3.0, **options: object) -> AsyncIterator[Process]:
    clock = NodeClock(asyncio.get_running_loop().clock)
    wal = StallingWal(log)
    cluster = ClusterLog(wal, Names(), HybridClock(clock), name)
    member = NodeMember(name, name.split("-")[0], ("mixcoord",), int(lease_s * 1000))
    membership = NodeMembership(cluster, clock, member, **options)
    made = Process(wal, clock, cluster, membership, SilenceDetector(cluster, membership, clock))
    await cluster.open()
    yield made
    await cluster.close()


def with_processes(test: Callable[..., Awaitable[None]], *names: str) -> Callable[[], None]:
    """A test with these processes, which have joined."""

    def run() -> None:
        async def main() -> None:
            log = MemoryLog()
            async with joined_processes(log, names) as made:
                for each in made:
                    await each.membership.join()
                await test(*made)

        run_virtual(main(), VirtualClock())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@asynccontextmanager
async def joined_processes(log: MemoryLog, names: Sequence[str]) -> AsyncIterator[list[Process]]:
    if not names:
        yield []
        return
    async with process(log, names[0]) as first, joined_processes(log, names[1:]) as others:
        yield [first, *others]


def of(*names: str) -> Callable[[Callable[..., Awaitable[None]]], Callable[[], None]]:
    return lambda test: with_processes(test, *names)


async def renewing(seconds: float, *processes: Process) -> None:
    """Each renews every second."""
    for _ in range(round(seconds)):
        for each in processes:
            each.membership.renew()
        await asyncio.sleep(1)


@of("a-1")
async def test_a_lease_holds_for_its_duration_from_when_it_was_asked_for(a: Process) -> None:
    assert a.membership.holds()
    await asyncio.sleep(2)
    a.wal.stalled = True
    a.membership.renew()
    await asyncio.sleep(0.9)
    assert a.membership.holds()
    await asyncio.sleep(0.2)
    assert not a.membership.holds(), "what was only asked for is no lease"
    a.wal.go_on()
    await a.log.changed()
    assert a.membership.holds(), "late is not lost"
    await asyncio.sleep(1.8)
    assert a.membership.holds(), "from when it was asked for: at 2 s"
    await asyncio.sleep(0.2)
    assert not a.membership.holds()


@of("a-1", "b-1")
async def test_a_renewal_counts_before_the_eviction_and_never_behind_it(a: Process, b: Process) -> None:
    await asyncio.sleep(2)
    b.wal.stalled = True
    b.membership.renew()
    await a.evict(b)
    b.wal.go_on()
    error = await b.membership.until_fenced()
    assert isinstance(error, Fenced)
    await asyncio.sleep(0.5)
    assert not b.membership.holds()
    assert "b-1" not in a.log.cluster.members
    with pytest.raises(Fenced):
        await b.membership.join()


@of("a-1", "b-1")
async def test_a_renewal_that_lands_just_before_the_eviction_is_waited_for(a: Process, b: Process) -> None:
    await asyncio.sleep(2)
    b.membership.renew()
    await a.evict(b)
    await asyncio.sleep(3.2)
    assert not a.over(b), "3 s and a tenth of them, from the reading of the renewal at 2 s"
    await asyncio.sleep(0.2)
    assert a.over(b)


@of("a-1", "b-1")
async def test_a_renewal_that_is_late_by_three_leases_changes_nothing(a: Process, b: Process) -> None:
    b.wal.stalled = True
    b.membership.renew()
    await renewing(4, a)
    assert a.silent(b)
    await a.evict(b)
    await renewing(5, a)
    assert a.over(b)
    b.wal.go_on()
    await asyncio.sleep(0.1)
    assert a.over(b)
    assert not b.membership.holds()
    assert b.membership.fenced is not None


@of("a-1", "b-1")
async def test_a_node_that_leaves_is_waited_for_by_nobody(a: Process, b: Process) -> None:
    await b.membership.leave()
    await a.log.catch_up()
    assert a.over(b)
    assert not b.membership.holds()


@of("a-1")
async def test_a_clock_that_counts_suspended_time_ends_the_lease(a: Process) -> None:
    asyncio.get_running_loop().clock.suspend(3.5)
    assert not a.membership.holds()


@of("a-1", "b-1")
async def test_a_silent_node_is_found_within_a_lease_and_a_renewal(a: Process, b: Process) -> None:
    b.membership.renew()
    heard_s = a.clock.monotonic()
    while not a.silent(b):
        a.membership.renew()
        await asyncio.sleep(1)
    assert 3 <= a.clock.monotonic() - heard_s <= 5


@of("a-1", "b-1")
async def test_an_outage_of_the_log_makes_nobody_silent(a: Process, b: Process) -> None:
    """Both renew on, nothing lands for two leases, then all does."""
    await renewing(2, a, b)
    a.wal.stalled = b.wal.stalled = True
    for _ in range(6):
        await renewing(1, a, b)
        assert not a.silent(b)
    assert not a.membership.holds()
    a.wal.go_on()
    await asyncio.sleep(0.1)
    assert not a.silent(b), "its own records came back late"
    b.wal.go_on()
    await renewing(3, a, b)
    assert not a.silent(b)
    assert a.membership.holds()
    assert b.membership.holds()


@of("a-1", "b-1")
async def test_whom_the_log_answers_last_after_an_outage_is_not_silent(a: Process, b: Process) -> None:
    """It asked for the end of the log long ago; it renews as soon as it has read that and asked anew."""

    async def renewing_late() -> None:
        await asyncio.sleep(0.9)
        await renewing(30, b)

    tasks = [asyncio.ensure_future(renewing(30, a)), asyncio.ensure_future(renewing_late())]
    await asyncio.sleep(10)
    a.wal.stalled = b.wal.stalled = a.wal.mute = b.wal.mute = True
    await asyncio.sleep(10)
    a.wal.mute = False
    a.wal.go_on()
    b.wal.go_on()
    await asyncio.sleep(2)
    b.wal.mute = False
    for _ in range(30):
        assert not a.silent(b)
        await asyncio.sleep(0.1)
    assert b.membership.holds()
    await asyncio.gather(*tasks)


@of("a-1", "b-1")
async def test_time_in_which_the_observer_stood_still_makes_nobody_silent(a: Process, b: Process) -> None:
    asyncio.get_running_loop().clock.suspend(60)
    a.membership.renew()
    await asyncio.sleep(0.1)
    assert not a.silent(b)


@of("a-1")
async def test_an_observer_that_has_just_started_finds_nobody_missing_before_a_lease(a: Process) -> None:
    await asyncio.sleep(60)
    async with process(a.wal.log, "late-1") as late:
        await late.membership.join()
        await renewing(2, late)
        assert not late.silent(a)
        await renewing(3, late)
        assert late.silent(a)
        assert not late.over(a), "it was not evicted"


@of("a-1", "b-1")
async def test_one_that_reads_an_eviction_anew_counts_from_its_own_reading(a: Process, b: Process) -> None:
    await a.evict(b)
    await asyncio.sleep(60)
    async with process(a.wal.log, "late-1") as late:
        await late.membership.join()
        assert a.over(b)
        assert not late.over(b)
        await asyncio.sleep(3.4)
        assert late.over(b)


@of("a-1")
async def test_of_an_owner_that_is_unknown_the_time_since_it_was_asked_about_must_be_observed(a: Process) -> None:
    assert not a.detector.is_over("unknown-1")
    a.wal.stalled = True
    await renewing(20, a)
    assert not a.detector.is_over("unknown-1"), "its registration may stand where this process has not read yet"
    a.wal.go_on()
    await renewing(12, a)
    assert a.detector.is_over("unknown-1"), "ten seconds: the longest lease that any process relies on unseen"


@of("a-1")
async def test_a_restarted_node_with_the_lock_of_its_name_needs_no_wait(a: Process) -> None:
    async with process(a.wal.log, "a-2") as again, process(a.wal.log, "b-1") as b:
        await again.membership.join(replaces="a-1")
        await b.membership.join()
        assert b.over(a)
        assert a.membership.fenced is not None
        assert again.membership.holds()


@of("a-1")
async def test_leases_of_different_length_are_each_waited_for_as_they_were_stated(a: Process) -> None:
    async with process(a.wal.log, "long-1", lease_s=10) as long, process(a.wal.log, "short-1", lease_s=2) as short:
        await long.membership.join()
        await short.membership.join()
        await renewing(4, a)
        assert (a.silent(short), a.silent(long)) == (True, False)
        for each in (short, long):
            await a.evict(each)
        assert (a.over(short), a.over(long)) == (True, False)
        await asyncio.sleep(6.5)
        assert not long.membership.holds()
        assert not a.over(long)
        await asyncio.sleep(0.6)
        assert a.over(long)


@of("a-1")
async def test_a_registration_of_unknown_outcome_is_found_again(a: Process) -> None:
    async with process(a.wal.log, "b-1") as b:
        b.wal.unknown = 2  # the registration, and the record behind it
        await b.membership.join()
        assert b.membership.holds()
        assert list(b.log.cluster.members) == ["a-1", "b-1"]


@of("a-1")
async def test_a_process_whose_loop_hangs_does_not_renew(a: Process) -> None:
    hanging = [False]
    async with process(a.wal.log, "b-1", may_renew=lambda: not hanging[0]) as b:
        await b.membership.join()
        await renewing(4, a, b)
        assert b.membership.holds()
        hanging[0] = True
        await renewing(4, a, b)
        assert not b.membership.holds()
        assert a.silent(b)


@of("a-1", "b-1")
async def test_an_eviction_that_two_coordinators_write_counts_once(a: Process, b: Process) -> None:
    async with process(a.wal.log, "c-1") as c:
        await c.membership.join()
        results = await asyncio.gather(a.evict(b), c.evict(b), return_exceptions=True)
        assert sorted(type(each) for each in results if isinstance(each, TidewalError)) == [PreconditionFailed]
