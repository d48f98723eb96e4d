"""One run of a migration: of two at once the later one has it, and the earlier one stops.

A run claims the migration with a numbered record in the old log's state, so that log's order decides between two that
claim at once, and whether a record `migrated` came before a claim. Before each write a run looks whether the claim is
still its own. Brokers do not fence such writes: one that was sent just before the claim may land behind it. So the next
run waits (`SETTLE_S`) until what the one before has sent is there or given up; only then it looks at what is there. A
run that ends with nothing under way lets go, and the next one does not wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeAlias
from uuid import uuid4

from ..errors import Fenced, PreconditionFailed, TidewalError, Unavailable
from ..log.migration_state import MIGRATION_CHANNEL, MigrationPhase, MigrationState, MigrationStates
from ..log.wal import Wal
from .compared_channel import ComparedChannel

LOOK_VALID_S = 5.0  # what was seen counts for so long; a process that stood still looks again
LOOKS_MAX = 5  # at once, until the old log is said to answer too slowly
SETTLE_S = 40.0  # LOOK_VALID_S, and the 30 s in which adapters deliver an append to brokers or give it up

Compared: TypeAlias = dict[str, ComparedChannel]
"""What one run has found equal in both logs, by channel."""

_log = logging.getLogger("tidewal.migration")


class MigrationRun:
    """A claim of the migration that `old` says it is in. `state` is what `old` says, of this run, and `compared` what
    it has found equal in both logs, by channel."""

    def __init__(self, old: Wal, new: Wal, states: MigrationStates) -> None:
        self.old: Wal = old
        self.new: Wal = new
        self.state: MigrationState = states.state
        self.compared: Compared = {}
        self._states = states

    @classmethod
    async def begin(cls, old: Wal, new: Wal, state: MigrationState) -> MigrationRun:
        """Begin the migration `state`. Raises `PreconditionFailed` where another one came first."""
        states = MigrationStates(old)
        await states.change(replace(state, run=uuid4().hex))
        return cls(old, new, states)

    @classmethod
    async def claim(cls, old: Wal, new: Wal, state: MigrationState, *, settle_s: float = SETTLE_S) -> MigrationRun:
        """Go on with the migration that `old` says it is in (`state`), in place of the run that has it, and wait
        `settle_s` seconds for what that one has sent where one of the logs takes writes of several processes. Raises
        `Fenced` where another run came first."""
        states = MigrationStates(old)
        try:
            await states.change(replace(state, run=uuid4().hex, number=state.number + 1, proof={}))
        except PreconditionFailed as error:
            raise _fenced() from error
        if state.run and (_takes_late_writes(old) or _takes_late_writes(new)):
            _log.warning("waiting %g s for what an earlier run of this migration may have sent", settle_s)
            await asyncio.sleep(settle_s)
        run = cls(old, new, states)
        await run.check()
        return run

    async def check(self) -> None:
        """Raise `Fenced` where another run has the migration, or has ended it, and `Unavailable` where the old log
        needs over `LOOK_VALID_S` seconds for each answer. To be called before each write."""
        loop = asyncio.get_running_loop()
        for _ in range(LOOKS_MAX):
            began = loop.time()
            state = await self._states.read()
            if state.run != self.state.run:
                raise _fenced()
            self.state = state  # of this run, also where it did not learn that its record is there
            if loop.time() - began <= LOOK_VALID_S:
                return
        raise Unavailable(f"the old log needs over {LOOK_VALID_S:g} s to say who migrates it: go on when it is faster")

    async def change(self, phase: MigrationPhase, proof: Mapping[str, Any]) -> None:
        """Let the old log say `phase`. Raises `Fenced` where that does not count: another run has the migration."""
        await self.check()
        try:
            await self._states.change(replace(self.state, phase=phase, proof=proof))
        except PreconditionFailed as error:
            raise _fenced() from error
        self.state = self._states.state

    @asynccontextmanager
    async def letting_go(self) -> AsyncGenerator[None]:
        """Let go of the migration where the block ends with an error and all that it has sent is decided. Raises
        `Fenced` for each error of a run that was overtaken."""
        try:
            yield
        except Fenced:
            raise
        except TidewalError as error:
            try:
                await (self.check() if error.fields.get("outcome_unknown") else self.let_go())
            except Fenced as fenced:
                raise fenced from error
            except TidewalError as further:
                _log.debug("the next run waits: %s", further)
            raise

    async def let_go(self) -> None:
        """Let the next run begin without a wait: all that this one has sent is decided. Raises as `change` does."""
        await self.check()
        try:
            await self._states.change(replace(self.state, run="", number=self.state.number + 1, proof={}))
        except PreconditionFailed as error:
            raise _fenced() from error


def _takes_late_writes(wal: Wal) -> bool:
    """Whether what a process has sent may land when it is gone: in a directory the lock of the next one excludes it."""
    return wal.capabilities.multi_process_write and not wal.capabilities.one_machine


def _fenced() -> Fenced:
    return Fenced(
        "another run of this migration has taken the place of this one, which stops: --status says how far it is",
        channel=MIGRATION_CHANNEL,
    )
