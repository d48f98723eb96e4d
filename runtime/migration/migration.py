"""Migrate what a log has to another log, while no program has the old one open.

The steps, each of which may be repeated after a kill:

1. the old log says `migrating`, the new one `reserved`, and, still empty then, `pending`: neither can be opened now
2. channels with their policies, and the entries in order, to the end of each channel
3. both are read again and compared; the groups' positions are looked up on the way
4. the old log says `migrated`, with the proof and the groups' positions: the point of no return
5. where entries came or groups moved meanwhile, by a program that was not stopped, 2 to 4 again
6. the groups' positions are stored in the new log, the ends of its channels and a node's tables compared with the
   proof, and 5 looked at once more
7. the new log gets the mark of this migration, is given to retention, and comes into use

Before 6 has ended a migration is taken back by `cancel_migration`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ..errors import BadRecord, CorruptLog, InvalidRequest, Unavailable
from ..log.migration_state import MigrationPhase, MigrationState, come_into_use, mark_of, migration_state
from ..log.redaction import shown_url
from ..log.wal import ChannelPolicy, GroupInfo, Wal
from .beginning import PREPARED, UNDER_WAY, begin, check_source, check_target, has_ended, is_marked, is_pending, reserve
from .channel_copy import HOLDER
from .compared_channel import ChannelProof
from .group_positions import GroupPosition, idle_groups, metadata_in_place, store_positions
from .log_states import LogStates, check_ledgers, is_state
from .migration_run import SETTLE_S, Compared, MigrationRun
from .mirrored_channels import channels_of, drop_vanished, mirrored_channel
from .node_log import NO_NODE, NodeProof, check_tables, nothing_copied, settle_node
from .node_tables import NodeTables

ROUNDS_MAX = 3  # of copying, until the old log is said to be written to

OnProgress = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class MigrationProof:
    """What was found equal in both logs, by channel, the groups' positions in the new one, by group and channel, and
    where nodes go on there."""

    channels: Mapping[str, ChannelProof]
    groups: Mapping[str, Mapping[str, GroupPosition]]
    node: NodeProof = NO_NODE

    def to_wire(self) -> dict[str, Any]:
        """The wire form, for JSON."""
        channels = {
            name: {key: value.hex() if isinstance(value, bytes) else value for key, value in asdict(each).items()}
            for name, each in self.channels.items()
        }
        groups = {
            group: {name: [part.hex() for part in each] for name, each in positions.items()}
            for group, positions in self.groups.items()
        }
        return {"channels": channels, "groups": groups, **(self.node.to_wire() if self.node != NO_NODE else {})}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> MigrationProof:
        """The proof of a wire form that `to_wire` returned. Raises `CorruptLog` for anything else."""
        try:
            return cls._decoded(wire)
        except (ValueError, LookupError, TypeError, AttributeError, BadRecord) as error:
            raise CorruptLog(f"the proof of a migration cannot be read: {error!r}") from error

    @classmethod
    def _decoded(cls, wire: Mapping[str, Any]) -> MigrationProof:
        channels = {
            name: ChannelProof(
                **{key: bytes.fromhex(each[key]) for key in ("last_old", "last_new", "latest_old")},
                **{key: each[key] for key in ("entries", "bytes", "checksum")},
            )
            for name, each in wire["channels"].items()
        }
        groups = {
            group: {name: GroupPosition(*map(bytes.fromhex, each)) for name, each in positions.items()}
            for group, positions in wire["groups"].items()
        }
        return cls(channels, groups, NodeProof.from_wire(wire))


async def migrate(
    old: Wal,
    new: Wal,
    old_url: str,
    new_url: str,
    *,
    tables: NodeTables | None = None,
    on_progress: OnProgress = lambda _: None,
    settle_s: float = SETTLE_S,
    compared: Compared | None = None,
    beside: bool = False,
) -> MigrationProof:
    """Migrate `old` to `new`, or go on with that where an earlier call ended; both were opened past their migrations'
    states, and no other program uses either. `tables` are those that nodes have filled from `old`: they go on with
    `new`. `on_progress` is called with a line about each channel before it is copied and when it was found equal. Where
    another run of the migration may be at work, this one takes its place, and on brokers first waits `settle_s`
    seconds. `compared` is what `prepare` has found equal in this process just before. `beside`: other processes have
    `old` open, as a directory through the one that owns it. Returns what is in both.

    Raises `Unsupported` for what cannot be migrated, what `LogStates.read` raises, `ReplicaReadOnly` and `Moved` where
    replication has the say over one of the logs, a replica or a source that was replaced, `InvalidRequest` where the
    new log is not empty, or the old one has no channel, migrates elsewhere, or was promoted and its source is not
    fenced, `CorruptLog` where the new one, or a table, is not as it was found, `Fenced` where a later run has taken
    this one's place, `Unavailable` where a program uses the old log or that is slow, and what the logs raise. After an
    error it may be called again, or be taken back."""
    await check_source(old, new_url)
    state = await migration_state(old)
    if await has_ended(new, state, new_url):
        return MigrationProof.from_wire(state.proof)
    run = await begin(old, new, old_url, new_url, state, settle_s, tables)
    run.compared.update(compared or {})
    async with run.letting_go():
        if run.state.phase is MigrationPhase.PREPARING:
            await run.change(MigrationPhase.MIGRATING, PREPARED)
        if await has_ended(new, run.state, new_url):  # meanwhile
            return MigrationProof.from_wire(run.state.proof)
        await reserve(run, old_url)
        if run.state.phase is MigrationPhase.MIGRATING and run.state.proof == PREPARED:
            await drop_vanished(run)
        if run.state.phase is MigrationPhase.MIGRATED and await is_marked(new, run.state):
            proof = MigrationProof.from_wire(run.state.proof)
        else:
            proof = await _proven(run, old_url, on_progress, tables, beside=beside)
            for group, positions in proof.groups.items():
                await store_positions(new, group, positions, run.check)
            await _check_whole(run, proof)
            if not await _is_unchanged(old, proof):
                raise _written_to(old_url)
            await check_tables(tables, proof.node)
            await run.check()
            await new.create_channel(mark_of(run.state.id), ChannelPolicy())
        await settle_node(new, tables, proof.node, run.check)
        await _release(run, new)
        await run.check()
        await come_into_use(new)
    return proof


async def _proven(
    run: MigrationRun, old_url: str, on_progress: OnProgress, tables: NodeTables | None, *, beside: bool
) -> MigrationProof:
    """Copy and compare until the old log says `migrated`, and nothing came to it since it was compared."""
    state = run.state
    proof = MigrationProof.from_wire(state.proof) if state.phase is MigrationPhase.MIGRATED else None
    for _ in range(ROUNDS_MAX):
        if proof is not None and await _is_unchanged(run.old, proof):
            return proof
        proof = await _mirrored(run, on_progress, await LogStates.read(run.old, tables, beside=beside))
        await run.change(MigrationPhase.MIGRATED, proof.to_wire())
    raise _written_to(old_url)


def _written_to(old_url: str) -> Unavailable:
    return Unavailable(f"{shown_url(old_url)} is written to: stop the programs that use it, and go on")


async def cancel_migration(old: Wal, new: Wal, new_url: str, *, settle_s: float = SETTLE_S) -> None:
    """Take the migration from `old` to `new`, the log at `new_url`, back: what is in `new` of it is removed, and `old`
    is in use again. Where a run of the migration may be at work, this one takes its place, and on brokers first waits
    `settle_s` seconds. Raises `InvalidRequest` where none is under way, where it goes to another log, or where `new`
    has everything already and may be in use, and `Fenced` as `migrate` does. After an error it may be called again."""
    state = await cancellable_state(old, new_url)
    await _check_not_in_use(new, state)
    run = await MigrationRun.claim(old, new, state, settle_s=settle_s)
    async with run.letting_go():
        await _check_not_in_use(new, run.state)
        if run.state.phase is not MigrationPhase.CANCELLING:
            await run.change(MigrationPhase.CANCELLING, {})
        there = await migration_state(new)
        if there.id == state.id:
            for channel in await channels_of(new) if there.phase is MigrationPhase.PENDING else ():
                await run.check()
                await new.drop_channel(channel)
            await run.check()
            await come_into_use(new)  # last: what is left of a cancellation bears the id
        await _release(run, old)
        await run.check()
        await come_into_use(old)


async def cancellable_state(old: Wal, new_url: str) -> MigrationState:
    """The state of a log whose migration to the log at `new_url` is under way, or has ended. Raises `InvalidRequest`
    where there is none, or where it goes to another log: a command looks before it opens that one."""
    state = await migration_state(old)
    if state.phase not in UNDER_WAY:
        raise InvalidRequest("nothing can be taken back: no migration of this log is under way")
    check_target(state, new_url)
    return state


async def _check_not_in_use(new: Wal, state: MigrationState) -> None:
    if state.phase is not MigrationPhase.MIGRATED:
        return
    if not await is_pending(new, state) or await is_marked(new, state):
        raise InvalidRequest("nothing can be taken back: it is migrated already, and the other log may be in use")


# ---- copying -------------------------------------------------------------------------------------------------------


async def _mirrored(run: MigrationRun, on_progress: OnProgress, states: LogStates) -> MigrationProof:
    old, new = run.old, run.new
    groups = await idle_groups(old)
    channels: dict[str, ChannelProof] = {}
    places: dict[str, Mapping[bytes, bytes]] = {}
    for name in await channels_of(old):
        info = await old.describe(name)
        if info.policy.temporary:  # it belongs to a process that is gone
            continue
        await run.check()
        await new.create_channel(name, info.policy)
        if not states.is_copied(info):
            if states.is_left(name):
                channels[name] = nothing_copied(info.latest_id or b"")
            continue
        if await is_state(old, name):
            raise Unavailable(f"{name} came since: a program or a node has begun to use the log. Stop it, and go on")
        on_progress(f"copying {name}")
        positions = [group.positions[name] or b"" for group in groups if name in group.positions]
        places[name] = await mirrored_channel(run, info, positions, states.ids(name))
        channels[name] = run.compared[name].proof(info)
        on_progress(f"{name} is equal in both")
    moved_node = NO_NODE if states.node is None else states.node.proof(places, new.name)
    # last: what the states point to is there now
    channels |= await states.write(new, f"migration {run.state.id}", places, run.check)
    await check_ledgers(new)  # a batch may have been decided since the old log was looked at
    await _check_no_others(run)
    return MigrationProof(channels, await _moved_groups(run, groups, channels.keys(), places), moved_node)


async def _moved_groups(
    run: MigrationRun, groups: Sequence[GroupInfo], channels: Set[str], places: Mapping[str, Mapping[bytes, bytes]]
) -> dict[str, dict[str, GroupPosition]]:
    """Where the groups stand in the new log. Of what was not copied, a node's states and cuts, they have done nothing
    there, and what they have stored with their positions is about other entries."""
    moved: dict[str, dict[str, GroupPosition]] = {}
    for group in groups:
        before = {name: group.positions[name] or b"" for name in sorted(group.positions.keys() & channels)}
        metadata = {
            name: await metadata_in_place(group.metadata[name], partial(run.compared[name].place, run.old, run.new))
            for name in before.keys() & places.keys() & group.metadata.keys()
        }
        moved[group.name] = {
            name: GroupPosition(places[name][id] if name in places else b"", metadata.get(name, b""), id)
            for name, id in before.items()
        }
    return moved


async def _is_unchanged(old: Wal, proof: MigrationProof) -> bool:
    """Whether nothing came to the old log since it was compared, and no group has moved there. Raises `Unavailable`
    where one has members."""
    for name in await channels_of(old):
        info = await old.describe(name)
        known = proof.channels.get(name)
        is_stored = not info.policy.ephemeral and not info.policy.temporary
        if is_stored and (known is None or known.latest_old != (info.latest_id or b"")):
            return False
    then = {(group, name): each.old for group, places in proof.groups.items() for name, each in places.items()}
    now = {
        (group.name, name): id or b""
        for group in await idle_groups(old)
        for name, id in group.positions.items()
        if name in proof.channels
    }
    return now == then


async def _check_whole(run: MigrationRun, proof: MigrationProof) -> None:
    """Raise `CorruptLog` where the new log has not the channels of the proof, each ending where it did then."""
    await _check_no_others(run)
    there = set(await run.new.channels())
    for name, each in proof.channels.items():
        if name not in there or ((await run.new.describe(name)).latest_id or b"") != each.last_new:
            raise CorruptLog(
                f"{name} has changed in the new log since it was found equal: something else has written to it, or "
                "removed it. Take the migration back with --cancel, and begin again"
            )


async def _check_no_others(run: MigrationRun) -> None:
    """Raise `CorruptLog` where the new log has a channel that the old one has not."""
    for name in set(await channels_of(run.new)) - set(await channels_of(run.old)):
        raise CorruptLog(
            f"{name} is in the new log only: another program has made it there, or removed it from the old log. Take "
            "the migration back with --cancel, and begin again"
        )


async def _release(run: MigrationRun, wal: Wal) -> None:
    for name in await channels_of(wal):
        if not (await wal.describe(name)).policy.ephemeral:
            await run.check()
            await wal.hold(name, HOLDER, None)
