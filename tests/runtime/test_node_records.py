"""Records of channels that nodes own go along byte for byte, but for where a releaser may begin to read."""

from __future__ import annotations

import pytest

from tidewal.runtime.delays.releaser import HEAD
from tidewal.runtime.errors import Unsupported
from tidewal.runtime.log.record import Record, RecordType, decode, encode
from tidewal.runtime.log.wal import Entry
from tidewal.runtime.migration.channel_copy import HOLDING_IDS
from tidewal.runtime.migration.node_records import node_entry
from tidewal.runtime.ownership.batch import SOURCE, SOURCE_OFFSET, recorded_source, sourced
from tidewal.runtime.ownership.producers import BatchOutcome, ProducerTable

DELAYS = {RecordType.DELAYED, RecordType.CANCELLED, RecordType.DELAYED_PAGE}
ALLOWED = {RecordType.PRODUCERS, RecordType.DEAD_LETTER} | DELAYS


def moved(record: Record | bytes) -> bytes:
    payload = record if isinstance(record, bytes) else encode(record)
    return bytes(node_entry("p0", Entry(b"id", 7, payload)).payload)


def table(**offsets: bytes) -> ProducerTable:
    found = ProducerTable()
    found.remember("shop", 3, BatchOutcome(5, 1), 9)
    for source, offset in offsets.items():
        found.reach(source.replace("_", "."), offset)
    return found


def test_an_entry_keeps_its_id_and_its_time() -> None:
    entry = Entry(b"id", 7, encode(Record(RecordType.PRODUCERS, body=table(a_head=b"1").pages()[-1])))
    assert node_entry("p0", entry)[:2] == entry[:2]
    assert HEAD == ".head"


@pytest.mark.parametrize("type", [each for each in RecordType if each not in ALLOWED | HOLDING_IDS])
def test_what_holds_no_ids_stays_as_it_is(type: RecordType) -> None:
    """Also what a transaction over several owners has prepared, and a source's name beside other records."""
    record = Record(type, term=1, cseq=2, body=b"body", tags={SOURCE: "a.head", SOURCE_OFFSET: b"1"})
    assert moved(record) == encode(record)


@pytest.mark.parametrize("type", sorted(DELAYS))
def test_ids_of_delayed_messages_are_none_of_the_log(type: RecordType) -> None:
    assert moved(Record(type, body=b"body")) == encode(Record(type, body=b"body"))


@pytest.mark.parametrize("type", sorted(HOLDING_IDS - ALLOWED))
def test_other_records_that_hold_ids_are_refused(type: RecordType) -> None:
    with pytest.raises(Unsupported, match=f"p0 has a record {type.name}"):
        moved(Record(type))


def test_a_dead_letter_says_how_often_it_was_moved() -> None:
    letter = Record(RecordType.DEAD_LETTER, ts=4, key=b"id", tags={"channel": "p1"}, body=b"bad")
    once = decode(moved(letter))
    assert once.tags == {"channel": "p1", "moved": 1}
    assert (once.ts, once.key, once.body) == (4, b"id", b"bad")
    assert decode(moved(moved(letter))).tags == {"channel": "p1", "moved": 2}


def test_of_a_table_only_heads_are_left_out() -> None:
    plain = Record(RecordType.PRODUCERS, ts=4, term=1, cseq=2, tags={"tag": 1}, body=table(a=b"1").pages()[0])
    assert moved(plain) == encode(plain)
    *_, page = table(a=b"1", a_head=b"2", b_head=b"3").pages()
    with_heads = Record(RecordType.PRODUCERS, ts=4, term=1, cseq=2, tags={"tag": 1}, body=page)
    after = decode(moved(with_heads))
    assert after.tags == {"tag": 1}
    assert (after.ts, after.term, after.cseq) == (4, 1, 2)
    found = ProducerTable.from_bytes(after.body)
    assert [found.source_offset(source) for source in ("a", "a.head", "b.head")] == [b"1", b"", b""]


def test_outcomes_beside_heads_go_along() -> None:
    merged = ProducerTable()
    for page in table(a_head=b"2").pages():
        merged.merge(ProducerTable.from_bytes(decode(moved(Record(RecordType.PRODUCERS, body=page))).body))
    assert merged.pages() == table().pages()


def test_a_note_of_a_head_says_nothing_any_more_and_one_of_another_source_does() -> None:
    note = Record(RecordType.PRODUCERS, tags={"tag": 1}, body=table().pages()[0])
    head, other = sourced("a.head", b"1", note), sourced("a", b"1", note)
    after = decode(moved(head))
    assert (after.tags, bytes(after.body)) == ({"tag": 1}, note.body)
    assert moved(other) == encode(other)
    assert recorded_source(decode(moved(other))) == ("a", b"1")


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\x01\x02"])
def test_a_table_that_no_owner_can_read_stays_as_it_is(body: bytes) -> None:
    record = Record(RecordType.PRODUCERS, body=body)
    assert moved(record) == encode(record)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"TW",
        encode(Record(RecordType.PRODUCERS))[:-1],
        encode(Record(RecordType.DEAD_LETTER))[:-1],
        b"plain",
    ],
)
def test_what_is_no_record_stays_as_it_is(payload: bytes) -> None:
    assert moved(payload) == payload
