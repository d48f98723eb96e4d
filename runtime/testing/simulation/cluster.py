"""A cluster of simulated nodes over one log in memory, on virtual time, with clients that append to its channels."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...clock import physical_ms
from ...cluster.membership import RENEW_S
from ...cluster.version import THIS_VERSION, TidewalVersion
from ...errors import FormatTooNew, FormatTooOld
from ...log.names import Names
from ...log.wal import ChannelPolicy
from ..clock import VirtualLoop
from ..faults import FaultPlan, Rates
from ..memory import MemoryLog, MemoryWal
from .client import SimulatedClient
from .history import ClusterHistory, HistoryEvent
from .node import SimulatedNode
from .process import NodeClock, SimulatedProcess, run_processes
from .wal import LogFaults, SimulatedWal

RESTART_S = 0.2  # until a node whose membership was ended by others is started again
LOOK_S = 0.05  # between two looks at who could acknowledge


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What a simulated cluster consists of. `leases_s` are those of the nodes, by turns; each renews three times a
    lease, and each second at least. Clients append every `interval_s` seconds. With `balance` nodes report their load,
    so that channels move for balance. Of several `versions` the nodes begin with the first, and faults change them; a
    node that does not know the cluster's feature level is started again with the last."""

    nodes: int = 3
    channels: int = 4
    clients: int = 1  # of each channel
    leases_s: tuple[float, ...] = (3.0,)
    interval_s: float = 0.25
    balance: bool = True
    versions: tuple[TidewalVersion, ...] = (THIS_VERSION,)


@dataclass
class _Host:
    """Where the lives of one node run, one after another."""

    name: str
    clock: NodeClock
    lease_s: float
    version: TidewalVersion
    life: int = 0
    node: SimulatedNode | None = None
    cut: set[str] = field(default_factory=set[str])
    deaf: set[str] = field(default_factory=set[str])
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])


class SimulatedCluster:
    """To be made and used on a virtual loop (`run_virtual`). All that is random comes from `seed`.

    The methods do to nodes and to the log what happens to real ones. `history` tells what came of it, and
    `check_cluster` whether that is right.
    """

    def __init__(self, seed: int, plan: ClusterPlan | None = None) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "a cluster is simulated on virtual time: run_virtual(...)"
        run_processes(loop)
        self.plan: ClusterPlan = plan or ClusterPlan()
        self.rng: random.Random = random.Random(seed)
        self.log: MemoryLog = MemoryLog()
        self.history: ClusterHistory = ClusterHistory()
        self.faults: LogFaults = LogFaults(random.Random(self.rng.random()))
        self._fault_plans: list[FaultPlan] = []
        self.channels: Sequence[str] = [Names().pchannel(number) for number in range(self.plan.channels)]
        self.ahead_ms: int = 0  # the furthest that a wall clock was set ahead
        self._loop = loop
        leases = self.plan.leases_s
        self._hosts = {
            f"n{number}": _Host(
                f"n{number}", NodeClock(loop.clock), leases[number % len(leases)], self.plan.versions[0]
            )
            for number in range(self.plan.nodes)
        }
        self._clients = [
            SimulatedClient(
                f"c{number}@{channel}",
                channel,
                lambda: self.nodes,
                self.history,
                random.Random(self.rng.random()),
                self.plan.interval_s,
            )
            for channel in self.channels
            for number in range(self.plan.clients)
        ]
        self._appending: list[asyncio.Task[None]] = []
        self._looking: asyncio.Task[None] | None = None

    # ---- what there is ----------------------------------------------------------------------------------------------

    @property
    def names(self) -> Sequence[str]:
        """The names of all nodes, whether they run or not."""
        return list(self._hosts)

    @property
    def nodes(self) -> Sequence[SimulatedNode]:
        """The lives that were not killed, stopped ones too."""
        found = (host.node for host in self._hosts.values())
        return [node for node in found if node is not None and not node.process.dead]

    def node(self, name: str) -> SimulatedNode:
        """The present life of a node, or its last one."""
        node = self._hosts[name].node
        assert node is not None, f"{name} was not started"
        return node

    def clock(self, name: str) -> NodeClock:
        """The clocks of the machine that a node runs on."""
        return self._hosts[name].clock

    def leader(self) -> SimulatedNode | None:
        """The node that leads, as far as it has read itself."""
        return next((node for node in self.nodes if node.coordinator.leads), None)

    def owner(self, channel: str) -> SimulatedNode | None:
        """A node that could acknowledge an append to the channel now."""
        return next((node for node in self.nodes if node.promises(channel)), None)

    @property
    def leaving(self) -> bool:
        """Whether a node is about to leave."""
        return any(node.leaving for node in self.nodes)

    @property
    def lease_s(self) -> float:
        """The longest lease of a node."""
        return max(self.plan.leases_s)

    # ---- beginning and end ------------------------------------------------------------------------------------------

    async def start(self, *, clients: bool = True) -> None:
        """Start all nodes and clients, and wait until each channel has an owner."""
        wal = MemoryWal(self.log)
        for channel in self.channels:
            await wal.create_channel(channel, ChannelPolicy())
        for name in self.names:
            self.start_node(name)
        self._looking = asyncio.create_task(self._look())
        await self.until_owned(2 * self.lease_s + 2)
        if clients:
            self._appending = [asyncio.create_task(client.run()) for client in self._clients]

    async def until_owned(self, deadline_s: float) -> float:
        """Wait until each channel has an owner, and return how long that took. Raises `TimeoutError`."""
        began_s = self._loop.time()
        async with asyncio.timeout(deadline_s):
            while not all(self.owner(channel) for channel in self.channels):  # noqa: ASYNC110 -- leases have no event
                await asyncio.sleep(LOOK_S)
        return self._loop.time() - began_s

    async def finish(self, deadline_s: float) -> None:
        """Let each client end with an append that was acknowledged. Raises `TimeoutError`."""
        for client in self._clients:
            client.stopping = True
        async with asyncio.timeout(deadline_s):
            await asyncio.gather(*self._appending)

    async def stop(self) -> None:
        """End everything."""
        for task in (*self._appending, self._looking):
            if task is not None:
                task.cancel()
        for host in self._hosts.values():
            if host.node is not None:
                host.node.process.kill()
                await host.node.process.buried()
            for task in host.tasks:
                task.cancel()

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def start_node(
        self,
        name: str,
        *,
        has_lock: bool = False,
        lease_s: float | None = None,
        version: TidewalVersion | None = None,
    ) -> SimulatedNode:
        """Start a node that does not run, as a new incarnation. `has_lock`: it has the file lock of its name, and so
        knows that the life before is dead. `lease_s` and `version` are its lease and version from now on."""
        host = self._hosts[name]
        host.lease_s = lease_s or host.lease_s
        host.version = version or host.version
        before = host.node.incarnation if host.node is not None and has_lock else ""
        host.life += 1
        process, renew_s = SimulatedProcess(), min(host.lease_s / 3, RENEW_S)
        rates = self._fault_plans[-1].rates if self._fault_plans else Rates()
        self._fault_plans.append(FaultPlan(self.rng.randrange(2**32), rates))
        wal = SimulatedWal(self.log, self._fault_plans[-1], process, self.faults, host.cut, host.deaf)
        host.node = SimulatedNode(
            name,
            host.life,
            process,
            wal,
            host.clock,
            self.channels,
            self.history,
            lease_s=host.lease_s,
            renew_s=renew_s,
            reports=self.plan.balance,
            version=host.version,
        )
        task = process.spawn(host.node.run(before))
        host.tasks = [asyncio.create_task(self._supervise(host, host.node, task))]
        self.note(f"{host.node.incarnation} starts{f' and replaces {before}' if before else ''}")
        return host.node

    async def _supervise(self, host: _Host, node: SimulatedNode, task: asyncio.Task[None]) -> None:
        """A process that ends by itself, as one does whose membership was ended by others, is started again."""
        await asyncio.wait([task])
        if node.process.dead:
            return
        node.process.kill()
        if not task.cancelled() and isinstance(task.exception(), FormatTooNew | FormatTooOld):
            self.note(f"{node.incarnation} does not know the feature level: {task.exception()}")
            host.version = self.plan.versions[-1]
        elif not task.cancelled() and task.exception() is not None:
            raise AssertionError(f"{node.incarnation} ended with an error") from task.exception()
        await asyncio.sleep(RESTART_S)
        if host.node is node:
            self.start_node(host.name)

    def kill(self, name: str) -> None:
        """Kill the process of a node; it stays away until it is started."""
        self.note(f"{self.node(name).incarnation} is killed")
        self.node(name).process.kill()

    def pause(self, name: str) -> None:
        """Stop the process of a node until `resume`."""
        self.note(f"{self.node(name).incarnation} is stopped")
        self.node(name).process.pause()

    def resume(self, name: str) -> None:
        """Let a stopped process go on."""
        if self.node(name).process.paused:
            self.note(f"{self.node(name).incarnation} goes on")
            self.node(name).process.resume()

    def leave(self, name: str) -> None:
        """Let a node release what it has, and leave; it ends when it has done so."""
        node = self.node(name)
        self.note(f"{node.incarnation} leaves")
        self._hosts[name].tasks.append(asyncio.create_task(self._leave(node)))

    async def _leave(self, node: SimulatedNode) -> None:
        await asyncio.wait([node.process.spawn(node.leave())])
        node.process.kill()

    def move(self, channel: str, name: str) -> None:
        """Let the leader, where there is one, move a channel to a node."""
        leader, node = self.leader(), self.node(name)
        state = None if leader is None else leader.catalog.catalog.channels.get(channel)
        if leader is not None and state is not None and state.owner != node.incarnation:
            self.note(f"{channel} is to move to {node.incarnation}")
            leader.process.spawn(leader.move(channel, state.term, node.incarnation))

    def hold_level(self, name: str, *, held: bool) -> None:
        """Let an operator, at a node, hold the feature level of the cluster, or let it rise."""
        node = self.node(name)
        self.note(f"the feature level {'is held' if held else 'may rise'}")
        node.process.spawn(node.hold_level(held))

    # ---- the log ----------------------------------------------------------------------------------------------------

    def stall(self, channel: str) -> None:
        """Let no append to the channel land until `go_on`."""
        self.note(f"{channel} stalls")
        self.faults.stalled.add(channel)

    def go_on(self, channel: str) -> None:
        """Let what was appended to a stalled channel land."""
        if channel in self.faults.stalled:
            self.note(f"{channel} goes on")
            self.faults.go_on(channel)

    def cut(self, name: str, channel: str) -> None:
        """Let no append of a node to the channel land until `mend`; those of others do."""
        self.note(f"{self.node(name).incarnation} is cut off from {channel}")
        self._hosts[name].cut.add(channel)

    def mend(self, name: str, channel: str) -> None:
        """Let what a node has appended to a channel land that it was cut off from."""
        if channel in self._hosts[name].cut:
            self.note(f"{self.node(name).incarnation} reaches {channel} again")
            self._hosts[name].cut.discard(channel)
            self.faults.release()

    def deafen(self, name: str, *channels: str) -> None:
        """Let a node read nothing more of the channels until `undeafen`."""
        self.note(f"{self.node(name).incarnation} does not hear {' and '.join(channels)}")
        self._hosts[name].deaf.update(channels)

    def undeafen(self, name: str) -> None:
        """Let a node read on."""
        self._hosts[name].deaf.clear()

    def set_rates(self, rates: Rates) -> None:
        """Let appends of all nodes fail at these rates from now on, those that dead ones have on the way, too."""
        for plan in self._fault_plans:
            plan.rates = rates

    # ---- looking ----------------------------------------------------------------------------------------------------

    def note(self, what: str) -> None:
        """Note that something was done to the cluster."""
        self.history.add(HistoryEvent(self._loop.time(), "fault", note=what))

    async def _look(self) -> None:
        while True:
            for channel in self.channels:
                terms = {node.incarnation: node.promises(channel) for node in self.nodes}
                promising = sorted(f"{name} under term {term}" for name, term in terms.items() if term)
                if len(promising) > 1:
                    self._note_promises(channel, " and ".join(promising))
            await asyncio.sleep(LOOK_S)

    def _note_promises(self, channel: str, note: str) -> None:
        self.history.add(HistoryEvent(self._loop.time(), "promised", channel, note=note))

    def clock_ahead_ms(self) -> int:
        """How far the furthest timestamp of a node lies ahead of the true time."""
        true_ms = self._loop.clock.wall_ms()
        return max((physical_ms(node.hybrid.last) - true_ms for node in self.nodes), default=0)
