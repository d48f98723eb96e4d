"""What a member remembers as delivered: single acknowledgements add up to cumulative ones, in any order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.runtime.errors import InvalidRequest
from tidewal.runtime.groups.progress import Change, GroupProgress
from tidewal.runtime.groups.unacknowledged import Unacknowledged
from tidewal.runtime.log.wal import Delivered, Entry


def id_of(number):
    return number.to_bytes(8, "big")


def batch(numbers):
    return Delivered("a", [Entry(id_of(n), 0, b"") for n in numbers], 1)


@pytest.mark.slow
@given(st.data())
def test_what_is_stored_is_what_was_acknowledged(data):
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    before = data.draw(st.sets(st.integers(1, 20)))  # acknowledged one by one in an earlier assignment epoch
    unacknowledged, progress = Unacknowledged(b""), GroupProgress()
    progress.apply(Change("g", "a", None, tuple(id_of(n) for n in before)))
    batches, at = [], 0
    for size in sizes:
        numbers = [n for n in range(at + 1, at + size + 1) if n not in before]
        at += size
        if size:
            unacknowledged.delivered(batch(numbers).entries, id_of(at))
        if numbers:
            batches.append(numbers)
    done = {n for n in before if n <= at}
    in_flight = []

    def store(plan, acknowledged):
        progress.apply(Change("g", "a", plan.upto, plan.ids))
        unacknowledged.stored(plan)
        done.update(acknowledged)
        assert {n for n in range(1, at + 1) if id_of(n) <= progress.acked_to or id_of(n) in progress.acked} == done

    for _ in range(data.draw(st.integers(0, 12)) if batches else 0):
        numbers = data.draw(st.sampled_from(batches))
        ids = data.draw(st.none() | st.sets(st.sampled_from(numbers), min_size=1))
        if ids is None:  # of a part of it
            end = data.draw(st.integers(1, len(numbers)))
            numbers = numbers[data.draw(st.integers(0, end - 1)) : end]
        plan = unacknowledged.plan(batch(numbers), None if ids is None else [id_of(n) for n in sorted(ids)])
        acknowledged = set(range(1, numbers[-1] + 1)) if ids is None else ids
        if plan is None:
            assert acknowledged <= done, "it says this is stored, and it is not"
            continue
        in_flight.append((plan, acknowledged))
        while in_flight and data.draw(st.booleans()):
            store(*in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1))))
    for plan, acknowledged in in_flight:
        store(plan, acknowledged)
    gap = next((n for n in range(1, at + 1) if n not in done), at + 1)
    prefix = max((n for numbers in batches for n in numbers if n < gap), default=0)
    said = unacknowledged.overdue() or progress.acked_to
    assert int.from_bytes(said, "big") >= prefix, "what is done without a gap is not said cumulatively"
    assert bool(unacknowledged) == any(n not in done for numbers in batches for n in numbers)


def test_what_is_left_out_behind_a_batch_while_its_acknowledgement_is_under_way_is_done_with_it():
    unacknowledged = Unacknowledged(b"")
    unacknowledged.delivered(batch([1]).entries, id_of(1))
    plan = unacknowledged.plan(batch([1]), None)
    unacknowledged.delivered((), id_of(3))  # 2 and 3 were acknowledged one by one before
    unacknowledged.stored(plan)
    assert not unacknowledged
    assert unacknowledged.overdue() == id_of(3)


def test_single_ids_of_a_part_are_refused():
    unacknowledged = Unacknowledged(b"")
    unacknowledged.delivered(batch([1, 2, 3]).entries, id_of(3))
    for part in ([1, 2], [2, 3]):
        with pytest.raises(InvalidRequest, match="whole batch"):
            unacknowledged.plan(batch(part), [id_of(2)])


def test_an_id_of_another_batch_is_refused():
    unacknowledged = Unacknowledged(b"")
    for numbers in ([1, 2], [3, 4]):
        unacknowledged.delivered(batch(numbers).entries, id_of(numbers[-1]))
    with pytest.raises(InvalidRequest):
        unacknowledged.plan(batch([1, 2]), [id_of(3)])


def test_single_acknowledgements_of_a_big_batch_cost_no_more_each():
    """Ten thousand of them in one batch: quadratic work would take minutes."""
    unacknowledged = Unacknowledged(b"")
    numbers = batch(range(1, 10_001))
    unacknowledged.delivered(numbers.entries, id_of(10_000))
    for entry in reversed(numbers.entries):
        plan = unacknowledged.plan(numbers, [entry.id])
        unacknowledged.stored(plan)
    assert plan.upto == id_of(10_000)
    assert not unacknowledged
