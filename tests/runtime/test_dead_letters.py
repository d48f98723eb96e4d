"""Bad records become dead letters with their reason; too many are counted only; none of it stops the reader."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

from tidewal.runtime.clock import HybridClock
from tidewal.runtime.errors import BadRecord
from tidewal.runtime.log.dead_letters import LETTER_BODY_BYTES, REASONS, REPORTED_S, DeadLetters
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.record import Record, RecordType, decode, encode
from tidewal.runtime.log.wal import ChannelPolicy, Entry
from tidewal.runtime.streams.factory import Factory
from tidewal.runtime.testing.clock import VirtualClock
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryWal

CHANNEL = Names().dead_letters


@pytest.fixture
def source() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def wal() -> MemoryWal:
    log = MemoryWal(faults=FaultPlan(0))
    await log.create_channel("c", ChannelPolicy())
    return log


def kept(wal: MemoryWal) -> list[Record]:
    return [decode(entry.payload) for entry in wal.log.channels[CHANNEL].entries]


async def test_a_bad_record_between_good_ones_is_counted_and_found_again(wal, source):
    counted: list[tuple[str, str]] = []
    clock = HybridClock(source)
    letters = DeadLetters(wal, clock, CHANNEL, on_counted=lambda *what: counted.append(what))
    await letters.open()
    good = [encode(Record(RecordType.ROWS, ts=ts, term=1, cseq=ts, body=b"good")) for ts in (1, 2)]
    await wal.append("c", good[0])
    bad = await wal.append("c", good[1][:-1])
    await wal.append("c", good[1])
    stream = Factory(wal, clock, dead_letters=letters).tt_stream()
    stream.as_consumer(["c"])
    received = [message.ts for message in (await anext(stream)).messages]
    assert received == [1, 2]
    await stream.close()
    (letter,) = kept(wal)
    assert letter.type is RecordType.DEAD_LETTER
    assert (letter.key, bytes(letter.body)) == (bad, good[1][:-1])
    assert (letter.tags["channel"], letter.tags["reason"], letter.tags["size"]) == ("c", "checksum", len(good[1]) - 1)
    assert counted == [("c", "checksum")]
    assert letters.counts.kept == 1


async def test_a_late_record_is_kept_too(wal, source):
    letters = DeadLetters(wal, HybridClock(source), CHANNEL)
    await letters.open()
    stream = Factory(wal, HybridClock(source), dead_letters=letters).tt_stream(ordered=False)
    stream.as_consumer(["c"])
    await wal.append("c", encode(Record(RecordType.TIME_TICK, ts=10, term=1, cseq=1)))
    assert (await anext(stream)).end_ts == 10
    late = Record(RecordType.ROWS, ts=7, term=1, cseq=2, body=b"late")
    id = await wal.append("c", encode(late))
    await wal.append("c", encode(Record(RecordType.TIME_TICK, ts=20, term=1, cseq=3)))
    assert (await anext(stream)).messages == []
    await stream.close()
    (letter,) = kept(wal)
    assert (letter.tags["reason"], letter.key) == ("late", id)
    assert bytes(decode(letter.body).body) == b"late"


async def test_too_many_or_too_much_is_counted_only_until_time_has_passed(wal, source):
    letters = DeadLetters(wal, HybridClock(source), CHANNEL, letters_per_s=3, bytes_per_s=100)
    await letters.open()
    error = BadRecord("bad", reason="frame")
    for _ in range(10):
        letters.bad("c", Entry(b"1", 0, b"x"), error)
    assert (letters.counts.kept, letters.counts.over_limit) == (3, 7)
    source.advance(2)
    for _ in range(3):
        letters.bad("c", Entry(b"1", 0, bytes(60)), error)
    assert (letters.counts.kept, letters.counts.over_limit) == (4, 9)
    source.advance(5)
    letters.bad("c", Entry(b"1", 0, bytes(1_000)), error)  # larger than a second's worth: alone it passes
    letters.bad("c", Entry(b"1", 0, b"x"), error)
    assert (letters.counts.kept, letters.counts.over_limit) == (5, 10)


async def test_the_log_says_the_first_bad_record_of_a_kind_and_then_how_many(wal, source, caplog):
    letters = DeadLetters(wal, HybridClock(source), CHANNEL)
    await letters.open()
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        letters.bad("c", Entry(b"1", 0, b"x"), BadRecord("its checksum is wrong", reason="checksum"))
    letters.bad("c", Entry(b"1", 0, b"x"), BadRecord("too short", reason="frame"))
    source.advance(REPORTED_S)
    letters.bad("c", Entry(b"1", 0, b"x"), BadRecord("its checksum is wrong", reason="checksum"))
    assert [line.getMessage() for line in caplog.records] == [
        "a record of c cannot be used (checksum): its checksum is wrong",
        "a record of c cannot be used (frame): too short",
        "a record of c cannot be used (checksum): its checksum is wrong, the last of 3 since the line before",
    ]


async def test_a_body_too_large_for_the_channel_is_cut(wal, source):
    letters = DeadLetters(wal, HybridClock(source), CHANNEL)
    await letters.open()
    letters.bad("c", Entry(b"1", 0, bytes(LETTER_BODY_BYTES + 1)), BadRecord("m" * 5_000, reason="frame"))
    (letter,) = kept(wal)
    assert (len(letter.body), letter.tags["size"]) == (LETTER_BODY_BYTES, LETTER_BODY_BYTES + 1)


async def test_what_the_channel_does_not_take_is_counted_and_raises_nothing(wal, source):
    letters = DeadLetters(wal, HybridClock(source), CHANNEL)
    bad = Entry(b"1", 0, b"x"), BadRecord("bad", reason="frame")
    letters.bad("c", *bad)  # there is no channel yet
    await letters.open()
    wal.faults.rates = Rates(fail=1)
    letters.bad("c", *bad)
    await wal.close()
    letters.bad("c", *bad)
    assert (letters.counts.kept, letters.counts.failed) == (0, 3)


IN_NO_LOG = {"request", "position", "proof"}  # of what clients send and save, and nodes by direct connections


def test_every_reason_that_the_source_gives_is_known():
    root = Path(__file__).parents[2]
    calls = [
        node
        for floor in ("runtime", "actors")
        for path in (root / floor).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "BadRecord"
    ]
    reasons = {ast.literal_eval(k.value) for call in calls for k in call.keywords if k.arg == "reason"}
    assert reasons - IN_NO_LOG == set(REASONS) - {"late"}
