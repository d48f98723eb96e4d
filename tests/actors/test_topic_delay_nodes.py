"""Delayed messages over several nodes: the one that releases them is killed, cut off, or they move, while clients send
and cancel."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.actors.nodes import TAKEN_OVER_S, Nodes
from tests.turns import cases_in_turn
from tidewal import SendResult
from tidewal.actors.client import Client
from tidewal.runtime.clock import physical_ms
from tidewal.runtime.delays.delayed import DelayedId
from tidewal.runtime.errors import Fenced, InvalidRequest, TidewalError
from tidewal.runtime.log.names import delay_channel_of, pchannel_of
from tidewal.runtime.log.record import RecordType, decode
from tidewal.runtime.ownership.batch import recorded_source
from tidewal.runtime.testing.memory import MemoryWal
from tidewal.runtime.testing.simulation.wal import SimulatedWal

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]

PARTITIONS = 3
SEEDS = [0, *cases_in_turn((1, 2), pytest.mark.long)]


@pytest.fixture
async def three(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    for name in "abc":
        await nodes.start(name)
    yield nodes
    await nodes.stop()


@dataclass
class Asked:
    """A message that was sent, and what a cancellation of it was answered: None for no answer."""

    id: str
    due_ms: int
    cancelled: bool | None = False


class DelayTraffic:
    """A client that sends numbered messages that are due within some seconds, one that cancels some of them about when
    they are due, and a member of a group. What was cancelled in time never comes, all else comes once, never early, and
    in a partition in the order of due times."""

    topic = "t"
    longest_s = 3.0
    keys = 10**9
    deadline_s = 120.0

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.tried = 0  # the last number
        self.asked: dict[int, Asked] = {}
        self.handed: set[int] = set()  # to the member, which is about to acknowledge them
        self.got: Counter[int] = Counter()
        self.places: dict[tuple[str, bytes], list[bytes]] = {}  # of a delay channel and a key, as they came
        self.channels: dict[tuple[str, str], list[bytes]] = {}  # of a delay channel, by pchannel
        self.late_s: dict[int, float] = {}
        self._stopping = False

    def now_ms(self) -> int:
        return self.nodes.loop.clock.wall_ms()

    async def send(self, client: Client) -> None:
        rng = self.nodes.rng
        while not self._stopping:
            self.tried = number = self.tried + 1
            after_s = rng.choice([0.0, rng.uniform(0, 0.05), rng.uniform(0, self.longest_s)])
            asked_ms = self.now_ms()
            sent = await self._send(client, f"{number}", after_s)
            self.asked[number] = Asked(sent.ids[0], asked_ms + int(1000 * after_s))
            await asyncio.sleep(rng.uniform(0, 0.05))

    async def _send(self, client: Client, text: str, after_s: float) -> SendResult:
        key = f"{int(text) % self.keys}"
        return await client.send(self.topic, text, key=key, deliver_after_s=after_s, deadline_s=self.deadline_s)

    async def cancel(self, client: Client) -> None:
        """Cancel messages when they are due, or some ms from that."""
        rng, seen = self.nodes.rng, self.tried
        while not self._stopping:
            await asyncio.sleep(0.01)
            for number in range(seen + 1, max(self.asked, default=0) + 1):
                if number in self.asked and rng.random() < 0.4:
                    asyncio.ensure_future(self._cancel(client, self.asked[number]))  # noqa: RUF006
            seen = max(self.asked, default=0)

    async def _cancel(self, client: Client, asked: Asked) -> None:
        asked.cancelled = None
        at_ms = asked.due_ms + self.nodes.rng.choice([-1, 0, 1, -5, 5, -20, -500])
        await asyncio.sleep(max(0, at_ms - self.now_ms()) / 1000)
        with suppress(TidewalError):  # of unknown outcome
            asked.cancelled = await client.cancel(self.topic, asked.id, deadline_s=self.deadline_s)

    async def consume(self, client: Client) -> None:
        while True:
            with suppress(Fenced):
                async with await client.subscribe(self.topic, "g", session_timeout_s=5) as member:
                    async for pack in member:
                        self.handed.update(int(message.body) for message in pack.messages)
                        await member.acknowledge(pack)
                        for record, message in zip(pack.records, pack.messages, strict=True):
                            number = int(message.body)
                            self.got[number] += 1
                            source = recorded_source(record)
                            assert source is not None
                            self.places.setdefault((source[0], message.key), []).append(source[1])
                            self.channels.setdefault((source[0], pack.channel), []).append(source[1])
                            assert physical_ms(message.ts) >= physical_ms(message.due_ts)
                            assert pchannel_of(record.vchannel) == pack.channel
                            self.late_s[number] = (physical_ms(message.ts) - physical_ms(message.due_ts)) / 1000

    async def prepare(self, client: Client) -> None:
        await client.create_topic(self.topic, PARTITIONS)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with (
            self.nodes.client("s") as sender,
            self.nodes.client("c") as canceller,
            self.nodes.client("r") as reader,
        ):
            await self.prepare(sender)
            consuming = asyncio.ensure_future(self.consume(reader))
            try:
                async with asyncio.timeout(600), asyncio.TaskGroup() as tasks:
                    tasks.create_task(self.send(sender))
                    tasks.create_task(self.cancel(canceller))
                    yield
                    self._stopping = True
                async with asyncio.timeout(120):
                    while self.awaited - self.got.keys() or any(each.cancelled is None for each in self.asked.values()):
                        if consuming.done():
                            consuming.result()
                        await asyncio.sleep(0.1)
                await asyncio.sleep(5)
            finally:
                consuming.cancel()
                await asyncio.gather(consuming, return_exceptions=True)

    @property
    def awaited(self) -> set[int]:
        return {number for number, each in self.asked.items() if each.cancelled is False}

    def check(self) -> None:
        assert len(self.asked) > 20
        assert any(each.cancelled for each in self.asked.values()), "none came in time"
        self.check_asked()

    def check_asked(self) -> None:
        cancelled = {number for number, each in self.asked.items() if each.cancelled}
        assert cancelled.isdisjoint(self.got), "what was cancelled in time does not come"
        assert set(self.got) >= self.awaited, "all else comes"
        assert set(self.got.values()) == {1}, "once"
        for places in (*self.places.values(), *self.channels.values()):
            assert places == sorted(set(places)), "in the order of due times"
        for number in self.got:
            if number in self.asked:
                id = DelayedId.from_bytes(bytes.fromhex(self.asked[number].id.rpartition(":")[2]))
                assert physical_ms(id.due) >= self.asked[number].due_ms


async def test_a_partition_and_its_delays_are_at_one_node_which_releases_in_time(three: Nodes) -> None:
    traffic = DelayTraffic(three)
    async with traffic.running():
        await asyncio.sleep(10)
        owners = {name: owner for name, owner in three.owners().items() if "-topic_" in name}
        delays = {name: owner for name, owner in three.owners().items() if "-delays_" in name}
        assert len(owners) == PARTITIONS
        assert delays == {delay_channel_of(name): owner for name, owner in owners.items()}
        assert len(set(owners.values())) == PARTITIONS, "each node has one"
    traffic.check()
    assert max(traffic.late_s.values()) < 0.15


@pytest.mark.parametrize("seed", SEEDS)
async def test_schedule_11_who_releases_is_killed_at_any_step_or_awake_beside_the_next(three: Nodes, seed: int) -> None:
    """Of the nodes that release one is killed, one ends, one is cut off and goes on as if it still owned its channels;
    appends to delay channels stall over the due times of their messages."""
    three.rng.seed(seed)
    traffic = DelayTraffic(three)
    async with traffic.running():
        for away in ("kill", "end", "cut", "stall"):
            await asyncio.sleep(three.rng.uniform(1, 3))
            name = three.rng.choice(sorted(three.running))
            if away == "stall":
                channels = [each for each in three.owners() if "-delays_" in each]
                three.stall(channels)
                await asyncio.sleep(three.rng.uniform(0.5, 2))
                three.go_on(channels)
            elif away == "cut":
                each = three.cut_off(name)
                await asyncio.sleep(TAKEN_OVER_S + 2)
                three.reconnect(each)
                await asyncio.wait_for(each.ended.wait(), 60)
                three.running.pop(name)
                await three.start(name)
            else:
                await (three.kill(name) if away == "kill" else three.end(name))
                await asyncio.sleep(three.rng.uniform(0, 5))
                await three.start(name)
        await asyncio.sleep(6)
    traffic.check()
    assert max(traffic.late_s.values()) < 2 * TAKEN_OVER_S + 4


class GrowingDelays(DelayTraffic):
    """Delays over several alterations."""

    longest_s = 12.0
    keys = 20


@pytest.mark.parametrize("seed", SEEDS)
async def test_what_is_pending_follows_a_topic_that_grows_and_shrinks_under_faults(three: Nodes, seed: int) -> None:
    """While partitions move, and nodes are killed, end, are cut off or stall."""
    three.rng.seed(seed)
    traffic = GrowingDelays(three)
    async with traffic.running(), three.client() as client:
        altering = asyncio.ensure_future(_alter(three, client, traffic.topic))
        await asyncio.sleep(1)
        for away in three.rng.sample(["kill", "end", "cut", "stall", "move", "move"], 6):
            await asyncio.sleep(three.rng.uniform(0.2, 2))
            await _go_wrong(three, client, away)
        await asyncio.sleep(3)
        altering.cancel()
        await asyncio.gather(altering, return_exceptions=True)
        found = await client.describe_topic(traffic.topic)
        assert found.epoch > 4
        await asyncio.sleep(traffic.longest_s)
    traffic.check()
    async with three.client() as client, asyncio.timeout(120):
        while True:
            topic = await client.describe_topic(traffic.topic)
            over = {each for name, each in topic.delay_channels.items() if topic.places[name][0] < topic.epoch}
            if topic.settled and over == topic.drained:
                break
            await asyncio.sleep(0.5)


async def _alter(nodes: Nodes, client: Client, topic: str) -> None:
    while True:
        await asyncio.sleep(nodes.rng.uniform(0.2, 3))
        with suppress(TidewalError):  # an owner is away
            await client.alter_topic(topic, nodes.rng.randint(1, 6))


async def _go_wrong(nodes: Nodes, client: Client, away: str) -> None:
    name = nodes.rng.choice(sorted(nodes.running))
    channels = [each for each in nodes.owners() if "-delays_" in each or "-topic_" in each]
    match away:
        case "stall":
            stalled = nodes.rng.sample(channels, len(channels) // 2)
            nodes.stall(stalled)
            await asyncio.sleep(nodes.rng.uniform(0.5, 2))
            nodes.go_on(stalled)
        case "cut":
            each = nodes.cut_off(name)
            await asyncio.sleep(TAKEN_OVER_S + 2)
            nodes.reconnect(each)
            await asyncio.wait_for(each.ended.wait(), 60)
            nodes.running.pop(name)
            await nodes.start(name)
        case "move":
            channel = nodes.rng.choice([each for each in channels if "-topic_" in each])
            with suppress(TidewalError):
                await client._rpc.call("mixcoord", "move", {"channel": channel, "node": name})
        case _:
            await (nodes.kill(name) if away == "kill" else nodes.end(name))
            await asyncio.sleep(nodes.rng.uniform(0, 5))
            await nodes.start(name)


@pytest.mark.parametrize("seed", SEEDS)
async def test_schedule_12_the_answer_to_a_cancellation_is_what_happens_while_who_releases_moves(
    three: Nodes, seed: int
) -> None:
    three.rng.seed(seed)
    traffic = DelayTraffic(three)
    async with traffic.running(), three.client() as client:
        await asyncio.sleep(1)
        jamming = asyncio.ensure_future(_jam(three))
        for _ in range(6):
            channel = three.rng.choice([each for each in three.owners() if "-topic_" in each])
            target = three.rng.choice(sorted(set("abc") - {three.owners()[channel]}))
            with suppress(TidewalError):  # it may be about to move for balance
                await client._rpc.call("mixcoord", "move", {"channel": channel, "node": target})
            await asyncio.sleep(three.rng.uniform(0.2, 1))
        jamming.cancel()
        await asyncio.gather(jamming, return_exceptions=True)
    traffic.check()
    assert max(traffic.late_s.values()) < 5


async def test_the_first_delayed_message_waits_until_the_new_partitions_take_messages(three: Nodes) -> None:
    """An owner of the partitions before is dead: the topic cannot have delays before another has ended these."""
    async with three.client() as client, three.client() as other:
        topic = await client.create_topic("t", 6)
        await client.send("t", [f"{n}" for n in range(6)], partitioner=lambda message, _: int(message.body))
        owners = {three.owners()[channel] for channel in topic.pchannels}
        await three.kill(next(name for name in sorted(owners) if name != three.leader()))
        altering = asyncio.ensure_future(other.alter_topic("t", 4, deadline_s=120))
        while (await other.describe_topic("t")).epoch == 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not (await other.describe_topic("t")).settled
        sent = await client.send("t", [f"{n}" for n in range(6, 30)], deliver_after_s=0, deadline_s=120)
        assert (await altering).epoch == 2
        found = await client.describe_topic("t")
        assert {each.rpartition(":")[0] for each in sent.ids} <= set(found.delay_channels)
        assert await _bodies(client, 30) == sorted(f"{n}" for n in range(30))


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_topic_that_is_altered_at_its_first_delayed_messages_loses_and_doubles_nothing(
    three: Nodes, seed: int
) -> None:
    """One of the two is first; the other waits, or is refused, and then has done nothing."""
    three.rng.seed(seed)
    async with three.client() as client, three.client() as stale, three.client() as other:
        for round in range(4):
            name = f"t{round}"
            await client.create_topic(name, 2)
            await stale.send(name, "0", key="0")

            async def late(step: Awaitable[object]) -> None:
                await asyncio.sleep(three.rng.uniform(0, 0.03))
                with suppress(InvalidRequest):  # to alter it, once it has delays
                    await step

            await asyncio.gather(
                late(other.alter_topic(name, three.rng.randint(3, 5))),
                late(stale.send(name, "1", key="0", deliver_after_s=0.1)),
                late(client.send(name, ["2", "3"], deliver_after_s=0)),
                *(late(stale.send(name, f"{n}", key=f"{n}")) for n in range(4, 8)),
            )
            found = await client.describe_topic(name)
            assert found.delays
            assert found.settled
            assert await _bodies(client, 8, name) == [f"{n}" for n in range(8)]


async def _bodies(client: Client, count: int, topic: str = "t") -> list[str]:
    """All that the topic has, which are so many messages, and no more, sorted."""
    got: list[str] = []
    async with await client.subscribe(topic, "g") as member:
        async with asyncio.timeout(60):
            while len(got) < count:
                pack = await anext(member)
                got += [bytes(each.body).decode() for each in pack.messages]
                await member.acknowledge(pack)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(member), 5)
    return sorted(got)


async def _jam(nodes: Nodes) -> None:
    """Let delay channels stand still again and again: what is stamped before a due time lands behind it."""
    while True:
        channels = [each for each in nodes.owners() if "-delays_" in each]
        nodes.stall(channels)
        try:
            await asyncio.sleep(nodes.rng.uniform(0.02, 0.3))
        finally:
            nodes.go_on(channels)
        await asyncio.sleep(nodes.rng.uniform(0.05, 0.3))


async def test_schedule_13_clocks_apart_and_set_back_release_nothing_early_and_nothing_sticks(
    home, tmp_path: Path, rng: random.Random
) -> None:
    """The log's time runs ahead by the clock of an earlier owner, and the wall clock of the next one is set back: what
    is due waits for both."""
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    try:
        await nodes.start("ahead", ahead_ms=10_000)
        async with nodes.client() as client:
            topic = await client.create_topic("t", 1)
            await client.send("t", "of the clock ahead", deliver_after_s=1)
            await asyncio.sleep(3)
            behind = await nodes.start("behind")
            (partition,) = topic.pchannels
            await client._rpc.call("mixcoord", "move", {"channel": partition, "node": "behind"})
            while nodes.owners()[delay_channel_of(partition)] != "behind":  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            begun_s = nodes.now_s()
            async with await client.subscribe("t", "g") as member:
                (first,) = (await anext(member)).messages
                assert bytes(first.body) == b"of the clock ahead"
                door_ms = max(each.clock.wall_ms() for each in nodes.running.values()) - nodes.loop.clock.wall_ms()
                due_s = begun_s + 5
                moment = nodes.loop.clock.wall_ms() + 5_000
                sent = await client.send("t", "x", deliver_at=_moment(moment))
                assert physical_ms(DelayedId.from_bytes(bytes.fromhex(sent.ids[0].rpartition(":")[2])).due) > moment
                behind.clock.jump_wall(-3_000)
                (late,) = (await anext(member)).messages
                assert bytes(late.body) == b"x"
                assert door_ms >= 10_000
                assert due_s + 2.9 <= nodes.now_s() < due_s + 5, "by the wall clock of who releases it"
    finally:
        await nodes.stop()


async def test_what_another_node_releases_is_stamped_behind_its_due_time(
    home, tmp_path: Path, rng: random.Random
) -> None:
    """The clock of the new partitions' owner is behind that of who releases."""
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    try:
        await nodes.start("behind")
        await nodes.start("ahead", ahead_ms=2_000)
        async with nodes.client() as client:
            topic = await client.create_topic("t", 1)
            await _placed(nodes, client, topic.pchannels, "ahead")
            for number in range(5):
                await client.send("t", f"{number}", deliver_after_s=30 + number)
            topic = await client.alter_topic("t", 2)
            await _placed(nodes, client, map(pchannel_of, topic.partitions), "behind")
            async with await client.subscribe("t", "g") as member:
                for _ in range(5):
                    (message,) = (await anext(member)).messages
                    assert message.due_ts < message.ts
        assert nodes.owners()[delay_channel_of(topic.pchannels[0])] == "ahead"
    finally:
        await nodes.stop()


async def test_what_is_released_comes_once_where_retention_goes_on_beside_a_partition_that_stands_still(
    three: Nodes,
) -> None:
    async with three.client() as client:
        await client.create_topic("t", 1)
        for number in range(8):
            await client.send("t", f"{number}", key=f"{number}", deliver_after_s=15)
        first, stuck = map(pchannel_of, (await client.alter_topic("t", 2)).partitions)
        await asyncio.sleep(5)
        three.stall([stuck])
        await asyncio.sleep(30)
        wal = MemoryWal(three.log)
        before = await wal.latest_id(first)
        assert before is not None
        got = Counter(bytes(decode(each.payload).body) for each in three.log.channels[first].entries)
        await wal.truncate(first, before)  # with all that it knows of the delay channel
        for name in "abc":
            await three.kill(name)
        three.go_on([stuck])
        for name in "abc":
            await three.start(name, wait=False)
        await asyncio.sleep(30)
        for channel in (first, stuck):
            entries = [each for each in three.log.channels[channel].entries if channel != first or each.id > before]
            got.update(bytes(decode(each.payload).body) for each in entries)
    assert [got[b"%d" % number] for number in range(8)] == 8 * [1]


async def test_what_is_released_comes_once_where_its_owners_are_killed_and_retention_goes_on_between(
    three: Nodes,
) -> None:
    """The first is killed before it has noted what is done, the second knows that from the partition alone."""
    async with three.client() as client:
        (partition,) = (await client.create_topic("t", 1)).pchannels
        await client.send("t", "once", deliver_after_s=1)
        await asyncio.sleep(3)
        assert _in_partition(three, partition) == [b"once"]
        await three.kill(three.owners()[partition])
        await asyncio.sleep(40)
        wal = MemoryWal(three.log)
        latest = await wal.latest_id(partition)
        assert latest is not None
        await wal.truncate(partition, latest)
        await three.kill(three.owners()[partition])
        await asyncio.sleep(40)
        assert not _in_partition(three, partition)


async def test_a_partition_that_stands_still_holds_up_no_other(three: Nodes) -> None:
    """Its owner lives, and never answers."""
    async with three.client() as client:
        await client.create_topic("t", 1)
        for number in range(16):
            await client.send("t", f"{number}", key=f"{number % 8}", deliver_after_s=15 if number < 8 else 60)
        first, stuck = map(pchannel_of, (await client.alter_topic("t", 2)).partitions)
        await asyncio.sleep(5)
        three.stall([stuck])
        await asyncio.sleep(80)
        assert any(int(body) >= 8 for body in _in_partition(three, first)), "what is due later"
        three.go_on([stuck])
        await asyncio.sleep(30)
        bodies = [*_in_partition(three, first), *_in_partition(three, stuck)]
    assert sorted(map(int, bodies)) == list(range(16))
    for key in range(8):
        assert [int(body) for body in bodies if int(body) % 8 == key] == [key, key + 8]


def _in_partition(nodes: Nodes, channel: str) -> list[bytes]:
    """The messages of a partition, in its order."""
    records = [decode(each.payload) for each in nodes.log.channels[channel].entries]
    return [bytes(each.body) for each in records if each.type is RecordType.MESSAGE]


async def _placed(nodes: Nodes, client: Client, channels: Iterable[str], node: str) -> None:
    for channel in channels:
        if nodes.owners()[channel] != node:
            await client._rpc.call("mixcoord", "move", {"channel": channel, "node": node})
        while nodes.owners()[channel] != node:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def _moment(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)
