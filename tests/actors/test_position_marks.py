"""Marks of positions that transactions move: what members do beside a transaction neither takes one away nor waits."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.actors.test_inputs_over_owners import (
    GROUP,
    IN,
    OUT,
    commit,
    deciding,
    forget_to_store,
    nodes,
    numbers,
    prepared,
    results,
)
from tidewal.actors.topics.messages import TopicPack
from tidewal.runtime.errors import Fenced
from tidewal.runtime.groups.coordinator_client import GroupAcks

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


async def test_a_late_commit_of_the_same_member_stops_no_other(nodes) -> None:
    """The member has got the pack again meanwhile, and has committed that: no node is asked for the late one."""
    async with deciding(nodes, "one") as client:
        await prepared(nodes, client, 1)
        async with await client.subscribe(IN, GROUP) as member:
            late = await anext(member)
            member.redeliver(late)
            await commit(client, member, await anext(member))
            await client.send(IN, "1")
            pack = await anext(member)
            positions = nodes.running["a"].node.node.cluster.state.transactions.positions
            before = positions.tokens
            with pytest.raises(Fenced):
                await commit(client, member, late)
            assert positions.tokens == before, "a fence would refuse a commit that is under way"
            await commit(client, member, pack)
        assert await results(client, 2) == Counter([0, 1])


async def test_a_commit_that_hangs_holds_no_other_one_up(nodes) -> None:
    """Its pack was given back: neither the commit of what came again, nor those of other partitions wait for it."""
    async with deciding(nodes, "one") as client:
        await nodes.start("a")
        await client.create_topic(IN, 2)
        await client.create_topic(OUT, 1)
        for number in range(8):
            await client.send(IN, f"{number}", key=f"{number}")
        async with await client.subscribe(IN, GROUP) as member:
            packs: dict[int, TopicPack] = {}
            while len(packs) < 2:
                pack = await anext(member)
                packs.setdefault(pack.partition, pack)

            async def hang(_: GroupAcks) -> None:
                await asyncio.Event().wait()

            hanging = asyncio.create_task(member.commit_with([packs[0]], hang))
            await asyncio.sleep(1)
            member.redeliver(packs[0])
            while (pack := await anext(member)).partition != 0:
                pass
            async with asyncio.timeout(10):
                await asyncio.gather(commit(client, member, pack), commit(client, member, packs[1]))
            hanging.cancel()
            await asyncio.gather(hanging, return_exceptions=True)
