"""What groups store with their positions goes to a promotion without the source, as it is in the line."""

from __future__ import annotations

import asyncio

import pytest

import tidewal
from tests.actors.test_forced_promotion import DRAWN_S, forced
from tests.actors.test_inputs_over_owners import GROUP, IN, OUT, commit, forget_to_store, numbers
from tests.actors.test_migrated_positions import ApartWal, FarApartWal
from tests.actors.test_node_migration import logs_of, received
from tests.actors.test_node_replication import replica_of, replicating
from tidewal.actors.topics.member import TopicMember
from tidewal.actors.topics.messages import TopicPack
from tidewal.runtime.errors import GroupFilterMismatch
from tidewal.runtime.replication.line_drawer import LineDrawer

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"])]


@pytest.mark.parametrize("meanwhile", [False, True], ids=["before the line is begun", "before it is drawn"])
async def test_a_position_that_a_transaction_has_moved_counts_with_what_it_has_written(
    home, monkeypatch: pytest.MonkeyPatch, meanwhile: bool
) -> None:
    """No group has stored it. Where the line was begun before, there was no mark of it either."""
    home.memory = ApartWal
    other = replica_of(home)
    other.memory = FarApartWal
    async with logs_of(home, other) as (old, replica), home.client() as client:
        for topic in (IN, OUT):
            await client.create_topic(topic, 1)
        await client.send(IN, "0")
        forget_to_store(monkeypatch)
        member = await client.subscribe(IN, GROUP)
        pack = await anext(member)
        if not meanwhile:
            await commit(client, member, pack)
        begin, begun = LineDrawer.begin, asyncio.Event()

        async def begin_once(*given) -> None:
            if not begun.is_set():
                await begin(*given)
                begun.set()
                if meanwhile:
                    await commit(client, member, pack)

        monkeypatch.setattr(LineDrawer, "begin", begin_once)
        async with replicating(old, replica):
            await asyncio.sleep(2 * DRAWN_S)
            await client.send(IN, "1")  # behind the line
            await asyncio.sleep(DRAWN_S)
        await member.aclose()
    promoted, _ = await forced(home, other)
    async with promoted.client() as client, await client.subscribe(OUT, "readers") as reader:
        assert await received(reader, 1) == ["0"]
        await client.send(IN, "2")
        async with await client.subscribe(IN, GROUP) as member:
            assert numbers(await anext(member)) == [2]


async def test_a_filter_and_what_the_caller_has_stored_go_along(home) -> None:
    other = replica_of(home)
    async with logs_of(home, other) as (old, replica), home.client() as client:
        await client.create_topic(IN, 1)
        await client.send(IN, "0", tags={"kind": "a"})
        async with replicating(old, replica):
            async with await client.subscribe(IN, GROUP, where="kind == 'a'") as member:
                pack = await anext(member)
                await member.acknowledge(pack)
                await member.annotate(pack.channel, b"of the caller")
            await asyncio.sleep(2 * DRAWN_S)
    promoted, _ = await forced(home, other)
    async with promoted.client() as client:
        await client.send(IN, "1", tags={"kind": "a"})
        async with await client.subscribe(IN, GROUP) as member:
            with pytest.raises(GroupFilterMismatch):
                await anext(member)
        async with await client.subscribe(IN, GROUP, where="kind == 'a'") as member:
            pack = await anext(member)
            assert (numbers(pack), member.metadata(pack.channel)) == ([1], b"of the caller")


async def test_what_went_to_the_retry_topic_is_not_processed_again(home, monkeypatch: pytest.MonkeyPatch) -> None:
    """The member dies when the copy is there, and before it has acknowledged the original."""
    handled: list[int] = []

    async def handle(pack: TopicPack) -> None:
        handled.extend(numbers(pack))
        if handled == [0]:
            raise ValueError("not now")

    async def never(*_, **__) -> None:
        await asyncio.Event().wait()

    def process(member: TopicMember) -> asyncio.Task[None]:
        work = tidewal.process(member.wal, member, handle, tidewal.Semantics.AT_LEAST_ONCE, retry=tidewal.RetryPolicy())
        return asyncio.create_task(work)

    other = replica_of(home)
    async with logs_of(home, other) as (old, replica), home.client() as client:
        await client.create_topic(IN, 1)
        await client.send(IN, "0")
        async with replicating(old, replica), await client.subscribe(IN, GROUP, retry_topic=True) as member:
            with monkeypatch.context() as dying:
                dying.setattr(TopicMember, "acknowledge", never)
                processing = process(member)
                await asyncio.sleep(5)
                processing.cancel()
                await asyncio.wait([processing])
    promoted, _ = await forced(home, other)
    async with promoted.client() as client:
        await client.send(IN, "1")
        async with await client.subscribe(IN, GROUP, retry_topic=True) as member:
            processing = process(member)
            await asyncio.sleep(60)
        await processing
    assert sorted(handled) == [0, 0, 1]
