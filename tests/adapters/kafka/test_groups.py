"""Consumer groups on Kafka: members that die, stop or come late, brokers that restart, commits that are cut in two.

`TIDEWAL_CRASH_KILLS` says how often the exactly-once pipeline is killed (5).
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka import errors as kafka_errors
from aiokafka.admin import AIOKafkaAdminClient

from tidewal.adapters.kafka.groups.coordinator_broker import Code, CoordinatorBroker
from tidewal.adapters.kafka.groups.offset_store import OffsetStore
from tidewal.adapters.kafka.groups.session import Session
from tidewal.runtime.errors import Fenced, Unavailable
from tidewal.runtime.groups.coordinator_client import Ack
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, FromId, FromTime

pytestmark = pytest.mark.broker

KILLS = int(os.environ.get("TIDEWAL_CRASH_KILLS", "5"))
SCRIPT = Path(__file__).with_name("group_member.py")
PLAIN = ChannelPolicy()
SESSION_S = 1.5  # brokers that allow no such make it 6
WITHIN_S = 60.0


class Child:
    """A process with a member, and what it said."""

    def __init__(self, process: asyncio.subprocess.Process, moved: asyncio.Event) -> None:
        self.process = process
        self.lines: list[str] = []
        self._moved = moved
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode().strip())
            self._moved.set()
        self._moved.set()

    async def said(self, word: str, count: int = 1) -> list[str]:
        """The lines that begin with the word, once there are so many."""
        async with asyncio.timeout(WITHIN_S):
            while len(found := [line for line in self.lines if line.split()[0] == word]) < count:
                assert not self.reading.done(), f"it ended after {self.lines}"
                self._moved.clear()
                await self._moved.wait()
        return found

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self.reading


Start = Callable[[str], Awaitable[Child]]


@pytest.fixture
async def processes(kafka, opening) -> AsyncIterator[tuple[Start, asyncio.Event]]:
    """Start processes with members of group "g" in the log of this test; all are killed at its end."""
    url = f"{kafka.url}/{(await opening(kafka))._options.prefix}"
    children: list[Child] = []
    moved = asyncio.Event()

    async def start(mode: str) -> Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(SCRIPT),
            url,
            "g",
            str(SESSION_S),
            mode,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        children.append(Child(process, moved))
        return children[-1]

    yield start, moved
    for child in children:
        await child.kill()


async def fill(wal, channel, count, first=0):
    return await wal.append_many([Append(channel, b"%d" % i) for i in range(first, first + count)])


async def collect(member, count):
    """The next `count` entries, acknowledged; the ids by channel."""
    found: dict[str, list[bytes]] = {}
    async with asyncio.timeout(WITHIN_S):
        while sum(map(len, found.values())) < count:
            delivered = await anext(member)
            found.setdefault(delivered.channel, []).extend(entry.id for entry in delivered.entries)
            await member.acknowledge(delivered)
    return found


async def everything(wal, channel, count=0):
    """All entries up to the last one, and `count` at least: of a commit whose process was killed, readers may see the
    position before they see the outputs."""
    last = await wal.latest_id(channel)
    entries = []
    reader = wal.read(channel, From.EARLIEST)
    with suppress(TimeoutError):
        async with asyncio.timeout(WITHIN_S):
            while len(entries) < count or (last is not None and (not entries or entries[-1].id < last)):
                entries += await anext(reader)
    await reader.aclose()
    return entries


async def having(member, count):
    async with asyncio.timeout(WITHIN_S):
        while len(member.channels) != count:  # noqa: ASYNC110 -- the contract has no event for it
            await asyncio.sleep(0)


# ---- members that die or stop ----------------------------------------------------------------------------------------


async def test_a_killed_member_hands_its_channels_over(kafka, opening, processes):
    start, _ = processes
    wal = await opening(kafka)
    for name in ("in-0", "in-1", "out-0", "out-1"):
        await wal.create_channel(name, PLAIN)
    child = await start("copy")
    await child.said("joined")
    member = await wal.join("g", ["in-*"], session_timeout_s=SESSION_S)
    await having(member, 1)
    await child.kill()
    await having(member, 2)
    ids = {name: await fill(wal, name, 3) for name in ("in-0", "in-1")}
    assert await collect(member, 6) == ids
    (info,) = await wal.groups()
    assert info.members == {member.id: member.channels}


async def test_a_member_that_was_stopped_too_long_moves_nothing_and_commits_nothing(kafka, opening, processes):
    start, _ = processes
    wal = await opening(kafka)
    for name in ("a", "out"):
        await wal.create_channel(name, PLAIN)
    ids = await fill(wal, "a", 3)
    child = await start("hold")
    await child.said("delivered")
    child.process.send_signal(19)  # SIGSTOP
    member = await wal.join("g", ["a"], session_timeout_s=SESSION_S)
    assert await collect(member, 3) == {"a": ids}
    child.process.send_signal(18)  # SIGCONT
    child.process.stdin.write(b"go\n")
    assert await child.said("Fenced", 2)
    assert await everything(wal, "out") == []
    (info,) = await wal.groups()
    assert info.positions == {"a": ids[-1]}


async def test_what_a_member_died_on_is_undone_by_the_next_at_once(kafka, opening, processes):
    start, _ = processes
    wal = await opening(kafka)
    for name in ("a", "out"):
        await wal.create_channel(name, PLAIN)
    ids = await fill(wal, "a", 3)
    child = await start("die")
    await child.said("delivered")
    await child.process.wait()
    plain = await wal.append("out", b"plain")  # behind what is open
    began_s = time.monotonic()
    member = await wal.join("g", ["a"], session_timeout_s=SESSION_S)
    async with asyncio.timeout(WITHIN_S):
        delivered = await anext(member)
    assert [entry.id for entry in delivered.entries] == ids
    written = await member.commit([delivered], [Append("out", b"second")])
    assert time.monotonic() - began_s < 20, "it waited until Kafka gave the transaction up"
    assert [(e.id, bytes(e.payload)) for e in await everything(wal, "out")] == [
        (plain, b"plain"),
        (*written, b"second"),
    ]


async def test_a_member_keeps_its_channels_while_its_loop_is_blocked(kafka, opening):
    wal = await opening(kafka)
    await wal.create_channel("a", PLAIN)
    ids = await fill(wal, "a", 2)
    member = await wal.join("g", ["a"], session_timeout_s=1.0)
    delivered = await anext(member)
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        pass
    await member.acknowledge(delivered)
    (info,) = await wal.groups()
    assert info.positions == {"a": ids[-1]}


# ---- brokers that fail -----------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_a_rebalance_during_an_outage_silences_no_member(own_kafka, opening):
    wal, other = await opening(own_kafka), await opening(own_kafka)
    channels = [f"c{n}" for n in range(4)]
    for channel in channels:
        await wal.create_channel(channel, PLAIN)
    first = await wal.join("g", ["c*"], session_timeout_s=8.0)
    own_kafka.kill()
    joining = asyncio.create_task(other.join("g", ["c*"], session_timeout_s=8.0))
    await asyncio.to_thread(own_kafka.restart)
    second = await asyncio.wait_for(joining, WITHIN_S)
    await having(first, 2)
    await having(second, 2)
    written = {channel: await fill(wal, channel, 5) for channel in channels}
    mine, others = await asyncio.gather(collect(first, 10), collect(second, 10))
    assert {**mine, **others} == written
    own_kafka.kill()
    leaving = asyncio.create_task(second.aclose())
    await asyncio.to_thread(own_kafka.restart)
    await asyncio.wait_for(leaving, WITHIN_S)
    await having(first, 4)


async def test_a_session_that_ended_while_no_broker_was_there_begins_anew(own_kafka, opening):
    wal = await opening(own_kafka, request_timeout_s=0.5)
    await wal.create_channel("a", PLAIN)
    member = await wal.join("g", ["a"], session_timeout_s=SESSION_S)
    ids = await fill(wal, "a", 3)
    async with asyncio.timeout(WITHIN_S):
        delivered = await anext(member)
    own_kafka.pause()
    await having(member, 0)
    own_kafka.resume()
    assert await collect(member, 3) == {"a": ids}
    with pytest.raises(Fenced):
        await member.acknowledge(delivered)


# ---- answers that are lost -------------------------------------------------------------------------------------------


def lose_answers(monkeypatch, request_name, times=1):
    """Let the next answers to such requests be lost on their way; what was asked for has happened."""
    ask = CoordinatorBroker.ask
    lost = []

    async def losing(self, request, *connection):
        answer = await ask(self, request, *connection)
        if type(request).__name__ == request_name and len(lost) < times:
            lost.append(request)
            raise kafka_errors.KafkaConnectionError("the answer was lost")
        return answer

    monkeypatch.setattr(CoordinatorBroker, "ask", losing)
    return lost


async def test_an_acknowledgement_that_arrives_late_moves_nothing_back(kafka, opening, monkeypatch):
    wal = await opening(kafka)
    await wal.create_channel("a", PLAIN)
    await fill(wal, "a", 1)
    member = await wal.join("g", ["a"])
    first = await anext(member)
    lost = lose_answers(monkeypatch, "OffsetCommitRequest")
    await member.acknowledge(first)
    ids = await fill(wal, "a", 1, 1)
    await collect(member, 1)
    ((session, _),) = wal._groups._sessions._sessions.values()
    late = await wal._io.call(lambda: session.coordinator.ask(lost[0]))
    assert late.topics[0][1][0][1] == Code.ILLEGAL_GENERATION
    (info,) = await wal.groups()
    assert info.positions == {"a": ids[-1]}


@pytest.mark.parametrize("what", ["acknowledge", "commit"])
async def test_the_brokers_refuse_who_has_lost_a_channel_and_does_not_know_it(kafka, opening, monkeypatch, what):
    wal, other = await opening(kafka), await opening(kafka)
    for name in ("a", "out"):
        await wal.create_channel(name, PLAIN)
    ids = await fill(wal, "a", 2)
    with monkeypatch.context() as patched:
        patched.setattr(Session, "_heartbeat_loop", _no_heartbeat)
        unaware = await wal.join("g", ["a"], session_timeout_s=SESSION_S)
        delivered = await anext(unaware)
    aware = await other.join("g", ["a"], session_timeout_s=SESSION_S)
    assert await collect(aware, 2) == {"a": ids}
    assert unaware.channels == {"a"}
    new = await fill(wal, "a", 1, 2)
    async with asyncio.timeout(WITHIN_S):
        held = await anext(aware)
    acknowledging = what == "acknowledge"
    late = unaware.acknowledge(delivered) if acknowledging else unaware.commit([delivered], [Append("out", b"late")])
    with pytest.raises(Fenced):
        await late
    written = await aware.commit([held], [Append("out", b"right")])
    assert [entry.id for entry in await everything(wal, "out")] == written
    (info,) = [info for info in await wal.groups() if info.name == "g"]
    assert info.positions == {"a": new[-1]}


async def _no_heartbeat(session):
    """Says nothing and hears nothing."""


@pytest.mark.parametrize(
    "request_name",
    [
        "JoinGroupRequest",
        "SyncGroupRequest",
        "OffsetCommitRequest",
        "OffsetFetch",
        "InitProducerIdRequest",
        "AddPartitionsToTxnRequest",
        "AddOffsetsToTxnRequest",
        "TxnOffsetCommit",
        "EndTxnRequest",
    ],
)
async def test_a_lost_answer_is_asked_for_again(kafka, opening, monkeypatch, request_name):
    wal = await opening(kafka)
    for name in ("a", "out"):
        await wal.create_channel(name, PLAIN)
    ids = await fill(wal, "a", 2)
    lost = lose_answers(monkeypatch, request_name)
    member = await wal.join("g", ["a"])
    delivered = await anext(member)
    await member.acknowledge(delivered, [ids[0]])
    written = await member.commit([delivered], [Append("out", b"x"), Append("out", b"y")])
    assert len(lost) == 1
    assert [entry.id for entry in await everything(wal, "out")] == written
    (info,) = await wal.groups()
    assert info.positions == {"a": ids[-1]}


async def test_a_commit_of_unknown_outcome_is_told_by_the_position(kafka, opening, monkeypatch):
    wal = await opening(kafka, request_timeout_s=0.5, delivery_timeout_s=1.0)
    for name in ("a", "out"):
        await wal.create_channel(name, PLAIN)
    await fill(wal, "a", 2)
    member = await wal.join("g", ["a"])
    delivered = await anext(member)
    with monkeypatch.context() as patched:
        lose_answers(patched, "EndTxnRequest", times=10**6)
        with pytest.raises(Unavailable) as unknown:
            await member.commit([delivered], [Append("out", b"x")])
        assert unknown.value.outcome_unknown
    with pytest.raises(Fenced):
        await member.acknowledge(delivered)
    new = await fill(wal, "a", 1, 2)
    assert await collect(member, 1) == {"a": new}  # it had happened
    assert len(await everything(wal, "out")) == 1


# ---- transactions ----------------------------------------------------------------------------------------------------


async def test_others_see_a_commit_whole_or_not_at_all(kafka, opening, helpers):
    """A producer of the library itself aborts, commits, and leaves open."""
    wal = await opening(kafka)
    await wal.create_channel("a", PLAIN)
    (first,) = await fill(wal, "a", 1)
    topic = next(channel.topic for channel in wal._catalog.all())
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=topic)
    await producer.start()
    try:
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"aborted", partition=0, timestamp_ms=10**12)
        assert await wal.latest_id("a") == first
        await producer.abort_transaction()
        assert await wal.latest_id("a") == first
        async with producer.transaction():
            await producer.send_and_wait(topic, b"committed", partition=0)
        async with asyncio.timeout(WITHIN_S):
            while (last := await wal.latest_id("a")) == first:  # the end of a transaction is written a little later
                pass
        (plain,) = await fill(wal, "a", 1)
        found = [(entry.id, bytes(entry.payload)) for entry in await everything(wal, "a")]
        assert found == [(first, b"0"), (last, b"committed"), (plain, b"0")]
        assert await wal.latest_id("a") == plain
        for start in range(int.from_bytes(first, "big"), int.from_bytes(last, "big")):  # between the two
            (found,) = await helpers.take(wal, "a", FromId(start.to_bytes(len(first), "big")), 1)
            assert found.id == last
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"open", partition=0)
        assert await wal.latest_id("a") == plain
        assert await wal.id_at("a", 2**62) is None
        latest = wal.read("a", From.LATEST)
        waiting = asyncio.ensure_future(anext(latest))
        later = wal.read("a", FromTime(2**62))
        also_waiting = asyncio.ensure_future(anext(later))
        await producer.abort_transaction()
        new = await wal.append("a", b"new", 2**62)
        async with asyncio.timeout(WITHIN_S):
            assert [entry.id for entry in await waiting] == [new]
            assert [entry.id for entry in await also_waiting] == [new]
        await latest.aclose()
        await later.aclose()
    finally:
        await producer.stop()


async def test_a_commit_larger_than_a_batch_keeps_its_order(kafka, opening):
    wal = await opening(kafka, batch_bytes=2000)
    for name in ("a", "out", "other"):
        await wal.create_channel(name, PLAIN)
    await fill(wal, "a", 1)
    member = await wal.join("g", ["a"])
    outputs = [Append("out" if i % 3 else "other", b"%d" % i * 50) for i in range(90)]
    written = await member.commit([await anext(member)], outputs)
    for name in ("out", "other"):
        expected = [(id, out.payload) for id, out in zip(written, outputs, strict=True) if out.channel == name]
        assert [(entry.id, bytes(entry.payload)) for entry in await everything(wal, name)] == expected


async def test_any_tool_of_kafka_sees_the_group(kafka, opening):
    wal = await opening(kafka)
    await wal.create_channel("a", PLAIN)
    await fill(wal, "a", 7)
    member = await wal.join("g", ["a"])
    delivered = await anext(member)
    await member.acknowledge(delivered)
    topic = next(channel.topic for channel in wal._catalog.all())
    name = f"{wal._options.prefix}.g"
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        assert (name, "consumer") in await admin.list_consumer_groups()
        offsets = await admin.list_consumer_group_offsets(name)
        assert {(at.topic, at.partition): found.offset for at, found in offsets.items()} == {(topic, 0): 7}
        (described,) = await admin.describe_consumer_groups([name])
        assert described.groups[0][2:5] == ("Stable", "consumer", "tidewal")
    finally:
        await admin.close()


# ---- exactly once ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.kills
@pytest.mark.timeout(600 + 15 * KILLS)
async def test_a_pipeline_killed_again_and_again_copies_exactly_once(kafka, opening, processes, rng):
    """Two processes copy while producers go on; one after the other is killed. Killed brokers are in
    test_coordinator_faults.py: a Kafka of one node may come back without the ends of transactions (docs/backends.md).
    """
    start, moved = processes
    wal = await opening(kafka)
    for number in range(3):
        await wal.create_channel(f"in-{number}", PLAIN)
        await wal.create_channel(f"out-{number}", PLAIN)
    stopping = asyncio.Event()

    async def produce() -> None:
        number = 0
        while not stopping.is_set():
            batch = [Append(f"in-{rng.randrange(3)}", b"entry-%d" % (number + i)) for i in range(rng.randint(1, 20))]
            number += len(batch)
            with suppress(Unavailable):  # what the log has is the model, acknowledged or not
                await wal.append_many(batch)

    producing = asyncio.create_task(produce())
    children = [await start("copy") for _ in range(2)]
    for _ in range(KILLS):
        for child in children:
            done = sum(line.startswith("commit") for line in child.lines)
            await child.said("commit", done + rng.randint(1, 5))
        await children.pop(rng.randrange(2)).kill()
        children.append(await start("copy"))
    stopping.set()
    await producing
    last = {f"in-{number}": await wal.latest_id(f"in-{number}") for number in range(3)}
    async with asyncio.timeout(WITHIN_S):
        while (await wal.groups())[0].positions != last:
            moved.clear()
            await moved.wait()
    for number in range(3):
        inputs = [bytes(entry.payload).upper() for entry in await everything(wal, f"in-{number}")]
        outputs = [bytes(entry.payload) for entry in await everything(wal, f"out-{number}", len(inputs))]
        lost, doubled = Counter(inputs) - Counter(outputs), Counter(outputs) - Counter(inputs)
        assert (list(lost)[:5], list(doubled)[:5]) == ([], []), f"{len(lost)} lost, {len(doubled)} doubled of {number}"
        assert outputs == inputs, "the order of a channel is kept as well"


async def test_what_is_acknowledged_while_a_member_seeks_does_not_undo_it(kafka, opening, monkeypatch):
    wal = await opening(kafka)
    await wal.create_channel("a", PLAIN)
    await wal.append_many([Append("a", b"%d" % number) for number in range(3)])
    member = await wal.join("g", ["a"])
    async with asyncio.timeout(WITHIN_S):
        delivered = await anext(member)
    sessions, store = wal._groups._sessions, OffsetStore.store
    late = Ack(delivered.channel, delivered.assignment_epoch, delivered.entries[-1].id, ())
    stores, acknowledging, sought, overtaking = 0, None, asyncio.Event(), asyncio.Event()

    async def overtaken(self, positions):
        """The first is the seek's: an acknowledgement begins before it is stored, and may end behind it."""
        nonlocal stores, acknowledging
        stores += 1
        if stores > 1:
            overtaking.set()
            await sought.wait()
            await store(self, positions)
            return
        acknowledging = asyncio.ensure_future(sessions.commit("g", member._id, [late], []))
        began = asyncio.ensure_future(overtaking.wait())
        await asyncio.wait({acknowledging, began}, return_when=asyncio.FIRST_COMPLETED)
        began.cancel()
        await store(self, positions)
        sought.set()

    monkeypatch.setattr(OffsetStore, "store", overtaken)
    await member.seek("a", From.EARLIEST)

    async def outcome():
        return (await asyncio.gather(acknowledging, return_exceptions=True))[0]

    assert isinstance(await wal._io.call(outcome), Fenced)
    async with asyncio.timeout(WITHIN_S):
        again = await anext(member)
    assert again.entries[0].id == delivered.entries[0].id
    await member.aclose()
