"""Collections are loaded into the memory of QueryNodes, and released."""

from __future__ import annotations

import asyncio

import pytest

from tests.actors.conftest import PEOPLE, POINTS
from tidewal.actors import Client
from tidewal.runtime.errors import CollectionNotFound, CollectionNotLoaded, InvalidRequest
from tidewal.runtime.streams.dispatched_stream import DispatchedStream


async def loaded(client: Client) -> tuple[str, int]:
    state = await client.load_state("people")
    return state.state, state.replicas


async def test_a_released_collection_takes_no_memory_and_its_queries_say_what_to_do(home) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_collection(PEOPLE)
        await client.insert("people", home.people(1, 2, 3))
        assert await client.count("people", consistency="strong") == 3
        assert await loaded(client) == ("Loaded", 2)
        assert node.node.metrics.value("querynode_memory_bytes", collection_name="people") > 0
        await client.release_collection("people")
        assert await loaded(client) == ("NotLoad", 0)
        for asked in (client.count("people"), client.get("people", [1]), client.stats("people")):
            error = await home.error_of(asked)
            assert isinstance(error, CollectionNotLoaded)
            assert "load_collection" in error.message
        await home.until(lambda: not node.node.metrics.value("querynode_memory_bytes", collection_name="people"))
        assert not node.node.metrics.series("querynode_consume_tt_lag_ms"), "which would grow for ever"


@pytest.mark.asyncio(loop_factories=["memory"])
async def test_a_collection_that_is_created_while_another_is_let_go_of_is_loaded(home, monkeypatch) -> None:
    close = DispatchedStream.close

    async def close_later(stream: DispatchedStream) -> None:
        await asyncio.sleep(1)
        await close(stream)

    async with home.node() as node, node.client() as client:
        await client.create_collection(PEOPLE)
        await home.elapse(5)
        monkeypatch.setattr(DispatchedStream, "close", close_later)
        await client.release_collection("people")
        await client.create_collection(POINTS)
        await home.elapse(5)
        assert ("points",) in node.node.metrics.series("querynode_entity_num")


async def test_what_is_written_meanwhile_is_there_when_it_is_loaded_again(home) -> None:
    async with home.people_client() as client:
        await client.insert("people", home.people(1, 2))
        await client.release_collection("people")
        await client.insert("people", home.people(3))
        await client.flush("people")
        await client.delete("people", [1])
        await client.load_collection("people", replicas=1)
        assert await loaded(client) == ("Loaded", 1)
        found = await client.query("people", order_by=[("id", True)], consistency="strong")
        assert found.table["id"].to_pylist() == [2, 3]
        await client.load_collection("people")
        assert (await client.load_state("people")).replicas == 1, "as many as it has"
        await client.drop_collection("people")


async def test_a_release_outlives_the_node_and_loading_comes_with_the_default(home) -> None:
    async with home.people_client() as client:
        await client.insert("people", home.people(1))
        await client.release_collection("people")
    async with home.client() as client:
        assert isinstance(await home.error_of(client.count("people")), CollectionNotLoaded)
        await client.load_collection("people")
        assert await loaded(client) == ("Loaded", 2)
        assert await client.count("people", consistency="strong") == 1


@pytest.mark.asyncio(loop_factories=["memory"])
async def test_a_collection_is_created_loaded_unless_its_creator_or_the_settings_say_otherwise(home) -> None:
    async with home.client(settings={"queryNode": {"replicas": 0}}) as client:
        await client.create_collection(PEOPLE)
        assert await loaded(client) == ("NotLoad", 0)
        await client.load_collection("people")
        assert await loaded(client) == ("Loaded", 1)
        await client.drop_collection("people")
        await client.create_collection(PEOPLE, replicas=3)
        assert (await client.load_state("people")).replicas == 3
        await client.create_collection(PEOPLE, replicas=0)
        assert (await client.load_state("people")).replicas == 3, "it was there"


@pytest.mark.asyncio(loop_factories=["memory"])
async def test_what_cannot_be_loaded_is_refused(home) -> None:
    async with home.people_client() as client:
        for asked in (client.load_collection("x"), client.release_collection("x"), client.load_state("x")):
            assert isinstance(await home.error_of(asked), CollectionNotFound)
        assert isinstance(await home.error_of(client.load_collection("people", replicas=0)), InvalidRequest)
        assert isinstance(await home.error_of(client.create_collection(PEOPLE, replicas=-1)), InvalidRequest)
