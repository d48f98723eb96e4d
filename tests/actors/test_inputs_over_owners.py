"""A group's position as a part of a transaction over several owners: each input counts once, whoever is killed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.actors.conftest import error_of
from tests.actors.nodes import NUMBERS, TAKEN_OVER_S, Nodes
from tests.actors.test_transaction_inputs import DecidingWal
from tidewal.actors.client import Client
from tidewal.actors.proxy import Proxy, position_fences
from tidewal.actors.topics.member import TopicMember
from tidewal.actors.topics.messages import TopicPack
from tidewal.actors.transactions.transaction import Transaction
from tidewal.runtime.cluster import decided_positions
from tidewal.runtime.errors import ChannelNotFound, Fenced, InvalidRequest, Overloaded, TidewalError, Unavailable
from tidewal.runtime.groups.group_consumer import GroupConsumer
from tidewal.runtime.groups.local_coordinator_client import LocalCoordinatorClient
from tidewal.runtime.groups.record_member import RecordMember
from tidewal.runtime.log.wal import From
from tidewal.runtime.testing.simulation.wal import SimulatedWal

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]

IN, OUT, GROUP = "in", "out", "transformers"


class BrokerWal(SimulatedWal):
    """A log of several nodes that stores no positions with appends."""

    capabilities = replace(SimulatedWal.capabilities, atomic_acks=False, atomic_batches=False)


@pytest.fixture
async def nodes(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    nodes = Nodes(tmp_path, rng, BrokerWal)
    yield nodes
    await nodes.stop()


@contextlib.asynccontextmanager
async def deciding(nodes: Nodes, name: str) -> AsyncIterator[Client]:
    """A client of such a log."""
    async with Client(DecidingWal(nodes.log), prefix="by-dev", name=name) as client:
        yield client


async def prepared(nodes: Nodes, client: Client, inputs: int) -> None:
    await nodes.start("a")
    await client.create_topic(IN, 1)
    await client.create_topic(OUT, 1)
    for number in range(inputs):
        await client.send(IN, f"{number}")


async def commit(client: Client, member: TopicMember, pack: TopicPack) -> None:
    """Send on what is in a pack, in the transaction that acknowledges it."""
    async with client.transaction() as t:
        await t.send(OUT, [bytes(message.body) for message in pack.messages])
        await t.acknowledge(member, pack)


def numbers(pack: TopicPack) -> list[int]:
    return [int(bytes(message.body)) for message in pack.messages]


def deny(_: Proxy) -> None:
    raise Overloaded("not now")


def forget_to_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let members die behind the decision, before their group's coordinator knows."""

    async def nothing(*_) -> None:
        pass

    monkeypatch.setattr(GroupConsumer, "acknowledge_decided", nothing)


async def test_the_next_member_goes_on_behind_what_is_decided_and_not_stored(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deciding(nodes, "one") as client, deciding(nodes, "two") as other:
        await prepared(nodes, client, 1)
        forget_to_store(monkeypatch)
        first = await client.subscribe(IN, GROUP)
        await commit(client, first, await anext(first))
        await client.send(IN, "1")
        await commit(client, first, await anext(first))
        await first.aclose()
        [info] = await other._wal.groups()
        [before] = info.positions.values()
        await client.send(IN, "2")
        async with await other.subscribe(IN, GROUP) as second:
            assert numbers(await anext(second)) == [2]
            [info] = await other._wal.groups()
            assert [before] < list(info.positions.values()), "it is stored by now"
        assert await results(client, 2) == Counter([0, 1])


async def test_a_member_that_asks_late_for_a_position_stops_no_other_for_long(nodes: Nodes) -> None:
    """It has lost the channel, asks a node for the position all the same, and is refused by its coordinator: the one
    that has it is refused once, gets the input again, and goes on."""
    async with deciding(nodes, "one") as client, deciding(nodes, "two") as other:
        await prepared(nodes, client, 1)
        first = await client.subscribe(IN, GROUP)
        late = await anext(first)
        nodes.log.groups.coordinator.leave(GROUP, first.id)
        for task in first._member._tasks:
            task.cancel()
        async with await other.subscribe(IN, GROUP) as second:
            await commit(other, second, await anext(second))
            await client.send(IN, "1")
            pack = await anext(second)
            with pytest.raises(Fenced):
                await commit(client, first, late)
            with pytest.raises(Fenced):
                await commit(other, second, pack)
            again = await anext(second)
            assert numbers(again) == [1]
            await commit(other, second, again)
        assert await results(client, 2) == Counter([0, 1])


async def test_an_acknowledgement_under_way_takes_no_mark_away(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made before the first transaction, and comes to the coordinator behind what that has stored there."""
    async with deciding(nodes, "one") as client, deciding(nodes, "two") as other:
        await prepared(nodes, client, 1)
        forget_to_store(monkeypatch)
        first = await client.subscribe(IN, GROUP)
        pack = await anext(first)
        await client.send(IN, "1")
        coordinator = first._member._coordinator
        store, released = coordinator.commit, asyncio.Event()

        async def late(group, member, acks, outputs):
            if any(ack.upto is not None for ack in acks):
                await released.wait()
            return await store(group, member, acks, outputs)

        monkeypatch.setattr(coordinator, "commit", late)
        acknowledging = asyncio.create_task(first.acknowledge(pack))
        committing = asyncio.create_task(commit(client, first, await anext(first)))
        await asyncio.sleep(1)
        released.set()
        await asyncio.gather(acknowledging, committing)
        await first.aclose()
        await client.send(IN, "2")
        async with await other.subscribe(IN, GROUP) as second:
            assert numbers(await anext(second)) == [2]


async def test_what_a_group_goes_back_to_is_transformed_again(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was decided before counts behind a seek, whether it was stored or not."""
    async with deciding(nodes, "one") as client:
        await prepared(nodes, client, 1)
        forget_to_store(monkeypatch)
        async with await client.subscribe(IN, GROUP) as member:
            pack = await anext(member)
            await commit(client, member, pack)
            await member.seek(pack.channel, From.EARLIEST)
            with monkeypatch.context() as denying:
                denying.setattr(Proxy, "_check_not_denied", deny)
                with pytest.raises(Overloaded):
                    await commit(client, member, await anext(member))
        async with await client.subscribe(IN, GROUP) as member:
            again = await anext(member)
            assert numbers(again) == [0]
            await commit(client, member, again)
        async with await client.subscribe(IN, GROUP) as member:
            await client.send(IN, "1")
            assert numbers(await anext(member)) == [1]
        assert await results(client, 1) == Counter([0, 0])


@pytest.mark.parametrize("reset_to", [None, From.EARLIEST])
async def test_what_was_done_and_removed_is_no_loss(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, reset_to: From | None
) -> None:
    """Retention removes a part of what was decided and not stored: nothing of the rest comes again."""
    async with deciding(nodes, "one") as client, deciding(nodes, "two") as other:
        await prepared(nodes, client, 1)
        forget_to_store(monkeypatch)
        first = await client.subscribe(IN, GROUP)
        pack = await anext(first)
        await commit(client, first, pack)
        await client.send(IN, "1")
        await commit(client, first, await anext(first))
        await first.aclose()
        await client.send(IN, "2")
        await client._wal.truncate(pack.channel, pack.entries[-1].id)
        async with await other.subscribe(IN, GROUP, reset_to=reset_to) as second:
            assert numbers(await anext(second)) == [2]


async def test_a_member_without_a_node_does_not_read_what_transactions_move(nodes: Nodes) -> None:
    async with deciding(nodes, "one") as client:
        await prepared(nodes, client, 1)
        async with await client.subscribe(IN, GROUP) as member:
            pack = await anext(member)
            await commit(client, member, pack)
        async with contextlib.aclosing(RecordMember(client._wal, await client._wal.join(GROUP, [pack.channel]))) as raw:
            await client.send(IN, "1")
            with pytest.raises(InvalidRequest, match=r"Client\.subscribe"):
                await anext(raw)


async def test_a_node_fences_positions_of_topics_and_no_more_than_the_limit(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decided_positions, "POSITIONS_MAX", 1)
    monkeypatch.setattr(position_fences, "POSITIONS_MAX", 1)
    async with deciding(nodes, "one") as client:
        await prepared(nodes, client, 1)
        assert isinstance(await error_of(client._topics._fence_position(GROUP, "other")), ChannelNotFound)
        async with await client.subscribe(IN, GROUP) as member, await client.subscribe(IN, "another") as further:
            await commit(client, member, await anext(member))
            pack = await anext(further)
            error = await error_of(commit(client, further, pack))
            assert isinstance(error, Overloaded)
            assert error.limit == "decided_positions"
            await member.aclose()
            await client._wal.drop_group(GROUP)
            await commit(client, further, pack)
        await client.drop_topic(IN)
        await client.create_topic(IN, 1)
        await client.send(IN, "1")
        async with await client.subscribe(IN, GROUP) as member:
            await commit(client, member, await anext(member))
        positions = nodes.running["a"].node.node.cluster.state.transactions.positions
        assert (len(positions), positions.groups) == (1, {GROUP})


async def test_a_partition_waits_for_what_is_decided_of_the_one_before_it(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic grows behind a transaction of which the position is not stored: the end of the old partition is passed by
    the member that goes on there."""
    async with deciding(nodes, "one") as client, deciding(nodes, "two") as other:
        await prepared(nodes, client, 1)
        with monkeypatch.context() as dying:
            forget_to_store(dying)
            first = await client.subscribe(IN, GROUP)
            await commit(client, first, await anext(first))
            await first.aclose()
        await client.alter_topic(IN, 2)
        await client.send(IN, ["1", "2"])
        async with await other.subscribe(IN, GROUP) as second:
            found: list[int] = []
            while len(found) < 2:
                pack = await anext(second)
                found += numbers(pack)
                await commit(other, second, pack)
        assert sorted(found) == [1, 2]
        assert await results(client, 3) == Counter([0, 1, 2])


class Transformers:
    """Members of one group that make of each message a row and a message, in the transaction that acknowledges it. Any
    time a member loses its channels, stops for a while in the midst of a commit, forgets to store what is decided, or
    commits what it has lost: `zombies` are what it does aside then."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes, self.rng = nodes, nodes.rng
        self.outcomes = Counter[str]()
        self.stopping = False
        self.members: list[TopicMember] = []
        self.zombies: list[asyncio.Task[None]] = []

    async def work(self, client: Client) -> None:
        member = await client.subscribe(IN, GROUP, deadline_s=60)
        self.members.append(member)
        while not self.stopping:
            try:
                async with asyncio.timeout(1):
                    pack = await anext(member)
            except TimeoutError:
                continue
            except TidewalError as error:
                if not error.retryable:
                    raise
                continue
            await self._transform(client, member, pack)
        await member.aclose()

    async def _transform(self, client: Client, member: TopicMember, pack: TopicPack) -> None:
        t = client.transaction(deadline_s=self.rng.choice([0.05, 0.3, 5, 30]))
        try:
            numbers = [int(bytes(message.body)) for message in pack.messages]
            if self.rng.random() < 0.5:
                await t.insert("numbers", [{"id": number, "value": 1} for number in numbers])
            await t.send(OUT, [f"{number}" for number in numbers])
            await t.acknowledge(member, pack)
            if self.rng.random() < 0.2:  # stopped here, while another member may get the channel
                self.zombies.append(asyncio.create_task(self._commit(t, self.rng.uniform(0, 5))))
                self._end_session(member)
                return
            await t.commit()
            self.outcomes["committed"] += 1
        except TidewalError as error:
            self.outcomes[type(error).__name__] += 1
            if "of unknown outcome" in repr(t):
                self.zombies.append(asyncio.create_task(self._commit(t, self.rng.uniform(0, 5))))
            else:
                member.redeliver(pack)

    async def _commit(self, t: Transaction, after_s: float) -> None:
        await asyncio.sleep(after_s)
        for _ in range(3):
            try:
                await t.commit()
                self.outcomes["committed late"] += 1
                return
            except Fenced:
                self.outcomes["fenced late"] += 1
                return
            except TidewalError:
                await asyncio.sleep(self.rng.uniform(0, 1))

    def _end_session(self, member: TopicMember) -> None:
        self.nodes.log.groups.coordinator.leave(GROUP, member.id)

    async def trouble(self) -> None:
        while not self.stopping:
            await asyncio.sleep(self.rng.uniform(0, 2))
            if self.members:
                self._end_session(self.rng.choice(self.members))


def store_seldom(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    store = GroupConsumer.acknowledge_decided

    async def seldom(self, acks) -> None:
        if rng.random() < 0.5:
            await store(self, acks)

    monkeypatch.setattr(GroupConsumer, "acknowledge_decided", seldom)


def fail_to_store(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the members store much is lost, or its answer, as where the group's coordinator dies, and all of its
    members have to join again."""
    store = LocalCoordinatorClient.commit

    async def failing(self, group, member, acks, outputs) -> list[bytes]:
        if group == GROUP and rng.random() < 0.15:
            raise Unavailable("the coordinator is gone", outcome_unknown=rng.random() < 0.5)
        ids = await store(self, group, member, acks, outputs)
        if group == GROUP and rng.random() < 0.15:
            for each in list(self._coordinator._groups[GROUP].members):
                self._coordinator.leave(GROUP, each)
            raise Unavailable("the coordinator is gone", outcome_unknown=True)
        return ids

    monkeypatch.setattr(LocalCoordinatorClient, "commit", failing)


async def send(client: Client, nodes: Nodes, inputs: int) -> None:
    for number in range(inputs):
        await client.send(IN, f"{number}", key=f"{number}", deadline_s=120)
        await asyncio.sleep(nodes.rng.uniform(0, 0.1))


async def results(client: Client, inputs: int) -> Counter[int]:
    """What was sent on, once it is all there and nothing comes any more."""
    found: Counter[int] = Counter()
    async with await client.subscribe(OUT, "readers", deadline_s=60) as member:
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(300 if len(found) < inputs else 20):
                    pack = await anext(member)
                found.update(int(bytes(each.body)) for each in pack.messages)
                await member.acknowledge(pack)
    return found


@pytest.mark.long  # a dozen lives of whole nodes
@pytest.mark.parametrize("trouble", ["none", "members die behind decisions", "the coordinator fails"])
async def test_each_input_counts_once_over_kills_of_nodes_and_lost_members(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Schedules 3, 6 and 7, at random."""
    if trouble == "members die behind decisions":
        store_seldom(nodes.rng, monkeypatch)
    elif trouble == "the coordinator fails":
        fail_to_store(nodes.rng, monkeypatch)
    for name in "abc":
        await nodes.start(name)
    inputs, work = 150, Transformers(nodes)
    async with contextlib.AsyncExitStack() as clients:
        workers = [await clients.enter_async_context(deciding(nodes, f"worker-{n}")) for n in range(3)]
        client = await clients.enter_async_context(nodes.client())
        await client.create_collection(NUMBERS, shards=3)
        await client.create_topic(IN, 3)
        await client.create_topic(OUT, 2)
        async with asyncio.TaskGroup() as tasks:
            for worker in workers:
                tasks.create_task(work.work(worker))
            tasks.create_task(work.trouble())
            sending = tasks.create_task(send(client, nodes, inputs))
            for _ in range(6):
                await asyncio.sleep(nodes.rng.uniform(0, 3))
                name = nodes.rng.choice(sorted(nodes.running))
                await nodes.kill(name)
                await asyncio.sleep(nodes.rng.uniform(0, 2))
                await nodes.start(name)
            await sending
            await asyncio.sleep(TAKEN_OVER_S)
            found = await results(client, inputs)
            work.stopping = True
        await asyncio.gather(*work.zombies)
        assert found == Counter(range(inputs)), work.outcomes
        assert await results(client, 0) == Counter(), "what came late"
        assert work.outcomes["committed"] > 20
        assert work.outcomes["fenced late"], "nobody has lost what it was about to commit"
        print(work.outcomes)
