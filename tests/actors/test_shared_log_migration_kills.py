"""The command that migrates the log of several nodes is killed at each of its writes, and nodes meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from tests.actors.conftest import PEOPLE, people
from tests.actors.shared_logs import FarDirectoryWal, FarSharedWal, SharedNodes
from tests.dying_wal import DyingWal, Killed
from tests.turns import cases_in_turn, writes_in_turn
from tidewal.runtime.errors import Unavailable
from tidewal.runtime.log.migration_state import MigrationPhase
from tidewal.runtime.log.wal import Wal

ROUNDS = 8

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.long]


class DyingSharedWal(DyingWal):
    """A log that several write to, of a command that dies at one of its writes."""

    capabilities = FarSharedWal.capabilities


class DyingDirectoryWal(DyingWal):
    """Such a log in a directory."""

    capabilities = FarDirectoryWal.capabilities


class Command:
    """The logs that the command has open."""

    def __init__(self, nodes: SharedNodes, step: int, *, behind: bool) -> None:
        self._nodes, self.left, self._behind = nodes, [step], behind

    async def open_alone(self, url: str) -> Wal:
        kind = DyingDirectoryWal if self._nodes.in_directory else DyingSharedWal
        return kind(self._nodes.log_at(url), self.left, behind=self._behind)


async def killed_once(
    directory: Path, rng: random.Random, step: int, number: int, *, behind: bool, in_directory: bool = False
) -> MigrationPhase | None:
    """Migrate, with the command killed at the write `step` and typed again, or the migration taken back, by `number`.
    Returns the phase in which it was killed; None where it had fewer writes."""
    nodes = SharedNodes(directory, rng, in_directory=in_directory)
    try:
        for name in "ab":
            await nodes.start_divided(name)
        async with nodes.client() as client:
            await client.create_collection(PEOPLE, shards=2)
            await client.insert("people", people(*range(5)))
            await client.flush("people")
            acknowledged = [*range(5)]
            writing = asyncio.create_task(write(client, acknowledged))
            phase = await with_a_kill(nodes, step, number, behind=behind)
            await asyncio.sleep(2)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            found = await client.query("people", consistency="strong", deadline_s=120)
            keys = sorted(found.table["id"].to_pylist())
            assert set(acknowledged) <= set(keys)
            assert len(keys) == len(set(keys)) <= len(acknowledged) + 1
        assert [each.error for each in nodes.running.values()] == [None, None]
        return phase
    finally:
        await nodes.stop()


async def write(client: Any, acknowledged: list[int]) -> None:
    while True:
        key = len(acknowledged)
        await client.insert("people", people(key), deadline_s=200)
        acknowledged.append(key)
        await asyncio.sleep(0.2)


async def with_a_kill(nodes: SharedNodes, step: int, number: int, *, behind: bool) -> MigrationPhase | None:
    dying = Command(nodes, step, behind=behind)
    try:
        await nodes.migrate(opener=dying)
    except Killed:
        phase = await nodes.phase()
        if number % 3 == 0:  # and a node with it: it is started again while all wait
            await nodes.kill(killed := "ab"[number // 6 % 2])
            await nodes.start_divided(killed, wait=False)
        await asyncio.sleep(5)
        if number % 2 and phase not in (MigrationPhase.OPEN, MigrationPhase.MIGRATED):
            await nodes.cancel()
            assert await nodes.phase() is MigrationPhase.OPEN
        else:
            await nodes.migrate()
            assert await nodes.phase() is MigrationPhase.MIGRATED
        for each in nodes.running.values():
            await asyncio.wait_for(each.ready.wait(), 60)
        return phase
    return None


@pytest.mark.parametrize("behind", cases_in_turn((False, True)), ids=["before", "behind"])
async def test_a_command_that_is_killed_at_each_write_goes_on_or_is_taken_back(
    home, tmp_path: Path, rng: random.Random, turn: int, behind: bool
) -> None:
    step, phases = 0, set[MigrationPhase]()
    for step, number in writes_in_turn(turn):
        phase = await killed_once(tmp_path / f"{step}", rng, step, number, behind=behind)
        if phase is None:
            break
        phases.add(phase)
    assert step > 60, step
    assert phases >= {MigrationPhase.PREPARING, MigrationPhase.MIGRATING, MigrationPhase.MIGRATED}


@pytest.mark.parametrize("behind", cases_in_turn((False, True)), ids=["before", "behind"])
async def test_in_a_directory_too_it_goes_on_or_is_taken_back(
    home, tmp_path: Path, rng: random.Random, turn: int, behind: bool
) -> None:
    """At each third write of the command, and with it the process that has the directory is killed, or another one."""
    step, phases = 0, set[MigrationPhase]()
    for step, number in writes_in_turn(turn):
        phase = await killed_once(tmp_path / f"{step}", rng, step, number, behind=behind, in_directory=True)
        if phase is None:
            break
        phases.add(phase)
    assert step > 60, step
    assert phases >= {MigrationPhase.PREPARING, MigrationPhase.MIGRATING, MigrationPhase.MIGRATED}


async def with_killed_nodes(nodes: SharedNodes, rng: random.Random) -> int:
    """Migrate while nodes are killed and started again, until that has ended. Returns how often it had to begin."""
    tries = 0
    while await nodes.phase() is not MigrationPhase.MIGRATED:
        tries += 1
        migrating = asyncio.create_task(nodes.migrate(leave_s=20))
        for _ in range(rng.randrange(1, 4)):
            await asyncio.sleep(rng.uniform(0, 1.5))
            name = rng.choice("abc")
            if name in nodes.running and nodes.running[name].started is not None:
                await nodes.kill(name)
                await asyncio.sleep(rng.uniform(0, 2))
                await nodes.start_divided(name, wait=False)
        with contextlib.suppress(Unavailable):
            await migrating
    return tries


@pytest.mark.parametrize("in_directory", cases_in_turn((False, True)), ids=["on brokers", "in a directory"])
async def test_nodes_that_are_killed_in_the_switch_lose_nothing(
    home, tmp_path: Path, rng: random.Random, in_directory: bool
) -> None:
    for round in range(ROUNDS):
        nodes = SharedNodes(tmp_path / f"{round}", rng, in_directory=in_directory)
        try:
            for name in "abc":
                await nodes.start_divided(name)
            async with nodes.client() as client:
                await client.create_collection(PEOPLE, shards=3)
                acknowledged: list[int] = []
                writing = asyncio.create_task(write(client, acknowledged))
                await asyncio.sleep(1)
                tries = await with_killed_nodes(nodes, rng)
                moved = len(acknowledged)
                await asyncio.sleep(20)
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
                assert len(acknowledged) > moved + 10
                found = await client.query("people", consistency="strong", deadline_s=120)
                keys = sorted(found.table["id"].to_pylist())
                assert set(acknowledged) <= set(keys)
                assert len(keys) == len(set(keys)) <= len(acknowledged) + 1
                print(f"round {round}: begun {tries} times, {len(acknowledged)} rows, {moved} before its end")
        finally:
            await nodes.stop()
