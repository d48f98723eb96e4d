"""The migration of the log of a node while it runs: its roles stop for what is left, and go on with the new log.

It is for a log that one process of one machine owns, in that process, where no other node uses it (for several see
`actors/shared_log_migration.py`): it copies while all goes on
(`runtime/migration/preparation.py`), stops the roles, opens the log so that no other process uses it, lets `migrate` do
the rest, and starts the roles again on the log that is in use then: the new one, or the old one where that failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Literal, Protocol

from ..runtime.cluster.state import ClusterState
from ..runtime.errors import CorruptLog, InvalidRequest, TidewalError, Unavailable, Unsupported, to_wire
from ..runtime.log.opening import find_backend
from ..runtime.log.redaction import shown_url
from ..runtime.log.wal import Wal
from ..runtime.migration.migration import cancel_migration, cancellable_state, migrate
from ..runtime.migration.migration_run import SETTLE_S, Compared
from ..runtime.migration.node_tables import NodeTables
from ..runtime.migration.preparation import begin_switch, end_switch, prepare
from ..runtime.rpc.protocol import Params
from ..runtime.waiting import ended
from .open_logs import OpenLogs

if TYPE_CHECKING:
    from .shared_log_migration import SharedLogMigration

LINES_MAX = 100  # of progress, that are kept
SWITCH_TRIES = 3  # behind the point of no return, until the node ends
AGAIN_S = 1.0  # between two of them

_log = logging.getLogger("tidewal.migration")

Phase = Literal["", "copying", "switching", "migrated", "failed", "cancelled"]


class MovingNode(Protocol):
    """The node whose log is migrated."""

    @property
    def members(self) -> ClusterState:
        """The cluster, as far as it was read."""
        ...

    async def stop_roles(self) -> None:
        """Stop all roles, and leave the cluster: nothing of the node uses the log any more."""
        ...

    async def start_roles(self, wal: Wal) -> bool:
        """Start them on the log `wal`. Returns False, with none started, where that is in use no more. Raises what
        entering the node raises."""
        ...

    def fail(self, error: BaseException) -> None:
        """End the node with an error."""
        ...


class LogMigration:
    """The migration that the node is asked for, one at a time. `switching` says that its roles are about to stop, or
    have stopped, and go on: they leave to the next ones what they have not answered."""

    def __init__(
        self,
        node: MovingNode,
        logs: OpenLogs | None,
        tables: NodeTables,
        watch: SharedLogMigration,
        *,
        settle_s: float = SETTLE_S,
    ) -> None:
        """Without `logs` the node was given its log open, and cannot open another: all is refused. `watch` has the node
        go along with a command's migration: it does not look while the node has one of its own."""
        self._node, self._logs, self._tables, self._settle_s = node, logs, tables, settle_s
        self._watch = watch
        self.switching: bool = False
        self._task: asyncio.Task[None] | None = None
        self._taking_back = asyncio.Lock()
        self._phase: Phase = ""
        self._to = ""
        self._error: TidewalError | None = None
        self._lines: deque[str] = deque(maxlen=LINES_MAX)
        self._said = 0  # lines, ever

    # ---- what operators ask ------------------------------------------------------------------------------------------

    def begin(self, to: str) -> None:
        """Begin to migrate the log to that at the URL `to`, opened with the settings of this process, or find that it
        is being done; `status` says how far it is. Raises `Unsupported` for a log that others may write to, and for a
        node that was given its log open, `Unavailable` where other nodes use the log and while a migration is being
        taken back, `InvalidRequest` while it goes to another one, and `ConfigError` for a URL that no adapter opens."""
        find_backend(to).check_url(to)
        self._checked()
        if self._taking_back.locked():
            raise Unavailable("a migration of this log is being taken back at this moment: type the command again")
        if self._is_running:
            if to != self._to:
                raise InvalidRequest(f"the log is being migrated to {shown_url(self._to)}: wait, or use --cancel")
            return
        self._check_alone()
        self._to, self._phase, self._error, self._said = to, "copying", None, 0
        self._lines.clear()
        self._task = asyncio.create_task(self._run(to), name="migration")

    async def migrate(self, to: str) -> None:
        """`begin`, and return when the node works on the new log. Cancelled, it goes on. Raises the error with which it
        has failed, and `Unavailable` where it was taken back."""
        self.begin(to)
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._error is not None:
            raise self._error
        if self._phase != "migrated":
            raise Unavailable(f"the migration to {shown_url(to)} has ended before its end: call it again")

    def status(self) -> Params:
        """How far it is: `phase` ("" before any), `to`, the last `lines` of progress, how many there were (`said`), and
        the wire form of the `error` with which it has failed."""
        error = None if self._error is None else to_wire(self._error)
        shown = shown_url(self._to) if self._to else ""
        return {"phase": self._phase, "to": shown, "lines": list(self._lines), "said": self._said, "error": error}

    async def cancel(self, to: str) -> None:
        """Take the migration to the log at `to` back. Raises `Unavailable` while the roles are stopped for it, and what
        `cancel_migration` does."""
        logs = self._checked()
        async with self._taking_back:
            if self._is_switching:
                raise Unavailable("the node is going over to the new log at this moment: look at --status")
            await self.stop()
            await cancellable_state(logs.wal, to)
            new = await logs.opener.open_alone(to)
            try:
                await cancel_migration(logs.wal, new, to, settle_s=self._settle_s)
            finally:
                await new.close()
            self._phase, self._error = "cancelled", None

    async def stop(self) -> None:
        """End what is under way: the copying at once; a switch is waited for, until the roles work again."""
        task = self._task
        if task is None:
            return
        if self._is_switching:
            await asyncio.wait([task])
        await ended(task)

    @property
    def _is_switching(self) -> bool:
        """Whether the log is, or is about to be, in use no more, or the roles have not started again: to end it then
        would leave no log in use, or a node without roles."""
        return self._is_running and self._phase == "switching"

    @property
    def _is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def _checked(self) -> OpenLogs:
        if self._logs is None:
            raise Unsupported(
                "this node was given an open log, and cannot open another: start it with `standalone` or `tidewal run`,"
                " or stop it and migrate the log then",
                capability="migration",
            )
        if self._logs.opener.owned_by_one(self._logs.url):
            return self._logs
        if self._logs.opener.moved_by_command(self._logs.url):
            raise Unsupported(
                f"{self._logs.wal.name}:// is written to by several processes: the command `tidewal migrate` migrates "
                "it, and nodes and clients go over to the new log by themselves",
                capability="migration",
            )
        raise Unsupported(
            f"{self._logs.wal.name}:// may be opened on another machine, and is migrated while none uses it: stop "
            "all nodes and programs, then type the command",
            capability="migration",
        )

    def _check_alone(self) -> None:
        names = sorted(member.name for member in self._node.members.members.values())
        if len(names) > 1:
            raise Unavailable(
                f"{len(names)} nodes use this log ({', '.join(names)}), and go over to another together: the command "
                "`tidewal migrate` has them do it"
            )

    # ---- the migration -----------------------------------------------------------------------------------------------

    def _say(self, line: str) -> None:
        self._lines.append(line)
        self._said += 1

    async def _run(self, to: str) -> None:
        assert self._logs is not None
        try:
            new = await self._logs.opener.open_alone(to)
            try:
                compared = await self._prepared(self._logs, new, to)
                self._check_alone()
                await self._switch(self._logs, new, to, compared)
            finally:
                await new.close()
        except TidewalError as error:
            self._phase, self._error = "failed", error
            _log.warning("the log is not migrated to %s: %s", shown_url(to), error)
        except BaseException as error:
            self._phase = "failed"
            if not isinstance(error, asyncio.CancelledError):
                self._node.fail(error)
            raise
        finally:
            self.switching = False

    async def _prepared(self, logs: OpenLogs, new: Wal, to: str) -> Compared:
        return await prepare(
            logs.wal, new, logs.url, to, tables=self._tables, on_progress=self._say, settle_s=self._settle_s
        )

    async def _switch(self, logs: OpenLogs, new: Wal, to: str, compared: Compared) -> None:
        """Stop the roles, do the rest, and start them on the log that is in use then. An error of what follows the
        stop ends the node, for it has no log to work on."""
        self._phase = "switching"
        await self._watch.stop()  # the roles look again once they are started
        try:
            await begin_switch(logs.wal, new)
        except TidewalError:
            await end_switch(logs.wal, new)  # it may have begun: the node goes on with the log
            self._watch.begin()
            raise
        self.switching = True
        failed: TidewalError | None = None
        try:
            await self._node.stop_roles()
            try:
                await self._do_the_rest(logs, new, to, compared)
            except TidewalError as error:
                if not await self._is_taken_back(logs.wal, new, to, error):
                    raise
                failed = error
            await new.close()
            wal = await (logs.in_use_again() if failed is not None else logs.move_to(to))
            self.switching = False
            if not await self._node.start_roles(wal):
                self._watch.begin()
        except BaseException as error:
            self._node.fail(error)
            raise
        if failed is not None:
            raise failed
        self._phase = "migrated"
        _log.info("the node goes on with %s", shown_url(to))

    async def _do_the_rest(self, logs: OpenLogs, new: Wal, to: str, compared: Compared) -> None:
        """`migrate`, again where that fails behind the point of no return."""
        old = await logs.alone()
        known: Compared | None = compared
        for left in reversed(range(SWITCH_TRIES)):
            try:
                await migrate(
                    old,
                    new,
                    logs.url,
                    to,
                    tables=self._tables,
                    on_progress=self._say,
                    settle_s=self._settle_s,
                    compared=known,
                )
                return
            except TidewalError as error:
                if not left or not error.retryable or await end_switch(old, new):
                    raise
                _log.warning("what is left of the migration is done again: %s", error)
                known = None
            await asyncio.sleep(AGAIN_S)

    async def _is_taken_back(self, old: Wal, new: Wal, to: str, error: TidewalError) -> bool:
        """Whether the old log is in use again. Behind the point of no return that is so where `error` says that a table
        or the new log is not as it was found: to do the rest again would not help, and all can still be taken back."""
        if await end_switch(old, new):
            return True
        if not isinstance(error, (CorruptLog, InvalidRequest)):
            return False
        try:
            await cancel_migration(old, new, to, settle_s=self._settle_s)
        except TidewalError as further:
            _log.warning("the migration to %s is not taken back: %s", shown_url(to), further)
            return False
        return True
