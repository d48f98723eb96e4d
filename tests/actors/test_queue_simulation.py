"""Topics, delays, transactions and groups side by side over several nodes, under faults that a seed draws, while the
log is migrated, or replicated and promoted.

Nothing is lost, early, doubled, or out of order for its key, and no transaction is seen in part.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.actors.queue_simulation.faults import NODES, QueueFaults
from tests.actors.queue_simulation.migrations import Migrations
from tests.actors.queue_simulation.replicas import Replica
from tests.actors.queue_simulation.traffic import ALL, QueueTraffic
from tests.actors.shared_logs import SharedNodes
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.testing import VirtualClock, run_virtual

SEEDS = int(os.environ.get("TIDEWAL_TEST_QUEUES", "0"))  # more of them; one takes some seconds
FAULTS = 4
LATE_S = 2.0


class Queue:
    """The nodes, what clients do with them, and what has happened to both."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.trace: list[str] = []
        self.nodes = SharedNodes(directory, random.Random(seed))
        self.nodes.log_faults.late_s = LATE_S
        self.traffic = QueueTraffic(self.nodes)
        self.faults = QueueFaults(self.nodes, self.trace)

    async def start(self) -> None:
        for name in NODES:
            self.nodes.settings[name] = Settings.model_validate({"rootCoord": {"dmlChannelNum": 1}})
            await self.nodes.start(name)

    async def go_on_at(self, time: float) -> None:
        """Start nodes on a log that has what clients wrote up to `time`, and go on there."""
        await self.start()
        await self.traffic.go_on_at(time)
        async with self.traffic.running():
            await asyncio.sleep(1.5)


async def in_place(queue: Queue) -> None:
    """On one log."""
    async with queue.traffic.running():
        await queue.faults.happen(FAULTS)
        await asyncio.sleep(3)


async def migrated(queue: Queue) -> None:
    """The log is migrated once or twice meanwhile."""
    async with queue.traffic.running():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(queue.faults.happen(FAULTS // 2))
            tasks.create_task(Migrations(queue.nodes, queue.trace).happen(queue.nodes.rng.choice((1, 1, 2))))
        await asyncio.sleep(3)


class Gone(Exception):
    """What clients use is there no more."""


async def promoted(queue: Queue) -> None:
    """Nodes and clients stop, and go on in a replica."""
    replica = Replica(queue.nodes, queue.trace)
    async with replica.replicating():
        with suppress_gone():
            async with queue.traffic.running():
                await queue.faults.happen(FAULTS // 2)
                await asyncio.sleep(queue.nodes.rng.uniform(0.5, 3))
                raise Gone
        for name in NODES:
            await queue.nodes.end(name)
    await replica.promote()
    await queue.go_on_at(ALL)


async def promoted_alone(queue: Queue) -> None:
    """All nodes are gone at once, and the log with them: others go on with what the line of a replica has."""
    replica = Replica(queue.nodes, queue.trace)
    with suppress_gone():
        async with queue.traffic.running(), replica.replicating():
            await queue.faults.happen(FAULTS // 2)
            await replica.has_line()
            await asyncio.sleep(queue.nodes.rng.uniform(0.5, 3))
            raise Gone
    for name in NODES:
        await queue.nodes.kill(name)
    await queue.go_on_at(await replica.promote_alone())


@contextmanager
def suppress_gone() -> Iterator[None]:
    try:
        yield
    except* Gone:
        pass


KINDS: list[Callable[[Queue], Awaitable[None]]] = [in_place, migrated, promoted, promoted_alone]


async def _simulate(kind: Callable[[Queue], Awaitable[None]], seed: int, directory: Path) -> None:
    queue = Queue(seed, directory)
    try:
        await queue.start()
        await kind(queue)
        await queue.traffic.check()
    except BaseException:
        print(f"queue of seed {seed}, {kind.__name__}:", *queue.trace, sep="\n")
        raise
    finally:
        await queue.nodes.stop()


def simulate_queue(number: int, seed: int, directory: Path) -> None:
    """Run one queue on virtual time. One seed is one run."""
    run_virtual(_simulate(KINDS[number % len(KINDS)], seed + number, directory / f"{number}"), VirtualClock())


@pytest.mark.long
@pytest.mark.parametrize("number", range(SEEDS or len(KINDS)))
def test_whatever_fails_a_queue_keeps_its_promises(seed: int, tmp_path: Path, number: int) -> None:
    simulate_queue(number, seed, tmp_path)
