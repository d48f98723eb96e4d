"""Messages of topics that are due later: when they come, in which order, and what cancels them."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tidewal
from tidewal import Message
from tidewal.actors.client import Client
from tidewal.actors.streamingnode.partition_targets import later_partition
from tidewal.actors.topics.delayed_sends import id_text, read_id
from tidewal.actors.topics.messages import pack_messages
from tidewal.runtime.catalog.topics import Topic
from tidewal.runtime.clock import add_ms, physical_ms
from tidewal.runtime.delays.delayed import DELAY_MAX_MS, DelayedId, delay_policy
from tidewal.runtime.errors import InvalidRequest, TidewalError, TopicNotFound
from tidewal.runtime.log.names import pchannel_of
from tidewal.runtime.log.record import decode
from tidewal.runtime.rows.hashing import hash_key_bytes
from tidewal.runtime.testing.clock import until


async def received(member: tidewal.TopicMember, count: int) -> list[tidewal.TopicMessage]:
    """The next `count` messages, acknowledged."""
    got: list[tidewal.TopicMessage] = []
    async with asyncio.timeout(60):
        async for pack in member:
            got += pack.messages
            await member.acknowledge(pack)
            if len(got) >= count:
                break
    return got


def bodies(messages: list[tidewal.TopicMessage]) -> list[bytes]:
    return [bytes(each.body) for each in messages]


@pytest.mark.every_log
async def test_messages_come_when_they_are_due_and_what_is_cancelled_does_not(home) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 2)
        assert not (await client.describe_topic("orders")).delays
        begun_ms = node.node.clock.clock.wall_ms()
        ids: dict[str, str] = {}
        for after_s in (2.5, 1.0, 1.5):
            sent = await client.send("orders", f"{after_s}", key="k", tags={"n": 1}, deliver_after_s=after_s)
            (ids[f"{after_s}"],) = sent.ids
        assert (await client.describe_topic("orders")).delays
        assert await client.cancel("orders", ids["1.5"])
        assert await client.cancel("orders", ids["1.5"]), "the same answer each time"
        at_once = await client.send("orders", "now", key="k")
        assert at_once.ids == ()
        async with await client.subscribe("orders", "billing") as member:
            got = await received(member, 3)
        assert bodies(got) == [b"now", b"1.0", b"2.5"]
        assert {(each.key, tuple(each.tags.items())) for each in got[1:]} == {(b"k", (("n", 1),))}
        assert got[0].due_ts == 0
        for each in got[1:]:
            due_ms = begun_ms + 1000 * float(bytes(each.body))
            assert due_ms <= physical_ms(each.due_ts) <= physical_ms(each.ts)
            if home.virtual:
                assert physical_ms(each.ts) - physical_ms(each.due_ts) < 50
        assert not await client.cancel("orders", ids["1.0"]), "it is there already"
        assert not await client.cancel("orders", ids["1.5"]), "another call says nothing of an earlier one"
        await client.drop_topic("orders")
        assert not [name for name in await node.wal.channels() if "-topic_" in name or "-delays_" in name]


async def test_messages_of_one_call_are_due_together_each_with_an_id_of_its_own(home) -> None:
    async with home.client() as client:
        await client.create_topic("t", 4)
        due = (
            datetime.now(UTC) + timedelta(seconds=4) if not home.virtual else _virtual_now(home) + timedelta(seconds=1)
        )
        messages = [Message(f"{number}", key=f"{number % 7}") for number in range(70)]
        sent = await client.send("t", messages, deliver_at=due)
        assert (sent.messages, len(set(sent.ids))) == (70, 70)
        assert len(sent.partitions) > 1
        gone = set(range(0, 70, 3))
        for number in gone:
            assert await client.cancel("t", sent.ids[number])
        async with await client.subscribe("t", "g") as member:
            got = await received(member, 70 - len(gone))
        by_key: dict[bytes, list[int]] = {}
        for each in got:
            by_key.setdefault(each.key, []).append(int(each.body))
        left = [number for number in range(70) if number not in gone]
        assert by_key == {b"%d" % key: [each for each in left if each % 7 == key] for key in range(7)}


def _virtual_now(home: Any) -> datetime:
    loop: Any = asyncio.get_running_loop()
    return datetime.fromtimestamp(loop.clock.wall_ms() / 1000, UTC)


async def test_equal_due_times_keep_the_order_of_calls(home) -> None:
    async with home.client() as client:
        await client.create_topic("t", 1)
        now = _virtual_now(home) if home.virtual else datetime.now(UTC)
        due = now + timedelta(seconds=1)
        await asyncio.gather(*(client.send("t", f"{number}", deliver_at=due) for number in range(40)))
        async with await client.subscribe("t", "g") as member:
            got = await received(member, 40)
        assert bodies(got) == [b"%d" % number for number in range(40)]


async def test_a_group_with_a_filter_gets_released_messages_that_pass(home) -> None:
    async with home.client() as client:
        await client.create_topic("t", 1)
        sent = [Message(f"{number}", tags={"n": number}) for number in range(10)]
        await client.send("t", sent, deliver_after_s=0.3)
        async with await client.subscribe("t", "g", where="n > 6") as member:
            assert bodies(await received(member, 3)) == [b"7", b"8", b"9"]


async def test_what_is_pending_is_there_after_a_restart_and_what_was_due_meanwhile_comes(home) -> None:
    async with home.client() as client:
        await client.create_topic("t", 2)
        for number in range(6):
            await client.send("t", f"{number}", key=f"{number}", deliver_after_s=0.2 * number)
        cancelled = await client.send("t", "never", key="1", deliver_after_s=3)
    async with home.client() as client:
        assert await client.cancel("t", cancelled.ids[0])
        await client.send("t", "last", key="1", deliver_after_s=3)
        async with await client.subscribe("t", "g") as member:
            got = await received(member, 7)
    assert sorted(bodies(got)) == [b"0", b"1", b"2", b"3", b"4", b"5", b"last"]


@pytest.mark.asyncio(loop_factories=["memory"])
async def test_pending_messages_outlive_the_retention_of_their_topic_and_come_once(home) -> None:
    """Retention takes all of a partition, also what says which messages were released: they do not come again."""
    async with home.node() as node, node.client() as client:
        topic = await client.create_topic("t", 1, retention_s=60)
        await client.send("t", "early", deliver_after_s=1)
        await client.send("t", "late", deliver_after_s=300)
        await asyncio.sleep(60)
        (partition,) = topic.pchannels
        latest = await node.wal.latest_id(partition)
        assert latest is not None
        await node.wal.truncate(partition, latest)
    async with home.node() as node, node.client() as client:
        await asyncio.sleep(60)
        assert b"early" not in [bytes(_read(each).body) for each in home.log.channels[partition].entries]
        await asyncio.sleep(200)
        async with await client.subscribe("t", "g") as member:
            assert bodies(await received(member, 1)) == [b"late"]


def _read(entry: Any) -> Any:
    return decode(entry.payload)


async def test_a_request_that_comes_again_is_written_once_and_has_the_due_time_that_it_had(home) -> None:
    async with home.client() as client:
        topic = await client.create_topic("t", 1)
        await client._rpc.call("mixcoord", "delay_topic", {"id": topic.id})
        params = {"topic": "t", "id": topic.id, "epoch": 1, "producer": "p", "pseq": 1, "after_ms": 300}
        body = pack_messages([(0, b"", {}, b"once")])
        first = (await client._rpc.call("proxy", "send", params, body)).values
        await asyncio.sleep(0.05)
        assert (await client._rpc.call("proxy", "send", params, body)).values == first
        (partition,) = topic.pchannels
        id = id_text(partition, DelayedId.of(first["digest"], first["ts"], 0).to_bytes())
        of_message = {"channel": partition, "message": read_id(id)[1]}
        cancel = {**params, "pseq": 2, **of_message}
        del cancel["after_ms"]
        async with await client.subscribe("t", "g") as member:
            assert bodies(await received(member, 1)) == [b"once"]
        for _ in range(2):
            assert (await client._rpc.call("proxy", "cancel", cancel)).values == {"cancelled": False}


async def test_wrong_times_and_ids_are_refused(home) -> None:
    async with home.client() as client:
        await client.create_topic("t", 2)
        now = datetime.now(UTC)
        for times in (
            {"deliver_at": now, "deliver_after_s": 1.0},
            {"deliver_at": now.replace(tzinfo=None)},
            {"deliver_after_s": -1.0},
            {"deliver_after_s": float("nan")},
            {"deliver_after_s": DELAY_MAX_MS / 1000 + 1},
            {"deliver_at": now + timedelta(days=40_000)},
        ):
            assert isinstance(await home.error_of(client.send("t", "x", **times)), InvalidRequest), times
        sent = await client.send("t", "x", deliver_after_s=60)
        channel, id = read_id(sent.ids[0])
        other = await client.create_topic("other", 1)
        for wrong in ("", "x", f"{channel}:", f"{channel}:00", f"nowhere:{id.hex()}", id_text(other.pchannels[0], id)):
            assert isinstance(await home.error_of(client.cancel("t", wrong)), InvalidRequest), wrong
        assert isinstance(await home.error_of(client.cancel("missing", sent.ids[0])), TopicNotFound)
        assert await client.cancel("t", sent.ids[0])


async def test_an_id_of_a_dropped_topic_cancels_nothing_of_the_next_one(home) -> None:
    async with home.client() as client:
        await client.create_topic("t", 1)
        sent = await client.send("t", "x", deliver_after_s=60)
        await client.drop_topic("t")
        assert isinstance(await home.error_of(client.cancel("t", sent.ids[0])), TopicNotFound)
        await client.create_topic("t", 1)
        await client.send("t", "y", deliver_after_s=0.1)
        assert isinstance(await home.error_of(client.cancel("t", sent.ids[0])), InvalidRequest)
        async with await client.subscribe("t", "g") as member:
            assert bodies(await received(member, 1)) == [b"y"]


async def test_what_is_pending_when_a_topic_grows_comes_in_its_new_partitions(home) -> None:
    """It is cancelled by its id as before, and what is sent from then on waits with the new partitions."""
    async with home.node() as node, node.client() as client:
        old = await client.create_topic("t", 2)
        messages = [Message(f"{number}", key=f"{number % 5}") for number in range(20)]
        sent = await client.send("t", messages, deliver_after_s=1)
        new = await client.alter_topic("t", 3)
        assert new.delays
        later = await client.send("t", "later", key="1", deliver_after_s=1.5)
        assert read_id(later.ids[0])[0] in set(new.pchannels) - set(old.pchannels)
        assert await client.cancel("t", sent.ids[7])
        async with await client.subscribe("t", "g") as member:
            got = await received(member, 20)
        by_key: dict[bytes, list[bytes]] = {}
        for each in got:
            assert each.partition == hash_key_bytes(each.key) % 3
            by_key.setdefault(each.key, []).append(bytes(each.body))
        left = {b"%d" % key: [b"%d" % n for n in range(key, 20, 5) if n != 7] for key in range(5)}
        left[b"1"].append(b"later")
        assert by_key == left
        assert not await client.cancel("t", sent.ids[8]), "it is there already"
        await client.drop_topic("t")
        assert not [name for name in await node.wal.channels() if "-topic_" in name or "-delays_" in name]


@pytest.mark.asyncio(loop_factories=["memory"])
async def test_what_is_pending_in_an_epoch_that_is_over_is_shown(home) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_topic("t", 2)
        await client.send("t", [Message(f"{number}", key=f"{number}") for number in range(5)], deliver_after_s=60)
        assert (await client.describe_topic("t")).pending_epochs == ()
        await client.alter_topic("t", 3)
        await client.send("t", "later", deliver_after_s=600)
        assert (await client.describe_topic("t")).pending_epochs == (1,)
        value = partial(node.node.metrics.value, topic_name="t")
        await until(lambda: value("streamingnode_delayed_message_num") == 6)
        assert value("streamingnode_delayed_ended_message_num") == 5
        await asyncio.sleep(120)
        assert (await client.describe_topic("t")).pending_epochs == ()
        assert value("streamingnode_delayed_ended_message_num") == 0
        assert value("streamingnode_delayed_message_num") == 1


async def test_a_topic_that_was_altered_has_delays_in_its_last_partitions(home) -> None:
    """Also for a client that knows the epoch before, with groups that read both."""
    async with home.node() as node, node.client() as client, node.client() as stale:
        old = await client.create_topic("t", 2)
        await stale.send("t", "old", key="k")
        new = await client.alter_topic("t", 3)
        sent = await stale.send("t", "never", key="k", deliver_after_s=3600)
        await stale.send("t", "later", key="k", deliver_after_s=0.5)
        found = await client.describe_topic("t")
        assert (found.delays, set(found.delay_channels)) == (True, set(new.pchannels) - set(old.pchannels))
        channel, id = read_id(sent.ids[0])
        assert channel in found.delay_channels
        assert isinstance(await home.error_of(client.cancel("t", id_text(old.pchannels[0], id))), InvalidRequest)
        assert await client.cancel("t", sent.ids[0])
        await client.send("t", "now", key="k")
        async with await client.subscribe("t", "g") as member:
            first, *others = bodies(await received(member, 3))
            assert (first, sorted(others)) == (b"old", [b"later", b"now"])
        await client.drop_topic("t")
        assert not [name for name in await node.wal.channels() if "-topic_" in name or "-delays_" in name]


async def test_a_delayed_message_for_an_epoch_that_is_over_is_refused_and_written_nowhere(home) -> None:
    async with home.client() as client:
        old = await client.create_topic("t", 2)
        await client.alter_topic("t", 3)
        request = {"topic": "t", "id": old.id, "epoch": 1, "producer": "p"}
        late = {**request, "pseq": 1, "after_ms": 0}, pack_messages([(0, b"", {}, b"lost")])
        assert isinstance(await home.error_of(client._rpc.call("proxy", "send", *late)), InvalidRequest)
        sent = await client.send("t", "last", deliver_after_s=1)
        assert isinstance(await home.error_of(client._rpc.call("proxy", "send", *late)), InvalidRequest)
        cancelled = await client.send("t", "cancelled", deliver_after_s=1)
        channel, message = read_id(cancelled.ids[0])
        of_message = {"channel": channel, "message": message}
        cancel = client._rpc.call("proxy", "cancel", {**request, "pseq": 3, **of_message})
        assert (await cancel).values == {"cancelled": True}, "whatever epoch the client knows"
        async with await client.subscribe("t", "g") as member:
            assert bodies(await received(member, 1)) == [b"last"]
        assert sent.ids


@pytest.mark.asyncio(loop_factories=["memory"])
async def test_an_epoch_stays_while_messages_are_pending_there(home) -> None:
    """Also over several alterations, when its retention has passed; then it goes with its delay channels."""
    async with home.node() as node, node.client() as client:
        await client.create_topic("t", 2, retention_s=20)
        sent = await client.send("t", [Message(f"{n}", key=f"{n}") for n in range(12)], deliver_after_s=100)
        for partitions in (5, 3):
            await client.alter_topic("t", partitions)
            await asyncio.sleep(30)
        found = await client.describe_topic("t")
        assert (found.first_epoch, found.epoch) == (1, 3)
        assert found.drained == {found.delay_channels[each] for each, (epoch, _) in found.places.items() if epoch == 2}
        assert await client.cancel("t", sent.ids[3])
        async with await client.subscribe("t", "g") as member:
            got = await received(member, 11)
        assert sorted(bodies(got)) == sorted(b"%d" % n for n in range(12) if n != 3)
        assert {each.partition for each in got} == {hash_key_bytes(each.key) % 3 for each in got}
        assert max(physical_ms(each.ts) - physical_ms(each.due_ts) for each in got) < 50
        await asyncio.sleep(30)
        found = await client.describe_topic("t")
        assert (found.first_epoch, found.drained) == (3, frozenset())
        left = {name for name in await node.wal.channels() if "-topic_" in name or "-delays_" in name}
        assert left == set(found.owned_channels)
        assert isinstance(await home.error_of(client.cancel("t", sent.ids[4])), InvalidRequest)


@pytest.mark.asyncio(loop_factories=["memory"])
async def test_what_is_sent_while_a_topic_is_altered_is_there_once(home, rng: random.Random) -> None:
    """Calls for several partitions, of clients that know an epoch before: each message has an id, and each id cancels
    its message."""
    async with home.node() as node, node.client() as client, node.client() as stale:
        await client.create_topic("t", 3)
        ids: dict[bytes, str] = {}

        async def send(by: Client, first: int) -> None:
            for number in range(first, first + 400, 20):
                messages = [Message(f"{each}", key=f"{each % 9}") for each in range(number, number + 20)]
                sent = await by.send("t", messages, deliver_after_s=rng.uniform(2, 4))
                ids.update({bytes(each.body, "ascii"): id for each, id in zip(messages, sent.ids, strict=True)})
                await asyncio.sleep(rng.uniform(0, 0.05))

        async def alter() -> None:
            for _ in range(6):
                await client.alter_topic("t", rng.randint(1, 6))
                await asyncio.sleep(rng.uniform(0, 0.1))

        await asyncio.gather(send(client, 0), send(stale, 1000), alter())
        assert len(set(ids.values())) == 800
        gone = set(rng.sample(sorted(ids), 200))
        for body in gone:
            assert await rng.choice([client, stale]).cancel("t", ids[body])
        async with await client.subscribe("t", "g") as member:
            got = await received(member, 600)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(member), 5)
        assert sorted(bodies(got)) == sorted(ids.keys() - gone)


@given(
    counts=st.lists(st.integers(1, 12), min_size=2, max_size=6),
    key=st.binary(max_size=4),
    number=st.none() | st.integers(0, 11),
)
def test_the_later_partition_of_a_message_follows_the_one_before(counts: list[int], key: bytes, number: int | None):
    """Whether it was placed by its key or otherwise: so what an epoch gets of a key stands behind what the one before
    has."""
    epochs = tuple(
        tuple(f"p-topic_1_e{epoch}_{n}_1v{n}" for n in range(count)) for epoch, count in enumerate(counts, 1)
    )
    topic = Topic(1, "t", epochs, 0)
    placed = hash_key_bytes(key) if number is None else number
    first = before = pchannel_of(epochs[0][placed % counts[0]])
    for epoch in range(2, len(epochs) + 1):
        later = later_partition(topic, first, key, epoch)
        assert topic.places[later][0] == epoch
        assert before in topic.predecessors(later)
        if number is None:
            assert later == pchannel_of(epochs[epoch - 1][placed % counts[epoch - 1]])
        before = later


@pytest.mark.asyncio(loop_factories=["memory"])
async def test_a_delay_channel_that_was_not_needed_goes_with_its_epoch(home) -> None:
    """A leader died between making it and the catalog, then the topic was altered."""
    async with home.node() as node, node.client() as client:
        topic = await client.create_topic("t", 1, retention_s=20)
        (made,) = topic.delay_channels.values()
        await node.wal.create_channel(made, delay_policy(topic.policy))
        await client.alter_topic("t", 2)
        await client.send("t", "x", deliver_after_s=30)
        await asyncio.sleep(60)
        found = await client.describe_topic("t")
        assert (found.first_epoch, found.delays) == (2, True)
        left = {name for name in await node.wal.channels() if "-topic_" in name or "-delays_" in name}
        assert left == set(found.owned_channels)
        assert made not in left


@pytest.mark.asyncio(loop_factories=["memory"])
async def test_a_fault_in_one_partition_holds_up_no_other(home, monkeypatch: pytest.MonkeyPatch) -> None:
    from tidewal.runtime.delays.releaser import Releaser

    original = Releaser.run
    broken: set[str] = set()

    async def run(self: Releaser) -> None:
        if self._channel in broken:
            broken.clear()
            raise ValueError("broken")
        await original(self)

    monkeypatch.setattr(Releaser, "run", run)
    async with home.node() as node, node.client() as client:
        topic = await client.create_topic("t", 2)
        broken.add(topic.delay_channels[topic.pchannels[0]])
        sends = (client.send("t", f"{n}", partitioner=lambda _, __, n=n: n, deliver_after_s=1) for n in range(2))
        await asyncio.gather(*sends)
        async with await client.subscribe("t", "g") as member:
            got = await received(member, 2)
        assert bodies(got) == [b"1", b"0"]
        assert got[1].ts > add_ms(got[1].due_ts, 5_000)
        assert node.node.metrics.value("streamingnode_delayed_released_total", topic_name="t") == 2


def test_a_script_delays_and_cancels_without_await(tmp_path) -> None:
    with tidewal.standalone_sync(tmp_path) as node, node.client() as client:
        client.create_topic("t", 1)
        first = client.send("t", "a", deliver_after_s=600)
        client.send("t", "b", deliver_at=datetime.now(UTC) + timedelta(milliseconds=50))
        assert client.cancel("t", first.ids[0])
        with client.subscribe("t", "g") as member:
            pack = member.receive(60)
            assert pack is not None
            assert [bytes(each.body) for each in pack.messages] == [b"b"]
        with pytest.raises(TidewalError):
            client.cancel("t", "nothing")
