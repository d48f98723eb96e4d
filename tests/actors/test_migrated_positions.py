"""Positions that transactions have moved, and no group has stored yet, when a node goes to another log."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

import tidewal
from tests.actors.test_inputs_over_owners import GROUP, IN, OUT, commit, forget_to_store, numbers
from tests.actors.test_node_migration import FarWal
from tests.actors.test_online_migration import NEW, OLD, MemoryOpener, node_on
from tests.actors.test_topics import read
from tidewal.actors.topics.member import TopicMember
from tidewal.actors.topics.messages import TopicPack
from tidewal.runtime.errors import DeadlineExceeded, Fenced
from tidewal.runtime.log.migration_state import check_in_use
from tidewal.runtime.log.wal import Wal
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])

CAPABILITIES = replace(MemoryWal.capabilities, atomic_acks=False)


class ApartWal(MemoryWal):
    """A log that stores no positions with appends."""

    capabilities = CAPABILITIES


class FarApartWal(FarWal):
    """Another one, with higher ids."""

    capabilities = CAPABILITIES


class ApartOpener(MemoryOpener):
    """Opens such logs."""

    async def open(self, url: str) -> Wal:
        wal = ApartWal(self.logs[url])
        await check_in_use(wal, url)
        return wal

    async def open_alone(self, url: str) -> Wal:
        kind = ApartWal if url == OLD else FarApartWal
        return kind(self.logs.setdefault(url, MemoryLog()))


@pytest.mark.parametrize("stays", [True, False], ids=["the member goes along", "another member comes"])
async def test_what_is_decided_and_not_stored_is_known_in_the_other_log(
    home, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    opener = ApartOpener()
    async with node_on(home, opener) as node, node.client() as client:
        for topic in (IN, OUT):
            await client.create_topic(topic, 1)
        await client.send(IN, "0")
        first = await client.subscribe(IN, GROUP)
        with monkeypatch.context() as dying:
            forget_to_store(dying)
            await commit(client, first, await anext(first))
            await client.send(IN, "1")
            late = await anext(first)
            if not stays:
                await first.aclose()
            await node.migrate(NEW)
        async with first if stays else await client.subscribe(IN, GROUP) as member:
            pack = await anext(member)
            assert numbers(pack) == [1]
            with pytest.raises(Fenced):
                await commit(client, member, late)
            await commit(client, member, pack)
        async with await client.subscribe(OUT, "readers") as reader:
            got = await read(reader, 2)
            assert sorted(int(body) for each in got.values() for _, body in each) == [0, 1]


async def test_a_commit_that_comes_to_the_other_log_moves_no_position_there(home) -> None:
    """It was sent for the first time before, and its ids are those of the log that was left."""
    async with node_on(home, ApartOpener()) as node, node.client() as client:
        for topic in (IN, OUT):
            await client.create_topic(topic, 1)
        await client.send(IN, "0")
        first, t = await client.subscribe(IN, GROUP), client.transaction()
        await t.send(OUT, "0")
        await t.acknowledge(first, await anext(first))
        calls = t._calls

        async def lost(*_) -> int:
            raise DeadlineExceeded("no door has got it", outcome_unknown=True)

        t._calls = replace(calls, commit=lost)
        with pytest.raises(DeadlineExceeded):
            await t.commit()
        await first.aclose()
        await node.migrate(NEW)
        t._calls = calls
        with pytest.raises(Fenced):
            await t.commit()
        async with await client.subscribe(IN, GROUP) as member:
            pack = await anext(member)
            assert numbers(pack) == [0]
            await commit(client, member, pack)


async def test_what_went_to_the_retry_topic_is_not_processed_again_in_the_other_log(
    home, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    async with node_on(home, MemoryOpener()) as node, node.client() as client:
        await client.create_topic(IN, 1)
        await client.send(IN, "0")
        async with await client.subscribe(IN, GROUP, retry_topic=True) as member:
            with monkeypatch.context() as dying:
                dying.setattr(TopicMember, "acknowledge", never)
                processing = process(member)
                await asyncio.sleep(10)
                processing.cancel()
                await asyncio.wait([processing])
        await client.send(IN, "1")
        await node.migrate(NEW)
        async with await client.subscribe(IN, GROUP, retry_topic=True) as member:
            processing = process(member)
            await asyncio.sleep(60)
        await processing
    assert sorted(handled) == [0, 0, 1]
