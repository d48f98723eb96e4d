"""Bring a replica into use, in the place of its source.

Where the source can be reached, what it has is brought over, so that what cannot be is known while both logs can still
be used. Then it is fenced: its state says that it is replaced, durably, and nothing opens it to write any more. What
came meanwhile is brought over to the end, and the replica comes into use: no entry is lost. Where the source cannot be
reached, the replica comes into use with what it has, and keeps for each channel up to where that is (its places): what
the source had beyond is salvaged from it when it is back, and it is fenced then.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..clock import Clock
from ..errors import InvalidRequest, PreconditionFailed, Promoted, Unavailable, Unsupported
from ..log.migration_state import MigrationPhase, check_not_migrating, migration_state
from ..log.redaction import shown_url
from ..log.replication_state import (
    ReplicatedChannel,
    ReplicationPhase,
    ReplicationState,
    ReplicationStates,
    check_source_fenced,
    new_id,
    replica_mark,
    replicas_of,
    replication_state,
)
from ..log.wal import Wal
from ..migration.channel_copy import check_not_lost
from ..migration.group_positions import idle_groups
from ..migration.lease_watch import LeaseWatch
from ..migration.migration import ROUNDS_MAX
from ..migration.node_log import NodeLog
from ..migration.node_tables import NodeTables
from ..migration.shared_migration import until_left
from .channel_mirror import HOLDER
from .replicated_groups import store_metadata
from .replicated_node import bring_node, check_node
from .replicator import Replicator, claim_replica, fenced, holder_of, is_own, release
from .salvage import counted_place

_log = logging.getLogger(__name__)


async def promote(
    source: Wal,
    target: Wal,
    source_url: str,
    target_url: str,
    *,
    tables: NodeTables | None = None,
    clock: Clock | None = None,
) -> ReplicationState:
    """Bring what `source` has over to its replica `target`, fence it, and bring the replica into use; where it is
    already, only fence. No program has either open. Nodes go on in the replica, with the `tables` that they have filled
    from the source; one that has joined just before the fence has `LEAVE_S` seconds to leave, and is evicted where it
    is silent (`clock` gives that record its time). May be repeated after an error. Returns what the replica says then.

    Raises `InvalidRequest` where `target` is not a replica of `source`, `Moved` and `Unavailable` for a log that was
    migrated or is, `Unavailable` where a group of the source has members, or it is written to all the time,
    `PositionLost` where retention has cut a group off, and what halts a channel: drop that one at the source, or
    promote without the source; where nodes have used the source, what `NodeLog.read`, `NodeLog.proof` and
    `settle_node` do. All but the last is raised before the source is fenced, unless it comes just then."""
    await check_not_migrating(source, shown_url(source_url))
    state = await replica_of(target)
    moved = await migration_state(target)
    if state.phase is ReplicationPhase.PROMOTED and moved.phase is MigrationPhase.MIGRATED:
        target_url = moved.other  # it was promoted without the source, into that log
    else:
        await check_not_migrating(target, shown_url(target_url))
    await check_source_fenced(source)
    if state.phase is ReplicationPhase.REPLICA:
        if not await _is_fenced(source, state):
            await _check_groups(source)
        await _bring_over(source, target, state, source_url, target_url, tables, clock)
    return await _end(source, target, source_url, target_url, clock)


async def _bring_over(
    source: Wal,
    target: Wal,
    state: ReplicationState,
    source_url: str,
    target_url: str,
    tables: NodeTables | None,
    clock: Clock | None,
) -> None:
    """Bring all over, with `source` fenced on the way, and let `target` say that it is promoted."""
    replicator, leases = Replicator(source, target, source_url, is_last=True), LeaseWatch(source, clock)
    async with replicator.claimed():
        if not source.capabilities.one_node:
            await leases.look()  # what was evicted by now is waited for from now on
        await replicator.catch_up()
        if replicator.state.of_node and not replicator.state.node:
            await check_node(source, target, tables)
        await _fence(source, state, target_url, {})
        if replicator.state.of_node and not replicator.state.node and not source.capabilities.one_node:
            look = partial(NodeLog.read, source, tables)
            await until_left(source, leases, look)  # one may have joined before it could see the fence
        for _ in range(ROUNDS_MAX):
            before = await _ends(source)
            await replicator.catch_up()
            if await _ends(source) == before:
                break
        else:
            raise Unavailable(f"{shown_url(source_url)} is written to: stop the programs that use it, and go on")
        await store_metadata(target, replicator.state.groups)
        if replicator.state.of_node:
            saved = replicator.state.node
            await bring_node(source, target, tables, saved, replicator.save_node, replicator.may_write)
    await release_source(source, state)  # before anything says that the source may have more
    channels = {
        name: await counted_place(target, await target.describe(name), place)
        for name, place in replicator.state.channels.items()
    }
    await mark_promoted(target, channels, "")


async def _end(source: Wal, target: Wal, source_url: str, target_url: str, clock: Clock | None) -> ReplicationState:
    """Have the source fenced, and keep there how far the promoted replica `target` has come, for what is salvaged: the
    replica itself says in a mark that it is promoted. Behind it no node writes to the source: where that is back, some
    may, and one may join before it could see the fence."""
    states = ReplicationStates(target)
    state = await states.read()
    if not states.is_settled:
        await release(target, HOLDER)
        leases = LeaseWatch(source, clock)
        if not await _is_fenced(source, state):
            await _until_left(source, leases)
        await _fence(source, state, target_url, state.channels)
        await _until_left(source, leases)
        await states.settle()
    elif not await _is_fenced(source, state):
        raise InvalidRequest(
            "how far the replica had come is forgotten, as was said with --forget: it fences no source"
        )
    replaced = await replication_state(source)
    return replace(states.state, number=0, other=shown_url(source_url), channels=replaced.channels, line=replaced.line)


async def _until_left(source: Wal, leases: LeaseWatch) -> None:
    """`until_left`, of a source from which nothing is brought over."""
    if not source.capabilities.one_node:
        await until_left(source, leases, on_progress=_log.warning)


async def promote_alone(target: Wal) -> ReplicationState:
    """Bring `target` into use with what it has, without its source. Its state keeps, for `unreplicated_entries`, how
    far each channel of the source has come, until `promote` fences the source or `forget_source` is called. May be
    repeated. Raises `Moved` and `Unavailable` where the replica was migrated or is, and `Unsupported` for that of a log
    of nodes."""
    await check_not_migrating(target, "the replica")
    state = await replica_of(target)
    if state.phase is ReplicationPhase.PROMOTED:
        await release(target, HOLDER)
        return state
    if state.of_node:
        raise Unsupported(
            "this is the replica of a log of nodes, whose channels end at different times: with --to, the URL of an "
            "empty log, what it has up to one time goes there",
            capability="replication",
        )
    states = ReplicationStates(target)
    claim = new_id()
    await claim_replica(states, await states.read(), claim, target)  # its replicator may still run
    channels: dict[str, ReplicatedChannel] = {}
    for name in await target.channels():
        info = await target.describe(name)
        if is_own(name) or info.policy.ephemeral:
            continue
        place = states.state.channels.get(name, ReplicatedChannel())  # none: it was not saved since it began
        channels[name] = await counted_place(target, info, place)
    await store_metadata(target, states.state.groups)
    return await mark_promoted(target, channels, claim)


async def forget_source(target: Wal) -> None:
    """Forget how far the replica `target`, promoted without its source, had come: what the source has beyond is not
    salvaged any more. Raises `InvalidRequest` where it was not promoted."""
    states = ReplicationStates(target)
    if (await states.read()).phase is not ReplicationPhase.PROMOTED:
        raise InvalidRequest("this log is no replica that was promoted: there is no source to forget")
    await release(target, HOLDER)
    await states.settle()


async def release_source(source: Wal, state: ReplicationState) -> None:
    """Let go of what `source` holds for the replica whose `state` this is: of what is salvaged, or will not be."""
    await release(source, holder_of(state))
    await source.drop_channel(replica_mark(state))


async def forget_replica(source: Wal, id: str) -> None:
    """Let go of what `source` holds for the replica `id` (`ReplicationState.log_id`), which is lost. Raises
    `InvalidRequest` where it has no such replica, with those that it has."""
    ids = replicas_of(await source.channels())
    if id not in ids:
        raise InvalidRequest(f"the log holds nothing for a replica {id!r}, but for: {', '.join(ids) or 'none'}")
    await release_source(source, ReplicationState(log_id=id))


async def replica_of(target: Wal) -> ReplicationState:
    """The state of a log that is a replica, or was one until it was promoted. Raises `InvalidRequest` for others."""
    state = await replication_state(target)
    if state.phase not in (ReplicationPhase.REPLICA, ReplicationPhase.PROMOTED):
        raise InvalidRequest("this log is no replica: only what `tidewal replicate` writes can be promoted")
    return state


async def _check_groups(source: Wal) -> None:
    """Raise `Unavailable` where a group has members, and `PositionLost` where it was cut off: in the replica it would
    begin at the first entry, and nothing would say that it has missed some."""
    for group in await idle_groups(source):
        for channel, id in group.positions.items():
            await check_not_lost(source, await source.describe(channel), [id or b""])


async def _is_fenced(source: Wal, state: ReplicationState) -> bool:
    """Whether the replica, whose `state` this is, has taken the place of the source. Raises `InvalidRequest` where it
    is not its source, and `Promoted` where another replica has."""
    known = await replication_state(source)
    if known.log_id != state.source_id:
        raise InvalidRequest(f"the log is a replica of {state.other}, and this source is another log")
    if known.phase is not ReplicationPhase.REPLACED:
        return False
    if known.source_id != state.log_id:
        raise Promoted(f"another replica has taken the place of this source already: {known.other}")
    return True


async def _fence(
    source: Wal, state: ReplicationState, target_url: str, channels: Mapping[str, ReplicatedChannel]
) -> None:
    """Let the source say that the replica, whose `state` this is, takes its place, and how far its channels are."""
    if not await _is_fenced(source, state):
        await idle_groups(source)
    states = ReplicationStates(source)
    known = await states.read()
    after = replace(
        known,
        phase=ReplicationPhase.REPLACED,
        source_id=state.log_id,
        other=shown_url(target_url),
        claim="",
        channels=channels,
        line=state.line if state.phase is ReplicationPhase.PROMOTED else {},
    )
    if after != known:
        await states.change(after)


async def mark_promoted(
    target: Wal, channels: Mapping[str, ReplicatedChannel], claim: str, line: Mapping[str, Any] | None = None
) -> ReplicationState:
    """Have the replica say that it is promoted, with what it has of its channels, and up to which `line`, where that is
    less. Raises `Fenced` where it is not under `claim` any more: a replicator may have added to `channels`."""
    states = ReplicationStates(target)
    state = await states.read()
    if state.claim != claim:
        raise fenced()
    promoted = replace(
        state,
        phase=ReplicationPhase.PROMOTED,
        channels=channels,
        claim="",
        groups={},
        node={},
        line=line or {},
        line_kept=0,
    )
    try:
        await states.change(promoted)
    except PreconditionFailed as error:
        raise fenced() from error
    await release(target, HOLDER)
    return states.state


async def _ends(source: Wal) -> dict[str, bytes | None]:
    return {name: await source.latest_id(name) for name in await source.channels() if not is_own(name)}
