"""The log of a client: where it is migrated, the client goes on with the next one."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from ..runtime.errors import Closed, Moved, TidewalError
from ..runtime.log.following import FollowingWal
from ..runtime.log.migration_watch import MigrationWatch, left_meanwhile, opened_next
from ..runtime.log.redaction import shown_url
from ..runtime.log.wal import Wal
from ..runtime.waiting import ended
from .open_logs import LogOpener

AGAIN_S = 2.0  # until a log is tried again that could not be opened

_log = logging.getLogger("tidewal.migration")


async def has_left(wal: Wal | FollowingWal) -> bool:
    """Whether the log that a client follows is in use no more, though the client has not seen it yet. Raises as
    `left_meanwhile`."""
    return isinstance(wal, FollowingWal) and await left_meanwhile(wal, f"{wal.name}://")


class FollowedLog:
    """The log at `url`, open as `wal`, or that to which it is migrated; `following` is that for calls.

    The log is watched: once it is in use no more, what this client has begun there ends, and calls wait for the log
    that is in use next. Where one process owns the log, calls may say before that it has moved, by `Moved`."""

    def __init__(self, url: str, wal: Wal, opener: LogOpener) -> None:
        self._opener = opener
        self._at: tuple[str, Wal] = url, wal
        self._watching: asyncio.Task[None] | None = None
        self.following: FollowingWal = FollowingWal(wal, self._follow)
        self._watch(url, wal)

    async def stop(self) -> None:
        """Follow no further. Calls that wait for the next log raise `Closed`."""
        if self._watching is not None:
            await ended(self._watching)

    async def _follow(self, moved: Moved) -> Wal:
        """The log that has taken the place of one that was migrated, perhaps more than once."""
        await self.stop()  # the watch of the log before
        at = self._at
        try:
            at = await self._opened(moved)
        finally:
            self._watch(*at)
        return at[1]

    async def _opened(self, moved: Moved) -> tuple[str, Wal]:
        while True:
            url = moved.url or ""
            try:
                return url, await self._opener.open(url)
            except Moved as further:
                moved = further

    def _watch(self, url: str, wal: Wal) -> None:
        self._at = url, wal
        if self._opener.moved_by_command(url):
            self._watching = asyncio.create_task(self._go_along(url, wal), name="migration by a command")

    async def _go_along(self, url: str, wal: Wal) -> None:
        while self._opener.moved_by_command(url):
            await MigrationWatch(wal, shown_url(url)).until_left()
            _log.info("%s is migrated by a command: this client waits", shown_url(url))
            self.following.leave()
            try:
                with suppress(TidewalError):  # it is left all the same
                    await wal.close()
                self._at = url, wal = await self._next(url)
            except BaseException:
                self.following.fail(Closed("the client was closed while its log was migrated"))
                raise
            self.following.arrive(wal)

    async def _next(self, url: str) -> tuple[str, Wal]:
        """Wait for the log that is in use next. Where it cannot be opened here calls say why, until it can."""
        while True:
            try:
                old = await self._opener.look_at(url)
                try:
                    return await opened_next(MigrationWatch(old, shown_url(url)), url, self._opener.open)
                finally:
                    await old.close()
            except TidewalError as error:
                if not error.retryable:
                    self.following.fail(error)
            await asyncio.sleep(AGAIN_S)
