"""A group's position as a part of a transaction: what is consumed, and what is made from it, are one write."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.actors.test_topics import read
from tests.actors.test_transactions import lose_answers
from tidewal.actors.client import DEADLINE_S, Client
from tidewal.actors.node import Node
from tidewal.actors.proxy import Proxy
from tidewal.actors.sync_standalone import standalone_sync
from tidewal.actors.topics.member import TopicMember
from tidewal.actors.topics.messages import TopicPack
from tidewal.actors.transactions import inputs
from tidewal.actors.transactions.transaction import Transaction
from tidewal.runtime.errors import (
    AckTimeout,
    DeadlineExceeded,
    Fenced,
    InvalidRequest,
    OutcomeUnknown,
    Overloaded,
    Unavailable,
    Unsupported,
)
from tidewal.runtime.groups.group_consumer import GroupConsumer
from tidewal.runtime.groups.processing import Semantics, process
from tidewal.runtime.groups.retry_policy import RetryPolicy
from tidewal.runtime.testing.memory import MemoryWal

IN, OUT, PEOPLE = "in", "out", "people"


class DecidingWal(MemoryWal):
    """As brokers are: positions and appends are no commit, and the nodes decide what a transaction does of both."""

    capabilities = replace(
        MemoryWal.capabilities, atomic_acks=False, atomic_batches=False, one_node=False, one_machine=False
    )


@pytest.fixture(autouse=True, params=["decided", "one commit"])
def commits(request: pytest.FixtureRequest) -> str:
    """How the position of a group is a part of a transaction."""
    if "home" in request.fixturenames:
        home = request.getfixturevalue("home")
        if request.param == "decided":
            home.memory = DecidingWal
            if not home.on_brokers:
                home.url = f"file://{home.log_directory}"
        elif home.on_brokers:
            pytest.skip("brokers have no such commit")
    elif request.param == "decided":
        pytest.skip("the node has RocksMQ")
    return request.param


async def prepared(client: Client, home) -> None:
    await client.create_collection(home.PEOPLE)
    await client.create_topic(IN, 1)
    await client.create_topic(OUT, 2)


async def transform(t: Transaction, home, pack: TopicPack) -> None:
    """What is made from a pack: a row and a message for each of its messages."""
    for message in pack.messages:
        await t.insert(PEOPLE, home.people(int(bytes(message.body))))
        await t.send(OUT, bytes(message.body))


async def stopped(node: Node, member: TopicMember) -> None:
    """The member stands still, until its session has ended at the coordinator: it does not know that."""
    for task in member._member._tasks:
        task.cancel()
    await (await node.wal._coordinator_client()).leave(member.group, member.id)


async def outputs(client: Client) -> tuple[int, list[int]]:
    """The rows of the collection in all their versions, and the messages that were sent on, in order."""
    rows = (await client.stats(PEOPLE, consistency="strong")).versions["insert"]
    async with await client.subscribe(OUT, "counter") as member:
        got = await read(member, rows) if rows else {}
    return rows, sorted(int(body) for each in got.values() for _, body in each)


async def filled(
    client: Client, home, member: TopicMember, pack: TopicPack, deadline_s: float = DEADLINE_S
) -> Transaction:
    """A transaction that has what is made from a pack, and its acknowledgement."""
    t = client.transaction(deadline_s=deadline_s)
    await transform(t, home, pack)
    await t.acknowledge(member, pack)
    return t


async def committed(client: Client, home, member: TopicMember, packs: Sequence[TopicPack]) -> None:
    """What is made from packs, and their acknowledgement."""
    async with client.transaction() as t:
        for pack in packs:
            await transform(t, home, pack)
            await t.acknowledge(member, pack)


@pytest.mark.every_log
async def test_what_is_consumed_is_acknowledged_with_what_is_made_from_it(home) -> None:
    async with home.client() as client:
        await prepared(client, home)
        async with await client.subscribe(IN, "g") as member:
            await client.send(IN, ["1", "2"])
            pack = await anext(member)
            async with client.transaction() as t:
                await transform(t, home, pack)
                await t.acknowledge(member, pack)
            assert (t.result.rows, t.result.messages) == (len(pack), len(pack))
            again = client.transaction()
            await again.insert(PEOPLE, home.people(9))
            await again.acknowledge(member, pack)
            with pytest.raises(InvalidRequest, match="acknowledged"):
                await again.commit()
        await client.send(IN, "3")
        async with await client.subscribe(IN, "g") as member:
            left = [int(body) for got in (await read(member, 3 - len(pack))).values() for _, body in got]
        assert left == [1, 2, 3][len(pack) :]
        assert await outputs(client) == (len(pack), [1, 2][: len(pack)])


async def test_what_is_rolled_back_acknowledges_nothing(home) -> None:
    async with home.client() as client:
        await prepared(client, home)
        await client.send(IN, "1")
        async with await client.subscribe(IN, "g") as member:
            pack = await anext(member)
            async with client.transaction() as t:
                await transform(t, home, pack)
                await t.acknowledge(member, pack)
                t.rollback()
            member.redeliver(pack)
            pack = await anext(member)
            async with client.transaction() as t:  # of nothing but the acknowledgement
                await t.acknowledge(member, pack)
            assert t.result.ts == 0
            with pytest.raises(InvalidRequest, match="acknowledged"):
                await member.commit([pack], [])
        assert await outputs(client) == (0, [])


@pytest.mark.every_log
async def test_a_member_that_lost_its_lease_between_body_and_commit_writes_nothing(home) -> None:
    """Schedule 6: the first member stops with a transaction that is filled, the second takes over, the first wakes."""
    async with home.node() as node, node.client() as client, node.client() as other:
        await prepared(client, home)
        await client.send(IN, "1")
        first = await client.subscribe(IN, "g")
        pack = await anext(first)
        asleep = await filled(client, home, first, pack)
        await stopped(node, first)
        async with await other.subscribe(IN, "g") as second:
            taken = await anext(second)
            async with other.transaction() as t:
                await transform(t, home, taken)
                await t.acknowledge(second, taken)
            with pytest.raises(Fenced):
                await asleep.commit()
            with pytest.raises(Fenced):
                await asleep.commit()  # and for ever
            asleep.rollback()
        await first.aclose()
        assert await outputs(client) == (1, [1])


@pytest.mark.every_log
async def test_the_commit_that_reaches_the_log_behind_the_hand_over_is_refused_there(home, monkeypatch) -> None:
    """Schedule 6, later: the member was right when it sent the commit, and is not any more when the owner has it."""
    async with home.node() as node, node.client() as client, node.client() as other:
        await prepared(client, home)
        await client.send(IN, "1")
        first = await client.subscribe(IN, "g")
        pack = await anext(first)
        sent, released = asyncio.Event(), asyncio.Event()
        append = Proxy._append_transaction

        async def late(proxy: Proxy, request):
            if "acks" in request.params and not released.is_set():
                sent.set()
                await released.wait()
            return await append(proxy, request)

        monkeypatch.setattr(Proxy, "_append_transaction", late)
        t = await filled(client, home, first, pack)
        committing = asyncio.create_task(t.commit())
        await sent.wait()
        await stopped(node, first)
        async with await other.subscribe(IN, "g") as second:
            taken = await anext(second)
            released.set()
            with pytest.raises(Fenced) as caught:
                await committing
            assert caught.value.fields["group"] == "g"
            async with other.transaction() as again:
                await transform(again, home, taken)
                await again.acknowledge(second, taken)
        await first.aclose()
        assert await outputs(client) == (1, [1])


@pytest.mark.every_log
async def test_a_commit_of_unknown_outcome_is_told_and_not_delivered_again(home, monkeypatch) -> None:
    async with home.client() as client:
        await prepared(client, home)
        await client.send(IN, "1")
        async with await client.subscribe(IN, "g") as member:
            pack = await anext(member)
            t = await filled(client, home, member, pack, deadline_s=1.0)
            lose_answers(client, monkeypatch)
            assert isinstance(await home.error_of(t.commit()), DeadlineExceeded)
            monkeypatch.undo()
            await client.send(IN, "2")
            assert [int(bytes(each.body)) for each in (await anext(member)).messages] == [2]
            assert (await t.commit()).rows == 1
        assert await outputs(client) == (1, [1])


async def test_a_commit_that_was_never_sent_is_delivered_again_and_refused(home, monkeypatch) -> None:
    """The other half: of an unknown outcome that was not written, the pack comes again, and the commit cannot land."""
    async with home.client() as client:
        await prepared(client, home)
        await client.send(IN, "1")
        async with await client.subscribe(IN, "g") as member:
            pack = await anext(member)
            t = await filled(client, home, member, pack, deadline_s=1.0)
            ask = client._rpc.call

            async def lost(role: str, method: str, *arguments, **named):
                if method == "commit":
                    raise DeadlineExceeded("no answer")
                return await ask(role, method, *arguments, **named)

            monkeypatch.setattr(client._rpc, "call", lost)
            error = await home.error_of(t.commit())
            assert isinstance(error, DeadlineExceeded)
            assert error.fields["outcome_unknown"]  # else it was too slow to send it, and nothing comes again
            monkeypatch.undo()
            again = await anext(member)
            with pytest.raises(Fenced):
                await t.commit()
            async with client.transaction() as second:
                await transform(second, home, again)
                await second.acknowledge(member, again)
        assert await outputs(client) == (1, [1])


async def test_a_refusal_for_now_leaves_the_input_to_the_transaction(home, monkeypatch) -> None:
    def deny(_: Proxy) -> None:
        raise Overloaded("not now")

    async with home.client() as client:
        await prepared(client, home)
        await client.send(IN, "1")
        async with await client.subscribe(IN, "g") as member:
            pack = await anext(member)
            t = await filled(client, home, member, pack)
            monkeypatch.setattr(Proxy, "_check_not_denied", deny)
            assert isinstance(await home.error_of(t.commit()), Overloaded)
            monkeypatch.undo()
            await t.commit()
        assert await outputs(client) == (1, [1])


@pytest.mark.every_log
async def test_an_attempt_whose_ack_timeout_fires_as_it_commits_counts_once(home) -> None:
    """Schedule 7: the handler goes on over the end of its attempt, and commits: it is refused, the next one counts."""
    async with home.node() as node, node.client() as client:
        await prepared(client, home)
        await client.send(IN, "1")
        attempts, over = 0, []
        async with await client.subscribe(IN, "g") as member:

            async def handle(pack: TopicPack) -> None:
                nonlocal attempts
                attempts += 1
                t = await filled(client, home, member, pack)
                if attempts == 1:
                    try:
                        await asyncio.Event().wait()
                    except asyncio.CancelledError:
                        over.append(await home.error_of(t.commit()))
                        return
                await t.commit()

            policy = RetryPolicy(attempts=3, first_pause_s=0.01, ack_timeout_s=0.2)
            await process(node.wal, member, handle, Semantics.AT_LEAST_ONCE, retry=policy, count=1, timeout_s=60)
            assert [type(error) for error in over] == [AckTimeout]
            assert attempts == 2
            await client.send(IN, "2")
            await process(node.wal, member, handle, Semantics.AT_LEAST_ONCE, retry=policy, count=1, timeout_s=60)
        assert attempts == 3
        assert await outputs(client) == (2, [1, 2])


async def test_what_cannot_be_one_commit_is_refused_at_the_call(home, monkeypatch) -> None:
    async with home.client() as client:
        await prepared(client, home)
        await client.send(IN, "1")
        async with await client.subscribe(IN, "g") as member, await client.subscribe(IN, "other") as other:
            pack = await anext(member)
            t = await filled(client, home, member, pack)
            assert isinstance(await home.error_of(t.acknowledge(other, await anext(other))), InvalidRequest)
            monkeypatch.setattr(inputs, "PACKS_MAX", 1)
            assert isinstance(await home.error_of(t.acknowledge(member, pack)), InvalidRequest)
            with monkeypatch.context() as foreign:  # a group of another kind, as an adapter may have
                foreign.setattr(member, "_member", object())
                error = await home.error_of(client.transaction().acknowledge(member, pack))
                assert isinstance(error, Unsupported)
                assert error.capability == "atomic_acks"
            await t.commit()
        assert await outputs(client) == (1, [1])


async def test_each_of_several_packs_is_checked_not_the_last_alone(home) -> None:
    """The first of two packs was acknowledged before, or lost to another member that has committed it."""
    async with home.node() as node, node.client() as client, node.client() as other:
        await prepared(client, home)
        await client.send(IN, "1")
        first = await client.subscribe(IN, "g")
        lost = await anext(first)
        second = await other.subscribe(IN, "g")
        await (await node.wal._coordinator_client()).leave("g", first.id)  # it joins again by itself
        taken = await anext(second)
        async with other.transaction() as t:
            await transform(t, home, taken)
            await t.acknowledge(second, taken)
        await second.aclose()
        await client.send(IN, "2")
        mine = await anext(first)
        assert isinstance(await home.error_of(committed(client, home, first, [lost, mine])), Fenced)
        await committed(client, home, first, [mine])
        await client.send(IN, "3")
        last = await anext(first)
        assert isinstance(await home.error_of(committed(client, home, first, [mine, last])), InvalidRequest)
        assert isinstance(await home.error_of(first.commit([mine, last], [])), InvalidRequest)
        await committed(client, home, first, [last])
        await first.aclose()
        assert await outputs(client) == (3, [1, 2, 3])


async def test_a_pack_of_which_a_part_is_acknowledged_is_refused(home) -> None:
    async with home.client() as client:
        await prepared(client, home)
        await client.send(IN, ["1"])
        await client.send(IN, ["2"])
        async with await client.subscribe(IN, "g") as member:
            pack = await anext(member)
            one, two = pack.parts()
            await committed(client, home, member, [one])
            assert isinstance(await home.error_of(committed(client, home, member, [pack])), InvalidRequest)
            await committed(client, home, member, [two])
        assert await outputs(client) == (2, [1, 2])


async def test_no_commit_passes_over_one_that_is_under_way(home, monkeypatch) -> None:
    """Two transactions of one member at once, the first is refused for now: the second may not move the position."""
    async with home.client() as client:
        await prepared(client, home)
        async with await client.subscribe(IN, "g") as member:
            both = []
            for body in ("1", "2"):
                await client.send(IN, body)
                pack = await anext(member)
                both.append(await filled(client, home, member, pack))
            denied = []

            def deny(_: Proxy) -> None:
                denied.append(1)
                if len(denied) == 1:
                    raise Overloaded("not now")

            monkeypatch.setattr(Proxy, "_check_not_denied", deny)
            errors = await asyncio.gather(*(home.error_of(t.commit()) for t in both))
            monkeypatch.undo()
            assert [type(error) for error in errors] == [Overloaded, InvalidRequest]
            assert "in order" in str(errors[1])
            for t in both:
                await t.commit()
        assert await outputs(client) == (2, [1, 2])


@pytest.mark.parametrize(("semantics", "attempts"), [(Semantics.AT_LEAST_ONCE, 3), (Semantics.EXACTLY_ONCE, 1)])
@pytest.mark.parametrize("ends", ["well", "with an error", "too late"])
async def test_what_a_handler_has_committed_itself_is_done(
    home, ends: str, semantics: Semantics, attempts: int
) -> None:
    async with home.node() as node, node.client() as client:
        await prepared(client, home)
        await client.send(IN, ["1", "2"])
        handled: list[int] = []
        async with await client.subscribe(IN, "g") as member:

            async def handle(pack: TopicPack) -> None:
                handled.extend(int(bytes(each.body)) for each in pack.messages)
                await committed(client, home, member, [pack])
                if ends == "with an error":
                    raise ValueError("behind the commit")
                if ends == "too late":
                    await asyncio.Event().wait()

            policy = RetryPolicy(attempts=attempts, first_pause_s=0.01, ack_timeout_s=0.2)
            await process(node.wal, member, handle, semantics, retry=policy, count=1, timeout_s=60)
            await client.send(IN, "3")
            await process(node.wal, member, handle, semantics, retry=policy, count=1, timeout_s=60)
        assert handled == [1, 2, 3]
        assert await outputs(client) == (3, [1, 2, 3])


async def test_what_is_no_member_or_no_pack_is_refused_with_a_typed_error(home) -> None:
    async with home.client() as client:
        await prepared(client, home)
        await client.send(IN, "1")
        async with await client.subscribe(IN, "g") as member:
            pack = await anext(member)
            wrong = [(pack, member), (None, pack), (member._member, pack), (member, pack.delivered), (member, [pack])]
            for arguments in wrong:
                error = await home.error_of(acknowledged(client.transaction(), *arguments))
                assert isinstance(error, InvalidRequest)


async def acknowledged(t: Transaction, member, pack) -> None:
    await t.acknowledge(member, pack)


def test_a_member_of_another_client_is_refused_in_a_script(tmp_path: Path) -> None:
    with standalone_sync(str(tmp_path)) as node, node.client() as client, node.client() as other:
        client.create_topic(IN, 1)
        client.send(IN, ["1"])
        with client.subscribe(IN, "g") as member:
            pack = next(member)
            for t, got in ((other.transaction(), member), (client.transaction(), member.member)):
                with pytest.raises(InvalidRequest):
                    t.acknowledge(got, pack)
                t.rollback()
            with client.transaction() as t:
                t.acknowledge(member, pack)


@pytest.mark.parametrize("hangs", [False, True])
async def test_acknowledgements_alone_keep_the_deadline_and_their_unknown_outcome(home, monkeypatch, hangs) -> None:
    async with home.client() as client:
        await prepared(client, home)
        await client.send(IN, "1")
        async with await client.subscribe(IN, "g") as member:
            t = client.transaction(deadline_s=0.5)
            await t.acknowledge(member, await anext(member))
            coordinator = member._member._coordinator
            commit = coordinator.commit

            async def lost(*arguments):
                await commit(*arguments)
                if hangs:
                    await asyncio.Event().wait()
                raise Unavailable("the answer is lost", outcome_unknown=True)

            monkeypatch.setattr(coordinator, "commit", lost)
            async with asyncio.timeout(30):
                error = await home.error_of(t.commit())
            monkeypatch.undo()
            assert isinstance(error, DeadlineExceeded if hangs else Unavailable)
            assert error.fields["outcome_unknown"]
            assert "of unknown outcome" in repr(t)
            assert isinstance(await home.error_of(t.commit()), OutcomeUnknown)
            with pytest.raises(InvalidRequest):
                t.rollback()
            await client.send(IN, "2")
            assert [int(bytes(each.body)) for each in (await anext(member)).messages] == [2]


async def test_letters_before_a_commit_keep_its_deadline(home, monkeypatch) -> None:
    async with home.node() as node, node.client() as client:
        await prepared(client, home)
        await client.send(IN, "1")
        async with await client.subscribe(IN, "g") as member:
            first = await anext(member)
            await node.wal.append(first.channel, b"garbage")
            await client.send(IN, "2")
            pack = await anext(member)
            t = client.transaction(deadline_s=0.5)
            for each in (first, pack):
                await transform(t, home, each)
                await t.acknowledge(member, each)

            async def hang(_) -> None:
                await asyncio.Event().wait()

            monkeypatch.setattr(member._wal, "append_many", hang)
            async with asyncio.timeout(30):
                error = await home.error_of(t.commit())
            monkeypatch.undo()
            assert isinstance(error, DeadlineExceeded)
            assert not error.fields["outcome_unknown"]
            await t.commit()
        assert await outputs(client) == (2, [1, 2])


@pytest.mark.asyncio(loop_factories=["memory"])
async def test_a_topic_that_grows_while_a_commit_is_under_way_is_read_on(home, monkeypatch) -> None:
    """The end of the old partition is read meanwhile, and has no record: nothing behind it was to pass it."""
    async with home.client() as client:
        await prepared(client, home)
        await client.send(IN, "1")
        async with await client.subscribe(IN, "g") as member:
            pack = await anext(member)
            sent, released = asyncio.Event(), asyncio.Event()
            append = Proxy._append_transaction

            async def late(proxy: Proxy, request):
                sent.set()
                await released.wait()
                return await append(proxy, request)

            monkeypatch.setattr(Proxy, "_append_transaction", late)
            committing = asyncio.create_task(committed(client, home, member, [pack]))
            await sent.wait()
            reading = asyncio.create_task(read(member, 2))
            await client.alter_topic(IN, 2)
            await client.send(IN, ["2", "3"])
            await home.elapse(2)  # all of the partition is read
            released.set()
            await committing
            got = await asyncio.wait_for(reading, 60)
            assert sorted(int(body) for each in got.values() for _, body in each) == [2, 3]


@pytest.mark.every_log
async def test_a_member_that_dies_behind_the_decision_leaves_the_next_one_what_comes_next(home, monkeypatch) -> None:
    """Nothing was stored in its group by then: the next member asks how it was decided."""

    async def nothing(*_) -> None:
        pass

    async with home.node() as node, node.client() as client, node.client() as other:
        await prepared(client, home)
        await client.send(IN, "1")
        first = await client.subscribe(IN, "g")
        monkeypatch.setattr(GroupConsumer, "acknowledge_decided", nothing)
        await committed(client, home, first, [await anext(first)])
        await stopped(node, first)
        monkeypatch.undo()
        await client.send(IN, "2")
        async with await other.subscribe(IN, "g") as second:
            pack = await anext(second)
            assert [int(bytes(each.body)) for each in pack.messages] == [2]
            await committed(other, home, second, [pack])
        await first.aclose()
        assert await outputs(client) == (2, [1, 2])
