"""Faults for a simulated cluster, drawn from its seed; then quiet, and the checks."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from ...log.names import Names
from ..clock import run_virtual
from ..faults import Rates
from .checker import ClusterViolation, check_cluster
from .cluster import LOOK_S, ClusterPlan, SimulatedCluster
from .history import ClusterHistory

PROMPT_S = 2.0  # more than a lease, after the last fault: by then each channel has an owner
JUMP_MS = 10_000
RATES = (0.96, 1.04)  # of clocks: further apart than this, the margin of leases does not cover them


class FaultDriver:
    """Does one thing after another to a cluster, several at a time: kills, stops, clocks that are set and run at other
    rates, nodes that are cut off from their lease, stalls of the state channels for up to two leases, appends that
    fail, land late, or have an unknown outcome, readers that lag, nodes that leave, channels that move, and nodes that
    change their version where there are several."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._rng = random.Random(cluster.rng.random())
        self._lease_s = cluster.lease_s
        self._under_way: list[asyncio.Task[None]] = []

    async def run(self, faults_s: float) -> None:
        """Let faults happen for so many seconds, and end them all."""
        loop, rng = asyncio.get_running_loop(), self._rng
        ends_s = loop.time() + faults_s
        faults = [
            self._kill,
            self._kill,
            self._pause,
            self._pause,
            self._stall,
            self._cut,
            self._cut,
            self._clock,
            self._append,
            self._leave,
            self._move,
            self._move,
        ]
        if len(self._cluster.plan.versions) > 1:
            faults.append(self._change_version)
        while loop.time() < ends_s:
            fault = rng.choice(faults)
            self._under_way.append(asyncio.create_task(fault()))
            await asyncio.sleep(rng.uniform(0.1, 3))
        await self._end()

    async def _end(self) -> None:
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        cluster = self._cluster
        cluster.set_rates(Rates())
        cluster.faults.late = cluster.faults.lag = 0.0
        for name in cluster.names:
            cluster.mend(name, Names().cluster)
            cluster.undeafen(name)
            cluster.resume(name)
        for channel in sorted(cluster.faults.stalled):
            cluster.go_on(channel)
        while cluster.faults.landing or cluster.leaving:  # noqa: ASYNC110 -- a renewal of a dead node may be on its way
            await asyncio.sleep(0.1)
        for name in cluster.names:
            if cluster.node(name).process.dead:
                cluster.start_node(name, has_lock=self._rng.random() < 0.5)
        cluster.note("no more faults")

    def _node(self) -> str | None:
        """A node that runs."""
        running = [name for name in self._cluster.names if self._cluster.node(name).process.running]
        return self._rng.choice(running) if running else None

    async def _kill(self) -> None:
        if name := self._node():
            self._cluster.kill(name)
            await self._restart(name)

    async def _restart(self, name: str) -> None:
        await asyncio.sleep(self._rng.choice([0.1, self._lease_s, 3 * self._lease_s]) * self._rng.random())
        if self._cluster.node(name).process.dead:
            self._cluster.start_node(name, has_lock=self._rng.random() < 0.5)

    async def _leave(self) -> None:
        if name := self._node():
            self._cluster.leave(name)
            await asyncio.sleep(self._lease_s)
            if self._cluster.node(name).process.dead:
                await self._restart(name)

    async def _change_version(self) -> None:
        """End a node, or let it leave, and start it with another version, the last one rather than others; an operator
        holds the feature level, or does not any more."""
        if name := self._node():
            self._cluster.hold_level(name, held=self._rng.random() < 0.2)
            end = self._rng.choice([self._cluster.kill, self._cluster.leave])
            end(name)
            await asyncio.sleep(self._lease_s)
            if self._cluster.node(name).process.dead:
                versions = self._cluster.plan.versions
                last = self._rng.random() < 0.6
                self._cluster.start_node(name, version=versions[-1] if last else self._rng.choice(versions))

    async def _move(self) -> None:
        if name := self._node():
            self._cluster.move(self._rng.choice(self._cluster.channels), name)

    async def _pause(self) -> None:
        if name := self._node():
            self._cluster.pause(name)
            await asyncio.sleep(self._rng.choice([0.3, self._lease_s, 3 * self._lease_s]) * self._rng.random())
            self._cluster.resume(name)

    async def _stall(self) -> None:
        for channel in self._rng.sample([Names().catalog, Names().cluster], self._rng.randint(1, 2)):
            self._cluster.stall(channel)
        await asyncio.sleep(self._rng.uniform(0, 2 * self._lease_s))
        for channel in (Names().catalog, Names().cluster):
            self._cluster.go_on(channel)

    async def _cut(self) -> None:
        """Cut a node off from its lease, until it is missed or for a while. Then the others may be cut off in their
        turn: so its renewals land before the eviction that they have decided on, and it may not hear of that."""
        if not (name := self._node()):
            return
        cluster, rng, channel = self._cluster, self._rng, Names().cluster
        cluster.cut(name, channel)
        await self._until_missed(name, self._lease_s * rng.uniform(0.5, 2))
        others = [other for other in cluster.names if other != name and rng.random() < 0.8]
        for other in others:
            cluster.cut(other, channel)
        await asyncio.sleep(rng.uniform(0, 0.5))
        cluster.mend(name, channel)
        await asyncio.sleep(rng.uniform(0, 0.5))
        if rng.random() < 0.5:
            cluster.deafen(name, channel, Names().catalog)
        for other in others:
            cluster.mend(other, channel)
        await asyncio.sleep(rng.uniform(0, self._lease_s))
        cluster.undeafen(name)

    async def _until_missed(self, name: str, deadline_s: float) -> None:
        """Until a coordinator has found the node silent, and is about to say so."""
        node = self._cluster.node(name)
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while not any(node.incarnation in other.detector.silent() for other in self._cluster.nodes):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)

    async def _clock(self) -> None:
        if name := self._node():
            clock, jump_ms = self._cluster.clock(name), self._rng.randint(-JUMP_MS, JUMP_MS)
            clock.jump_wall(jump_ms)
            clock.run_at(self._rng.uniform(*RATES))
            self._cluster.ahead_ms += max(0, jump_ms)
            self._cluster.note(f"the clock of {name} is set by {jump_ms} ms")

    async def _append(self) -> None:
        cluster, rng = self._cluster, self._rng
        unknown, lost, fail = (rng.choice([0.0, 0.02, 0.1]) for _ in range(3))
        rates = Rates(unknown=unknown, lost=lost, fail=fail, delay=0.1, delay_s_max=rng.choice([0.05, 1.0]))
        cluster.set_rates(rates)
        cluster.faults.late, cluster.faults.lag = rng.choice([0.0, 0.05]), rng.choice([0.0, 0.1])
        cluster.note(f"appends fail: {rates}, {cluster.faults.late:.2f} late, {cluster.faults.lag:.2f} lag")
        await asyncio.sleep(rng.uniform(0, 2 * self._lease_s))
        cluster.set_rates(Rates())
        cluster.faults.late = cluster.faults.lag = 0.0


async def _simulate(seed: int, plan: ClusterPlan | None, faults_s: float) -> ClusterHistory:
    cluster = SimulatedCluster(seed, plan)
    try:
        await cluster.start()
        await FaultDriver(cluster).run(faults_s)
        await _settle(cluster)
        check_cluster(cluster)
    finally:
        await cluster.stop()
    return cluster.history


async def _settle(cluster: SimulatedCluster) -> None:
    try:
        await cluster.until_owned(cluster.lease_s + PROMPT_S)
        await cluster.finish(2 * cluster.lease_s + PROMPT_S)
    except TimeoutError:
        owned = {channel: node.incarnation for channel in cluster.channels if (node := cluster.owner(channel))}
        raise ClusterViolation(f"after the faults only {owned} are owned in time\n{cluster.history.tail()}") from None
    await asyncio.sleep(1)  # all readers get to the end


def simulate_cluster(seed: int, plan: ClusterPlan | None = None, *, faults_s: float = 20.0) -> ClusterHistory:
    """Run a cluster with faults for so many seconds of virtual time, let it recover, and check it. Returns its history;
    raises `ClusterViolation`. The same seed gives the same run."""
    return run_virtual(_simulate(seed, plan, faults_s))
