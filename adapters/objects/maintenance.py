"""What the owner of the log does beside appending, now and then: checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ...runtime.errors import TidewalError
from .checkpoints import Checkpoints
from .log_state import LogState
from .pace import MaintenancePace

_log = logging.getLogger(__name__)


class Maintenance:
    """The maintenance of a log by its owner, in turns. What a turn does not get to, the next one does, of this owner or
    of another."""

    def __init__(
        self, state: LogState, checkpoints: Checkpoints, pace: MaintenancePace, owns: Callable[[], bool]
    ) -> None:
        self._state, self._checkpoints, self._pace, self._owns = state, checkpoints, pace, owns

    async def run(self) -> None:
        """Take a turn at once and then again and again, as long as this process owns the log."""
        while self._owns():
            try:
                await self._turn()
            except TidewalError as error:
                _log.warning("the log's maintenance is put off: %s", error)
            await asyncio.sleep(self._pace.turn_s)

    async def _turn(self) -> None:
        if self._checkpoint_due():
            await self._checkpoints.make()

    def _checkpoint_due(self) -> bool:
        """Whether opening would read too much behind the last checkpoint. A large one is made less often."""
        state, pace = self._state, self._pace
        enough = max(pace.checkpoint_bytes, pace.checkpoint_share * self._checkpoints.size)
        return state.blocks >= pace.checkpoint_blocks or state.bytes >= enough
