"""Bring the replica of a log of nodes into use without its source: what its line has goes to a new log.

What lies above the line is in some channels of the replica and not in others, so it is not gone on from: a migration
brings the replica as of its line (`LineLog`) to a new log, and the replica keeps what it had. Killed at any moment the
call is repeated, and until the new log has everything it can be taken back as any migration.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Set
from dataclasses import replace

from ..clock import to_datetime
from ..errors import InvalidRequest, Unavailable
from ..log.migration_state import MigrationPhase, migration_state
from ..log.redaction import shown_url
from ..log.replication_state import ReplicatedChannel, ReplicationPhase, ReplicationState, ReplicationStates, new_id
from ..log.wal import Entry, Wal
from ..migration.channel_copy import stored_entries
from ..migration.migration import OnProgress, migrate
from ..migration.migration_run import SETTLE_S
from ..migration.node_tables import NodeTables
from .consistent_line import ConsistentLine
from .line_log import LineLog
from .line_tables import LineTables
from .promotion import mark_promoted, replica_of
from .replicator import claim_replica, fenced, is_own
from .salvage import counted_place, entries_above


async def promote_at_line(
    target: Wal,
    new: Wal,
    target_url: str,
    new_url: str,
    *,
    tables: NodeTables | None = None,
    dropped: Set[str] = frozenset(),
    on_progress: OnProgress = lambda _: None,
    settle_s: float = SETTLE_S,
) -> ReplicationState:
    """Bring what the replica `target` of a log of nodes has up to its line to the empty log `new`, where nodes go on
    with their `tables`, and let the replica say that it is promoted, and was replaced by that log. What a table has
    above the line is removed from it; of the collections `dropped`, which came to an end above the line, the tables are
    gone. The other parameters are those of `migrate`. May be repeated after an error, or taken back with
    `cancel_migration` until `new` has everything. Returns what the replica says then.

    Raises `InvalidRequest` for a log that is no such replica, or is promoted already, `Unavailable` where it has no
    line yet, `Fenced` where a replicator claims it meanwhile, and as `migrate` does."""
    state = await replica_of(target)
    if state.phase is ReplicationPhase.PROMOTED:
        await _check_moved(target, new_url)
        return state
    if not state.of_node:
        raise InvalidRequest("the log of this replica has no nodes: promote it with --force alone, it is used itself")
    line = line_of(state)
    states, claim = ReplicationStates(target), new_id()
    await claim_replica(states, await states.read(), claim, target)
    if states.state.line != state.line:  # its replicator has drawn one by then
        line = line_of(states.state)

    async def check() -> None:
        if (await states.read()).claim != claim:
            raise fenced()

    log = await LineLog.open(target, line, check, dropped)
    moved = None if tables is None else LineTables(tables, log)
    for name in sorted(dropped & (set() if moved is None else await moved.collections())):
        raise InvalidRequest(f"there is a table of {name}: drop the collection once nodes go on", argument="dropped")
    try:
        await migrate(log, new, target_url, new_url, tables=moved, on_progress=on_progress, settle_s=settle_s)
    except InvalidRequest as error:
        name = error.fields.get("table")
        if moved is None or name is None or name in await moved.collections():
            raise
        raise InvalidRequest(
            f"there is no table of {name}, and nodes have stored rows in one: give the tables of these nodes. If the "
            f"collection was dropped after {to_datetime(line.time):%Y-%m-%d %H:%M:%S} UTC, give --dropped {name}",
            table=name,
        ) from error
    channels: dict[str, ReplicatedChannel] = {}
    for name in await target.channels():
        info = await target.describe(name)
        if not is_own(name) and not line.is_of_nodes(name) and not info.policy.ephemeral:
            channels[name] = await counted_place(target, info, state.channels.get(name, ReplicatedChannel()))
    return await mark_promoted(target, channels, claim, replace(line, states={}, groups={}).to_wire())


def line_of(state: ReplicationState) -> ConsistentLine:
    """The line of a replica. Raises `Unavailable` where it has none, and `InvalidRequest` for one that was promoted, of
    which the source was fenced or given up since."""
    line = ConsistentLine.from_wire(state.line)
    if line is not None:
        return line
    if state.phase is ReplicationPhase.PROMOTED:
        raise InvalidRequest(
            "this replica was promoted, and its source was fenced, or given up, since: up to where it went is forgotten"
        )
    halted = [f"{name}: {place.halted}" for name, place in state.channels.items() if place.halted]
    raise Unavailable(
        "the replica has no line yet up to which all of its channels are complete"
        + (f", as some are halted ({'; '.join(halted)})" if halted else "")
        + ": what it has can be read (`tidewal tail`), and promoted with --from where the source is back"
    )


async def left_out(target: Wal, state: ReplicationState) -> AsyncIterator[tuple[str, Entry]]:
    """What the replica, whose `state` this is, has above its line: the channel and each entry."""
    line = line_of(state)
    for name in await target.channels():
        info = await target.describe(name)
        if is_own(name) or not line.is_of_nodes(name) or info.policy.ephemeral:
            continue
        end = line.ends.get(name)
        above = stored_entries(target, info) if end is None else entries_above(target, info, line.time_of(name), end)
        async for entry in above:
            yield name, entry


async def _check_moved(target: Wal, new_url: str) -> None:
    moved = await migration_state(target)
    if moved.phase is not MigrationPhase.MIGRATED:
        raise InvalidRequest("this replica was promoted before, and is in use itself: `tidewal migrate` moves it")
    if moved.other != shown_url(new_url):
        raise InvalidRequest(f"this replica was promoted before: {moved.other} has taken its place")
