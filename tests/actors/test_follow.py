"""Graceful ends, unknown losses: what a client is told when its node goes, and what a stop leaves."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tidewal.runtime.errors import ActorStopped, Closed, TidewalError

MEMORY_ONLY = pytest.mark.asyncio(loop_factories=["memory"])


@pytest.mark.slow
async def test_calls_on_their_way_when_the_node_stops_all_end(home) -> None:
    async with home.node() as node:
        client = node.client()
        await client.__aenter__()
        await client.create_collection(home.PEOPLE)
        calls = [asyncio.ensure_future(client.insert("people", home.people(id))) for id in range(50)]
        calls += [asyncio.ensure_future(client.count("people", consistency="strong")) for _ in range(10)]
        await asyncio.sleep(0)
    results = await asyncio.gather(*calls, return_exceptions=True)
    await client.close()
    assert all(not isinstance(result, BaseException) or isinstance(result, TidewalError) for result in results)
    acknowledged = sum(1 for result in results[:50] if not isinstance(result, BaseException))
    async with home.client() as client:
        assert await client.count("people", consistency="strong") >= acknowledged


async def test_a_stopped_node_answers_at_once(home) -> None:
    async with home.node() as node:
        client = node.client()
        await client.__aenter__()
        await client.create_collection(home.PEOPLE)
    error = await home.error_of(client.insert("people", home.people(1)))
    assert isinstance(error, Closed | ActorStopped)
    await client.close()


@pytest.mark.slow
@MEMORY_ONLY
async def test_nodes_can_stop_and_start_many_times(home) -> None:
    for round in range(10):
        async with home.client() as client:
            await client.create_collection(home.PEOPLE)
            await client.insert("people", home.people(round))
            if round % 3 == 0:
                await client.flush("people")
            assert await client.count("people", consistency="strong") == round + 1


@pytest.mark.slow
@MEMORY_ONLY
async def test_many_collections_share_the_channels(home) -> None:
    async with home.client() as client:
        names = [f"c{number}" for number in range(40)]
        for name in names:
            await client.create_collection(replace(home.PEOPLE, name=name), shards=3)
        await asyncio.gather(*(client.insert(name, home.people(*range(number))) for number, name in enumerate(names)))
        for number, name in enumerate(names):
            assert await client.count(name, consistency="strong") == number
        await asyncio.gather(*(client.flush(name) for name in names))
        for name in names[::2]:
            await client.drop_collection(name)
        assert await client.list_collections() == sorted(names[1::2])
    async with home.client() as client:
        for number, name in enumerate(names):
            if number % 2:
                assert await client.count(name, consistency="strong") == number


@MEMORY_ONLY
async def test_an_at_most_of_requests_is_overloaded_and_not_a_silence(home, monkeypatch) -> None:
    monkeypatch.setattr("tidewal.actors.role.REQUESTS_MAX", 20)
    async with home.people_client() as client:
        results = await asyncio.gather(
            *(client.insert("people", home.people(id)) for id in range(200)), return_exceptions=True
        )
        assert await client.count("people", consistency="strong") == sum(
            1 for result in results if not isinstance(result, BaseException)
        )
        assert all(not isinstance(result, BaseException) or result.retryable for result in results)
