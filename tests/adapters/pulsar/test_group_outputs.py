"""Outputs of commits, over a log and topics in memory: of a process that is stopped, of records that are not stored."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace

import pytest

from tests.runtime.test_group_log import TOPIC, Process, ids, join
from tidewal.adapters.pulsar.client import NUMBER_PROPERTY, OK
from tidewal.adapters.pulsar.groups import outputs as group_outputs
from tidewal.adapters.pulsar.groups import session as group_session
from tidewal.adapters.pulsar.groups.session import GroupSession
from tidewal.adapters.pulsar.ids import MessagePlace
from tidewal.runtime.errors import Closed, Unavailable
from tidewal.runtime.groups import group_log
from tidewal.runtime.groups.commands import Published, Release
from tidewal.runtime.groups.coordinator_client import Ack
from tidewal.runtime.groups.group_state import Decided
from tidewal.runtime.log.record import decode
from tidewal.runtime.log.wal import Append, ChannelPolicy
from tidewal.runtime.replicated import follower
from tidewal.runtime.replicated.records import decode_event
from tidewal.runtime.testing.memory import MemoryLog

RECORDS_PER_SNAPSHOT = 15
BOUND_S = 20


class Topics:
    """What the outputs go to. As Pulsar, it stores the numbers of a name upward and drops the others."""

    def __init__(self) -> None:
        self.stored: dict[str, list[tuple[str, int, bytes]]] = defaultdict(list)  # by channel: name, number, payload
        self.highest: dict[tuple[str, str], int] = {}
        self.taken: set[tuple[str, str]] = set()
        self.first_ledger = 1  # that retention has left

    def payloads(self, channel: str) -> list[bytes]:
        return [payload for _, _, payload in self.stored[channel]]


class TopicProducer:
    def __init__(self, topics: Topics, channel: str, name: str) -> None:
        if (channel, name) in topics.taken:
            raise Unavailable("the name is taken")
        topics.taken.add((channel, name))
        self._topics, self._channel, self._name = topics, channel, name

    def send_async(self, sent, answered) -> None:
        payload, _, number = sent
        topic, key = self._topics.stored[self._channel], (self._channel, self._name)
        if number <= self._topics.highest.get(key, 0):
            place = MessagePlace(-1, -1)  # how Pulsar answers to a duplicate
        else:
            self._topics.highest[key] = number
            topic.append((self._name, number, payload))
            place = MessagePlace(1, len(topic) - 1)
        answered(OK, Id(place))

    def flush_async(self, answered) -> None:
        answered(OK)

    def close_async(self, answered) -> None:
        self._topics.taken.discard((self._channel, self._name))
        answered(OK)


class Id:
    def __init__(self, place: MessagePlace) -> None:
        self.ledger_id, self.entry_id = (lambda: place.ledger), (lambda: place.entry)
        self.batch_index = lambda: place.batch_index


class TopicReader:
    def __init__(self, topic: list[tuple[str, int, bytes]], start: MessagePlace) -> None:
        self._topic, self._next = topic, max(start.entry, 0)

    def read_next(self, timeout_ms: int) -> object:
        at, self._next = self._next, self._next + 1
        name, number, _ = self._topic[at]
        return SimpleNamespace(
            message_id=lambda: Id(MessagePlace(1, at)),
            producer_name=lambda: name,
            properties=lambda: {NUMBER_PROPERTY: str(number)},
        )

    def close_async(self, answered) -> None:
        answered(OK)


class Member(Process):
    """A process with the topics, one member and what it follows the group with. It can be stopped."""

    timeout_ms = 10_000

    def __init__(self, memory: MemoryLog, topics: Topics, name: str) -> None:
        super().__init__(memory, name)
        self._topics = topics
        self._running = asyncio.Event()
        self._stopping = asyncio.Event()
        self._running.set()
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.refuses: type | None = None  # records of this type are not stored
        self.session: GroupSession | None = None

    async def begin(self) -> None:
        self.session = GroupSession(self, "g", None)
        await self.session.log.open()
        await join(self.session.log, self.process, self, 3000.0)

    def stop(self) -> None:
        """It reads nothing any more, as after SIGSTOP; what it appended before is in the log all the same."""
        self._running.clear()
        self._stopping.set()

    def resume(self) -> None:
        self._stopping.clear()
        self._running.set()

    async def read(self, channel, start):
        await self._running.wait()
        reader = self._wal.read(channel, start)
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            while True:
                reading = asyncio.ensure_future(anext(reader))
                await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if stopping.done():
                    raise Unavailable("the process was stopped")
                yield reading.result()
        finally:
            stopping.cancel()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await reader.aclose()

    def submit(self, entries, done) -> None:
        kinds = [decode_event(decode(entry.payload))["kind"] for entry in entries]
        if self.refuses and self.refuses.__name__ in kinds:
            done(Unavailable("it was not stored", outcome_unknown=True))
        else:
            self._wal.submit(entries, done)

    async def blocking(self, call):
        if call.func.__name__ == "_send":
            await self.may_send.wait()
        return call()

    def policy(self, channel) -> ChannelPolicy:
        return ChannelPolicy()

    def behind_all(self, channel) -> MessagePlace:
        return MessagePlace(1, len(self._topics.stored[channel]) - 1)

    last = behind_all

    def contents(self, channel) -> object:
        return SimpleNamespace(stored_from=MessagePlace(self._topics.first_ledger, 0))

    def publisher(self, channel, name, *, batches) -> TopicProducer:
        return TopicProducer(self._topics, channel, name)

    def open_reader(self, channel, start, queue_messages=None) -> TopicReader:
        return TopicReader(self._topics.stored[channel], start)

    # ---- what the tests do ------------------------------------------------------------------------------------------

    @property
    def undelivered(self) -> dict:
        return self.session.log.state.undelivered

    async def held(self) -> dict:
        return (await self.session.log.assignment(self.process, None, 0)).held

    async def give_up(self, channel: str) -> None:
        """Release a channel that is being revoked, and stay a member."""
        await self.session.log.ask(Release(self.process, channel, (await self.held())[channel].epoch))

    async def commit(self, payload: bytes, channel: str | None = None) -> None:
        held = await self.held()
        channel = channel or min(held)
        ack = Ack(channel, held[channel].epoch, payload.rjust(20, b"\x02"))
        await self.session.commit(self.process, [ack], [Append("out", payload)])


@pytest.fixture
async def two(monkeypatch):
    """Two processes, each with a member that holds channels. The first one stores the snapshots."""
    monkeypatch.setattr(group_outputs, "message", lambda *sent: sent)
    monkeypatch.setattr(group_outputs, "PAUSE_S", 0)
    monkeypatch.setattr(follower, "PAUSE_S", 0)
    monkeypatch.setattr(group_log, "RECORDS_PER_SNAPSHOT", RECORDS_PER_SNAPSHOT)
    monkeypatch.setattr(group_session, "group_topic", lambda group: TOPIC)
    memory, topics = MemoryLog(), Topics()
    members = [Member(memory, topics, name) for name in ("a", "b")]
    third = Member(memory, topics, "c")  # has no member yet
    await members[0].create_channel(TOPIC, ChannelPolicy())
    for member in members:
        await member.begin()
    first, second = members
    for channel in await revoking(first):
        await first.give_up(channel)
    await second.session.log.catch_up()
    yield SimpleNamespace(first=first, second=second, third=third, topics=topics)
    for member in (*members, third):
        member.resume()
        member.may_send.set()
        if member.session is not None:
            await member.session.close()
        await member.close()


async def revoking(member: Member) -> list[str]:
    return sorted((await member.session.log.assignment(member.process, None, 0)).revoking)


async def until(condition) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110 -- what it waits for happens on this loop
            await asyncio.sleep(0)


async def log_moves_on(two) -> None:
    """The first one stores snapshots until the log begins after all records that were in it."""
    end = await two.first.latest_id(TOPIC)
    while (await two.first.describe(TOPIC)).first_id <= end:
        two.first.session.log.beat()
        await two.first.session.log.catch_up()


async def test_a_process_stopped_longer_than_the_log_of_its_group_lasts_publishes_what_it_decided(two):
    """A later output of it may not come first: the earlier ones would be dropped as duplicates, and the others would
    wait for ever to publish them."""
    await two.second.commit(b"1")
    two.second.stop()
    deciding = [asyncio.create_task(two.second.commit(payload)) for payload in (b"2", b"3")]
    await until(lambda: len(two.first.undelivered) == 2)
    await log_moves_on(two)
    two.second.resume()
    for outcome in await asyncio.gather(*deciding, return_exceptions=True):
        assert isinstance(outcome, Unavailable)
        assert outcome.outcome_unknown
    await two.second.commit(b"4")
    assert two.topics.payloads("out") == [b"1", b"2", b"3", b"4"]
    await until(lambda: not two.first.undelivered)
    await until(lambda: not two.second.undelivered)


async def test_what_was_on_its_way_when_the_process_stopped_comes_first(two):
    await two.second.commit(b"1")
    await until(lambda: not two.second.undelivered)
    two.second.may_send.clear()
    deciding = [asyncio.create_task(two.second.commit(b"2"))]
    await until(lambda: two.second.undelivered)
    two.second.stop()
    deciding.append(asyncio.create_task(two.second.commit(b"3")))
    await until(lambda: len(two.first.undelivered) == 2)
    await log_moves_on(two)
    two.second.resume()
    await until(lambda: deciding[1].done())
    deciding.append(asyncio.create_task(two.second.commit(b"4")))
    await until(lambda: len(two.first.undelivered) == 3)
    two.second.may_send.set()
    await asyncio.gather(*deciding, return_exceptions=True)
    assert two.topics.payloads("out") == [b"1", b"2", b"3", b"4"]
    assert [type(each.exception()) for each in deciding] == [type(None), Unavailable, type(None)]
    await until(lambda: not two.first.undelivered)


async def test_what_is_published_and_not_noted_as_such_is_noted_later(two):
    two.second.refuses = Published
    await two.second.commit(b"1")
    await two.first.session.log.catch_up()
    assert two.first.undelivered
    two.second.refuses = None
    two.second.session._output_publisher.adopt()  # which a process does every second
    await until(lambda: not two.first.undelivered)
    assert two.topics.payloads("out") == [b"1"]


async def test_outputs_that_retention_has_removed_before_they_are_noted_hold_up_no_process(two):
    two.second.refuses = Published
    channel = min(await two.second.held())
    await two.second.commit(b"1", channel)
    await two.second.session.leave("b")
    await two.second.session.close()
    await two.first.session.log.catch_up()
    assert two.first.undelivered
    two.topics.stored["out"][0] = ("removed", 0, b"")  # what has its name and number is gone
    two.topics.first_ledger = 2
    await two.first.commit(b"2", channel)
    assert two.topics.payloads("out") == [b"", b"2"]
    await until(lambda: not two.first.undelivered)


async def test_a_commit_that_lies_in_the_log_when_its_process_closes_is_unknown(two):
    two.second.stop()
    committing = asyncio.create_task(two.second.commit(b"1"))
    await until(lambda: two.first.undelivered)
    await two.second.session.close()
    with pytest.raises(Closed) as caught:
        await committing
    assert caught.value.outcome_unknown
    assert two.first.undelivered  # it is decided, and counts
    with pytest.raises(Closed) as caught:
        await two.second.commit(b"2")
    assert not caught.value.fields.get("outcome_unknown")


async def test_a_commit_whose_outputs_are_left_to_others_as_its_log_closes_is_unknown(two, monkeypatch):
    async def closed(call):
        if call.func.__name__ in ("_send", "_publish_again"):
            raise Closed("the Pulsar log is closed")
        return call()

    monkeypatch.setattr(two.second, "blocking", closed)
    with pytest.raises(Closed) as caught:
        await two.second.commit(b"1")
    assert caught.value.outcome_unknown
    assert two.second.undelivered


async def hand_over(two) -> str:
    """The third one joins, and gets a channel of the first two, which stay."""
    await two.third.begin()
    for member in (two.first, two.second):
        await member.session.log.catch_up()
        for channel in await revoking(member):
            await member.give_up(channel)
            await two.third.session.log.catch_up()
            return channel
    raise AssertionError("nothing was revoked")


@pytest.mark.parametrize("leaves", [False, True])
async def test_what_comes_of_a_channel_keeps_its_order_when_the_channel_changes_hands(two, leaves):
    """The first ones have decided and cannot reach the outputs' topic yet, but stay members. The third one, which gets
    a channel of theirs, can, or leaves its outputs to them."""
    firsts = [(member, channel) for member in (two.first, two.second) for channel in sorted(await member.held())]
    for member in (two.first, two.second):
        member.may_send.clear()
    deciding = [asyncio.create_task(member.commit(b"1", channel)) for member, channel in firsts]
    await until(lambda: len(two.first.undelivered) == len(deciding))
    moved = await hand_over(two)
    two.third.may_send = asyncio.Event() if leaves else two.third.may_send
    later = asyncio.create_task(two.third.commit(b"2", moved))
    await until(lambda: len(two.first.undelivered) == len(two.second.undelivered) == len(deciding) + 1)
    if leaves:
        await two.third.session.leave("c")
        for member in (two.first, two.second):
            await member.session.log.catch_up()
            member.session._output_publisher.adopt()  # which a process does every second
    for _ in range(100):
        await asyncio.sleep(0)
    assert two.topics.payloads("out") == []
    for member in (two.first, two.second):
        member.may_send.set()
    await asyncio.gather(*deciding)
    while len(two.topics.payloads("out")) <= len(deciding):
        two.first.session._output_publisher.adopt()
        await asyncio.sleep(0)
    assert two.topics.payloads("out") == [b"1"] * len(deciding) + [b"2"]
    two.third.may_send.set()
    await later


async def test_only_what_others_come_before_waits_for_them(two):
    """Of two commits that could be published at once the second has to wait for another process."""

    def decided(publisher, *inputs):
        return Decided(next(ids), "m", publisher, [], {}, frozenset(inputs))

    publisher = two.first.session._output_publisher
    ours = [
        decided(publisher._publisher, "c0"),
        decided(publisher._publisher, "c1"),
        decided(publisher._publisher, "c0"),
    ]
    theirs = decided("another", "c1")
    publisher._queue.extend(ours)
    order = [ours[0], theirs, *ours[1:]]
    assert publisher._ready({each.token: each for each in order}) == ours[:1]
    assert publisher._ready({each.token: each for each in ours}) == ours
    publisher._queue.clear()
