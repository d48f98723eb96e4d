"""Transactions through the client: readers see all of one or nothing, whatever ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from tests.actors.test_topics import read
from tidewal.actors.client import Client
from tidewal.actors.proxy import Proxy
from tidewal.actors.transactions import buffer
from tidewal.actors.transactions.transaction import Transaction, TransactionResult
from tidewal.runtime.errors import (
    CollectionNotFound,
    DeadlineExceeded,
    InvalidRequest,
    InvalidRows,
    MessageTooLarge,
    Overloaded,
    TopicNotFound,
)
from tidewal.runtime.rows.schema import CollectionSchema, Field

NUMBERS = CollectionSchema("numbers", (Field("id", "int64"), Field("value", "int64")), "id")
KEYS = range(8)


async def prepared(client: Client, people: CollectionSchema) -> None:
    await client.create_collection(people)
    await client.create_collection(NUMBERS, shards=3)
    await client.create_topic("events", 2)


async def counts(client: Client, **when: Any) -> tuple[int, int]:
    when = when or {"consistency": "strong"}
    return await client.count("people", **when), await client.count("numbers", **when)


def lose_answers(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no answer to a commit reach the client."""
    ask = client._rpc.call

    async def answer_is_lost(role: str, method: str, *arguments: Any, **named: Any) -> Any:
        reply = await ask(role, method, *arguments, **named)
        if method == "commit":
            raise DeadlineExceeded("no answer")
        return reply

    monkeypatch.setattr(client._rpc, "call", answer_is_lost)


async def test_a_transaction_is_there_at_one_time_in_collections_and_topics(home) -> None:
    async with home.client() as client:
        await prepared(client, home.PEOPLE)
        await client.insert("people", home.people(1, 2))
        async with client.transaction() as t:
            await t.insert("people", home.people(3, 4))
            await t.delete("people", [1, 4])
            await t.upsert("numbers", [{"id": n, "value": n} for n in KEYS])
            await t.apply(
                "numbers", [{"_op": "delete", "id": 0, "value": None}, {"_op": "insert", "id": 99, "value": 1}]
            )
            await t.send("events", ["a", "b"], key="k", tags={"n": 1})
            await t.send("events", "c", key="k")
            assert await counts(client) == (2, 0), "nothing before the commit"
        assert t.result == TransactionResult(t.result.ts, 14, 3)
        assert await counts(client, at=t.result.ts) == (2, 8)
        assert await counts(client, at=t.result.ts - 1) == (2, 0)
        assert await counts(client, consistency="session") == (2, 8)
        rows = (await client.query("people", order_by=[("id", True)], at=t.result.ts)).table
        assert rows["id"].to_pylist() == [2, 3], "in the order of the calls"
        async with await client.subscribe("events", "g") as member:
            pack = await anext(member)
            assert [bytes(each.body) for each in pack.messages] == [b"a", b"b", b"c"]
            assert {each.ts for each in pack.messages} == {t.result.ts}
        assert await t.commit() == t.result, "once"
        assert await counts(client) == (2, 8)


async def test_what_is_rolled_back_or_ends_with_an_error_is_not_written(home) -> None:
    async with home.client() as client:
        await prepared(client, home.PEOPLE)

        async def filled(t: Transaction) -> None:
            await t.insert("people", home.people(1))
            await t.insert("numbers", [{"id": 1, "value": 1}])
            await t.send("events", "x")

        failed = client.transaction()
        with suppress(KeyError):
            async with failed:
                await filled(failed)
                raise KeyError
        async with client.transaction() as rolled_back:
            await filled(rolled_back)
            rolled_back.rollback()
            rolled_back.rollback()
        for ended in (failed, rolled_back):
            assert ended.result is None
            assert isinstance(await home.error_of(ended.commit()), InvalidRequest)
            assert isinstance(await home.error_of(ended.insert("people", home.people(2))), InvalidRequest)
        async with client.transaction() as refused:
            await filled(refused)
            assert isinstance(await home.error_of(refused.insert("people", [{"name": "no key"}])), InvalidRows)
            assert isinstance(await home.error_of(refused.insert("towns", [{"id": 1}])), CollectionNotFound)
            assert isinstance(await home.error_of(refused.send("other", "x")), TopicNotFound)
            refused.rollback()
        async with client.transaction() as nothing:
            await nothing.insert("people", [])
        assert nothing.result == TransactionResult(0, 0, 0)
        assert await counts(client) == (0, 0)
        async with client.transaction() as t:
            await filled(t)
        with pytest.raises(InvalidRequest, match="was committed"):
            t.rollback()
        assert await counts(client) == (1, 1)
        async with await client.subscribe("events", "g") as member:
            assert sum(map(len, (await read(member, 1)).values())) == 1


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
async def test_a_call_that_was_not_awaited_is_not_left_out(home) -> None:
    async with home.people_client() as client:
        t = client.transaction()
        await t.insert("people", home.people(1))
        t.insert("people", home.people(2))
        with pytest.raises(InvalidRequest, match="1 calls of the transaction were not awaited"):
            await t.commit()
        assert await client.count("people", consistency="strong") == 0


async def test_what_was_given_may_be_changed_before_the_commit(home) -> None:
    async with home.people_client() as client:
        rows = home.people(1, 2)
        async with client.transaction() as t:
            await t.insert("people", rows)
            rows.clear()
        assert await client.count("people", consistency="strong") == 2


async def test_what_is_over_a_limit_is_refused_and_the_rest_stays(home, monkeypatch) -> None:
    monkeypatch.setattr(buffer, "TRANSACTION_BYTES_MAX", 4_000)
    monkeypatch.setattr(buffer, "PARTICIPANTS_MAX", 2)
    async with home.client() as client:
        await prepared(client, home.PEOPLE)
        async with client.transaction() as t:
            for _ in range(3):
                await t.send("events", b"x" * 1_000, key="k")
            error = await home.error_of(t.send("events", b"x" * 1_000))
            assert isinstance(error, MessageTooLarge)
            assert error.limit == 4_000 < error.size < 4_100
            many = t.insert("people", home.people(*range(1_000)))
            assert isinstance(await home.error_of(many), MessageTooLarge)
            await t.insert("people", home.people(1))
            error = await home.error_of(t.insert("numbers", [{"id": 1, "value": 1}]))
            assert isinstance(error, InvalidRequest)
            assert "2 collections and topics" in error.message
        assert (t.result.rows, t.result.messages) == (1, 3)
        assert await counts(client) == (1, 0)
        monkeypatch.undo()
        async with client.transaction() as t:
            await t.send("events", [b""] * 900)
            assert isinstance(await home.error_of(t.send("events", [b""] * 9_101)), InvalidRequest), "10,000 messages"
        assert t.result.messages == 900


@pytest.mark.parametrize("gone", ["collection", "topic"])
@pytest.mark.parametrize("again", [False, True], ids=["dropped", "another"])
async def test_what_was_dropped_meanwhile_ends_the_transaction(home, gone: str, again: bool) -> None:
    async with home.node() as node, node.client() as client, node.client() as other:
        await prepared(client, home.PEOPLE)

        async def drop() -> None:
            if gone == "topic":
                await other.drop_topic("events")
                await (other.create_topic("events", 2) if again else asyncio.sleep(0))
            else:
                await other.drop_collection("numbers")
                await (other.create_collection(NUMBERS, shards=3) if again else asyncio.sleep(0))

        async def write(before_commit: Callable[[], Any]) -> None:
            async with client.transaction() as t:
                await t.insert("people", home.people(1))
                await t.insert("numbers", [{"id": 1, "value": 1}])
                await t.send("events", "x")
                await before_commit()

        error = await home.error_of(write(drop))
        assert isinstance(error, (CollectionNotFound, TopicNotFound, InvalidRows)), error
        assert not (home.virtual and error.fields.get("outcome_unknown")), "on a busy machine it was asked twice"
        assert await client.count("people", consistency="strong") == 0
        if again:  # the client describes it anew
            await write(lambda: asyncio.sleep(0))
            assert await counts(client) == (1, 1)
        else:
            assert isinstance(await home.error_of(write(lambda: asyncio.sleep(0))), (CollectionNotFound, TopicNotFound))
            assert await client.count("people", consistency="strong") == 0


async def test_a_topic_that_is_altered_meanwhile_ends_the_transaction_unless_it_is_written(home, monkeypatch) -> None:
    async with home.node() as node, node.client() as client, node.client() as other:
        await prepared(client, home.PEOPLE)

        async def filled(id: int) -> Transaction:
            t = client.transaction()
            await t.insert("people", home.people(id))
            await t.send("events", f"event {id}", key="k")
            return t

        before = await filled(1)
        await other.alter_topic("events", 3)
        error = await home.error_of(before.commit())
        assert isinstance(error, TopicNotFound), error
        assert not (home.virtual and error.fields.get("outcome_unknown")), "on a busy machine it was asked twice"
        assert await client.count("people", consistency="strong") == 0

        written = await filled(2)
        lose_answers(client, monkeypatch)
        assert isinstance(await home.error_of(written.commit()), DeadlineExceeded)
        monkeypatch.undo()
        await other.alter_topic("events", 2)
        assert (await written.commit()).messages == 1
        assert await client.count("people", consistency="strong") == 1
        async with await client.subscribe("events", "readers") as member:
            assert [each for found in (await read(member, 1)).values() for each in found] == [(b"k", b"event 2")]


async def test_a_commit_of_unknown_outcome_is_repeated_and_happens_once(home, monkeypatch) -> None:
    async with home.people_client() as client:
        t = client.transaction()
        await t.insert("people", home.people(1, 2))
        lose_answers(client, monkeypatch)
        assert isinstance(await home.error_of(t.commit()), DeadlineExceeded)
        monkeypatch.undo()
        await client.upsert("people", home.people(1, name="later"))
        for call in (t.insert("people", home.people(3)),):
            assert isinstance(await home.error_of(call), InvalidRequest)
        with pytest.raises(InvalidRequest):
            t.rollback()
        result = await t.commit()
        assert result.rows == 2
        assert (await client.stats("people", consistency="strong")).versions == {"insert": 2, "upsert": 1, "delete": 0}
        assert (await client.get("people", [1], consistency="strong")).table["name"].to_pylist() == ["later"]
        # refused for certain on repeating: what the first attempt did is not known by that
        t = client.transaction()
        await t.insert("people", home.people(5))
        lose_answers(client, monkeypatch)
        assert isinstance(await home.error_of(t.commit()), DeadlineExceeded)
        monkeypatch.undo()
        await client.drop_collection("people")
        error = await home.error_of(t.commit())
        assert error.outcome_unknown, error


async def test_a_commit_that_is_refused_for_now_may_be_called_again(home, monkeypatch) -> None:
    def deny(_: Proxy) -> None:
        raise Overloaded("not now")

    async with home.people_client() as client:
        t = client.transaction()
        await t.insert("people", home.people(1))
        monkeypatch.setattr(Proxy, "_check_not_denied", deny)
        assert isinstance(await home.error_of(t.commit()), Overloaded)
        monkeypatch.undo()
        await t.insert("people", home.people(2))
        assert (await t.commit()).rows == 2
        assert await client.count("people", consistency="strong") == 2


async def test_a_commit_has_its_place_among_the_writes_of_its_client(home) -> None:
    async with home.people_client() as client:
        for round in range(20):
            t = client.transaction()
            await t.upsert("people", home.people(1, name=f"second {round}"))
            await asyncio.gather(
                client.upsert("people", home.people(1, name="first")),
                t.commit(),
                client.upsert("people", home.people(1, name=f"third {round}")),
            )
            found = (await client.get("people", [1], consistency="strong")).table["name"].to_pylist()
            assert found == [f"third {round}"]
            assert (await client.get("people", [1], at=t.result.ts)).table["name"].to_pylist() == [f"second {round}"]


async def test_a_commit_stands_behind_a_send_that_goes_on_in_other_partitions(home, monkeypatch) -> None:
    async with home.node() as node, node.client() as client, node.client() as other:
        await client.create_topic("events", 1)
        await client.send("events", "0", key="k")
        ask, altered = client._rpc.call, asyncio.Event()

        async def late(role: str, method: str, *arguments: Any, **named: Any) -> Any:
            if method == "send":
                await altered.wait()
            return await ask(role, method, *arguments, **named)

        async def transaction() -> None:
            async with client.transaction() as t:
                await t.send("events", "2", key="k")

        monkeypatch.setattr(client._rpc, "call", late)
        first = asyncio.create_task(client.send("events", "1", key="k"))
        await asyncio.sleep(0)
        await client.alter_topic("events", 2)
        second = asyncio.create_task(transaction())
        for _ in range(20):
            await asyncio.sleep(0)
        altered.set()
        await asyncio.gather(first, second)
        async with await other.subscribe("events", "readers") as member:
            found: list[bytes] = []
            while len(found) < 3:
                pack = await anext(member)
                found += [bytes(message.body) for message in pack.messages]
                await member.acknowledge(pack)
        assert found == [b"0", b"1", b"2"]


async def test_calls_at_once_keep_their_order_though_a_description_is_late(home, monkeypatch) -> None:
    async with home.node() as node, node.client() as client, node.client() as other:
        await other.create_topic("events", 1)
        ask, described, release = client._rpc.call, 0, asyncio.Event()

        async def first_is_late(role: str, method: str, *arguments: Any, **named: Any) -> Any:
            nonlocal described
            reply = await ask(role, method, *arguments, **named)
            if method == "describe_topic":
                described += 1
                if described == 1:
                    await asyncio.wait([asyncio.ensure_future(release.wait())], timeout=0.2)
            return reply

        monkeypatch.setattr(client._rpc, "call", first_is_late)
        async with client.transaction() as t:
            await asyncio.gather(t.send("events", "1", key="k"), t.send("events", "2", key="k"))
        monkeypatch.undo()
        release.set()
        async with await other.subscribe("events", "readers") as member:
            assert [bytes(each.body) for each in (await anext(member)).messages] == [b"1", b"2"]


async def test_no_read_sees_half_of_a_transaction(home) -> None:
    """Each transaction sets all numbers, and the heights of two people, to the next value."""
    async with home.client() as client:
        await prepared(client, home.PEOPLE)
        done = asyncio.Event()

        async def write() -> None:
            for value in range(30):
                async with client.transaction() as t:
                    await t.upsert("numbers", [{"id": n, "value": value} for n in KEYS])
                    await t.upsert("people", [{"id": n, "name": "x", "height": float(value)} for n in (1, 2)])
                await asyncio.sleep(0.005)
            done.set()

        async def ask() -> int:
            asked = 0
            while not done.is_set():
                for consistency in ("strong", "bounded", "eventually"):
                    numbers = await client.query("numbers", consistency=consistency)
                    values = numbers.table["value"].to_pylist()
                    assert len(values) in (0, len(KEYS)), consistency
                    assert len(set(values)) <= 1, consistency
                    people = (await client.query("people", at=numbers.tsafe)).table["height"].to_pylist()
                    assert set(people) == set(map(float, values)), consistency
                    asked += 1
                await asyncio.sleep(0.001)
            return asked

        _, asked = await asyncio.gather(write(), ask())
        assert asked > 3


@pytest.mark.every_log
async def test_a_log_that_takes_no_channels_at_once_has_a_transaction_prepared_in_each(home, monkeypatch) -> None:
    async with home.node() as node, node.client() as client:
        await prepared(client, home.PEOPLE)
        before = node.node.cluster.state.transactions.count
        for number, lacks in enumerate(({"atomic_batches": False}, {"one_node": False}), 1):
            monkeypatch.setattr(node.wal, "capabilities", replace(node.wal.capabilities, **lacks))
            async with client.transaction() as t:
                await t.insert("people", home.people(number))
                await t.upsert("numbers", [{"id": n, "value": number} for n in KEYS])
                await t.send("events", "x")
            for at, people in ((t.result.ts - 1, number - 1), (t.result.ts, number)):
                assert await client.count("people", at=at) == people
            numbers = await client.query("numbers", consistency="strong")
            assert set(numbers.table["value"].to_pylist()) == {number}
            assert node.node.cluster.state.transactions.count == before + number
            assert (await t.commit()).ts == t.result.ts
            monkeypatch.undo()
