"""Five processes share one log, and again and again the one that owns it is killed: nothing acknowledged is lost,
nothing is there twice, and the log soon has another owner.

`TIDEWAL_CRASH_KILLS` says how often (30).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.log.wal import Append, From

KILLS = int(os.environ.get("TIDEWAL_CRASH_KILLS", "30"))
PROCESSES = 5
PATIENCE_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.kills, pytest.mark.timeout(600 + 10 * KILLS)]


class Child:
    """A process of the suite, and what it said was acknowledged: (channel, id) → (name, count)."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, progress: asyncio.Event) -> None:
        self.name, self.process = name, process
        self.acknowledged: dict[tuple[str, bytes], tuple[str, int]] = {}
        self.errors: list[str] = []
        self.answered: list[tuple[float, float]] = []  # when submitted, when acknowledged
        self.commits = 0
        self._progress = progress
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            await self._note()
        finally:
            self._progress.set()

    async def _note(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            submitted, *words = line.decode().split()
            if submitted == "error":
                self.errors.append(line.decode())
                continue
            if submitted == "commit":
                self.commits += 1
                self._progress.set()
                continue
            acknowledged, *entries = words
            self.answered.append((float(submitted), float(acknowledged)))
            for entry in entries:
                channel, count, id = entry.split(":")
                assert (channel, bytes.fromhex(id)) not in self.acknowledged
                self.acknowledged[channel, bytes.fromhex(id)] = self.name, int(count)
            self._progress.set()


class Suite:
    """Starts processes in one directory, ends them, and waits for what the others acknowledge."""

    def __init__(self, directory: Path, script: str, rng: random.Random) -> None:
        self.directory, self._script, self._rng = directory, script, rng
        self.alive: dict[int, Child] = {}
        self.all: list[Child] = []
        self._progress = asyncio.Event()

    async def start(self) -> None:
        name = f"p{len(self.all)}"
        script = str(Path(__file__).with_name(self._script))
        arguments = str(self.directory), name, str(self._rng.randrange(2**32))
        process = await asyncio.create_subprocess_exec(
            sys.executable, script, *arguments, stdout=asyncio.subprocess.PIPE
        )
        child = Child(name, process, self._progress)
        self.alive[process.pid] = child
        self.all.append(child)

    @property
    def owner(self) -> Child | None:
        text = (self.directory / "LOCK").read_text().strip()
        return self.alive.get(int(text)) if text.isdigit() else None

    async def end(self, child: Child, signal_number: int) -> float:
        """Send the signal and wait until the process is gone; when it was sent."""
        del self.alive[child.process.pid]
        sent = time.monotonic()
        child.process.send_signal(signal_number)
        code = await asyncio.wait_for(child.process.wait(), PATIENCE_S)
        assert code in (0, -signal.SIGKILL)
        assert code == 0 or signal_number == signal.SIGKILL
        await child.reading
        return sent

    async def acknowledged(self, count: int) -> None:
        """Wait for that many more answers."""
        wanted = sum(len(child.answered) for child in self.all) + count
        await self._until(lambda: sum(len(child.answered) for child in self.all) >= wanted)

    async def committed(self, count: int) -> None:
        """Wait for that many more commits of groups."""
        wanted = sum(child.commits for child in self.all) + count
        await self._until(lambda: sum(child.commits for child in self.all) >= wanted)

    async def first_after(self, sent: float) -> float:
        """The time of the first acknowledgement of an append that was submitted later."""

        def answers() -> list[float]:
            return [at for child in self.alive.values() for began, at in child.answered[-200:] if began > sent]

        await self._until(answers)
        return min(answers())

    async def _until(self, condition) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._progress.clear()
                await self._progress.wait()
                assert not any(child.reading.done() for child in self.alive.values()), "a process ended by itself"
                assert not any(child.errors for child in self.all), [child.errors for child in self.all]

    async def stop(self) -> None:
        for child in list(self.alive.values()):
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()
        await asyncio.gather(*(child.process.wait() for child in self.alive.values()))
        await asyncio.gather(*(child.reading for child in self.alive.values()))
        self.alive.clear()


@contextlib.asynccontextmanager
async def running(directory: Path, script: str, rng: random.Random) -> AsyncIterator[Suite]:
    suite = Suite(directory, script, rng)
    try:
        for _ in range(PROCESSES):
            await suite.start()
        await suite.acknowledged(100)
        yield suite
    finally:
        await suite.stop()


async def crash(suite: Suite, rng: random.Random, kills: int, commits: int = 0) -> list[float]:
    """Kill the owner again and again; seconds until appends were acknowledged afterwards. Between two kills groups
    have committed as often as `commits` says, at most."""
    times: list[float] = []
    while len(times) < kills:
        await suite.acknowledged(rng.randrange(1, 300))
        await suite.committed(rng.randrange(commits + 1))
        owner = suite.owner
        if owner is None:
            continue
        others = [child for child in suite.alive.values() if child is not owner]
        match rng.random():
            case chance if chance < 0.1:
                await suite.end(rng.choice(others), signal.SIGKILL)
            case chance if chance < 0.2:
                await suite.end(owner, signal.SIGTERM)
            case _:
                sent = await suite.end(owner, signal.SIGKILL)
                times.append(await suite.first_after(sent) - sent)
        await suite.start()
    return times


async def check(suite: Suite) -> int:
    """Compare what the log holds with what was acknowledged; how many entries it has."""
    store = await RocksMQ.open(str(suite.directory), serve=False)
    try:
        total = 0
        acknowledged = {key: value for child in suite.all for key, value in child.acknowledged.items()}
        assert len(acknowledged) == sum(len(child.acknowledged) for child in suite.all)
        for channel in await store.channels():
            if channel.startswith("out-"):
                continue
            found = await read_all(store, channel)
            total += len(found)
            assert [id for id, _ in found] == sorted({id for id, _ in found})
            counts: dict[str, list[int]] = defaultdict(list)
            held: dict[tuple[str, bytes], tuple[str, int]] = {}
            for id, payload in found:
                name, count, _ = payload.decode().split(" ")
                counts[name].append(int(count))
                held[channel, id] = name, int(count)
            for name, mine in counts.items():
                assert mine == list(range(1, len(mine) + 1)), f"entries of {name} are missing, double or out of order"
            assert {key: value for key, value in acknowledged.items() if key[0] == channel}.items() <= held.items()
        return total
    finally:
        await store.close()


async def read_all(store: RocksMQ, channel: str) -> list[tuple[bytes, bytes]]:
    latest = await store.latest_id(channel)
    entries: list[tuple[bytes, bytes]] = []
    reader = store.read(channel, From.EARLIEST)
    while latest is not None and (not entries or entries[-1][0] < latest):
        entries += [(entry.id, bytes(entry.payload)) for entry in await anext(reader)]
    return entries


async def test_killing_the_owner_loses_nothing_doubles_nothing_and_moves_the_log_on(tmp_path, rng, capsys):
    started = time.monotonic()
    async with running(tmp_path / "log", "crash_client.py", rng) as suite:
        times = await crash(suite, rng, KILLS)
    total = await check(suite)
    assert [error for child in suite.all for error in child.errors] == []
    report(capsys, suite, times, total, started)
    assert max(times) < PATIENCE_S


async def test_groups_in_killed_processes_copy_every_entry_exactly_once(tmp_path, rng, capsys):
    started = time.monotonic()
    async with running(tmp_path / "log", "crash_member.py", rng) as suite:
        times = await crash(suite, rng, max(1, KILLS // 3), commits=5)
    total = await check(suite)
    assert [error for child in suite.all for error in child.errors] == []
    store = await RocksMQ.open(str(suite.directory), serve=False)
    try:
        channels = [channel for channel in await store.channels() if not channel.startswith("out-")]
        member = await store.join("copiers", channels)
        while (await store.groups())[0].positions != {name: await store.latest_id(name) for name in channels}:
            delivered = await asyncio.wait_for(anext(member), PATIENCE_S)
            outputs = [Append(f"out-{delivered.channel}", bytes(entry.payload)) for entry in delivered.entries]
            await member.commit([delivered], outputs)
        await member.aclose()
        for channel in channels:
            copied = [payload for _, payload in await read_all(store, f"out-{channel}")]
            assert copied == [payload for _, payload in await read_all(store, channel)]
    finally:
        await store.close()
    report(capsys, suite, times, total, started)


def report(capsys, suite: Suite, times: list[float], total: int, started: float) -> None:
    with capsys.disabled():
        print(
            f"\n{len(times)} owners killed, {len(suite.all)} processes, {total} entries,"
            f" {sum(child.commits for child in suite.all)} commits of groups, {time.monotonic() - started:.0f} s;"
            f" from kill to the next acknowledgement: median {statistics.median(times):.3f} s, most {max(times):.3f} s"
        )
