"""Topics get more partitions and fewer, over several nodes, while clients send and members read: per key the order and
the multiset are those of the sends."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.actors.nodes import Nodes
from tests.actors.test_topic_nodes import TopicTraffic
from tests.turns import cases_in_turn
from tidewal import From, Message, TopicMember, TopicPack
from tidewal.actors.client import Client
from tidewal.runtime.catalog.catalog_log import CatalogLog
from tidewal.runtime.errors import DeadlineExceeded, InvalidRequest, TopicNotFound, Unavailable
from tidewal.runtime.log.wal import GroupInfo
from tidewal.runtime.rows.hashing import shard_of_key
from tidewal.runtime.testing.simulation.wal import SimulatedWal

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]


@pytest.fixture
async def three(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    for name in "abc":
        await nodes.start(name)
    yield nodes
    await nodes.stop()


class GrowthTraffic(TopicTraffic):
    """The messages of a key are sent by several clients in turn, which know of an epoch at different times, and members
    take their time over some partitions."""

    def __init__(self, nodes: Nodes, partitions: int) -> None:
        super().__init__(nodes, partitions)
        self._clients: list[Client] = []

    def sender(self, client: Client) -> Client:
        if client not in self._clients:
            self._clients.append(client)
        return self.nodes.rng.choice(self._clients)

    async def handle(self, pack: TopicPack) -> None:
        slow_s = 3.0 if self.nodes.rng.random() < 0.1 else 0.0
        await asyncio.sleep(self.nodes.rng.uniform(0, slow_s))


async def test_a_topic_grows_and_shrinks_while_it_is_written_and_read(three: Nodes) -> None:
    traffic = TopicTraffic(three)
    async with traffic.running(), three.client() as client:
        for partitions in (12, 3, 9):
            await asyncio.sleep(three.rng.uniform(1, 3))
            topic = await client.alter_topic("t", partitions)
            assert len(topic.partitions) == partitions
            assert topic.settled
        await asyncio.sleep(3)
    traffic.check()
    assert traffic.longest_s < 2


async def test_schedule_10_of_growth(three: Nodes) -> None:
    """8 → 12 → 3 → 9 with an owner stopped, clients that know an old epoch, appends of unknown outcome that are
    rerouted, and epochs in which nothing is sent."""
    traffic = GrowthTraffic(three, 8)
    async with traffic.running(), three.client() as client:
        for partitions in (12, 3, 9):
            await asyncio.sleep(three.rng.uniform(0.5, 2))
            stopped = three.rng.choice(sorted({owner for name, owner in three.owners().items() if "-topic_" in name}))
            await three.kill(stopped)  # with appends under way: their outcome is unknown
            await _alter(client, partitions)
            await _alter(client, partitions + 1)  # idle, or nearly so
            await three.start(stopped)
            await _alter(client, partitions)
        await asyncio.sleep(3)
        assert (await client.describe_topic("t")).epoch == 10
    traffic.check()


async def _alter(client: Client, partitions: int) -> None:
    """Alter the topic `t`, as often as an owner is away."""
    while True:
        with suppress(DeadlineExceeded):
            topic = await client.alter_topic("t", partitions)
            assert len(topic.partitions) == partitions
            return


async def _grow_at_random(nodes: Nodes, traffic: TopicTraffic, steps: int) -> None:
    async with traffic.running(), nodes.client() as client:
        for _ in range(steps):
            await asyncio.sleep(nodes.rng.uniform(0, 2))
            away = nodes.rng.choice(["", "", *"abc"])
            if away:
                await nodes.rng.choice([nodes.kill, nodes.end])(away)
            await _alter(client, nodes.rng.randint(1, 12))
            if away:
                await nodes.start(away)
        await asyncio.sleep(2)


@pytest.mark.parametrize("_", [0, *cases_in_turn(range(1, 7), pytest.mark.long, of=3)])
async def test_any_growth_and_shrinking_keeps_each_key_in_order(three: Nodes, _: int) -> None:
    """Random keys, numbers of partitions, members that come and go, and owners and leaders that do."""
    traffic = GrowthTraffic(three, three.rng.randint(1, 6))
    await _grow_at_random(three, traffic, 6)
    traffic.check()


async def test_a_leader_dies_at_each_step_of_a_growth(three: Nodes) -> None:
    traffic = TopicTraffic(three)
    async with traffic.running(), three.client() as client:
        for round in range(4):
            altering = asyncio.ensure_future(_alter(client, 7 + round))
            await asyncio.sleep(three.rng.uniform(0, 0.05))
            leader = three.leader()
            await three.kill(leader)
            await altering
            await three.start(leader)
    traffic.check()


async def test_what_follows_an_empty_partition_waits_for_what_came_before_that(three: Nodes) -> None:
    async with three.client() as client:
        await client.create_topic("t", 1)
        await client.send("t", "first", key="k")
        await client.alter_topic("t", 2)
        await client.alter_topic("t", 3)
        await client.send("t", "second", key="k")
        async with await client.subscribe("t", "g") as member:
            first = await asyncio.wait_for(anext(member), 60)
            assert [bytes(each.body) for each in first.messages] == [b"first"]
            following = asyncio.ensure_future(anext(member))
            assert not (await asyncio.wait([following], timeout=20))[0], "the first is not acknowledged yet"
            await member.acknowledge(first)
            second = await asyncio.wait_for(following, 60)
            assert [bytes(each.body) for each in second.messages] == [b"second"]


async def test_a_group_that_begins_at_the_end_misses_nothing_of_a_growth_while_it_is_away(three: Nodes) -> None:
    async with three.client() as client:
        await client.create_topic("t", 2)
        await client.send("t", "passed over", key="k")
        for start, sent in ((From.LATEST, "a"), (From.LATEST, "b")):
            async with await client.subscribe("t", "g", start=start) as member:
                if sent == "b":
                    pack = await asyncio.wait_for(anext(member), 60)
                    assert [bytes(each.body) for each in pack.messages] == [b"while it was away"]
                    await member.acknowledge(pack)
                await client.send("t", sent, key="k")
                pack = await asyncio.wait_for(anext(member), 60)
                assert [bytes(each.body) for each in pack.messages] == [sent.encode()]
                await member.acknowledge(pack)
            if sent == "a":
                await client.alter_topic("t", 4)
                await client.send("t", "while it was away", key="k")


async def _bodies(member: TopicMember, quiet_s: float = 10.0) -> list[str]:
    """What a member gets, and acknowledges, until nothing has come for so long."""
    got: list[str] = []
    with suppress(TimeoutError):
        while True:
            pack = await asyncio.wait_for(anext(member), quiet_s)
            got += [bytes(each.body).decode() for each in pack.messages]
            await member.acknowledge(pack)
    return got


async def _from_the_end(client: Client, topics: Sequence[str] = ("t",)) -> list[str]:
    async with await client.subscribe(topics, "g", start=From.LATEST) as member:
        return await _bodies(member)


@pytest.mark.parametrize("grown", ["before", "meanwhile"])
async def test_what_happens_while_a_member_joins_is_neither_missed_nor_delivered_again(
    three: Nodes, monkeypatch: pytest.MonkeyPatch, grown: str
) -> None:
    """The topic grows, or another member reads its new partitions, between the look at the group's positions and the
    join."""
    async with three.client() as client, three.client() as other:
        await client.create_topic("t", 1)
        await _from_the_end(client)
        if grown == "before":
            await other.alter_topic("t", 2)
            await other.send("t", "new", key="k")
        groups, calls, read = client._wal.groups, itertools.count(), list[str]()

        async def looked() -> list[GroupInfo]:
            found = await groups()
            if next(calls) == 0 and grown == "before":
                read.extend(await _from_the_end(other))
            elif not read and grown == "meanwhile":
                read.append("new")
                await other.alter_topic("t", 2)
                await other.send("t", "new", key="k")
            return found

        monkeypatch.setattr(client._wal, "groups", looked)
        got = await _from_the_end(client)
        assert read == ["new"]
        assert got == ([] if grown == "before" else ["new"])


async def test_a_group_begins_a_topic_that_is_new_to_it_at_its_end_and_goes_on_in_another(three: Nodes) -> None:
    async with three.client() as client:
        for name in "tu":
            await client.create_topic(name, 3)
            await client.send(name, f"{name} before", key="k")
        assert await _from_the_end(client) == []
        await client.alter_topic("t", 2)
        for n in range(4):
            await client.send("t", f"{n}", key=f"{n}")
        assert sorted(await _from_the_end(client, ["t", "u"])) == ["0", "1", "2", "3"]
        await client.send("u", "u after", key="k")
        assert await _from_the_end(client, ["t", "u"]) == ["u after"]


async def test_a_group_that_is_away_while_its_epoch_vanishes_misses_nothing_that_is_kept(three: Nodes) -> None:
    async with three.client() as client:
        await client.create_topic("t", 1, retention_s=20)
        await _from_the_end(client)
        await client.alter_topic("t", 2)
        await asyncio.sleep(60)
        assert (await client.describe_topic("t")).first_epoch == 2
        await client.send("t", "kept", key="k")
        assert await _from_the_end(client) == ["kept"]


async def test_partitions_that_wait_hold_up_no_others_while_no_node_answers(
    three: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with three.client() as client, three.client() as reader:
        for name in "tu":
            await client.create_topic(name, 1)
        await client.send("t", "old", key="k")
        async with await reader.subscribe(["t", "u"], "g") as member:
            await anext(member)  # not acknowledged: what follows is held
            await client.alter_topic("t", 2)
            monkeypatch.setattr(member, "_describe", lambda _: asyncio.get_running_loop().create_future())
            for n in range(2):
                await client.send("t", "new", key="k")
                await client.send("u", f"{n}", key="k")
                pack = await asyncio.wait_for(anext(member), 5)
                assert [bytes(each.body) for each in pack.messages] == [b"%d" % n]


async def test_a_client_keeps_nothing_of_names_to_which_it_has_sent(three: Nodes) -> None:
    async with three.client() as client:
        await client.create_topic("t", 1)
        await client.send("t", "a")
        for n in range(3):
            with pytest.raises(TopicNotFound):
                await client.send(f"missing-{n}", "a")
        gc.collect()
        assert len(client._topics._described._turns) <= 1, "the last error may refer to its call"


async def test_a_call_that_comes_again_alters_once_and_not_back(three: Nodes) -> None:
    async with three.client() as client:
        topic = await client.create_topic("t", 2)
        altered = await asyncio.gather(*(client.alter_topic("t", 4) for _ in range(3)))
        assert {each.epoch for each in altered} == {2}
        await client.alter_topic("t", 3)
        params = {"id": topic.id, "epoch": topic.epoch, "partitions": 4, "hashed": True}
        with pytest.raises(InvalidRequest, match="altered meanwhile"):
            await client._rpc.call("mixcoord", "alter_topic", params)
        for partitions in (0, 65):
            with pytest.raises(InvalidRequest, match="maxTopicPartitionNum"):
                await client.alter_topic("t", partitions)
        assert (await client.describe_topic("t")).epoch == 3


async def _away(nodes: Nodes, client: Client) -> tuple[str, int]:
    """Send to each of the six partitions of topic `t`; returns a node that owns some and does not lead, and the number
    of one of these."""
    topic = await client.create_topic("t", 6)
    await client.send("t", [f"{n}" for n in range(6)], partitioner=lambda message, _: int(message.body))
    owners = [nodes.owners()[channel] for channel in topic.pchannels]
    return next((name, number) for number, name in enumerate(owners) if name != nodes.leader())


async def _read(client: Client, count: int) -> list[str]:
    """All that topic `t` has, which are so many messages, and no more."""
    got: list[str] = []
    async with await client.subscribe("t", "g") as member:
        async with asyncio.timeout(60):
            while len(got) < count:
                pack = await anext(member)
                got += [bytes(each.body).decode() for each in pack.messages]
                await member.acknowledge(pack)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(member), 10)
    return got


async def test_a_partition_that_has_begun_ends_though_its_owner_learns_of_the_beginning_late(
    home, monkeypatch: pytest.MonkeyPatch
) -> None:
    propose, late = CatalogLog.propose_own, set[str]()

    async def propose_own(self: CatalogLog, event: dict[str, Any]) -> None:
        await propose(self, event)
        channels = set(event["channels"]) if event["kind"] == "partition_begun" else set[str]()
        if not channels <= late:
            late.update(channels)
            await asyncio.sleep(4)  # the topic is altered again in this time
            raise Unavailable("the log does not answer", outcome_unknown=True)

    async with home.node(), home.client() as client:
        await client.create_topic("t", 1)
        monkeypatch.setattr(CatalogLog, "propose_own", propose_own)
        await client.alter_topic("t", 2)
        assert (await client.alter_topic("t", 3)).settled
        assert late


async def test_a_batch_that_is_partly_written_goes_on_in_the_new_partitions(three: Nodes) -> None:
    """The owners of some partitions take their parts, that of others is dead: what is written stays, what is not goes
    to the new partitions, each message once."""
    async with three.client() as client, three.client() as other:
        away, _ = await _away(three, client)
        await three.kill(away)
        messages = [Message(f"{n}", key=f"{n}") for n in range(6, 60)]
        sending = asyncio.ensure_future(client.send("t", messages, deadline_s=120))
        await asyncio.sleep(0.5)
        await _alter(other, 1)
        result = await sending
        assert result.messages == 54
        assert result.partitions > {0}, "some are in the old partitions, some in the new one"
        assert sorted(await _read(other, 60)) == sorted(f"{n}" for n in range(60))


@pytest.mark.parametrize("cause", ["the partitioner's number", "the partitioner's error", "the deadline"])
async def test_the_error_of_a_batch_that_is_partly_written_says_that_some_may_be_there(
    three: Nodes, cause: str
) -> None:
    """The old epoch has a part of the batch, and the rest cannot be sent to the new one."""

    def place(message: Message, count: int) -> int:
        number = int(message.body) % 6
        if count == 6 or cause == "the partitioner's number":
            return number
        if cause == "the partitioner's error":
            raise ValueError(number)
        three.stall(new)  # what is left is not written in time
        return 0

    async with three.client() as client, three.client() as other:
        away, _ = await _away(three, client)
        await three.kill(away)
        topic = await client.describe_topic("t")
        new = [client._names.topic_pchannel(topic.id, 0, 2)]
        sends = client.send("t", [f"{n}" for n in range(6, 12)], partitioner=place, deadline_s=60)
        sending = asyncio.ensure_future(sends)
        await asyncio.sleep(0.5)
        await _alter(other, 1)
        with pytest.raises(DeadlineExceeded if cause == "the deadline" else InvalidRequest) as caught:
            await sending
        assert caught.value.fields["outcome_unknown"]


async def test_what_a_client_sends_after_it_knows_the_new_epoch_waits_for_what_it_sent_before(three: Nodes) -> None:
    """The first send is with an owner that is dead. Before its outcome is known the client describes the topic, and
    sends again under the key."""
    async with three.client() as client, three.client() as other:
        away, partition = await _away(three, client)
        key = next(f"{n}" for n in range(1_000) if shard_of_key(f"{n}", 6) == partition)
        await three.kill(away)
        sends = [asyncio.ensure_future(client.send("t", "first", key=key, deadline_s=120))]
        await asyncio.sleep(0.1)
        altering = asyncio.ensure_future(_alter(other, 4))
        while (await client.describe_topic("t")).epoch == 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        sends += [
            asyncio.ensure_future(client.send("t", each, key=key, deadline_s=120)) for each in ("second", "third")
        ]
        await altering
        await asyncio.gather(*sends)
        assert [each for each in await _read(other, 9) if not each.isdigit()] == ["first", "second", "third"]


async def test_a_client_that_knows_an_old_epoch_sends_behind_what_is_in_the_new_one(three: Nodes) -> None:
    async with three.client() as client, three.client() as stale:
        await client.create_topic("t", 1)
        for each, text in ((stale, "0"), (client, "1")):
            await each.send("t", text, key="k")
        await client.alter_topic("t", 2)
        await client.send("t", "2", key="k")
        await stale.send("t", "3", key="k")
        assert await _read(client, 4) == ["0", "1", "2", "3"]


async def test_an_epoch_vanishes_when_its_retention_has_passed(three: Nodes) -> None:
    async with three.client() as client:
        old = await client.create_topic("t", 2, retention_s=20)
        await client.send("t", "old", key="k")
        async with await client.subscribe("t", "g") as member:
            await member.acknowledge(await anext(member))
            await client.alter_topic("t", 3)
            await client.send("t", "new", key="k")
            await member.acknowledge(await anext(member))
            assert set(old.pchannels) <= set(three.log.channels)
            await asyncio.sleep(60)
            assert set(old.pchannels).isdisjoint(three.log.channels)
            assert set(old.pchannels).isdisjoint(three.owners())
            topic = await client.describe_topic("t")
            assert (topic.first_epoch, topic.epoch, len(topic.epochs)) == (2, 2, 1)
            for known in (member._places, member._channels, member._gate._passed, member._known_fences):
                assert set(old.pchannels).isdisjoint(known)
            assert not member._holding
            await client.alter_topic("t", 2)
            await client.send("t", "newer", key="k")
            pack = await asyncio.wait_for(anext(member), 60)
            assert [bytes(each.body) for each in pack.messages] == [b"newer"]
