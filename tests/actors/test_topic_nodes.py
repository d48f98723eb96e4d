"""Topics over several nodes: owners are killed, end, and hand partitions on, while clients send and members read."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

import tidewal
from tests.actors.nodes import TAKEN_OVER_S, Nodes
from tidewal.actors.client import Client
from tidewal.runtime.clock import HybridClock
from tidewal.runtime.cluster.version import THIS_VERSION
from tidewal.runtime.errors import Fenced, InvalidRequest, TidewalError, TopicNotFound, Unavailable
from tidewal.runtime.replicated.records import FeatureLevels
from tidewal.runtime.testing.simulation.wal import SimulatedWal

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]

PARTITIONS = 6
BEFORE_TOPICS = replace(THIS_VERSION, levels=FeatureLevels(1, 1))
KEYS = 9
WINDOW = 4  # sends of one client under way


@pytest.fixture
async def three(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    for name in "abc":
        await nodes.start(name)
    yield nodes
    await nodes.stop()


ENOUGH = 100  # messages


class TopicTraffic:
    """Clients that send numbered messages under keys of their own, several at once, and members that come and go. What
    is acknowledged is read, per key in order; what is delivered again was not acknowledged by its member."""

    topic = "t"
    deadline_s = 120.0

    def __init__(self, nodes: Nodes, partitions: int = PARTITIONS) -> None:
        self.nodes, self.partitions = nodes, partitions
        self.sent: dict[bytes, int] = defaultdict(int)  # by key: the last number that is acknowledged
        self.times: dict[bytes, list[int]] = defaultdict(list)  # by key: the timestamps of what is acknowledged
        self.read: dict[bytes, list[int]] = defaultdict(list)
        self.longest_s = 0.0
        self._stopping = False

    async def send(self, client: Client, number: int) -> None:
        keys = [f"{number}-{each}" for each in range(KEYS)]
        while not self._stopping:
            began_s = self.nodes.now_s()
            # the sends of one key are called one after another, and not awaited: their order is to hold
            key = self.nodes.rng.choice(keys)
            first = self.sent[key.encode()]
            messages = [f"{first + 1 + n}" for n in range(WINDOW)]
            sender = self.sender(client)
            calls = (sender.send(self.topic, each, key=key, deadline_s=self.deadline_s) for each in messages)
            self.times[key.encode()] += [result.ts for result in await asyncio.gather(*calls)]
            self.sent[key.encode()] = first + len(messages)
            self.longest_s = max(self.longest_s, self.nodes.now_s() - began_s)
            await asyncio.sleep(self.nodes.rng.uniform(0, 0.1))

    async def consume(self, client: Client) -> None:
        while not self._stopping or self.behind:
            try:
                member = await client.subscribe(self.topic, "g", session_timeout_s=5, deadline_s=self.deadline_s)
            except Unavailable:  # the log has not answered the leader
                await asyncio.sleep(0.1)
                continue
            leave_s = self.nodes.now_s() + self.nodes.rng.uniform(1, 4)
            with suppress(TimeoutError, Fenced):
                async with member:
                    while self.nodes.now_s() < leave_s:
                        async with asyncio.timeout(0.5):
                            pack = await anext(member)
                        await self.handle(pack)
                        await member.acknowledge(pack)
                        for each in pack.messages:
                            self.note(each.key, int(each.body))

    def sender(self, client: Client) -> Client:
        """The client that sends the next messages of a task that has `client`."""
        return client

    def note(self, key: bytes, number: int) -> None:
        """A member has acknowledged a message."""
        self.read[key].append(number)

    async def handle(self, pack: tidewal.TopicPack) -> None:
        """What a member does before it acknowledges a pack."""

    @property
    def behind(self) -> bool:
        return any(not self.read[key] or self.read[key][-1] < last for key, last in list(self.sent.items()))

    async def prepare(self, client: Client) -> None:
        await client.create_topic(self.topic, self.partitions)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(self.nodes.client(f"c{n}")) for n in range(4)]
            await self.prepare(clients[0])
            async with asyncio.timeout(600), asyncio.TaskGroup() as tasks:
                for number, client in enumerate(clients[:2]):
                    tasks.create_task(self.send(client, number))
                for client in clients[2:]:
                    tasks.create_task(self.consume(client))
                yield
                while sum(self.sent.values()) < ENOUGH:  # noqa: ASYNC110 -- in virtual time
                    await asyncio.sleep(0.1)
                self._stopping = True

    def check(self) -> None:
        assert {key: list(range(1, last + 1)) for key, last in self.sent.items() if last} == dict(self.read)


async def test_partitions_are_divided_and_what_is_sent_is_read_in_order(three: Nodes) -> None:
    traffic = TopicTraffic(three)
    async with traffic.running():
        await asyncio.sleep(10)
        owners = {name: owner for name, owner in three.owners().items() if "-topic_" in name}
        assert len(owners) == PARTITIONS
        assert set(owners.values()) == set("abc")
    traffic.check()


async def test_owners_are_killed_ended_and_come_back(three: Nodes) -> None:
    traffic = TopicTraffic(three)
    async with traffic.running():
        for name, away in (("a", three.kill), ("b", three.end), ("c", three.kill)):
            await asyncio.sleep(three.rng.uniform(1, 3))
            await away(name)
            await asyncio.sleep(three.rng.uniform(0, 5))
            await three.start(name)
        await asyncio.sleep(6)
    traffic.check()
    assert traffic.longest_s < 2 * TAKEN_OVER_S + 2


async def test_requests_are_answered_while_owners_and_members_die(three: Nodes) -> None:
    served: dict[str, set[bytes]] = defaultdict(set)
    asking = True

    async def handle(message: tidewal.TopicMessage) -> bytes:
        assert message.request is not None
        served[message.request.id].add(bytes(message.body))
        return b"reply to " + bytes(message.body)

    async def serve(client: Client) -> None:
        clock = HybridClock(three.loop.clock)
        while asking:
            async with await client.subscribe("t", "g", session_timeout_s=5, deadline_s=120) as member:
                await tidewal.serve(member, handle, timeout_s=three.rng.uniform(1, 4), clock=clock)

    async def ask(client: Client, name: str) -> int:
        count = 0
        while asking:
            body = f"{name} {count}".encode()
            assert (await client.ask("t", body, key=body, deadline_s=120)).body == b"reply to " + body
            count += 1
            await asyncio.sleep(three.rng.uniform(0, 0.2))
        return count

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(three.client(f"c{n}")) for n in range(4)]
        await clients[0].create_topic("t", PARTITIONS)
        async with asyncio.timeout(600), asyncio.TaskGroup() as tasks:
            counts = [tasks.create_task(ask(client, f"{n}")) for n, client in enumerate(clients[:2])]
            for client in clients[2:]:
                tasks.create_task(serve(client))
            for name, away in (("a", three.kill), ("b", three.end), ("c", three.kill)):
                await asyncio.sleep(three.rng.uniform(1, 3))
                await away(name)
                await asyncio.sleep(three.rng.uniform(0, 5))
                await three.start(name)
            await asyncio.sleep(6)
            asking = False
    assert min(count.result() for count in counts) > 10
    assert all(len(bodies) == 1 for bodies in served.values()), "an id is of one request"


async def test_a_partition_that_moves_loses_and_doubles_nothing(three: Nodes) -> None:
    traffic = TopicTraffic(three)
    async with traffic.running(), three.client() as client:
        await asyncio.sleep(1)
        for _ in range(6):
            channel = three.rng.choice([name for name in three.owners() if "-topic_" in name])
            target = three.rng.choice(sorted(set("abc") - {three.owners()[channel]}))
            with suppress(TidewalError):  # it may be about to move for balance
                await client._rpc.call("mixcoord", "move", {"channel": channel, "node": target})
            await asyncio.sleep(0.5)
    traffic.check()
    assert traffic.longest_s < 1


async def test_a_topic_is_dropped_while_it_is_written_and_an_owner_is_dead(three: Nodes) -> None:
    async with three.client() as client, three.client() as other:
        await client.create_topic("t", PARTITIONS)
        await client.create_topic("kept", 1)
        member = await other.subscribe("t", "g")
        sends = [asyncio.ensure_future(client.send("t", "x", key=f"{n}")) for n in range(50)]
        await three.kill(next(name for name in "abc" if name != three.leader()))
        await other.drop_topic("t", deadline_s=60)
        for result in await asyncio.gather(*sends, return_exceptions=True):
            assert isinstance(result, tidewal.SendResult | TopicNotFound) or getattr(result, "retryable", False), result
        with pytest.raises(TopicNotFound):
            await asyncio.wait_for(_until_the_end(member), 60)
        assert not [name for name in three.owners() if name.startswith("by-dev-topic_1_")]
        assert not [name for name in three.log.channels if name.startswith("by-dev-topic_1_")]
        await other.create_topic("t", 2)
        assert (await client.send("t", "again")).messages == 1
        assert (await client.send("kept", "still")).messages == 1


async def _until_the_end(member: tidewal.TopicMember) -> None:
    async for _ in member:
        pass


async def test_the_leader_dies_before_and_behind_each_record_of_a_topic(three: Nodes) -> None:
    """Whatever of a creation or a drop is there, the next leader finishes it, and a repeated call succeeds."""
    async with three.client() as client:
        for round in range(4):
            name = f"t{round}"
            creating = asyncio.ensure_future(client.create_topic(name, 2, deadline_s=60))
            await asyncio.sleep(three.rng.uniform(0, 0.02))
            leader = three.leader()
            await three.kill(leader)
            await creating
            await three.start(leader)
            dropping = asyncio.ensure_future(client.drop_topic(name, deadline_s=60))
            await asyncio.sleep(three.rng.uniform(0, 0.02))
            leader = three.leader()
            await three.kill(leader)
            with suppress(TopicNotFound):  # the first request was served before the leader died
                await dropping
            await three.start(leader)
            async with asyncio.timeout(60):
                while await client.list_topics() or any("-topic_" in each for each in three.log.channels):  # noqa: ASYNC110
                    await asyncio.sleep(0.5)


async def test_topics_wait_for_a_feature_level_that_all_nodes_know(home, tmp_path: Path, rng: random.Random) -> None:
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    nodes.versions["old"] = BEFORE_TOPICS
    try:
        await nodes.start("old")
        await nodes.start("new")
        async with nodes.client() as client:
            began_s = nodes.now_s()
            with pytest.raises(InvalidRequest, match=r"no method|feature level 2, and the cluster has level 1"):
                await client.create_topic("t", 1)
            assert nodes.now_s() - began_s < 1, "there is nothing to wait for"
            await nodes.end("old")
            await client.create_topic("t", 1)  # as soon as the new leader has led for a lease
            assert (await client.send("t", "x")).messages == 1
    finally:
        await nodes.stop()
