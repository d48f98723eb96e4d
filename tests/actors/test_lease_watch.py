"""Leases of nodes, as a migration waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from tidewal.runtime.clock import HybridClock
from tidewal.runtime.cluster.cluster_log import ClusterLog
from tidewal.runtime.cluster.detector import MARGIN
from tidewal.runtime.cluster.state import EVICTED, NodeMember
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.wal import Entry, Start
from tidewal.runtime.migration.lease_watch import LeaseWatch
from tidewal.runtime.testing.clock import VirtualLoop
from tidewal.runtime.testing.memory import MemoryWal

LEASE_S = 10.0

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.usefixtures("home")]


@asynccontextmanager
async def cluster_of(*names: str) -> AsyncIterator[tuple[MemoryWal, ClusterLog, LeaseWatch]]:
    """A log with members of these names, and what a migration knows of them."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    wal = MemoryWal()
    log = ClusterLog(wal, Names("by-dev"), HybridClock(loop.clock), "test")
    await log.open()
    try:
        for name in names:
            member = NodeMember(name, name, ("proxy",), round(1000 * LEASE_S), number=1)
            await log.propose({"kind": "register", **member.to_wire(), "replaces": ""})
        yield wal, log, LeaseWatch(wal, loop.clock)
    finally:
        await log.close()


async def waited_s(leases: LeaseWatch) -> float:
    began_s = asyncio.get_running_loop().time()
    await leases.over()
    return asyncio.get_running_loop().time() - began_s


async def test_a_member_that_renews_is_not_evicted_and_a_silent_one_is_waited_for() -> None:
    async with cluster_of("renews", "silent") as (_, log, leases):
        for number in range(2, 15):
            await leases.end_silent()
            await asyncio.sleep(1)
            renewal = {"kind": "renew", "incarnation": "renews", "number": number, "report": {}}
            await log.propose(renewal)
            if number < 1 + LEASE_S * (1 + MARGIN):
                assert log.cluster.members.keys() == {"renews", "silent"}
        assert log.cluster.members.keys() == {"renews"}
        assert log.cluster.gone["silent"].how == EVICTED
        passed_s = 13 - round(LEASE_S * (1 + MARGIN))
        assert await waited_s(leases) == pytest.approx(LEASE_S * (1 + MARGIN) - passed_s, abs=1.01)
        assert not await waited_s(leases)


class SlowWal(MemoryWal):
    """A log that answers a look after `delay_s`."""

    delay_s = 0.0

    async def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        async for entries in super().read(channel, start):
            await asyncio.sleep(self.delay_s)
            yield entries


async def test_a_member_is_not_evicted_for_what_a_slow_look_has_not_seen() -> None:
    async with cluster_of("renews") as (wal, log, _):
        slow = SlowWal(wal.log)
        leases = LeaseWatch(slow)
        await leases.look()
        slow.delay_s = 2 * LEASE_S
        await leases.end_silent()
        assert log.cluster.members.keys() == {"renews"}


async def test_who_was_evicted_by_others_is_waited_for_and_who_has_left_is_not() -> None:
    async with cluster_of("evicted", "left") as (_, log, leases):
        await log.propose({"kind": "leave", "incarnation": "left"})
        await leases.look()
        assert not await waited_s(leases)
        await log.propose({"kind": "evict", "incarnation": "evicted"})
        await leases.look()
        await asyncio.sleep(3)
        await leases.look()
        assert await waited_s(leases) == pytest.approx(LEASE_S * (1 + MARGIN) - 3)


async def test_a_log_without_a_cluster_has_none() -> None:
    leases = LeaseWatch(MemoryWal())
    await leases.end_silent()
    assert not await waited_s(leases)
