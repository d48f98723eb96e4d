"""What the owner of the log does beside appending, now and then: retention, runs, checkpoints, garbage."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from ...runtime.errors import Closed, TidewalError
from .compactor import Compactor
from .control import Control, Truncated
from .garbage_collector import GarbageCollector
from .open_log import OpenLog
from .retention import expired_before
from .stored_channel import StoredChannel

_log = logging.getLogger(__name__)


class Maintenance:
    """The maintenance of a log by its owner, in turns. What a turn does not get to, the next one does, of this owner or
    of another."""

    def __init__(
        self, log: OpenLog, owns: Callable[[], bool], commit: Callable[[Sequence[Control]], Awaitable[None]]
    ) -> None:
        """`commit` stores control entries, all in one block."""
        self._state, self._checkpoints, self._time = log.state, log.checkpoints, log.time
        self._compactor, self._collector = Compactor(log, commit), GarbageCollector(log)
        self._pace, self._owns, self._commit = log.pace, owns, commit
        self._surveyed_to = 0  # the epoch in which it was looked for what earlier owners have left behind

    async def run(self) -> None:
        """Take a turn at once and then again and again, as long as this process owns the log."""
        while self._owns():
            try:
                await self._turn()
            except Closed:
                return
            except TidewalError as error:
                _log.warning("the log's maintenance is put off: %s", error)
            await asyncio.sleep(self._pace.turn_s)

    async def _turn(self) -> None:
        await self._apply_retention()
        epoch = self._state.epoch
        if self._surveyed_to < epoch:
            await self._collector.survey()
            self._surveyed_to = epoch
        while await self._compactor.compact():
            pass
        self._collector.note()
        if self._checkpoint_due():
            await self._checkpoints.make()
        await self._collector.delete()

    async def _apply_retention(self) -> None:
        """Remove what the channels' policies keep no longer."""
        now_ms = self._time.now_ms()
        removed: list[Truncated] = []
        for channel in self._state.channels():
            id = expired_before(channel, now_ms)
            if id is not None:
                removed.append(Truncated(channel.number, id))
                _report_cut_off(channel, id)
        if removed:
            await self._commit(removed)

    def _checkpoint_due(self) -> bool:
        """Whether opening would read too much behind the last checkpoint. A large one is made less often."""
        state, pace = self._state, self._pace
        enough = max(pace.checkpoint_bytes, pace.checkpoint_share * self._checkpoints.size)
        return state.blocks >= pace.checkpoint_blocks or state.bytes >= enough


def _report_cut_off(channel: StoredChannel, id: bytes) -> None:
    """Report the groups that lose entries now, those before `id`, and have lost none before."""
    for group, progress in channel.groups.items():
        if channel.removed_to <= progress.acked_to and progress.acked_to + b"\0" < id:
            _log.warning(
                "retention cut group %s off in channel %s: it was too far behind",
                group,
                channel.name,
                extra={"channel": channel.name},
            )
