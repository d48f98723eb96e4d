"""How a migration begins, in the old log and in the new one, and whether it has ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar
from uuid import uuid4

from ..errors import ChannelNotFound, CorruptLog, InvalidRequest, PositionLost, Unavailable, Unsupported
from ..log.migration_state import (
    MIGRATION_CHANNEL,
    MigrationPhase,
    MigrationState,
    change_migration_state,
    come_into_use,
    mark_of,
    migration_state,
)
from ..log.redaction import shown_url
from ..log.replication_state import check_not_replica, check_source_fenced
from ..log.wal import Wal
from .channel_copy import check_not_lost
from .group_positions import groups_of
from .log_states import LogStates
from .migration_run import MigrationRun
from .mirrored_channels import channels_of
from .node_tables import NodeTables

T = TypeVar("T")

LOOKS = 3  # at what nodes have in a log that is in use, until what does not fit together is an error
# What a log that is `migrating` says where it was in use before: what was copied then may have been dropped since.
PREPARED: Mapping[str, Any] = {"prepared": True}
UNDER_WAY = (  # the phases of a log that goes to another one
    MigrationPhase.PREPARING,
    MigrationPhase.MIGRATING,
    MigrationPhase.CANCELLING,
    MigrationPhase.MIGRATED,
)


async def check_source(old: Wal, new_url: str) -> None:
    """Raise `InvalidRequest` where `old` goes to another log than that at `new_url`, or has no channel, as a log of
    brokers whose name is misspelt: a command looks before it makes the new one."""
    state = await migration_state(old)
    if state.phase in UNDER_WAY:
        check_target(state, new_url)
    elif state.phase is MigrationPhase.OPEN and not await channels_of(old):
        raise InvalidRequest("the old log has no channels, nothing was changed: check its URL")


async def has_ended(new: Wal, state: MigrationState, new_url: str) -> bool:
    """Whether the new log is in use: an earlier run has ended the migration."""
    if state.phase is not MigrationPhase.MIGRATED:
        return False
    check_target(state, new_url)
    return await is_marked(new, state) and not await is_pending(new, state)


async def begin(
    old: Wal,
    new: Wal,
    old_url: str,
    new_url: str,
    state: MigrationState,
    settle_s: float,
    tables: NodeTables | None,
    phase: MigrationPhase = MigrationPhase.MIGRATING,
) -> MigrationRun:
    """A run of the migration that the old log is in (`state`), or of a new one, which begins with `phase`."""
    await check_not_replica(old, shown_url(old_url))
    await check_not_replica(new, shown_url(new_url))
    await check_source_fenced(old)
    if state.phase in (MigrationPhase.RESERVED, MigrationPhase.PENDING):
        raise Unavailable("this log is the target of a migration that has not ended: end that one first")
    if state.phase is MigrationPhase.CANCELLING:
        raise Unavailable("this migration is being taken back: end that with --cancel, then begin again")
    if state.phase is MigrationPhase.OPEN:
        await _check_movable(old, new, tables, in_use=phase is MigrationPhase.PREPARING)
        await _check_empty(new)
        return await MigrationRun.begin(old, new, MigrationState(phase, uuid4().hex, shown_url(new_url)))
    check_target(state, new_url)
    return await MigrationRun.claim(old, new, state, settle_s=settle_s)


async def reserve(run: MigrationRun, old_url: str) -> None:
    """Let the new log know of the migration, or find that it does.

    The log is looked at again once it is reserved, when no program can open it any more: what came to it before that is
    others', and stays. Only one that was empty then becomes `pending`, and `--cancel` removes channels there alone."""
    state, new, there = run.state, run.new, await migration_state(run.new)
    if state.phase is MigrationPhase.MIGRATED:
        await _check_bears(new, there, state)
        return
    if there.id != state.id:
        await _check_empty(new)
        there = MigrationState(MigrationPhase.RESERVED, state.id, shown_url(old_url))
        await run.check()
        await change_migration_state(new, there)
    if there.phase is MigrationPhase.RESERVED:
        is_empty = await _is_empty(new)
        await run.check()
        if not is_empty:
            await come_into_use(new)
            raise _not_empty()
        await change_migration_state(new, replace(there, phase=MigrationPhase.PENDING))


async def is_pending(new: Wal, state: MigrationState) -> bool:
    there = await migration_state(new)
    return there.phase is MigrationPhase.PENDING and there.id == state.id


def check_target(state: MigrationState, new_url: str) -> None:
    if state.other != shown_url(new_url):
        raise InvalidRequest(f"this log migrates to {state.other}: go on with that one, or take it back with --cancel")


async def _check_bears(new: Wal, there: MigrationState, state: MigrationState) -> None:
    """The old log is migrated: a log that does not know of that is not the one which has its entries."""
    if there.id != state.id and not await is_marked(new, state):
        raise CorruptLog(
            f"the old log was migrated to {state.other}, and the log there now is not that one: it was emptied, "
            "removed or replaced. Nothing was changed; the old log still has all that it had, and can be read"
        )


async def is_marked(new: Wal, state: MigrationState) -> bool:
    return mark_of(state.id) in await new.channels()


async def _check_movable(old: Wal, new: Wal, tables: NodeTables | None, *, in_use: bool) -> None:
    for wal in (old, new):
        if wal.capabilities.foreign_topics:
            raise Unsupported("topics that others made are not migrated", capability="migration")
    await fitting(lambda: LogStates.read(old, tables, in_use=in_use), in_use=in_use)
    groups = await groups_of(old, in_use=in_use)
    if groups and not new.capabilities.groups:
        raise Unsupported(f"{new.name}:// has no consumer groups, the old log has {len(groups)}", capability="groups")
    for group in groups:
        for channel, id in group.positions.items():
            with suppress(ChannelNotFound):  # it was dropped since
                await check_not_lost(old, await old.describe(channel), [id or b""])


async def fitting(read: Callable[[], Awaitable[T]], *, in_use: bool) -> T:
    """What `read` returns of a node's log and tables. While the log is in use collections come and go, tables go on,
    and snapshots take the place of records: what does not fit together may have been read in such a moment, and counts
    only where it is so each time. So does a channel that was dropped since it was listed."""
    for left in reversed(range(LOOKS if in_use else 1)):
        try:
            return await read()
        except (InvalidRequest, CorruptLog, PositionLost, ChannelNotFound):
            if not left:
                raise
    raise AssertionError


async def _check_empty(new: Wal) -> None:
    if await migration_state(new) != MigrationState() or not await _is_empty(new):
        raise _not_empty()


async def _is_empty(new: Wal) -> bool:
    return not set(await new.channels()) - {MIGRATION_CHANNEL}


def _not_empty() -> InvalidRequest:
    return InvalidRequest("the new log is not empty: take another directory, or another name on the brokers")
