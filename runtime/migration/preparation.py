"""What a migration does while the old log is in use: it copies and compares what is there, until little is left.

The log says `preparing` meanwhile. Then its users stop for a moment: it says `migrating` (`begin_switch`), `migrate`
does the rest, and they go on with the new one, or, where that fails, with the old one again (`end_switch`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from ..errors import ChannelNotFound, CorruptLog, PositionLost, Unavailable
from ..log.migration_state import MigrationPhase, migration_state
from ..log.redaction import shown_url
from ..log.wal import ChannelInfo, Wal
from .beginning import PREPARED, begin, check_source, fitting, reserve
from .compared_channel import ComparedChannel
from .group_positions import idle_groups
from .log_states import LogStates, is_state
from .migration import OnProgress
from .migration_run import SETTLE_S, Compared, MigrationRun
from .mirrored_channels import begin_anew, channels_of, drop_vanished, mirrored_channel
from .node_tables import NodeTables

ROUND_S = 1.0  # a round that takes no longer leaves as little for the next, for which the log is not in use
# So does one that copies no more of what came in the one before: many channels take longer to look at, however little
# comes to them.
ROUND_ENTRIES = 10_000
ROUND_BYTES = 16 * 1024 * 1024
LOOK_S = 1.0  # between two looks whether the log is used
ROUNDS_MAX = 20  # until the log is said to be written to faster than it is copied


async def prepare(
    old: Wal,
    new: Wal,
    old_url: str,
    new_url: str,
    *,
    tables: NodeTables | None = None,
    on_progress: OnProgress = lambda _: None,
    settle_s: float = SETTLE_S,
    round_s: float = ROUND_S,
) -> Compared:
    """Begin the migration of `old` to `new`, or go on with it, while `old` is in use, and copy and compare its
    channels, round after round, until one takes `round_s` seconds at most, or copies `ROUND_ENTRIES` and `ROUND_BYTES`
    at most of what came meanwhile. The parameters are those of `migrate`. Returns what was found equal, for `migrate`
    in this process.

    Raises what `migrate` does, but nothing where groups have members, and `Unavailable` where `old` is written to
    faster than it is copied. After an error it may be called again, or be taken back; `old` is in use all the time."""
    await check_source(old, new_url)
    state = await migration_state(old)
    run = await begin(old, new, old_url, new_url, state, settle_s, tables, MigrationPhase.PREPARING)
    async with run.letting_go():
        await reserve(run, old_url)
        for _ in range(ROUNDS_MAX):
            before = {name: (each, each.entries, each.bytes) for name, each in run.compared.items()}
            took_s = await _round(run, on_progress)
            on_progress(f"all that was there is equal in both, after {took_s:.1f} s")
            if took_s <= round_s or (before and _is_little(run, before)):
                break
        else:
            raise Unavailable(
                f"{shown_url(old_url)} is written to faster than it is copied: go on when it is written to less, or "
                "stop the programs that use it"
            )
        await run.let_go()
    return run.compared


def _is_little(run: MigrationRun, before: Mapping[str, tuple[ComparedChannel, int, int]]) -> bool:
    """Whether the run has copied no more than it may leave, since it had compared what is `before`, with how much each
    channel had then: one that was begun anew since was copied whole."""
    entries = size = 0
    for name, each in run.compared.items():
        known, entries_then, size_then = before.get(name, (None, 0, 0))
        is_same = known is each
        entries += each.entries - entries_then * is_same
        size += each.bytes - size_then * is_same
    return entries <= ROUND_ENTRIES and size <= ROUND_BYTES


async def _round(run: MigrationRun, on_progress: OnProgress) -> float:
    """Copy and compare what came since the round before. Returns for how many seconds."""
    began = asyncio.get_running_loop().time()
    states = await fitting(lambda: LogStates.read_states(run.old), in_use=True)  # tables change, and are for the switch
    await drop_vanished(run)
    for name in await channels_of(run.old):
        with suppress(ChannelNotFound):  # it was dropped since it was listed: the next `drop_vanished` removes the copy
            await _copied(run, await run.old.describe(name), states, on_progress)
    return asyncio.get_running_loop().time() - began


async def _copied(run: MigrationRun, info: ChannelInfo, states: LogStates, on_progress: OnProgress) -> None:
    """Copy and compare what the channel has that is not copied yet."""
    if not states.is_copied(info) or await is_state(run.old, info.name):
        return
    if info.name not in run.compared:
        on_progress(f"copying {info.name}")
    await run.check()
    await run.new.create_channel(info.name, info.policy)
    try:
        await mirrored_channel(run, info)
    except (CorruptLog, PositionLost):  # an earlier run has copied a channel that was made anew since, or cut
        await begin_anew(run, info)
        await mirrored_channel(run, info)


async def until_unused(old: Wal, tables: NodeTables | None, on_progress: OnProgress = lambda _: None) -> None:
    """Wait until no node, named producer and member of a group uses `old`, and call `on_progress` with what it waits
    for, each time that is another. Raises what `LogStates.read` does."""
    said = ""
    while True:
        try:
            await LogStates.read(old, tables)
            await idle_groups(old)
            return
        except Unavailable as error:
            if error.message != said:
                on_progress(error.message)
            said = error.message
        await asyncio.sleep(LOOK_S)


async def begin_switch(old: Wal, new: Wal) -> None:
    """Let `old`, which is being prepared, be in use no more. Raises as `MigrationRun.claim` and `change` do."""
    run = await MigrationRun.claim(old, new, await migration_state(old))
    await run.change(MigrationPhase.MIGRATING, PREPARED)
    await run.let_go()


async def end_switch(old: Wal, new: Wal) -> bool:
    """Let `old` be in use again, unless it is migrated. Returns whether it is in use. Raises as `begin_switch`."""
    state = await migration_state(old)
    if state.phase is MigrationPhase.MIGRATING:
        run = await MigrationRun.claim(old, new, state, settle_s=0)  # it writes to the old log alone
        await run.change(MigrationPhase.PREPARING, {})
        if not state.run:  # else the next run waits for what that one has sent
            await run.let_go()
    return state.phase in (MigrationPhase.OPEN, MigrationPhase.PREPARING, MigrationPhase.MIGRATING)
