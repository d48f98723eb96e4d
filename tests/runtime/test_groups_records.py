"""A group's members that deliver records: what counts of a channel, each once, wherever the channel moves."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewal.runtime.clock import HybridClock, add_ms
from tidewal.runtime.errors import Fenced, InvalidRequest, Overloaded
from tidewal.runtime.groups import record_member
from tidewal.runtime.groups.processing import Semantics, process
from tidewal.runtime.groups.record_member import RecordMember, _state_of
from tidewal.runtime.groups.record_pack import RecordPack
from tidewal.runtime.groups.retry_policy import GROUP_DEAD_LETTERS, RetryPolicy
from tidewal.runtime.log.left_out import EntryFilter
from tidewal.runtime.log.record import BatchPart, Record, RecordType, decode, encode
from tidewal.runtime.log.wal import Append, ChannelPolicy, Entry, From
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.ownership import ChannelGrant, ChannelOwner
from tidewal.runtime.streams.channel_reader import ChannelReader
from tidewal.runtime.testing.clock import elapse, run_virtual
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

EXACTLY = Semantics.EXACTLY_ONCE
TIME_ONLY = (RecordType.TIME_TICK, RecordType.FENCE, RecordType.PRODUCERS)


def row(term: int, cseq: int, part: BatchPart | None = None, kind: RecordType = RecordType.ROWS) -> bytes:
    return encode(Record(kind, ts=cseq, term=term, cseq=cseq, part=part))


def junk(number: int) -> bytes:
    return b"no record %d" % number


@st.composite
def history(draw) -> list[bytes]:
    """What a channel with owners may hold: batches, some cut off, ticks, repetitions, zombies, junk."""
    written: list[bytes] = []
    for term in range(1, draw(st.integers(1, 3)) + 1):
        cseq = 0
        for _ in range(draw(st.integers(1, 6))):
            match draw(st.sampled_from(["one", "batch", "cut", "tick", "again", "zombie", "junk"])):
                case "one":
                    written.append(row(term, cseq := cseq + 1))
                case "batch" | "cut" as what:
                    of = draw(st.integers(2, 4))
                    count, first = of - (what == "cut"), cseq + 1
                    cseq += count
                    written += [row(term, first + n, BatchPart(first, n, of)) for n in range(count)]
                case "tick":
                    written.append(row(term, cseq := cseq + 1, kind=RecordType.TIME_TICK))
                case "again":
                    written.append(row(term, cseq))
                case "zombie":
                    written.append(row(max(1, term - 1), cseq + 1 if term == 1 else 50))
                    cseq += term == 1
                case _:
                    written.append(junk(len(written)))
    return [*written, row(9, 1)]


def accepted(payloads: list[bytes]) -> list[bytes]:
    """What a single reader of all makes of it."""
    entries = [Entry(number.to_bytes(8, "big"), 0, payload) for number, payload in enumerate(payloads, 1)]
    return [name(record) for record in ChannelReader("c").accept(entries) if record.type not in TIME_ONLY]


def passing(payloads: list[bytes], where: str | None) -> list[bytes]:
    """What of that a filter lets through: a batch where any of its parts passes."""
    entries = [Entry(number.to_bytes(8, "big"), 0, payload) for number, payload in enumerate(payloads, 1)]
    batches: dict[tuple[int, int, int], list[Record]] = {}
    for record in ChannelReader("c").accept(entries):
        if record.type not in TIME_ONLY:
            alone = record.part is None or record.part.of == 1
            key = (record.term, 0, record.cseq) if alone or record.part is None else (record.term, 1, record.part.batch)
            batches.setdefault(key, []).append(record)
    wanted = [batch for batch in batches.values() if where is None or any(each.cseq % 3 == 1 for each in batch)]
    return [name(record) for batch in wanted for record in batch]


class ThinningWal(MemoryWal):
    """A log that leaves out what does not pass, as an owner in another process does."""

    async def read_where(self, channel, start, where):
        async for entries in self.read(channel, start):
            thinned = EntryFilter(where)
            thinned.add(entries)
            yield thinned.taken()


def name(record: Record) -> bytes:
    return b"%d %d" % (record.term, record.cseq)


@pytest.mark.slow
@settings(max_examples=150)
@given(history(), st.integers(0, 2**32), st.sampled_from([None, "_cseq % 3 == 1"]), st.booleans())
def test_whatever_moves_and_fails_each_record_that_counts_comes_once_and_in_order(payloads, seed, where, at_owner):
    log = MemoryLog()

    async def main():
        wal = ThinningWal(log) if at_owner else MemoryWal(log)
        for channel in ("c", "out"):
            await wal.create_channel(channel, ChannelPolicy())
        chance = random.Random(seed)  # not hypothesis', which would find one that fails for ever

        async def handle(pack):
            if chance.random() < 0.2:
                raise ArithmeticError
            return [Append("out", name(record)) for record in pack.records]

        rest, member = payloads, await wal.join("g", ["c"])
        records = RecordMember(wal, member, where=where)
        while rest:
            count = chance.randint(1, 6)
            await wal.append_many([Append("c", payload) for payload in rest[:count]])
            rest = rest[count:]
            retry = RetryPolicy(attempts=50, last_pause_s=1, seed=1)
            timeout_s = 1000.0 if not rest else chance.choice([0.05, 0.5, 1000.0])
            await process(wal, records, handle, EXACTLY, retry=retry, timeout_s=timeout_s)
            if chance.random() < 0.4:
                await records.aclose()
                records = RecordMember(wal, await wal.join("g", ["c"]), where=where)
        await records.aclose()

    run_virtual(main())
    outputs = [bytes(entry.payload) for entry in log.channels["out"].entries]
    assert outputs == passing(payloads, where)
    assert where is not None or outputs == accepted(payloads)
    letters = log.channels[GROUP_DEAD_LETTERS].entries
    assert [bytes(decode(entry.payload).body) for entry in letters] == [p for p in payloads if p.startswith(b"no")]


class Owners:
    """A channel `c` in a memory log, with one owner after the other."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.wal = MemoryWal(self.log)
        self.clock = HybridClock()
        self.term = 0
        self.limit = 0

    async def owner(self) -> ChannelOwner:
        owner = ChannelOwner(self.wal, self.clock)
        self.term += 1
        before, self.limit = self.limit, add_ms(self.clock.now(), 60_000 * self.term)
        await owner.acquire(ChannelGrant("c", term=self.term, previous_limit=before, limit=self.limit))
        owner.activate("c", self.term)
        return owner


def keyed(*keys: bytes):
    return [("c", Record(RecordType.ROWS, key=key)) for key in keys]


def test_packs_follow_each_other_in_time_over_owners_and_members():
    async def main():
        owners = Owners()
        for channel in ("c", "out"):
            await owners.wal.create_channel(channel, ChannelPolicy())
        first = await owners.owner()
        await first.append(keyed(b"a", b"b"))
        member = RecordMember(owners.wal, await owners.wal.join("g", ["c"]))
        packs = [await anext(member)]
        await member.acknowledge(packs[-1], metadata=b"mine")
        await member.aclose()

        second = await owners.owner()
        await second.append(keyed(b"c"))
        member = RecordMember(owners.wal, await owners.wal.join("g", ["c"]))
        assert member.metadata("c") == b"mine"
        packs.append(await anext(member))
        await member.commit([packs[-1]], [Append("out", b"c")])
        assert member.metadata("c") == b"mine"
        await member.annotate("c", b"")
        await second.append(keyed(b"d"))
        packs.append(await anext(member))
        member.redeliver(packs[-1])
        with pytest.raises(Fenced):
            await member.acknowledge(packs[-1])
        packs[-1] = await anext(member)
        await member.acknowledge(packs[-1])
        with pytest.raises(InvalidRequest):
            await member.commit([packs[-1]], [Append("out", b"again")])

        assert [[record.key for record in pack.records] for pack in packs] == [[b"a", b"b"], [b"c"], [b"d"]]
        assert packs[0].begin_ts == 0
        for before, pack in itertools.pairwise(packs):
            assert pack.begin_ts >= before.end_ts
        for pack in packs:
            assert all(pack.begin_ts < record.ts <= pack.end_ts for record in pack.records)
        assert len(packs[0].parts()) == 1  # one batch of the owner
        await member.aclose()

    run_virtual(main())


def test_what_has_no_record_is_acknowledged_with_what_lies_before_it():
    async def main():
        wal = MemoryWal()
        await wal.create_channel("c", ChannelPolicy())
        member = RecordMember(wal, await wal.join("g", ["c"]))
        tick = row(1, 2, kind=RecordType.TIME_TICK)
        await wal.append("c", row(1, 1))
        pack = await anext(member)
        waiting = asyncio.create_task(anext(member))
        silent = await wal.append("c", tick)
        await asyncio.sleep(0.1)
        assert await position(wal) < pack.entries[-1].id, "a tick acknowledged the record before it"
        await member.acknowledge(pack)
        assert await position(wal) == silent
        silent = await wal.append("c", row(1, 3, kind=RecordType.TIME_TICK))
        await asyncio.sleep(0.1)
        assert await position(wal) == silent
        waiting.cancel()
        await member.aclose()

    run_virtual(main())


async def position(wal) -> bytes:
    (info,) = await wal.groups()
    return info.positions["c"] or b""


@pytest.mark.parametrize("asked", [True, False])
def test_a_bad_record_goes_to_the_handler_or_becomes_a_letter_and_the_channel_goes_on(asked):
    told: list[tuple[str, bytes, str]] = []
    metrics = Metrics("1")

    async def main():
        wal = MemoryWal()
        await wal.create_channel("c", ChannelPolicy())
        damaged = bytearray(row(1, 2))
        damaged[-1] ^= 1
        ids = await wal.append_many([Append("c", each) for each in (row(1, 1), b"plain", bytes(damaged), row(1, 3))])

        def bad(channel, entry, error):
            told.append((channel, entry.id, error.reason))

        member = RecordMember(wal, await wal.join("g", ["c"]), on_bad=bad if asked else None, metrics=metrics)
        pack = await anext(member)
        assert [record.cseq for record in pack.records] == [1, 3]
        await member.acknowledge(pack)
        await member.aclose()
        if asked:
            assert told == [("c", ids[1], "length"), ("c", ids[2], "checksum")]
            assert GROUP_DEAD_LETTERS not in await wal.channels()
        else:
            letters = [decode(entry.payload) for entry in await anext(wal.read(GROUP_DEAD_LETTERS, From.EARLIEST))]
            assert [(letter.key, bytes(letter.body)) for letter in letters] == [
                (ids[1], b"plain"),
                (ids[2], bytes(damaged)),
            ]
            assert {letter.tags["reason"] for letter in letters} == {"record"}
            assert b'wal_group_dead_letter_total{group="g",node_id="1",reason="record"} 2.0' in metrics.render()
        plain = await wal.join("bytes", ["c"])  # who reads entries gets them all, as they are
        assert [bytes(entry.payload) for entry in (await anext(plain)).entries][1] == b"plain"
        await plain.aclose()

    run_virtual(main())


@pytest.mark.parametrize(("policy", "channel"), [(RetryPolicy(1), "own"), (RetryPolicy(1, dead_letters="x"), "x")])
def test_what_a_handler_cannot_process_goes_to_the_letters_of_the_member(policy, channel):
    """As those of a cluster's topics do, whose prefix they have."""

    async def main():
        wal = MemoryWal()
        await wal.create_channel("c", ChannelPolicy())
        await wal.append("c", row(1, 1))
        member = RecordMember(wal, await wal.join("g", ["c"]), dead_letters="own")

        async def handle(pack):
            raise ArithmeticError

        await process(wal, member, handle, EXACTLY, retry=policy, timeout_s=60)
        assert len(wal.log.channels[channel].entries) == 1
        assert GROUP_DEAD_LETTERS not in await wal.channels()
        await member.aclose()

    run_virtual(main())


def test_two_acknowledgements_at_once_that_pass_a_bad_record_make_one_letter():
    async def main():
        log = MemoryLog()
        wal = MemoryWal(log, FaultPlan(1, Rates(delay=1.0)))
        await wal.create_channel("c", ChannelPolicy())
        member = RecordMember(wal, await wal.join("g", ["c"]))
        packs = []
        for cseq in (1, 2):
            await wal.append_many([Append("c", b"plain"), Append("c", row(1, cseq))])
            packs.append(await anext(member))
        await asyncio.gather(*map(member.acknowledge, packs))
        assert len(log.channels[GROUP_DEAD_LETTERS].entries) == 2
        await member.aclose()

    run_virtual(main())


def test_large_bad_records_wait_for_an_acknowledgement_within_a_limit(monkeypatch):
    monkeypatch.setattr(record_member, "MAX_BAD_BYTES", 10_000)

    async def main():
        log = MemoryLog()
        wal = MemoryWal(log)
        await wal.create_channel("c", ChannelPolicy())
        member = RecordMember(wal, await wal.join("g", ["c"]))
        await wal.append("c", row(1, 1))
        pack = await anext(member)
        waiting = asyncio.create_task(anext(member))
        for _ in range(50):
            await wal.append("c", b"x" * 1000)
            await elapse(0.01)
        await wal.append("c", row(1, 2))
        with pytest.raises(Overloaded) as refused:
            await waiting
        assert (refused.value.limit, refused.value.channel) == ("bad_record_bytes", "c")
        waiting = asyncio.create_task(anext(member))
        await elapse(10)
        assert not waiting.done()
        await member.acknowledge(pack)
        pack = await waiting
        assert [record.cseq for record in pack.records] == [2]
        await member.acknowledge(pack)
        assert len(log.channels[GROUP_DEAD_LETTERS].entries) == 50
        await member.aclose()

    run_virtual(main())


def test_parts_of_a_pack_remember_the_owner_before_it():
    owned = [Record(RecordType.ROWS, id=b"1"), Record(RecordType.ROWS, id=b"2", term=3, cseq=5)]
    entries = [Entry(record.id, 0, b"") for record in owned]
    pack = RecordPack("c", owned, 0, 0, entries, 1, owned_before=(2, 7), owned=(3, 5))
    assert [(part.owned_before, part.owned) for part in pack.parts()] == [((2, 7), (2, 7)), ((2, 7), (3, 5))]


def test_the_one_bad_record_of_a_batch_that_failed_is_found():
    async def main():
        owners = Owners()
        for channel in ("c", "out"):
            await owners.wal.create_channel(channel, ChannelPolicy())
        owner = await owners.owner()
        for key in (b"a", b"poison", b"b"):
            await owner.append(keyed(key))

        async def handle(pack):
            if any(record.key == b"poison" for record in pack.records):
                raise ArithmeticError
            return [Append("out", record.key) for record in pack.records]

        member = RecordMember(owners.wal, await owners.wal.join("g", ["c"]))
        await process(owners.wal, member, handle, EXACTLY, retry=RetryPolicy(attempts=2), timeout_s=100)
        await member.aclose()
        assert [bytes(entry.payload) for entry in owners.log.channels["out"].entries] == [b"a", b"b"]
        (entry,) = owners.log.channels[GROUP_DEAD_LETTERS].entries
        assert decode(decode(entry.payload).body).key == b"poison"
        assert await position(owners.wal) == await owners.wal.latest_id("c")

    run_virtual(main())


@pytest.mark.parametrize("part", [b"", b"\xc1", b"\x93\x01\x02", b"\x92\x01\x02", b"\x93\x01\xa1x\x02"])
def test_a_state_that_no_member_stored_is_none(part):
    assert _state_of(part) == (0, 0, 0)
