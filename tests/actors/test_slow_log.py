"""Nodes whose requests take a while through the log, as through brokers and loops under load."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.actors.conftest import PEOPLE, people
from tests.actors.nodes import Nodes
from tidewal.runtime.log.wal import Append, OnAppended
from tidewal.runtime.testing.simulation.wal import SimulatedWal

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]

REQUEST_S = 0.3
WRITERS = 20


class SlowWal(SimulatedWal):
    """A log on which requests and replies land `REQUEST_S` later."""

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        if "-requests-" in entries[0].channel or "-replies-" in entries[0].channel:
            asyncio.get_running_loop().call_later(REQUEST_S, partial(super().submit, list(entries), done))
        else:
            super().submit(entries, done)


@pytest.fixture
async def three(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    nodes = Nodes(tmp_path, rng, SlowWal)
    for name in "abc":
        await nodes.start(name)
    await asyncio.sleep(10)  # the channels are at all of them
    yield nodes
    await nodes.stop()


async def test_a_strong_read_is_answered_however_much_is_written_meanwhile(three: Nodes, rng: random.Random) -> None:
    acknowledged: list[int] = []

    async def write(number: int) -> None:
        await asyncio.sleep(rng.uniform(0, 1))
        while True:
            await client.insert("people", people(number))
            acknowledged.append(number)
            number += WRITERS

    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=8)
        writing = [asyncio.create_task(write(number)) for number in range(WRITERS)]
        await asyncio.sleep(5)
        assert len(set(three.owners().values())) == 3
        for _ in range(5):
            least = len(acknowledged)
            async with asyncio.timeout(5):
                assert await client.count("people", consistency="strong") >= least > 0
        for each in writing:
            each.cancel()
        await asyncio.gather(*writing, return_exceptions=True)


async def test_a_node_is_not_silent_because_the_log_is_slow(three: Nodes) -> None:
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=8, replicas=1)
        await client.insert("people", people(*range(20)))
        for _ in range(5):
            assert await client.count("people", consistency="strong") == 20
        a, b = (three.running[name] for name in "ab")
        peers = a.role("querynode")._peers
        silent = [await peers.is_silent(b.node.node.incarnation) for _ in range(5)]
        assert silent[2:] == [False] * 3
        await three.kill("b")
        assert await peers.is_silent(b.node.node.incarnation)
