"""Faults of processes, drawn by lot: killed, stopped for longer than their lease, ended in good order."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Callable

from .cluster_processes import LOOK_S, ClusterProcesses

KILLED, STOPPED, ENDED = "killed", "stopped", "ended"
PAUSE_S = 2.0  # between two faults, on average
STOPPED_LEASES = (1.2, 2.0)  # for how many leases a process is stopped


class ProcessFaults:
    """Does something to one process after the other, also while an earlier one is away. `counts` says how often what
    happened; `say` is told each. A process that has no substitute is not left alone: the others are ready then."""

    def __init__(
        self, cluster: ClusterProcesses, rng: random.Random, lease_s: float, say: Callable[[str], None]
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._cluster, self._rng, self._lease_s, self._say = cluster, rng, lease_s, say

    async def inject(self) -> str:
        """Wait for a moment, do something to a process that is ready, and say what. A stopped one goes on by itself."""
        await asyncio.sleep(self._rng.expovariate(1 / PAUSE_S))
        while len(ready := await self._cluster.ready()) <= self._cluster.spares:  # noqa: ASYNC110 -- other processes say so
            await asyncio.sleep(LOOK_S)
        name, what = self._rng.choice(sorted(ready)), self._rng.choice([KILLED, KILLED, STOPPED, ENDED])
        self.counts[what] += 1
        said = f"{name} is {what}"
        if what == STOPPED:
            length_s = self._lease_s * self._rng.uniform(*STOPPED_LEASES)
            said += f" for {length_s:.1f} s"
            self._say(said)
            await self._hold(name, length_s)
        else:
            self._say(said)
            self._cluster.send(name, signal.SIGKILL if what == KILLED else signal.SIGTERM)
        return said

    async def _hold(self, name: str, length_s: float) -> None:
        self._cluster.send(name, signal.SIGSTOP)
        try:
            await asyncio.sleep(length_s)
        finally:
            self._cluster.send(name, signal.SIGCONT)
