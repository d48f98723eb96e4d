"""What happens to the nodes and the log of the simulated queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tests.actors.nodes import LEASE_S, TAKEN_OVER_S, NodeProcess
from tests.actors.shared_logs import SharedNodes

NODES = "abc"
CLOCK_MS = 3_000  # how far a wall clock is set at once, at most


class QueueFaults:
    """Faults that the seed draws, one after another; behind each all nodes run."""

    def __init__(self, nodes: SharedNodes, trace: list[str]) -> None:
        self.nodes, self._rng, self._trace = nodes, nodes.rng, trace

    async def happen(self, count: int) -> None:
        faults: list[Callable[[str], Awaitable[None]]] = [
            self._kill, self._end, self._cut, self._stop, self._stall, self._clock, self._late
        ]  # fmt: skip
        for _ in range(count):
            await asyncio.sleep(self._rng.uniform(0.5, 2))
            fault, name = self._rng.choice(faults), self._rng.choice(NODES)
            self._trace.append(f"{self.nodes.now_s():.3f} {fault.__name__} {name}")
            await fault(name)

    async def _kill(self, name: str) -> None:
        await self.nodes.kill(name)
        await asyncio.sleep(self._rng.uniform(0, 2 * LEASE_S))
        await self.nodes.start(name)

    async def _end(self, name: str) -> None:
        await self.nodes.end(name)
        await self.nodes.start(name)

    async def _cut(self, name: str) -> None:
        """It goes on as if it owned its channels still."""
        each = self.nodes.cut_off(name, deaf=self._rng.random() < 0.5)
        await asyncio.sleep(self._rng.uniform(0.5, TAKEN_OVER_S + 2))
        self.nodes.reconnect(each)
        await self._again(each)

    async def _stop(self, name: str) -> None:
        """As by SIGSTOP, for up to two leases."""
        each = self.nodes.running[name]
        each.process.pause()
        await asyncio.sleep(self._rng.uniform(0.1, 2 * LEASE_S))
        each.process.resume()
        await self._again(each)

    async def _again(self, each: NodeProcess) -> None:
        """Start a node again that has ended since others have taken its place."""
        with suppress(TimeoutError):
            await asyncio.wait_for(each.ended.wait(), 2 * TAKEN_OVER_S)
            self.nodes.running.pop(each.name)
            await self.nodes.start(each.name)

    async def _stall(self, _: str) -> None:
        kinds = ("-topic_", "-delays_", "rootcoord-dml")
        names = sorted({name for log in self.nodes.logs.values() for name in log.channels})
        channels = [each for each in names if self._rng.choice(kinds) in each]
        self.nodes.stall(channels)
        await asyncio.sleep(self._rng.uniform(0.1, 2))
        self.nodes.go_on(channels)

    async def _clock(self, name: str) -> None:
        self.nodes.running[name].clock.jump_wall(self._rng.randint(-CLOCK_MS, CLOCK_MS))

    async def _late(self, _: str) -> None:
        """Appends to what clients write land after their outcome was called unknown."""
        self.nodes.log_faults.late = 0.02
        await asyncio.sleep(self._rng.uniform(0.5, 2))
        self.nodes.log_faults.late = 0.0
