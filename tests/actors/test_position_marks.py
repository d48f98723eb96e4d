"""Marks of positions that transactions move: what members do beside a transaction neither takes one away nor waits."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.actors.test_inputs_over_owners import (
    GROUP,
    IN,
    OUT,
    commit,
    deciding,
    forget_to_store,
    nodes,
    numbers,
    prepared,
    results,
)
from tidewal.actors.proxy.position_fences import PositionFences
from tidewal.actors.topics.messages import TopicPack
from tidewal.runtime.errors import Fenced, InvalidRequest, Unavailable
from tidewal.runtime.groups.coordinator_client import GroupAcks
from tidewal.runtime.log.wal import From

__all__ = ["nodes"]  # a fixture

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]


async def test_what_is_stored_behind_a_decision_stays(nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the attempts at the next message, and the copy of it in the retry topic."""
    async with deciding(nodes, "one") as client, deciding(nodes, "two") as other:
        await prepared(nodes, client, 1)
        forget_to_store(monkeypatch)
        first = await client.subscribe(IN, GROUP)
        await commit(client, first, await anext(first))
        await client.send(IN, "1")
        await first.annotate(await anext(first), b"attempted")
        await first.aclose()
        async with await other.subscribe(IN, GROUP) as second:
            pack = await anext(second)
            assert numbers(pack) == [1]
            assert second.metadata(pack.channel) == b"attempted"


async def test_a_late_commit_of_the_same_member_stops_no_other(nodes) -> None:
    """The member has got the pack again meanwhile, and has committed that: no node is asked for the late one."""
    async with deciding(nodes, "one") as client:
        await prepared(nodes, client, 1)
        async with await client.subscribe(IN, GROUP) as member:
            late = await anext(member)
            member.redeliver(late)
            await commit(client, member, await anext(member))
            await client.send(IN, "1")
            pack = await anext(member)
            positions = nodes.running["a"].node.node.cluster.state.transactions.positions
            before = positions.tokens
            with pytest.raises(Fenced):
                await commit(client, member, late)
            assert positions.tokens == before, "a fence would refuse a commit that is under way"
            await commit(client, member, pack)
        assert await results(client, 2) == Counter([0, 1])


async def test_a_commit_that_hangs_holds_no_other_one_up(nodes) -> None:
    """Its pack was given back: neither the commit of what came again, nor those of other partitions wait for it."""
    async with deciding(nodes, "one") as client:
        await nodes.start("a")
        await client.create_topic(IN, 2)
        await client.create_topic(OUT, 1)
        for number in range(8):
            await client.send(IN, f"{number}", key=f"{number}")
        async with await client.subscribe(IN, GROUP) as member:
            packs: dict[int, TopicPack] = {}
            while len(packs) < 2:
                pack = await anext(member)
                packs.setdefault(pack.partition, pack)

            async def hang(_: GroupAcks) -> None:
                await asyncio.Event().wait()

            hanging = asyncio.create_task(member.commit_with([packs[0]], hang))
            await asyncio.sleep(1)
            member.redeliver(packs[0])
            while (pack := await anext(member)).partition != 0:
                pass
            async with asyncio.timeout(10):
                await asyncio.gather(commit(client, member, pack), commit(client, member, packs[1]))
            hanging.cancel()
            await asyncio.gather(hanging, return_exceptions=True)


async def test_a_member_that_gets_a_channel_back_takes_no_mark_of_another_one_away(
    nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller stores something by the channel's name before anything is delivered there again."""
    async with deciding(nodes, "one") as client, deciding(nodes, "two") as other:
        await prepared(nodes, client, 1)
        forget_to_store(monkeypatch)
        async with await client.subscribe(IN, GROUP) as first:
            pack = await anext(first)
            await commit(client, first, pack)
            await client.send(IN, "1")
            coordinator, released = first._member._coordinator, asyncio.Event()
            join = coordinator.join

            async def late(*args):
                await released.wait()
                await join(*args)

            monkeypatch.setattr(coordinator, "join", late)
            nodes.log.groups.coordinator.leave(GROUP, first.id)
            async with await other.subscribe(IN, GROUP) as second:
                again = await anext(second)
                assert numbers(again) == [1]
                await commit(other, second, again)
            released.set()
            while not first.channels:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await first.annotate(pack.channel, b"of the caller")
            await client.send(IN, "2")
            assert numbers(await anext(first)) == [2]
            assert first.metadata(pack.channel) == b"of the caller"


async def test_a_seek_takes_no_mark_away_that_is_set_behind_it(nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The channel is read from there, and a transaction made of that, while the call that sought is still under way."""
    async with deciding(nodes, "one") as client, deciding(nodes, "two") as other:
        await prepared(nodes, client, 1)
        forget_to_store(monkeypatch)
        async with await client.subscribe(IN, GROUP) as first:
            pack = await anext(first)
            await commit(client, first, pack)
            await client.send(IN, "1")
            coordinator = first._member._coordinator
            assignment, store = coordinator.assignment, coordinator.commit
            sought, marking, marked = asyncio.Event(), asyncio.Event(), asyncio.Event()

            async def hang(group, member, seen, wait_s):
                if seen is None:
                    await sought.wait()
                return await assignment(group, member, seen, wait_s)

            async def late(group, member, acks, outputs):
                ids = await store(group, member, acks, outputs)
                if acks[0].upto is None:
                    marking.set()
                    await marked.wait()
                return ids

            monkeypatch.setattr(coordinator, "assignment", hang)
            monkeypatch.setattr(coordinator, "commit", late)
            seeking = asyncio.create_task(first.seek(pack.channel, From.EARLIEST))
            await asyncio.sleep(1)
            parts: list[TopicPack] = []
            while len(parts) < 2:
                parts += (await anext(first)).parts()
            committing = asyncio.create_task(commit(client, first, parts[1]))
            await marking.wait()
            sought.set()
            await seeking
            await first.acknowledge(parts[0])
            marked.set()
            await committing
        await client.send(IN, "2")
        async with await other.subscribe(IN, GROUP) as second:
            assert numbers(await anext(second)) == [2]


async def test_who_is_not_told_what_was_decided_hears_why(nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes is waited out; another error is raised, and what is read waits for its end."""
    async with deciding(nodes, "one") as client, deciding(nodes, "two") as other:
        await prepared(nodes, client, 1)
        forget_to_store(monkeypatch)
        async with await client.subscribe(IN, GROUP) as first:
            await commit(client, first, await anext(first))
        await client.send(IN, "1")

        async def refuse(*_) -> None:
            raise InvalidRequest("this node cannot say")

        async with await other.subscribe(IN, GROUP) as second:
            with monkeypatch.context() as refusing:
                refusing.setattr(PositionFences, "fence", refuse)
                for _ in range(2):
                    with pytest.raises(InvalidRequest, match="cannot say"):
                        await asyncio.wait_for(anext(second), 60)
            assert numbers(await anext(second)) == [1]


async def test_what_is_decided_and_could_not_be_stored_holds_nothing_up(nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partition ends there: no later acknowledgement covers it, and its successors wait for the position."""
    async with deciding(nodes, "one") as client:
        await prepared(nodes, client, 1)
        async with await client.subscribe(IN, GROUP) as member:
            pack = await anext(member)
            await client.alter_topic(IN, 2)
            await client.send(IN, "1")
            following = asyncio.create_task(anext(member))
            await asyncio.sleep(10)
            coordinator, failed = member._member._coordinator, list[None]()
            store = coordinator.commit

            async def fail_once(group, member, acks, outputs):
                if not failed and acks[0].upto is not None:
                    failed.append(None)
                    raise Unavailable("the coordinator is gone", outcome_unknown=True)
                return await store(group, member, acks, outputs)

            monkeypatch.setattr(coordinator, "commit", fail_once)
            await commit(client, member, pack)
            assert failed
            pack = await asyncio.wait_for(following, 60)
            assert numbers(pack) == [1]
            await commit(client, member, pack)
        assert await results(client, 2) == Counter([0, 1])
