"""Collections through the client, and what is there again after a restart."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import sys
from dataclasses import replace

import pytest

from tidewal.actors.owners import Owners
from tidewal.actors.streamingnode.granted_channels import GrantedChannels
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import (
    CollectionExists,
    CollectionNotFound,
    DirectoryUnwritable,
    InvalidRequest,
    InvalidSchema,
    Unavailable,
)
from tidewal.runtime.log.names import pchannel_of
from tidewal.runtime.rows.schema import CollectionSchema, Field


@pytest.mark.every_log
async def test_creates_describes_lists_and_drops(home) -> None:
    async with home.client() as client:
        assert await client.list_collections() == []
        created = await client.create_collection(home.PEOPLE, shards=3)
        await client.create_collection(home.POINTS)
        assert created.shards == 3
        assert created.state == "ready"
        assert await client.describe_collection("people") == created
        assert await client.list_collections() == ["people", "points"]
        await client.drop_collection("people")
        assert await client.list_collections() == ["points"]
        assert isinstance(await home.error_of(client.describe_collection("people")), CollectionNotFound)
        assert isinstance(await home.error_of(client.drop_collection("people")), CollectionNotFound)


async def test_creating_again_finds_the_same_or_refuses_another(home) -> None:
    async with home.people_client() as client:
        await client.insert("people", home.people(1))
        assert await client.create_collection(home.PEOPLE) == await client.describe_collection("people")
        other = CollectionSchema("people", (Field("id", "int64"),), "id")
        assert isinstance(await home.error_of(client.create_collection(other)), CollectionExists)
        assert isinstance(await home.error_of(client.create_collection(home.PEOPLE, shards=3)), CollectionExists)
        assert await client.count("people", consistency="strong") == 1


@pytest.mark.parametrize("shards", [0, -1, 17, "two", None])
async def test_refuses_shards_that_cannot_be(home, shards) -> None:
    async with home.client() as client:
        assert isinstance(await home.error_of(client.create_collection(home.PEOPLE, shards=shards)), InvalidRequest)
        assert await client.list_collections() == []


def test_refuses_a_schema_that_cannot_be() -> None:
    with pytest.raises(InvalidSchema):
        CollectionSchema("people", (Field("id", "double"),), "id")


async def test_a_collection_created_by_many_at_once_is_one(home) -> None:
    async with home.node() as node, node.client() as one, node.client() as two:
        made = await asyncio.gather(*(client.create_collection(home.PEOPLE) for client in (one, two) * 5))
        assert len({collection.id for collection in made}) == 1


@pytest.mark.every_log
async def test_dropping_by_many_at_once_drops_once(home) -> None:
    async with home.people_client() as client:
        results = await asyncio.gather(*(client.drop_collection("people") for _ in range(5)), return_exceptions=True)
        assert any(result is None for result in results)
        assert all(result is None or isinstance(result, CollectionNotFound) for result in results)
        assert await client.list_collections() == []


@pytest.mark.slow
@pytest.mark.every_log
async def test_a_name_used_again_starts_empty(home) -> None:
    async with home.people_client() as client:
        await client.insert("people", home.people(1, 2, 3))
        await client.flush("people")
        await client.compact("people")
        await client.insert("people", home.people(4))
        first = await client.describe_collection("people")
        await client.drop_collection("people")
        assert not (home.tables / "people").exists()
        second = await client.create_collection(home.PEOPLE)
        assert second.id != first.id
        assert await client.count("people", consistency="strong") == 0
        await client.insert("people", home.people(7))
        assert await client.count("people", consistency="strong") == 1
        await client.flush("people")
        stats = await client.stats("people", consistency="strong")
        assert (stats.rows, dict(stats.versions)["insert"]) == (1, 1)
    async with home.client() as client:
        assert (await client.query("people", consistency="strong")).table["id"].to_pylist() == [7]


async def test_a_client_that_remembers_an_older_collection_of_that_name_learns_of_the_new_one(home) -> None:
    schema = replace(home.PEOPLE, fields=(Field("id", "int64"), Field("city", "varchar")))
    async with home.node() as node, node.client() as old, node.client() as new:
        await old.create_collection(home.PEOPLE)
        await old.insert("people", home.people(1))
        await new.drop_collection("people")
        await new.create_collection(schema)
        await new.insert("people", [{"id": 1, "city": "Bern"}])
        await old.insert("people", [{"id": 2, "city": "Basel"}])
        rows = (await old.query("people", consistency="strong", order_by=[("id", True)])).table
        assert rows.to_pylist() == [{"id": 1, "city": "Bern"}, {"id": 2, "city": "Basel"}]


async def test_a_flush_of_a_collection_that_is_dropped_ends(home) -> None:
    async with home.people_client() as client:
        await client.insert("people", home.people(1))
        flush = asyncio.ensure_future(client.flush("people"))
        await client.drop_collection("people")
        result = (await asyncio.gather(flush, return_exceptions=True))[0]
        assert isinstance(result, int | CollectionNotFound)


@pytest.mark.slow
@pytest.mark.every_log
async def test_everything_is_there_after_a_restart(home) -> None:
    async with home.people_client() as client:
        await client.insert("people", home.people(*range(50)))
        await client.flush("people")
        await client.upsert("people", home.people(3, name="three"))
        await client.delete("people", [4])
    terms = []
    for start in range(3):
        async with home.node() as node, node.client() as client:
            await client.insert("people", home.people(100 + start))
            assert await client.count("people", consistency="strong") == 50 + start
            rows = (await client.get("people", [3, 4], consistency="strong")).table.to_pylist()
            assert [row["name"] for row in rows] == ["three"]
            collection = await client.describe_collection("people")
            if start == 1:
                await client.flush("people")
            asked = {"to": node.node.incarnation, "channels": channels_of(collection)}
            reply = await client._rpc.call("streamingnode", "sync", asked)
            terms.append([point[0] for point in reply.values["channels"].values()])
    assert terms == sorted(terms)
    assert len({tuple(each) for each in terms}) == 3, "each start has terms of its own"


def channels_of(collection) -> list[str]:
    return [name.rsplit("_", 1)[0] for name in collection.vchannels]


async def test_tables_that_cannot_be_written_are_a_clear_error(home) -> None:
    home.tables.write_text("not a directory")
    with pytest.raises(DirectoryUnwritable) as raised:
        async with home.node():
            pass
    assert raised.value.path == str(home.tables)


@pytest.mark.slow
@pytest.mark.asyncio(loop_factories=["memory"])
async def test_tables_that_become_unwritable_are_a_clear_error(home) -> None:
    async with home.people_client() as client:
        await client.insert("people", home.people(1))
    shutil.rmtree(home.tables)
    async with home.node() as node:
        shutil.rmtree(home.tables)
        home.tables.write_text("not a directory")
        async with node.client() as client:
            await client.create_collection(home.POINTS)
        assert isinstance(await node.failed(), DirectoryUnwritable)


@pytest.mark.asyncio(loop_factories=["memory"])
async def test_a_node_whose_roles_cannot_work_does_not_start(home, monkeypatch) -> None:
    async def crash(self):
        raise RuntimeError("a bug")

    monkeypatch.setattr(GrantedChannels, "follow", crash)
    monkeypatch.setattr(Owners, "until_all_open", asyncio.Event().wait)  # as where a channel is to be opened
    with pytest.raises(RuntimeError, match="a bug"):
        async with home.node():
            pass


@pytest.mark.asyncio(loop_factories=["rocksmq"])
async def test_a_node_whose_port_is_in_use_does_not_take_the_log(home, caplog) -> None:
    caplog.set_level(logging.INFO, "tidewal")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"cannot listen on 127.0.0.1:{port}"):
            async with home.node(settings=Settings.model_validate({"metrics": {"port": port}})):
                pass
    assert "leads the cluster" not in caplog.text
    async with home.node():
        assert "leads the cluster" in caplog.text


@pytest.mark.slow
async def test_channels_keep_the_retention_they_were_made_with(home) -> None:
    async with home.people_client() as client:
        await client.insert("people", home.people(1))
    settings = {"rocksmq": {"retentionTimeInMinutes": 60}, "rootCoord": {"dmlChannelNum": 1}}
    async with home.client(settings=settings) as client:
        await client.create_collection(home.POINTS)
        await client.insert("points", [{"id": 1, "at": [0.0] * 4}])
        assert await client.count("people", consistency="strong") == 1


BACKENDS = ["rocksmq", "kafka", "pulsar"]


@pytest.mark.asyncio(loop_factories=["memory"])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_each_log_has_its_own_retention(home, backend) -> None:
    """What is set for the embedded log says nothing about the channels on brokers."""

    class Named(home.memory):
        name = backend

    home.memory = Named
    settings = {name: {"retentionTimeInMinutes": n, "retentionSizeInMB": -n} for n, name in enumerate(BACKENDS, 1)}
    async with home.people_client(settings=settings) as client:
        collection = await client.describe_collection("people")
    policy = home.log.channels[pchannel_of(collection.vchannels[0])].policy
    assert policy.retention_s == 60.0 * (BACKENDS.index(backend) + 1)
    assert policy.retention_bytes is None


async def test_a_node_lends_the_interpreter_its_switch_interval_and_gives_it_back(home) -> None:
    before = sys.getswitchinterval()
    settings = Settings.model_validate({"interpreter": {"switchIntervalMs": 0.7}})
    async with home.node(settings=settings):
        assert sys.getswitchinterval() == pytest.approx(0.0007)
    assert sys.getswitchinterval() == before


async def test_a_new_folder_of_tables_is_for_its_user_alone(home) -> None:
    async with home.people_client():
        assert home.tables.stat().st_mode & 0o777 == 0o700
