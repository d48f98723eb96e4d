"""Requests and replies over topics: who gets which reply, what is served again, and what is given up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

import tidewal
from tidewal.actors.topics import requests
from tidewal.actors.topics.replies import TopicReplies
from tidewal.actors.topics.requests import CLIENT, DRIFT_MS, NUMBER, WAITS, TopicRequest, request_of
from tidewal.runtime.clock import HybridClock, compose
from tidewal.runtime.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MessageTooLarge,
    Overloaded,
    TopicNotFound,
    Unavailable,
)
from tidewal.runtime.log.fragments import FragmentAssembler, fragments_of
from tidewal.runtime.log.record import Record, RecordType, decode
from tidewal.runtime.testing.clock import VirtualLoop


@asynccontextmanager
async def served(client: tidewal.Client, handle, **options) -> AsyncIterator[tidewal.TopicMember]:
    """A member that serves the topic `sums`."""
    async with await client.subscribe("sums", "adders") as member:
        loop = asyncio.get_running_loop()
        clock = HybridClock(loop.clock if isinstance(loop, VirtualLoop) else None)
        serving = asyncio.create_task(tidewal.serve(member, handle, clock=clock, **options))
        try:
            yield member
        finally:
            await member.aclose()
            await serving


async def double(message: tidewal.TopicMessage) -> str:
    return str(2 * int(bytes(message.body)))


@pytest.mark.every_log
async def test_each_client_gets_the_replies_to_its_own_requests(home) -> None:
    async with home.node() as node, node.client() as client, node.client() as other:
        await client.create_topic("sums", 3)
        async with served(client, double):
            asked = [(each, number) for number in range(20) for each in (client, other)]
            keys = [None, "a", b"b"]
            replies = await asyncio.gather(
                *(each.ask("sums", str(number), key=keys[number % 3], deadline_s=60) for each, number in asked)
            )
            assert [int(reply.body) for reply in replies] == [2 * number for _, number in asked]
            assert isinstance(await home.error_of(client.ask("nothing", "1")), TopicNotFound)


async def test_a_handler_gets_the_request_and_a_plain_message_waits_for_no_reply(home) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_topic("sums", 1)
        await client.send("sums", "plain", tags={"unit": "m"})
        asking = asyncio.create_task(client.ask("sums", "asked", tags={"unit": "m"}, deadline_s=60))
        async with await client.subscribe("sums", "adders") as member:
            found: list[tidewal.TopicMessage] = []
            async for pack in member:
                found += pack.messages
                if len(found) == 2:
                    plain, asked = found
                    assert plain.request is None
                    assert asked.tags == plain.tags == {"unit": "m"}
                    assert asked.request is not None
                    with pytest.raises(InvalidRequest, match="nobody waits"):
                        await member.reply(plain, "?")
                    with pytest.raises(InvalidRequest, match="tag of a reply"):
                        await member.reply(asked, "?", tags={"unit": object()})  # type: ignore[dict-item]
                    assert not await member.repeat_reply(asked)
                    await member.reply(asked, b"\x00\xff", tags={"unit": "cm", "n": 7})
                await member.acknowledge(pack)
                if len(found) == 2:
                    break
        reply = await asking
        assert (reply.body, reply.tags) == (b"\x00\xff", {"unit": "cm", "n": 7})


async def test_an_error_of_the_handler_is_the_reply_and_serving_goes_on(home) -> None:
    async def handle(message: tidewal.TopicMessage) -> bytes | None:
        match bytes(message.body):
            case b"refuse":
                raise InvalidRequest("not a number", argument="body")
            case b"large":
                return bytes(65 * 1024 * 1024)
            case _:
                return None

    async with home.node() as node, node.client() as client:
        await client.create_topic("sums", 1)
        async with served(client, handle):
            with pytest.raises(InvalidRequest, match="not a number") as refused:
                await client.ask("sums", "refuse", deadline_s=60)
            assert refused.value.argument == "body"
            with pytest.raises(MessageTooLarge):
                await client.ask("sums", "large", deadline_s=60)
            assert (await client.ask("sums", "nothing", deadline_s=60)).body == b""


async def test_what_a_member_did_not_acknowledge_is_served_again_under_the_same_id(home) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_topic("sums", 1)
        asking = asyncio.create_task(client.ask("sums", "21", deadline_s=60))
        async with await client.subscribe("sums", "adders") as member:
            (first,) = (await anext(member)).messages  # and its process dies before it replies
        seen: list[tidewal.TopicRequest | None] = []

        async def handle(message: tidewal.TopicMessage) -> str:
            seen.append(message.request)
            return await double(message)

        async with served(client, handle):
            assert (await asking).body == b"42"
        assert first.request is not None
        assert seen == [first.request]


async def test_a_reply_that_is_lost_is_repeated_and_its_request_is_not_served_twice(home, monkeypatch) -> None:
    append, lost = TopicReplies._append, Counter[str]()

    async def lossy(self, request: TopicRequest, payloads) -> None:
        lost[request.id] += 1
        if lost[request.id] > 2:
            await append(self, request, payloads)

    monkeypatch.setattr(TopicReplies, "_append", lossy)
    monkeypatch.setattr(requests, "FIRST_REPEAT_S", 0.02)
    calls: Counter[bytes] = Counter()

    async def handle(message: tidewal.TopicMessage) -> str:
        calls[bytes(message.body)] += 1
        return await double(message)

    async with home.node() as node, node.client() as client:
        await client.create_topic("sums", 4)
        async with served(client, handle):
            replies = await asyncio.gather(*(client.ask("sums", str(number), deadline_s=60) for number in range(8)))
    assert [int(reply.body) for reply in replies] == [2 * number for number in range(8)]
    assert set(calls.values()) == {1}, "all repetitions of a request lie in one partition"


async def test_a_request_that_nobody_serves_ends_with_its_deadline_and_is_not_served_later(home, monkeypatch) -> None:
    monkeypatch.setattr(requests, "DRIFT_MS", -60_000)  # as if a minute had passed since
    async with home.node() as node, node.client() as client:
        await client.create_topic("sums", 1)
        with pytest.raises(DeadlineExceeded, match="topic sums") as over:
            await client.ask("sums", "1", deadline_s=0.5)
        assert over.value.outcome_unknown
        calls: Counter[bytes] = Counter()

        async def handle(message: tidewal.TopicMessage) -> str:
            calls[bytes(message.body)] += 1
            return await double(message)

        async with served(client, handle):
            assert (await client.ask("sums", "2", deadline_s=600)).body == b"4"
        assert calls == {b"2": 1}


async def test_a_client_that_is_gone_stops_no_server(home) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_topic("sums", 1)
        async with node.client() as gone:
            asking = asyncio.create_task(gone.ask("sums", "1", deadline_s=60))
            async with await client.subscribe("sums", "others") as member:
                await anext(member)  # the request is durable
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
        async with served(client, double):
            assert (await client.ask("sums", "2", deadline_s=60)).body == b"4"


async def test_a_handler_that_fails_is_called_again_where_a_policy_says_so(home) -> None:
    calls: Counter[bytes] = Counter()

    async def handle(message: tidewal.TopicMessage) -> str:
        calls[bytes(message.body)] += 1
        if calls[bytes(message.body)] < 3:
            raise ArithmeticError
        return await double(message)

    retry = tidewal.RetryPolicy(attempts=5, first_pause_s=0.001)
    async with home.node() as node, node.client() as client:
        await client.create_topic("sums", 1)
        async with served(client, handle, retry=retry):
            assert (await client.ask("sums", "2", deadline_s=60)).body == b"4"
    assert calls == {b"2": 3}


async def test_a_request_that_a_handler_holds_for_too_long_or_gives_back_is_served_again(home) -> None:
    calls: Counter[bytes] = Counter()

    async def handle(message: tidewal.TopicMessage) -> str:
        calls[bytes(message.body)] += 1
        match calls[bytes(message.body)]:
            case 1:
                await asyncio.Event().wait()  # for ever
            case 2:
                raise tidewal.Nack("not yet", delay_s=0.01)
        return await double(message)

    retry = tidewal.RetryPolicy(attempts=3, first_pause_s=0.001, ack_timeout_s=0.05)
    async with home.node() as node, node.client() as client:
        await client.create_topic("sums", 1)
        async with served(client, handle, retry=retry):
            assert (await client.ask("sums", "2", deadline_s=60)).body == b"4"
    assert calls == {b"2": 3}


@pytest.mark.parametrize("extends", [False, True])
async def test_what_a_handler_makes_after_its_time_is_no_reply(home, extends: bool) -> None:
    calls = 0

    async def handle(message: tidewal.TopicMessage) -> str:
        nonlocal calls
        calls += 1
        if calls > 1:
            return "good"
        with suppress(asyncio.CancelledError):  # as a library that takes it for a failure of its own
            await asyncio.Event().wait()
        if extends:
            tidewal.extend_ack_timeout(10)
        return "late"

    retry = tidewal.RetryPolicy(attempts=5, first_pause_s=0.001, ack_timeout_s=0.05)
    async with home.node() as node, node.client() as client:
        await client.create_topic("sums", 1)
        async with served(client, handle, retry=retry):
            assert (await client.ask("sums", "2", deadline_s=60)).body == b"good"


async def test_a_reply_counts_while_the_request_is_being_repeated(home, monkeypatch) -> None:
    monkeypatch.setattr(requests, "FIRST_REPEAT_S", 0.05)
    repeated, sends = asyncio.Event(), 0

    async def handle(message: tidewal.TopicMessage) -> str:
        await repeated.wait()
        return "4"

    async with home.node() as node, node.client() as client:
        await client.create_topic("sums", 1)
        send = client.send

        async def stalls(*arguments, **named):
            nonlocal sends
            sends += 1
            if sends == 2:
                raise Overloaded("not now")
            if sends > 2:
                repeated.set()
                await asyncio.Event().wait()
            return await send(*arguments, **named)

        monkeypatch.setattr(client, "send", stalls)
        async with served(client, handle):
            assert (await client.ask("sums", "2", deadline_s=60)).body == b"4"
    assert sends == 3


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("no file \udcff"), InvalidRequest("no", argument={1}), InvalidRequest("no", size=1 << 70)],
    ids=["text", "set", "large"],
)
async def test_an_error_that_cannot_be_sent_as_it_is_ends_no_server(home, error: InvalidRequest) -> None:
    async def handle(message: tidewal.TopicMessage) -> str:
        if bytes(message.body) == b"bad":
            raise error
        return "ok"

    async with home.node() as node, node.client() as client:
        await client.create_topic("sums", 1)
        async with served(client, handle):
            assert isinstance(await home.error_of(client.ask("sums", "bad", deadline_s=60)), InvalidRequest)
            assert (await client.ask("sums", "good", deadline_s=60)).body == b"ok"


async def test_a_reply_that_could_not_be_sent_is_remembered(home, monkeypatch) -> None:
    monkeypatch.setattr(requests, "FIRST_REPEAT_S", 0.05)
    calls = 0

    async def handle(message: tidewal.TopicMessage) -> str:
        nonlocal calls
        calls += 1
        monkeypatch.setattr(type(member.wal), "describe", refuses)
        return "4"

    async with home.node() as node, node.client() as client:
        await client.create_topic("sums", 1)
        async with served(client, handle) as member:
            describe = type(member.wal).describe

            async def refuses(wal, name):
                monkeypatch.setattr(type(member.wal), "describe", describe)
                raise Unavailable("for a moment")

            assert (await client.ask("sums", "2", deadline_s=60)).body == b"4"
    assert calls == 1


def test_fragments_of_two_replies_to_one_request_are_not_mixed() -> None:
    assembler = FragmentAssembler(1 << 20)
    replies = [
        fragments_of(Record(RecordType.REPLY, producer="c", pseq=7, body=body * 3_000), 1_000, 1 << 20, sender=sender)
        for sender, body in enumerate((b"A", b"B"))
    ]
    whole = [assembler.take(decode(each, b"")) for pair in zip(*replies, strict=True) for each in pair]
    assert [bytes(each.body) for each in whole if each is not None] == [b"A" * 3_000, b"B" * 3_000]


def test_a_request_is_over_once_no_clock_can_say_that_it_is_waited_for() -> None:
    found = request_of({CLIENT: "c", NUMBER: 7, WAITS: 500}, compose(1_000))
    assert found == TopicRequest("c", 7, 1_500)
    assert found.id == "c-7"
    assert not found.is_over(1_500 + DRIFT_MS)
    assert found.is_over(1_501 + DRIFT_MS)
    assert request_of({CLIENT: "c", NUMBER: "7", WAITS: 500}, 0) is None
    assert request_of({}, 0) is None
