"""What does not grow with the number of collections."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tidewal.actors.datanode import DataNode

MEMORY_ONLY = pytest.mark.asyncio(loop_factories=["memory"])
COLLECTIONS = 30


async def create(home, client, number: int) -> None:
    await client.create_collection(replace(home.PEOPLE, name=f"c{number}"))


@MEMORY_ONLY
async def test_one_more_collection_is_not_a_look_at_all_of_them(home, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at, serves = Counter[str](), DataNode.serves

    def counted(role: DataNode, collection) -> bool:
        looked_at[collection.name] += 1
        return serves(role, collection)

    async with home.client() as client:
        for number in range(COLLECTIONS):
            await create(home, client, number)
        await home.elapse(2)
        monkeypatch.setattr(DataNode, "serves", counted)
        await home.elapse(30)
        assert not looked_at
        await create(home, client, COLLECTIONS)
        await home.elapse(2)
        assert set(looked_at) == {f"c{COLLECTIONS}"}
