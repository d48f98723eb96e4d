"""The channels of a migration: which are copied, and how one that is gone on with is brought up to date."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..log.migration_state import is_migration_channel
from ..log.wal import ChannelInfo, Wal
from .channel_copy import copy_channel
from .compared_channel import ComparedChannel
from .migration_run import MigrationRun
from .node_records import migrated_entry


async def channels_of(wal: Wal) -> list[str]:
    """The channels of a log, without those of migrations."""
    return [name for name in await wal.channels() if not is_migration_channel(name)]


async def mirrored_channel(
    run: MigrationRun, info: ChannelInfo, positions: Iterable[bytes] = (), ids: Iterable[bytes] = ()
) -> Mapping[bytes, bytes]:
    """Bring a channel of the new log, which is there, to where the old one was when `info` was made, and compare them
    behind what this run has compared. One that was made anew in one of the logs since is begun anew. Returns what
    `ComparedChannel.compare` does, for `positions` and `ids`; raises what that, `copy_channel` and the logs raise."""
    name = info.name
    compared = run.compared.get(name)
    if compared is not None and not await compared.goes_on(run.old, run.new, info):
        await begin_anew(run, info)
        compared = None
    if compared is None:
        compared = run.compared[name] = ComparedChannel(name, migrated_entry)
    await copy_channel(run.old, run.new, info, run.check, migrated_entry, compared.last)
    return await compared.compare(run.old, run.new, info, positions, ids)


async def begin_anew(run: MigrationRun, info: ChannelInfo) -> None:
    """Empty the channel in the new log."""
    await drop_copy(run, info.name)
    await run.check()
    await run.new.create_channel(info.name, info.policy)


async def drop_vanished(run: MigrationRun) -> None:
    """Remove from the new log what was copied, and the old one has no more."""
    for name in set(await channels_of(run.new)) - set(await channels_of(run.old)):
        await drop_copy(run, name)


async def drop_copy(run: MigrationRun, name: str) -> None:
    """Remove a channel from the new log."""
    run.compared.pop(name, None)
    await run.check()
    await run.new.drop_channel(name)
