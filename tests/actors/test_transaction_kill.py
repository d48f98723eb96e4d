"""Kill -9 of a node under transactions: each is there as a whole, in both collections and the topic, or not at all."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.actors.test_kill import killed_run
from tidewal.actors.client import Client

CHILD = Path(__file__).with_name("transaction_child.py")
ROUNDS = 3

INPUT, MADE, GROUP = "inputs", "made", "makers"  # as the child has them


async def until(client: Client, topic: str, group: str, last: str) -> list[str]:
    """What a group has left of a topic of one partition, up to a message that is sent now."""
    await client.send(topic, last)
    found: list[str] = []
    async with asyncio.timeout(60), await client.subscribe(topic, group) as member:
        while last not in found:
            pack = await anext(member)
            found += [bytes(each.body).decode() for each in pack.messages]
            await member.acknowledge(pack)
    return [each for each in found if each.isdigit()]


pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_factories=["rocksmq"])]


@pytest.mark.long  # a few nodes in processes of their own
async def test_a_killed_node_has_each_transaction_whole_or_not_at_all(home, seed: int) -> None:
    source = random.Random(seed)
    committed: set[int] = set()
    tried: dict[int, int] = {}
    skipped: list[str] = []
    for round in range(ROUNDS):
        choices = source.randrange(2**31), source.randrange(1, 150)
        batches, acknowledged = await asyncio.to_thread(
            killed_run, home.directory, 1 + round * 1_000_000, *choices, child=CHILD
        )
        tried |= batches
        committed |= acknowledged
        async with home.node() as node, node.client() as client:
            queries = [client.query(name, consistency="strong") for name in ("things", "others")]
            things, others = (Counter(each.table["value"].to_pylist()) for each in await asyncio.gather(*queries))
            assert things == others
            assert all(things[first] in (0, rows) for first, rows in tried.items()), "half of a transaction was there"
            assert committed <= set(things), "a committed transaction was lost"
            messages: Counter[int] = Counter()
            async with asyncio.timeout(60), await client.subscribe("events", f"readers-{round}") as member:
                while messages.total() < things.total():
                    messages.update(int(bytes(each.body)) for each in (await anext(member)).messages)
            assert messages == things
            skipped += await until(client, INPUT, GROUP, f"end {round}")
            inputs = await until(client, INPUT, f"inputs-{round}", f"all {round}")
            made = await until(client, MADE, f"made-{round}", f"made {round}")
            assert Counter(made) + Counter(skipped) == Counter(inputs), "an input was lost, or counted twice"
    assert made, "nothing was made"
