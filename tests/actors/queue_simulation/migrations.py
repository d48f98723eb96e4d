"""An operator who has the log of the simulated queue migrated while it is used, and whose commands die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tests.actors.queue_simulation.mortal import Life, MortalOpener, MortalTables
from tests.actors.shared_logs import SharedNodes
from tests.dying_wal import Killed
from tidewal.runtime.errors import InvalidRequest, Unavailable
from tidewal.runtime.log.migration_state import MigrationPhase

SETTLE_S = 8.0  # what a command has sent is there by then, late as it may be
LEAVE_S = 20.0
WRITES = 250  # of a command, about
KILLS_MAX = 3

Command = Callable[..., Coroutine[Any, Any, None]]


class Migrations:
    """Migrates the log to one after another. Of the commands some die, or stand still, at a write, and are typed again;
    some migrations are taken back, and begun again."""

    def __init__(self, nodes: SharedNodes, trace: list[str]) -> None:
        self._nodes, self._rng, self._trace = nodes, nodes.rng, trace
        self._kills = 0

    async def happen(self, count: int) -> None:
        for number in range(1, count + 1):
            await asyncio.sleep(self._rng.uniform(0.5, 3))
            of, to = await self._nodes.configured(), f"memory://log{number}"
            while await self._nodes.configured() != to:
                await self._try(of, to)

    async def _try(self, of: str, to: str) -> None:
        if self._rng.random() < 0.2 and await self._nodes.phase(of) is not MigrationPhase.OPEN:
            await self._typed("cancel", self._cancel, of, to)
        else:
            await self._typed("migrate", self._migrate, of, to)
        await asyncio.sleep(self._rng.choice((0.0, self._rng.uniform(0, 3))))

    async def _migrate(self, opener: MortalOpener, **options: Any) -> None:
        tables = MortalTables(self._nodes, opener.life)
        await self._nodes.migrate(opener=opener, tables=tables, leave_s=LEAVE_S, **options)

    async def _cancel(self, opener: MortalOpener, of: str, to: str, **options: Any) -> None:
        migrated = await self._nodes.phase(of) is MigrationPhase.MIGRATED
        try:
            await self._nodes.cancel(opener, of=of, to=to, **options)
        except InvalidRequest as error:  # the command before it has died behind the point of no return
            if not migrated:
                raise
            self._note(f"refused: {error}")

    async def _typed(self, name: str, command: Command, of: str, to: str) -> None:
        life = self._life()
        self._note(f"{name} to {to}")
        try:
            await life.run(command(MortalOpener(self._nodes, life), of=of, to=to, settle_s=SETTLE_S))
            self._note("done")
        except Killed:
            self._note(f"killed, {of} is {await self._nodes.phase(of)}")
        except Unavailable as error:
            self._note(f"not done: {error}")

    def _life(self) -> Life:
        """Where the next command ends; after some kills it does not."""
        self._kills += 1
        if self._kills > KILLS_MAX:
            return Life()
        stands_s = self._rng.choice((0.0, 0.0, self._rng.uniform(0.1, 10)))
        return Life(self._rng.randrange(1, 2 * WRITES), behind=self._rng.random() < 0.5, stands_s=stands_s)

    def _note(self, line: str) -> None:
        self._trace.append(f"{self._nodes.now_s():.3f} {line}")
