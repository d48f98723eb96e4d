"""The line of a replica while nodes run: what would keep it back, or draw it too far."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.actors.nodes import TAKEN_OVER_S, Nodes
from tests.actors.test_forced_promotion import DRAWN_S, MEMORY_ONLY
from tests.actors.test_node_migration import logs_of
from tests.actors.test_node_replication import replica_of, replicating
from tidewal.runtime.clock import compose
from tidewal.runtime.cluster.limits import LIMIT_MS
from tidewal.runtime.log.dead_letters import group_letter
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.log.replication_state import replication_state
from tidewal.runtime.log.wal import ChannelPolicy, Entry
from tidewal.runtime.replication.forced_promotion import line_of
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal
from tidewal.runtime.testing.simulation.wal import SimulatedWal

pytestmark = MEMORY_ONLY
HOUR = compose(3_600_000)


async def time_of(replica: Any) -> int:
    state = await replication_state(replica)
    return line_of(state).time if state.line else 0


async def assert_goes_on(home: Any, client: Any, replica: Any) -> None:
    written = (await client.insert("people", home.people(1))).ts
    await asyncio.sleep(4 * DRAWN_S)
    assert await time_of(replica) > written


async def test_the_channel_of_a_collection_that_is_gone_keeps_no_line_back(home: Any) -> None:
    """No node owns it any more behind a start, and none is to."""
    other = replica_of(home)
    async with home.people_client() as client:
        await client.create_collection(home.POINTS)
        await client.insert("points", [{"id": 1, "at": [0.0, 0.0, 0.0, 1.0]}])
        await client.drop_collection("points")
        await asyncio.sleep(30)
    async with logs_of(home, other) as (old, replica), home.client() as client, replicating(old, replica):
        await assert_goes_on(home, client, replica)


async def test_a_killed_owner_of_a_channel_that_nobody_is_to_own_keeps_no_line_back(
    home: Any, tmp_path: Path, rng: random.Random
) -> None:
    """The catalog says for ever that it has the channel: none gets it in its place."""
    nodes, replica = Nodes(tmp_path, rng, SimulatedWal), MemoryWal(MemoryLog())
    await nodes.start("a")
    async with nodes.client() as client:
        await client.create_collection(home.POINTS)
        await client.drop_collection("points")
        await client.create_collection(home.PEOPLE)
        killed = await nodes.kill("a")
        await nodes.start("b")
        await asyncio.sleep(TAKEN_OVER_S)
        async with replicating(MemoryWal(nodes.log), replica):
            await assert_goes_on(home, client, replica)
        assert killed.name in nodes.owners().values(), "the channel of what was dropped is its own still"
    await nodes.stop()


async def test_a_dead_letter_of_a_clock_that_is_ahead_keeps_no_line_back(home: Any) -> None:
    other, letters = replica_of(home), Names().group_dead_letters
    async with logs_of(home, other) as (old, replica), home.people_client() as client, replicating(old, replica):
        ts = (await client.insert("people", home.people(1))).ts
        await old.create_channel(letters, ChannelPolicy())
        letter = group_letter("topic", Entry(b"", ts, b""), "group", "handler", "", 1, ts + HOUR, 100)
        await old.append(letters, letter, ts + HOUR)
        await asyncio.sleep(DRAWN_S)
        await assert_goes_on(home, client, replica)


FOREIGN = {
    "no record": lambda ts: (b"garbage", ts + HOUR),
    "a tick ahead": lambda ts: (encode(Record(RecordType.TIME_TICK, ts=ts + HOUR, term=1, cseq=9**9)), ts + HOUR),
    "a record ahead": lambda ts: (encode(Record(RecordType.ROWS, ts=ts + HOUR, term=1, cseq=9**9)), ts),
    "another term": lambda ts: (encode(Record(RecordType.ROWS, ts=ts, term=99, cseq=1)), ts),
}


@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=FOREIGN.keys())
async def test_what_no_owner_can_have_written_keeps_no_line_back(home: Any, foreign: Any) -> None:
    """No reader counts it. What a replicator finds when it begins, it has to judge by the limits of owners."""
    other = replica_of(home)
    async with logs_of(home, other) as (old, replica), home.people_client() as client:
        async with replicating(old, replica):
            await asyncio.sleep(DRAWN_S)
            ts = (await client.insert("people", home.people(1))).ts
            for channel in [name for name in await old.channels() if "-dml_" in name]:
                await old.append(channel, *foreign(ts))
            await assert_goes_on(home, client, replica)
            assert await time_of(replica) < ts + HOUR
        async with replicating(old, replica):
            await asyncio.sleep(LIMIT_MS / 1000)
            await assert_goes_on(home, client, replica)


class SlowWal(MemoryWal):
    """A log that takes its time to say where a channel ends."""

    async def latest_id(self, channel: str) -> bytes | None:
        latest = await super().latest_id(channel)
        await asyncio.sleep(0.3)
        return latest


async def test_what_comes_while_a_line_is_drawn_lies_above_it(home: Any) -> None:
    """Where the drawer has to ask for the end of an idle channel, others go on and promise later times."""
    other = replica_of(home)
    async with home.client() as client:
        await client.create_topic("idle", 1)
        await client.send("idle", "0")
    async with logs_of(home, other) as (old, replica), home.people_client() as client:
        (idle,) = (name for name in await old.channels() if "topic" in name)
        await asyncio.sleep(DRAWN_S)
        async with replicating(old, replica):
            await old.append(idle, encode(Record(RecordType.MESSAGE, ts=1, term=1, cseq=1000)), timestamp=1)
            await asyncio.sleep(DRAWN_S)
        checked = 0
        async with replicating(SlowWal(home.log), replica):
            for number in range(100):
                await client.insert("people", home.people(number))
                await asyncio.sleep(0.1)
                line = line_of(await replication_state(replica))
                for name, end in line.ends_in_source.items():
                    if "-dml_" in name:
                        late = [each for each in home.log.channels[name].entries if end < each.id]
                        assert [each for each in late if each.timestamp <= line.time] == []
                        checked += len(late)
        assert checked
