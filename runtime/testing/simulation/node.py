"""One life of a simulated node: the real membership, coordinator and channel owner of a process of the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress

from ...catalog.catalog import PChannelState
from ...catalog.catalog_log import CatalogLog
from ...clock import HybridClock, add_ms
from ...cluster.channel_assignment import assign_channels
from ...cluster.cluster_log import ClusterLog
from ...cluster.coordinator import ClusterCoordinator
from ...cluster.detector import SilenceDetector
from ...cluster.limits import timestamp_limit
from ...cluster.membership import NodeMembership
from ...cluster.roles import COORDINATOR, STREAMING_NODE
from ...cluster.state import RATES, NodeMember
from ...cluster.version import TidewalVersion
from ...errors import Closed, Fenced, PreconditionFailed, TidewalError, Unavailable
from ...log.names import Names
from ...ownership import Appended
from ...replicated.replica import SnapshotPacing
from .history import ClusterHistory, HistoryEvent
from .owned_channels import OwnedChannels
from .process import NodeClock, SimulatedProcess
from .wal import SimulatedWal

PAUSE_S = 0.1
TICK_S = 0.5
CATALOG_PACING = SnapshotPacing(records=40, retry_records=5, factor=0.0)
CLUSTER_PACING = SnapshotPacing(records=60, retry_records=5, factor=0.0)


class SimulatedNode:
    """A node from its start to its end. It registers, owns what it is granted, and may lead. When its membership is
    ended by others its process ends, as a real one does."""

    def __init__(
        self,
        name: str,
        life: int,
        process: SimulatedProcess,
        wal: SimulatedWal,
        clock: NodeClock,
        channels: Sequence[str],
        history: ClusterHistory,
        *,
        lease_s: float,
        renew_s: float,
        reports: bool,
        version: TidewalVersion,
    ) -> None:
        self.name: str = name
        self.version: TidewalVersion = version
        self.process: SimulatedProcess = process
        self.clock: NodeClock = clock
        self.incarnation: str = f"{name}-{life}"
        self.wal: SimulatedWal = wal
        self.hybrid: HybridClock = HybridClock(clock)
        self.catalog: CatalogLog = CatalogLog(
            wal, Names(), self.hybrid, author=self.incarnation, create=version.catalog, levels=version.levels
        )
        self.cluster: ClusterLog = ClusterLog(wal, Names(), self.hybrid, self.incarnation, version=version)
        self.catalog.pacing, self.cluster.pacing = CATALOG_PACING, CLUSTER_PACING
        self.lease_ms: int = int(lease_s * 1000)
        self.hangs: bool = False  # the loop does not answer, and the heartbeat goes on
        member = NodeMember(
            self.incarnation,
            name,
            (COORDINATOR, STREAMING_NODE),
            self.lease_ms,
            version.levels.highest,
            min_level=version.levels.lowest,
            version=version.number,
        )
        self.membership: NodeMembership = NodeMembership(
            self.cluster, clock, member, may_renew=lambda: not self.hangs, report=lambda: {RATES: {}} if reports else {}
        )
        self.detector: SilenceDetector = SilenceDetector(self.cluster, self.membership, clock, renew_s=renew_s)
        self.coordinator: ClusterCoordinator = ClusterCoordinator(
            self.catalog,
            self.cluster,
            self.detector,
            self.hybrid,
            lambda view: assign_channels(view, channels).owners(),
            limit_ms=self.lease_ms,
        )
        self._renew_s, self._history = renew_s, history
        self._owned = self._new_owned()
        self._closing: OwnedChannels | None = None
        self.membership.on_confirmed(self._on_confirmed)
        self._handled: dict[str, int] = {}  # the terms of grants that were taken up
        self._taking: set[asyncio.Task[None]] = set()
        self.leaving: bool = False

    # ---- what the cluster and the clients see -----------------------------------------------------------------------

    def owns(self, channel: str) -> bool:
        """Whether this node believes that it owns the channel: it takes appends to it, or is about to say why not."""
        return channel in self._owned.active and not self.process.dead

    def promises(self, channel: str) -> int:
        """The term under which this node could acknowledge an append to the channel now; 0 for none."""
        ready = self.process.running and not self._owned.stalled and self.membership.holds()
        return self._owned.active.get(channel, 0) if ready else 0

    def append(self, channel: str, producer: str, pseq: int) -> tuple[int, asyncio.Future[Appended]]:
        """An append by a client, with the term under which it is made. Raises what the owner raises."""
        return self._owned.active.get(channel, 0), self._owned.append(channel, producer, pseq)

    # ---- life -------------------------------------------------------------------------------------------------------

    async def run(self, replaces: str = "") -> None:
        """Live until the membership is ended by others, or until what was to be left was left."""
        await self.cluster.open()
        await self.catalog.open()
        with suppress(Fenced):
            await self.membership.join(replaces)
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(work)
                    for work in (self._renew(), self.coordinator.run(), self._own(), self._extend(), self._tick())
                ]
                await self.membership.until_fenced()
                for task in tasks:
                    task.cancel()
        for log in (self.catalog, self.cluster):
            await log.close()

    async def leave(self) -> None:
        """Give everything up in good order, and leave the cluster."""
        self.leaving = True
        await self._give_up()
        with suppress(TidewalError):  # then others find that its lease is over
            await self.membership.leave()

    async def move(self, channel: str, term: int, incarnation: str) -> None:
        """As the leader, let the owner of a channel under this term give it up for another node."""
        with suppress(TidewalError):
            to = {channel: (term, incarnation)}
            await self.catalog.append({"kind": "move", "channels": to, "at_ms": self.clock.wall_ms()})

    async def hold_level(self, held: bool) -> None:
        """Let the feature level of the cluster stay as it is, or rise."""
        with suppress(TidewalError):
            await self.cluster.propose({"kind": "hold", "held": held})

    async def _renew(self) -> None:
        while True:
            self.membership.renew()
            await asyncio.sleep(self._renew_s)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._owned.tick()

    def _on_confirmed(self, asked_s: float) -> None:
        """The lease holds anew: late is not lost, where the channels are about to be given up neither."""
        for owned in (self._owned, self._closing):
            if owned is not None and self.membership.holds():
                owned.renewed()

    # ---- owning -----------------------------------------------------------------------------------------------------

    def _new_owned(self) -> OwnedChannels:
        return OwnedChannels(self.wal, self.hybrid, self.membership.holds, self.catalog)

    def _own_channels(self) -> Mapping[str, PChannelState]:
        return {name: state for name, state in self.catalog.catalog.channels.items() if state.owner == self.incarnation}

    async def _own(self) -> None:
        """Take up what is granted, side by side; give all up when the owner is stalled, or has lost a channel."""
        while True:
            own = self._own_channels()
            lost = any(name not in own or own[name].term != term for name, term in self._owned.active.items())
            if (self._owned.stalled or lost) and not self.leaving:
                await self._give_up()
            for name, state in self._own_channels().items():
                if self._handled.get(name, 0) < state.term and not self.leaving:
                    self._handled[name] = state.term
                    self._spawn(self._take_up(name, state.term))
                elif state.target and name in self._owned.active:
                    self._spawn(self._hand_over(name, state.term))
            await asyncio.sleep(PAUSE_S / 2)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._taking.add(task)
        task.add_done_callback(self._taking.discard)

    async def _hand_over(self, name: str, term: int) -> None:
        """Give up a channel that is to move."""
        with suppress(TidewalError):  # it has stalled: all are given up
            limit, checkpoint = await self._owned.release(name)
            await self._release({name: (term, limit, checkpoint)})

    async def _take_up(self, name: str, term: int) -> None:
        """Grant, fence, read up to it, `fenced` in the catalog, active. What goes wrong ends with a new term."""
        owned = self._owned
        try:
            if self.catalog.catalog.channels[name].limit <= add_ms(self.hybrid.now(), self.lease_ms // 4):
                await self._propose("renewed", {name: (term, self._limit(), b"")})
            fence = await owned.acquire(name, self.catalog.catalog.channels[name])
            await self._propose("fenced", {name: (term, fence)})
        except TidewalError:
            await self._release({name: (term, self.hybrid.last, b"")})
            return
        if owned is self._owned and not self.leaving:
            owned.activate(name, term)
            self._note("active", channel=name, term=term)

    async def _extend(self) -> None:
        """Raise the limits of what is stamped."""
        while True:
            await asyncio.sleep(self._renew_s)
            owned, limit = self._owned, self._limit()
            limits = {name: (term, limit, owned.checkpoint(name)) for name, term in owned.active.items()}
            with suppress(TidewalError):  # one that was lost is found by `_own`
                if limits:
                    await self._propose("renewed", limits)
                    owned.extend(limit, limits)

    async def _give_up(self) -> None:
        """In this order: no more appends and ticks, wait for what is under way, read the clock, release."""
        owned, self._owned = self._owned, self._new_owned()
        checkpoints = {name: owned.checkpoint(name) for name in owned.active}
        self._closing = owned
        limit = await owned.close()
        self._closing = None
        await asyncio.gather(*self._taking, return_exceptions=True)
        await self._release(
            {name: (state.term, limit, checkpoints.get(name, b"")) for name, state in self._own_channels().items()}
        )

    async def _release(self, channels: Mapping[str, tuple[int, int, bytes]]) -> None:
        """Until it counts, another grant shows that it is not needed any more, or the node has ended."""
        for name, given in channels.items():
            while True:
                with suppress(PreconditionFailed, Closed):
                    try:
                        await self._propose("released", {name: given})
                    except Unavailable:
                        await asyncio.sleep(PAUSE_S)
                        continue
                break

    async def _propose(self, kind: str, channels: Mapping[str, tuple[object, ...]]) -> None:
        await self.catalog.propose_own({"kind": kind, "node": self.incarnation, "channels": channels})

    def _limit(self) -> int:
        return timestamp_limit(self.clock.wall_ms(), self.hybrid.last, self.lease_ms)

    def _note(self, kind: str, **fields: object) -> None:
        at_s = asyncio.get_running_loop().time()
        self._history.add(HistoryEvent(at_s, kind, node=self.incarnation, **fields))  # pyright: ignore[reportArgumentType]
