"""What clients do in the simulated queue, and what they must find: topics that grow, delays, transactions, groups."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime

from tests.actors.conftest import PEOPLE, people
from tests.actors.nodes import NUMBERS, Nodes
from tests.actors.test_topic_delay_nodes import DelayTraffic
from tests.actors.test_topic_growth import GrowthTraffic
from tidewal import SendResult, TopicMember, TopicPack
from tidewal.actors.client import Client
from tidewal.runtime.errors import DeadlineExceeded, TidewalError, TopicExists

ROWS = 10  # of a transaction, at most, in each collection
QUIET_S = 10.0  # a member that gets nothing for so long has all
PATIENCE_S = 600.0  # of each call
ALL = math.inf  # as the time up to which a log has what its clients wrote


class OrderedTraffic(GrowthTraffic):
    """Keys in a topic that grows. It may go on in a replica, where its group stands where it stood, or before."""

    deadline_s = PATIENCE_S

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(nodes, 4)
        self._handed: dict[bytes, int] = defaultdict(int)
        self._handed_before: dict[bytes, int] = {}  # to what was replaced by a replica
        self._returned: dict[bytes, int] = {}  # by key, in a replica: where the group stands at least

    async def prepare(self, client: Client) -> None:
        with suppress(TopicExists):  # it has grown since
            await super().prepare(client)

    async def handle(self, pack: TopicPack) -> None:
        await super().handle(pack)
        for message in pack.messages:
            self._handed[message.key] = int(message.body)

    def note(self, key: bytes, number: int) -> None:
        least = self._returned.pop(key, None)
        if least is not None:  # the first one behind a promotion
            assert least < number <= self._handed_before.get(key, 0) + 1, f"{key}: the group goes on with {number}"
            self.read[key] = list(range(1, number))
        super().note(key, number)

    def go_on_from(self, there: dict[bytes, list[int]], time: float) -> None:
        """Go on in a log that has what was written up to `time`, which is `there` by key; for `ALL` the group has not
        moved back."""
        for key in sorted({*self.times, *there}):
            numbers, times = there.get(key, []), self.times[key]
            assert numbers == list(range(1, len(numbers) + 1)), f"{key}: {numbers}"
            assert all(ts > time for ts in times[len(numbers) :]), f"{key}: more than {len(numbers)} are of the line"
            assert all(ts <= time for ts in times[: len(numbers)]), f"{key}: fewer than {len(numbers)} are of the line"
            self.sent[key] = len(numbers)
            self.read[key] = self.read[key][: len(numbers)]
            self._returned[key] = len(self.read[key]) if time == ALL else 0
        self.times = defaultdict(list)
        self._handed_before = dict(self._handed)
        self._clients.clear()

    def check_all(self, there: dict[bytes, list[int]]) -> None:
        self.check()
        assert there == {key: list(range(1, last + 1)) for key, last in self.sent.items() if last}


class LaterTraffic(DelayTraffic):
    """Delays in a topic of their own, and due at a moment, which does not depend on the clock of the node that is
    asked."""

    topic = "later"
    deadline_s = PATIENCE_S

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(nodes)
        self.times: dict[int, int] = {}  # of what is acknowledged
        self._went_on = False  # in a replica, for a moment
        self._gone: set[int] = set()  # of what is acknowledged, there
        self._before: set[int] = set()  # what the group was given before that

    async def prepare(self, client: Client) -> None:
        with suppress(TopicExists):
            await super().prepare(client)

    async def _send(self, client: Client, text: str, after_s: float) -> SendResult:
        moment = datetime.fromtimestamp(self.now_ms() / 1000 + after_s, UTC)
        sent = await client.send(self.topic, text, key=text, deliver_at=moment, deadline_s=self.deadline_s)
        self.times[int(text)] = sent.ts
        return sent

    def go_on_at(self, time: float) -> None:
        """Go on in a log that has what was written up to `time`; for `ALL` the group has not moved back. What is not
        known to be pending there is awaited no more: it may come."""
        self._went_on = True
        self._gone = {number for number, ts in self.times.items() if ts > time}
        self._before = set(self.got) if time == ALL else set()
        given = self.handed | set(self.got)
        known = {number for number, each in self.asked.items() if each.cancelled is False and number not in given}
        if time == ALL:
            known |= {number for number, each in self.asked.items() if each.cancelled}
        self.asked = {number: self.asked[number] for number in known - self._gone}
        self.got = Counter()
        self.places, self.channels = {}, {}

    def check_all(self, there: list[int]) -> None:
        (self.check_asked if self._went_on else self.check)()
        assert self._gone.isdisjoint(there), "nothing is there from above the line"
        assert self._before.isdisjoint(self.got), "what was acknowledged does not come again"
        counts = Counter(there)
        assert set(counts.values()) == {1}, "the log has each message once"
        assert set(counts) >= {*self.got, *self.awaited}


class TransactionTraffic:
    """A client that writes the same keys into two collections, in a transaction for each number, and one that asks:
    both have all of a transaction or nothing, and what is committed."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.sizes: dict[int, int] = {}
        self.committed: dict[int, int] = {}  # their timestamps
        self.refused: set[int] = set()
        self._stopping = False

    async def write(self, client: Client) -> None:
        while not self._stopping:
            number = len(self.sizes) + 1
            size = self.sizes[number] = self.nodes.rng.randrange(1, ROWS)
            keys = [number * ROWS + at for at in range(size)]
            t = client.transaction(deadline_s=PATIENCE_S)
            await t.upsert("numbers", [{"id": key, "value": number} for key in keys])
            await t.insert("people", people(*keys))
            if self.nodes.rng.random() < 0.1:
                t.rollback()
                self.refused.add(number)
            else:
                await t.commit()
                assert t.result is not None
                self.committed[number] = t.result.ts
            await asyncio.sleep(self.nodes.rng.uniform(0, 0.2))

    async def ask(self, client: Client) -> None:
        while not self._stopping:
            committed = set(self.committed)
            with suppress(TidewalError):  # its node was killed
                self.check(*await _rows(client), committed)
                if self.nodes.rng.random() < 0.1:
                    await client.flush(self.nodes.rng.choice(("numbers", "people")))
            await asyncio.sleep(self.nodes.rng.uniform(0, 0.5))

    def check(self, numbers: Counter[int], persons: Counter[int], committed: set[int]) -> None:
        assert numbers == persons, "both collections have the same transactions"
        for number, size in self.sizes.items():
            assert numbers[number] in (0, size), f"half of transaction {number}"
        assert committed <= numbers.keys(), "what is committed is there"
        assert self.refused.isdisjoint(numbers)

    def go_on_at(self, time: float) -> None:
        """Go on in a log that has what was written up to `time`."""
        self.refused |= {number for number, ts in self.committed.items() if ts > time}
        self.committed = {number: ts for number, ts in self.committed.items() if ts <= time}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.nodes.client("w") as writer, self.nodes.client("q") as asking:
            await writer.create_collection(NUMBERS, shards=2)
            await writer.create_collection(PEOPLE, shards=2)
            async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
                tasks.create_task(self.write(writer))
                tasks.create_task(self.ask(asking))
                yield
                self._stopping = True
            self.check(*await _rows(asking), set(self.committed))


async def _rows(client: Client) -> tuple[Counter[int], Counter[int]]:
    """By the number of their transaction how many rows each collection has, at one timestamp."""
    numbers = await client.query("numbers", consistency="strong", deadline_s=60)
    persons = await client.query("people", columns=["id"], at=numbers.tsafe, deadline_s=60)
    keys = persons.table["id"].to_pylist()
    return Counter(numbers.table["value"].to_pylist()), Counter(key // ROWS for key in keys)


class QueueTraffic:
    """All of it side by side, on the log that the nodes are told to begin with."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.ordered, self.later, self.transactions = (
            OrderedTraffic(nodes),
            LaterTraffic(nodes),
            TransactionTraffic(nodes),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Clients work while the block runs; behind it members have got what was sent. Where the block fails they stop
        at once, and what they had begun may be there or not."""
        async with AsyncExitStack() as stack:
            for each in (self.ordered, self.later, self.transactions):
                await stack.enter_async_context(each.running())
            altering = asyncio.ensure_future(self._grow(await stack.enter_async_context(self.nodes.client())))
            try:
                yield
            finally:
                altering.cancel()
                await asyncio.gather(altering, return_exceptions=True)

    async def _grow(self, client: Client) -> None:
        rng = self.nodes.rng
        while True:
            await asyncio.sleep(rng.uniform(0.5, 3))
            with suppress(DeadlineExceeded):  # an owner is away
                topic = rng.choice((self.ordered.topic, self.later.topic))
                await client.alter_topic(topic, rng.randint(1, 8))

    async def check(self) -> None:
        """What clients and members know, and what a group finds that reads all that the log has."""
        self.ordered.check_all(await self._in_topic("audit"))
        self.later.check_all([int(body) for _, body in await self._read(self.later.topic, "audit")])
        assert len(self.transactions.committed) > 5

    async def go_on_at(self, time: float) -> None:
        """Go on with a log that has what clients wrote up to `time`."""
        self.ordered.go_on_from(await self._in_topic("look"), time)
        self.later.go_on_at(time)
        self.transactions.go_on_at(time)

    async def _in_topic(self, group: str) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = defaultdict(list)
        for key, body in await self._read(self.ordered.topic, group):
            found[key].append(int(body))
        return dict(found)

    async def _read(self, topic: str, group: str) -> list[tuple[bytes, bytes]]:
        """All that the topic has, by key and body, to a new group."""
        async with self.nodes.client(group) as client, await client.subscribe(topic, group) as member:
            return [pair async for pair in _until_quiet(member)]


async def _until_quiet(member: TopicMember) -> AsyncIterator[tuple[bytes, bytes]]:
    with suppress(TimeoutError):
        while True:
            pack = await asyncio.wait_for(anext(member), QUIET_S)
            await member.acknowledge(pack)
            for message in pack.messages:
                yield message.key, bytes(message.body)
