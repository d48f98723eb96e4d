"""Nodes and clients on logs that several processes use, on brokers or in a directory, which can open others by URL."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.actors.conftest import in_place
from tests.actors.nodes import NodeProcess, Nodes, OneOwnerWal
from tidewal.actors.client import Client
from tidewal.actors.datanode.moved_tables import MovedTables
from tidewal.actors.followed_log import FollowedLog
from tidewal.actors.open_logs import OpenLogs
from tidewal.actors.shared_log_migration import open_logs
from tidewal.actors.standalone import Standalone
from tidewal.cli.role_groups import divide_roles
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import ConfigError, TidewalError
from tidewal.runtime.log.migration_state import MigrationPhase, MigrationState, check_in_use, migration_state
from tidewal.runtime.log.wal import Wal
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.migration.migration import MigrationProof, cancel_migration
from tidewal.runtime.migration.shared_migration import migrate_in_use
from tidewal.runtime.tables.table_store import open_tables
from tidewal.runtime.testing.faults import FaultPlan
from tidewal.runtime.testing.memory import MemoryLog
from tidewal.runtime.testing.simulation.process import SimulatedProcess
from tidewal.runtime.testing.simulation.wal import SimulatedWal

OLD, NEW = "memory://old", "memory://new"


class FarSharedWal(SimulatedWal):
    """A log whose ids are far above those of others: one of these that is not translated lies before all."""

    first = 1_000

    def submit(self, entries: Sequence[Any], done: Any) -> None:
        for entry in entries:
            channel = self.log.channels.get(entry.channel)
            if channel is not None and channel.end == 1 and not channel.groups:  # these stand before the first one
                channel.first = self.first
        super().submit(entries, done)


class FarDirectoryWal(FarSharedWal):
    """Such a log in a directory."""

    capabilities = OneOwnerWal.capabilities


class SharedOpener:
    """Opens logs in memory for one process, by URL; those in `unknown` it has no settings for."""

    def __init__(self, nodes: SharedNodes, each: NodeProcess | None = None) -> None:
        self._nodes, self._each = nodes, each
        self.unknown: set[str] = set()

    async def open(self, url: str) -> Wal:
        wal = await self.open_alone(url)
        await check_in_use(wal, url)
        return wal

    async def open_alone(self, url: str) -> Wal:
        if url in self.unknown:
            raise ConfigError(f"no credentials for {url}", key="wal")
        process = self._each.process if self._each else SimulatedProcess()
        cut, deaf = (self._each.cut, self._each.deaf) if self._each else (set[str](), set[str]())
        return self._kind()(self._nodes.log_at(url), FaultPlan(1), process, self._nodes.log_faults, cut, deaf)

    def _kind(self) -> type[SimulatedWal]:
        return OneOwnerWal if self._nodes.in_directory else SimulatedWal

    async def look_at(self, url: str) -> Wal:
        return await self.open_alone(url)

    def owned_by_one(self, url: str) -> bool:
        return self._nodes.in_directory

    def moved_by_command(self, url: str) -> bool:
        return True


class CommandOpener(SharedOpener):
    """Opens logs for a command: what it copies has ids in the new log that are far above those in the old one."""

    def _kind(self) -> type[SimulatedWal]:
        return FarDirectoryWal if self._nodes.in_directory else FarSharedWal


class SharedNodes(Nodes):
    """The processes of one cluster, whose log may be migrated: `logs` are those there are, by URL. `in_directory` says
    that these are directories, of each of which one process is the owner: only that one offers `streamingnode`."""

    def __init__(self, directory: Path, rng: random.Random, *, in_directory: bool = False) -> None:
        super().__init__(directory, rng, SimulatedWal)
        self.in_directory = in_directory
        self.url = OLD  # of the log that nodes and clients are told to begin with
        self.logs: dict[str, MemoryLog] = {OLD: self.log}
        self.table_directory = directory / "tables"
        self.unknown: dict[str, set[str]] = {}  # by node: logs that it has no settings for
        self.opener = SharedOpener(self)

    async def _run(self, each: NodeProcess, roles: Sequence[str], predecessor: str) -> None:
        opener = SharedOpener(self, each)
        opener.unknown = self.unknown.get(each.name, set())
        settings = self.settings.get(each.name) or Settings()
        options: dict[str, Any] = {"clock": each.clock, "threads": False, "blocking": in_place, "name": each.name}
        options |= {"predecessor": predecessor, "settings": settings, "network": self.network.of(each.process)}
        logs: OpenLogs | None = None
        try:
            logs = await open_logs(opener, await self.configured(), settings, Metrics(each.name))
            async with Standalone(logs.wal, self.table_directory, roles=roles, logs=logs, **options) as node:
                await each.run(node)
        except TidewalError as error:  # it has not started
            each.error = error
        finally:
            each.ended.set()

    @contextlib.asynccontextmanager
    async def client(self, name: str = "client", unknown: Iterable[str] = ()) -> AsyncIterator[Client]:
        opener = SharedOpener(self)
        opener.unknown = set(unknown)
        url = await self.configured()
        log = FollowedLog(url, await opener.open(url), opener)
        try:
            async with Client(log.following, prefix="by-dev", name=f"{name}-{next(self._clients)}") as client:
                yield client
        finally:
            await log.stop()
            await log.following.close()

    async def start_divided(self, name: str, *, wait: bool = True) -> NodeProcess:
        """Start a node with all roles, or in a directory one with the roles of that process of two: `a` owns it."""
        if not self.in_directory:
            return await self.start(name, wait=wait)
        owner, readers = divide_roles(2)
        return await self.start(name, (owner if name == "a" else readers).roles, wait=wait)

    async def configured(self) -> str:
        """The log that its operator lets nodes and clients begin with: the one that is in use since the last
        migration."""
        url = self.url
        while (state := await self._state(url)).phase is MigrationPhase.MIGRATED:
            if await self.phase(state.other) in (MigrationPhase.RESERVED, MigrationPhase.PENDING):
                break
            url = state.other
        return url

    async def phase(self, url: str = OLD) -> MigrationPhase:
        return (await self._state(url)).phase

    async def _state(self, url: str) -> MigrationState:
        return await migration_state(await self.opener.open_alone(url))

    def tables_of_nodes(self) -> MovedTables:
        return MovedTables(open_tables(self.table_directory), in_place)

    def log_at(self, url: str) -> MemoryLog:
        return self.logs.setdefault(url, MemoryLog())

    async def migrate(
        self, said: list[str] | None = None, opener: Any = None, *, of: str = OLD, to: str = NEW, **options: Any
    ) -> MigrationProof:
        """What the command does, which opens the logs by `opener`."""
        opener = opener or CommandOpener(self)
        old, new = await opener.open_alone(of), await opener.open_alone(to)
        options = {"tables": self.tables_of_nodes(), "clock": self.loop.clock, **options}
        on_progress = (said if said is not None else []).append
        return await migrate_in_use(old, new, of, to, on_progress=on_progress, **options)

    async def cancel(self, opener: Any = None, *, of: str = OLD, to: str = NEW, **options: Any) -> None:
        """What the command does with `--cancel`."""
        opener = opener or self.opener
        await cancel_migration(await opener.open_alone(of), await opener.open_alone(to), to, **options)
