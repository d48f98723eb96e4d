"""What processes see that look whether their log is migrated, while its state changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from tidewal.runtime.errors import ConfigError, Moved, Unavailable
from tidewal.runtime.log.migration_state import (
    MIGRATION_CHANNEL,
    MigrationPhase,
    MigrationState,
    change_migration_state,
    check_in_use,
    come_into_use,
    migration_state,
)
from tidewal.runtime.log.migration_watch import MigrationWatch, left_meanwhile, opened_next
from tidewal.runtime.log.wal import ChannelInfo, Entry, Start, Wal
from tidewal.runtime.migration.migration import cancel_migration
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

OLD, NEW = "memory://old", "memory://new"
PREPARING = MigrationState(MigrationPhase.PREPARING, "m", NEW)
MIGRATING = MigrationState(MigrationPhase.MIGRATING, "m", NEW)
MIGRATED = MigrationState(MigrationPhase.MIGRATED, "m", NEW)

pytestmark = pytest.mark.asyncio


class DroppedWal(MemoryWal):
    """A log that comes into use while it is looked at."""

    async def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        await come_into_use(MemoryWal(self.log))
        async for entries in super().read(channel, start):
            yield entries


class ForbiddenWal(MemoryWal):
    """A log of which a process may see its own channels alone."""

    async def describe(self, channel: str) -> ChannelInfo:
        if channel == MIGRATION_CHANNEL:
            raise ConfigError("no rights")
        return await super().describe(channel)


async def test_a_log_that_comes_into_use_while_it_is_looked_at_is_in_use() -> None:
    log = MemoryLog()
    await change_migration_state(MemoryWal(log), MIGRATING)
    assert (await migration_state(DroppedWal(log))).phase is MigrationPhase.OPEN


async def test_a_process_leaves_when_the_log_is_in_use_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidewal.runtime.log.migration_watch.LOOK_S", 0.001)
    monkeypatch.setattr("tidewal.runtime.log.migration_watch.LOOK_PREPARED_S", 0.001)
    log = MemoryLog()
    leaving = asyncio.create_task(MigrationWatch(MemoryWal(log), OLD).until_left())
    await change_migration_state(MemoryWal(log), PREPARING)
    await asyncio.sleep(0.05)
    assert not leaving.done()
    assert not await left_meanwhile(MemoryWal(log), OLD)
    await change_migration_state(MemoryWal(log), MIGRATING)
    await leaving
    assert await left_meanwhile(MemoryWal(log), OLD)
    assert not await left_meanwhile(ForbiddenWal(log), OLD)


async def test_the_next_log_is_the_new_one_once_it_is_in_use_or_the_old_one_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidewal.runtime.log.migration_watch.LOOK_PREPARED_S", 0.001)
    log = MemoryLog()
    opened: list[str] = []
    in_use = asyncio.Event()

    async def open_log(url: str) -> Wal:
        opened.append(url)
        if url == NEW and not in_use.is_set():
            raise Unavailable("not yet")
        if url == NEW:
            raise Moved("it was migrated further", url="memory://third")
        return MemoryWal(log)

    await change_migration_state(MemoryWal(log), MIGRATING)
    going = asyncio.create_task(opened_next(MigrationWatch(MemoryWal(log), OLD), OLD, open_log))
    await asyncio.sleep(0.02)
    assert not opened
    await change_migration_state(MemoryWal(log), MIGRATED)
    while NEW not in opened:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert not going.done()
    in_use.set()
    assert (await going)[0] == "memory://third"
    await come_into_use(MemoryWal(log))
    assert (await opened_next(MigrationWatch(MemoryWal(log), OLD), OLD, open_log))[0] == OLD


async def test_a_new_log_that_is_in_use_for_the_migration_was_taken_back_is_not_gone_on_with() -> None:
    """It is empty, and others go on with the old one."""
    log, other = MemoryLog(), MemoryLog()
    for state in (MIGRATING, MIGRATED):
        await change_migration_state(MemoryWal(log), state)
    for phase in (MigrationPhase.RESERVED, MigrationPhase.PENDING):
        await change_migration_state(MemoryWal(other), MigrationState(phase, "m", OLD))
    opened: list[str] = []

    async def open_log(url: str) -> Wal:
        opened.append(url)
        if len(opened) == 1:  # it is seen that it was migrated, then the process stands still
            await cancel_migration(MemoryWal(log), MemoryWal(other), NEW, settle_s=0)
        wal = MemoryWal(log if url == OLD else other)
        await check_in_use(wal, url)
        return wal

    url, wal = await opened_next(MigrationWatch(MemoryWal(log), OLD), OLD, open_log)
    assert (url, opened) == (OLD, [NEW, OLD])
    assert isinstance(wal, MemoryWal)
    assert wal.log is log


async def test_who_cannot_open_the_new_log_is_told_where_it_is() -> None:
    log = MemoryLog()
    for state in (MIGRATING, MIGRATED):
        await change_migration_state(MemoryWal(log), state)

    async def open_log(url: str) -> Wal:
        raise ConfigError("no credentials", key="wal")

    with pytest.raises(Moved, match=r"set wal to that log. It cannot be opened here \(no credentials\)") as error:
        await opened_next(MigrationWatch(MemoryWal(log), OLD), OLD, open_log)
    assert error.value.url == NEW
