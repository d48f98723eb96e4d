"""The migration of a log that several processes use, while they do.

It is copied and compared beside them (`prepare`). Then it says `migrating`, by which nodes stop their roles and clients
their members of groups, each by itself (`runtime/log/migration_watch.py`). When all have left, or their leases have
ended, `migrate` does the rest, and they go on with the new log; where that fails, with the old one again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from ..clock import Clock
from ..errors import CorruptLog, Fenced, InvalidRequest, PositionLost, TidewalError, Unavailable
from ..log.migration_state import MIGRATION_CHANNEL, MigrationPhase, MigrationState, migration_state
from ..log.wal import Wal
from .beginning import LOOKS, check_source, fitting
from .channel_copy import Check, unchecked
from .group_positions import idle_groups
from .lease_watch import LeaseWatch
from .log_states import LogStates
from .migration import MigrationProof, OnProgress, migrate
from .migration_run import SETTLE_S
from .node_log import NodeLog
from .node_tables import NodeTables
from .preparation import LOOK_S, begin_switch, end_switch, prepare

LEAVE_S = 120.0  # for nodes and members to leave, until the old log is in use again


async def migrate_in_use(
    old: Wal,
    new: Wal,
    old_url: str,
    new_url: str,
    *,
    tables: NodeTables | None = None,
    on_progress: OnProgress = lambda _: None,
    settle_s: float = SETTLE_S,
    leave_s: float = LEAVE_S,
    clock: Clock | None = None,
) -> MigrationProof:
    """Migrate `old` to `new` while nodes and clients use `old`, or go on with that where an earlier call ended. Each
    stops for what is left, and goes on with `new`. The parameters are those of `migrate`; what uses `old` has `leave_s`
    seconds to leave it, and `clock` gives records their time.

    Raises what `prepare` and `migrate` do, and `Unavailable`, which names the nodes and groups that have not left.
    After an error `old` is in use again, unless it is migrated, or another run has the migration (`Fenced`); this may
    be called again, or be taken back. Killed in between, what uses `old` waits for that."""
    await check_source(old, new_url)
    leases = LeaseWatch(old, clock)
    await leases.look()
    state, compared = await migration_state(old), None
    phase = state.phase
    if phase.in_use:
        compared = await prepare(old, new, old_url, new_url, tables=tables, on_progress=on_progress, settle_s=settle_s)
        state = await migration_state(old)
        await leases.over()  # those of before, while all goes on
        await _until_programs_ended(old, lambda: _check_same(old, state), on_progress, leave_s)
    try:
        if phase.in_use:
            await _check_same(old, state)
            await begin_switch(old, new)
        if phase.in_use or phase is MigrationPhase.MIGRATING:
            look, check = partial(LogStates.read, old, tables, beside=True), lambda: _check_same(old, state)
            await until_left(old, leases, look, check, on_progress, leave_s)
        await _check_same(old, state)
        return await migrate(
            old,
            new,
            old_url,
            new_url,
            tables=tables,
            on_progress=on_progress,
            settle_s=settle_s,
            compared=compared,
            beside=True,
        )
    except Fenced:  # another run has the migration, or has ended it: what becomes of the old log is up to that
        raise
    except (TidewalError, asyncio.CancelledError):
        if await end_switch(old, new):
            on_progress("the old log is in use again")
        raise


async def _check_same(old: Wal, state: MigrationState) -> None:
    """Raise `Fenced` where `old` is in the migration of `state` no more."""
    if (await migration_state(old)).id != state.id:
        raise Fenced(
            "this migration was taken back, and this run of it stops: begin again, where it is wanted",
            channel=MIGRATION_CHANNEL,
        )


async def _until_programs_ended(old: Wal, check: Check, on_progress: OnProgress, leave_s: float) -> None:
    """Wait, while nodes go on, until no named producer is open and no batch of Spark is half done: nodes that have left
    would stand still for that. Raises as `until_left`."""
    until, said = asyncio.get_running_loop().time() + leave_s, ""
    while True:
        await check()
        try:
            await fitting(lambda: LogStates.check_programs(old), in_use=True)
            return
        except Unavailable as error:
            said = _waited_for(error, said, until, leave_s, on_progress)
        await asyncio.sleep(LOOK_S)


def _waited_for(error: Unavailable, said: str, until: float, leave_s: float, on_progress: OnProgress) -> str:
    """Tell what is waited for, unless it is `said`. Raises `Unavailable` where it was waited for `leave_s` seconds."""
    if error.message != said:
        on_progress(error.message)
    if asyncio.get_running_loop().time() >= until:
        raise Unavailable(f"{error.message}. That was waited for {leave_s:g} s") from error
    return error.message


async def until_left(
    old: Wal,
    leases: LeaseWatch,
    look: Callable[[], Awaitable[object]] = unchecked,
    check: Check = unchecked,
    on_progress: OnProgress = lambda _: None,
    leave_s: float = LEAVE_S,
) -> None:
    """Wait until no node and no member of a group uses `old`, and nothing rests on the lease of a node; one that is
    silent is evicted. `check` is called before each look, and `look` once all nodes have left: what it raises counts
    where it does so again, but for `Unavailable`, by which it is called until it does not. Raises `Unavailable` where
    one has not left after `leave_s` seconds, and what `check` and `look` do."""
    until, said, looks = asyncio.get_running_loop().time() + leave_s, "", LOOKS
    while True:
        await check()
        try:
            await leases.end_silent()
            node = await NodeLog.read_states(old)
            if node is not None:
                node.check_left()  # on a directory this process does not have the lock, which says so else
            await look()
            await idle_groups(old)
            break
        except Unavailable as error:
            said = _waited_for(error, said, until, leave_s, on_progress)
        except (InvalidRequest, CorruptLog, PositionLost):  # it may have been read in the midst of a node's last writes
            looks -= 1
            if not looks:
                raise
        await asyncio.sleep(LOOK_S)
    await leases.over()
