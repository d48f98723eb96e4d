"""The leases of nodes in a migration: nothing that an old owner may still acknowledge is missing in the new log.

A node that leaves says itself that nothing rests on its lease any more. One that was killed says nothing: it is evicted
once it is silent for as long as its lease, and that of each that was evicted is waited for, by this process' own clock
alone (`runtime/cluster/detector.py`).
"""

from __future__ import annotations

import asyncio
import logging
from uuid import uuid4

from ..clock import Clock, HybridClock, SystemClock
from ..cluster.cluster_log import ClusterLog
from ..cluster.detector import MARGIN
from ..cluster.state import EVICTED, ClusterState
from ..errors import PreconditionFailed
from ..log.wal import Wal
from .node_log import NodeLog

_log = logging.getLogger("tidewal.migration")


class LeaseWatch:
    """What is known of the members of the cluster that uses `old`, as of the last look."""

    def __init__(self, old: Wal, clock: Clock | None = None) -> None:
        self._old, self._clock = old, HybridClock(clock or SystemClock())
        self._heard: dict[str, tuple[int, float]] = {}  # number of a member's last record, and when it was read
        self._over_s: dict[str, float] = {}  # by those that were evicted: from when on nothing rests on their lease

    async def look(self) -> None:
        """Read the cluster's state. Raises as `NodeLog.read_states` does."""
        node = await NodeLog.read_states(self._old)
        if node is not None and node.cluster is not None:
            self._note(node.cluster)

    def _note(self, cluster: ClusterState) -> None:
        now_s = asyncio.get_running_loop().time()
        for incarnation, member in cluster.members.items():
            if self._heard.get(incarnation, (-1, 0.0))[0] != member.number:
                self._heard[incarnation] = member.number, now_s
        for incarnation, gone in cluster.gone.items():
            if gone.how == EVICTED:
                self._over_s.setdefault(incarnation, now_s + _lasting_s(gone.lease_ms))

    async def end_silent(self) -> None:
        """Look, and evict the members of which nothing came for as long as their leases. Raises what `look` does, and
        errors of the log."""
        now_s = asyncio.get_running_loop().time()  # of what came after this, a slow look may have read nothing
        node = await NodeLog.read_states(self._old)
        if node is None or node.cluster is None:
            return
        self._note(node.cluster)
        silent = [
            member.incarnation
            for member in node.cluster.members.values()
            if now_s - self._heard[member.incarnation][1] >= _lasting_s(member.lease_ms)
        ]
        if silent:
            await self._evict(node, silent)

    async def _evict(self, node: NodeLog, silent: list[str]) -> None:
        log = ClusterLog(self._old, node.names, self._clock, f"migration-{uuid4().hex}")
        try:
            await log.open()
            for incarnation in silent:
                try:
                    await log.propose({"kind": "evict", "incarnation": incarnation})
                except PreconditionFailed:  # it has left
                    continue
                _log.warning("%s is silent, and was evicted", incarnation)
            self._note(log.cluster)
        finally:
            await log.close()

    async def over(self) -> None:
        """Wait until nothing rests on the leases of those that were evicted by the last look."""
        left_s = max(self._over_s.values(), default=0.0) - asyncio.get_running_loop().time()
        if left_s > 0:
            _log.warning("waiting %.1f s for leases of nodes that were evicted", left_s)
            await asyncio.sleep(left_s)


def _lasting_s(lease_ms: int) -> float:
    return lease_ms / 1000 * (1 + MARGIN)
