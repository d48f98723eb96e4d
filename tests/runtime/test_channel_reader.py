"""A channel reader lets through what counts: nothing behind a fence of a lower term, nothing twice, no half batch."""

from __future__ import annotations

import dataclasses

import pytest

from tidewal.runtime.errors import TidewalError
from tidewal.runtime.log.record import BatchPart, Record, RecordType, encode
from tidewal.runtime.log.wal import Entry
from tidewal.runtime.streams.channel_reader import BAD_RECORDS_MAX, ChannelReader, Granted


def log(*records: Record | bytes) -> list[Entry]:
    return [
        Entry(number.to_bytes(8, "big"), 0, record if isinstance(record, bytes) else encode(record))
        for number, record in enumerate(records, 1)
    ]


def row(term: int, cseq: int, body: bytes = b"", part: BatchPart | None = None) -> Record:
    return Record(RecordType.ROWS, ts=cseq, term=term, cseq=cseq, body=body, part=part)


def seen(records: list[Record]) -> list[tuple[int, int]]:
    return [(record.term, record.cseq) for record in records]


def test_duplicates_and_zombies_are_dropped_and_counted():
    reader = ChannelReader("c")
    entries = log(row(1, 1), row(1, 2), row(1, 2), row(1, 1), row(2, 1), row(1, 3), row(2, 2), row(1, 4))
    assert seen(reader.accept(entries)) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert (reader.counts.records, reader.counts.duplicates, reader.counts.fenced) == (8, 2, 2)
    assert reader.position == (entries[-1].id, 2, 2)


def test_how_entries_are_cut_into_batches_changes_nothing(rng):
    of = 3
    records: list[Record | bytes] = []
    for cseq in range(1, 40, 4):
        records += [row(1, cseq + n, part=BatchPart(cseq, n, of)) for n in range(of - rng.randint(0, 1))]
        records += [row(1, cseq + 3), b"junk", row(1, rng.randint(1, cseq + 3))]
    entries = log(*records)
    whole = seen(ChannelReader("c").accept(entries))
    for _ in range(20):
        reader = ChannelReader("c")
        pieces: list[tuple[int, int]] = []
        rest = entries
        while rest:
            count = rng.randint(1, len(rest))
            pieces += seen(reader.accept(rest[:count]))
            rest = rest[count:]
        assert pieces == whole


def test_a_reader_that_starts_behind_a_fence_takes_its_term_from_the_catalog():
    entries = log(row(1, 1), row(2, 1), row(1, 2), row(2, 2))
    fences = {1: entries[0].id, 2: entries[1].id}
    assert seen(ChannelReader("c", fences=fences).accept(entries[2:])) == [(2, 2)]
    assert seen(ChannelReader("c").accept(entries[2:])) == [(1, 2), (2, 2)]
    assert seen(ChannelReader("c", fences=fences).accept(entries)) == [(1, 1), (2, 1), (2, 2)]


def test_a_batch_is_seen_whole_or_not_at_all():
    first = [row(1, n, part=BatchPart(9, n - 1, 3)) for n in (1, 2, 3)]
    reader = ChannelReader("c")
    entries = log(*first)
    assert reader.accept(entries[:2]) == []
    assert reader.position == (b"", 0, 0)  # to go on from here is to read the batch from its beginning
    assert seen(reader.accept(entries[2:])) == [(1, 1), (1, 2), (1, 3)]
    assert reader.position == (entries[2].id, 1, 3)


@pytest.mark.parametrize(
    "breaker",
    [
        Record(RecordType.TIME_TICK, ts=3, term=1, cseq=3),
        row(1, 3, part=BatchPart(10, 0, 1)),
        row(2, 1),
        row(1, 3, part=BatchPart(9, 2, 4)),
    ],
)
def test_what_a_half_batch_is_followed_by_ends_it(breaker):
    half = [row(1, n, part=BatchPart(9, n - 1, 4)) for n in (1, 2)]
    reader = ChannelReader("c")
    accepted = reader.accept(log(*half, breaker, row(3, 7)))
    assert all(record.part is None or record.part.of == 1 for record in accepted)
    assert seen(accepted)[-1] == (3, 7)
    assert (1, 1) not in seen(accepted)


def test_a_part_whose_beginning_is_not_there_is_dropped():
    assert ChannelReader("c").accept(log(row(1, 5, part=BatchPart(9, 1, 2)))) == []


def test_a_reader_that_begins_within_a_batch_gets_the_rest_of_it():
    entries = log(*(row(1, n, part=BatchPart(9, n - 1, 4)) for n in (1, 2, 3, 4)), row(1, 5))
    for after in range(5):
        reader = ChannelReader("c", after=(1, after))
        assert reader.accept(entries[:3]) == []  # the batch may still turn out to be none
        assert seen(reader.accept(entries[3:])) == [(1, n) for n in range(after + 1, 6)]
    assert seen(ChannelReader("c", after=(1, 1)).accept([*entries[1:3], entries[4]])) == [(1, 5)]
    assert seen(ChannelReader("c", after=(1, 1)).accept(entries[2:])) == [(1, 5)]  # one part is missing


def test_unowned_records_pass_unchecked():
    event = Record(RecordType.FLUSHED, ts=1)
    assert len(ChannelReader("c").accept(log(event, event))) == 2


def test_a_bad_record_is_handed_over_counted_and_skipped():
    handed: list[tuple[str, bytes, str]] = []
    reader = ChannelReader("c", on_bad=lambda c, entry, error: handed.append((c, entry.id, str(error.reason))))
    entries = log(row(1, 1), b"junk", row(1, 2), encode(row(1, 3, b"body"))[:-1])
    assert seen(reader.accept(entries)) == [(1, 1), (1, 2)]
    assert reader.counts.bad == 2
    assert reader.position[0] == entries[-1].id
    assert [channel for channel, _, _ in handed] == ["c"] * reader.counts.bad
    assert [(id, reason) for _, id, reason in handed] == [(entries[1].id, "length"), (entries[3].id, "checksum")]


def intact_and_unreadable() -> bytes:
    """A record of a future version."""
    return b"TW\x63" + encode(row(1, 9))[3:]


def test_many_records_of_an_unknown_kind_stop_the_reader_and_a_good_one_starts_the_count_anew():
    reader = ChannelReader("c")
    almost = [intact_and_unreadable()] * (BAD_RECORDS_MAX - 1)
    reader.accept(log(*almost, row(1, 1), *almost, row(1, 2)))
    with pytest.raises(TidewalError, match="intact records of c cannot be read"):
        reader.accept(log(*almost, intact_and_unreadable()))


def test_garbage_stops_no_reader_however_much_there_is():
    reader = ChannelReader("c")
    garbage = [b"junk", b"x" * 50, encode(row(1, 3, b"body"))[:-1]] * BAD_RECORDS_MAX
    assert seen(reader.accept(log(row(1, 1), *garbage, row(1, 2)))) == [(1, 1), (1, 2)]
    assert reader.counts.bad == len(garbage)


class GrantsLater:
    """A catalog that is behind until it is asked to catch up."""

    def __init__(self, known: Granted, then: Granted) -> None:
        self._known, self._then = known, then
        self.asked = 0

    def granted(self, pchannel: str) -> Granted:
        return self._known

    async def catch_up(self) -> None:
        self._known = self._then
        self.asked += 1


async def test_a_record_that_no_owner_was_granted_is_bad_once_the_catalog_was_read():
    entries = log(row(1, 1), row(0, 0), row(2, 1), row(2**62, 1), row(2, 2), row(3, 1), row(2, 3), row(2, 4))
    catalog = GrantsLater(Granted(1), Granted(2, fences={2: entries[2].id}))
    reader = ChannelReader("c", grants=catalog)
    counts, doubtful = reader.accept_granted(entries[:-1])
    assert (seen(counts), reader.cseq) == ([(1, 1)], 1), "it stands behind what it handed out, and no further"
    await reader.learn_grants()
    assert seen(reader.accept(doubtful)) == [(2, 1), (2, 2), (2, 3)]
    assert reader.counts.bad == 3
    assert reader.term == 2
    assert catalog.asked == 1, "what was read together is judged by one look"
    counts, doubtful = reader.accept_granted(entries[-1:])
    assert (seen(counts), doubtful) == ([(2, 4)], ())
    assert catalog.asked == 1


def test_a_record_beyond_its_grant_or_before_its_fence_is_bad():
    early, fence, beyond, good = log(row(2, 1), row(2, 1), dataclasses.replace(row(2, 2), ts=101), row(2, 2))
    reader = ChannelReader("c", granted=Granted(2, 100, {2: fence.id}))
    assert [record.id for record in reader.accept([early, fence, beyond, good])] == [fence.id, good.id]
    assert reader.counts.bad == 2
