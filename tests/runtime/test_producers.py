"""What is remembered of producers, for how long, and how that survives in snapshots."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.runtime.errors import BadRecord, FormatTooNew, OutcomeUnknown
from tidewal.runtime.ownership import producers
from tidewal.runtime.ownership.producers import (
    EXPIRY_MS,
    REMEMBERED_PER_PRODUCER,
    BatchOutcome,
    ProducerTable,
    given_up,
)


def test_a_number_too_old_to_tell_is_unknown_and_a_new_one_never_happened():
    table = ProducerTable()
    for pseq in range(REMEMBERED_PER_PRODUCER + 10):
        table.remember("p", pseq, BatchOutcome(pseq, 1), 0)
    for pseq in range(10):
        with pytest.raises(OutcomeUnknown):
            table.find("p", pseq)
    assert table.find("p", 10) == BatchOutcome(10, 1)
    assert table.find("p", REMEMBERED_PER_PRODUCER + 10) is None
    assert table.find("stranger", 5) is None


def test_what_is_forgotten_says_up_to_where_it_happened():
    table = ProducerTable()
    for pseq in range(0, 4 * REMEMBERED_PER_PRODUCER, 2):
        table.remember("p", pseq, BatchOutcome(pseq, 1), 0)
    with pytest.raises(OutcomeUnknown) as caught:
        table.find("p", 4)
    assert caught.value.fields["forgotten"] == 2 * REMEMBERED_PER_PRODUCER - 2


def test_digests_are_kept_and_tables_without_them_are_read():
    table = ProducerTable()
    table.remember("p", 1, BatchOutcome(5, 2, 77), 0)
    [page] = table.pages()
    assert ProducerTable.from_bytes(page).find("p", 1) == BatchOutcome(5, 2, 77)
    older = msgpack.packb((1, [("p", 0, -1, [(1, (5, 2))])]))
    assert ProducerTable.from_bytes(older).find("p", 1) == BatchOutcome(5, 2)


def test_a_producer_silent_for_too_long_is_known_only_by_its_last_number():
    table = ProducerTable()
    table.remember("quiet", 5, BatchOutcome(1, 1), 0)
    table.remember("other", 1, BatchOutcome(2, 1), EXPIRY_MS)
    assert table.find("quiet", 5) == BatchOutcome(1, 1)
    table.remember("other", 2, BatchOutcome(3, 1), EXPIRY_MS + 1)
    with pytest.raises(OutcomeUnknown):
        table.find("quiet", 5)
    assert table.find("quiet", 6) is None
    table.remember("quiet", 6, BatchOutcome(4, 1), EXPIRY_MS + 2)
    with pytest.raises(OutcomeUnknown):
        table.find("quiet", 5)
    assert table.find("quiet", 6) == BatchOutcome(4, 1)


def test_outcomes_and_names_are_bounded(monkeypatch):
    monkeypatch.setattr(producers, "OUTCOMES_MAX", 50)
    monkeypatch.setattr(producers, "PRODUCERS_MAX", 20)
    table = ProducerTable()
    for number in range(100):
        for pseq in (1, 2):
            table.remember(f"p{number}", pseq, BatchOutcome(number, 1), number)
    assert table.find("p99", 2) == BatchOutcome(99, 1)
    with pytest.raises(OutcomeUnknown):
        table.find("p70", 2)
    assert table.find("p0", 2) is None  # forgotten altogether
    assert sum(len(page) for page in table.pages()) < 2_000


@pytest.mark.slow
@given(st.permutations(range(1, 9)))
def test_numbers_in_any_order_make_no_number_forgotten_that_never_happened(order):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(producers, "REMEMBERED_PER_PRODUCER", 4)
        table = ProducerTable()
        for pseq in order:
            table.remember("p", pseq, BatchOutcome(pseq, 1), 0)
        for pseq in range(5, 9):
            assert table.find("p", pseq) == BatchOutcome(pseq, 1)
        for pseq in range(9, 12):
            assert table.find("p", pseq) is None


steps = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 30), st.integers(0, 2**62)), max_size=80)


@pytest.mark.slow
@given(steps, st.integers(1, 9))
def test_the_pages_of_a_snapshot_are_the_table(history, page):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(producers, "REMEMBERED_PER_PRODUCER", 4)
        patch.setattr(producers, "OUTCOMES_MAX", 8)
        patch.setattr(producers, "OUTCOMES_PER_PAGE", page)
        table, copy = ProducerTable(), ProducerTable()
        for now, (name, pseq, ts) in enumerate(history):
            table.remember(name, pseq, BatchOutcome(ts, 1), now)
        for data in table.pages():
            copy.merge(ProducerTable.from_bytes(data))

        def answer(of: ProducerTable, name: str, pseq: int) -> BatchOutcome | str | None:
            try:
                return of.find(name, pseq)
            except OutcomeUnknown:
                return "unknown"

        for name in "abcd":
            for pseq in range(32):
                assert answer(copy, name, pseq) == answer(table, name, pseq)


@given(st.one_of(st.binary(max_size=40), st.sampled_from([(0, []), (1, 3), (1, [("p", 1)]), (1, [("p", 0, 0, [1])])])))
def test_a_damaged_snapshot_is_a_bad_record(data):
    wire = data if isinstance(data, bytes) else msgpack.packb(data)
    with pytest.raises((BadRecord, FormatTooNew)):  # by chance it may begin as one of a later version
        ProducerTable.from_bytes(wire)


def test_a_snapshot_of_a_later_version_says_to_upgrade():
    with pytest.raises(FormatTooNew, match="upgrade"):
        ProducerTable.from_bytes(msgpack.packb((producers.VERSION + 1, [])))


@pytest.mark.parametrize(("channel", "found"), [("a", BatchOutcome(5, 2, 7, 3)), ("b", None)])
def test_the_first_version_told_of_parts_in_other_channels(channel, found):
    page = msgpack.packb((1, [("p", 0, -1, [(1, (5, 2, 7, ("a", "c"), 3)), (2, (6, 1, 8))])]))
    table = ProducerTable.from_bytes(page, channel)
    assert table.find("p", 1) == found
    assert table.find("p", 2) == BatchOutcome(6, 1, 8)


def test_a_number_that_was_given_up_replaces_the_part_that_was_written_before():
    table = ProducerTable()
    table.remember("p", 1, BatchOutcome(5, 2, 7, channels=2), 0)
    table.merge(ProducerTable.from_bytes(given_up("p", 1)))
    assert table.find("p", 1).rows == 0
    table.merge(ProducerTable.from_bytes(table.pages()[0]))
    assert table.find("p", 1).rows == 0
