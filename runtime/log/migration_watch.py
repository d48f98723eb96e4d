"""What a process does that uses a log with others, while an operator's command migrates that log.

It looks at what the log says of its migration. Where the log is in use no more the process leaves it, waits until one
of the two logs is in use, and goes on with that one, which it opens with its own settings.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from ..errors import ConfigError, DirectoryInUse, Moved, TidewalError
from .migration_state import MigrationPhase, MigrationState, MigrationStates, migration_state
from .redaction import shown_url
from .replication_state import check_not_replica
from .wal import Wal

LOOK_S = 2.0  # between two looks at a log of which nothing is migrated
LOOK_COSTLY_S = 10.0  # where a look is a request that is paid for
LOOK_PREPARED_S = 0.5  # at one that is being copied, or that is in use no more
OPENINGS_MAX = 20  # of a directory that another process owns: the command does, until the log is in use

_log = logging.getLogger("tidewal.migration")

OpenLog: TypeAlias = Callable[[str], Awaitable[Wal]]
"""Opens the log at a URL to use it. Raises what `open_wal` does."""


class MigrationWatch:
    """What `wal`, which is shown as `shown`, says of its migration. One task at a time uses it."""

    def __init__(self, wal: Wal, shown: str) -> None:
        self._states = MigrationStates(wal)
        self._idle_s = LOOK_COSTLY_S if wal.capabilities.costly_appends else LOOK_S
        self._shown = shown
        self._warned = ""

    async def until_left(self) -> None:
        """Return when the log is in use no more. Where this process may not look at that, this never returns."""
        while True:
            state = await self._look()
            if state is not None and not state.phase.in_use:
                return
            is_idle = state is None or state.phase is MigrationPhase.OPEN
            await asyncio.sleep(self._idle_s if is_idle else LOOK_PREPARED_S)

    async def until_decided(self) -> MigrationState:
        """Return when the log is in use again, or is migrated, which may be taken back until the other is in use."""
        while True:
            state = await self._look()
            if state is not None and (state.phase.in_use or state.phase is MigrationPhase.MIGRATED):
                return state
            await asyncio.sleep(LOOK_PREPARED_S)

    async def _look(self) -> MigrationState | None:
        """What it says now; None where that is not known."""
        try:
            return await self._states.read()
        except Moved:  # calls say so as well
            pass
        except ConfigError as error:  # rights for its own channels alone
            self._warn(f"this process may not see whether {self._shown} is migrated, and would not follow: {error}")
        except TidewalError as error:
            if not error.retryable:
                self._warn(f"it cannot be seen whether {self._shown} is migrated: {error}")
        return None

    def _warn(self, line: str) -> None:
        if line != self._warned:
            _log.warning("%s", line)
        self._warned = line


async def opened_next(watch: MigrationWatch, url: str, open: OpenLog) -> tuple[str, Wal]:
    """The log that is in use next, with its URL: the one at `url`, which `watch` looks at, or that to which it was
    migrated, also where that was migrated further. Raises `Moved` where that one cannot be opened here, and where the
    old one can be no more what `open` raises."""
    refused = 0
    while True:
        state = await watch.until_decided()
        at = state.other if state.phase is MigrationPhase.MIGRATED else url
        try:
            found, wal = await _opened(at, open)
            if at == url or await _is_still(watch, state, wal):
                return found, wal
        except TidewalError as error:
            refused += isinstance(error, DirectoryInUse)
            is_awaited = error.retryable or (isinstance(error, DirectoryInUse) and refused < OPENINGS_MAX)
            if at != url and not is_awaited:
                raise cannot_follow(url, at, error) from error
            if not is_awaited:
                raise
        await asyncio.sleep(LOOK_PREPARED_S)


async def _is_still(watch: MigrationWatch, state: MigrationState, wal: Wal) -> bool:
    """Whether the old log is migrated as `state` says, now that the new one is open, as `wal`; else that is closed.
    Where a migration is taken back, the new log comes into use empty, and the old one has said so before."""
    is_still = False
    try:
        now = await watch.until_decided()
        is_still = now.phase is MigrationPhase.MIGRATED and now.id == state.id
    finally:
        if not is_still:
            await wal.close()
    return is_still


async def _opened(url: str, open: OpenLog) -> tuple[str, Wal]:
    while True:
        try:
            return url, await open(url)
        except Moved as further:
            if not further.url:
                raise
            url = further.url


async def left_meanwhile(wal: Wal, shown: str) -> bool:
    """Whether the log, shown as `shown`, which was in use when it was opened, is migrated since. A process that becomes
    a user of it, by a record, asks behind that: either the migration or the promotion sees the record, or the process
    sees them. Raises `Moved` where a replica was promoted since, and errors of the log."""
    try:
        await check_not_replica(wal, shown)
        return not (await migration_state(wal)).phase.in_use
    except ConfigError:  # it may not look
        return False


def cannot_follow(url: str, to: str, error: TidewalError) -> Moved:
    """The error of a process that cannot open the log to which its own was migrated."""
    return Moved(
        f"{shown_url(url)} was migrated to {shown_url(to)}: set wal to that log. It cannot be opened here "
        f"({error.message}): its settings are those of this process, which is to be started anew with them",
        url=to,
    )
