"""A coordinator at work: it looks at what it has read, decides, and proposes; then it looks again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from ..catalog.catalog_log import CatalogLog
from ..clock import HybridClock, monotonic_ms
from ..errors import Fenced, PreconditionFailed, TidewalError
from ..waiting import first_of
from .cluster_log import ClusterLog
from .decisions import Assignment, ClusterDecision, ClusterView, decide
from .detector import SilenceDetector
from .limits import LIMIT_MS

LOOK_S = 0.2  # until the next look where the catalog stays as it is: leases end without any record
MOVE_ON_S = 3600.0  # the longest that a quiet cluster keeps what other channels have in the segments that all share
PATIENCE_S = 0.3  # more than the leader's, before another coordinator ends a lease

_log = logging.getLogger(__name__)


class ClusterCoordinator:
    """Carries out what `decide` says, for the process whose `catalog` and `cluster` logs it is given: the one claims
    under its incarnation, the other writes under it. `assign` returns the wanted owners of all channels; a grant lets
    one stamp `limit_ms` ahead. `on_granted` is called with the number of channels that were granted, `on_evicted` when
    this process has ended the lease of a silent member."""

    def __init__(
        self,
        catalog: CatalogLog,
        cluster: ClusterLog,
        detector: SilenceDetector,
        clock: HybridClock,
        assign: Callable[[ClusterView], Assignment],
        *,
        limit_ms: int = LIMIT_MS,
        on_granted: Callable[[int], object] = lambda channels: None,
        on_evicted: Callable[[], object] = lambda: None,
    ) -> None:
        self._catalog, self._cluster, self._detector = catalog, cluster, detector
        self._clock, self._assign, self._limit_ms, self._on_granted = clock, assign, limit_ms, on_granted
        self._on_evicted = on_evicted
        self._leads_since_s: float | None = None
        self._moved_on_s = clock.clock.monotonic()
        # Held from a look until what follows is proposed: what is appended under it no grant of an earlier look
        # follows.
        self.deciding: asyncio.Lock = asyncio.Lock()

    @property
    def leads(self) -> bool:
        """Whether this process leads, as far as the catalog was read."""
        return self._catalog.leads

    def view(self) -> ClusterView:
        """What this process has read by now."""
        return ClusterView(
            self._cluster.author,
            self._catalog.catalog,
            self._catalog.leader,
            self._cluster.cluster,
            self._detector.silent(),
            self._detector.silent(longer_s=PATIENCE_S),
            self._detector.is_over,
            self._clock.clock.wall_ms(),
            self._limit_ms,
            self._settled(),
            self._catalog.fold.level,
            self._clock.clock.boot(),
            monotonic_ms(self._clock.clock),
        )

    def _settled(self) -> bool:
        """Whether this process has led for as long as any lease."""
        now_s = self._clock.clock.monotonic()
        if not self.leads:
            self._leads_since_s = None
        elif self._leads_since_s is None:
            self._leads_since_s = now_s
        led_s = 0.0 if self._leads_since_s is None else now_s - self._leads_since_s
        return led_s * 1000 > self._cluster.cluster.longest_lease_ms

    async def run(self) -> None:
        """Look and propose until it is cancelled. Raises what has ended following one of the logs."""
        while True:
            try:
                if await self.step():
                    continue
            except TidewalError as error:
                self._catalog.check_following()
                self._cluster.check_following()
                if not (error.retryable or isinstance(error, Fenced)):
                    raise
                _log.info("what the log holds by now is looked at again: %s", error)
            await first_of(self._catalog.changed(), asyncio.sleep(LOOK_S))

    async def step(self) -> bool:
        """Look once, and propose what follows. Returns whether something counts of that. Raises as `run` does, and
        errors of the log that may pass."""
        if self._catalog.leader.node == self._cluster.author and not self._catalog.leads:
            await self._catalog.claim(self._cluster.author)  # an earlier life of this coordinator led
        async with self.deciding:
            moved = await self._propose()
        if self.leads:
            await self._store_snapshots()
        return moved

    async def _propose(self) -> bool:
        view = self.view()
        decision = decide(view, self._assign(view) if self.leads else {})
        moved = decision.claim
        for incarnation in decision.evict:
            with suppress(PreconditionFailed):  # another coordinator came before it
                await self._cluster.propose({"kind": "evict", "incarnation": incarnation})
                _log.warning("%s was silent: its lease is ended", incarnation)
                self._on_evicted()
                moved = True
        if decision.claim:
            await self._catalog.claim(self._cluster.author)
        for event in (*decision.released, *decision.grants, *decision.moves):
            with suppress(PreconditionFailed):
                await self._catalog.append(event)
                moved = True
                if event["kind"] == "grant":
                    self._on_granted(len(event["channels"]))
        return moved | await self._raise_levels(decision)

    async def _store_snapshots(self) -> None:
        """An owner that is written writes to the catalog all the time, and a member alone to the other not at all."""
        now_s = self._clock.clock.monotonic()
        if self._catalog.snapshot_due or now_s > self._moved_on_s + MOVE_ON_S:
            self._moved_on_s = now_s
            await self._catalog.snapshot_if_due(due=True)
            await self._cluster.move_on()
        await self._cluster.snapshot_if_due()

    async def _raise_levels(self, decision: ClusterDecision) -> bool:
        with suppress(PreconditionFailed):  # a member came that does not know it, or an operator holds it
            if decision.level:
                await self._cluster.raise_level(decision.level)
                _log.info("all members know feature level %d: it is the cluster's from now on", decision.level)
            if decision.catalog_level:
                await self._catalog.raise_level(decision.catalog_level)
            return bool(decision.level or decision.catalog_level)
        return False
