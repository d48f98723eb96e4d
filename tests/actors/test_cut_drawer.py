"""What is stored as cuts, and what that costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.actors.nodes import role_of
from tidewal.runtime.catalog.cuts import Cut
from tidewal.runtime.errors import DeadlineExceeded
from tidewal.runtime.log.record import decode

MEMORY_ONLY = pytest.mark.asyncio(loop_factories=["memory"])


def stored_cuts(home) -> list[Cut]:
    """All cuts in the log."""
    [entries] = [channel.entries for name, channel in home.log.channels.items() if name.endswith("-cuts")]
    return [Cut.from_record(decode(entry.payload)) for entry in entries]


@MEMORY_ONLY
@pytest.mark.parametrize("count", [1, 30])
async def test_cuts_cost_the_same_with_many_collections(home, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with home.node() as node, node.client() as client:
        for number in range(count):
            await client.create_collection(replace(home.PEOPLE, name=f"c{number}"), shards=2)
        await home.elapse(2)
        before, asked, sync = stored_cuts(home), Counter[str](), node.node.local_owner.owner.sync

        async def counted(channels, **options):
            asked["owner"] += 1
            return await sync(channels, **options)

        monkeypatch.setattr(node.node.local_owner.owner, "sync", counted)
        await client.insert("c0", home.people(1))
        await home.elapse(2)
        new = stored_cuts(home)[len(before) :]
        described = [await client.describe_collection(f"c{number}") for number in range(count)]
    assert 1 <= len(new) <= 2  # behind the rows, and behind the tick that follows them
    assert all(cut.of(collection) is not None for cut in new for collection in described)
    assert asked["owner"] <= 6  # four cuts are looked for meanwhile


@MEMORY_ONLY
async def test_a_channel_that_does_not_answer_keeps_no_other_from_its_cuts(home, monkeypatch) -> None:
    async with home.node() as node, node.client() as client:
        first = await client.create_collection(home.PEOPLE)
        second = await client.create_collection(home.POINTS)
        drawer = role_of(node, "mixcoord")._cuts
        owners, silent = drawer._owners, first.vchannels[0].rpartition("_")[0]

        async def sync_channels(channels, id=None, *, deadline_s):
            if silent in channels:
                raise DeadlineExceeded("nothing comes")
            return await owners.sync_channels(channels, id, deadline_s=deadline_s)

        monkeypatch.setattr(drawer, "_owners", SimpleNamespace(sync_channels=sync_channels, terms=owners.terms))
        await home.elapse(2)
        before = stored_cuts(home)
        await client.insert("points", [{"id": 1, "at": [0.0, 0, 0, 0]}])
        await home.elapse(2)
        new = stored_cuts(home)[len(before) :]
    assert new
    assert all(cut.of(second) is not None and cut.of(first) is None for cut in new)
