"""What a node does while an operator's command migrates a log that several processes use.

The command copies beside the nodes. Then the log says `migrating`: each node stops its roles, which ends what it owns
and its membership, and keeps its process, with the ports of metrics and health. When all have left the command does the
rest, and each node starts its roles on the log that is in use then, with its own settings. A node that is started
meanwhile waits in the same way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager

from ..runtime.config.settings import Settings
from ..runtime.errors import ConfigError, Moved, TidewalError, Unavailable
from ..runtime.log.migration_state import MigrationPhase, migration_state
from ..runtime.log.migration_watch import LOOK_PREPARED_S, MigrationWatch, left_meanwhile, opened_next
from ..runtime.log.redaction import shown_url
from ..runtime.log.wal import Wal
from ..runtime.metrics.metrics import Metrics
from ..runtime.metrics.server import Health, MetricsServer
from ..runtime.waiting import ended
from .log_migration import MovingNode
from .open_logs import LogOpener, OpenLogs

WAIT_S = 3600.0  # for the end of a migration, until the node ends
SWITCHING = Health(True, {"switching": "the node waits: its log is being migrated"}, ready=False)

_AWAITED = (
    MigrationPhase.MIGRATING,
    MigrationPhase.CANCELLING,
    MigrationPhase.MIGRATED,
)  # else it is the target of one

_log = logging.getLogger("tidewal.migration")


class SharedLogMigration:
    """Has a node go along with the migration of its log, of which `logs` has the one that it works on. `switching` says
    that its roles are about to stop, or have stopped, and go on."""

    def __init__(self, node: MovingNode, logs: OpenLogs | None) -> None:
        """Without `logs`, and on a log that no command migrates while it is in use, it does nothing."""
        self._node, self._logs = node, logs
        self.switching: bool = False
        self._task: asyncio.Task[None] | None = None

    @property
    def _is_watched(self) -> bool:
        return self._logs is not None and self._logs.opener.moved_by_command(self._logs.url)

    def begin(self) -> None:
        """Watch the log from now on. May be repeated."""
        if self._is_watched and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name="migration by a command")

    async def stop(self) -> None:
        """Go along no more. Where the roles are stopped they stay so."""
        if self._task is not None:
            await ended(self._task)

    async def has_left(self) -> bool:
        """Whether the log is in use no more, though it was when it was opened. To be asked by a node that has become a
        member: either the command waits for it, or it must not begin. Raises `Moved` where a replica was promoted."""
        if not self._is_watched or self._logs is None:
            return False
        return await left_meanwhile(self._logs.wal, shown_url(self._logs.url))

    async def until_left(self) -> None:
        """Return when the log is in use no more: on one that no command migrates while it is in use, never."""
        if not self._is_watched or self._logs is None:
            await asyncio.Future[None]()
        else:
            await MigrationWatch(self._logs.wal, shown_url(self._logs.url)).until_left()

    async def _run(self) -> None:
        try:
            while self._is_watched:
                await self.until_left()
                await self.go_along()
        except Exception as error:
            self._node.fail(error)

    async def go_along(self) -> None:
        """Stop the roles, wait for the end of the migration, and start them on the log that is in use then. Raises
        `Moved` where that cannot be opened here, `Unavailable` where the migration has not ended after `WAIT_S`
        seconds, and what starting the roles raises."""
        assert self._logs is not None
        started = False
        while not started:
            self.switching = True
            _log.warning("%s is migrated by a command: the node stops its roles, and waits", shown_url(self._logs.url))
            await _whole(self._node.stop_roles())
            wal = await _next_log(self._logs)
            self.switching = False
            started = await self._node.start_roles(wal)
        _log.warning("the node goes on with %s", shown_url(self._logs.url))


async def _whole(stopping: Coroutine[object, object, None]) -> None:
    """Await what must not end half-way. Cancelled, it is waited for first."""
    task = asyncio.create_task(stopping)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def _next_log(logs: OpenLogs) -> Wal:
    """The log that is in use next: `logs` has it then. The one before is closed first, which ends all that uses it."""
    try:
        async with asyncio.timeout(WAIT_S):
            old = await _looked_at(logs)
            url, wal = await opened_next(MigrationWatch(old, shown_url(logs.url)), logs.url, logs.opener.open)
    except TimeoutError:
        raise Unavailable(
            f"the migration of {shown_url(logs.url)} has not ended within {WAIT_S:g} s: end it with `tidewal migrate`, "
            "or take it back with --cancel, and start the node again"
        ) from None
    await logs.go_on_with(url, wal)
    return wal


async def _looked_at(logs: OpenLogs) -> Wal:
    """The log once more, to be looked at."""
    while True:
        try:
            return await logs.looked_at()
        except TidewalError as error:
            if not error.retryable:
                raise
            _log.warning("%s is opened again, to see what becomes of it: %s", shown_url(logs.url), error)
        await asyncio.sleep(LOOK_PREPARED_S)


async def open_logs(
    opener: LogOpener, url: str, settings: Settings, metrics: Metrics, *, follow: bool = False
) -> OpenLogs:
    """Open the log at `url` for a node. While it is migrated by a command the node waits for the end of that, and says
    so where it answers questions about its health. Where that has ended the node goes on with the new log only if it is
    to `follow`. Raises what `LogOpener.open` does, and `SharedLogMigration.go_along` where it has waited."""
    try:
        return OpenLogs(opener, url, await opener.open(url))
    except (Moved, Unavailable) as error:
        if not opener.moved_by_command(url) or not await _is_to_come(opener, url, error, follow=follow):
            raise
    _log.warning("%s is migrated by a command: the node starts when that has ended", shown_url(url))
    logs = OpenLogs(opener, url, await opener.look_at(url))
    try:
        async with _waiting_health(settings, metrics):
            await _next_log(logs)
    except BaseException:
        await logs.close()
        raise
    return logs


async def _is_to_come(opener: LogOpener, url: str, error: Moved | Unavailable, *, follow: bool) -> bool:
    """Whether a log of the migration of that at `url`, which cannot be opened for `error`, is in use soon. Raises what
    `LogOpener.look_at` does."""
    if isinstance(error, Moved) and not follow:
        return await _is_pending(opener, error.url or "")
    try:
        wal = await opener.look_at(url)
    except ConfigError:  # there is no log
        return False
    try:
        return (await migration_state(wal)).phase in _AWAITED
    finally:
        await wal.close()


async def _is_pending(opener: LogOpener, url: str) -> bool:
    """Whether the log at `url` has not everything yet that is migrated to it."""
    try:
        wal = await opener.open(url)
    except TidewalError as error:
        return error.retryable
    await wal.close()
    return False


@asynccontextmanager
async def _waiting_health(settings: Settings, metrics: Metrics) -> AsyncGenerator[None]:
    endpoint = settings.metrics
    if not endpoint.port:
        yield
        return
    async with MetricsServer(metrics, lambda: SWITCHING, host=endpoint.host, port=endpoint.port):
        yield
