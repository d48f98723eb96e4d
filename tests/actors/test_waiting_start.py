"""A node that is started while its log is migrated: what it waits for, says of itself, and ends with."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.brokers.processes import free_ports
from tidewal.actors import shared_log_migration
from tidewal.actors.open_logs import SettingsOpener
from tidewal.actors.shared_log_migration import open_logs
from tidewal.adapters.rocksmq import backend
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import DirectoryInUse, Moved, Unavailable
from tidewal.runtime.log import migration_watch
from tidewal.runtime.log.migration_state import (
    MigrationPhase,
    MigrationState,
    change_migration_state,
    check_in_use,
    come_into_use,
    migration_state,
)
from tidewal.runtime.log.migration_watch import MigrationWatch, opened_next
from tidewal.runtime.log.wal import Wal
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

OLD, NEW = "memory://old", "memory://new"
ID = "0" * 32

pytestmark = pytest.mark.asyncio


class Opener:
    """Opens logs in memory, by URL."""

    def __init__(self) -> None:
        self.logs = {OLD: MemoryLog(), NEW: MemoryLog()}

    async def open(self, url: str) -> Wal:
        wal = await self.open_alone(url)
        await check_in_use(wal, url)
        return wal

    async def open_alone(self, url: str) -> Wal:
        return MemoryWal(self.logs[url])

    async def look_at(self, url: str) -> Wal:
        return await self.open_alone(url)

    def owned_by_one(self, url: str) -> bool:
        return False

    def moved_by_command(self, url: str) -> bool:
        return True

    async def say(self, url: str, phase: MigrationPhase) -> None:
        other = NEW if url == OLD else OLD
        await change_migration_state(MemoryWal(self.logs[url]), MigrationState(phase, ID, other))


def health_at(port: int, path: str = "healthz") -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


async def test_it_says_that_it_waits_and_goes_on_with_the_new_log() -> None:
    opener, (port,) = Opener(), free_ports(1)
    await opener.say(OLD, MigrationPhase.MIGRATING)
    for phase in (MigrationPhase.RESERVED, MigrationPhase.PENDING):
        await opener.say(NEW, phase)
    settings = Settings.model_validate({"metrics": {"port": port}})
    opening = asyncio.create_task(open_logs(opener, OLD, settings, Metrics("node")))
    while True:
        try:
            status, details = await asyncio.to_thread(health_at, port)
            break
        except OSError:  # it does not listen yet
            await asyncio.sleep(0.01)
    assert (status, details) == (200, {"ok": True, "switching": "the node waits: its log is being migrated"})
    assert await asyncio.to_thread(health_at, port, "readyz") == (503, {**details, "ok": False})
    await opener.say(OLD, MigrationPhase.MIGRATED)
    await asyncio.sleep(0.05)
    assert not opening.done(), "the new log has not everything"
    also = asyncio.create_task(open_logs(opener, OLD, Settings(), Metrics("started behind")))
    await asyncio.sleep(0.05)
    assert not also.done()
    await come_into_use(MemoryWal(opener.logs[NEW]))
    for each in (opening, also):
        logs = await each
        assert (logs.url, logs.wal.log) == (NEW, opener.logs[NEW])  # pyright: ignore -- a MemoryWal
        await logs.close()
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(health_at, port)
    with pytest.raises(Moved):  # it is to be configured with the new one
        await open_logs(opener, OLD, Settings(), Metrics("late"))
    logs = await open_logs(opener, OLD, Settings(), Metrics("started again"), follow=True)
    assert (logs.url, logs.wal.log) == (NEW, opener.logs[NEW])  # pyright: ignore -- a MemoryWal
    await logs.close()


async def test_it_waits_for_a_directory_that_the_command_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration_watch, "LOOK_PREPARED_S", 0.001)
    opener = Opener()
    await opener.say(OLD, MigrationPhase.MIGRATING)
    await opener.say(OLD, MigrationPhase.MIGRATED)
    open_at, refused, times = opener.open, list[str](), migration_watch.OPENINGS_MAX - 1

    async def refusing(url: str) -> Wal:
        if url == NEW and len(refused) < times:
            refused.append(url)
            raise DirectoryInUse("the command has it")
        return await open_at(url)

    monkeypatch.setattr(opener, "open", refusing)
    watch = MigrationWatch(await opener.look_at(OLD), OLD)
    url, wal = await opened_next(watch, OLD, opener.open)
    assert (url, wal.log) == (NEW, opener.logs[NEW])  # pyright: ignore -- a MemoryWal
    refused[:] = []
    monkeypatch.setattr(migration_watch, "OPENINGS_MAX", 0)  # another node has it
    with pytest.raises(Moved, match="the command has it"):
        await opened_next(watch, OLD, opener.open)


async def test_a_node_that_looks_for_a_log_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "OPENING_S", 0.05)
    url = f"rocksmq://{tmp_path / 'none'}"
    with pytest.raises(Unavailable, match="there is no log in"):
        await open_logs(SettingsOpener(Settings(), None, owns=False), url, Settings(), Metrics("readers"))
    assert not (tmp_path / "none").exists()


async def test_a_process_that_waits_has_the_directory_until_its_owner_opens_it(tmp_path: Path) -> None:
    url = f"rocksmq://{tmp_path / 'log'}"
    owner, other = (SettingsOpener(Settings(), None, owns=owns) for owns in (True, False))
    old = await owner.open(url)
    member = await other.open(url)
    await change_migration_state(old, MigrationState(MigrationPhase.PREPARING, ID, NEW))
    await change_migration_state(old, MigrationState(MigrationPhase.MIGRATING, ID, NEW))
    await old.close()
    waits = await other.look_at(url)
    assert (await migration_state(member)).phase is MigrationPhase.MIGRATING, "a node sees that it is to leave"
    await change_migration_state(waits, MigrationState(MigrationPhase.PREPARING, ID, NEW))
    old = await owner.open(url)  # it is yielded
    assert (await migration_state(waits)).phase is MigrationPhase.PREPARING
    for wal in (member, waits, old):
        await wal.close()


async def test_it_waits_for_so_long_and_not_for_the_target_of_a_migration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_log_migration, "WAIT_S", 0.05)
    opener = Opener()
    await opener.say(OLD, MigrationPhase.MIGRATING)
    await opener.say(NEW, MigrationPhase.RESERVED)
    with pytest.raises(Unavailable, match=r"has not ended within 0.05 s: end it with `tidewal migrate`"):
        await open_logs(opener, OLD, Settings(), Metrics("node"))
    with pytest.raises(Unavailable, match=f"tidewal migrate {OLD} --to {NEW}"):
        await open_logs(opener, NEW, Settings(), Metrics("node"))
