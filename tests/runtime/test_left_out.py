"""What a filter leaves out before it is sent: a reader then has what one has that filters all by itself."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tidewal.runtime.clock import MAX_TIMESTAMP
from tidewal.runtime.errors import BadRecord
from tidewal.runtime.filters.evaluation import Header
from tidewal.runtime.filters.record_filter import RecordFilter, compile_record_filter
from tidewal.runtime.log.left_out import MAX_PATTERN_STEPS, EntryFilter, LeftOut
from tidewal.runtime.log.record import BatchPart, Record, RecordType, encode
from tidewal.runtime.log.wal import Entry
from tidewal.runtime.streams.channel_reader import ChannelReader, Granted, LeftOutRecord

WHERE = compile_record_filter('tag == "wanted"')


def row(term: int, cseq: int, wanted: bool, part: BatchPart | None = None) -> Record:
    tags = {"tag": "wanted" if wanted else "other"}
    return Record(RecordType.ROWS, ts=1000 * term + cseq, term=term, cseq=cseq, part=part, tags=tags)


def log(records: Sequence[Record | bytes]) -> list[Entry]:
    return [
        Entry(number.to_bytes(8, "big"), 0, record if isinstance(record, bytes) else encode(record))
        for number, record in enumerate(records, 1)
    ]


@st.composite
def history(draw: st.DrawFn) -> list[Entry]:
    """What a channel may hold: batches, some cut off, ticks, repetitions, zombies, unowned records, junk."""
    records: list[Record | bytes] = []
    wanted = st.sampled_from([False, False, False, True])
    for term in range(1, draw(st.integers(1, 3)) + 1):
        cseq = 0
        for _ in range(draw(st.integers(1, 8))):
            match draw(st.sampled_from(["one", "one", "batch", "cut", "tick", "again", "zombie", "unowned", "junk"])):
                case "one":
                    records.append(row(term, cseq := cseq + 1, draw(wanted)))
                case "batch" | "cut" as what:
                    of = draw(st.integers(1, 4))
                    count, first = of - (what == "cut"), cseq + 1
                    cseq += count
                    parts = (BatchPart(first, n, of) for n in range(count))
                    records += [row(term, first + n, draw(wanted), part) for n, part in enumerate(parts)]
                case "tick":
                    cseq += 1
                    records.append(Record(RecordType.TIME_TICK, ts=1000 * term + cseq, term=term, cseq=cseq))
                case "again" if cseq:
                    records.append(row(term, cseq, draw(wanted)))
                case "zombie":
                    records.append(row(max(1, term - 1), cseq + 1 if term == 1 else 500, draw(wanted)))
                    cseq += term == 1
                case "unowned":
                    records.append(row(0, 0, draw(wanted)))
                case _:
                    records.append(b"junk" + bytes(draw(st.integers(0, 3))))
    return log(records)


def units(records: Sequence[Record]) -> list[list[Record]]:
    """Records one by one, and batches as a whole."""
    found: list[list[Record]] = []
    for record in records:
        if record.part is not None and record.part.number:
            found[-1].append(record)
        else:
            found.append([record])
    return found


def filtered(entries: Sequence[Entry]) -> list[Record]:
    """The model: read everything, and keep each record or whole batch in which one is wanted, and what is control."""
    read = units(ChannelReader("c").accept(entries))
    return [
        record
        for unit in read
        if any(each.tags.get("tag") == "wanted" or each.type is RecordType.TIME_TICK for each in unit)
        for record in unit
    ]


def cut(draw: st.DataObject, entries: Sequence[Entry]) -> list[Sequence[Entry]]:
    pieces: list[Sequence[Entry]] = []
    while entries:
        count = draw.draw(st.integers(1, len(entries)))
        pieces.append(entries[:count])
        entries = entries[count:]
    return pieces


@settings(max_examples=400, deadline=None)
@given(history(), st.data(), st.booleans())
def test_filtered_reading_is_reading_all_and_filtering(entries: list[Entry], data: st.DataObject, at_owner: bool):
    everything, bad = ChannelReader("c"), []
    everything.on_bad = lambda _, entry, error: bad.append(entry.id)
    all_read = everything.accept(entries)
    reader, handed = ChannelReader("c", where=WHERE), []
    reader.on_bad = lambda _, entry, error: handed.append(entry.id)
    passing, read = EntryFilter(WHERE), []
    for piece in cut(data, entries):
        if at_owner:
            passing.add(piece)
            if data.draw(st.booleans()):  # the answer holds more
                continue
            read += reader.accept(passing.taken())
        else:
            read += reader.accept(piece)
    read += reader.accept(passing.taken())
    assert [each for each in read if not isinstance(each, LeftOutRecord)] == filtered(entries)
    assert handed == bad
    assert (reader.term, reader.cseq) == (everything.term, everything.cseq)
    assert reader.position == everything.position
    owned = [max((each.term, each.cseq) for each in some) for some in (read, all_read) if some]
    assert len(set(owned)) < 2
    assert max((each.ts for each in read), default=0) == max((each.ts for each in all_read), default=0)


@settings(max_examples=200, deadline=None)
@given(history(), st.data())
def test_a_reader_that_goes_on_has_the_rest(entries: list[Entry], data: st.DataObject):
    """From each position behind which one has come, over what was left out, too."""
    assume(entries)
    reader = ChannelReader("c", where=WHERE)
    first = [each for each in reader.accept(_thinned(cut(data, entries)[0])) if not isinstance(each, LeftOutRecord)]
    id, term, cseq = reader.position
    again = ChannelReader("c", where=WHERE, after=(term, cseq))
    rest = again.accept(_thinned([entry for entry in entries if entry.id > id]))
    assert first + [each for each in rest if not isinstance(each, LeftOutRecord)] == filtered(entries)


def _thinned(entries: Sequence[Entry]) -> list[Entry]:
    passing = EntryFilter(WHERE)
    passing.add(entries)
    return passing.taken()


def test_a_run_is_one_entry_which_says_how_far_it_goes():
    entries = log([row(1, n, False) for n in range(1, 6)])
    (left_out,) = _thinned(entries)
    assert isinstance(left_out, LeftOut)
    assert (left_out.id, left_out.timestamp, left_out.state) == (entries[-1].id, 1005, (1, 5, 5))
    assert LeftOut.of(left_out.id, left_out.timestamp, bytes(left_out.payload)) == left_out
    (again,) = _thinned(log([row(1, n, False) for n in (1, 3, 2)]))
    assert isinstance(again, LeftOut)
    assert again.state == (1, 3, 3)  # what comes again is no step back
    with pytest.raises(BadRecord):
        LeftOut.of(left_out.id, 0, b"short")


@pytest.mark.parametrize("at", range(4))
def test_what_was_left_out_has_numbers_that_records_have(at: int):
    numbers = [MAX_TIMESTAMP] * 4
    LeftOut.of(b"id", numbers[0], struct.pack(">QQQ", *numbers[1:]))
    numbers[at] += 1
    with pytest.raises(BadRecord):
        LeftOut.of(b"id", numbers[0], struct.pack(">QQQ", *numbers[1:]))


def test_an_entry_for_which_a_filter_cannot_be_evaluated_is_sent(caplog: pytest.LogCaptureFixture):
    def evaluate(header: Header) -> bool:
        if header[3] == 2:
            raise ArithmeticError
        return False

    entries = log([row(1, 1, False), row(1, 2, False), row(1, 3, False, BatchPart(3, 0, 1))])
    passing = EntryFilter(RecordFilter("a filter", evaluate))
    passing.add(entries)
    assert [type(entry) for entry in passing.taken()] == [LeftOut, Entry, LeftOut]
    assert "could not be evaluated" in caplog.text


def test_of_a_batch_all_is_sent_or_nothing():
    def parts(first: int, *wanted: bool) -> list[Record]:
        return [row(1, first + n, each, BatchPart(first, n, len(wanted))) for n, each in enumerate(wanted)]

    assert _thinned(log(parts(1, False, False, True))) == log(parts(1, False, False, True))
    assert [type(entry) for entry in _thinned(log(parts(1, False, False)))] == [LeftOut]
    torn = log([row(1, 1, False, BatchPart(1, 0, 2)), row(1, 2, False, BatchPart(2, 1, 2))])
    assert _thinned(torn) == torn  # no batch is whole: the reader counts that
    half = log(parts(1, False, False, False)[:2])
    assert _thinned(half) == half  # the reader decides, once it has the rest


def test_the_rest_of_a_batch_that_has_begun_passes():
    entries = log([row(1, n, n == 1, BatchPart(1, n - 1, 3)) for n in (1, 2, 3)])
    reader = ChannelReader("c", where=WHERE, after=(1, 1))
    assert [record.cseq for record in reader.accept(entries)] == [2, 3]


def test_what_no_grant_covers_moves_nothing():
    forged = _thinned(log([row(9, 1, False), row(9, 2, False)]))
    reader = ChannelReader("c", where=WHERE, granted=Granted(2, 1_000_000))
    assert reader.accept(forged) == []
    assert (reader.term, reader.cseq) == (0, 0)
    assert reader.position[0] == forged[-1].id
    assert [record.cseq for record in reader.accept([*log([row(2, 1, True)])])] == [1]


class _Grants:
    """A catalog that has a grant of term 2 which its reader has not read yet."""

    def __init__(self) -> None:
        self.term = 1

    def granted(self, pchannel: str) -> Granted:
        return Granted(self.term)

    async def catch_up(self) -> None:
        self.term = 2


async def test_grants_are_read_anew_before_what_was_left_out_is_judged():
    reader = ChannelReader("c", where=WHERE, grants=_Grants())
    entries = _thinned(log([row(1, 1, True), row(2, 1, False)]))
    accepted, doubtful = reader.accept_granted(entries)
    assert [record.cseq for record in accepted] == [1]
    assert list(doubtful) == entries[1:]
    await reader.learn_grants()
    (mark,) = reader.accept(doubtful)
    assert isinstance(mark, LeftOutRecord)
    assert (reader.term, reader.cseq, reader.counts.filtered) == (2, 1, 1)


def test_a_filter_is_not_evaluated_where_that_takes_too_long():
    looked_at: list[int] = []

    def evaluate(header: Header) -> bool:
        looked_at.append(header[3])
        return False

    def sized(cseq: int, characters: int, body: bytes = b"", part: BatchPart | None = None) -> Record:
        return Record(
            RecordType.ROWS, ts=cseq, term=1, cseq=cseq, part=part, tags={"text": "x" * characters}, body=body
        )

    large = MAX_PATTERN_STEPS // 64
    parts = [sized(4, 1, part=BatchPart(4, 0, 2)), sized(5, large, part=BatchPart(4, 1, 2))]
    passing = EntryFilter(RecordFilter("a filter", evaluate, pattern_length=64))
    passing.add(log([sized(1, large - 1024), sized(2, large), sized(3, 1, bytes(large)), *parts]))
    assert [type(entry) for entry in passing.taken()] == [LeftOut, Entry, LeftOut, Entry, Entry]
    assert looked_at == [1, 3, 4]


def test_a_filter_knows_the_length_of_its_patterns():
    where = compile_record_filter('a like "%b_" and not (a not like "\\\\%") or a == "text"')
    assert where.pattern_length == 5
    assert compile_record_filter("true").pattern_length == 0
