"""A process that wrote nothing while its log was migrated owns it no more: it would write what no program reads."""

from __future__ import annotations

import pytest

from tests.adapters.objects.processes import Processes, appended, entries_of, virtual
from tidewal.runtime.errors import Fenced, Moved, Unavailable
from tidewal.runtime.log.migration_state import MigrationPhase, MigrationState, change_migration_state
from tidewal.runtime.log.wal import ChannelPolicy
from tidewal.runtime.migration.migration import migrate
from tidewal.runtime.replication.promotion import promote
from tidewal.runtime.replication.replicator import Replicator
from tidewal.runtime.testing.memory import MemoryWal


@virtual
async def test_a_process_does_not_come_to_own_a_log_that_was_migrated(processes: Processes) -> None:
    owner = await processes.owner("a")
    await owner.wal.append("a", b"before")
    idle = await processes.open()
    await owner.wal.close()
    migrator = await processes.open_to_own()
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
    command = await processes.open(in_use_only=False)  # it has the migration
    await command.wal.append("a", b"left")


@virtual
async def test_a_node_does_not_come_to_own_a_log_that_a_replica_has_replaced(processes: Processes) -> None:
    """It looks at a migration itself, and at no promotion: one that stood still would go on, and nobody has what it
    acknowledges."""
    owner = await processes.owner("a")
    node = await processes.open(in_use_only=False)
    await owner.wal.close()
    promoting, replica = await processes.open_to_own(), MemoryWal()
    async with Replicator(promoting.wal, replica, "simulated://").claimed():
        pass
    await promote(promoting.wal, replica, "simulated://", "memory://replica")
    await promoting.wal.close()
    (result,) = await appended(node.wal, "a", [b"lost"])
    assert isinstance(result, Moved)
    assert result.url == "memory://replica"


@virtual
async def test_a_process_that_is_to_own_the_log_writes_nothing_behind_another_owner(processes: Processes) -> None:
    """A migration that stood still would copy what it had queued once more, to a log that is in use by then."""
    earlier = await processes.open_to_own()
    await earlier.wal.create_channel("a", ChannelPolicy())
    with pytest.raises(Unavailable, match="writes to it"):
        await processes.open_to_own()
    earlier.store.stop()
    later = await processes.open_to_own()
    await later.wal.append("a", b"copied")
    await later.wal.close()
    earlier.store.go_on()
    for _ in range(2):
        results = await appended(earlier.wal, "a", [b"copied"] * 3)
        assert {type(result) for result in results} == {Fenced}
    program = await processes.open()
    await program.wal.append("a", b"after")
    assert await entries_of(program.wal, "a", 2) == [b"copied", b"after"]


@virtual
async def test_a_process_that_is_to_own_the_log_owns_it_again_when_the_store_is_back(processes: Processes) -> None:
    owner = await processes.open_to_own()
    await owner.wal.create_channel("a", ChannelPolicy())
    await change_migration_state(owner.wal, MigrationState(MigrationPhase.MIGRATING, "1" * 32, "memory://new"))
    await owner.wal._ownership._committer.hand_over()
    assert not owner.wal._ownership.owns
    await owner.wal.append("a", b"copied")
