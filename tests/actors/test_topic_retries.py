"""Retry topics: what fails at a member of a topic's group is tried again from there, and holds up nothing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace as replace_fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tidewal
from tidewal import Nack, RetryPolicy, Semantics
from tidewal.actors.proxy.sharded_rows import RECORD_OVERHEAD_BYTES
from tidewal.actors.topics.messages import RetriedMessage, header_bytes
from tidewal.actors.topics.retried import Origin, Retried
from tidewal.actors.topics.retry_topics import RetryTopics
from tidewal.cli import letters
from tidewal.cli.replay import replay
from tidewal.runtime.errors import InvalidRequest, TopicNotFound
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.record import decode
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.ownership import producers
from tidewal.runtime.rows.hashing import hash_key_bytes
from tidewal.runtime.testing.clock import elapse, run_virtual

from .conftest import Home

POLICY = RetryPolicy(attempts=3, first_pause_s=0.5, last_pause_s=0.5, seed=1)
virtual = pytest.mark.asyncio(loop_factories=["memory"])
AT_LEAST, EXACTLY = Semantics.AT_LEAST_ONCE, Semantics.EXACTLY_ONCE


class Script:
    """A handler that does at each message as its body says, `KIND:TIMES:…`, counted over all members, and succeeds
    after that. `seen` has the messages of successful calls, `calls` all calls by body."""

    def __init__(self) -> None:
        self.calls: Counter[bytes] = Counter()
        self.seen: list[tidewal.TopicMessage] = []
        self.attempts: dict[bytes, list[int]] = {}
        self.outputs = ""
        self._succeeded = asyncio.Event()

    async def __call__(self, pack: tidewal.TopicPack):
        alone = len(pack.messages) == 1
        for message in pack.messages:
            body = bytes(message.body)
            kind, times, *_ = [*body.split(b":"), b"0"]
            if not alone and kind != b"good":
                raise ArithmeticError("not alone")
            if not alone:
                continue
            self.calls[body] += 1
            self.attempts.setdefault(body, []).append(message.attempts)
            if kind != b"good" and self.calls[body] <= int(times):
                if kind == b"hang":
                    await elapse(1e6)
                raise Nack("later", delay_s=2.0) if kind == b"nack" else ArithmeticError("bad")
        self.seen += pack.messages
        self._succeeded.set()
        if self.outputs:
            return [tidewal.Append(self.outputs, bytes(message.body)) for message in pack.messages]
        return None

    async def succeeded(self, count: int) -> None:
        while len(self.seen) < count:
            self._succeeded.clear()
            await self._succeeded.wait()

    @property
    def bodies(self) -> list[bytes]:
        return [bytes(message.body) for message in self.seen]


async def working(client, script, count: int, policy=POLICY, semantics=AT_LEAST, letter_count=0, **options):
    """Let a member work until `count` messages succeeded and so many letters were written."""
    member = await client.subscribe("orders", "billing", retry_topic=True)
    wal = member.wal
    task = process_of(member, script, policy, semantics, **options)
    try:
        async with asyncio.timeout(120):
            while len(script.seen) < count or len(await letters_of(wal)) < letter_count:
                if task.done():
                    await task
                await elapse(0.05)
            await elapse(2.5)  # whatever should not come has time to
    finally:
        await stopped(task)
        await member.aclose()


def process_of(member, script, policy=POLICY, semantics=AT_LEAST, **options):
    return asyncio.create_task(tidewal.process(member.wal, member, script, semantics, retry=policy, **options))


async def stopped(task):
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def letters_of(wal) -> list[tuple[str, int]]:
    """Reason and attempts of each letter."""
    name = Names().group_dead_letters
    found = await all_of(wal, name) if name in await wal.channels() else []
    tags = [decode(entry.payload).tags for entry in found]
    return [(each["reason"], each["attempts"]) for each in tags if "reason" in each]  # not what says of a replay


@pytest.mark.every_log
async def test_what_fails_is_tried_again_and_its_partition_goes_on(home) -> None:
    script, metrics = Script(), Metrics()
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        await client.send("orders", "fail:2", key="k", tags={"n": 1})
        await client.send("orders", "good", key="k")
        async with await client.subscribe("orders", "billing", retry_topic=True) as member:
            working_on = process_of(member, script, metrics=metrics)
            async with asyncio.timeout(60):
                await script.succeeded(2)
            await stopped(working_on)
        assert script.bodies == [b"good", b"fail:2"]
        last = script.seen[1]
        assert (last.topic, last.partition, last.key, last.tags) == ("orders", 0, b"k", {"n": 1})
        assert (last.attempts, last.reason) == (2, "ArithmeticError('bad')")
        assert (last.id, last.ts) < (script.seen[0].id, script.seen[0].ts), "those of the original"
        assert script.attempts[b"fail:2"] == [0, 1, 2]
        assert metrics.value("wal_group_retry_topic_total", group="billing") == 2
        assert [topic.name for topic in await client.list_topics()] == ["orders", "orders.retry.billing"]


@virtual
async def test_after_the_last_attempt_there_is_a_letter(home) -> None:
    script = Script()
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 2)
        for number in range(4):
            await client.send("orders", f"fail:9:{number}", key=str(number))
            await client.send("orders", f"good:0:{number}", key=str(number))
        await working(client, script, 4, letter_count=4)
        assert await letters_of(node.wal) == [("handler", 3)] * 4
        assert {script.calls[body] for body in script.calls if body.startswith(b"fail")} == {3}
        assert not any(script.calls[body] > 1 for body in script.calls if body.startswith(b"good"))


@virtual
async def test_a_permanent_error_is_a_letter_at_once_and_a_passing_one_waits_in_its_place(home) -> None:
    calls: list[bytes] = []

    async def handle(pack):
        for message in pack.messages:
            calls.append(bytes(message.body))
            if message.body == b"never":
                raise KeyError
            if message.body == b"soon" and calls.count(b"soon") < 3:
                raise OSError

    policy = RetryPolicy(attempts=3, first_pause_s=0.1, permanent=(KeyError,), transient=(OSError,), seed=1)
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        for body in ("never", "soon", "last"):
            await client.send("orders", body)
        member = await client.subscribe("orders", "billing", retry_topic=True)
        await tidewal.process(member.wal, member, handle, AT_LEAST, retry=policy, timeout_s=5)
        await member.aclose()
        assert await letters_of(node.wal) == [("handler", 1)]
        assert calls[-2:] == [b"soon", b"last"]


@virtual
async def test_one_message_that_is_given_back_uncounted_holds_up_no_others(home) -> None:
    seen: list[bytes] = []

    async def handle(pack):
        if any(message.body == b"later" for message in pack.messages):
            raise Nack("closed", delay_s=3600.0)
        seen.extend(bytes(message.body) for message in pack.messages)

    policy = RetryPolicy(attempts=3, transient=(Nack,), seed=1)
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        for body in ("later", "good 1", "good 2"):
            await client.send("orders", body, key="k")
        async with await client.subscribe("orders", "billing", retry_topic=True) as member:
            await tidewal.process(member.wal, member, handle, AT_LEAST, retry=policy, timeout_s=5)
        assert seen == [b"good 1", b"good 2"]


async def with_old_and_fresh(client) -> tidewal.TopicMember:
    """A member that gets two messages in one batch from the retry topic: one attempt was made at the first, two at the
    other."""
    member = await client.subscribe("orders", "billing", retry_topic=True)
    await client.send("orders", "old", key="k")
    await member.nack(await anext(member))
    await member.nack(await anext(member), delay_s=3.0)
    await client.send("orders", "fresh", key="k")
    await member.nack(await anext(member), delay_s=2.0)
    await elapse(5)
    await member.aclose()
    return await client.subscribe("orders", "billing", retry_topic=True)


@virtual
async def test_a_stop_at_messages_of_different_attempts_counts_for_none(home) -> None:
    calls: Counter[bytes] = Counter()

    async def stopping(_):
        await elapse(1e6)

    async def failing(pack):
        calls.update(bytes(message.body) for message in pack.messages if len(pack.messages) == 1)
        raise ArithmeticError

    policy = RetryPolicy(attempts=4, first_pause_s=0.1, seed=1)
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        async with await with_old_and_fresh(client) as member:
            pack = await anext(member)
            assert [message.attempts for message in pack.messages] == [1, 2]
            member.redeliver(pack)
            task = process_of(member, stopping, policy)
            await elapse(1)
            await stopped(task)
        async with await client.subscribe("orders", "billing", retry_topic=True) as member:
            await tidewal.process(member.wal, member, failing, AT_LEAST, retry=policy, timeout_s=10)
        assert calls == {b"old": 2, b"fresh": 3}
        assert await letters_of(node.wal) == [("handler", 4)] * 2


@virtual
async def test_what_is_done_with_cannot_be_given_back(home) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        for body in ("one", "two"):
            await client.send("orders", body, key="k")
        async with await client.subscribe("orders", "billing", retry_topic=True) as member:
            pack = await anext(member)
            one, two = pack.parts()
            await member.acknowledge(one)
            for done in (one, pack):
                assert isinstance(await home.error_of(member.nack(done)), InvalidRequest)
            first, second = await asyncio.gather(member.nack(two), member.nack(two), return_exceptions=True)
            assert first is None
            assert isinstance(second, InvalidRequest)
            for done in (two, pack):
                assert isinstance(await home.error_of(member.nack(done)), InvalidRequest)
            await client.send("orders", "three", key="k")
            late: tidewal.TopicPack | None = None
            while late is None or late.messages[0].body != b"three":
                late = await anext(member)
            other = await client.subscribe("orders", "billing", retry_topic=True)
        assert isinstance(await home.error_of(member.nack(late)), tidewal.errors.TidewalError)
        bodies: list[bytes] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                async for found in other:
                    bodies += [bytes(message.body) for message in found.messages]
        await other.aclose()
        assert sorted(bodies) == [b"three", b"two"]


@virtual
async def test_what_is_given_back_by_hand_has_one_attempt_more_each(home) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        async with await with_old_and_fresh(client) as member:
            await member.nack(await anext(member))
            found: dict[bytes, int] = {}
            while len(found) < 2:
                pack = await anext(member)
                found.update({bytes(message.body): message.attempts for message in pack.messages})
                await member.acknowledge(pack)
        assert found == {b"fresh": 2, b"old": 3}


@virtual
async def test_a_passing_error_makes_no_letters_of_what_has_had_its_attempts(home) -> None:
    """The policy has fewer than before: there is one attempt that counts before a letter."""
    calls: list[list[bytes]] = []

    async def handle(pack):
        calls.append([bytes(message.body) for message in pack.messages])
        if len(calls) == 1:
            raise OSError

    policy = RetryPolicy(attempts=1, first_pause_s=0.1, transient=(OSError,), seed=1)
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        async with await with_old_and_fresh(client) as member:
            await tidewal.process(member.wal, member, handle, AT_LEAST, retry=policy, timeout_s=5)
        assert calls == [[b"fresh", b"old"]] * 2
        assert await letters_of(node.wal) == []


class Died(BaseException):
    pass


async def died_at_the_copy(client, script: Script, step: str) -> None:
    """Have a member handle a message that fails, and die before or behind its copy for the retry topic."""
    await client.create_topic("orders", 1)
    await client.send("orders", "fail:1", key="k")
    member = await client.subscribe("orders", "billing", retry_topic=True)
    send = member.send_to_retry_topic

    async def dying(unit, /, **options):
        if step == "behind the copy":
            await send(unit, **options)
        raise Died

    member.send_to_retry_topic = dying
    with pytest.raises(Died):
        await tidewal.process(member.wal, member, script, EXACTLY, retry=POLICY)
    await member.aclose()


@virtual
@pytest.mark.parametrize("step", ["before the copy", "behind the copy"])
async def test_a_member_that_dies_at_the_copy_leaves_one_copy_and_no_call(home, step) -> None:
    script = Script()
    async with home.node() as node, node.client() as client:
        await died_at_the_copy(client, script, step)
        assert script.calls == {b"fail:1": 1}
        await working(client, script, 1, semantics=EXACTLY)
        assert script.attempts == {b"fail:1": [0, 1]}, "the original was handled again, or two copies came"


@virtual
async def test_copies_of_unknown_outcome_are_sent_again_and_come_once(home) -> None:
    script = Script()
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        await client.send("orders", "fail:1", key="k")
        member = await client.subscribe("orders", "billing", retry_topic=True)
        send, sent = member.send_to_retry_topic, []

        async def doubtful(unit, /, **options):
            await send(unit, **options)
            sent.append(options["copy_id"])
            if len(sent) < 3:
                raise tidewal.errors.DeadlineExceeded("late", outcome_unknown=True)

        member.send_to_retry_topic = doubtful
        await tidewal.process(member.wal, member, script, EXACTLY, retry=POLICY, timeout_s=5)
        await member.aclose()
        assert (len(sent), len(set(sent))) == (3, 1)
        assert script.attempts == {b"fail:1": [0, 1]}


@virtual
@pytest.mark.parametrize("step", ["before the copy", "behind the copy"])
async def test_a_copy_that_is_sent_again_behind_a_growth_comes_once(home, step) -> None:
    """The retry topic is altered between two attempts at one copy: what the first has written stays in the epoch that
    is over."""
    script = Script()
    async with home.node() as node, node.client() as client:
        await died_at_the_copy(client, script, step)
        for partitions in (3, 2):
            await client.alter_topic("orders.retry.billing", partitions)
        await working(client, script, 1, semantics=EXACTLY)
        assert script.attempts == {b"fail:1": [0, 1]}, "the original was handled again, or two copies came"


@virtual
async def test_copies_follow_a_retry_topic_that_is_altered(home, rng: random.Random) -> None:
    """While members work; nothing of it is lost, doubled, or kept out by the group's filter."""
    script, count = Script(), 60
    async with home.node() as node, node.client() as client, node.client() as other:
        await client.create_topic("orders", 3)

        async def send() -> None:
            for number in range(count):
                await other.send("orders", f"fail:1:{number}", key=f"{number % 7}", tags={"n": number})
                await elapse(0.1)

        async def alter() -> None:
            while True:
                await elapse(0.7)
                await other.alter_topic("orders.retry.billing", rng.randint(1, 4))

        async with await client.subscribe("orders", "billing", retry_topic=True, where="n >= 0") as member:
            tasks = [asyncio.create_task(send()), asyncio.create_task(alter()), process_of(member, script)]
            async with asyncio.timeout(60):
                await script.succeeded(count)
                await elapse(3.0)
            for task in tasks:
                await stopped(task)
        assert (await client.describe_topic("orders.retry.billing")).epoch > 4
        assert script.attempts == {b"fail:1:%d" % number: [0, 1] for number in range(count)}


@virtual
async def test_a_retry_topic_gets_as_many_partitions_as_its_topic_up_to_four(home) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        for partitions, expected in ((1, 1), (3, 3), (2, 3), (8, 4)):
            await client.alter_topic("orders", partitions)
            async with await client.subscribe("orders", "billing", retry_topic=True):
                found = await client.describe_topic("orders.retry.billing")
                assert (len(found.partitions), found.delays) == (expected, True)


class BehindClock:
    """A machine's clock that is set back between two members, or stands still."""

    def __init__(self, wall_ms: int) -> None:
        self._wall_ms = wall_ms

    def wall_ms(self) -> int:
        return self._wall_ms

    def monotonic(self) -> float:
        return 0.0

    def boot(self) -> str:
        return ""


@virtual
async def test_members_whose_clocks_differ_lose_no_message(home) -> None:
    script = Script()
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        for number, behind_ms in enumerate((0, 0, 5_000)):  # the same time again, and an earlier one
            await client.send("orders", f"fail:1:{number}", key="k")
            clock = tidewal.HybridClock(BehindClock(1_600_000_100_000 - behind_ms))
            await working(client, script, number + 1, clock=clock)
        assert script.attempts == {f"fail:1:{number}".encode(): [0, 1] for number in range(3)}


@virtual
async def test_partitions_go_on_while_a_copy_is_not_taken(home) -> None:
    """Its own waits; a member that leaves meanwhile sends it no more, and the next one does."""
    script, loop = Script(), asyncio.get_running_loop()
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 2)
        await client.send("orders", ["fail:1"], partitioner=lambda _, __: 0)
        ends: list[BaseException] = []

        async def away(unit, /, **options):
            try:
                await elapse(1e6)
            except asyncio.CancelledError as error:
                ends.append(error)
                raise

        async with await client.subscribe("orders", "billing", retry_topic=True) as member:
            send, member.send_to_retry_topic = member.send_to_retry_topic, away
            task = process_of(member, script)
            await elapse(1)
            begun = loop.time()
            for number in range(20):
                await client.send("orders", f"good:0:{number}", partitioner=lambda _, __: 1)
            async with asyncio.timeout(30):
                await script.succeeded(20)
            assert loop.time() - begun < 1
            await client.send("orders", "good", partitioner=lambda _, __: 0)
            await elapse(5)
            assert b"good" not in script.bodies
            await stopped(task)
            await elapse(0.1)
            assert len(ends) == 1
            member.send_to_retry_topic = send
            await tidewal.process(member.wal, member, script, AT_LEAST, retry=POLICY, timeout_s=5)
        assert script.attempts[b"fail:1"] == [0, 1]
        assert script.bodies.count(b"good") == 1


@virtual
async def test_a_copy_whose_outcome_the_owner_has_forgotten_comes_once(home, monkeypatch) -> None:
    monkeypatch.setattr(producers, "OUTCOMES_MAX", 1)
    script = Script()
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        for body in ("fail:1:0", "fail:1:1"):
            await client.send("orders", body, key="k")
        member = await client.subscribe("orders", "billing", retry_topic=True)
        send, doubted = member.send_to_retry_topic, []

        async def doubtful(unit, /, **options):
            await send(unit, **options)
            if unit.messages[0].body not in doubted:
                doubted.append(unit.messages[0].body)
                for _ in range(3):  # of other producers
                    async with node.client() as other:
                        await other.send("orders.retry.billing", "good", deliver_after_s=1.0)
                raise tidewal.errors.DeadlineExceeded("late", outcome_unknown=True)

        member.send_to_retry_topic = doubtful
        await tidewal.process(member.wal, member, script, AT_LEAST, retry=POLICY, timeout_s=10)
        await member.aclose()
        assert script.attempts == {b"fail:1:0": [0, 1], b"fail:1:1": [0, 1]}


@virtual
async def test_what_a_member_without_the_partition_gives_back_blocks_no_copy(home) -> None:
    """The one that has it has decided on a copy, and sends it behind that."""
    script = Script()
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        await client.send("orders", "fail:1", key="k")
        late = await client.subscribe("orders", "billing", retry_topic=True)
        pack = await anext(late)
        member = await client.subscribe("orders", "billing", retry_topic=True)
        await late.aclose()
        send = member.send_to_retry_topic

        async def slow(unit, /, **options):
            member.send_to_retry_topic = send
            await elapse(0.01)
            await late.send_to_retry_topic(pack, failed=1, reason="", delay_s=0.0)
            raise tidewal.errors.Unavailable("the owner moves")

        member.send_to_retry_topic = slow
        await tidewal.process(member.wal, member, script, AT_LEAST, retry=POLICY, timeout_s=10)
        await member.aclose()
        assert script.attempts == {b"fail:1": [0, 1, 1]}


@virtual
async def test_a_group_that_goes_back_retries_again(home) -> None:
    script = Script()
    async with home.node() as node, node.client() as client:
        topic = await client.create_topic("orders", 1)
        await client.send("orders", "fail:1", key="k")
        await working(client, script, 1)
        script.calls.clear()
        await node.wal.seek_group("billing", Names().topic_pchannel(topic.id, 0), tidewal.From.EARLIEST)
        await working(client, script, 2)
        assert script.attempts == {b"fail:1": [0, 1, 0, 1]}


@virtual
async def test_what_the_retry_topic_cannot_take_is_tried_again_in_its_place(home) -> None:
    script = Script()
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        await client.send("orders", "fail:2", key="k", tags={"large": "x" * (64 * 1024 - 30)})
        await client.send("orders", "good", key="k")
        await working(client, script, 2)
        assert script.bodies == [b"fail:2", b"good"]
        assert script.attempts[b"fail:2"] == [0, 0, 0]


@virtual
async def test_no_time_is_over_while_something_is_given_back(home, monkeypatch) -> None:
    send = RetryTopics.send

    async def slow(self, /, *sent):
        await elapse(5.0)
        await send(self, *sent)

    monkeypatch.setattr(RetryTopics, "send", slow)
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        await client.send("orders", ["x", "y"])
        async with await client.subscribe("orders", "billing", retry_topic=True, ack_timeout_s=1.0) as member:
            await member.nack(await anext(member))
            seen: list[tuple[bytes, int]] = []
            with suppress(TimeoutError):
                async with asyncio.timeout(10):
                    async for pack in member:
                        seen += [(bytes(message.body), message.attempts) for message in pack.messages]
                        await member.acknowledge(pack)
    assert sorted(seen) == [(b"x", 1), (b"y", 1)]


@virtual
@pytest.mark.parametrize("case", ["too large", "the owner is away", "the owner is away, uncounted"])
async def test_the_delay_of_a_nack_is_kept_where_its_copy_is_not_taken(home, case) -> None:
    loop, calls = asyncio.get_running_loop(), []
    policy = replace_fields(POLICY, transient=(Nack,) if "uncounted" in case else ())

    async def handle(pack):
        calls.append((loop.time(), pack.messages[0].reason))
        if len(calls) == 1:
            raise Nack("closed", delay_s=60.0)

    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        tags = {"large": "x" * (64 * 1024 - 30)} if case == "too large" else {}
        await client.send("orders", "x", tags=tags)
        async with await client.subscribe("orders", "billing", retry_topic=True) as member:
            send = member.send_to_retry_topic

            async def away_first(unit, /, **options):
                member.send_to_retry_topic = send
                raise tidewal.errors.Unavailable("the owner moves")

            if "away" in case:
                member.send_to_retry_topic = away_first
            await tidewal.process(member.wal, member, handle, AT_LEAST, retry=policy, timeout_s=70)
        assert 59.9 <= calls[1][0] - calls[0][0] <= 61
        assert "away" not in case or calls[1][1] == "Nack('closed')"


@virtual
async def test_a_nack_with_a_delay_that_no_topic_takes_is_an_error_like_any_other(home) -> None:
    reasons: list[str] = []

    async def handle(pack):
        reasons.append(pack.messages[0].reason)
        if len(reasons) == 1:
            raise Nack("closed", delay_s=60_000_000_000)  # 60 s, in nanoseconds

    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        await client.send("orders", "x")
        async with await client.subscribe("orders", "billing", retry_topic=True) as member:
            await tidewal.process(member.wal, member, handle, AT_LEAST, retry=POLICY, timeout_s=10)
    assert len(reasons) == 2
    assert "must be from 0 to 366 days in seconds" in reasons[1]


@virtual
async def test_of_messages_of_one_call_all_or_none_go_to_the_retry_topic(home) -> None:
    """One partition of it would take its copy, another one not: they are tried again in their place, and once."""
    first: list[tidewal.TopicPack] = []

    async def handle(pack):
        if not first:
            first.append(pack)
            raise ArithmeticError
        return [tidewal.Append("done", bytes(message.key)) for message in pack.messages]

    keys = [b"%d" % number for number in range(100) if hash_key_bytes(b"%d" % number) % 5 == 0]
    small = keys[0]
    large = next(key for key in keys if hash_key_bytes(key) % 4 != hash_key_bytes(small) % 4)
    body = bytes(tidewal.ChannelPolicy().max_message_bytes - RECORD_OVERHEAD_BYTES - header_bytes(large, {}))
    async with home.node() as node, node.client() as client:
        await node.wal.create_channel("done", tidewal.ChannelPolicy())
        await client.create_topic("orders", 5)
        await client.send("orders", [tidewal.Message(b"small", small), tidewal.Message(body, large)])
        member = await client.subscribe("orders", "billing", retry_topic=True)
        await tidewal.process(member.wal, member, handle, EXACTLY, retry=POLICY, timeout_s=5)
        await member.aclose()
        assert sorted(bytes(each.payload) for each in await all_of(node.wal, "done")) == sorted([small, large])


@virtual
async def test_by_hand_what_is_given_back_comes_again_later(home) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        await client.send("orders", ["one", "two"], key="k")
        async with await client.subscribe("orders", "billing", retry_topic=True) as member:
            loop = asyncio.get_running_loop()
            await member.nack(await anext(member), reason="no stock", delay_s=2.0)
            begun = loop.time()
            found: list[tidewal.TopicMessage] = []
            while len(found) < 2:
                pack = await anext(member)
                found += pack.messages
                await member.acknowledge(pack)
            assert loop.time() - begun >= 1.9
            assert [(bytes(each.body), each.attempts, each.reason) for each in found] == [
                (b"one", 1, "no stock"),
                (b"two", 1, "no stock"),
            ]
        async with await client.subscribe("orders", "other") as member:
            pack = await anext(member)
            assert isinstance(await home.error_of(member.nack(pack)), InvalidRequest)
            with pytest.raises(InvalidRequest):
                await client.subscribe("orders.retry.billing", "again", retry_topic=True)


@virtual
@pytest.mark.parametrize("where", ["_producer == '{0.producer}'", "_ts <= {0.ts}", "_vchannel == '{0.vchannel}'"])
async def test_the_groups_filter_passes_no_retry(home, where) -> None:
    """Fields of the header that the copy does not share with what it was made from."""
    script = Script()
    async with home.node() as node, node.client() as client:
        topic = await client.create_topic("orders", 1)
        await client.send("orders", "fail:2", key="k")
        entries = await all_of(node.wal, Names().topic_pchannel(topic.id, 0))
        record = next(each for each in map(decode, (entry.payload for entry in entries)) if each.key)
        member = await client.subscribe("orders", "billing", retry_topic=True, where=where.format(record))
        await tidewal.process(member.wal, member, script, AT_LEAST, retry=POLICY, timeout_s=5)
        await member.aclose()
        assert script.attempts == {b"fail:2": [0, 1, 2]}


@virtual
async def test_what_others_say_of_attempts_is_not_believed(home) -> None:
    """A client cannot send it, and where one has, or is of another version, the members go on."""
    forged = {**Retried(2**64 - 1, "", Origin("other", 0, 1, b"i")).tags(), "n": 1}
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        assert isinstance(await home.error_of(client.send("orders", "fail:1", tags=forged)), InvalidRequest)
        await client.send("orders", RetriedMessage("fail:1", tags=forged))
        script = Script()
        async with await client.subscribe("orders", "billing", retry_topic=True) as member:
            await client.send("orders.retry.billing", RetriedMessage("fail:2", tags=forged))
            await tidewal.process(member.wal, member, script, AT_LEAST, retry=POLICY, timeout_s=5)
        assert script.attempts == {b"fail:1": [0, 1], b"fail:2": [2**31 - 1]}
        assert [(each.topic, each.tags) for each in script.seen] == [("orders", {"n": 1})]
        assert len(await letters_of(node.wal)) == 1


@virtual
async def test_a_group_that_begins_at_the_end_loses_no_retry(home) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        await client.send("orders", "old")
        member = await client.subscribe("orders", "billing", retry_topic=True, start=tidewal.From.LATEST)
        await client.send("orders", "fail:1")
        script = Script()
        await tidewal.process(member.wal, member, script, AT_LEAST, retry=POLICY, timeout_s=5)
        await member.aclose()
        assert script.attempts == {b"fail:1": [0, 1]}


@virtual
async def test_of_one_retry_topic_is_one_topic_and_one_group(home) -> None:
    async with home.node() as node, node.client() as client:
        for name in ("a", "a.retry", "long" * 60):
            await client.create_topic(name, 1)
        for topics, group in (
            ("a", "retry.b"),
            ("a.retry", "b"),
            ("a", "x.retry.b"),
            ("a", ""),
            (["a", "long" * 60], "group"),
        ):
            error = await home.error_of(client.subscribe(topics, group, retry_topic=True))
            assert isinstance(error, InvalidRequest), group
        assert isinstance(await home.error_of(client.create_topic("a.retry.b", 1)), InvalidRequest)
        assert len(await client.list_topics()) == 3, "a refused call left a retry topic"


@virtual
async def test_a_letter_is_replayed_into_the_retry_topic_or_the_topic(home) -> None:
    script = Script()
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        for attempts, body in ((2, "fail:2"), (1, "fail:1")):
            await client.send("orders", body, key="k", tags={"n": attempts})
            policy = RetryPolicy(attempts=attempts, first_pause_s=0.1)
            await working(client, script, 0, policy, letter_count=3 - attempts)

        async def to_node():
            return client

        for entry in await all_of(node.wal, Names().group_dead_letters):
            record = replace_fields(decode(entry.payload), id=entry.id)
            letter = letters.letter_of(record, letters.OF_GROUPS)
            assert letter is not None
            await replay(node.wal, Names(), record, letter, to_node)
        assert await letters.open_letters(node.wal, Names()) == []
        await working(client, script, 2)
        assert script.attempts == {b"fail:2": [0, 1, 0], b"fail:1": [0, 0]}
        found = {bytes(each.body): (each.topic, each.partition, each.key, each.tags) for each in script.seen}
        assert found == {b"fail:2": ("orders", 0, b"k", {"n": 2}), b"fail:1": ("orders", 0, b"k", {"n": 1})}
        async with await client.subscribe("orders", "other") as member:
            assert [bytes(each.body) for each in (await anext(member)).messages].count(b"fail:2") == 1


@virtual
async def test_a_letter_is_replayed_into_the_retry_topic_that_was_made_again(home) -> None:
    script = Script()
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        await client.send("orders", "fail:2", key="k")
        await working(client, script, 0, RetryPolicy(attempts=2, first_pause_s=0.1), letter_count=1)
        await client.drop_topic("orders.retry.billing")

        async def to_node():
            return client

        (entry,) = await all_of(node.wal, Names().group_dead_letters)
        record = replace_fields(decode(entry.payload), id=entry.id)
        letter = letters.letter_of(record, letters.OF_GROUPS)
        assert letter is not None
        with pytest.raises(TopicNotFound, match=r"orders\.retry\.billing"):
            await replay(node.wal, Names(), record, letter, to_node)
        async with await client.subscribe("orders", "billing", retry_topic=True):
            await replay(node.wal, Names(), record, letter, to_node)
        await working(client, script, 1)
        assert script.attempts == {b"fail:2": [0, 1, 0]}


@virtual
@pytest.mark.parametrize("seed", range(5))
async def test_of_the_timeout_and_the_commit_of_outputs_one_wins_with_a_retry_topic(home, seed) -> None:
    """Schedule 7: handlers return in the very moments in which their time ends, and the members are replaced."""
    print("seed", seed)
    chance = random.Random(seed)

    async def handle(pack):
        done = asyncio.get_running_loop().create_future()
        ends_s = 1.0 + chance.choice([-1e-6, 0, 1e-6, 1e-6])
        asyncio.get_running_loop().call_later(ends_s, lambda: done.done() or done.set_result(None))
        if chance.random() < 0.5:
            await done
        else:  # as a handler that shields what it waits for
            with suppress(asyncio.CancelledError):
                await asyncio.shield(done)
        return [tidewal.Append("done", bytes(message.body)) for message in pack.messages]

    policy = RetryPolicy(attempts=1000, first_pause_s=0.1, last_pause_s=0.5, ack_timeout_s=1.0, seed=seed)
    bodies = [b"%d" % number for number in range(4)]
    async with home.node() as node, node.client() as client:
        await node.wal.create_channel("done", tidewal.ChannelPolicy())
        await client.create_topic("orders", 2)
        for body in bodies:
            await client.send("orders", body, key=body)
        while len(await all_of(node.wal, "done")) < 4:
            member = await client.subscribe("orders", "billing", retry_topic=True)
            task = process_of(member, handle, policy, EXACTLY)
            await elapse(chance.choice([1.0, 3.0, 10.0]))
            await member.aclose()
            await task
        member = await client.subscribe("orders", "billing", retry_topic=True)
        await tidewal.process(member.wal, member, handle, EXACTLY, retry=policy, timeout_s=10)
        await member.aclose()
        assert sorted(bytes(each.payload) for each in await all_of(node.wal, "done")) == bodies


KINDS = st.sampled_from(["good", "good", "fail", "nack", "hang"])
MESSAGES = st.lists(st.tuples(KINDS, st.integers(1, 4), st.integers(0, 3)), max_size=8)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("semantics", [AT_LEAST, EXACTLY])
@settings(max_examples=10, deadline=None)
@given(messages=MESSAGES, attempts=st.integers(1, 3), deaths=st.lists(st.floats(0.1, 3.0), max_size=3))
def test_each_message_succeeds_or_becomes_a_letter(tmp_path_factory, semantics, messages, attempts, deaths):
    """The model: a message that misbehaves fewer times than the policy has attempts succeeds, and one that does more
    often is a letter. Each member that leaves in the middle may add one attempt or hide one. Each message is one of
    both, and with exactly once it is that once."""
    script = Script()
    script.outputs = "done" if semantics is EXACTLY else ""
    policy = RetryPolicy(attempts=attempts, first_pause_s=0.2, last_pause_s=0.4, ack_timeout_s=1.0, seed=2)
    bodies = {
        f"{kind}:{times}:{at}".encode(): times if kind != "good" else 0 for at, (kind, times, _) in enumerate(messages)
    }

    async def main():
        home = Home(tmp_path_factory.mktemp("home"))
        async with home.node() as node, node.client() as client:
            await node.wal.create_channel("done", tidewal.ChannelPolicy())
            await client.create_topic("orders", 2)
            for body, (_, _, key) in zip(bodies, messages, strict=True):
                await client.send("orders", body, key=str(key))
            for after_s in deaths:
                member = await client.subscribe("orders", "billing", retry_topic=True)
                task = process_of(member, script, policy, semantics)
                await elapse(after_s)
                await stopped(task)
                await member.aclose()
            member = await client.subscribe("orders", "billing", retry_topic=True)
            task = process_of(member, script, policy, semantics)
            while not task.done() and len({*script.bodies, *(await given_up(node.wal))}) < len(bodies):
                await elapse(0.5)
            await elapse(3)
            assert not task.done()
            await stopped(task)
            await member.aclose()
            return await given_up(node.wal), [bytes(each.payload) for each in await all_of(node.wal, "done")]

    dead, done = run_virtual(main())
    assert {*dead, *script.bodies} == set(bodies)
    assert len(dead) == len(set(dead))
    if semantics is EXACTLY:
        assert sorted([*dead, *done]) == sorted(bodies)
    for body, times in bodies.items():
        assert body not in dead or times + len(deaths) >= attempts
        assert body not in script.bodies or times < attempts + len(deaths)


async def given_up(wal) -> list[bytes]:
    """The bodies of the messages in letters."""
    name = Names().group_dead_letters
    found = await all_of(wal, name) if name in await wal.channels() else []
    return [bytes(decode(decode(entry.payload).body).body) for entry in found]


async def all_of(wal, channel: str):
    last = await wal.latest_id(channel)
    found: list[tidewal.Entry] = []
    if last is not None:
        async for batch in wal.read(channel, tidewal.From.EARLIEST):
            found += batch
            if found[-1].id == last:
                break
    return found
