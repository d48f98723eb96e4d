"""No request ends a role: whatever a client sends, the answer is a typed error or a right one, and nothing restarts."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest

from tidewal.actors.datanode import DataNode
from tidewal.actors.mixcoord import MixCoord
from tidewal.actors.proxy import Proxy
from tidewal.actors.querynode import QueryNode
from tidewal.actors.rows import to_batch
from tidewal.actors.streamingnode import StreamingNode
from tidewal.runtime.errors import (
    CollectionNotFound,
    DeadlineExceeded,
    InvalidRequest,
    InvalidRows,
    TidewalError,
    Unavailable,
    from_wire,
    to_wire,
)
from tidewal.runtime.log.names import pchannel_of
from tidewal.runtime.log.record import MAX_TIMESTAMP
from tidewal.runtime.rows.row_codec import encode_rows

HUGE = (2**63 - 1, 2**63, 2**64 - 1, -(2**63))
ODD: list[Any] = [None, True, 0, -1, 1.5, float("nan"), "", "id", "\x00", b"", b"\xff" * 9, [], [["id"]], {}, {"v": 1}]


def anything(rng: random.Random, depth: int = 3) -> Any:
    """A value that msgpack can carry."""
    kind = rng.randrange(6 if depth else 4)
    if kind < 2:
        return rng.choice(ODD)
    if kind == 2:
        return rng.choice(HUGE)
    if kind == 3:
        return rng.randbytes(rng.randrange(20))
    if kind == 4:
        return [anything(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(["v", "id", "kind", "schema", "name", "x"]): anything(rng, depth - 1) for _ in range(3)}


def damaged(rng: random.Random, value: Any) -> Any:
    """`value` with something in it, at any depth, replaced or left out."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        if rng.random() < 0.3:
            return {name: part for name, part in value.items() if name != key}
        return {**value, key: damaged(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], damaged(rng, value[at]), *value[at + 1 :]]
    return anything(rng)


def questions(home: Any, collection: Any, node: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """For each method parameters that fit. Those that only a node may send are of channels that it does not have; they
    name `node`."""
    fresh = {"collection": "people", "consistency": "strong", "session_ts": 0, "staleness_ms": 5}
    query = {"v": 1, "kind": "query", "filter": "id > 1", "columns": ["id"], "order_by": [["id", True]], "limit": 3}
    search = {"v": 1, "kind": "search", "column": "at", "vector": b"\0" * 16, "metric": "L2", "top_k": 3}
    write = {"collection": "people", "id": collection.id, "schema_version": 1, "producer": "p", "pseq": 1, "digest": 1}
    write["deadline_s"] = 1.5
    to_topic = {"topic": "t", "id": 99, "epoch": 1, "producer": "p"}
    wire, name = collection.to_wire(), {"collection": "people"}
    to = {"to": node.node.incarnation, "channels": ["x"]}
    return {
        ("mixcoord", "create_collection"): {"schema": home.PEOPLE.to_wire(), "shards": 2},
        ("mixcoord", "drop_collection"): {"id": 99},
        ("mixcoord", "load_collection"): {**name, "replicas": 1},
        ("mixcoord", "release_collection"): {"collection": "other"},
        ("mixcoord", "describe_collection"): name,
        ("mixcoord", "list_collections"): {},
        ("mixcoord", "create_topic"): {"name": "t", "partitions": 2, "retention_s": 60.0, "retention_bytes": None},
        ("mixcoord", "alter_topic"): {"id": 99, "epoch": 1, "partitions": 3, "hashed": True},
        ("mixcoord", "delay_topic"): {"id": 99},
        ("mixcoord", "drop_topic"): {"id": 99},
        ("mixcoord", "describe_topic"): {"name": "t"},
        ("mixcoord", "list_topics"): {},
        ("mixcoord", "cut"): name,
        ("mixcoord", "cordon"): {"node": "x", "state": "cordoned"},
        ("mixcoord", "pin"): {"channel": "x", "node": "y"},
        ("mixcoord", "move"): {"channel": "x", "node": "y"},
        ("mixcoord", "balance"): {"on": True},
        ("mixcoord", "placement"): {},
        ("mixcoord", "migrate"): {"target": "memory://other"},
        ("mixcoord", "migration"): {},
        ("mixcoord", "cancel_migration"): {"target": "memory://other"},
        ("proxy", "write"): write,
        ("proxy", "send"): {**to_topic, "pseq": 1, "deadline_s": 1.5, "after_ms": 5},
        ("proxy", "cancel"): {**to_topic, "pseq": 2, "channel": "x", "message": bytes(20)},
        ("proxy", "commit"): {
            "parts": [["rows", "people", collection.id, 1, 8], ["messages", "t", 99, 1, 8]],
            "acks": ["group", "member", [["channel", 1, b"id", [], b""]], {"channel": 1}],
            "producer": "p",
            "pseq": 1,
            "deadline_s": 1.5,
        },
        ("proxy", "fence_position"): {"group": "g", "channel": "x"},
        ("proxy", "flush"): name,
        ("streamingnode", "append"): {**part(collection, [["x", "x_1v0", {}, 0, 1]]), "to": node.node.incarnation},
        ("streamingnode", "append_from"): {"to": to["to"], "source": "s", "channel": "x", "after": b"1"},
        ("streamingnode", "flush"): {"id": 99, **to},
        ("streamingnode", "settle"): {"producer": "p", "pseq": 1, "attempt": "x", **to},
        ("streamingnode", "sync"): to,
        ("streamingnode", "announce_collection"): {"what": "drop", "collection": wire, **to},
        ("proxy", "ready"): {},
        ("datanode", "compact"): name,
        ("datanode", "check"): name,
        ("datanode", "release"): {"collection": wire},
        ("querynode", "release"): {"collection": wire},
        ("querynode", "query"): {**fresh, "request": query},
        ("querynode", "get"): {**fresh, "columns": ["id"]},
        ("querynode", "stats"): fresh,
        ("querynode", "part"): {
            "to": node.node.incarnation,
            "id": collection.id,
            "vchannels": list(collection.vchannels),
            "at": collection.created_ts,
            "present": [collection.created_ts, {pchannel_of(name): [1, 1] for name in collection.vchannels}],
        },
        ("querynode", "held"): {"id": collection.id},
        ("querynode", "load_state"): name,
        ("querynode", "ping"): {},
        ("querynode", "search"): {**fresh, "request": search},
    }


def part(collection: Any, records: list[list[Any]], number: int = 1) -> dict[str, Any]:
    """The part number `number` of a door's writes, of these records; a door sends it with `to`, and their bodies."""
    known = {"collection": collection.name, "id": collection.id, "schema_version": collection.schema.version}
    counts = {"producer": "p", "pseq": number, "rows": 1, "digest": 1, "channels": 1, "until": MAX_TIMESTAMP}
    return {**known, **counts, "records": records, "place": ["door", number, 0]}


async def test_every_method_is_asked_here(home) -> None:
    async with home.node() as node, node.client() as client:
        known = questions(home, await client.create_collection(home.PEOPLE), node)
        for kind in (MixCoord, StreamingNode, Proxy, DataNode, QueryNode):
            assert kind(node.node).handlers().keys() == {method for role, method in known if role == kind.role} - {
                "search"
            }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_no_request_ends_a_role(home, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.create_collection(home.POINTS)
        await client.insert("people", home.people(1, 2, 3))
        collection = await client.describe_collection("people")
        before = {status.name: status.restarts for status in node.system.status()}
        for (role, method), right in questions(home, collection, node).items():
            called = "query" if method == "search" else method
            for round in range(12):
                params = damaged(rng, right) if round else right
                while not isinstance(params, dict):
                    params = damaged(rng, right)
                if "to" in right and params.get("to") != right["to"]:
                    params = {**params, "to": right["to"]}  # nobody answers what is another's
                body = rng.choice([b"", rng.randbytes(30), b"\x93\x01\x02\x03", b"\xc1"])
                with suppress(TidewalError):
                    await client._rpc.call(role, called, params, body, deadline_s=1)
        assert {status.name: status.restarts for status in node.system.status()} == before
        await client.insert("people", home.people(4))
        assert await client.count("people", "id in [1, 2, 3, 4]", consistency="strong") == 4


async def test_a_request_that_cannot_be_read_is_refused(home) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        for role, method in questions(home, await client.describe_collection("people"), node):
            if method in ("list_collections", "list_topics", "ready", "placement", "migration", "ping"):
                continue
            called = "query" if method == "search" else method
            for params in ({}, {"collection": 5, "id": "x", "channels": None, "node": 1, "schema": [], "grants": 1}):
                named = {**params, "to": node.node.incarnation}
                error = await home.error_of(client._rpc.call(role, called, named))
                assert isinstance(error, InvalidRequest), (role, method, error)


async def test_silly_calls_of_the_client_are_told_so(home) -> None:
    async with home.people_client() as client:
        await client.insert("people", home.people(1, 2, 3))
        for call in (
            client.get("people", [1], columns=[["id"]]),
            client.get("people", "1"),
            client.get("people", {1: 2}),
            client.get("people", 1),
            client.get("people", [1], columns=[]),
            client.delete("people", "year < 2003"),
            client.delete("people", 1),
            client.query("people", columns=[]),
            client.query("people", columns=[], order_by=[("id", True)]),
            client.query("people", limit=-1),
            client.query("people", limit=2**64),
            client.query("people", consistency="soon"),
            client.search("people", "at", [[1.0], [2.0]]),
            client.search("people", "at", None),
        ):
            assert isinstance(await home.error_of(call), InvalidRequest)
        assert isinstance(await home.error_of(client.insert("people", {"id": 1, "name": "x"})), InvalidRows)
        assert await client.count("people", consistency="strong") == 3
        for limit in (2**63 - 1, 2**63, 2**64 - 1):
            answer = await client.query("people", limit=limit, order_by=[("id", False)], consistency="strong")
            assert answer.table.column("id").to_pylist() == [3, 2, 1]


async def test_a_part_of_a_write_that_is_not_whole_changes_nothing(home) -> None:
    async with home.node() as node, node.client() as client:
        collection = await client.create_collection(home.PEOPLE, shards=1)
        [vchannel] = collection.vchannels
        body = bytes(encode_rows(to_batch(home.people(1), home.PEOPLE, op="insert")))
        whole = part(collection, [[pchannel_of(vchannel), vchannel, {}, len(body), collection.schema.version]])

        async def append(params: dict[str, Any], body: bytes) -> Any:
            named = {**params, "to": node.node.incarnation}
            return (await client._rpc.call("streamingnode", "append", named, body)).values

        size = len(body)
        for records in (
            [[pchannel_of(vchannel), vchannel, {}, size - 1, 1]],
            [[pchannel_of(vchannel), vchannel, {}, size, 1], [pchannel_of(vchannel), vchannel, {}, 1, 1]],
            [[pchannel_of(vchannel), vchannel, {}, str(size), 1]],
            [[pchannel_of(vchannel), vchannel, [], size, 1]],
            [[pchannel_of(vchannel), vchannel, {}, size]],
            [pchannel_of(vchannel)],
            5,
        ):
            error = await home.error_of(append({**whole, "records": records}, body))
            assert isinstance(error, InvalidRequest), records
        for place in (None, ["door", 1], ["door", "1", 0], [1, 1, 0], ["door", True, 0]):
            assert isinstance(await home.error_of(append({**whole, "place": place}, body)), InvalidRequest), place
        elsewhere = [["x", "x_1v0", {}, size, 1]]
        assert isinstance(await home.error_of(append({**whole, "records": elsewhere}, body)), Unavailable)
        assert isinstance(await home.error_of(append({**whole, "id": 99}, body)), CollectionNotFound)
        assert isinstance(await home.error_of(append({**whole, "schema_version": 2}, body)), InvalidRows)
        late = await home.error_of(append({**whole, "until": 1}, body))
        assert isinstance(late, DeadlineExceeded)
        assert not late.fields["outcome_unknown"]
        assert await client.count("people", consistency="strong") == 0
        first = await append(whole, body)
        assert (first["rows"], first["repeated"]) == (1, False)
        assert await append(whole, body) == {**first, "repeated": True}
        assert await client.count("people", consistency="strong") == 1


async def test_a_part_of_a_write_has_records_with_all_of_its_bytes_and_no_others(home) -> None:
    async with home.node() as node, node.client() as client:
        collection = await client.create_collection(home.PEOPLE, shards=1)
        [vchannel] = collection.vchannels
        channel, named = pchannel_of(vchannel), {"to": node.node.incarnation}
        body = bytes(encode_rows(to_batch(home.people(1), home.PEOPLE, op="insert")))
        for number, sizes in enumerate(([], [len(body) + 1, -1], [-1, len(body) + 1])):
            records = [[channel, vchannel, {}, size, 1] for size in sizes]
            call = client._rpc.call("streamingnode", "append", {**part(collection, records, number + 1), **named}, body)
            assert isinstance(await home.error_of(call), InvalidRequest), sizes


@pytest.mark.slow
async def test_a_ready_collection_is_not_released_nor_announced_as_gone(home) -> None:
    async with home.node() as node, node.client() as client:
        collection = await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(1))
        named = {"collection": collection.to_wire(), "to": node.node.incarnation}
        channels = [pchannel_of(vchannel) for vchannel in collection.vchannels]
        ends = (("datanode", "release"), ("querynode", "release"), ("streamingnode", "announce_collection"))
        for role, method in ends:
            call = client._rpc.call(role, method, {**named, "what": "drop", "channels": channels})
            assert isinstance(await home.error_of(call), InvalidRequest)
        assert await client.count("people", consistency="strong") == 1


@pytest.mark.parametrize("name", ["message", "self", "code", "fields", "args"])
def test_an_error_may_have_a_field_of_any_name(name: str) -> None:
    wire = {**to_wire(InvalidRequest("no")), "fields": {name: 1, 5: 2}}
    error = from_wire(wire)
    assert isinstance(error, InvalidRequest)
    assert (error.message, error.fields) == ("no", {name: 1, "5": 2})
