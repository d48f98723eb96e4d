"""Topics through the client: what is created, sent and read, by whom, and what is refused."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgpack
import pytest

import tidewal
from tidewal import Message
from tidewal.actors.topics import member as member_module
from tidewal.actors.topics.messages import pack_messages
from tidewal.runtime.catalog.cuts import Cut
from tidewal.runtime.errors import (
    Fenced,
    GroupFilterMismatch,
    InvalidFilter,
    InvalidRequest,
    MessageTooLarge,
    Overloaded,
    TidewalError,
    TopicExists,
    TopicNotFound,
)
from tidewal.runtime.log.names import pchannel_of
from tidewal.runtime.log.record import decode
from tidewal.runtime.rows.hashing import shard_of_key

Got = dict[int, list[tuple[bytes, bytes]]]


async def read(member: tidewal.TopicMember, count: int) -> Got:
    """The next `count` messages, acknowledged, by partition: keys and bodies."""
    got: Got = defaultdict(list)
    async with asyncio.timeout(60):
        async for pack in member:
            got[pack.partition] += [(each.key, bytes(each.body)) for each in pack.messages]
            await member.acknowledge(pack)
            if sum(map(len, got.values())) >= count:
                break
    return got


@pytest.mark.every_log
async def test_a_topic_is_created_written_shared_out_and_dropped(home) -> None:
    async with home.node() as node, node.client() as client:
        topic = await client.create_topic("orders", 3)
        assert (topic.state, len(topic.partitions), topic.retention_s) == ("ready", 3, 14 * 24 * 3600.0)
        assert await client.describe_topic("orders") == topic
        assert await client.list_topics() == [topic]
        sent: Got = defaultdict(list)
        for number in range(30):
            key = f"customer {number % 29}"
            result = await client.send("orders", f"{number}", key=key, tags={"n": number})
            (partition,) = result.partitions
            sent[partition].append((key.encode(), b"%d" % number))
        assert len(sent) == 3
        async with await client.subscribe("orders", "billing") as first:
            pack = await anext(first)
            assert (pack.topic, pack.messages[0].topic) == ("orders", "orders")
            assert {"n"} == set(pack.messages[0].tags)
            await first.acknowledge(pack)
            early = {pack.partition: [(each.key, bytes(each.body)) for each in pack.messages]}
        async with await client.subscribe("orders", "billing") as second:
            late = await read(second, 30 - len(pack.messages))
            got = {number: early.get(number, []) + late.get(number, []) for number in sent}
            assert got == sent, "each message once, in the order of its partition"
            await client.drop_topic("orders")
            with pytest.raises(TopicNotFound, match="was dropped"):
                await asyncio.wait_for(anext(second), 60)
        assert await client.list_topics() == []
        assert not [name for name in await node.wal.channels() if "-topic_" in name]
        assert isinstance(await home.error_of(client.send("orders", "late")), TopicNotFound)


@pytest.mark.every_log
async def test_a_topic_that_is_altered_keeps_the_order_of_each_key(home) -> None:
    sent: dict[bytes, list[bytes]] = defaultdict(list)
    got: dict[bytes, list[bytes]] = defaultdict(list)
    async with home.client() as client:
        await client.create_topic("t", 2)

        async def send(count: int) -> None:
            for number in range(count):
                key = f"{number % 5}"
                sent[key.encode()].append(b"%d" % len(sent[key.encode()]))
                await client.send("t", sent[key.encode()][-1], key=key)

        async def read_all(member: tidewal.TopicMember) -> None:
            async with asyncio.timeout(120):
                while got != sent:
                    pack = await anext(member)
                    for each in pack.messages:
                        got[each.key].append(bytes(each.body))
                    await member.acknowledge(pack)

        async with await client.subscribe("t", "g") as member:
            await send(10)
            for partitions in (4, 1):
                assert len((await client.alter_topic("t", partitions)).partitions) == partitions
                await send(10)
            await read_all(member)
        await client.alter_topic("t", 3)
        await send(10)
        async with await client.subscribe("t", "g") as member:
            await read_all(member)


async def test_creating_again_finds_the_same_or_refuses_another(home) -> None:
    async with home.client() as client:
        made = await asyncio.gather(*(client.create_topic("orders", 2) for _ in range(5)))
        assert len(set(made)) == 1
        others: Sequence[dict[str, Any]] = ({"partitions": 3}, {"retention_s": None}, {"retention_bytes": 5})
        for other in others:
            error = await home.error_of(client.create_topic("orders", **{"partitions": 2, **other}))
            assert isinstance(error, TopicExists), error
        for name in ("", "a b", "-a", "a" * 250):
            assert isinstance(await home.error_of(client.create_topic(name)), InvalidRequest)
        for partitions in (0, 65):
            assert isinstance(await home.error_of(client.create_topic("other", partitions)), InvalidRequest)


async def test_there_are_no_more_topics_than_the_limit(home) -> None:
    async with home.client(settings={"rootCoord": {"maxTopicNum": 1}}) as client:
        await client.create_topic("one", 1)
        error = await home.error_of(client.create_topic("two", 1))
        assert isinstance(error, InvalidRequest)
        assert "maxTopicNum" in error.message


async def test_a_topic_and_a_collection_may_have_one_name(home) -> None:
    async with home.people_client() as client:
        await client.create_topic("people", 2)
        await client.insert("people", home.people(1, 2))
        await client.send("people", "a message")
        assert await client.count("people", consistency="strong") == 2
        async with await client.subscribe("people", "readers") as member:
            assert sum(map(len, (await read(member, 1)).values())) == 1
        await client.drop_topic("people")
        assert await client.count("people", consistency="strong") == 2


async def test_keys_choose_partitions_as_in_collections_and_batches_without_any_take_turns(home) -> None:
    async with home.client() as client:
        await client.create_topic("t", 5)
        for key in ("a", "ä" * 80, ""):
            assert (await client.send("t", "x", key=key)).partitions == {shard_of_key(key, 5)}
        turns = [(await client.send("t", ["x", "y"])).partitions for _ in range(5)]
        assert [len(each) for each in turns] == [1] * 5
        assert len(frozenset[int]().union(*turns)) == 5
        mixed = await client.send("t", [Message("x", key="a"), Message("y", key="b"), "z"], key="c")
        assert mixed.partitions == {shard_of_key(key, 5) for key in "abc"}
        chosen = await client.send("t", ["0", "3"], partitioner=lambda message, _: int(message.body))
        assert chosen.partitions == {0, 3}
        for wrong in (5, -1, "1", True):
            error = await home.error_of(client.send("t", "x", partitioner=lambda _, __, wrong=wrong: wrong))
            assert isinstance(error, InvalidRequest), error


async def test_what_cannot_be_sent_is_refused_and_nothing_of_its_batch_is_there(home) -> None:
    async with home.client() as client:
        await client.create_topic("t", 2)
        large, tag = b"x" * (5 * 1024 * 1024), "x" * 70_000
        assert isinstance(await home.error_of(client.send("t", ["a", large], key="k")), MessageTooLarge)
        for messages, tags in (
            ([], {}),
            (["x"] * 10_001, {}),
            ("x", {"t": tag}),
            ("x", {"batch_rows": 1}),
            ("x", {"tidewal.source": "s"}),
        ):
            assert isinstance(await home.error_of(client.send("t", messages, tags=tags)), InvalidRequest)
        await client.send("t", "after", key="k")
        async with await client.subscribe("t", "g") as member:
            assert await read(member, 1) == {shard_of_key("k", 2): [(b"k", b"after")]}


async def test_a_batch_of_many_messages_is_read_whole(home) -> None:
    async with home.client() as client:
        await client.create_topic("t", 2)
        await client.send("t", [Message(f"{n}", key=f"{n}", tags={"n": n}) for n in range(2_000)])
        async with await client.subscribe("t", "g") as member:
            got = await read(member, 2_000)
        assert sorted(int(body) for each in got.values() for _, body in each) == list(range(2_000))


async def test_a_request_that_comes_again_is_written_once(home) -> None:
    async with home.client() as client:
        topic = await client.create_topic("t", 1)
        params = {"topic": "t", "id": topic.id, "epoch": 1, "producer": "p", "pseq": 1}
        body = pack_messages([(0, b"", {}, b"once")])
        times = {(await client._rpc.call("proxy", "send", params, body)).values["ts"] for _ in range(2)}
        assert len(times) == 1
        stale = await home.error_of(client._rpc.call("proxy", "send", {**params, "pseq": 2, "epoch": 2}, body))
        assert isinstance(stale, TopicNotFound)
        beside = pack_messages([(1, b"", {}, b"once")])
        assert isinstance(await home.error_of(client._rpc.call("proxy", "send", params, beside)), InvalidRequest)
        await client.send("t", "last")
        async with await client.subscribe("t", "g") as member:
            assert await read(member, 2) == {0: [(b"", b"once"), (b"", b"last")]}


async def test_a_client_that_knows_an_earlier_topic_of_the_name_sends_to_the_present_one(home) -> None:
    async with home.node() as node, node.client() as one, node.client() as two:
        await one.create_topic("t", 1)
        await two.send("t", "old")
        await one.drop_topic("t")
        await one.create_topic("t", 2)
        await asyncio.gather(*(two.send("t", f"{n}", key="k") for n in range(5)))
        async with await one.subscribe("t", "g") as member:
            got = await read(member, 5)
        assert got == {shard_of_key("k", 2): [(b"k", b"%d" % n) for n in range(5)]}


async def test_the_member_of_a_topic_that_is_dropped_ends_while_it_waits(home, monkeypatch) -> None:
    monkeypatch.setattr(member_module, "LOOK_S", 0.05)
    async with home.client() as client:
        for name in ("kept", "dropped"):
            await client.create_topic(name, 1)
        async with await client.subscribe(["kept", "dropped"], "g") as member:
            waiting = asyncio.ensure_future(anext(member))
            await asyncio.sleep(0)
            await client.drop_topic("dropped")
            error = await home.error_of(asyncio.wait_for(waiting, 60))
            assert isinstance(error, TopicNotFound)
            assert error.fields["topic"] == "dropped"


async def test_an_error_that_keeps_a_partition_from_being_read_ends_the_iteration(home, monkeypatch) -> None:
    async def fail(*_: object) -> bool:
        raise RuntimeError("a bug")

    async with home.client() as client:
        await client.create_topic("t", 1)
        await client.alter_topic("t", 2)
        for number in range(4):
            await client.send("t", b"%d" % number, key=f"{number}")
        with monkeypatch.context() as patch:
            patch.setattr(member_module.MemberGate, "passes", fail)
            async with await client.subscribe("t", "g") as member:
                with pytest.raises(RuntimeError, match="a bug"):
                    await asyncio.wait_for(anext(member), 60)
                with pytest.raises(RuntimeError, match="a bug"):
                    await asyncio.wait_for(anext(member), 60)
        async with await client.subscribe("t", "g") as member:
            got = await read(member, 4)
        assert sorted(body for each in got.values() for _, body in each) == [b"0", b"1", b"2", b"3"]


async def test_topics_and_positions_are_there_after_a_restart(home) -> None:
    async with home.client() as client:
        topic = await client.create_topic("t", 1)
        await client.send("t", ["a", "b"])
        async with await client.subscribe("t", "g") as member:
            await read(member, 2)
    async with home.client() as client:
        assert await client.list_topics() == [topic]
        await client.send("t", "c")
        async with await client.subscribe("t", "g") as member:
            assert await read(member, 1) == {0: [(b"", b"c")]}


async def test_a_topic_that_a_leader_was_about_to_drop_is_dropped_by_the_next(home) -> None:
    async with home.node() as node, node.client() as client:
        topic = await client.create_topic("t", 2)
        await client.send("t", "x")
        catalog = next(cell for cell in node.system._cells.values() if cell.name == "mixcoord")._life.actor.catalog
        await catalog.append({"kind": "drop_topic", "id": topic.id})
    async with home.node() as node, node.client() as client:
        catalog = next(cell for cell in node.system._cells.values() if cell.name == "mixcoord")._life.actor.catalog
        async with asyncio.timeout(60):
            while len(catalog.catalog.topics):
                await catalog.changed()
        assert not {name for name in await node.wal.channels() if "-topic_" in name}
        assert not {name for name in catalog.catalog.channels if "-topic_" in name}
        await client.create_topic("t", 1)


async def test_writes_that_limits_refuse_are_refused_for_topics_too(home) -> None:
    rate = {"streaming": {"walRateLimit": {"appendRate": {"enabled": True, "slowdownThreshold": 1}}}}
    async with home.client(settings=rate) as client:
        await client.create_topic("t", 1)
        sent = [client.send("t", b"x" * 1000) for _ in range(5)]
        results = await asyncio.gather(*sent, return_exceptions=True)
        refused = [each for each in results if isinstance(each, Overloaded)]
        assert refused
        assert "appendRate" in str(refused[0].fields["limit"])


async def test_cuts_are_about_no_topic(home) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.create_topic("t", 2)
        await client.send("t", "x")
        await client.insert("people", home.people(1))
        await client.cut("people")
        cuts = node.wal.read(node.node.names.cuts, tidewal.From.EARLIEST)
        ends: set[str] = set()
        await client.send("t", "y")  # now there is one of all channels
        await client.insert("people", home.people(2))
        async with asyncio.timeout(60):
            for _ in range(3):  # which the leader draws while rows are written
                for entry in await anext(cuts):
                    ends.update(Cut.from_record(decode(entry.payload, entry.id)).ends)
                await client.insert("people", home.people(3))
        await cuts.aclose()
        assert ends == {pchannel_of(each) for each in (await client.describe_collection("people")).vchannels}


async def test_results_are_committed_to_channels_without_an_owner_only(home) -> None:
    async with home.node() as node, node.client() as client:
        topic = await client.create_topic("numbers", 1)
        await node.wal.create_channel("squares", tidewal.ChannelPolicy())
        await client.send("numbers", ["2", "3"])

        async def square(pack: tidewal.TopicPack) -> list[tidewal.Append]:
            return [tidewal.Append("squares", b"%d" % int(each.body) ** 2) for each in pack.messages]

        async with await client.subscribe("numbers", "squaring") as member:
            await tidewal.process(node.wal, member, square, tidewal.Semantics.EXACTLY_ONCE, count=1)
            await client.send("numbers", "4")
            pack = await anext(member)
            for channel in (*topic.pchannels, node.node.names.pchannel(0)):
                error = await home.error_of(member.commit([pack], [tidewal.Append(channel, b"x")]))
                assert isinstance(error, InvalidRequest), error
            member.redeliver(pack)
            with suppress(Fenced):
                await member.acknowledge(await anext(member))
        found = [bytes(each.payload) for each in await anext(node.wal.read("squares", tidewal.From.EARLIEST))]
        assert found == [b"4", b"9"]


async def test_a_group_with_a_filter_gets_the_messages_that_pass(home) -> None:
    """Also of one batch; and its position goes on over the others."""
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        many = [tidewal.Message(b"%d" % number, tags={"country": "se" if number % 3 else "dk"}) for number in range(9)]
        await client.send("orders", many)
        await client.send("orders", "last", tags={"country": "se"})
        async with await client.subscribe("orders", "sweden", where='country == "se"') as member:
            got = await read(member, 7)
            assert [body for _, body in got[0]] == [b"1", b"2", b"4", b"5", b"7", b"8", b"last"]
        with pytest.raises(InvalidFilter):
            await client.subscribe("orders", "sweden", where="country ==")
        async with await client.subscribe("orders", "sweden", where='country == "dk"') as member:
            await client.send("orders", "more", tags={"country": "dk"})
            with pytest.raises(GroupFilterMismatch):
                await anext(member)


@pytest.mark.parametrize("round", range(3))
async def test_sends_keep_their_order_over_a_topic_that_is_made_again(home, round: int) -> None:
    """Those that the old one refused go before what was called after them."""
    async with home.node() as node, node.client() as one, node.client() as two:
        await one.create_topic("orders", 1)
        await two.send("orders", "of the old one")
        await one.drop_topic("orders")
        await one.create_topic("orders", 1)
        sends: list[asyncio.Task[tidewal.SendResult]] = []
        for number in range(60):
            sends.append(asyncio.create_task(two.send("orders", f"{number}", key="k")))
            await asyncio.sleep(0 if number % 5 else 0.001)
        await asyncio.gather(*sends)
        async with await one.subscribe("orders", "billing") as member:
            got = await read(member, 60)
        assert [int(body) for _, body in got[0]] == list(range(60))


@pytest.mark.parametrize(
    "message",
    [
        tidewal.Message(b"", tags={"n": 2**64}),
        tidewal.Message(b"", tags={"\ud800": 1}),
        tidewal.Message(b"", tags={"t": "\ud800"}),
        tidewal.Message("\ud800"),
        tidewal.Message(b"", key="\ud800"),
        tidewal.Message(b"", tags={f"{number}": 0.0 for number in range(8_000)}),
    ],
)
async def test_what_no_record_has_is_refused_at_the_call(home, message: tidewal.Message) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        with pytest.raises(InvalidRequest):
            await client.send("orders", message)


async def test_a_hostile_request_ends_no_door(home) -> None:
    async with home.node() as node, node.client() as client:
        topic = await client.create_topic("orders", 1)
        params = {"topic": "orders", "id": topic.id, "epoch": 1, "producer": "hostile", "after": 0, "deadline_s": 5.0}
        for number, tags in enumerate(
            ({b"x": 1}, {1: 1}, {"x": [1]}, {"x": {}}, {None: 1}, {"batch_rows": 1}, {b"": 0})
        ):
            body = msgpack.packb([(0, b"", tags, b"body")])
            with pytest.raises(InvalidRequest):
                await client._rpc.call("proxy", "send", {**params, "pseq": number + 1}, body, deadline_s=5)
        assert (await client.send("orders", "still there")).messages == 1


async def test_a_closed_member_ends_at_once_whoever_answers(home) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        member = await client.subscribe("orders", "billing")
        member._describe = lambda topic: asyncio.Event().wait()
        next_pack = asyncio.ensure_future(anext(member, None))
        await asyncio.sleep(0)
        await member.aclose()
        async with asyncio.timeout(20):
            assert await next_pack is None


def test_threads_that_receive_get_a_pack_each(tmp_path) -> None:
    with tidewal.standalone_sync(tmp_path) as node, node.client() as client:
        client.create_topic("orders", 1)
        with client.subscribe("orders", "billing") as member, ThreadPoolExecutor() as pool:
            received = [pool.submit(member.receive, 5.0) for _ in range(2)]
            client.send("orders", "one")
            packs = [each.result() for each in received]
            assert sum(pack is not None for pack in packs) == 1


def test_a_script_sends_and_reads_without_await(tmp_path) -> None:
    with tidewal.standalone_sync(tmp_path) as node, node.client() as client:
        assert client.create_topic("t", 2) == client.describe_topic("t") == client.list_topics()[0]
        client.send("t", ["a", "b"], key="k")
        with client.subscribe("t", "g") as member:
            pack = next(member)
            assert [bytes(each.body) for each in pack.messages] == [b"a", b"b"]
            member.redeliver(pack)
            again = member.receive(60)
            assert again is not None
            member.acknowledge(again)
            assert member.receive(0.01) is None
            client.send("t", "c", key="k")
            late = member.receive(60)
            assert late is not None
            assert [bytes(each.body) for each in late.messages] == [b"c"]
        client.drop_topic("t")
        with pytest.raises(TidewalError):
            client.send("t", "late")
