"""Another process than the owner reads with a filter: what does not pass stays at the owner, which says how far it has
come."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import Any, cast

import msgpack
import pytest
import xxhash

from tidewal.adapters.rocksmq.client.owner_connection import OwnerConnection
from tidewal.adapters.rocksmq.owner import requests
from tidewal.runtime.clock import HybridClock
from tidewal.runtime.errors import InvalidFilter, InvalidRequest
from tidewal.runtime.filters.record_filter import compile_record_filter
from tidewal.runtime.groups.record_member import RecordMember
from tidewal.runtime.log.left_out import EntryFilter, LeftOut
from tidewal.runtime.log.record import BODY_ALIGNMENT, HEADER_FIELDS, BatchPart, Record, RecordType, encode, header_of
from tidewal.runtime.log.wal import Append, ChannelPolicy, Entry, From, Wal
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.streams.stream import MsgStream
from tidewal.runtime.streams.tt_stream import TtMsgStream

WHERE = 'tag == "wanted"'
CLIENT = bytes(range(16))
WITHIN_S = 20.0


def entry(cseq: int, tag: str = "other", part: BatchPart | None = None, body: bytes = b"") -> Append:
    record = Record(RecordType.ROWS, ts=10 * cseq, term=1, cseq=cseq, part=part, tags={"tag": tag}, body=body)
    return Append("c", encode(record), record.ts)


@pytest.fixture
async def owner(opening) -> Wal:
    wal = await opening(own=True, tail_bytes=64 * 1024)
    await wal.create_channel("c", ChannelPolicy())
    return wal


@pytest.fixture
async def client(owner, opening) -> Wal:
    return await opening(own=False)


async def sent(wal: Wal, upto: bytes) -> list[Entry]:
    """What the owner sends of the channel to a reader with a filter."""
    entries: list[Entry] = []
    reader = wal.read_where("c", From.EARLIEST, compile_record_filter(WHERE))
    async with asyncio.timeout(WITHIN_S):
        while not entries or entries[-1].id < upto:
            entries += await anext(reader)
    await reader.aclose()  # pyright: ignore[reportAttributeAccessIssue]
    return entries


async def cseqs(stream: MsgStream | TtMsgStream, count: int) -> list[int]:
    found: list[int] = []
    async with asyncio.timeout(WITHIN_S):
        while len(found) < count:
            found += [message.cseq for message in (await anext(stream)).messages]
    return found


async def test_only_what_passes_is_sent(owner, client):
    """From the files and from memory."""
    ids = await owner.append_many(
        [entry(n, "wanted" if n % 100 == 0 else "other", body=bytes(100)) for n in range(1, 951)]
    )
    entries = await sent(client, ids[-1])
    left_out = [each for each in entries if isinstance(each, LeftOut)]
    assert [each.id for each in entries if not isinstance(each, LeftOut)] == ids[99::100]
    assert len(entries) < 60
    assert sum(each.state[2] for each in left_out) == 950 - 9
    assert (left_out[-1].id, left_out[-1].timestamp, left_out[-1].state[:2]) == (ids[-1], 9500, (1, 950))
    assert [each.id for each in await sent(owner, ids[-1])] == ids  # nobody is between this process and its reader
    stream = MsgStream(client, HybridClock(), where=WHERE)
    stream.as_consumer(["c"])
    assert await cseqs(stream, 9) == list(range(100, 901, 100))
    await stream.close()


async def test_a_reader_waits_at_the_end_over_what_does_not_pass(owner, client):
    stream = TtMsgStream(client, where=WHERE)
    stream.as_consumer(["c"])
    await owner.append_many([entry(1), entry(2)])
    async with asyncio.timeout(WITHIN_S):
        pack = await anext(stream)
    assert (pack.messages, pack.end_ts) == ([], 20)
    assert pack.end_positions["c"].cseq == 2
    for n in range(3, 9):  # one after the other: each wakes the reader
        await owner.append_many([entry(n, "wanted" if n == 8 else "other")])
        async with asyncio.timeout(WITHIN_S):
            while stream.end_ts < 10 * n:
                pack = await anext(stream)
    assert [message.cseq for message in pack.messages] == [8]
    await stream.close()


async def test_a_heartbeat_of_what_was_left_out_moves_time(owner, client):
    await owner.append_many([entry(1, "wanted"), entry(2), entry(3)])
    stream = TtMsgStream(client, where=WHERE)
    stream.as_consumer(["c"])
    stream.announce("c", 1, 3, 500)
    async with asyncio.timeout(WITHIN_S):
        while stream.end_ts < 500:
            await anext(stream)
    await stream.close()


async def test_a_batch_whose_rest_comes_later_is_judged_by_the_reader(owner, client):
    for tags, passing in ((("other", "other", "wanted"), True), (("other", "other", "other"), False)):
        first = 1 if passing else 5
        stream = MsgStream(client, HybridClock(), where=WHERE)
        stream.as_consumer(["c"], From.LATEST)
        await stream.place()
        waiting = asyncio.create_task(cseqs(stream, 4 if passing else 1))
        for n, tag in enumerate(tags):
            await owner.append_many([entry(first + n, tag, BatchPart(first, n, 3))])
            await client.describe("c")  # the reader's request was answered before this one
        await owner.append_many([entry(first + 3, "wanted")])
        assert await waiting == ([1, 2, 3, 4] if passing else [8])
        await stream.close()


async def test_a_member_of_a_group_gets_only_what_passes(owner, client):
    metrics = Metrics()
    ids = await owner.append_many([entry(n, "wanted" if n % 50 == 0 else "other") for n in range(1, 231)])
    inner = await client.join("g", ["c"])
    member = RecordMember(client, inner, where=WHERE, metrics=metrics)
    found, got = [], 0
    async with asyncio.timeout(WITHIN_S):
        while len(found) < 4:
            pack = await anext(member)
            found += [record.cseq for record in pack.records]
            got += len(pack.entries)
            await member.acknowledge(pack)
    assert found == [50, 100, 150, 200]
    assert got < 60
    more = await owner.append_many([entry(231), entry(232, "wanted")])
    async with asyncio.timeout(WITHIN_S):
        await member.acknowledge(await anext(member))
    (info,) = await owner.groups()
    assert info.positions == {"c": more[-1]}
    assert metrics.counter("wal_group_filtered_total", group="g")._value.get() == len(ids) - 4 + 1
    await member.aclose()


async def test_an_owner_from_before_filters_sends_all_and_the_reader_filters(owner, client, opening, monkeypatch):
    ids = await owner.append_many([entry(n, "wanted" if n % 10 == 0 else "other") for n in range(1, 31)])
    greeting = requests.Requests._greet

    def old(self, connection, seq, method, arguments):
        self._greeting = {name: value for name, value in self._greeting.items() if name != "filters"}
        greeting(self, connection, seq, method, arguments)

    monkeypatch.setattr(requests.Requests, "_greet", old)
    late = await opening(own=False)
    assert [each.id for each in await sent(late, ids[-1])] == ids
    stream = MsgStream(late, HybridClock(), where=WHERE)
    stream.as_consumer(["c"])
    assert await cseqs(stream, 3) == [10, 20, 30]
    await stream.close()


def with_header(**fields: Any) -> bytes:
    """An intact frame around a header that is that of a row, but for these fields."""
    record = Record(RecordType.ROWS, ts=30, term=1, cseq=3, tags={"tag": "other"})
    named = dict(zip(HEADER_FIELDS, header_of(record), strict=True)) | fields
    header = cast(bytes, msgpack.packb(list(named.values())))
    content = header + bytes(-len(header) % BODY_ALIGNMENT)
    return struct.pack("<2sBBIQ", b"TW", 1, 0, len(header), xxhash.xxh3_64_intdigest(content)) + content


HOSTILE: dict[str, dict[str, Any]] = {
    "a type that is a map": {"type": {}},
    "an unknown type": {"type": 4242},
    "a negative time": {"ts": -1},
    "a negative term": {"term": -1},
    "a term over 63 bits": {"term": 2**63 + 5},
    "a number over 63 bits": {"cseq": 2**63 + 5},
    "tags in tags": {"tags": {"tag": [1], "b": ["x"]}},
    "a key that is a text": {"key": "x"},
    "a key that is a number": {"key": 10},
    "a part of a type of its own": {"part": ["a", 0, 2]},
    "a part of two numbers": {"part": [1, 2]},
}


@pytest.mark.parametrize("where", [WHERE, 'tag == "wanted" or _key == "k" or tag < b'])
@pytest.mark.parametrize("case", HOSTILE)
async def test_a_header_that_none_can_read_is_left_to_the_reader(owner, client, case, where):
    await owner.append_many([entry(1, "wanted"), entry(2), Append("c", with_header(**HOSTILE[case]), 30)])
    await owner.append_many([entry(n, "wanted") for n in (4, 5)])
    bad: list[bytes] = []
    stream = MsgStream(client, HybridClock(), where=where, on_bad=lambda _, found, error: bad.append(found.id))
    stream.as_consumer(["c"])
    assert await cseqs(stream, 3) == [1, 4, 5]
    assert len(bad) == 1
    await stream.close()


async def test_others_have_their_turn_while_entries_are_filtered(owner, client, monkeypatch):
    """The owner's loop comes round between two entries, however few there are."""
    ids = await owner.append_many([entry(n) for n in range(1, 41)])
    turns: list[int] = []
    filtering = requests._filter

    async def observed(entries: Sequence[Entry], passing: EntryFilter) -> None:
        done = asyncio.create_task(filtering(entries, passing))
        count = 0
        while not done.done():
            count += 1
            await asyncio.sleep(0)
        turns.append(count)

    monkeypatch.setattr(requests, "FILTERING_S", 0.0)
    monkeypatch.setattr(requests, "_filter", observed)
    assert [each.id for each in await sent(client, ids[-1])] == [ids[-1]]
    assert sum(turns) >= len(ids)


async def test_a_filter_that_costs_too_much_is_the_readers(owner, client):
    """A text of 60 kB that is compared with a pattern of 4,000 characters, at each place."""
    payload = encode(Record(RecordType.ROWS, ts=1, term=1, cseq=1, tags={"text": "a" * 60_000}))
    (id,) = await owner.append_many([Append("c", payload, 1)])
    for length, kind in ((4_000, Entry), (4, LeftOut)):
        where = compile_record_filter(f'text like "%{"_" * length}b%"')
        async with asyncio.timeout(WITHIN_S):
            (found,) = await anext(client.read_where("c", From.EARLIEST, where))
        assert (type(found), found.id) == (kind, id)


async def test_a_wrong_filter_is_answered_and_the_connection_goes_on(owner, directory):
    await owner.append_many([entry(1)])
    connection = await OwnerConnection.open(directory, CLIENT, on_lost=print)
    with pytest.raises(InvalidFilter) as raised:
        await connection.ask("read", "c", ["earliest"], None, 0.0, "tag =")
    assert raised.value.position == 4
    with pytest.raises(InvalidRequest, match="no request of the protocol"):
        await connection.ask("read", "c", ["earliest"], None, 0.0, 7)
    entries, _, _ = await connection.ask("read", "c", ["earliest"], None, 0.0, 'tag == "wanted"')
    assert [type(each) for each in cast("Sequence[Entry]", entries)] == [LeftOut]
    entries, _, _ = await connection.ask("read", "c", ["earliest"], None, 0.0)
    assert len(entries) == 1
    await connection.close()
