"""The schedules that broke a draft of the cluster's design, one after another, as far as they concern state, leases,
evictions and owners. Each ends with all that the checker of the simulation knows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import pytest

from tidewal.runtime.catalog.placement_wishes import CORDONED, PlacementWishes
from tidewal.runtime.clock import physical_ms
from tidewal.runtime.errors import Fenced
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.record import RecordType, decode
from tidewal.runtime.replicated import records
from tidewal.runtime.testing import ClusterPlan, ClusterViolation, Rates, SimulatedCluster, check_cluster, run_virtual
from tidewal.runtime.testing.simulation.node import SimulatedNode

CATALOG, CLUSTER = Names().catalog, Names().cluster
LEASE_S = 3.0
TAKEN_OVER_S = LEASE_S + 2

Schedule = Callable[[SimulatedCluster], Awaitable[None]]


def run_schedule(seed: int, schedule: Schedule, plan: ClusterPlan | None = None) -> SimulatedCluster:
    """Run it over a cluster that works, let the cluster recover, and check everything. The owner of the first channel
    does not lead, and nothing moves for balance."""

    async def main() -> SimulatedCluster:
        cluster = SimulatedCluster(seed, replace(plan or ClusterPlan(), balance=False))
        try:
            await cluster.start()
            other = but(cluster, owner_of(cluster))[0]
            if owner_of(cluster).coordinator.leads:
                await other.catalog.claim(other.incarnation)
            await asyncio.sleep(1)
            await schedule(cluster)
            await cluster.until_owned(cluster.lease_s + 2)
            await cluster.finish(2 * cluster.lease_s + 2)
            await asyncio.sleep(1)
            check_cluster(cluster)
        finally:
            await cluster.stop()
        return cluster

    return run_virtual(main())


def owner_of(cluster: SimulatedCluster, number: int = 0) -> SimulatedNode:
    owner = cluster.owner(cluster.channels[number])
    assert owner is not None
    return owner


def leader_of(cluster: SimulatedCluster) -> SimulatedNode:
    leader = cluster.leader()
    assert leader is not None
    return leader


def but(cluster: SimulatedCluster, *nodes: SimulatedNode) -> list[SimulatedNode]:
    return [node for node in cluster.nodes if node not in nodes]


def terms(node: SimulatedNode) -> dict[str, int]:
    return {name: state.term for name, state in node.catalog.catalog.channels.items()}


def acked(cluster: SimulatedCluster) -> int:
    return sum(1 for _ in cluster.history.of("acked"))


# ---- 1: a claim between decision and append -------------------------------------------------------------------------


def test_1_of_two_leaders_that_grant_the_same_channels_one_counts(seed: int) -> None:
    async def schedule(cluster: SimulatedCluster) -> None:
        first = leader_of(cluster)
        victim, second = but(cluster, first)
        lost = [name for name, state in first.catalog.catalog.channels.items() if state.owner == victim.incarnation]
        assert lost
        before = terms(first)
        others = PlacementWishes().with_node(first.name, CORDONED)  # it could not say that it has a channel
        await first.catalog.append({"kind": "place", "wishes": others.to_wire()})
        cluster.cut(first.name, CATALOG)
        cluster.kill(victim.name)
        await asyncio.sleep(TAKEN_OVER_S)  # the first leader has decided, and its grants are on their way
        await second.catalog.claim(second.incarnation)
        await cluster.until_owned(1)
        cluster.mend(first.name, CATALOG)
        await asyncio.sleep(1)
        for name in lost:
            assert second.catalog.catalog.channels[name].term == before[name] + 1
        with pytest.raises(Fenced):
            await first.catalog.propose({"kind": "noop"})

    run_schedule(seed, schedule)


# ---- 2: renewals around the eviction --------------------------------------------------------------------------------


def test_2_renewals_that_land_behind_the_eviction_and_the_next_grant_count_for_nobody(seed: int) -> None:
    async def schedule(cluster: SimulatedCluster) -> None:
        owner = owner_of(cluster)
        cluster.cut(owner.name, CLUSTER)
        await asyncio.sleep(3 * LEASE_S)
        assert owner_of(cluster) is not owner
        assert not owner.membership.holds()
        cluster.mend(owner.name, CLUSTER)
        await asyncio.sleep(0.1)
        assert owner.membership.fenced is not None or owner.process.dead

    run_schedule(seed, schedule)


@pytest.mark.parametrize("hears", [True, False])
def test_2_a_renewal_that_lands_just_before_the_eviction_is_relied_upon_and_waited_for(seed: int, hears: bool) -> None:
    async def schedule(cluster: SimulatedCluster) -> None:
        owner, missed = owner_of(cluster), asyncio.Event()

        def cut_when_missed(_: float) -> None:
            """What the others decide, once one of them misses the owner, waits."""
            if any(owner.incarnation in other.detector.silent() for other in but(cluster, owner)):
                missed.set()
                for other in but(cluster, owner):
                    cluster.cut(other.name, CLUSTER)

        for other in but(cluster, owner):
            other.membership.on_confirmed(cut_when_missed)
        cluster.cut(owner.name, CLUSTER)
        await asyncio.wait_for(missed.wait(), 2 * LEASE_S)
        await asyncio.sleep(0.3)
        cluster.mend(owner.name, CLUSTER)
        await asyncio.sleep(0.1)
        assert owner.membership.holds(), "late is not lost"
        if not hears:
            cluster.deafen(owner.name, CLUSTER, CATALOG)
        for other in but(cluster, owner):
            cluster.mend(other.name, CLUSTER)
        await asyncio.sleep(1)
        assert owner.incarnation not in but(cluster, owner)[0].cluster.cluster.members
        assert owner.membership.holds() is not hears
        await asyncio.sleep(TAKEN_OVER_S)
        cluster.undeafen(owner.name)

    run_schedule(seed, schedule)


# ---- 3: owners that stand still -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lands", ["before the pause", "in the pause", "after the next fence"])
def test_3_an_owner_that_was_paused_for_longer_than_its_lease_acknowledges_nothing(seed: int, lands: str) -> None:
    async def schedule(cluster: SimulatedCluster) -> None:
        channel, owner = cluster.channels[0], owner_of(cluster)
        cluster.cut(owner.name, channel)
        await asyncio.sleep(0.9)  # an append of the client is under way
        if lands == "before the pause":
            owner.process.pause()  # its result has arrived, and is not seen yet
            cluster.mend(owner.name, channel)
        else:
            cluster.pause(owner.name)
        await asyncio.sleep(0.1)
        if lands == "in the pause":
            cluster.mend(owner.name, channel)
        await asyncio.sleep(2 * LEASE_S)
        assert owner_of(cluster) is not owner
        cluster.mend(owner.name, channel)
        cluster.resume(owner.name)

    run_schedule(seed, schedule, ClusterPlan(interval_s=0.1))


CLOCK_FREE = "an append rests on the clock: the owner does not look for other records between two of its own yet"


@pytest.mark.parametrize(
    "rate", [pytest.param(0.0, id="stands still"), pytest.param(0.5, id="runs at half rate"), 0.95]
)
def test_3_what_a_clock_does_to_an_owner_that_reads_nothing(
    seed: int, rate: float, request: pytest.FixtureRequest
) -> None:
    if rate < 0.9:
        request.applymarker(pytest.mark.xfail(raises=ClusterViolation, strict=True, reason=CLOCK_FREE))

    async def schedule(cluster: SimulatedCluster) -> None:
        owner = owner_of(cluster)
        cluster.clock(owner.name).run_at(rate)
        cluster.cut(owner.name, CLUSTER)
        cluster.deafen(owner.name, CLUSTER, CATALOG)
        await asyncio.sleep(2 * LEASE_S)
        cluster.clock(owner.name).run_at(1)
        cluster.mend(owner.name, CLUSTER)
        cluster.undeafen(owner.name)

    run_schedule(seed, schedule, ClusterPlan(interval_s=0.1))


# ---- 4: leases of different length ----------------------------------------------------------------------------------


def test_4_the_lease_is_changed_node_by_node_while_others_write(seed: int) -> None:
    async def schedule(cluster: SimulatedCluster) -> None:
        for name in cluster.names:
            cluster.kill(name)
            await asyncio.sleep(0.5)
            cluster.start_node(name, lease_s=2.0)
            began_s = asyncio.get_running_loop().time()
            await cluster.until_owned(10.0 + 2)
            passed_s = asyncio.get_running_loop().time() - began_s
            assert passed_s > 8, "the lease that the node before it stated is waited for"
        cluster.kill(cluster.names[0])
        await asyncio.sleep(0.1)
        await cluster.until_owned(2.0 + 2)
        cluster.start_node(cluster.names[0])

    run_schedule(seed, schedule, ClusterPlan(leases_s=(10.0,)))


# ---- 5: an outage ---------------------------------------------------------------------------------------------------


def test_5_a_stall_of_the_members_log_evicts_nobody_and_all_acknowledgements_come(seed: int) -> None:
    async def schedule(cluster: SimulatedCluster) -> None:
        node, before = cluster.nodes[0], terms(cluster.nodes[0])
        cluster.stall(CLUSTER)
        await asyncio.sleep(LEASE_S + 0.5)
        lapsed = acked(cluster)
        assert not any(each.membership.holds() for each in cluster.nodes)
        await asyncio.sleep(LEASE_S)
        assert acked(cluster) == lapsed, "without a lease nothing is acknowledged"
        cluster.go_on(CLUSTER)
        await asyncio.sleep(2)
        assert node.cluster.cluster.gone == {}
        assert terms(node) == before
        assert acked(cluster) > lapsed

    cluster = run_schedule(seed, schedule)
    assert all(event.term in (0, 1) for event in cluster.history.of("acked"))


# ---- 6: a leader that sleeps ----------------------------------------------------------------------------------------


def test_6_what_a_leader_writes_that_slept_over_its_successor_does_no_harm(seed: int) -> None:
    async def schedule(cluster: SimulatedCluster) -> None:
        old = leader_of(cluster)
        cluster.cut(old.name, CLUSTER)
        cluster.deafen(old.name, CLUSTER, CATALOG)
        await asyncio.sleep(3 * LEASE_S)
        [new] = [node for node in but(cluster, old) if node.coordinator.leads]
        before = terms(new)
        channel = cluster.channels[0]
        grant = {"kind": "grant", "node": old.incarnation, "channels": {channel: (2, 1)}, "limit": 2**62}
        granted = old.process.spawn(old.catalog.propose(grant))
        for log in (old.catalog, old.cluster):
            snapshot = old.process.spawn(log.snapshot())  # as of what it had read, and truncates to there
            cluster.mend(old.name, CLUSTER)
            await asyncio.sleep(0.1)
            assert snapshot.done()
        cluster.undeafen(old.name)
        await asyncio.wait([granted])
        await asyncio.sleep(0.5)
        assert terms(new) == before
        cluster.kill(new.name)
        cluster.start_node(new.name)

    run_schedule(seed, schedule)


# ---- 7: snapshots with others' records between ----------------------------------------------------------------------


@pytest.mark.parametrize("channel", [CATALOG, CLUSTER])
def test_7_what_lands_between_a_snapshot_and_its_record_is_in_the_state_of_who_begins_there(
    seed: int, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "PAGE_BYTES", 64)

    async def schedule(cluster: SimulatedCluster) -> None:
        leader = leader_of(cluster)
        victim, other = but(cluster, leader)
        log = leader.catalog if channel == CATALOG else leader.cluster
        for _ in range(3):  # more pages than one at a time, each with others' records before it
            cluster.cut(leader.name, channel)
            snapshot = leader.process.spawn(log.snapshot())
            await asyncio.sleep(1)
            cluster.mend(leader.name, channel)
            await asyncio.wait([snapshot], timeout=0.01)
        cluster.cut(leader.name, channel)
        torn = leader.process.spawn(log.snapshot())
        cluster.kill(victim.name)
        await other.catalog.claim(other.incarnation)
        await asyncio.sleep(TAKEN_OVER_S)
        cluster.mend(leader.name, channel)
        await asyncio.wait([torn], timeout=1)
        late = cluster.start_node(victim.name)
        await asyncio.sleep(1)
        for each in but(cluster, late):
            assert late.cluster.fold.snapshot() == each.cluster.fold.snapshot()
            assert late.catalog.fold.snapshot() == each.catalog.fold.snapshot()

    run_schedule(seed, schedule)


# ---- 8: a release of unknown outcome --------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [Rates(unknown=1.0), Rates(lost=1.0)], ids=["landed", "lost"])
def test_8_a_node_takes_no_appends_while_it_does_not_know_whether_its_release_counts(seed: int, rates: Rates) -> None:
    async def schedule(cluster: SimulatedCluster) -> None:
        owner = owner_of(cluster)
        before = terms(owner)
        cluster.cut(owner.name, CATALOG)
        cluster.leave(owner.name)
        await asyncio.sleep(0.5)
        assert owner.wal.faults is not None
        owner.wal.faults.rates = rates
        cluster.mend(owner.name, CATALOG)
        for _ in range(20):
            await asyncio.sleep(0.05)
            assert not any(owner.promises(channel) for channel in cluster.channels)
        owner.wal.faults.rates = Rates()
        await cluster.until_owned(2)
        state = but(cluster, owner)[0].catalog.catalog.channels[cluster.channels[0]]
        assert state.term > before[cluster.channels[0]]
        assert physical_ms(state.previous_limit) <= physical_ms(owner.hybrid.last)
        cluster.start_node(owner.name)

    run_schedule(seed, schedule)


# ---- 9: owners that die while they take over ------------------------------------------------------------------------


def test_9_owners_that_die_between_fence_and_fenced_three_times_reserve_no_time(seed: int) -> None:
    async def schedule(cluster: SimulatedCluster) -> None:
        [channel] = cluster.channels
        dying = owner_of(cluster)
        cluster.cut(dying.name, channel)
        await asyncio.sleep(0.5)  # the outcome of a client's append is unknown
        for before in (1, 2, 3):
            cluster.stall(channel)
            cluster.kill(dying.name)
            cluster.mend(dying.name, channel)
            cluster.start_node(dying.name, has_lock=True)
            async with asyncio.timeout(TAKEN_OVER_S):
                while leader_of(cluster).catalog.catalog.channels[channel].term == before:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            state = leader_of(cluster).catalog.catalog.channels[channel]
            [dying] = [node for node in cluster.nodes if node.incarnation == state.owner]
            cluster.cut(dying.name, CATALOG)
            cluster.go_on(channel)
            await asyncio.sleep(0.2)
            assert fences_of(cluster, channel)[-1] == before + 1
            assert before + 1 not in state.fences
        cluster.kill(dying.name)
        cluster.mend(dying.name, CATALOG)  # its `fenced` lands behind it
        cluster.start_node(dying.name, has_lock=True)
        await cluster.until_owned(TAKEN_OVER_S)
        assert terms(leader_of(cluster)) == {channel: 5}
        assert cluster.clock_ahead_ms() <= LEASE_S * 1000 + 100, "as after one failure"

    run_schedule(seed, schedule, ClusterPlan(channels=1))


def fences_of(cluster: SimulatedCluster, channel: str) -> list[int]:
    """The terms of the fences in a channel."""
    found = (decode(entry.payload, entry.id) for entry in cluster.log.channels[channel].entries)
    return [record.term for record in found if record.type is RecordType.FENCE]


# ---- 18: clocks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leads", ["the fastest", "the slowest"])
def test_18_clocks_that_are_seconds_and_an_hour_apart(seed: int, leads: str) -> None:
    async def schedule(cluster: SimulatedCluster) -> None:
        leader = leader_of(cluster)
        second, third = but(cluster, leader)
        fast, slow = (leader, second) if leads == "the fastest" else (second, leader)
        cluster.clock(fast.name).jump_wall(9_000)
        cluster.clock(slow.name).jump_wall(-15_000)
        cluster.ahead_ms = 9_000
        await asyncio.sleep(2 * LEASE_S)
        assert terms(leader) == dict.fromkeys(cluster.channels, 1), "clocks end no ownership"
        for node in (third, leader):
            cluster.kill(node.name)
            await asyncio.sleep(0.1)
            await cluster.until_owned(TAKEN_OVER_S)
            cluster.start_node(node.name)
            await asyncio.sleep(1)
        cluster.clock(fast.name).jump_wall(-3_600_000)
        await asyncio.sleep(LEASE_S)

    run_schedule(seed, partial(schedule))
