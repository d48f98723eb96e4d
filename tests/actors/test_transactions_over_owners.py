"""Transactions over several owners: all or nothing, for every reader, whoever is killed, and whenever."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tests.actors.conftest import PEOPLE, error_of, people
from tests.actors.nodes import NUMBERS, TAKEN_OVER_S, Nodes
from tests.actors.test_transaction_nodes import Model
from tidewal.actors.client import Client
from tidewal.actors.rows import to_batch
from tidewal.actors.streamingnode import transactions
from tidewal.actors.streamingnode.streamingnode import StreamingNode
from tidewal.actors.streamingnode.transactions import TransactionParticipant
from tidewal.actors.transactions.buffer import ROWS
from tidewal.actors.transactions.transaction import Transaction
from tidewal.runtime.cluster import transaction_decisions
from tidewal.runtime.errors import (
    CollectionNotFound,
    DeadlineExceeded,
    InvalidRequest,
    InvalidRows,
    OutcomeUnknown,
    Overloaded,
    TopicNotFound,
)
from tidewal.runtime.log.names import pchannel_of
from tidewal.runtime.log.record import MAGIC, RecordType, decode
from tidewal.runtime.log.wal import Append, OnAppended
from tidewal.runtime.ownership import producers
from tidewal.runtime.rows.row_codec import encode_rows
from tidewal.runtime.testing.simulation.wal import SimulatedWal

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]


def look_away(monkeypatch: pytest.MonkeyPatch, away: str) -> None:
    """Let owners do nothing of what is decided in one channel."""
    looking = TransactionParticipant._look_at

    def look(self, channel: str, transactions) -> None:
        if channel != away:
            looking(self, channel, transactions)

    monkeypatch.setattr(TransactionParticipant, "_look_at", look)


async def committed_but_to_a_topic(client: Client, monkeypatch: pytest.MonkeyPatch) -> tuple[Transaction, str]:
    """A transaction that is decided, and whose topic's owner looks away, with the channel of that."""
    await client.create_collection(NUMBERS, shards=1)
    await client.create_topic("events", 1)
    [away] = [pchannel_of(each) for each in (await client.describe_topic("events")).partitions]
    look_away(monkeypatch, away)
    t = client.transaction(deadline_s=2)
    await t.insert("numbers", [{"id": 1, "value": 1}])
    await t.send("events", ["x"])
    assert (await error_of(t.commit())).fields["outcome_unknown"]
    return t, away


def parts_lost(nodes: Nodes) -> float:
    """How many parts of transactions the owners say are lost."""
    return sum(
        each.node.node.metrics.value("streamingnode_decided_transaction_total", outcome="lost")
        for each in nodes.running.values()
    )


class RefusingWal(SimulatedWal):
    """A log that takes no rows for a while, and says so a little later."""

    refusing = False
    refused = 0

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        framed = (decode(each.payload) for each in entries if bytes(each.payload[: len(MAGIC)]) == MAGIC)
        if RefusingWal.refusing and any(record.type is RecordType.ROWS for record in framed):
            RefusingWal.refused += 1
            asyncio.get_running_loop().call_later(0.001, done, Overloaded("the log has no room"))
        else:
            super().submit(entries, done)


class SlowWal(SimulatedWal):
    """A log that takes a while for all that comes to some channels."""

    slow: frozenset[str] = frozenset()

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        if SlowWal.slow.isdisjoint(each.channel for each in entries):
            super().submit(entries, done)
        else:
            asyncio.get_running_loop().call_later(1.2 * transactions.UNDECIDED_S, super().submit, entries, done)


@pytest.fixture
async def nodes(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[Nodes]:
    """Several nodes, each owner of some channels."""
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    yield nodes
    await nodes.stop()


async def test_what_several_nodes_own_is_committed_at_one_time(nodes: Nodes) -> None:
    for name in "abc":
        await nodes.start(name)
    async with nodes.client() as client:
        await client.create_collection(NUMBERS, shards=3)
        await client.create_collection(PEOPLE, shards=2)
        await client.create_topic("events", 2)
        assert len(set(nodes.owners().values())) == 3
        for number in range(8):
            async with client.transaction() as t:
                await t.insert("people", people(*range(10 * number, 10 * number + 10)))
                await t.insert("numbers", [{"id": 10 * number + n, "value": number} for n in range(10)])
                await t.send("events", [f"{number}"] * 10)
            for at, there in ((t.result.ts - 1, 10 * number), (t.result.ts, 10 * number + 10)):
                assert await client.count("people", at=at) == await client.count("numbers", at=at) == there
            assert await client.count("numbers", consistency="strong") == 10 * number + 10
        messages: Counter[str] = Counter()
        async with asyncio.timeout(120), await client.subscribe("events", "readers") as member:
            while messages.total() < 80:
                messages.update(bytes(each.body).decode() for each in (await anext(member)).messages)
        assert set(messages.values()) == {10}
        await asyncio.sleep(3)  # each owner has said what is written
        assert nodes.running["a"].node.node.cluster.state.transactions.open == 0
        metrics = nodes.running["a"].node.node.metrics
        assert metrics.value("streamingnode_decided_transaction_total", outcome="committed") >= 8
        assert metrics.value("streamingnode_prepared_transaction_num") == 0


@pytest.mark.long  # a dozen lives of whole nodes
async def test_over_kills_of_owners_and_doors_no_read_sees_a_half_and_nothing_is_lost(nodes: Nodes) -> None:
    """Schedules 1 and 3: what a reader is told at one time is whole, while owners and doors are killed at random."""
    for name in "abc":
        await nodes.start(name)
    model = Model(nodes.rng)
    async with nodes.client() as client, nodes.client() as asking:
        await client.create_collection(NUMBERS, shards=3)
        await client.create_collection(PEOPLE, shards=2)
        await client.create_topic("events", 2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(model.write(client))
            tasks.create_task(model.write(asking))
            tasks.create_task(model.ask(asking))
            for _ in range(6):
                await asyncio.sleep(nodes.rng.uniform(0, 3))
                name = nodes.rng.choice(sorted(nodes.running))
                await nodes.kill(name)
                await asyncio.sleep(nodes.rng.uniform(0, 2))
                await nodes.start(name)
            await asyncio.sleep(TAKEN_OVER_S)
            model.stopping = True
        committed = {number for number, outcome in model.outcomes.items() if outcome == "committed"}
        rows = (await client.query("numbers", consistency="strong", deadline_s=60)).table["value"].to_pylist()
        model.check(Counter(rows), committed)
        persons = (await client.query("people", consistency="strong", deadline_s=60)).table["id"].to_pylist()
        assert Counter(key // 10 for key in persons) == Counter(rows)
        messages: Counter[int] = Counter()
        async with asyncio.timeout(120), await client.subscribe("events", "readers") as member:
            while messages.total() < len(rows):
                messages.update(int(bytes(each.body)) for each in (await anext(member)).messages)
        assert messages == Counter(rows), "each once, and none of what is not there"
        assert len(committed) > 10
        assert model.asked > 5


async def test_a_plain_write_behind_a_commit_wins_though_its_owner_has_a_slow_clock(nodes: Nodes) -> None:
    """Schedule 2: clocks 3 s apart in both directions; a key is written by a transaction, and then by itself."""
    for name, ahead_ms in (("a", 3000), ("b", -3000), ("c", 0)):
        await nodes.start(name, ahead_ms=ahead_ms)
    async with nodes.client() as client:
        await client.create_collection(NUMBERS, shards=8)
        await client.create_collection(PEOPLE, shards=2)
        keys = list(range(32))
        for round in range(4):
            async with client.transaction() as t:
                await t.upsert("numbers", [{"id": key, "value": -round} for key in keys])
                await t.upsert("people", people(round))
            for key in keys:
                await client.upsert("numbers", [{"id": key, "value": 100 * round + key}])
            found = await client.query("numbers", consistency="strong")
            rows = dict(zip(found.table["id"].to_pylist(), found.table["value"].to_pylist(), strict=True))
            assert rows == {key: 100 * round + key for key in keys}


async def test_a_participant_that_is_away_for_long_writes_what_was_decided(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule 5: one channel gets its commit after thousands of later decisions; its client asks again."""
    monkeypatch.setattr(transaction_decisions, "KEPT", 3)
    await nodes.start("a")
    await nodes.start("b")
    async with nodes.client() as client, nodes.client() as other:
        await client.create_collection(NUMBERS, shards=1)
        await client.create_collection(PEOPLE, shards=1)
        await client.create_topic("events", 2)
        away = pchannel_of((await client.describe_collection("people")).vchannels[0])
        looking = TransactionParticipant._look_at
        look_away(monkeypatch, away)
        t = client.transaction(deadline_s=2)
        await t.insert("people", people(1))
        await t.insert("numbers", [{"id": 1, "value": 1}])
        assert (await error_of(t.commit())).fields["outcome_unknown"]
        for number in range(8):
            async with other.transaction() as later:
                await later.insert("numbers", [{"id": 10 + number, "value": 1}])
                await later.send("events", ["x", "y"])
        decisions = nodes.running["a"].node.node.cluster.state.transactions
        assert decisions.open >= 1
        asking = asyncio.ensure_future(client.count("people", consistency="strong"))
        assert not (await asyncio.wait([asking], timeout=1))[0] or asking.result() == 0
        owner = nodes.owners()[away]
        await nodes.kill(owner)
        await nodes.start(owner)
        monkeypatch.setattr(TransactionParticipant, "_look_at", looking)
        async with asyncio.timeout(60):
            while t.result is None:
                with contextlib.suppress(DeadlineExceeded):
                    await t.commit()
        result = t.result
        await asyncio.gather(asking, return_exceptions=True)
        for at, count in ((result.ts - 1, 0), (result.ts, 1)):
            assert await client.count("people", at=at) == await client.count("numbers", at=at) == count


async def test_a_part_that_retention_removed_before_its_commit_is_told_of_and_never_taken_for_written(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule 5: the owner of a topic's partition dies behind the decision, and what was prepared there is removed."""
    await nodes.start("a")
    await nodes.start("b")
    async with nodes.client() as client:
        looking = TransactionParticipant._look_at
        t, away = await committed_but_to_a_topic(client, monkeypatch)
        owner = nodes.owners()[away]
        await nodes.kill(owner)
        entries = nodes.log.channels[away].entries
        assert any(decode(entry.payload).type is RecordType.PREPARE for entry in entries)
        entries[:] = [entry for entry in entries if decode(entry.payload).type is not RecordType.PREPARE]
        await nodes.start(owner)
        monkeypatch.setattr(TransactionParticipant, "_look_at", looking)
        async with asyncio.timeout(60):
            while isinstance(error := await error_of(t.commit()), DeadlineExceeded):
                pass  # the partition has no owner yet
        for again in (error, await error_of(t.commit())):
            assert isinstance(again, OutcomeUnknown)
            assert f"{away} has lost what was prepared" in again.message
        await asyncio.sleep(3)
        assert nodes.running["a"].node.node.cluster.state.transactions.open == 0
        assert parts_lost(nodes) == 1
        assert await client.count("numbers", consistency="strong") == 1
        async with client.transaction() as later:  # the channel goes on
            await later.insert("numbers", [{"id": 2, "value": 1}])
            await later.send("events", ["y"])


async def test_a_decision_does_not_wait_for_a_topic_that_was_dropped(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await nodes.start("a")
    await nodes.start("b")
    async with nodes.client() as client:
        await client.create_collection(NUMBERS, shards=2)
        await client.create_topic("events", 1)
        [dropped] = [pchannel_of(each) for each in (await client.describe_topic("events")).partitions]
        look_away(monkeypatch, dropped)
        t = client.transaction(deadline_s=2)
        await t.insert("numbers", [{"id": 1, "value": 1}])
        await t.send("events", ["x"])
        assert (await error_of(t.commit())).fields["outcome_unknown"]
        decisions = nodes.running["a"].node.node.cluster.state.transactions
        assert decisions.awaited_channels == {dropped}
        await client.drop_topic("events")
        async with client.transaction() as later:
            await later.insert("numbers", [{"id": n, "value": 1} for n in range(2, 10)])
        await asyncio.sleep(3)
        assert decisions.open == 0
        assert await client.count("numbers", consistency="strong") == 9


async def test_a_log_that_takes_no_commit_is_asked_now_and_then(
    home, tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, rng, RefusingWal)
    try:
        await nodes.start("a")
        async with nodes.client() as client:
            await client.create_collection(NUMBERS, shards=2)
            monkeypatch.setattr(RefusingWal, "refusing", True)
            monkeypatch.setattr(RefusingWal, "refused", 0)
            async with client.transaction() as t:
                await t.insert("numbers", [{"id": n, "value": 1} for n in range(10)])
                committing = asyncio.ensure_future(t.commit())
                await asyncio.sleep(3)
                assert 10 <= RefusingWal.refused <= 80, "two channels, ten times a second"
                RefusingWal.refusing = False
                await committing
            assert await client.count("numbers", at=t.result.ts) == 10
    finally:
        await nodes.stop()


async def test_owners_wait_longer_for_the_next_attempt_where_one_took_too_long(
    home, tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that had been given the same time again would have aborted each."""
    nodes = Nodes(tmp_path, rng, SlowWal)
    try:
        for name in "ab":
            await nodes.start(name)
        async with nodes.client() as client:
            await client.create_collection(NUMBERS, shards=2)
            [slow, _] = sorted(name for name in nodes.owners() if "dml" in name)[:2]
            monkeypatch.setattr(SlowWal, "slow", frozenset({slow}))
            t = client.transaction(deadline_s=60)
            await t.insert("numbers", [{"id": n, "value": 1} for n in range(10)])
            began_s = nodes.now_s()
            result = await t.commit()
            assert nodes.now_s() - began_s < 10
            assert await client.count("numbers", at=result.ts) == 10
    finally:
        await nodes.stop()


async def test_a_commit_does_not_wait_for_a_topic_that_was_dropped_behind_its_decision(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await nodes.start("a")
    await nodes.start("b")
    async with nodes.client() as client, nodes.client() as ddl:
        await client.create_collection(NUMBERS, shards=2)
        await client.create_topic("events", 1)
        [dropped] = [pchannel_of(each) for each in (await client.describe_topic("events")).partitions]
        look_away(monkeypatch, dropped)
        t = client.transaction(deadline_s=60)
        await t.insert("numbers", [{"id": 1, "value": 1}])
        await t.send("events", ["x"])
        committing = asyncio.ensure_future(t.commit())
        await asyncio.sleep(1)
        assert not committing.done()
        began_s = nodes.now_s()
        await ddl.drop_topic("events")
        result = await committing
        assert nodes.now_s() - began_s < 5
        assert await client.count("numbers", at=result.ts) == 1


async def test_an_owner_with_too_many_requests_does_not_make_a_commit_look_like_none(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the decision nothing says that nothing is written: the client would write it again."""
    refusals = 0

    async def overloaded(self, request):
        nonlocal refusals
        if refusals < 5:
            refusals += 1
            raise Overloaded("too many requests", limit="requests")
        return await settle(self, request)

    settle = StreamingNode._settle_transaction
    monkeypatch.setattr(StreamingNode, "_settle_transaction", overloaded)
    await nodes.start("a")
    await nodes.start("b")
    async with nodes.client() as client:
        await client.create_collection(NUMBERS, shards=2)
        async with client.transaction() as t:
            await t.insert("numbers", [{"id": n, "value": 1} for n in range(10)])
        assert refusals == 5
        assert await client.count("numbers", at=t.result.ts) == 10
        assert (await client.stats("numbers", consistency="strong")).versions["insert"] == 10


async def test_a_part_that_is_lost_is_told_of_though_its_client_writes_much_there_at_once(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outcome that the channel has not is forgotten before the owners say what is written."""
    monkeypatch.setattr(producers, "REMEMBERED_PER_PRODUCER", 4)
    await nodes.start("a")
    await nodes.start("b")
    async with nodes.client() as client:
        looking = TransactionParticipant._look_at
        _, away = await committed_but_to_a_topic(client, monkeypatch)
        owner = nodes.owners()[away]
        await nodes.kill(owner)
        entries = nodes.log.channels[away].entries
        entries[:] = [entry for entry in entries if decode(entry.payload).type is not RecordType.PREPARE]
        monkeypatch.setattr(transactions, "REPORT_S", 20)
        monkeypatch.setattr(TransactionParticipant, "_look_at", looking)
        await nodes.start(owner)
        for number in range(10):
            await client.send("events", f"{number}", deadline_s=60)
        await asyncio.sleep(30)
        assert nodes.running["a"].node.node.cluster.state.transactions.open == 0
        assert parts_lost(nodes) == 1


async def test_owners_follow_the_clock_of_one_that_is_far_ahead_in_a_moment(nodes: Nodes) -> None:
    """Its time lies above the limits of the others, which take nothing before these are raised."""
    await nodes.start("a")
    await nodes.start("b")
    async with nodes.client() as client:
        await client.create_collection(NUMBERS, shards=8)
        assert len(set(nodes.owners().values())) == 2
        await asyncio.sleep(4)
        nodes.running["a"].clock.jump_wall(60_000)
        began_s = nodes.now_s()
        async with client.transaction() as t:
            await t.insert("numbers", [{"id": n, "value": 1} for n in range(40)])
        assert nodes.now_s() - began_s < 1
        assert await client.count("numbers", at=t.result.ts) == 40


async def test_a_door_refuses_a_transaction_with_a_collection_and_no_rows_for_it(nodes: Nodes) -> None:
    """No client of this version sends it: a part without records would never be prepared."""
    await nodes.start("a")
    await nodes.start("b")
    async with nodes.client() as client:
        for schema in (NUMBERS, PEOPLE):
            await client.create_collection(schema, shards=2)
        parts, bodies = [], []
        for schema, rows in ((NUMBERS, [{"id": 1, "value": 1}]), (PEOPLE, people())):
            collection = await client.describe_collection(schema.name)
            body = encode_rows(to_batch(rows, schema, op="insert"))
            parts.append([ROWS, schema.name, collection.id, schema.version, len(body)])
            bodies.append(body)
        params = {"parts": parts, "producer": "by hand", "pseq": 1, "after": 0, "deadline_s": 5.0}
        with pytest.raises(InvalidRequest, match="without rows for people"):
            await client._rpc.call("proxy", "commit", params, b"".join(bodies), deadline_s=5)
        assert await client.count("numbers", consistency="strong") == 0


async def test_growth_and_drops_wait_for_what_is_prepared(nodes: Nodes) -> None:
    """Schedule 9: a topic gets other partitions, and collections are dropped, at any point of transactions: what is
    committed is there as a whole, behind no EPOCH_END and no DROP."""
    for name in "abc":
        await nodes.start(name)
    done: list[str] = []
    refused = 0
    ended = asyncio.Event()

    async def commit(client: Client, name: str) -> None:
        nonlocal refused
        number = 0
        while not ended.is_set():
            number += 1
            t = client.transaction()
            try:
                await t.send("events", [f"{name}-{number}"] * 4)
                await t.insert("numbers", [{"id": n, "value": number} for n in range(4)])
                await t.commit()
            except (TopicNotFound, CollectionNotFound, InvalidRows):
                refused += 1
                await asyncio.sleep(0.05)
            else:
                done.append(f"{name}-{number}")
                await asyncio.sleep(nodes.rng.uniform(0.001, 0.05))

    async with nodes.client() as first, nodes.client() as second, nodes.client() as ddl:
        await ddl.create_topic("events", 2)
        await ddl.create_collection(NUMBERS, shards=2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(commit(first, "first"))
            tasks.create_task(commit(second, "second"))
            for partitions in (4, 2):
                await asyncio.sleep(nodes.rng.uniform(0.1, 1))
                await ddl.alter_topic("events", partitions)
                await asyncio.sleep(nodes.rng.uniform(0.1, 1))
                await ddl.drop_collection("numbers")
                await ddl.create_collection(NUMBERS, shards=2)
            await asyncio.sleep(1)
            ended.set()
        messages: Counter[str] = Counter()
        async with await ddl.subscribe("events", "readers") as member:
            with contextlib.suppress(TimeoutError):
                while True:
                    pack = await asyncio.wait_for(anext(member), 10)
                    messages.update(bytes(each.body).decode() for each in pack.messages)
                    await member.acknowledge(pack)
        assert messages == Counter(dict.fromkeys(done, 4))
        assert len(done) > 20
        assert refused
    for name, channel in nodes.log.channels.items():
        over: set[str] = set()
        for record in (decode(entry.payload) for entry in channel.entries if "topic" in name or "dml" in name):
            if record.type in (RecordType.EPOCH_END, RecordType.DROP_COLLECTION):
                over.add(record.vchannel)
            assert not (record.type in (RecordType.ROWS, RecordType.MESSAGE) and record.vchannel in over), name
