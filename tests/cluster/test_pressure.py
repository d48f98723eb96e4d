"""What follows from what is used of limits: a pure function of the reports and of what was refused before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.runtime.cluster.pressure import (
    ROW_MEMORY,
    Throttle,
    Usage,
    WaterMarks,
    throttle_of,
    throttles_of,
    usages_in,
)

BOUND = 1_000
LIMITS = ("one", "another")
MARKS = {"one": WaterMarks(0.8, 0.9), "another": WaterMarks(0.85, 0.95)}

values = st.integers(0, 1_200)
parts = st.integers(1, 100)
marks = st.tuples(parts, parts).map(lambda each: WaterMarks(min(each) / 100, max(each) / 100))


def usage(value: int, **of: str) -> Usage:
    return Usage(of.pop("limit", "one"), value, BOUND, **of)


def walk(of: WaterMarks, used: list[int]) -> list[Throttle | None]:
    """What follows from one value after another."""
    found: list[Throttle | None] = []
    refused = False
    for value in used:
        throttle = throttle_of(usage(value), of, refused=refused)
        refused = throttle is not None and throttle.refuses
        found.append(throttle)
    return found


@given(marks, st.lists(values, max_size=40))
def test_writes_are_refused_from_the_high_mark_until_below_the_low_one_and_never_between(of, used):
    low, high = int(of.low * BOUND), int(of.high * BOUND)
    refused = False
    for value, throttle in zip(used, walk(of, used), strict=True):
        refused = value >= low and (refused or value >= high)
        assert (throttle is not None and throttle.refuses) == refused
        assert (throttle is None) == (value < low)


@given(marks, st.lists(values, max_size=60))
def test_nothing_flaps(of, used):
    """Each time that writes come back, and each time that they are refused, the value has gone all the way from one
    mark to the other."""
    low, high = int(of.low * BOUND), int(of.high * BOUND)
    states = [throttle is not None and throttle.refuses for throttle in walk(of, used)]
    turns = sum(now != before for before, now in zip([False, *states], states, strict=False))
    swings, up = 0, False
    for value in used:
        if (value < low) if up else (value >= high):
            up, swings = not up, swings + 1
    assert turns == swings


@given(marks, values, values, st.booleans())
def test_more_use_never_lets_more_in(of, value, other, refused):
    less, more = sorted((value, other))
    before, after = (throttle_of(usage(each), of, refused=refused) for each in (less, more))
    assert (1.0 if after is None else after.factor) <= (1.0 if before is None else before.factor)


@pytest.mark.parametrize(
    ("value", "factor"), [(799, None), (800, 1.0), (820, 0.8), (850, 0.5), (899, 0.01), (900, 0.0)]
)
def test_between_the_marks_it_goes_down_in_a_line(value, factor):
    throttle = throttle_of(usage(value), MARKS["one"], refused=False)
    assert (None if throttle is None else throttle.factor) == (factor if factor is None else pytest.approx(factor))


@given(st.lists(st.tuples(st.sampled_from(LIMITS), values, st.sampled_from("ab")), max_size=6))
def test_a_member_that_reports_no_more_refuses_nothing(reports):
    usages = [usage(value, limit=limit, node=node) for limit, value, node in reports]
    found = throttles_of(usages, MARKS, {each.subject for each in usages})
    without = throttles_of([each for each in usages if each.node != "a"], MARKS, set(found))
    assert all(throttle.usage.node == "b" for throttle in without.values())
    assert throttles_of([], MARKS, set(found)) == {}


def test_one_member_is_not_refused_for_what_another_was():
    found = throttles_of([usage(850, node="a"), usage(850, node="b")], MARKS, {("one", "a", "")})
    assert {subject: throttle.refuses for subject, throttle in found.items()} == {
        ("one", "a", ""): True,
        ("one", "b", ""): False,
    }


anything = st.recursive(
    st.none() | st.integers() | st.text(max_size=3), lambda each: st.lists(each) | st.dictionaries(st.text(), each)
)


@given(anything)
def test_any_report_is_read_as_what_it_has_of_limits(report):
    for each in usages_in(report, "a"):
        assert each.bound > 0
        assert report[each.limit] == [each.value, each.bound]


def test_reports_come_as_lists_and_limits_of_later_versions_are_passed_over():
    found = usages_in({"one": [950, BOUND], "later": (999, BOUND), "off": [5, 0], "odd": ["x", 1]}, "a")
    assert [(each.limit, each.value) for each in found] == [("one", 950), ("later", 999)]
    assert list(throttles_of(found, MARKS, set())) == [("one", "a", "")]


@pytest.mark.parametrize(
    ("loaded", "limit", "concerned"),
    [([1, 2], ROW_MEMORY, [1, 2]), ([1, "x"], ROW_MEMORY, [1]), ([], ROW_MEMORY, []), ([1], "one", [1, 2, 3])]
    + [(other, ROW_MEMORY, [1, 2, 3]) for other in (None, 1, {"1": 2}, "12")],
)
def test_a_report_concerns_the_collections_that_it_names(loaded: object, limit: str, concerned: list[int]) -> None:
    [found] = usages_in({limit: [950, BOUND]}, "a", loaded)
    assert [id for id in (1, 2, 3) if found.concerns(id)] == concerned
