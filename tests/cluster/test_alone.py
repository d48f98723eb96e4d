"""A member that has the cluster to itself renews its lease without a record, and nobody takes it for over too early."""

from __future__ import annotations

import asyncio

from tests.cluster.test_leases import Process, process, renewing
from tidewal.runtime.cluster.detector import MARGIN
from tidewal.runtime.testing.clock import VirtualClock, run_virtual
from tidewal.runtime.testing.memory import MemoryLog

LEASE_S = 3.0


def records(a: Process) -> int:
    return len(a.wal.log.channels[a.log.channel].entries)


def test_a_member_alone_stores_nothing_and_keeps_its_lease() -> None:
    async def main() -> None:
        async with process(MemoryLog(), "a-1", unwritten=True) as a:
            await a.membership.join()
            before = records(a)
            for _ in range(20):
                await renewing(1, a)
                assert a.membership.holds()
            assert records(a) == before

    run_virtual(main(), VirtualClock())


def test_the_lease_of_a_member_alone_ends_where_it_does_not_look() -> None:
    async def main() -> None:
        async with process(MemoryLog(), "a-1", unwritten=True) as a:
            await a.membership.join()
            await renewing(5, a)
            await asyncio.sleep(LEASE_S)
            assert not a.membership.holds()
            await renewing(1, a)
            assert a.membership.holds()

    run_virtual(main(), VirtualClock())


def test_it_stores_its_renewals_once_there_is_another_one_and_stops_when_that_has_left() -> None:
    async def main() -> None:
        log = MemoryLog()
        async with process(log, "a-1", unwritten=True) as a, process(log, "b-1", unwritten=True) as b:
            await a.membership.join()
            await renewing(2, a)
            await b.membership.join()
            await renewing(10, a, b)
            assert not b.silent(a), "it is heard"
            assert a.membership.holds()
            await b.membership.leave()
            before = records(a)
            await renewing(5, a)
            assert records(a) == before
            assert a.membership.holds()

    run_virtual(main(), VirtualClock())


def test_who_was_alone_is_over_only_when_its_last_look_is_a_lease_ago() -> None:
    """The other one has followed the log for long before it joined: it has read of the first one long ago, and counts
    from its own registration all the same."""

    async def main() -> None:
        log = MemoryLog()
        async with process(log, "a-1", unwritten=True) as a, process(log, "b-1") as b:
            await a.membership.join()
            await renewing(20, a)
            looked_s = asyncio.get_running_loop().time()
            a.membership.renew()
            await asyncio.sleep(0)  # its look; then it says nothing more
            await asyncio.sleep(0.01)
            await b.membership.join()
            evicted = False
            while not (evicted and b.over(a)):
                b.membership.renew()
                await asyncio.sleep(0.25)
                if not evicted and b.silent(a):
                    await b.evict(a)
                    evicted = True
                if evicted and b.over(a):
                    break
            assert asyncio.get_running_loop().time() - looked_s >= LEASE_S * (1 + MARGIN) - 0.01
            assert not a.membership.holds()

    run_virtual(main(), VirtualClock())


def test_an_eviction_right_after_another_one_has_joined_lets_nobody_have_the_channels_at_once() -> None:
    async def main() -> None:
        log = MemoryLog()
        async with process(log, "a-1", unwritten=True) as a, process(log, "b-1") as b:
            await a.membership.join()
            await renewing(20, a)
            b.wal.stalled = False
            await b.membership.join()
            joined_s = asyncio.get_running_loop().time()
            await b.evict(a)
            while not b.over(a):  # noqa: ASYNC110 -- leases have no event
                await asyncio.sleep(0.05)
            assert asyncio.get_running_loop().time() - joined_s >= LEASE_S * (1 + MARGIN) - 0.1

    run_virtual(main(), VirtualClock())
