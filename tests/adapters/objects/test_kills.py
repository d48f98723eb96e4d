"""What survives kills and stops of the process that owns the log, and kills of the store: what was acknowledged, once,
under its id and in order. Processes and stores are real ones."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.brokers.processes import Process
from tests.brokers.producers import everything
from tests.brokers.woodpecker import KEY, VersityGateway
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.testing import history_checks, load_calls

KILLS = int(os.environ.get("TIDEWAL_TEST_KILLS", "20"))
ZOMBIES = 4  # each so many kills the owner is stopped until another process writes, and goes on
LEASE_S = 1.0
WITHIN_S = 120.0
LOOK_S = 0.05
WRITER = Path(__file__).with_name("kill_writer.py")
CHANNEL = "a"


class Writers:
    """Two processes that append to one log: one owns it, the other one waits for that."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self._started: list[Process] = []
        self._running: dict[str, tuple[Process, Path]] = {}  # with its history
        for name in ("one", "two"):
            self._start(name)

    def _start(self, name: str) -> None:
        history = self._folder / f"{name}-{len(self._started)}.jsonl"
        command = [sys.executable, str(WRITER), self._url, str(history), str(LEASE_S)]
        process = Process(command, history.with_suffix(".log"))
        process.start()
        self._started.append(process)
        self._running[name] = process, history

    def _acknowledged(self) -> dict[str, int]:
        """How many appends of each process that runs were acknowledged."""
        histories = {name: history for name, (_, history) in self._running.items()}
        return {name: path.read_bytes().count(b'"ok"') for name, path in histories.items() if path.exists()}

    async def owner(self, *, but: str = "") -> str:
        """The process that writes, once one does that is not `but`."""
        before = self._acknowledged()
        async with asyncio.timeout(WITHIN_S):
            while True:
                await asyncio.sleep(LOOK_S)
                for name, count in self._acknowledged().items():
                    if count > before.get(name, 0) and name != but:
                        return name

    async def kill_owner(self) -> None:
        """Kill the owner, and start another process."""
        owner = await self.owner()
        await asyncio.to_thread(self._running[owner][0].kill)
        self._start(owner)

    async def stop_owner(self) -> None:
        """Stop the owner until another process writes, and let it go on."""
        owner = await self.owner()
        process, _ = self._running[owner]
        await asyncio.to_thread(process.pause)
        await self.owner(but=owner)
        process.resume()

    def end(self) -> None:
        for process in self._started:
            process.kill()

    async def check(self) -> None:
        """End all, and compare the log with what they were answered."""
        self.end()
        async with await open_wal(self._url, read_only=True) as wal:
            entries = [(entry.id.hex(), bytes(entry.payload).decode()) for entry in await everything(wal, CHANNEL)]
        calls = load_calls(self._folder.glob("*.jsonl"))
        assert any(call.outcome == "ok" for call in calls)
        assert history_checks.appends(calls, {CHANNEL: entries}) + history_checks.errors(calls) == []


async def survives_kills(url: str, folder: Path, kills: int) -> None:
    """Kill the owner so often, or stop it and let it go on."""
    writers = Writers(url, folder)
    try:
        for number in range(1, kills + 1):
            await (writers.stop_owner() if number % ZOMBIES == 0 else writers.kill_owner())
        await writers.owner()
        await writers.check()
    finally:
        writers.end()


@pytest.fixture
def versity_url(object_store: VersityGateway, monkeypatch: pytest.MonkeyPatch) -> str:
    """A log in a bucket of a store that the test may kill."""
    if not object_store.atomic:
        pytest.skip("without extended attributes a store that is killed may have half of an object")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, KEY)
    object_store.create_bucket()
    return f"s3://tests/log?endpoint=http://127.0.0.1:{object_store.port}&region=us-east-1"


@pytest.mark.slow
async def test_an_owner_that_is_killed_and_one_that_is_stopped_lose_nothing(tmp_path: Path) -> None:
    writers = Writers(f"file://{tmp_path}/log", tmp_path)
    try:
        await writers.kill_owner()
        await writers.stop_owner()
        await writers.owner()
        await writers.check()
    finally:
        writers.end()


@pytest.mark.kills
@pytest.mark.timeout(3600)
async def test_many_kills_of_the_owner_lose_nothing_in_a_directory(tmp_path: Path) -> None:
    await survives_kills(f"file://{tmp_path}/log", tmp_path, KILLS)


@pytest.mark.kills
@pytest.mark.broker
@pytest.mark.timeout(3600)
async def test_many_kills_of_the_owner_lose_nothing_in_a_bucket(versity_url: str, tmp_path: Path) -> None:
    await survives_kills(versity_url, tmp_path, KILLS)


@pytest.mark.kills
@pytest.mark.broker
@pytest.mark.timeout(3600)
async def test_many_kills_of_the_store_lose_nothing(
    versity_url: str, object_store: VersityGateway, tmp_path: Path
) -> None:
    writers = Writers(versity_url, tmp_path)
    try:
        for _ in range(KILLS // 2):
            await writers.owner()
            await asyncio.to_thread(object_store.process.kill)
            await asyncio.to_thread(object_store.start)
        await writers.owner()
        await writers.check()
    finally:
        writers.end()
