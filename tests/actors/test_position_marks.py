"""Marks of positions that transactions move: what members do beside a transaction neither takes one away nor waits."""

from __future__ import annotations

import pytest

from tests.actors.test_inputs_over_owners import (
    GROUP,
    IN,
    commit,
    deciding,
    forget_to_store,
    nodes,
    numbers,
    prepared,
)

__all__ = ["nodes"]  # a fixture

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]


async def test_what_is_stored_behind_a_decision_stays(nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the attempts at the next message, and the copy of it in the retry topic."""
    async with deciding(nodes, "one") as client, deciding(nodes, "two") as other:
        await prepared(nodes, client, 1)
        forget_to_store(monkeypatch)
        first = await client.subscribe(IN, GROUP)
        await commit(client, first, await anext(first))
        await client.send(IN, "1")
        await first.annotate(await anext(first), b"attempted")
        await first.aclose()
        async with await other.subscribe(IN, GROUP) as second:
            pack = await anext(second)
            assert numbers(pack) == [1]
            assert second.metadata(pack.channel) == b"attempted"
