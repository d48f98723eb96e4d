"""A replica of the log of the simulated queue: replicators that die, and the promotion with or without the source."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from tests.actors.queue_simulation.migrations import SETTLE_S
from tests.actors.queue_simulation.mortal import Life, MortalTables, MortalWal
from tests.actors.shared_logs import OLD, SharedNodes
from tests.actors.test_forced_promotion_model import check_channels
from tests.dying_wal import Killed
from tidewal.runtime.errors import TidewalError, Unavailable
from tidewal.runtime.log.replication_state import replication_state
from tidewal.runtime.replication.forced_promotion import line_of, promote_at_line
from tidewal.runtime.replication.promotion import promote
from tidewal.runtime.replication.replicator import ReplicationTimes, Replicator
from tidewal.runtime.testing.simulation.wal import LogFaults

REPLICA, PROMOTED = "memory://replica", "memory://promoted"
TIMES = ReplicationTimes(look_s=0.5, save_s=1.0, halted_s=5.0)
WRITES = 2000  # of a replicator, in some seconds
PROMOTION_WRITES = 200  # of a promotion, about
KILLS_MAX = 3  # of these


class OwnWal(MortalWal):
    """A log that one process has to itself: the next one does not wait for what it has sent."""

    capabilities = replace(MortalWal.capabilities, one_machine=True)


class Replica:
    """Replicators of the nodes' log, one after another, each of which dies at a write, and the promotion."""

    def __init__(self, nodes: SharedNodes, trace: list[str]) -> None:
        self._nodes, self._rng, self._trace = nodes, nodes.rng, trace
        self._faults = LogFaults(nodes.rng)  # of a log that one process has: none

    @asynccontextmanager
    async def replicating(self) -> AsyncIterator[None]:
        """Replicate while the block runs; behind it the last replicator has stopped, or was killed."""
        running = asyncio.create_task(self._replicate())
        try:
            yield
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    async def _replicate(self) -> None:
        while True:
            life = self._life(WRITES)
            source, target = self._logs(life)
            try:
                await life.run(Replicator(source, target, OLD, times=TIMES, clock=self._nodes.loop.clock).run())
            except Killed:
                self._note("the replicator was killed")
            except TidewalError as error:
                if not error.retryable:
                    raise
                self._note(f"the replicator ends: {error}")
            await asyncio.sleep(self._rng.uniform(0, 1))

    async def has_line(self) -> None:
        """Wait until a line was drawn."""
        target = self._logs(Life())[1]
        while not (await replication_state(target)).line:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    async def promote(self) -> None:
        """In the place of the source, which no node uses any more."""

        async def attempt(life: Life) -> None:
            source, target = self._logs(life)
            tables, clock = MortalTables(self._nodes, life), self._nodes.loop.clock
            await promote(source, target, OLD, REPLICA, tables=tables, clock=clock)

        await self._until_done(attempt)
        self._nodes.url = REPLICA
        check_channels(self._nodes.log_at(OLD), self._nodes.log_at(REPLICA))

    async def promote_alone(self) -> int:
        """Without the source, at the line, of which this returns the time."""
        target = self._logs(Life())[1]
        time = line_of(await replication_state(target)).time

        async def attempt(life: Life) -> None:
            target, new = self._logs(life)[1], OwnWal(self._nodes, PROMOTED, life, self._faults)
            tables = MortalTables(self._nodes, life)
            await promote_at_line(target, new, REPLICA, PROMOTED, tables=tables, settle_s=SETTLE_S)

        await self._until_done(attempt)
        self._nodes.url = PROMOTED
        check_channels(self._nodes.log_at(OLD), self._nodes.log_at(PROMOTED), time)
        return time

    async def _until_done(self, attempt: Callable[[Life], Coroutine[Any, Any, None]]) -> None:
        lives = [self._life(PROMOTION_WRITES) for _ in range(self._rng.randint(0, KILLS_MAX))]
        while True:
            life = lives.pop() if lives else Life()
            try:
                await life.run(attempt(life))
            except Killed:
                self._note("the promotion was killed")
            except Unavailable as error:
                self._note(f"the promotion ends: {error}")
            else:
                return

    def _logs(self, life: Life) -> tuple[MortalWal, MortalWal]:
        return MortalWal(self._nodes, OLD, life), OwnWal(self._nodes, REPLICA, life, self._faults)

    def _life(self, writes: int) -> Life:
        return Life(self._rng.randrange(1, writes), behind=self._rng.random() < 0.5)

    def _note(self, line: str) -> None:
        self._trace.append(f"{self._nodes.now_s():.3f} {line}")
