"""A replicated state is written anew in another log: readers know and refuse what they would have in the old one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tidewal.runtime.catalog.stored_ids import with_ids
from tidewal.runtime.cluster.transaction_decisions import decided
from tidewal.runtime.errors import Fenced, FormatTooNew, PreconditionFailed
from tidewal.runtime.log.record import RecordType, decode, encode, stamp
from tidewal.runtime.log.wal import ChannelPolicy, Wal
from tidewal.runtime.migration.channel_copy import HOLDER, stored_entries
from tidewal.runtime.migration.compared_channel import checksum_of
from tidewal.runtime.migration.moved_state import MovedState
from tidewal.runtime.migration.node_log import CATALOG_KIND, CLUSTER_KIND
from tidewal.runtime.ownership.prepared import TransactionId
from tidewal.runtime.replicated import records
from tidewal.runtime.replicated.fold import Applied, Fold
from tidewal.runtime.replicated.records import Claim, FeatureLevels, decode_event, encode_event
from tidewal.runtime.rows.schema import CollectionSchema, Field
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

STATE, AUTHOR = "state", "migration 1"
POLICY = ChannelPolicy(retention_s=None)
COLLECTION = {
    "id": 1,
    "schema": CollectionSchema("cities", (Field("id", "int64"),), "id").to_wire(),
    "vchannels": ["p0_1v0", "p1_1v1"],
    "created_ts": 5,
    "state": "creating",
    "beginning": None,
}
TOPIC = {
    "id": 2,
    "name": "orders",
    "epochs": [["t0_2v0"]],
    "created_ts": 5,
    "state": "ready",
    "retention_s": None,
    "retention_bytes": None,
    "first_epoch": 1,
    "coming": [],
    "ends": {"t0": (b"end", 7)},
    "begun": [],
    "unhashed": [],
    "retiring": False,
    "delays_from": 0,
    "drained": [],
}
MEMBER = {
    "incarnation": "n-1",
    "name": "n",
    "roles": [],
    "lease_ms": 9,
    "level": 2,
    "address": "",
    "number": 1,
    "replaces": "",
}
IDS = {"p0": {b"f1", b"f2", b"check", b"from"}, "p1": {b"g1", b"to"}, "t0": {b"end"}}


class Checks:
    """How often a check was called; `left` is how many may pass."""

    def __init__(self, left: int = 10_000) -> None:
        self.count, self.left = 0, left

    async def __call__(self) -> None:
        if self.count == self.left:
            raise Fenced("another run")
        self.count += 1


class Written:
    """Writes the records of a state into a log."""

    def __init__(self, wal: Wal, type: RecordType) -> None:
        self._wal, self._type = wal, type
        self.claim: Claim | None = None
        self.time = 100

    async def put(self, author: str, number: int, kind: str, claim: Claim | None = None, /, **fields: Any) -> bytes:
        record = encode_event(self._type, {**fields, "kind": kind}, author, number, claim)
        self.time += 1
        return await self._wal.append(STATE, stamp(record, self.time, record.term, 0), self.time)

    async def lead(self, node: str) -> None:
        before = self.claim or Claim()
        number = before.term + 1
        id = await self.put(node, 1, "leader", Claim(before.id, number), node=node, previous=before.id)
        self.claim = Claim(id, number, node)

    async def as_leader(self, number: int, kind: str, /, **fields: Any) -> bytes:
        assert self.claim is not None
        return await self.put(self.claim.node, number, kind, self.claim, **fields)


async def catalog_log() -> MemoryWal:
    """A catalog of level 2 with a collection, a topic, and two terms of a channel, whose owner has written itself."""
    wal = MemoryWal(MemoryLog())
    await wal.create_channel(STATE, POLICY)
    log = Written(wal, RecordType.CATALOG)
    await log.lead("a")
    await log.lead("b")
    await log.as_leader(2, "create", collection=COLLECTION)
    await log.as_leader(3, "grant", node="n", channels={"p0": (1, 0), "p1": (1, 0)}, limit=100)
    await log.put("n", 1, "fenced", node="n", channels={"p0": (1, b"f1"), "p1": (1, b"g1")})
    await log.as_leader(4, "grant", node="n", channels={"p0": (2, 1)}, limit=200)
    await log.put("n", 2, "fenced", node="n", channels={"p0": (2, b"f2")})
    await log.put("n", 3, "renewed", node="n", channels={"p0": (2, 300, b"check")})
    await log.as_leader(5, "ready", id=1, beginning=(6, {"p0": (1, 2, b"from"), "p1": (1, 2, b"to")}))
    await log.as_leader(6, "level", level=2)
    await log.as_leader(7, "create_topic", topic=TOPIC)
    await log.as_leader(8, "move", at_ms=9, channels={"p1": (1, "other")})
    await wal.append(STATE, b"no record", log.time - 5)
    return wal


async def cluster_log() -> MemoryWal:
    """A cluster of level 2 with a member, whose transaction is committed, and not written by all."""
    wal = MemoryWal(MemoryLog())
    await wal.create_channel(STATE, POLICY)
    log = Written(wal, RecordType.CLUSTER)
    await log.put("n", 1, "begin")
    await log.put("n", 2, "found", id="c", check="x")
    await log.put("n", 3, "register", **MEMBER)
    await log.put("n", 4, "level", level=2)
    await log.put("n", 5, "decide", **decided(TransactionId("p", 1, "x"), 7, ["p0", "p1"], 0))
    await log.put("n", 6, "written", incarnation="n-1", channels={"p0": [["p", 1, "x"]]})
    return wal


def there(channel: str, id: bytes) -> bytes:
    """Where ids are in the new log: that of one fence is there no more."""
    return b"" if id == b"f1" else b"%s in %s" % (id, channel.encode())


def with_others(value: Any) -> Any:
    """A snapshot with the ids of the new log, wherever it has one: each is of one channel."""
    if isinstance(value, dict):
        return {key: with_others(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return (
            type(value)(map(with_others, value))
            if type(value) in (list, tuple)
            else value._make(map(with_others, value))
        )
    channels = [channel for channel, ids in IDS.items() if value in ids] if isinstance(value, bytes) else []
    return there(channels[0], value) if channels else value


async def moved(old: Wal, new: Wal, kind: Any, check: Any = None) -> Any:
    state = await MovedState.read(old, STATE, kind)
    return await state.write(new, AUTHOR, there, check or Checks())


async def prepared_log() -> MemoryWal:
    new = MemoryWal(MemoryLog())
    await new.create_channel(STATE, POLICY)
    return new


async def reader(wal: Wal, kind: Any, levels: FeatureLevels = records.LEVELS) -> Fold[Any]:
    """What a reader that begins now knows."""
    found = Fold(kind.create, kind.type, led=kind.led, levels=levels)
    for entry in await content(wal):
        found.read(entry)
    found.finish()
    return found


async def content(wal: Wal) -> list[Any]:
    return [entry async for entry in stored_entries(wal, await wal.describe(STATE))]


async def applied(wal: Wal, found: Fold[Any], log: Written, *args: Any, **fields: Any) -> Applied | None:
    await log.put(*args, **fields)
    return found.read((await content(wal))[-1])


@pytest.mark.parametrize("page_bytes", [512 * 1024, 50], ids=["one page", "pages"])
async def test_a_catalog_is_the_same_with_the_ids_of_the_new_log(
    page_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "PAGE_BYTES", page_bytes)
    old, new = await catalog_log(), await prepared_log()
    proof = await moved(old, new, CATALOG_KIND)
    before, after = await reader(old, CATALOG_KIND), await reader(new, CATALOG_KIND)
    assert len(before.state.topics) == 1
    assert before.state.collections["cities"].beginning is not None
    found = after.state
    assert found.snapshot() == with_others(before.state.snapshot())
    assert found.channels["p0"].fences == {1: b"", 2: b"f2 in p0"}
    assert found.channels["p0"].checkpoint == b"check in p0"
    assert found.channels["p1"].checkpoint == b""
    assert found.collections["cities"].beginning.ends == {"p0": (1, 2, b"from in p0"), "p1": (1, 2, b"to in p1")}
    assert [topic.ends["t0"] for topic in found.topics] == [(b"end in t0", 7)]
    entries = await content(new)
    assert (after.level, after.claim) == (2, Claim(entries[0].id, 1, AUTHOR))
    assert decode_event(decode(entries[0].payload))["node"] == AUTHOR
    assert found.channels["p1"].target == "other"
    assert (len(entries) == 2) == (page_bytes > 50)
    assert {entry.timestamp for entry in entries} == {max(entry.timestamp for entry in await content(old))}
    assert {decode(entry.payload).ts for entry in entries} == {entries[0].timestamp}
    assert (proof.entries, proof.bytes) == (len(entries), sum(len(entry.payload) for entry in entries))
    assert (proof.checksum, proof.last_new) == (checksum_of(entries), entries[-1].id)
    assert proof.last_old == proof.latest_old == (await content(old))[-1].id
    assert new.log.channels[STATE].holds == {HOLDER: entries[0].id}


async def test_the_ids_that_a_state_holds_are_known_by_channel() -> None:
    assert (await MovedState.read(await catalog_log(), STATE, CATALOG_KIND)).ids() == IDS
    assert (await MovedState.read(await cluster_log(), STATE, CLUSTER_KIND)).ids() == {}


async def test_records_count_in_the_new_log_as_they_would_have_in_the_old_one() -> None:
    """Own numbers go along, those of leaders were forgotten with the claim."""
    old, new = await catalog_log(), await prepared_log()
    await moved(old, new, CATALOG_KIND)
    found, log = await reader(new, CATALOG_KIND), Written(new, RecordType.CATALOG)
    again = await applied(new, found, log, "n", 3, "renewed", node="n", channels={"p0": (2, 400, b"")})
    assert again is not None
    assert isinstance(again.error, PreconditionFailed)
    last = await applied(new, found, log, "n", 4, "renewed", node="n", channels={"p0": (2, 400, b"")})
    assert last is not None
    assert (last.error, found.state.channels["p0"].limit) == (None, 400)
    log.claim = found.claim
    await log.lead("b")
    led = found.read((await content(new))[-1])
    assert led is not None
    assert (led.error, found.claim.term) == (None, 2)
    await log.as_leader(2, "load", id=1, replicas=3)
    loaded = found.read((await content(new))[-1])
    assert loaded is not None
    assert loaded.error is None


async def test_a_cluster_goes_along_with_its_members_decisions_and_numbers() -> None:
    old, new = await cluster_log(), await prepared_log()
    await moved(old, new, CLUSTER_KIND)
    before, after = await reader(old, CLUSTER_KIND), await reader(new, CLUSTER_KIND)
    assert after.state.snapshot() == before.state.snapshot()
    assert after.state.members.keys() == {"n-1"}
    assert [after.state.transactions.unwritten(channel) for channel in ("p0", "p1")] == [[], [("p", 1, "x")]]
    assert (after.level, after.state.level, after.claim) == (2, 2, Claim())
    log = Written(new, RecordType.CLUSTER)
    late = await applied(new, after, log, "n", 6, "leave", incarnation="n-1")
    assert late is not None
    assert isinstance(late.error, PreconditionFailed)
    left = await applied(new, after, log, "n", 7, "leave", incarnation="n-1")
    assert left is not None
    assert left.error is None


@pytest.mark.parametrize(("write", "kind"), [(catalog_log, CATALOG_KIND), (cluster_log, CLUSTER_KIND)])
async def test_a_version_that_does_not_know_the_level_reads_no_state_of_it(write: Any, kind: Any) -> None:
    new = await prepared_log()
    await moved(await write(), new, kind)
    with pytest.raises(FormatTooNew):
        await reader(new, kind, FeatureLevels(1, 1))


@pytest.mark.parametrize(("write", "kind"), [(catalog_log, CATALOG_KIND), (cluster_log, CLUSTER_KIND)])
async def test_what_an_earlier_run_has_left_is_gone_on_with_or_begun_anew(
    write: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write is checked before, so that it is no later run's."""
    monkeypatch.setattr(records, "PAGE_BYTES", 50)
    old, whole, checks = await write(), await prepared_log(), Checks()
    await moved(old, whole, kind, checks)
    wanted = [(entry.id, bytes(entry.payload)) for entry in await content(whole)]
    assert checks.count == len(wanted) > 3
    for there in range(len(wanted) + 1):
        new, rest = await prepared_log(), Checks()
        if there < len(wanted):
            with pytest.raises(Fenced):
                await moved(old, new, kind, Checks(there))
        else:
            await moved(old, new, kind)
        assert len(await content(new)) == there
        await moved(old, new, kind, rest)
        assert [(entry.id, bytes(entry.payload)) for entry in await content(new)] == wanted
        assert rest.count == len(wanted) - there

    async def begun_anew(new: MemoryWal) -> None:
        before, checks = len(await content(new)), Checks()
        await moved(old, new, kind, checks)
        assert [bytes(entry.payload) for entry in await content(new)] == [payload for _, payload in wanted]
        assert checks.count == len(wanted) + 2, before
        assert new.log.channels[STATE].policy == POLICY

    new = await prepared_log()
    await moved(old, new, kind)
    await new.append(STATE, wanted[-1][1], 1)  # more than there should be
    await begun_anew(new)
    new = await prepared_log()
    await new.append(STATE, b"of others")
    await begun_anew(new)
    new = await prepared_log()
    await new.append(STATE, wanted[0][1], 1)  # the record, at another time
    await begun_anew(new)


@pytest.mark.parametrize("left", [0, 1])
async def test_a_state_that_has_not_begun_has_an_empty_channel(left: int) -> None:
    old, new = await prepared_log(), await prepared_log()
    for _ in range(left):
        await new.append(STATE, b"of others")
    state = await MovedState.read(old, STATE, CATALOG_KIND)
    assert not state.begun
    assert not state.entries
    proof = await state.write(new, AUTHOR, there, Checks())
    assert await content(new) == []
    assert (proof.entries, proof.last_new, proof.last_old, proof.latest_old) == (0, b"", b"", b"")


async def test_a_channel_without_a_state_says_so() -> None:
    old = await prepared_log()
    await old.append(STATE, encode(decode((await content(await cluster_log()))[0].payload)))
    state = await MovedState.read(old, STATE, CATALOG_KIND)
    assert not state.begun
    assert state.entries


def test_a_snapshot_of_an_earlier_version_has_no_topics() -> None:
    snapshot: Mapping[str, Any] = {"channels": {"p0": ("", 1, 2, 3, b"", {})}, "collections": [], "next_id": 4}
    assert with_ids(snapshot, there) == {"channels": {"p0": ("", 1, 2, 3, b"", {})}, "collections": [], "next_id": 4}
