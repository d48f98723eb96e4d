"""Random work of nodes, replicators and promotions that die at any write: all that was acknowledged is there, once."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tidewal
from tests.actors.conftest import Home
from tests.actors.test_node_migration import DyingTables, FarWal
from tests.actors.test_node_replication import REPLICA, SOURCE, TIMES, replica_of
from tests.dying_wal import DyingWal, Killed
from tidewal.runtime.log.replication_state import ReplicationPhase, replication_state
from tidewal.runtime.replication.promotion import promote
from tidewal.runtime.replication.replicator import Replicator
from tidewal.runtime.testing.clock import VirtualLoop, run_virtual
from tidewal.runtime.testing.memory import MemoryWal

LIVES, STEPS = 3, 8  # of a node, and in each
LATER_S = 60.0
QUIET_S = 3.0  # a member that gets nothing for so long has all
RUNS = int(os.environ.get("TIDEWAL_TEST_REPLICAS", "3"))  # one takes some seconds

pytestmark = pytest.mark.slow

Dump = list[tuple[str, bytes, bytes]]
Dumps = tuple[Dump, Dump]


class LockedWal(DyingWal):
    """A log that one process has open: the next replicator waits for nobody."""

    capabilities = replace(MemoryWal.capabilities, one_machine=True)


class FarLockedWal(LockedWal, FarWal):
    """Another one, with higher ids."""


class Work:
    """What a node has acknowledged: rows that are there, messages that were sent, and those that a group has done."""

    def __init__(self, home: Any, rng: random.Random) -> None:
        self._home, self._rng = home, rng
        self.keys: set[int] = set()
        self.sent: list[str] = []
        self.later: list[str] = []
        self.done: list[str] = []
        self._next = 0

    async def life(self, *, first: bool) -> None:
        """A node starts, works, and leaves."""
        async with self._home.client() as client:
            if first:
                await client.create_collection(self._home.PEOPLE, shards=2)
                await client.create_topic("orders", 2)
                await client.create_topic("later", 1)
            for _ in range(STEPS):
                step = self._rng.choice((self._insert, self._insert, self._delete, self._send, self._delay, self._take))
                await step(client)
                await asyncio.sleep(self._rng.random())
                if self._rng.random() < 0.2:
                    await client.flush("people")

    async def _insert(self, client: tidewal.Client) -> None:
        keys = range(self._next, self._next + self._rng.randrange(1, 20))
        self._next = keys.stop
        await client.insert("people", self._home.people(*keys))
        self.keys |= {*keys}

    async def _delete(self, client: tidewal.Client) -> None:
        if gone := self._rng.sample(sorted(self.keys), min(3, len(self.keys))):
            await client.delete("people", gone)
            self.keys -= {*gone}

    async def _send(self, client: tidewal.Client) -> None:
        texts = [f"{len(self.sent) + number}" for number in range(self._rng.randrange(1, 6))]
        await client.send("orders", [tidewal.Message(text, key=text) for text in texts])
        self.sent += texts

    async def _delay(self, client: tidewal.Client) -> None:
        text = f"{len(self.later)}"
        await client.send("later", text, key="k", deliver_after_s=LATER_S)
        self.later.append(text)

    async def _take(self, client: tidewal.Client) -> None:
        self.done += await taken(client, "orders", 1)


async def taken(client: tidewal.Client, topic: str, packs: int | None = None) -> list[str]:
    """The messages of so many packs, of all that are there for None, acknowledged."""
    got: list[str] = []
    async with await client.subscribe(topic, "billing") as member:
        with suppress(TimeoutError):
            while packs is None or packs > 0:
                pack = await asyncio.wait_for(anext(member), QUIET_S)
                await member.acknowledge(pack)
                got += [bytes(each.body).decode() for each in pack.messages]
                packs = None if packs is None else packs - 1
    return got


async def replicators(home: Any, other: Any, rng: random.Random, killed: list[int]) -> None:
    """One after another, each of which dies at a write, before or behind it; `killed` counts them."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert isinstance(loop, VirtualLoop)
    assert task is not None
    while not task.cancelling():  # one that dies as it stops does not say that it was cancelled
        left, behind = [rng.randrange(1, 80)], rng.random() < 0.5
        old, new = LockedWal(home.log, left, behind=behind), FarLockedWal(other.log, left, behind=behind)
        with suppress(Killed):
            await Replicator(old, new, SOURCE, times=TIMES, clock=loop.clock).run()
        killed[0] += 1


async def promoted(home: Any, other: Any, rng: random.Random) -> int:
    """Promote until an attempt is not killed. Returns how many were."""
    if (await replication_state(MemoryWal(other.log))).phase is ReplicationPhase.NONE:
        async with Replicator(MemoryWal(home.log), FarWal(other.log), SOURCE).claimed():
            pass
    for kills in range(1_000):
        left, behind = [rng.randrange(1, 40 + kills)], rng.random() < 0.5
        old, new = LockedWal(home.log, left, behind=behind), FarLockedWal(other.log, left, behind=behind)
        with suppress(Killed):
            await promote(old, new, SOURCE, REPLICA, tables=DyingTables(home, left, behind=behind))
            return kills
    raise AssertionError("no promotion has ended")


async def simulated(directory: Path, rng: random.Random) -> Dumps:
    """Let nodes work, replicate and promote; returns what both logs hold behind it."""
    home = Home(directory)
    other = replica_of(home)
    work, killed = Work(home, rng), [0]
    mirroring = asyncio.create_task(replicators(home, other, random.Random(rng.random()), killed))
    for life in range(LIVES):
        await work.life(first=not life)
        if life == LIVES - 2 and rng.random() < 0.5:  # the last life is brought over by the promotion alone
            mirroring.cancel()
    mirroring.cancel()
    with suppress(asyncio.CancelledError):
        await mirroring
    print(f"{killed[0]} replicators and {await promoted(home, other, rng)} promotions were killed")
    async with other.client() as client:
        found = (await client.query("people", consistency="strong")).table["id"].to_pylist()
        assert sorted(found) == sorted(work.keys)
        assert sorted([*work.done, *await taken(client, "orders")]) == sorted(work.sent)
        await asyncio.sleep(LATER_S)
        assert sorted(await taken(client, "later")) == sorted(work.later)
        await client.insert("people", home.people(10_000))
        await client.flush("people")
    return home.log.dump(), other.log.dump()


def run_of(directory: Path, seed: str, monkeypatch: pytest.MonkeyPatch) -> Dumps:
    """One seed is one run: ids come from it, too, for they are in the names of channels, by whose order these are gone
    through."""
    ids = random.Random(f"ids {seed}")
    directory.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "urandom", ids.randbytes)  # of `uuid4`
        patched.setattr(secrets, "token_hex", lambda length: ids.randbytes(length).hex())
        return run_virtual(simulated(directory, random.Random(seed)))


@pytest.mark.parametrize("run", range(RUNS))
def test_what_was_acknowledged_is_in_the_replica_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, run: int
) -> None:
    run_of(tmp_path / "run", f"{seed} {run}", monkeypatch)


def test_one_seed_is_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    first, again = (run_of(tmp_path / name, f"{seed}", monkeypatch) for name in ("first", "again"))
    for one, other in zip(first, again, strict=True):
        assert without_measures(one) == without_measures(other)


def without_measures(dump: Dump) -> Dump:
    """What a log holds but for the channel that has how long questions took, which is measured."""
    return [entry for entry in dump if not entry[0].endswith("-query_events")]
