"""Transactions over several owners while their log is migrated: all or nothing, and once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.actors.conftest import PEOPLE, people
from tests.actors.nodes import NUMBERS
from tests.actors.shared_logs import SharedNodes
from tidewal.actors.client import Client

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])


@pytest.fixture
async def nodes(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[SharedNodes]:
    nodes = SharedNodes(tmp_path, rng)
    yield nodes
    await nodes.stop()


class Committer:
    """Commits one transaction after another, each with a row in both collections. `committed` are their keys."""

    def __init__(self, client: Client, first: int) -> None:
        self._client, self._next = client, first
        self.committed: list[int] = []
        self.stopped = False

    async def run(self) -> None:
        while not self.stopped:
            key, self._next = self._next, self._next + 1
            t = self._client.transaction(deadline_s=120)
            await t.insert("people", people(key))
            await t.insert("numbers", [{"id": key, "value": key}])
            await t.commit()
            self.committed.append(key)
            await asyncio.sleep(0.02)


async def test_transactions_over_several_owners_are_there_once_and_whole(nodes: SharedNodes) -> None:
    for name in "abc":
        await nodes.start(name)
    async with nodes.client() as one, nodes.client() as other:
        await one.create_collection(PEOPLE, shards=3)
        await one.create_collection(NUMBERS, shards=3)
        committers = [Committer(one, 0), Committer(other, 1_000_000)]
        tasks = [asyncio.create_task(each.run()) for each in committers]
        await asyncio.sleep(1)
        before = [len(each.committed) for each in committers]
        await nodes.migrate()
        await asyncio.sleep(3)
        for each in committers:
            each.stopped = True
        await asyncio.gather(*tasks)
        assert all(len(each.committed) > was + 10 for each, was in zip(committers, before, strict=True))
        expected = sorted(key for each in committers for key in each.committed)
        for name in ("people", "numbers"):
            found = await one.query(name, consistency="strong")
            assert sorted(found.table["id"].to_pylist()) == expected, name
