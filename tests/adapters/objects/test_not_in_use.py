"""A process that wrote nothing while its log was migrated owns it no more: it would write what no program reads."""

from __future__ import annotations

import pytest

from tests.adapters.objects.processes import Processes, appended, virtual
from tidewal.runtime.errors import Moved, Unavailable
from tidewal.runtime.log.migration_state import MigrationPhase, MigrationState, change_migration_state
from tidewal.runtime.migration.migration import migrate
from tidewal.runtime.testing.memory import MemoryWal


@virtual
async def test_a_process_does_not_come_to_own_a_log_that_was_migrated(processes: Processes) -> None:
    owner = await processes.owner("a")
    await owner.wal.append("a", b"before")
    idle = await processes.open()
    await owner.wal.close()
    migrator = await processes.open()
    await migrate(migrator.wal, MemoryWal(), "simulated://", "memory://new")
    await migrator.wal.close()
    claims = [key for key in processes.objects.bodies if key.startswith("claim/")]
    for _ in range(2):
        (result,) = await appended(idle.wal, "a", [b"lost"])
        assert isinstance(result, Moved)
        assert result.url == "memory://new"
    with pytest.raises(Moved):
        await idle.wal.truncate("a", b"")
    assert [key for key in processes.objects.bodies if key.startswith("claim/")] == claims


@virtual
async def test_nor_one_whose_migration_has_not_ended(processes: Processes) -> None:
    owner = await processes.owner("a")
    idle = await processes.open()
    pending = MigrationState(MigrationPhase.MIGRATING, "1" * 32, "memory://new")
    await change_migration_state(owner.wal, pending)
    await owner.wal.close()
    (result,) = await appended(idle.wal, "a", [b"lost"])
    assert isinstance(result, Unavailable)
    assert "tidewal migrate" in str(result)
