"""What takes turns: each of it has one, and a run tries what is there besides."""

from __future__ import annotations

from itertools import chain

import pytest

from tests.turns import cases_in_turn, has_turn, in_turn


@pytest.mark.parametrize("of", [2, 3, 5])
def test_each_case_is_tried_by_one_of_so_many_runs(of: int) -> None:
    cases = cases_in_turn("abcde", of=of)
    tried = [[case.values[0] for case in cases if has_turn(_marks(case), turn)] for turn in range(7, 7 + of)]
    assert sorted(chain(*tried)) == list("abcde")
    assert all(tried)


def test_a_test_with_two_turns_is_tried_when_both_are_there() -> None:
    marks = [*_marks(cases_in_turn("ab")[1]), *_marks(cases_in_turn("abc")[2])]
    assert [turn for turn in range(12) if has_turn(marks, turn)] == [5, 11]
    assert has_turn([], 1)


@pytest.mark.parametrize("of", [2, 3])
def test_what_is_chosen_within_a_test_that_has_a_turn_is_tried_too(of: int) -> None:
    marks = _marks(cases_in_turn(range(of))[1])
    chosen = {choice for turn in range(36) if has_turn(marks, turn) for _, choice in in_turn("abcd"[:of], turn)}
    assert chosen == {*"abcd"[:of]}


def _marks(case: object) -> list[pytest.Mark]:
    assert isinstance(case, type(pytest.param()))
    return [mark.mark if isinstance(mark, pytest.MarkDecorator) else mark for mark in case.marks]
